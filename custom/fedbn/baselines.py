"""Linear classifiers on connectomes: what a network has to beat.

Ridge and logistic regression on the same standardised samples as the networks. The strength of the
penalty is chosen by cross-validation by subject inside the training samples: of the candidates, the
one with the least mean squared error of the subjects' scores. scikit-learn is imported where it is
used, and runs on one thread, so that a number does not depend on the machine's cores.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from fedbn.evaluation import subject_scores

Scorer = Callable[[torch.Tensor], np.ndarray]
"""Samples (n, n_edges) to probabilities (n, 2)."""

Fit = Callable[[torch.Tensor, np.ndarray, np.ndarray, int], Scorer]
"""Samples (n, n_edges), classes (n,), subjects (n,) and a seed to a scorer."""

PENALTIES = (0.1, 1.0, 10.0, 100.0)
"""Candidates for the penalty, on features that are scaled by one over the root of their number."""

N_INNER_FOLDS = 3


def fit_ridge(inputs: torch.Tensor, targets: np.ndarray, subjects: np.ndarray, seed: int) -> Scorer:
    """Fit a ridge regression of the class, 0 or 1; its value, cut to [0, 1], is the probability.

    Solved in its dual form, whose size is that of the samples and not of the edges.

    Parameters
    ----------
    inputs : torch.Tensor
        float32 (n, n_edges).
    targets : numpy.ndarray
        0 or 1, (n,).
    subjects : numpy.ndarray
        Subject of each sample, (n,).
    seed : int
        Of the inner folds.
    """
    from sklearn.kernel_ridge import KernelRidge
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    mean = inputs.mean(dim=0)
    centred = inputs - mean
    kernel = (centred @ centred.T).double().numpy() / inputs.shape[1]

    def solve(rows: np.ndarray, penalty: float) -> tuple[np.ndarray, float]:
        level = float(targets[rows].mean())
        model = KernelRidge(alpha=penalty, kernel="precomputed")
        with threadpool_limits(1):
            model.fit(kernel[np.ix_(rows, rows)], targets[rows] - level)
        return model.dual_coef_, level

    def scores(train: np.ndarray, test: np.ndarray, penalty: float) -> np.ndarray:
        dual, level = solve(train, penalty)
        return np.clip(np.einsum("ij,j->i", kernel[np.ix_(test, train)], dual) + level, 0, 1)

    penalty = choose_penalty(scores, targets, subjects, seed)
    dual, level = solve(np.arange(len(targets)), penalty)
    weights = centred.T.double() @ torch.from_numpy(dual) / inputs.shape[1]
    offset = level - float(mean.double() @ weights)
    return lambda samples: _two_columns(
        (samples.double() @ weights + offset).clamp(0, 1).cpu().numpy()
    )


def fit_logistic(
    inputs: torch.Tensor, targets: np.ndarray, subjects: np.ndarray, seed: int
) -> Scorer:
    """Fit a logistic regression with an L2 penalty.

    Parameters are those of :func:`fit_ridge`.
    """
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    mean = inputs.mean(dim=0)
    scale = inputs.shape[1] ** -0.5

    def scaled(samples: torch.Tensor) -> np.ndarray:
        values: np.ndarray = ((samples - mean) * scale).cpu().numpy()
        return values

    features = scaled(inputs)

    def solve(rows: np.ndarray, penalty: float) -> LogisticRegression:
        model = LogisticRegression(C=1 / penalty, max_iter=1000)
        with threadpool_limits(1):
            return model.fit(features[rows], targets[rows])

    def scores(train: np.ndarray, test: np.ndarray, penalty: float) -> np.ndarray:
        with threadpool_limits(1):
            probability: np.ndarray = solve(train, penalty).predict_proba(features[test])[:, 1]
        return probability

    model = solve(np.arange(len(targets)), choose_penalty(scores, targets, subjects, seed))

    def score(samples: torch.Tensor) -> np.ndarray:
        with threadpool_limits(1):
            return _two_columns(model.predict_proba(scaled(samples))[:, 1].astype(np.float64))

    return score


def choose_penalty(
    scores: Callable[[np.ndarray, np.ndarray, float], np.ndarray],
    targets: np.ndarray,
    subjects: np.ndarray,
    seed: int,
) -> float:
    """Choose a penalty by cross-validation by subject within the training samples.

    Parameters
    ----------
    scores
        Called with training rows, test rows and a penalty; gives the test rows' probabilities.
    targets, subjects
        Class and subject of each sample, (n,).
    seed
        Of the inner folds.

    Returns
    -------
    float
        Of :data:`PENALTIES`. The middle one, unseen, where a class has fewer subjects than there
        are inner folds.
    """
    from sklearn.model_selection import StratifiedKFold

    names, first, owner = np.unique(subjects, return_index=True, return_inverse=True)
    classes = targets[first]
    if np.bincount(classes, minlength=2).min() < N_INNER_FOLDS:
        return PENALTIES[len(PENALTIES) // 2]
    errors = np.zeros((len(PENALTIES), len(names)))
    folds = StratifiedKFold(N_INNER_FOLDS, shuffle=True, random_state=seed)
    for train, test in folds.split(names, classes):
        train_rows = np.flatnonzero(np.isin(owner, train))
        test_rows = np.flatnonzero(np.isin(owner, test))
        for k, penalty in enumerate(PENALTIES):
            of_subject, which = subject_scores(
                scores(train_rows, test_rows, penalty), owner[test_rows]
            )
            errors[k, which] = (of_subject - classes[which]) ** 2
    return PENALTIES[int(errors.mean(axis=1).argmin())]


def _two_columns(autism: np.ndarray) -> np.ndarray:
    return np.stack([1 - autism, autism], axis=1)
