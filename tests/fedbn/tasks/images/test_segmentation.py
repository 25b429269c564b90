"""The task 'segmentation': scores with a stated rule for absent classes, sentences, statistics."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedbn.core.batches import Batch
from fedbn.federation.simulation import run_federation
from fedbn.federation.site import Site
from fedbn.tasks.base import Scores
from fedbn.tasks.data import DataError
from fedbn.tasks.images.samples import ImageBatch
from fedbn.tasks.images.segmentation import SegmentationTask
from fedbn.tasks.loading import Loading

TASK = SegmentationTask(classes=["organ", "core"])


class Given:
    """Samples of one image a batch, whose 'network' output is what is given."""

    def __init__(self, truths, spacing=(1.0, 1.0)):
        self.truths, self.spacing = truths, spacing
        self.owners = np.arange(len(truths))

    def __len__(self):
        return len(self.truths)

    def batches(self, batch_size, seed=None):
        for k, truth in enumerate(self.truths):
            batch = ImageBatch(
                torch.tensor([[float(k)]]), truth[None, None], self.owners[k : k + 1]
            )
            batch.spacing = self.spacing
            yield batch


class Says(nn.Module):
    """A network that answers with given masks."""

    def __init__(self, masks):
        super().__init__()
        self.masks, self.weight = masks, nn.Parameter(torch.zeros(1))

    def forward(self, inputs):
        mask = self.masks[int(inputs[0, 0])]
        return nn.functional.one_hot(mask[None], 3).movedim(-1, 1).float() + 0 * self.weight


def square(corner, size, label=1, of=16):
    mask = torch.zeros(of, of, dtype=torch.int64)
    mask[corner : corner + size, corner : corner + size] = label
    return mask


EMPTY = square(0, 0)


def score(predicted, truth, **more):
    return TASK.score(Says(predicted), Given(truth, **more))


def test_dice_and_distances_of_a_shifted_square_in_mm():
    scores = score([square(5, 4)], [square(4, 4)], spacing=(1.0, 2.0))
    assert scores.columns["dice_1"] == pytest.approx(2 * 9 / 32)
    expected = math.hypot(1, 2)
    assert scores.columns["hd95_1"] == pytest.approx(expected, abs=0.25)
    voxels = score([square(5, 4)], [square(4, 4)]).columns["hd95_1"]
    assert voxels < scores.columns["hd95_1"]


def test_absent_classes_are_left_out_and_counted_and_no_mean_is_nan():
    both = square(2, 4) + square(10, 3, 2)
    truths = [both, square(2, 4), square(2, 4), both]
    said = [both, square(2, 4), both, square(2, 4)]
    scores = score(said, truths)
    # core: right, absent in both, only predicted, only true
    assert scores.columns["dice_2"].tolist()[0] == 1
    assert np.isnan(scores.columns["dice_2"][1])
    assert scores.columns["dice_2"].tolist()[2:] == [0, 0]
    assert scores.columns["surface_dice_2"].tolist()[2:] == [0, 0]
    assert np.isnan(scores.columns["hd95_2"]).tolist() == [False, True, True, True]
    found = TASK.measure(scores)["subject"]
    assert found["dice_2"] == pytest.approx(1 / 3)
    assert found["left_out_dice_2"] == 1
    assert found["left_out_hd95_2"] == 3
    assert found["dice"] == pytest.approx((1 + 1 / 3) / 2)
    assert found["hd95_2"] == 0
    assert (found["n"], found["reasons"]) == (4, {})
    assert TASK.follow(scores) == {"subject_dice": found["dice"]}


def test_a_class_that_no_subject_has_is_undefined_with_its_reason():
    found = TASK.measure(score([square(2, 4)], [square(2, 4)]))["subject"]
    assert math.isnan(found["dice_2"])
    assert "core is absent in all of the 1 subjects" in found["reasons"]["dice_2"]
    assert found["dice"] == 1
    nothing = TASK.measure(score([EMPTY], [EMPTY]))["subject"]
    assert math.isnan(nothing["dice"])
    assert nothing["reasons"]["dice"] == "no class has a score"


def test_a_unit_is_the_mean_of_its_images_in_which_a_class_is_defined():
    given = Given([square(2, 4), EMPTY, square(2, 4)])
    given.owners = np.array([3, 3, 7])
    scores = TASK.score(Says([square(2, 4), EMPTY, EMPTY]), given)
    assert scores.units.tolist() == [3, 7]
    assert scores.columns["dice_1"].tolist() == [1, 0]


def test_changed_counts_units_that_are_better_and_worse():
    def scores(*dice):
        columns = {f"{m}_{k}": np.array(dice) for m in TASK.scores for k in (1, 2)}
        return Scores(np.arange(len(dice)), columns)

    found = TASK.changed(scores(0.5, 0.5, 0.5, np.nan), scores(0.6, 0.4, 0.5, np.nan))
    assert found == {"corrected": 1, "lost": 1, "n": 4}


def test_an_output_that_is_not_finite_is_an_error():
    network = Says([square(2, 4)])
    network.weight.data[:] = np.nan
    with pytest.raises(FloatingPointError, match="no finite score"):
        TASK.score(network, Given([square(2, 4)]))


def test_no_class_weights_but_the_losss():
    from fedbn.core.training import TrainingSettings

    with pytest.raises(ValueError, match='give the task\'s loss a "weight"'):
        TASK.criterion(TrainingSettings(class_weights="balanced"), Given([EMPTY]))
    loss = {"_target_": "torch.nn.CrossEntropyLoss", "weight": [1, 2, 3]}
    weighted = SegmentationTask(classes=["a", "b"], loss=loss)
    value = weighted.criterion(TrainingSettings(), Given([EMPTY]))(
        torch.zeros(2, 3, 4, 4), Batch(None, torch.ones(2, 1, 4, 4).long(), np.arange(2))
    )
    assert value == pytest.approx(math.log(3))


CROP = {"_target_": "RandSpatialCropd", "keys": ["image", "label"], "roi_size": [16, 80]}
RESIZE = {"_target_": "Resized", "keys": "image", "spatial_size": [32, 32]}
BLUR_MASKS = {"_target_": "ScaleIntensityd", "keys": "label", "minv": 0, "maxv": 9}
UNEVEN = {"_target_": "CropForegroundd", "keys": ["image", "label"], "source_key": "label"}


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"patch": {"size": [65, 16]}}, "patch of 65 x 16 is larger than an image of 64 x 64"),
        ({"augmentation": [CROP]}, "RandSpatialCropd of 16 x 80 is larger than an image of 64 x"),
        ({"patch": {"size": [8, 8, 8]}}, "images have 2 axes, but patches of 8 x 8 x 8 have 3"),
        ({"preprocessing": [RESIZE]}, "an image is 32 x 32 and its mask 64 x 64"),
        ({"preprocessing": [BLUR_MASKS]}, "label ids from 0 to 9, but the task has ids 0 to 2"),
        ({"preprocessing": [UNEVEN]}, "its images have sizes .* give the task a patch"),
        ({"classes": ["organ"]}, r"label id 2 \(core\), but the task has 1 classes"),
        ({"classes": ["a", "b", "c"]}, r"gives \(1, 3, 64, 64\) for images of 1 channels, 64 x 64"),
        ({"preprocessing": [{"_target_": "Spacingd", "keys": "x", "pixdim": 1}]}, "does not fit"),
    ],
)
def test_what_does_not_fit_is_one_sentence_before_round_0(stores, experiment, task, words):
    from fedbn.federation.simulation import read_sites

    found = experiment(**task)
    with pytest.raises(DataError, match=words) as caught:
        Site("NORTH", read_sites(stores(2), found)["NORTH"], found).check_network()
    assert str(caught.value).startswith("site 'NORTH': ")


def test_three_channels_where_one_is_expected(sites):
    experiment, data = sites()
    args = experiment.network.args | {"in_channels": 3}
    other = experiment.changed(network={"name": "UNet", "args": args})
    with pytest.raises(DataError, match="UNet cannot take the site's images of 1 channels, 64"):
        Site("NORTH", data["NORTH"], other).check_network()


def test_a_missing_mask_and_a_missing_file(sites, stores, tmp_path):
    import shutil

    experiment, data = sites()
    store = data["NORTH"]
    without = replace(store, images=(replace(store.images[0], label=None), *store.images[1:]))
    with pytest.raises(DataError, match=r"1 of its .* images have no mask"):
        experiment.task.check_store(without)
    copy = shutil.copytree(stores(2) / "NORTH", tmp_path / "NORTH")
    next((copy / "images").rglob("*.png")).unlink()
    with pytest.raises(DataError, match="is missing; bring the"):
        experiment.task.read(copy, "NORTH")


def test_instance_norm_is_refused_with_the_way_out(experiment):
    from fedbn.core.normalization import NoBatchNormError
    from fedbn.federation.site import make_network

    found = experiment()
    args = found.network.args | {"norm": "instance"}
    with pytest.raises(NoBatchNormError, match="norm='batch'"):
        make_network(found.changed(network={"name": "UNet", "args": args}))


@pytest.mark.parametrize(
    ("dim", "task"),
    [(2, {}), (3, {"patch": {"size": [16, 16, 16], "foreground": 0.7}, "augmentation": []})],
)
def test_a_federation_learns_and_workers_do_not_change_its_bits(sites, dim, task):
    if dim == 3:
        sliding = {"_target_": "SlidingWindowInferer", "roi_size": [16, 16, 16], "overlap": 0.25}
        task = task | {"inferer": sliding, "scores": ["dice"]}
    digests = []
    for workers in (0, 2):
        experiment, data = sites(dim, **task)
        experiment.task.load_as(Loading(workers=workers))
        result = run_federation(experiment, data)
        digests.append(result.report["shared_weights_sha256"])
        of_site = result.report["sites"]["NORTH"]["federated"]["subject"]
        assert 0 <= of_site["dice"] <= 1
    assert digests[0] == digests[1]
    assert result.report["sites"]["NORTH"]["distances_in"] == ("mm" if dim == 3 else "voxels")


def test_recomputed_statistics_are_those_of_all_training_values(sites):
    experiment, data = sites(augmentation=[])
    running = experiment.changed(statistics="running")
    site = Site("NORTH", data["NORTH"], running)
    result = site.train_round(site.initial_shared(), site.initial_local(), 0)
    kept = {}
    for one in (experiment, running):
        other = Site("NORTH", data["NORTH"], one)
        other.evaluate(result.shared, result.local)
        kept[one.statistics] = other.complete_model()[0]
    first = next(n for n in kept["running"] if n.endswith("running_mean"))
    assert torch.equal(kept["running"][first], result.local[first])
    layer = other.network.get_submodule(first.removesuffix(".running_mean"))
    convolution = next(m for m in other.network.modules() if isinstance(m, nn.Conv2d))
    assert layer.num_features == convolution.out_channels
    batches = [b.inputs for b in other.train_samples.batches(len(other.train_samples))]
    values = convolution(torch.cat(batches)).detach().double().transpose(0, 1).flatten(1)
    assert torch.allclose(kept["recomputed"][first].double(), values.mean(dim=1), atol=1e-6)
    variance = kept["recomputed"][first.replace("mean", "var")].double()
    assert torch.allclose(variance, values.var(dim=1), rtol=1e-5)


def test_a_list_s_own_test_section_wins_over_folds(sites):
    experiment, data = sites()
    store = data["NORTH"]
    names = sorted({image.participant_id for image in store.images})
    of = dict.fromkeys(names, "training") | {names[0]: "test", names[1]: "validation"}
    own = replace(
        store, images=tuple(replace(i, section=of[i.participant_id]) for i in store.images)
    )
    for fold in (0, 3):
        split = experiment.task.split(own, experiment.changed(fold=fold))
        assert (split.test.tolist(), split.validation.tolist()) == ([0], [1])
        assert split.train.tolist() == list(range(2, len(names)))


def test_bf16_is_the_site_s_choice_and_gives_float32(sites):
    experiment, data = sites()
    experiment.task.load_as(Loading(amp="bf16"))
    site = Site("NORTH", data["NORTH"], experiment)
    batch = next(site.train_samples.batches(4, 0))
    outputs = experiment.task.forward(site.network, batch)
    assert outputs.dtype == torch.float32
    assert "amp" not in experiment.model_dump_json()
    assert not torch.equal(outputs, site.network(batch.inputs))


def test_a_study_scores_as_a_run_does_and_pools_sites(sites):
    from fedbn.study.methods import METHODS

    experiment, data = sites(scores=["dice"])
    experiment = experiment.changed(compare_with_alone=False)
    report = run_federation(experiment, data).report["sites"]
    for name in ("fedbn", "fedavg_adabn", "pooled"):
        method = METHODS[name]
        outcomes = method.run(method.experiment(experiment), data)
        for site, found in outcomes.items():
            scores = found.test if hasattr(found, "test") else found
            dice = experiment.task.measure(scores)["subject"]["dice"]
            assert 0 <= dice <= 1
            if name == "fedbn":
                assert dice == report[site]["federated"]["subject"]["dice"]
