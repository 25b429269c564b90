"""Linear baselines, against scikit-learn's plain forms, and what they may look at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

from fedbn import baselines
from fedbn.baselines import PENALTIES, choose_penalty, fit_logistic, fit_ridge
from fedbn.experiment import read_stores
from fedbn.methods import METHODS

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
    inputs, targets, subjects = samples
    monkeypatch.setattr(baselines, "choose_penalty", lambda *_: penalty)
    found = fit_ridge(inputs, targets, subjects, 0)(inputs[:20])
    plain = Ridge(alpha=penalty * N_EDGES).fit(inputs.double().numpy(), targets)
    expected = plain.predict(inputs[:20].double().numpy()).clip(0, 1)
    assert found[:, 1] == pytest.approx(expected, abs=1e-5)
    assert found.sum(axis=1) == pytest.approx(np.ones(20))


@pytest.mark.parametrize("penalty", [0.1, 10.0])
def test_logistic_is_a_plain_logistic_regression(samples, monkeypatch, penalty):
    inputs, targets, subjects = samples
    monkeypatch.setattr(baselines, "choose_penalty", lambda *_: penalty)
    found = fit_logistic(inputs, targets, subjects, 0)(inputs[:20])
    plain = LogisticRegression(C=1 / (penalty * N_EDGES), tol=1e-8, max_iter=5000)
    expected = plain.fit(inputs.double().numpy(), targets).predict_proba(inputs[:20].numpy())
    assert found == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("fit", [fit_ridge, fit_logistic])
def test_a_baseline_learns_what_can_be_learned(samples, fit):
    inputs, targets, subjects = samples
    train = subjects < 16
    score = fit(inputs[train], targets[train], subjects[train], 0)(inputs[~train])
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
    score = fit_ridge(noise, targets, subjects, 0)(noise)
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


def test_pooled_baselines_see_all_sites_and_single_ones_their_own(data_root, experiment):
    both = experiment(sites=("NYU", "UM"))
    alone = experiment(sites=("UM",))
    stores = read_stores(data_root, both)
    single = [METHODS["ridge_single"].run(settings, stores)["UM"] for settings in (both, alone)]
    assert np.array_equal(single[0].test_probability, single[1].test_probability)
    pooled = [METHODS["ridge"].run(settings, stores)["UM"] for settings in (both, alone)]
    assert not np.array_equal(pooled[0].test_probability, pooled[1].test_probability)
    assert np.array_equal(pooled[1].test_probability, single[1].test_probability)
    needs = {name: METHODS[name].needs_pooled_data for name in METHODS}
    assert [name for name in needs if needs[name]] == ["pooled", "ridge", "logistic"]
    assert not any(METHODS[name].in_flare for name in needs if needs[name])


@pytest.mark.parametrize("name", ["ridge", "logistic", "pooled", "ridge_single"])
def test_the_order_of_sites_changes_no_bit(data_root, experiment, name):
    orders = [experiment(sites=sites) for sites in (("NYU", "UM"), ("UM", "NYU"))]
    stores = read_stores(data_root, orders[0])
    first, second = (METHODS[name].run(settings, stores) for settings in orders)
    for site in ("NYU", "UM"):
        assert np.array_equal(first[site].test_probability, second[site].test_probability)


@pytest.mark.parametrize("name", METHODS)
def test_no_method_looks_at_held_out_classes(tmp_path, write_store, experiment, name):
    settings = METHODS[name].experiment(experiment(rounds=1, fold=1, n_folds=4))
    for site in settings.sites:
        write_store(tmp_path / site, site, n_subjects=16, folds=4)
    stores = read_stores(tmp_path, settings)
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
        assert not np.array_equal(first.test_targets, second.test_targets)
        assert np.array_equal(first.train_targets, second.train_targets)
        assert np.array_equal(first.test_probability, second.test_probability)
        assert np.array_equal(first.train_probability, second.train_probability)
        assert first.threshold == second.threshold
