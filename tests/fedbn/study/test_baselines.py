"""Linear baselines, against scikit-learn's plain forms, and what they may look at."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

from fedbn.federation.simulation import read_sites
from fedbn.study import baselines
from fedbn.study.baselines import (
    FEDERATED_PENALTIES,
    PENALTIES,
    SiteSamples,
    choose_penalty,
    fit_federated_ridge,
    fit_logistic,
    fit_ridge,
)
from fedbn.study.methods import METHODS

N_SUBJECTS, N_WINDOWS, N_EDGES = 24, 3, 40


@pytest.fixture
def samples():
    rng = np.random.default_rng(2)
    subjects = np.repeat(np.arange(N_SUBJECTS), N_WINDOWS)
    targets = subjects % 2
    own = rng.standard_normal((N_SUBJECTS, N_EDGES))
    values = own[subjects] + 0.3 * rng.standard_normal((len(subjects), N_EDGES)) + 0.7
    values += 0.5 * targets[:, None] * rng.standard_normal(N_EDGES)
    return torch.from_numpy(values.astype(np.float32)), targets, subjects


@pytest.mark.parametrize("penalty", [0.1, 10.0])
def test_ridge_is_a_plain_ridge_regression_of_the_class(samples, monkeypatch, penalty):
    inputs, targets, _ = samples
    monkeypatch.setattr(baselines, "choose_penalty", lambda *_: penalty)
    found = fit_ridge([SiteSamples("UM", *samples)], 0)(inputs[:20])
    plain = Ridge(alpha=penalty * N_EDGES).fit(inputs.double().numpy(), targets)
    expected = plain.predict(inputs[:20].double().numpy()).clip(0, 1)
    assert found[:, 1] == pytest.approx(expected, abs=1e-5)
    assert found.sum(axis=1) == pytest.approx(np.ones(20))


@pytest.mark.parametrize("penalty", [0.1, 10.0])
def test_logistic_is_a_plain_logistic_regression(samples, monkeypatch, penalty):
    inputs, targets, _ = samples
    monkeypatch.setattr(baselines, "choose_penalty", lambda *_: penalty)
    found = fit_logistic([SiteSamples("UM", *samples)], 0)(inputs[:20])
    plain = LogisticRegression(C=1 / (penalty * N_EDGES), tol=1e-8, max_iter=5000)
    expected = plain.fit(inputs.double().numpy(), targets).predict_proba(inputs[:20].numpy())
    assert found == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("fit", [fit_ridge, fit_logistic])
def test_a_baseline_learns_what_can_be_learned(samples, fit):
    inputs, targets, subjects = samples
    train = subjects < 16
    score = fit([SiteSamples("UM", *(one[train] for one in samples))], 0)(inputs[~train])
    assert np.mean((score[:, 1] >= 0.5) == targets[~train]) > 0.7


def test_a_penalty_is_chosen_by_subject_and_never_by_window(samples):
    """By window the inner test subjects are known, and what memorises them seems the best."""
    _, targets, subjects = samples
    seen = []

    def scores(train, test, penalty):
        seen.append((set(subjects[train]), set(subjects[test])))
        memorised = np.isin(subjects[test], subjects[train])
        return np.where(memorised, targets[test], 0.5 + (penalty == 10.0) * (targets[test] - 0.5))

    assert choose_penalty(scores, targets, subjects, 0) == 10.0
    assert all(not train & test for train, test in seen)
    assert {len(train | test) for train, test in seen} == {N_SUBJECTS}
    folds = {frozenset(test) for _, test in seen}
    assert sum(map(len, folds)) == N_SUBJECTS


def test_the_stronger_penalty_wins_where_nothing_can_be_learned():
    rng = np.random.default_rng(0)
    noise = torch.from_numpy(rng.standard_normal((60, 200)).astype(np.float32))
    targets, subjects = rng.permutation(60) % 2, np.arange(60)
    score = fit_ridge([SiteSamples("UM", noise, targets, subjects)], 0)(noise)
    assert np.abs(score[:, 1] - 0.5).max() < 0.3
    chosen = []

    def spread(train, test, penalty):
        chosen.append(penalty)
        return 0.5 + rng.standard_normal(len(test)) / (10 * penalty)

    assert choose_penalty(spread, targets, subjects, 0) == PENALTIES[-1]
    assert set(chosen) == set(PENALTIES)


def test_too_few_subjects_to_choose_a_penalty_take_a_fixed_one():
    def scores(*_):
        raise AssertionError("nothing can be tried")

    targets = np.array([0, 0, 0, 1, 1])
    assert choose_penalty(scores, targets, np.arange(5), 0) in PENALTIES


# --------------------------------------------------------------------------------- federated ridge


@pytest.fixture
def two_sites(samples):
    """The samples' subjects at two sites, one of which has an offset."""
    inputs, targets, subjects = samples
    first = subjects < 10
    return [
        SiteSamples("NYU", inputs[first] + 1, targets[first], subjects[first]),
        SiteSamples("UM", inputs[~first], targets[~first], subjects[~first]),
    ]


