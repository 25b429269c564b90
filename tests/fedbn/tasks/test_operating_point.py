"""Thresholds and calibration, against values worked out by hand and scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import brier_score_loss

from fedbn.tasks.operating_point import brier_score, calibration, choose_threshold


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@pytest.mark.parametrize(
    ("targets", "scores", "threshold"),
    [
        ([0, 0, 1, 1], [0.1, 0.2, 0.6, 0.9], 0.4),  # the middle of the gap
        ([0, 1, 0, 1], [0.1, 0.2, 0.6, 0.9], 0.75),  # 0.15 is as good, but in a narrower gap
        ([1, 1, 1], [0.2, 0.6, 0.9], 0.1),  # all are patients
        ([0, 0], [0.2, 0.6], 0.8),
        ([1, 0], [0.2, 0.6], 0.8),  # wrong way round: one of them is right at best
        ([0, 1], [0.5, 0.5], 0.25),  # the scores tell nothing
        ([0, 1], [0.0, 1.0], 0.5),
        ([1], [0.0], 0.5),  # nothing below zero: called wrong, and never an error
    ],
)
def test_a_threshold_is_the_middle_of_the_widest_best_gap(targets, scores, threshold):
    assert choose_threshold(np.array(targets), np.array(scores)) == pytest.approx(threshold)


def test_no_threshold_does_better(rng):
    for _ in range(50):
        targets = rng.integers(0, 2, 30)
        scores = np.clip(rng.normal(0.4 + 0.2 * targets, 0.2), 0.001, 0.999)
        chosen = choose_threshold(targets, scores)
        accuracy = np.mean((scores >= chosen) == targets)
        grid = np.linspace(0, 1, 2001)[:, None]
        assert accuracy >= ((scores >= grid) == targets).mean(axis=1).max()


def test_a_threshold_does_not_depend_on_the_order_of_subjects(rng):
    targets, scores = rng.integers(0, 2, 40), rng.random(40)
    order = rng.permutation(40)
    assert choose_threshold(targets, scores) == choose_threshold(targets[order], scores[order])


@pytest.mark.parametrize(("targets", "scores"), [([], []), ([0, 1], [0.5])])
def test_scores_that_do_not_fit_are_refused(targets, scores):
    for function in (choose_threshold, calibration):
        with pytest.raises(ValueError, match="one score for each subject"):
            function(np.array(targets), np.array(scores))


def test_brier_score(rng):
    targets, scores = rng.integers(0, 2, 40), rng.random(40)
    assert brier_score(targets, scores) == pytest.approx(brier_score_loss(targets, scores))
    assert math.isnan(brier_score(np.array([]), np.array([])))


def test_calibration_against_values_worked_out_by_hand():
    found = calibration(np.array([0, 1, 1, 1]), np.array([0.12, 0.18, 0.8, 1.0]))
    assert found["bins"] == [
        {"mean_score": pytest.approx(0.15), "observed_share": 0.5, "n": 2},
        {"mean_score": pytest.approx(0.8), "observed_share": 1.0, "n": 1},
        {"mean_score": 1.0, "observed_share": 1.0, "n": 1},
    ]
    assert found["expected_error"] == pytest.approx((2 * 0.35 + 0.2 + 0) / 4)
    assert found["observed_share"] == 0.75
    assert found["excess"] == pytest.approx(0.525 - 0.75)
    assert found["n"] == 4


@pytest.mark.parametrize(("slope", "intercept"), [(1.0, 0.0), (0.5, 0.0), (1.0, -0.8)])
def test_slope_and_intercept_of_scores_that_are_known_to_be_off(rng, slope, intercept):
    log_odds = rng.normal(0, 2, 20000)
    truth = 1 / (1 + np.exp(-(slope * log_odds + intercept)))
    found = calibration((rng.random(20000) < truth).astype(int), 1 / (1 + np.exp(-log_odds)))
    assert found["slope"] == pytest.approx(slope, abs=0.05)
    assert found["intercept"] == pytest.approx(intercept, abs=0.07)


@pytest.mark.parametrize(("targets", "scores"), [([1, 1], [0.2, 0.7]), ([0, 1], [0.4, 0.4])])
def test_no_slope_where_there_is_none(targets, scores):
    assert math.isnan(calibration(np.array(targets), np.array(scores))["slope"])
