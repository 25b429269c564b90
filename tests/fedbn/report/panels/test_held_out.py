"""Curves and counts of held-out subjects, against numbers by hand."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import auc, roc_auc_score

from fedbn.report.panels import held_out
from fedbn.report.panels.held_out import GRID, HeldOut
from fedbn.study.comparison import read_comparison
from fedbn.study.summary import held_out as of_comparison
from fedbn.tasks.base import Scores
from fedbn.tasks.classification import two_class_scores


def subjects(targets, scores):
    return HeldOut.of([two_class_scores(np.array(targets), np.array(scores))])


def test_confusion_counts_classes_in_rows_and_what_they_are_called_in_columns():
    one = subjects([1, 1, 1, 0, 0], [0.9, 0.6, 0.2, 0.7, 0.1])
    other = subjects([1, 1, 1, 0, 0], [0.9, 0.6, 0.8, 0.2, 0.1])
    assert held_out.confusion([one]).tolist() == [[1, 1], [1, 2]]
    assert held_out.confusion([one, other]).tolist() == [[1.5, 0.5], [0.5, 2.5]]


def test_each_fold_is_decided_by_its_own_threshold_and_many_classes_by_the_most_probable():
    folds = [
        Scores(np.arange(2), {**two_class_scores(np.array([0, 1]), np.array([0.4, 0.6])).columns},
               facts={"threshold": threshold})
        for threshold in (0.3, 0.7)
    ]  # fmt: skip
    assert HeldOut.of(folds).called.tolist() == [1, 1, 0, 0]
    columns = {f"p_{k}": np.array(p) for k, p in enumerate(([0.5, 0.2], [0.3, 0.3], [0.2, 0.5]))}
    three = HeldOut.of([Scores(np.arange(2), {"target": np.array([0, 1]), **columns})])
    assert held_out.confusion([three]).tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]


def test_the_area_under_the_mean_roc_is_the_mean_auc():
    rng = np.random.default_rng(0)
    made = []
    for _ in range(3):
        targets = np.repeat([1, 0], 40)
        made.append(subjects(targets, rng.uniform(size=80) * 0.7 + 0.3 * targets))
    expected = np.mean([roc_auc_score(one.targets, one.probability[:, 1]) for one in made])
    curve = held_out.mean_roc(made)
    assert curve[0] == 0
    assert curve[-1] == 1
    assert auc(GRID, curve) == pytest.approx(expected, abs=2e-3)


def test_one_class_has_no_roc():
    assert held_out.mean_roc([subjects([1, 1], [0.2, 0.7])]) is None


def test_calibration_points_are_means_of_bins_with_enough_scores():
    one = subjects([1, 1, 0, 0, 0, 1], [0.31, 0.33, 0.35, 0.37, 0.39, 0.95])
    ((score, share, n),) = held_out.calibration_points([one])
    assert (score, share, n) == (pytest.approx(0.35), pytest.approx(0.4), 5)
    points = held_out.calibration_points([one] * 5)
    assert [round(point[2]) for point in points] == [5, 1]


def test_the_folds_of_a_seed_hold_out_each_subject_once(compared, summary):
    found, plan, records = read_comparison(compared)
    assert found == summary
    scored = {
        site: [HeldOut.of(folds) for folds in seeds]
        for site, seeds in of_comparison(plan, records, "fedbn").items()
    }
    assert list(scored) == summary["sites"]
    for site, repetitions in scored.items():
        assert [len(one.targets) for one in repetitions] == [summary["n_subjects"][site]] * 2
    counts = held_out.confusion(scored["NYU"])
    accuracy = summary["scores"]["fedbn"]["NYU"]["subject"]["accuracy"]["mean"]
    assert np.trace(counts) / counts.sum() == pytest.approx(accuracy)