@pytest.mark.parametrize("penalty", [0.1, 3.0])
def test_the_federated_ridge_is_the_ridge_of_all_samples_in_one_place(
    two_sites, monkeypatch, penalty
):
    monkeypatch.setattr(baselines, "FEDERATED_PENALTIES", (penalty,))
    monkeypatch.setattr(baselines, "RESIDUAL", 1e-9)
    inputs = torch.cat([site.inputs for site in two_sites])
    values = inputs.double().numpy()
    targets = np.concatenate([site.targets for site in two_sites])
    mean_square = np.mean(np.sum((values - values.mean(axis=0)) ** 2, axis=1))
    plain = Ridge(alpha=penalty * mean_square).fit(values, targets)
    found = fit_federated_ridge(two_sites, 0)(inputs)
    assert found[:, 1] == pytest.approx(plain.predict(values).clip(0, 1), abs=1e-6)
    assert found.sum(axis=1) == pytest.approx(np.ones(len(values)))


def test_the_penalty_of_the_federated_ridge_errs_least_on_inner_held_out_subjects(
    two_sites, monkeypatch
):
    """Whichever is taken, no other one does better in the same inner cross-validation."""
    solve, error = baselines._solve, baselines._RidgeSite.squared_error
    noted, taken = [], []

    def noting_error(part, weights, offset):
        noted.append(error(part, weights, offset))
        return noted[-1]

    def noting_penalties(parts, penalties):
        taken.append(penalties)
        return solve(parts, penalties)

    monkeypatch.setattr(baselines._RidgeSite, "squared_error", noting_error)
    monkeypatch.setattr(baselines, "_solve", noting_penalties)
    fit_federated_ridge(two_sites, 0)
    errors = np.reshape(noted, (baselines.N_INNER_FOLDS, len(FEDERATED_PENALTIES), 2))
    best = errors.sum(axis=(0, 2)).argmin()
    assert taken == [FEDERATED_PENALTIES] * baselines.N_INNER_FOLDS + [(FEDERATED_PENALTIES[best],)]


def test_a_site_of_the_federated_ridge_holds_out_whole_subjects(two_sites):
    part = baselines._RidgeSite(two_sites[1], seed=0)
    subjects = two_sites[1].subjects
    everything = part.moments()
    held_out = []
    for fold in range(baselines.N_INNER_FOLDS):
        part.hold_out(fold)
        chosen = set(subjects[part._held_out])
        kept = ~np.isin(subjects, list(chosen))
        assert part.moments()[0] == kept.sum()
        assert part.moments()[1] == pytest.approx(two_sites[1].inputs[kept].double().sum(dim=0))
        held_out += sorted(chosen)
    assert sorted(held_out) == sorted(set(subjects))
    part.hold_out(None)
    assert part.moments()[0] == everything[0] == len(subjects)
    assert torch.equal(part.moments()[1], everything[1])


def test_a_site_of_the_federated_ridge_answers_with_sums_alone(two_sites):
    part = baselines._RidgeSite(two_sites[0], seed=0)
    n, total, classes, squares = part.moments()
    values = two_sites[0].inputs.double()
    assert (n, classes) == (len(values), two_sites[0].targets.sum())
    assert total == pytest.approx(values.sum(dim=0))
    assert squares == pytest.approx(float((values**2).sum()))
    mean = torch.linspace(-1, 1, N_EDGES).double()
    weights = torch.linspace(0, 2, N_EDGES).double()
    centred = values - mean
    assert part.gradient(weights, mean) == pytest.approx(centred.T @ (centred @ weights))
    y = torch.from_numpy(two_sites[0].targets).double()
    assert part.covariance_with_class(mean, 0.25) == pytest.approx(centred.T @ (y - 0.25))


