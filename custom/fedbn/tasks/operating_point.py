"""Where a classifier decides, apart from how well it ranks.

Two methods with the same AUC can differ in accuracy because one knows a site's share of patients
and the other does not. Here is what tells the two apart: a threshold that is chosen on training
subjects, and how far the scores are from being probabilities.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

N_BINS = 10


def choose_threshold(targets: np.ndarray, scores: np.ndarray) -> float:
    """Choose the threshold of the best accuracy on these (training) subjects.

    A threshold between two neighbouring scores predicts the same wherever it lies between them. Of
    all such gaps, and those to 0 and 1, with the best accuracy the widest is taken (of equally wide
    ones the lowest), and the threshold is its middle, as far from any subject as can be.

    Parameters
    ----------
    targets : numpy.ndarray
        0 or 1, (n,), ``n >= 1``.
    scores : numpy.ndarray
        Probability of class 1, (n,).

    Returns
    -------
    float
        In [0, 1]; a score of at least this much predicts class 1.
    """
    positive = np.asarray(targets) == 1
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim != 1 or scores.shape != positive.shape or len(scores) == 0:
        raise ValueError(
            f"targets have shape {positive.shape} and scores {scores.shape}: "
            "give one score for each subject, and at least one subject"
        )
    edges = np.unique([0.0, *scores.tolist(), 1.0])
    middles = (edges[1:] + edges[:-1]) / 2
    right = ((scores[None, :] >= middles[:, None]) == positive).sum(axis=1)
    widths = np.where(right == right.max(), np.diff(edges), -1)
    return float(middles[widths.argmax()])


def brier_score(targets: np.ndarray, scores: np.ndarray) -> float:
    """Return the mean squared difference of probability and class; NaN without samples."""
    if len(targets) == 0:
        return math.nan
    return float(np.mean((np.asarray(scores, dtype=np.float64) - targets) ** 2))


def calibration(targets: np.ndarray, scores: np.ndarray) -> dict[str, Any]:
    """Say how far scores are from being probabilities.

    Parameters
    ----------
    targets : numpy.ndarray
        0 or 1, (n,), ``n >= 1``: held-out subjects of all folds.
    scores : numpy.ndarray
        Probability of class 1, in [0, 1], (n,).

    Returns
    -------
    dict
        ``"n"``; ``"observed_share"`` of class 1; ``"mean_score"``; ``"excess"``, their difference,
        above zero where too many are called patients; ``"expected_error"``, the mean distance of
        score and share over ten equal bins, weighted by subjects; ``"slope"`` and ``"intercept"``
        of a logistic regression of the class on the score's log odds (1 and 0 if calibrated, a
        slope below 1 for scores that are too sure; NaN where one class is absent or all scores
        are equal); ``"bins"``: for each bin that is not empty, its mean score, observed share and
        number of subjects.
    """
    targets = np.asarray(targets, dtype=np.float64)
    scores = np.asarray(scores, dtype=np.float64)
    if len(scores) == 0 or targets.shape != scores.shape:
        raise ValueError(
            f"targets have shape {targets.shape} and scores {scores.shape}: "
            "give one score for each subject, and at least one subject"
        )
    bins = []
    number = np.minimum((scores * N_BINS).astype(int), N_BINS - 1)
    for k in np.unique(number):
        members = number == k
        bins.append(
            {
                "mean_score": float(scores[members].mean()),
                "observed_share": float(targets[members].mean()),
                "n": int(members.sum()),
            }
        )
    slope, intercept = _recalibration(targets, scores)
    return {
        "n": len(scores),
        "observed_share": float(targets.mean()),
        "mean_score": float(scores.mean()),
        "excess": float(scores.mean() - targets.mean()),
        "expected_error": math.fsum(
            b["n"] * abs(b["mean_score"] - b["observed_share"]) for b in bins
        )
        / len(scores),
        "slope": slope,
        "intercept": intercept,
        "bins": bins,
    }


def _recalibration(targets: np.ndarray, scores: np.ndarray) -> tuple[float, float]:
    """Fit class on log odds by logistic regression, all but unpenalised."""
    from sklearn.linear_model import LogisticRegression

    if len(np.unique(targets)) < 2 or len(np.unique(scores)) < 2:
        return math.nan, math.nan
    clipped = np.clip(scores, 1e-6, 1 - 1e-6)
    log_odds = np.log(clipped / (1 - clipped))
    model = LogisticRegression(C=1e6, tol=1e-8, max_iter=1000)
    model.fit(log_odds[:, None], targets.astype(int))
    return float(model.coef_[0, 0]), float(model.intercept_[0])
