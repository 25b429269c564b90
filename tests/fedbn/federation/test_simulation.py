from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from data_prep.site_store import StoreError, read_site_store
from fedbn.federation.results import weights_digest
from fedbn.federation.simulation import federate as in_process
from fedbn.federation.simulation import read_sites, run_federation
from fedbn.federation.site import Site, make_network

NORM = "hidden.0.norm"


@pytest.fixture
def federate(data_root, experiment):
    def run(**changes):
        settings = experiment(**changes)
        return run_federation(settings, read_sites(data_root, settings))

    return run


@pytest.fixture
def rounds_by_hand(data_root, experiment):
    """Train both sites for one round from the same entries, and give what each has afterwards."""

    def run(**changes):
        settings = experiment(rounds=1, **changes)
        results = {}
        for name in settings.sites:
            site = Site(name, read_site_store(data_root / name), settings)
            results[name] = site.train_round(site.initial_shared(), site.initial_local(), 0)
        return results

    return run


def same(left, right):
    return list(left) == list(right) and all(torch.equal(left[k], right[k]) for k in left)


def weighted(tensors, weights):
    """Average in float64, rounded once at the end, written out by hand."""
    total = sum(w * t.double() for t, w in zip(tensors, weights, strict=True))
    return (total / sum(weights)).float()


# ------------------------------------------------------------------------------ the arithmetic


@pytest.mark.parametrize("weights", ["equal", "samples"])
@pytest.mark.parametrize("policy", ["fedbn", "silobn", "none"])
def test_one_round_from_equal_entries_is_the_mean_by_hand(
    federate, rounds_by_hand, policy, weights
):
    """All batch-norm entries are equal across sites when the round begins."""
    found = federate(rounds=1, policy=policy, aggregation_weights=weights)
    results = rounds_by_hand(policy=policy)
    samples = [result.outcome.n_samples for result in results.values()]
    assert samples == [45, 36]
    for name, tensor in found.shared.items():
        arrived = [result.shared[name] for result in results.values()]
        expected = weighted(arrived, samples if weights == "samples" else [1, 1])
        assert torch.equal(tensor, expected), name
        assert not torch.equal(arrived[0], arrived[1]), name
    for site, result in results.items():
        assert same(found.local[site], result.local)


def test_fedbn_does_not_average_what_it_keeps(federate):
    result = federate()
    assert not [name for name in result.shared if NORM in name]
    for name in ("weight", "bias", "running_mean", "running_var"):
        nyu, um = (result.local[site][f"{NORM}.{name}"] for site in ("NYU", "UM"))
        assert not torch.equal(nyu, um), name


def test_silobn_shares_gamma_and_beta_only(federate, rounds_by_hand):
    result = federate(policy="silobn", rounds=1)
    of_norm = {name.removeprefix(f"{NORM}.") for name in result.shared if NORM in name}
    assert of_norm == {"weight", "bias"}
    of_sites = [r.shared[f"{NORM}.weight"] for r in rounds_by_hand(policy="silobn").values()]
    assert torch.equal(result.shared[f"{NORM}.weight"], weighted(of_sites, [1, 1]))
    for entries in result.local.values():
        kept = {name.removeprefix(f"{NORM}.") for name in entries}
        assert kept == {"running_mean", "running_var", "num_batches_tracked"}


def test_fedavg_averages_statistics_too_and_leaves_counters(federate, rounds_by_hand):
    training = {"batch_size": 20, "local_epochs": 2, "learning_rate": 0.01}
    result = federate(policy="none", rounds=1, training=training)
    by_hand = rounds_by_hand(policy="none", training=training).values()
    for name in ("running_mean", "running_var", "weight", "bias"):
        arrived = [r.shared[f"{NORM}.{name}"] for r in by_hand]
        assert torch.equal(result.shared[f"{NORM}.{name}"], weighted(arrived, [1, 1]))
    counters = [entries[f"{NORM}.num_batches_tracked"] for entries in result.local.values()]
    assert [counter.dtype for counter in counters] == [torch.int64] * 2
    assert [int(counter) for counter in counters] == [6, 4]  # 45 and 36 samples in batches of 20


