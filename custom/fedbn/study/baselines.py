"""Linear classifiers: what a network has to beat.

Ridge and logistic regression on the same samples as the networks. The strength of the penalty is
chosen by cross-validation by subject inside the training samples: of the candidates, the one with
the least mean squared error of the subjects' scores. scikit-learn is imported where it is used, and
runs on one thread, so that a number does not depend on the machine's cores.

:func:`fit_federated_ridge` is the same ridge regression without data in one place: conjugate
gradients (Hestenes and Stiefel, J. Res. Natl. Bur. Stand. 49, 1952) need the samples only through
products that are sums over sites.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedbn.tasks.classification import unit_means

Scorer = Callable[[torch.Tensor], np.ndarray]
"""Samples (n, n_features) to probabilities (n, n_classes)."""


@dataclass(frozen=True)
class SiteSamples:
    """The training samples of one site.

    Attributes
    ----------
    site
        Its name.
    inputs
        float32 (n, n_features).
    targets
        0 or 1, (n,); of several classes their numbers.
    subjects
        Subject of each sample, (n,).
    """

    site: str
    inputs: torch.Tensor
    targets: np.ndarray
    subjects: np.ndarray


Fit = Callable[[Sequence[SiteSamples], int], Scorer]
"""The samples of one site or several, and a seed, to a scorer of two classes."""

PENALTIES = (0.1, 1.0, 10.0, 100.0)
"""Candidates for the penalty, on features that are scaled by one over the root of their number."""

FEDERATED_PENALTIES = (10.0, 3.0, 1.0, 0.3, 0.1)
"""Candidates of the federated ridge, in units of the mean squared norm of a centred sample. The
strongest first: each solution is where the next one's search begins."""

RESIDUAL = 1e-4
"""Conjugate gradients stop where the residual is this part of the right-hand side."""

N_INNER_FOLDS = 3


def fit_classes(fit: Fit, sites: Sequence[SiteSamples], n_classes: int, seed: int) -> Scorer:
    """Fit a classifier of two classes; of more classes each one against the rest.

    The probabilities of more than two classes are made to add up to 1; that of a class without a
    training sample is 0.
    """
    if n_classes == 2:
        return fit(sites, seed)
    scorers = []
    for k in range(n_classes):
        of_class = [replace(one, targets=(one.targets == k).astype(np.int64)) for one in sites]
        is_there = any(one.targets.any() for one in of_class)
        scorers.append(fit(of_class, seed) if is_there else None)

    def score(samples: torch.Tensor) -> np.ndarray:
        none = np.zeros(len(samples))
        each = [none if one is None else np.maximum(one(samples)[:, 1], 1e-12) for one in scorers]
        columns: np.ndarray = np.stack(each, axis=1)
        return columns / columns.sum(axis=1, keepdims=True)

    return score


