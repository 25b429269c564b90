from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from classifier import train_classifier

from data_prep.site_store import StoreError, assign_folds, read_site_store
from fedbn.core.networks import build_network
from fedbn.core.normalization import NoBatchNormError
from fedbn.core.training import derive_seed
from fedbn.federation.site import Preparation, Site, make_network, prepare
from fedbn.tasks.connectome.task import rows_of


@pytest.fixture
def store(data_root):
    return read_site_store(data_root / "NYU")


def same(left, right):
    return list(left) == list(right) and all(torch.equal(left[k], right[k]) for k in left)


def plain_training(store, experiment):
    """Train without any of Site's code: the folds, the z-scores and the loop are written out."""
    ids = [p.participant_id for p in store.participants]
    folds = assign_folds(
        ids, [p.diagnosis for p in store.participants], experiment.n_folds, experiment.seed
    )
    chosen = np.isin(store.sample_participant, np.flatnonzero(folds != experiment.fold))
    features = np.asarray(store.connectomes)[chosen].astype(np.float64)
    mean, std = features.mean(axis=0), features.std(axis=0)
    inputs = torch.from_numpy(np.asarray(store.connectomes)[chosen])
    inputs = (inputs - torch.from_numpy(mean).float()) / torch.from_numpy(std).float()
    targets = torch.from_numpy(store.labels[store.sample_participant[chosen]])
    network = build_network("ConnectomeMLP", experiment.network.args, experiment.seed)
    for number in range(experiment.rounds):
        seed = derive_seed(experiment.seed, store.site, number, "train")
        train_classifier(network, inputs, targets, experiment.training, seed=seed)
    return network.state_dict()


def site_rounds(site):
    """Run all rounds of one site, as its own federation."""
    shared, local = site.initial_shared(), site.initial_local()
    for number in range(site.experiment.rounds):
        result = site.train_round(shared, local, number)
        shared, local = result.shared, result.local
    return {**shared, **local}, result


@pytest.mark.parametrize("policy", ["fedbn", "silobn", "none"])
def test_a_site_on_its_own_is_plain_training(store, experiment, policy):
    settings = experiment(policy=policy, rounds=3)
    found, _ = site_rounds(Site("NYU", store, settings))
    expected = plain_training(store, settings)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-6), name
    assert not same(found, build_network("ConnectomeMLP", settings.network.args, 5).state_dict())


def test_training_alone_is_a_federation_of_one(store, experiment):
    site = Site("NYU", store, experiment(rounds=3))
    _, last = site_rounds(site)
    told = []
    assert site.train_alone(told.append) == last.after["test"]
    assert told == [0, 1, 2]


def test_scores_before_training_are_those_of_the_received_weights(store, experiment):
    site = Site("NYU", store, experiment())
    shared, local = site.initial_shared(), site.initial_local()
    result = site.train_round(shared, local, 0)
    assert result.before == {"test": site.evaluate(shared, local)}
    assert result.after == {"test": site.evaluate(result.shared, result.local)}
    assert result.before != result.after


def test_what_a_round_gives_back_does_not_change_later(store, experiment):
    site = Site("NYU", store, experiment())
    first = site.train_round(site.initial_shared(), site.initial_local(), 0)
    copies = {name: tensor.clone() for name, tensor in {**first.shared, **first.local}.items()}
    site.train_round(first.shared, first.local, 1)
    assert same({**first.shared, **first.local}, copies)


def test_a_round_depends_on_its_arguments_alone(store, experiment):
    """Neither rounds before it, nor the global generators, nor a new process change a bit."""
    site = Site("NYU", store, experiment())
    shared, local = site.initial_shared(), site.initial_local()
    expected = site.train_round(shared, local, 1)
    site.train_round(expected.shared, expected.local, 7)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    again = site.train_round(shared, local, 1)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left as it was"
    anew = Site("NYU", store, experiment()).train_round(shared, local, 1)
    for result in (again, anew):
        assert same(result.shared, expected.shared)
        assert same(result.local, expected.local)
        assert result.after == expected.after
    assert not same(site.train_round(shared, local, 2).shared, expected.shared)


def test_seeds_decide_weights_folds_and_order(store, experiment):
    sites = [Site("NYU", store, experiment(seed=seed)) for seed in (0, 0, 1)]
    assert same(sites[0].initial_shared(), sites[1].initial_shared())
    assert not same(sites[0].initial_shared(), sites[2].initial_shared())
    tests = [site.preparation.split.test.tolist() for site in sites]
    assert tests[0] == tests[1] != tests[2]


def test_all_sites_begin_with_the_same_entries(data_root, experiment):
    sites = [Site(name, read_site_store(data_root / name), experiment()) for name in ("NYU", "UM")]
    assert same(sites[0].initial_local(), sites[1].initial_local())
    assert same(sites[0].initial_shared(), sites[1].initial_shared())