def test_fedavg_is_not_a_hidden_silobn(federate, data_root, experiment):
    """Sites score with averaged statistics, not with their own."""
    silobn, fedavg = federate(policy="silobn", rounds=1), federate(policy="none", rounds=1)
    assert same({n: t for n, t in fedavg.shared.items() if n in silobn.shared}, silobn.shared)
    for name in ("running_mean", "running_var"):
        own = [entries[f"{NORM}.{name}"] for entries in silobn.local.values()]
        assert not torch.equal(*own)
        assert torch.equal(fedavg.shared[f"{NORM}.{name}"], weighted(own, [1, 1]))
    store = read_site_store(data_root / "NYU")
    scores = [
        Site("NYU", store, experiment(policy=policy)).evaluate(result.shared, result.local["NYU"])
        for policy, result in (("silobn", silobn), ("none", fedavg))
    ]
    assert np.abs(scores[0].columns["p_1"] - scores[1].columns["p_1"]).max() > 1e-3


def test_one_site_is_its_own_mean(federate, data_root, experiment):
    result = federate(sites=("UM",), rounds=3)
    site = Site("UM", read_site_store(data_root / "UM"), experiment(rounds=3))
    shared, local = site.initial_shared(), site.initial_local()
    for number in range(3):
        step = site.train_round(shared, local, number)
        shared, local = step.shared, step.local
    assert same(result.shared, shared)
    assert same(result.local["UM"], local)


# ------------------------------------------------------------------------- what decides a number


@pytest.mark.parametrize("weights", ["equal", "samples"])
def test_the_order_of_sites_changes_no_number(federate, write_store, data_root, weights):
    write_store(data_root / "USM", "USM", n_subjects=24)
    orders = [("NYU", "UM", "USM"), ("USM", "NYU", "UM"), ("UM", "USM", "NYU")]
    runs = [federate(sites=order, aggregation_weights=weights) for order in orders]
    for order, run in zip(orders, runs, strict=True):
        assert same(run.shared, runs[0].shared)
        assert list(run.local) == list(order)
        for site in order:
            assert same(run.local[site], runs[0].local[site])
            assert run.report["sites"][site] == runs[0].report["sites"][site]
        assert run.report["across_sites"] == runs[0].report["across_sites"]


def test_the_same_experiment_gives_the_same_report(federate):
    torch.manual_seed(3)
    first = federate(compare_with_alone=True)
    torch.manual_seed(4)
    np.random.seed(4)  # noqa: NPY002 - the legacy generator is what must not matter
    assert federate(compare_with_alone=True).report == first.report


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 6},
        {"fold": 1},
        {"rounds": 3},
        {"standardization": "none"},
        {"training": {"batch_size": 16, "local_epochs": 3, "learning_rate": 0.01}},
        {
            "training": {
                "batch_size": 16,
                "local_epochs": 2,
                "learning_rate": 0.01,
                "proximal_mu": 5.0,
            }
        },
    ],
)
def test_each_setting_matters(federate, changes):
    assert not same(federate().shared, federate(**changes).shared)


def test_training_alone_changes_nothing_of_the_federation(federate):
    with_alone, without = federate(compare_with_alone=True), federate()
    assert same(with_alone.shared, without.shared)
    for site, report in without.report["sites"].items():
        assert "alone" not in report
        found = with_alone.report["sites"][site]
        assert {name: found[name] for name in report} == report
        assert found["gain"]["n"] == report["n_test_subjects"]


def test_site_data_stay_theirs(federate, data_root, write_store):
    """A site that is left out leaves no trace: the other one's entries are as if it were alone."""
    alone = federate(sites=("NYU",), rounds=1)
    both = federate(rounds=1)
    assert same(both.local["NYU"], alone.local["NYU"])
    assert not same(both.shared, alone.shared)


def test_what_is_given_back_does_not_alias(federate, experiment):
    result = federate(rounds=1)
    network, _ = make_network(experiment())
    pointers = {tensor.data_ptr() for tensor in network.state_dict().values()}
    tensors = [*result.shared.values(), *result.local["NYU"].values(), *result.local["UM"].values()]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    assert not pointers & {tensor.data_ptr() for tensor in tensors}