def _in_one_place(sites: Sequence[SiteSamples]) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Return samples, classes and subjects of all sites."""
    names = [f"{one.site}/{subject}" for one in sites for subject in one.subjects]
    inputs = torch.cat([one.inputs for one in sites])
    return inputs, np.concatenate([one.targets for one in sites]), np.array(names)


def fit_ridge(sites: Sequence[SiteSamples], seed: int) -> Scorer:
    """Fit a ridge regression of the class, 0 or 1; its value, cut to [0, 1], is the probability.

    Solved in its dual form, whose size is that of the samples and not of the features.

    Parameters
    ----------
    sites : sequence of SiteSamples
        Joined in this order.
    seed : int
        Of the inner folds.
    """
    from sklearn.kernel_ridge import KernelRidge
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    inputs, targets, subjects = _in_one_place(sites)
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


def fit_logistic(sites: Sequence[SiteSamples], seed: int) -> Scorer:
    """Fit a logistic regression with an L2 penalty.

    Parameters are those of :func:`fit_ridge`.
    """
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    inputs, targets, subjects = _in_one_place(sites)
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


class _RidgeSite:
    """A site's part of a federated ridge: it answers with sums over many of its samples alone."""

    def __init__(self, samples: SiteSamples, seed: int):
        self._inputs = samples.inputs.double()
        self._targets = torch.from_numpy(samples.targets).double()
        _, first, self._owner = np.unique(samples.subjects, return_index=True, return_inverse=True)
        self._classes = samples.targets[first]
        fold = _inner_folds(self._classes, seed)
        self.can_choose = fold is not None
        self._fold = np.zeros(0) if fold is None else fold[self._owner]
        self._held_out = np.zeros(0, dtype=np.int64)
        self._x, self._y = self._inputs, self._targets

    def hold_out(self, fold: int | None) -> None:
        """Leave one inner fold's subjects out of all sums; with ``None`` nobody."""
        self._held_out = np.flatnonzero(self._fold == fold)
        self._x, self._y = self._inputs, self._targets
        if fold is not None:
            rows = torch.from_numpy(np.flatnonzero(self._fold != fold))
            self._x, self._y = self._inputs[rows], self._targets[rows]

    def moments(self) -> tuple[int, torch.Tensor, float, float]:
        """Return the number of samples, and the sums of samples, classes and squared norms."""
        return len(self._x), self._x.sum(dim=0), float(self._y.sum()), float((self._x**2).sum())

    def gradient(self, weights: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Return ``X'X w`` of the samples centred at the common mean, (n_features,)."""
        return self._against_samples(self._x @ weights - mean @ weights, mean)

    def covariance_with_class(self, mean: torch.Tensor, level: float) -> torch.Tensor:
        """Return ``X'y`` of the centred samples and classes, (n_features,)."""
        return self._against_samples(self._y - level, mean)

    def _against_samples(self, values: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return self._x.T @ values - mean * values.sum()

    def squared_error(self, weights: torch.Tensor, offset: float) -> float:
        """Return the sum of the squared errors of the held-out subjects' scores."""
        rows = self._held_out
        values = (self._inputs[rows] @ weights + offset).clamp(0, 1).numpy()
        scores, which = unit_means(values, self._owner[rows])
        return float(np.sum((scores - self._classes[which]) ** 2))


def fit_federated_ridge(sites: Sequence[SiteSamples], seed: int) -> Scorer:
    """Fit a ridge regression of the class over several sites, none of which shows a sample.

    The weights solve ``(X'X + penalty * s * I) w = X'y`` over the samples of all sites, centred at
    the common mean, with ``s`` their mean squared norm. Each step of the conjugate gradients sends
    a vector of ``n_features`` numbers to every site, which answers with one of the same length: the
    sum over its own samples. Beside these the sites add up numbers of samples, sums of samples,
    classes and squared norms, and the squared errors by which the penalty is chosen. Every sum is
    over all of a site's training samples, or all but an inner fold.

    Parameters
    ----------
    sites : sequence of SiteSamples
        In an order that does not depend on who asks: sums of floating-point numbers do.
    seed : int
        Of each site's inner folds by subject.

    Returns
    -------
    Scorer
        Its value, cut to [0, 1], is the probability.
    """
    parts = [_RidgeSite(samples, seed) for samples in sites]
    errors = np.zeros(len(FEDERATED_PENALTIES))
    penalty = FEDERATED_PENALTIES[len(FEDERATED_PENALTIES) // 2]
    if all(part.can_choose for part in parts):
        for fold in range(N_INNER_FOLDS):
            for part in parts:
                part.hold_out(fold)
            for k, (weights, offset) in enumerate(_solve(parts, FEDERATED_PENALTIES)):
                errors[k] += sum(part.squared_error(weights, offset) for part in parts)
        penalty = FEDERATED_PENALTIES[int(errors.argmin())]
        for part in parts:
            part.hold_out(None)
    ((weights, offset),) = _solve(parts, (penalty,))
    return lambda samples: _two_columns(
        (samples.double() @ weights + offset).clamp(0, 1).cpu().numpy()
    )


def _solve(
    parts: Sequence[_RidgeSite], penalties: Sequence[float]
) -> list[tuple[torch.Tensor, float]]:
    """Return weights and offset for each penalty."""
    from scipy.sparse.linalg import LinearOperator, cg

    counts, sums, classes, squares = zip(*(part.moments() for part in parts), strict=True)
    n = sum(counts)
    mean = torch.stack(sums).sum(dim=0) / n
    level = sum(classes) / n
    spread = sum(squares) / n - float(mean @ mean)
    right = torch.stack([part.covariance_with_class(mean, level) for part in parts]).sum(dim=0)
    found = []
    start = np.zeros(len(mean))
    for penalty in penalties:

        def product(vector: np.ndarray, strength: float = penalty * spread) -> np.ndarray:
            weights = torch.from_numpy(vector)
            of_sites = torch.stack([part.gradient(weights, mean) for part in parts])
            total: np.ndarray = (of_sites.sum(dim=0) + strength * weights).numpy()
            return total

        operator = LinearOperator((len(mean),) * 2, matvec=product, dtype=np.float64)
        start, failed = cg(operator, right.numpy(), x0=start, rtol=RESIDUAL, maxiter=1000)
        if failed:
            raise ArithmeticError(
                f"the federated ridge with penalty {penalty:g} did not converge in 1000 steps; "
                "are the samples finite and not all equal?"
            )
        weights = torch.from_numpy(start.copy())
        found.append((weights, level - float(mean @ weights)))
    return found


def _inner_folds(classes: np.ndarray, seed: int) -> np.ndarray | None:
    """Divide a site's subjects, unless a class has fewer of them than there are folds."""
    from sklearn.model_selection import StratifiedKFold

    if np.bincount(classes, minlength=2).min() < N_INNER_FOLDS:
        return None
    fold = np.zeros(len(classes), dtype=np.int64)
    folds = StratifiedKFold(N_INNER_FOLDS, shuffle=True, random_state=seed)
    for k, (_, test) in enumerate(folds.split(classes, classes)):
        fold[test] = k
    return fold


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
    names, first, owner = np.unique(subjects, return_index=True, return_inverse=True)
    classes = targets[first]
    fold = _inner_folds(classes, seed)
    if fold is None:
        return PENALTIES[len(PENALTIES) // 2]
    errors = np.zeros((len(PENALTIES), len(names)))
    for held_out in range(N_INNER_FOLDS):
        in_test = fold[owner] == held_out
        train, test = np.flatnonzero(~in_test), np.flatnonzero(in_test)
        for k, penalty in enumerate(PENALTIES):
            of_subject, which = unit_means(scores(train, test, penalty), owner[test])
            errors[k, which] = (of_subject - classes[which]) ** 2
    return PENALTIES[int(errors.mean(axis=1).argmin())]


def _two_columns(positive: np.ndarray) -> np.ndarray:
    return np.stack([1 - positive, positive], axis=1)
