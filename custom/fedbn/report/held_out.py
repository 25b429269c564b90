"""The held-out subjects of a site under one method: what curves and counts are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbn.study.comparison import Plan, Run, read_scores
from fedbn.study.methods import method
from fedbn.tasks import operating_point
from fedbn.tasks.classification import called

GRID = np.linspace(0, 1, 1001)
MIN_IN_BIN = 5
"""A calibration bin of fewer scores than this is not drawn."""


@dataclass(frozen=True)
class HeldOut:
    """Each subject of one site once, as a network scored it that had not trained on it.

    Attributes
    ----------
    targets
        1 autism, 0 control, (n,).
    scores
        Probability of autism, (n,).
    called
        Whether the score reaches the threshold that the method decides by, (n,).
    """

    targets: np.ndarray
    scores: np.ndarray
    called: np.ndarray


Scored = dict[str, dict[str, list[HeldOut]]]
"""Title of a method, then site, to one :class:`HeldOut` a seed."""


def of_comparison(
    plan: Plan, records: Mapping[Run, Mapping[str, Any]], methods: Sequence[str]
) -> Scored:
    """Join the folds of each seed: every subject of a site is held out in one of them."""
    return {
        method(name).title: {
            site: [
                _joined(
                    [
                        records[Run(name, seed, fold)]["sites"][site]
                        for fold in range(plan.experiment.n_folds)
                    ]
                )
                for seed in range(plan.n_seeds)
            ]
            for site in plan.experiment.sites
        }
        for name in methods
    }


def _joined(folds: Sequence[Mapping[str, Any]]) -> HeldOut:
    tests = [read_scores(fold["test"]) for fold in folds]
    targets, scores = ([one.columns[name] for one in tests] for name in ("target", "p_1"))
    decided = [called(one) == 1 for one in tests]
    return HeldOut(*map(np.concatenate, (targets, scores, decided)))


def mean_roc(repetitions: Sequence[HeldOut]) -> np.ndarray | None:
    """Return the true positive rate at each false positive rate of :data:`GRID`.

    The mean over repetitions at the same false positive rate; ``None`` where a class is absent.
    """
    from sklearn.metrics import roc_curve

    curves = []
    for one in repetitions:
        if len(np.unique(one.targets)) < 2:
            return None
        false, true, _ = roc_curve(one.targets, one.scores)
        curve = np.interp(GRID, false, true)
        curve[0] = 0.0
        curves.append(curve)
    mean: np.ndarray = np.mean(curves, axis=0)
    return mean


def confusion(repetitions: Sequence[HeldOut]) -> np.ndarray:
    """Count subjects, mean over repetitions: rows autism and control, columns called so."""
    counts = np.zeros((2, 2))
    for one in repetitions:
        for row, target in enumerate((1, 0)):
            for column, call in enumerate((True, False)):
                counts[row, column] += np.sum((one.targets == target) & (one.called == call))
    return counts / len(repetitions)


def calibration_points(repetitions: Sequence[HeldOut]) -> list[tuple[float, float, float]]:
    """Return mean score, share of autism and subjects a repetition, for each filled bin."""
    targets = np.concatenate([one.targets for one in repetitions])
    scores = np.concatenate([one.scores for one in repetitions])
    number = np.minimum((scores * operating_point.N_BINS).astype(int), operating_point.N_BINS - 1)
    points = []
    for k in np.unique(number):
        members = number == k
        if members.sum() >= MIN_IN_BIN:
            n = float(members.sum()) / len(repetitions)
            points.append((float(scores[members].mean()), float(targets[members].mean()), n))
    return points