def test_the_report_tells_rounds_and_scores(federate):
    result = federate(rounds=2)
    report = result.report
    assert report["transport"] == "in process"
    assert report["rounds"] == [
        {"round": number, "accepted": ["NYU", "UM"], "refused": {}, "missing": []}
        for number in range(2)
    ]
    assert report["shared_weights_sha256"] == weights_digest(result.shared)
    for site in ("NYU", "UM"):
        curve = report["sites"][site]["curve"]
        assert [point["round"] for point in curve] == [0, 1]
        assert {"before_training", "after_training"} < set(curve[0])
    assert "sub-" not in json.dumps(report, allow_nan=False)


def test_rounds_are_told_as_they_finish(data_root, experiment):
    told = []
    settings = experiment(rounds=3)
    run_federation(settings, read_sites(data_root, settings), on_round=told.append)
    assert told == [0, 1, 2]


# --------------------------------------------------------------------------------- bad stores


def test_a_missing_store_is_named(data_root, experiment):
    shutil.rmtree(data_root / "UM")
    with pytest.raises(
        StoreError, match=r"no site store at .*UM \(no such folder, only NYU\): make one"
    ):
        read_sites(data_root, experiment())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"atlas": "another"}, "twelve regions.*another"),
        ({"changes": {"window": 32}}, "window.*20.*32"),
        ({"changes": {"estimator": "ledoit-wolf"}}, "pearson.*ledoit-wolf"),
        ({"n_rois": 13}, "12.*13"),
    ],
)
def test_stores_that_do_not_fit_together_are_refused(
    data_root, experiment, write_store, changes, reason
):
    write_store(data_root / "UM", "UM", **changes)
    with pytest.raises(StoreError, match=reason):
        read_sites(data_root, experiment())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"diagnoses": ("autism",)}, "site 'UM' has one diagnosis only"),
        ({"n_subjects": 3}, "site 'UM' has 3 subjects"),
    ],
)
def test_a_site_that_cannot_train_is_named(data_root, experiment, write_store, changes, reason):
    write_store(data_root / "UM", "UM", **changes)
    settings = experiment()
    with pytest.raises(StoreError, match=reason):
        run_federation(settings, read_sites(data_root, settings))


def test_a_one_class_test_set_is_null_with_a_reason_and_left_out_of_means(
    data_root, experiment, write_store
):
    diagnoses = ("autism",) * 4 + ("control", "autism") * 6
    write_store(data_root / "UM", "UM", n_subjects=16, diagnoses=diagnoses)
    settings = experiment(n_folds=2, compare_with_alone=True)
    stores = read_sites(data_root, settings)

    participants = tuple(  # fixed folds: the first four subjects, of one class, are the test set
        dataclasses.replace(participant, fold=int(k >= 4))
        for k, participant in enumerate(stores["UM"].participants)
    )
    stores["UM"] = dataclasses.replace(stores["UM"], participants=participants)
    report = run_federation(settings, stores).report
    scores = report["sites"]["UM"]["federated"]["subject"]
    assert scores["auc"] is None
    assert scores["specificity"] is None
    assert scores["accuracy"] is not None
    assert "none of the 4 samples is of class 0" in scores["reasons"]["auc"]
    macro = report["across_sites"]["federated"]["subject"]["macro"]
    nyu = report["sites"]["NYU"]["federated"]["subject"]
    assert macro["auc"] == nyu["auc"]
    assert macro["accuracy"] == pytest.approx((nyu["accuracy"] + scores["accuracy"]) / 2)
    json.dumps(report, allow_nan=False)


def test_a_federation_that_is_not_scored_in_each_round_has_the_same_weights(data_root, experiment):
    settings = experiment()
    stores = read_sites(data_root, settings)
    scored, unscored = (in_process(settings, stores, score_rounds=s) for s in (True, False))
    assert weights_digest(scored.shared) == weights_digest(unscored.shared)
    for site in settings.sites:
        assert weights_digest(scored.local[site]) == weights_digest(unscored.local[site])
    assert all(len(rounds) == settings.rounds for rounds in scored.scores.values())
    assert unscored.scores == {site: {} for site in settings.sites}
