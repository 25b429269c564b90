"""The task 'classification' on image stores: files and stacks, two classes and more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from data_prep.images.stack import Picture, write_stack
from fedbn.federation.experiment import Experiment
from fedbn.federation.simulation import read_sites, run_federation
from fedbn.federation.site import Site
from fedbn.tasks.data import DataError
from fedbn.tasks.loading import Loading

SCALE = {"_target_": "ScaleIntensityd", "keys": "image"}
NOISE = {"_target_": "RandGaussianNoised", "keys": "image", "prob": 1.0}


def experiment(classes, channels=1, **more):
    args = {"spatial_dims": 2, "in_channels": channels, "out_channels": len(classes)}
    args |= {"init_features": 4, "growth_rate": 2, "block_config": [1, 1]}
    task = {"name": "classification", "classes": classes, "preprocessing": [SCALE]}
    content = {
        "task": task | {"augmentation": [NOISE]} | more,
        "sites": ["NORTH", "EAST"],
        "network": {"name": "DenseNet", "args": args},
        "rounds": 1,
        "training": {"batch_size": 4, "class_weights": "balanced"},
        "n_folds": 2,
    }
    return Experiment.model_validate(content)


@pytest.fixture(scope="session")
def stacks(tmp_path_factory):
    """Return the folder of two stacks of pictures in three classes, with a test section."""
    folder = tmp_path_factory.mktemp("stacks")
    rng = np.random.default_rng(0)
    for site in ("NORTH", "EAST"):
        sections = ["training"] * 12 + ["test"] * 6
        pictures = [Picture("abc"[k % 3], f"p{k:02d}", s) for k, s in enumerate(sections)]
        images = [
            rng.integers(0, 80, (16, 16, 3), dtype=np.uint8) + np.uint8(60 * (k % 3))
            for k in range(18)
        ]
        write_stack(
            folder / site,
            site=site,
            images=images,
            pictures=pictures,
            classes="abc",
            source={},
            digest="x",
        )
    return folder


def test_three_classes_of_a_stack(stacks):
    digests = set()
    for workers in (0, 2):
        found = experiment(["a", "b", "c"], 3)
        found.task.load_as(Loading(workers=workers))
        result = run_federation(found, read_sites(stacks, found))
        digests.add(result.report["shared_weights_sha256"])
    assert len(digests) == 1
    of_site = result.report["sites"]["NORTH"]
    assert (of_site["n_train_subjects"], of_site["n_test_subjects"]) == (12, 6)
    assert set(of_site["federated"]["subject"]) >= {"accuracy", "auc", "recall_0", "recall_2"}


def test_a_row_of_a_stack_is_the_picture(stacks):
    found = experiment(["a", "b", "c"], 3, preprocessing=[])
    store = read_sites(stacks, found)["EAST"]
    samples = found.task.samples(store, np.arange(18), {}, torch.device("cpu"))
    (batch,) = samples.batches(18)
    assert torch.equal(batch.inputs, torch.from_numpy(store.stack().copy()).movedim(-1, 1).float())
    assert batch.targets.tolist() == [k % 3 for k in range(18)]


def test_a_patient_s_images_are_one_unit_with_their_mean(stores):
    found = experiment(["round", "lobed"])
    site = Site("NORTH", read_sites(stores(2), found)["NORTH"], found)
    site.check_network()
    assert len(site.test.owners) > len(set(site.test.owners))
    scores = site.score()
    assert len(scores.units) == len(set(site.test.owners))
    assert scores.columns["p_0"] + scores.columns["p_1"] == pytest.approx(1)


def test_what_does_not_fit_is_one_sentence(stores, stacks):
    other = experiment(["lobed", "round"])
    with pytest.raises(DataError, match="are round, lobed, the job's are lobed, round; make"):
        read_sites(stores(2), other)
    found = experiment(["round", "lobed"])
    store = read_sites(stores(2), found)["NORTH"]
    images = (replace(store.images[0], class_name=None), *store.images[1:])
    with pytest.raises(DataError, match="1 of its 13 images have no class"):
        found.task.check_store(replace(store, images=images))
    three = experiment(["a", "b", "c"], 1)
    with pytest.raises(DataError, match="cannot take the site's images of 3 channels"):
        Site("EAST", read_sites(stacks, three)["EAST"], three).check_network()
    with pytest.raises(ValueError, match="foreground needs masks"):
        experiment(["a", "b"], patch={"size": [8, 8], "foreground": 0.5})
