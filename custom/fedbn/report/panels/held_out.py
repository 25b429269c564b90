"""The held-out units of a site under one method: what curves and counts are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedbn.tasks import operating_point
from fedbn.tasks.base import Scores
from fedbn.tasks.classification import called, probabilities

GRID = np.linspace(0, 1, 1001)
MIN_IN_BIN = 5
"""A calibration bin of fewer scores than this is not drawn."""


@dataclass(frozen=True)
class HeldOut:
    """Each unit of one site once, as a network scored it that had not trained on it.

    Attributes
    ----------
    targets, called
        Class, and the one that the method calls by its own threshold, (n,).
    probability
        (n, n_classes).
    """

    targets: np.ndarray
    called: np.ndarray
    probability: np.ndarray

    @classmethod
    def of(cls, folds: Sequence[Scores]) -> HeldOut:
        """Join folds, none of whose units is in two of them."""
        targets = np.concatenate([one.columns["target"] for one in folds])
        decided = np.concatenate([called(one) for one in folds])
        return cls(targets, decided, np.concatenate([probabilities(one) for one in folds]))


def mean_roc(repetitions: Sequence[HeldOut]) -> np.ndarray | None:
    """Return the true positive rate of two classes at each false positive rate of :data:`GRID`.

    The mean over repetitions at the same false positive rate; ``None`` where a class is absent.
    """
    from sklearn.metrics import roc_curve

    curves = []
    for one in repetitions:
        if len(np.unique(one.targets)) < 2:
            return None
        false, true, _ = roc_curve(one.targets, one.probability[:, 1])
        curve = np.interp(GRID, false, true)
        curve[0] = 0.0
        curves.append(curve)
    mean: np.ndarray = np.mean(curves, axis=0)
    return mean


def confusion(repetitions: Sequence[HeldOut]) -> np.ndarray:
    """Count units, mean over repetitions: rows their classes, columns those they are called."""
    n_classes = repetitions[0].probability.shape[1]
    counts = np.zeros((n_classes, n_classes))
    for one in repetitions:
        np.add.at(counts, (one.targets, one.called), 1)
    return counts / len(repetitions)


def calibration_points(repetitions: Sequence[HeldOut]) -> list[tuple[float, float, float]]:
    """Return mean score, share of positives and units a repetition, for each filled bin."""
    targets = np.concatenate([one.targets for one in repetitions])
    scores = np.concatenate([one.probability[:, 1] for one in repetitions])
    number = np.minimum((scores * operating_point.N_BINS).astype(int), operating_point.N_BINS - 1)
    points = []
    for k in np.unique(number):
        members = number == k
        if members.sum() >= MIN_IN_BIN:
            n = float(members.sum()) / len(repetitions)
            points.append((float(scores[members].mean()), float(targets[members].mean()), n))
    return points