# --------------------------------------------------------------------------- splits and z-scores


def test_subjects_are_disjoint_and_each_is_tested_once(store, experiment):
    tested = []
    for fold in range(4):
        preparation = prepare("NYU", store, experiment(fold=fold))
        train, validation, test = preparation.split
        assert sorted([*train, *test]) == list(range(len(store.participants)))
        assert len(validation) == 0
        tested += test.tolist()
        assert preparation.facts["n_train_subjects"] == len(train)
        assert preparation.facts["n_test_samples"] == 3 * len(test)
    assert sorted(tested) == list(range(20))


def test_the_z_score_is_fitted_on_training_subjects_alone(store, experiment, write_store, tmp_path):
    before = prepare("NYU", store, experiment())

    def edit(rows):
        def change(values, _):
            values[rows] = values[rows] * 50 - 7

        return change

    write_store(tmp_path / "a", "NYU", edit=edit(rows_of(store, before.split.test)))
    write_store(tmp_path / "b", "NYU", edit=edit(rows_of(store, before.split.train)[:3]))
    test_changed = prepare("NYU", read_site_store(tmp_path / "a"), experiment())
    train_changed = prepare("NYU", read_site_store(tmp_path / "b"), experiment())
    assert np.array_equal(test_changed.split.train, before.split.train)
    assert torch.equal(test_changed.fitted["mean"], before.fitted["mean"])
    assert torch.equal(test_changed.fitted["std"], before.fitted["std"])
    assert not torch.equal(train_changed.fitted["mean"], before.fitted["mean"])


def test_training_does_not_look_at_test_subjects(store, experiment, write_store, tmp_path):
    """What is learned, and which folds there are, has the same bits whatever they hold."""
    expected, _ = site_rounds(Site("NYU", store, experiment()))
    rows = rows_of(store, prepare("NYU", store, experiment()).split.test)

    def change(values, _):
        values[rows] = -3 * values[rows]

    write_store(tmp_path / "a", "NYU", edit=change)
    found, _ = site_rounds(Site("NYU", read_site_store(tmp_path / "a"), experiment()))
    assert same(found, expected)


def test_standardised_inputs(store, experiment):
    site = Site("NYU", store, experiment())
    inputs, targets = site.train_samples.inputs, site.train_samples.targets
    assert inputs.dtype == torch.float32
    assert torch.allclose(inputs.mean(dim=0), torch.zeros(66), atol=1e-5)
    assert torch.allclose(inputs.std(dim=0, correction=0), torch.ones(66), atol=1e-4)
    assert len(targets) == len(inputs) == 45
    raw = Site("NYU", store, experiment(standardization="none"))
    rows = rows_of(store, raw.preparation.split.train)
    assert torch.equal(
        raw.train_samples.inputs, torch.from_numpy(np.array(store.connectomes[rows]))
    )


def test_an_edge_that_does_not_vary_becomes_zero(experiment, write_store, tmp_path):
    def change(values, _):
        values[:, 5] = 2.5

    write_store(tmp_path / "NYU", "NYU", edit=change)
    site = Site("NYU", read_site_store(tmp_path / "NYU"), experiment())
    inputs = site.train_samples.inputs
    assert float(site.preparation.fitted["std"][5]) == 1
    assert inputs[:, 5].abs().max() < 1e-5
    assert torch.isfinite(inputs).all()


def test_many_samples_are_read_in_chunks_with_the_same_result(experiment, write_store, tmp_path):
    write_store(tmp_path / "NYU", "NYU", n_windows=60)
    store = read_site_store(tmp_path / "NYU")
    site = Site("NYU", store, experiment())
    rows = rows_of(store, site.preparation.split.train)
    assert len(rows) > 512
    features = np.asarray(store.connectomes)[rows].astype(np.float64)
    assert np.allclose(site.preparation.fitted["mean"], features.mean(axis=0), atol=1e-6)
    assert np.allclose(site.preparation.fitted["std"], features.std(axis=0), rtol=1e-6)
    expected = (features - features.mean(axis=0)) / features.std(axis=0)
    assert np.allclose(site.train_samples.inputs, expected, atol=1e-5)


# -------------------------------------------------------------------- a share of the training data


def training_subjects(store, settings):
    return set(prepare(store.site, store, settings).split.train.tolist())