def test_one_small_site_leaves_the_penalty_of_the_federated_ridge_unchosen(two_sites, monkeypatch):
    few = two_sites[1].subjects < 14
    parts = (two_sites[1].inputs, two_sites[1].targets, two_sites[1].subjects)
    small = SiteSamples("UM", *(part[few] for part in parts))

    def nothing_to_hold_out(*_):
        raise AssertionError("two subjects of a class are not three folds")

    monkeypatch.setattr(baselines._RidgeSite, "squared_error", nothing_to_hold_out)
    score = fit_federated_ridge([two_sites[0], small], 0)(two_sites[0].inputs)
    assert score.shape == (len(two_sites[0].inputs), 2)


def test_samples_that_do_not_vary_leave_the_federated_ridge_with_the_share_of_patients():
    same = SiteSamples("UM", torch.ones(8, 5), np.arange(8) % 4 // 3, np.arange(8))
    assert fit_federated_ridge([same], 0)(torch.ones(2, 5))[:, 1] == pytest.approx(0.25)


# ------------------------------------------------------------------------------------ as methods


def test_pooled_baselines_see_all_sites_and_single_ones_their_own(
    data_root, experiment, same_scores
):
    both = experiment(sites=("NYU", "UM"))
    alone = experiment(sites=("UM",))
    stores = read_sites(data_root, both)
    single = [METHODS["ridge_single"].run(settings, stores)["UM"] for settings in (both, alone)]
    assert same_scores(single[0].test, single[1].test)
    pooled = [METHODS["ridge"].run(settings, stores)["UM"] for settings in (both, alone)]
    assert not same_scores(pooled[0].test, pooled[1].test)
    assert same_scores(pooled[1].test, single[1].test)
    needs = {name: METHODS[name].needs_pooled_data for name in METHODS}
    assert [name for name in needs if needs[name]] == ["pooled", "ridge", "logistic", "tangent"]
    assert not any(METHODS[name].in_flare for name in needs if needs[name])


@pytest.mark.parametrize(
    "name",
    ["ridge", "logistic", "pooled", "ridge_single", "ridge_federated", "ridge_federated_tangent"],
)
def test_the_order_of_sites_changes_no_bit(
    tmp_path, write_correlations, experiment, same_scores, name
):
    orders = [experiment(sites=sites) for sites in (("NYU", "UM"), ("UM", "NYU"))]
    for site, n in (("NYU", 20), ("UM", 16)):
        write_correlations(tmp_path / site, site, n_subjects=n)
    stores = read_sites(tmp_path, orders[0])
    first, second = (METHODS[name].run(settings, stores) for settings in orders)
    for site in ("NYU", "UM"):
        assert same_scores(first[site].test, second[site].test)


@pytest.fixture
def write_correlations(write_store):
    """Write stores whose connectomes are those of positive definite correlation matrices."""

    def small(values, participants):
        values *= 0.05

    return lambda folder, site, **changes: write_store(folder, site, edit=small, **changes)


@pytest.fixture
def few_candidates(tmp_path, monkeypatch):
    """Let the nested method choose from two candidates, with two inner folds."""
    path = tmp_path / "candidates.json"
    candidates = [
        {"name": name, "members": [{"method": name}], "threshold": "prevalence"}
        for name in ("ridge_federated", "fedbn")
    ]
    path.write_text(json.dumps({"candidates": candidates, "n_folds": 2}))
    monkeypatch.setenv("FEDBN_CANDIDATES", str(path))


@pytest.mark.parametrize("name", METHODS)
def test_no_method_looks_at_held_out_classes(
    tmp_path, write_correlations, experiment, few_candidates, same_scores, name
):
    settings = METHODS[name].experiment(experiment(rounds=1, fold=1, n_folds=4))
    for site in settings.sites:
        write_correlations(tmp_path / site, site, n_subjects=16, folds=4)
    stores = read_sites(tmp_path, settings)
    other = {"autism": "control", "control": "autism"}
    turned = {}
    for site, store in stores.items():
        people = tuple(
            replace(p, diagnosis=other[p.diagnosis]) if p.fold == 1 else p
            for p in store.participants
        )
        turned[site] = replace(store, participants=people)
    before, after = (METHODS[name].run(settings, given) for given in (stores, turned))
    for site in settings.sites:
        first, second = before[site], after[site]
        targets = [one.test.columns["target"] for one in (first, second)]
        assert not np.array_equal(*targets)
        for given in (first.test, second.test):  # all but the classes
            del given.columns["target"], given.parts.columns["target"]
        assert same_scores(first.test, second.test)
        assert same_scores(first.train, second.train)
