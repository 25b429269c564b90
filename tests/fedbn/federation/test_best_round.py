from __future__ import annotations

import math

import pytest
import torch

from fedbn.federation.best_round import BestRound
from fedbn.federation.experiment import ExperimentError
from fedbn.federation.results import weights_digest
from fedbn.federation.simulation import federate, read_sites, run_federation

VALIDATION = {"validation": {"share": 0.3}}
NOISY = {"training": {"batch_size": 8, "local_epochs": 1, "learning_rate": 0.3}, "rounds": 5}


def of_sites(*values):
    return {f"site-{k}": {"subject_accuracy": value} for k, value in enumerate(values)}


@pytest.fixture
def best(experiment):
    return lambda **changes: BestRound(experiment(**VALIDATION, **changes))


def test_the_first_of_equally_good_rounds_is_the_best(best):
    found = best()
    assert [found.judge(n, of_sites(v, v)) for n, v in enumerate((0.5, 0.7, 0.7, 0.6))] == [
        True,
        True,
        False,
        False,
    ]
    assert found.facts() == {"round": 1, "subject_accuracy": 0.7}


def test_every_site_counts_the_same_and_one_that_said_nothing_does_not(best):
    found = best()
    found.judge(0, of_sites(0.5, 0.9) | {"silent": {}})
    assert found.value == 0.7
    assert found.judge(1, {}) is False
    assert math.isclose(found.value, 0.7)


def test_patience_counts_rounds_without_a_better_one(best):
    found = best(patience=2)
    over = []
    for number, value in enumerate((0.5, 0.4, 0.6, 0.6, 0.5)):
        found.judge(number, of_sites(value))
        over.append(found.is_over)
    assert over == [False, False, False, False, True]


@pytest.mark.parametrize("changes", [{"best_round": "validation"}, {"patience": 3}])
def test_without_validation_units_nothing_can_be_judged(experiment, changes):
    with pytest.raises(ExperimentError, match="which is judged on validation units"):
        experiment().changed(**changes)


def test_validation_units_are_neither_trained_on_nor_held_out(data_root, experiment):
    settings = experiment(**VALIDATION)
    data = read_sites(data_root, settings)
    for site in federate(settings, data).sites.values():
        train, validation, test = (set(part.tolist()) for part in site.preparation.split)
        assert len(validation) == 4
        assert not (train & validation)
        assert not (train & test)
        assert not (validation & test)
        assert set(site.train_samples.owners) == train


def test_the_model_of_the_best_round_is_that_of_a_run_that_ends_with_it(data_root, experiment):
    settings = experiment(**VALIDATION, **NOISY)
    data = read_sites(data_root, settings)
    chosen = federate(settings.changed(best_round="validation"), data)
    number = chosen.best_round["round"]
    assert number < 4, "a run whose last round is the best shows nothing"
    short = federate(settings.changed(rounds=number + 1), data)
    assert weights_digest(chosen.shared) == weights_digest(short.shared)
    for site, entries in short.local.items():
        assert weights_digest(chosen.local[site]) == weights_digest(entries)
        assert chosen.load(site).score() == short.load(site).score()


def test_each_site_can_choose_its_own_round(data_root, experiment):
    settings = experiment(**VALIDATION, **NOISY, best_round="site_validation")
    data = read_sites(data_root, settings)
    chosen = federate(settings, data)
    numbers = chosen.best_round["sites"]
    assert len(set(numbers.values())) > 1, "equal choices show nothing"
    for site, number in numbers.items():
        short = federate(settings.changed(best_round="last", rounds=number + 1), data)
        assert chosen.load(site).score() == short.load(site).score()


def test_a_run_without_patience_ends_early_and_says_where(data_root, experiment):
    settings = experiment(**VALIDATION, **NOISY | {"rounds": 40}, patience=2)
    result = run_federation(settings, read_sites(data_root, settings))
    number = result.report["best_round"]["round"]
    assert len(result.report["rounds"]) < 40
    assert len(result.report["rounds"]) >= number + 3


def test_judging_changes_no_bit_of_the_training(data_root, experiment):
    settings = experiment(**VALIDATION)
    data = read_sites(data_root, settings)
    plain, judged = (federate(settings.changed(**c), data) for c in ({}, {"patience": 9}))
    assert weights_digest(plain.shared) == weights_digest(judged.shared)
    assert all(
        torch.equal(tensor, judged.local[site][name])
        for site, entries in plain.local.items()
        for name, tensor in entries.items()
    )