def test_a_share_is_drawn_by_subject_stratified_and_nested(write_store, experiment, tmp_path):
    write_store(tmp_path / "NYU", "NYU", n_subjects=60, diagnoses=("autism", "control", "control"))
    store = read_site_store(tmp_path / "NYU")
    found = {}
    for share in (1.0, 0.5, 0.25, 0.1):
        preparation = prepare("NYU", store, experiment(training_share=share))
        found[share] = training_subjects(store, experiment(training_share=share))
        n_autism = sum(store.labels[k] for k in found[share])
        assert n_autism == round(share * 15)
        assert len(found[share]) - n_autism == round(share * 30)
        facts = preparation.facts
        assert facts["n_train_subjects"] == len(found[share])
        assert facts["n_train_samples"] == 3 * len(found[share])
        assert facts["autism_share_train"] == pytest.approx(n_autism / len(found[share]))
        whole = prepare("NYU", store, experiment())
        assert np.array_equal(preparation.split.test, whole.split.test)
        assert facts["n_test_subjects"] == whole.facts["n_test_subjects"]
    assert found[0.1] < found[0.25] < found[0.5] < found[1.0]


def test_a_share_depends_on_seed_fold_and_site_and_not_on_the_order_of_subjects(store, experiment):
    half = experiment(training_share=0.5)
    drawn = training_subjects(store, half)
    assert drawn == training_subjects(store, half)
    assert drawn != training_subjects(store, half.changed(seed=6))
    assert training_subjects(store, experiment(training_share={"UM": 0.5})) > drawn
    ids = {store.participants[k].participant_id for k in drawn}
    order = np.random.default_rng(0).permutation(len(store.participants))
    place = np.argsort(order)
    shuffled = dataclasses.replace(
        store,
        participants=tuple(store.participants[k] for k in order),
        sample_participant=place[store.sample_participant],
    )
    again = training_subjects(shuffled, half)
    assert {shuffled.participants[k].participant_id for k in again} == ids


def test_subjects_that_are_left_out_have_no_influence(store, experiment, write_store, tmp_path):
    half = experiment(training_share=0.5)
    kept = rows_of(store, np.concatenate(prepare("NYU", store, half).split))

    def change(values, _):
        values[np.setdiff1d(np.arange(len(values)), kept)] *= 1e3

    write_store(tmp_path / "NYU", "NYU", edit=change)
    expected, _ = site_rounds(Site("NYU", store, half))
    found, _ = site_rounds(Site("NYU", read_site_store(tmp_path / "NYU"), half))
    assert same(found, expected)
    everyone, _ = site_rounds(Site("NYU", store, experiment()))
    assert not same(everyone, expected)


@pytest.mark.parametrize(
    ("changes", "share", "reason"),
    [
        (
            {"diagnoses": ("autism", *["control"] * 3), "n_subjects": 24},
            0.1,
            "training_share 0.1 leaves none of its 4 training subjects of 'autism'",
        ),
        ({}, {"NYU": 0.1}, "2 training subjects of 20 are too few to train on"),
    ],
)
def test_a_share_that_leaves_too_little_is_refused(
    write_store, experiment, tmp_path, changes, share, reason
):
    write_store(tmp_path / "NYU", "NYU", **changes)
    store = read_site_store(tmp_path / "NYU")
    with pytest.raises(StoreError, match=f"site 'NYU': {reason}"):
        prepare("NYU", store, experiment(training_share=share))
    prepare("NYU", store, experiment(training_share={"UM": 0.01}))


# ------------------------------------------------------------------------------------ fixed folds


def test_folds_of_the_store_are_used(experiment, write_store, tmp_path):
    write_store(tmp_path / "NYU", "NYU", folds=4)
    store = read_site_store(tmp_path / "NYU")
    for seed in (0, 1):
        preparation = prepare("NYU", store, experiment(fold=2, seed=seed))
        assert preparation.split.test.tolist() == [k for k in range(20) if k // 2 % 4 == 2]


def one_subject_in_no_fold(_, participants):
    participants[3] = dataclasses.replace(participants[3], fold=None)


@pytest.mark.parametrize(
    ("made", "asked", "reason"),
    [
        ({"folds": 3}, {}, "made for 3 folds, but the experiment asks for fold 0 of 4"),
        ({"folds": 5}, {}, "made for 5 folds, but the experiment asks for fold 0 of 4"),
        (
            {"folds": {"held_out": 1}},
            {"fold": 2},
            "made for fold 1 of 4, but the experiment asks for fold 2 of 4",
        ),
    ],
)
def test_folds_of_the_store_that_are_others_are_refused(
    experiment, write_store, tmp_path, made, asked, reason
):
    if isinstance(made["folds"], dict):  # the store says for which fold its reference was fitted
        path = write_store(tmp_path / "NYU", "NYU", folds=4)
        file = path / "dataset_description.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | made))
    else:
        write_store(tmp_path / "NYU", "NYU", **made)
    with pytest.raises(StoreError, match=f"site 'NYU': its store was {reason}; prepare the store"):
        prepare("NYU", read_site_store(tmp_path / "NYU"), experiment(**asked))


def test_subjects_in_no_fold_are_told(experiment, write_store, tmp_path):
    write_store(tmp_path / "NYU", "NYU", folds=4, edit=one_subject_in_no_fold)
    with pytest.raises(StoreError, match="made for 4 folds and 1 subjects in none"):
        prepare("NYU", read_site_store(tmp_path / "NYU"), experiment())


# ---------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"diagnoses": ("autism",)}, r"'NYU'.* one diagnosis only \(20 of autism\)"),
        ({"n_subjects": 3}, r"'NYU'.* 3 subjects \(2 of autism, 1 of control\), too few"),
        ({"n_subjects": 4, "folds": 2}, "2 training subjects of 4 are too few to train on"),
        (
            {"diagnoses": ("control",), "folds": 4},
            "all 15 training subjects are of the class 'control'; training needs at least two",
        ),
    ],
)
def test_sites_that_cannot_train_are_named(experiment, write_store, tmp_path, changes, reason):
    write_store(tmp_path / "NYU", "NYU", **changes)
    n_folds = changes.get("folds", 4)
    with pytest.raises(StoreError, match=reason):
        Site("NYU", read_site_store(tmp_path / "NYU"), experiment(n_folds=n_folds))


def test_another_sites_store_is_refused(store, experiment):
    with pytest.raises(StoreError, match="site 'UM': its store holds the data of site 'NYU'"):
        Site("UM", store, experiment())


def test_a_preparation_of_another_store_is_refused(store, experiment, data_root, write_store):
    preparation = prepare("NYU", store, experiment())
    Site("NYU", store, experiment(), preparation=preparation)
    write_store(data_root / "NYU", "NYU", n_subjects=22)
    with pytest.raises(StoreError, match="site 'NYU': the store has changed since this job began"):
        Site(
            "NYU",
            read_site_store(data_root / "NYU"),
            experiment(),
            preparation=preparation,
        )


def test_a_network_without_batch_norm_is_refused_unless_all_is_shared(experiment, store):
    linear = {"name": "torch.nn.Linear", "args": {"in_features": 66, "out_features": 2}}
    with pytest.raises(NoBatchNormError, match="network Linear has no batch-norm layer"):
        Site("NYU", store, experiment(network=linear))
    site = Site("NYU", store, experiment(network=linear, policy="none"))
    site.check_network()
    assert site.initial_local() == {}


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"in_features": 67}, r"cannot take the store's samples of 66 edges: .*\(n, 67\)"),
        ({"in_features": 66, "n_classes": 3}, r"has 3 outputs, but there are 2 classes"),
    ],
)
def test_a_network_that_does_not_fit_the_store_is_named(store, experiment, args, reason):
    site = Site("NYU", store, experiment(network={"args": args}))
    with pytest.raises(StoreError, match=f"site 'NYU': network ConnectomeMLP {reason}"):
        site.check_network()


# --------------------------------------------------------------------------------- the policies


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("fedbn", {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}),
        ("silobn", {"running_mean", "running_var", "num_batches_tracked"}),
        ("none", {"num_batches_tracked"}),
    ],
)
def test_policies_decide_what_a_round_gives_away(store, experiment, policy, kept):
    site = Site("NYU", store, experiment(policy=policy))
    result = site.train_round(site.initial_shared(), site.initial_local(), 0)
    assert set(result.local) == {f"hidden.0.norm.{name}" for name in kept}
    assert len(result.shared) + len(result.local) == 9
    network, partition = make_network(experiment(policy=policy))
    assert (tuple(result.shared), tuple(result.local)) == (partition.shared, partition.local)
    assert set(network.state_dict()) == set(result.shared) | set(result.local)


def test_a_preparation_comes_back_from_its_tensors(store, experiment):
    made = prepare("NYU", store, experiment(validation={"share": 0.25}))
    again = Preparation.from_tensors(made.tensors(), made.facts, store)
    assert [part.tolist() for part in again.split] == [part.tolist() for part in made.split]
    assert same(again.fitted, made.fitted)
    assert again.facts == made.facts


def test_a_preparation_of_version_0_1_is_read(store, experiment):
    made = prepare("NYU", store, experiment())
    rows = {f"{part}_rows": rows_of(store, getattr(made.split, part)) for part in ("train", "test")}
    kept = {name: torch.from_numpy(values) for name, values in rows.items()} | made.fitted
    again = Preparation.from_tensors(kept, made.facts | {"store": "of a time"}, store)
    assert [part.tolist() for part in again.split] == [part.tolist() for part in made.split]
    assert same(again.fitted, made.fitted)
    assert again.facts == made.facts
