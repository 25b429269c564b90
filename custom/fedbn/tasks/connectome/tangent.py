"""Connectomes as steps away from a common reference: the tangent space of covariance matrices.

Correlation matrices are positive definite and do not fill a flat space. Varoquaux et al. (MICCAI
2010) describe each by the step that leads to it from a reference ``G``, the group's mean,

    T = log(G^-1/2 C G^-1/2),

whose edges vary less together than correlations do. The reference is fitted on training subjects
only. It is the log-Euclidean mean (Arsigny et al., SIAM J. Matrix Anal. Appl. 29, 2007),
``G = exp(mean of log(C))``: in closed form where the geometric mean is iterated for minutes, and a
plain mean over samples, so that sites which send the sum of their matrices' logarithms and the
number of samples have the same reference as one place with all data.

Nothing is regularised here: what makes a matrix positive definite is the shrinkage (Ledoit-Wolf)
with which the store was prepared. Stores that lost it are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from data_prep.site_store import SiteStore, StoreError

SMALLEST_EIGENVALUE = 1e-6
"""A correlation matrix with a smaller one than this counts as not positive definite: float32 values
are no more exact."""

_CHUNK = 256


def correlation_matrices(connectomes: np.ndarray, n_rois: int) -> np.ndarray:
    """Rebuild correlation matrices from Fisher-z edges.

    Parameters
    ----------
    connectomes : numpy.ndarray
        (n, n_edges), in the order of ``np.triu_indices(n_rois, k=1)``.
    n_rois : int
        Number of nodes.

    Returns
    -------
    numpy.ndarray
        float64 (n, n_rois, n_rois), ones on the diagonal.
    """
    rows, columns = np.triu_indices(n_rois, k=1)
    matrices = np.empty((len(connectomes), n_rois, n_rois))
    matrices[:, range(n_rois), range(n_rois)] = 1
    r = np.tanh(np.asarray(connectomes, dtype=np.float64))
    matrices[:, rows, columns] = r
    matrices[:, columns, rows] = r
    return matrices


def matrix_logarithm(matrices: np.ndarray) -> np.ndarray:
    """Return the logarithms of symmetric positive definite matrices, (..., n_rois, n_rois).

    Raises
    ------
    ValueError
        If a matrix is not positive definite, with its smallest eigenvalue.
    """
    values, vectors = np.linalg.eigh(matrices)
    if values.min() < SMALLEST_EIGENVALUE:
        raise ValueError(f"a matrix is not positive definite (an eigenvalue of {values.min():.2g})")
    logarithms: np.ndarray = vectors * np.log(values)[..., None, :] @ np.swapaxes(vectors, -1, -2)
    return logarithms


def matrix_exponential(matrices: np.ndarray, factor: float = 1.0) -> np.ndarray:
    """Return ``exp(factor * M)`` of symmetric matrices, (..., n_rois, n_rois)."""
    values, vectors = np.linalg.eigh(matrices)
    exponentials: np.ndarray = (
        vectors * np.exp(factor * values)[..., None, :] @ np.swapaxes(vectors, -1, -2)
    )
    return exponentials


def tangent_vectors(matrices: np.ndarray, log_reference: np.ndarray) -> np.ndarray:
    """Return each matrix as a step from the reference, without the diagonal.

    Parameters
    ----------
    matrices : numpy.ndarray
        Symmetric positive definite, (n, n_rois, n_rois).
    log_reference : numpy.ndarray
        Logarithm of the reference, (n_rois, n_rois).

    Returns
    -------
    numpy.ndarray
        float64 (n, n_edges), in the order of ``np.triu_indices(n_rois, k=1)``.
    """
    whitening = matrix_exponential(log_reference, -0.5)
    whitened = whitening @ matrices @ whitening
    steps = matrix_logarithm((whitened + np.swapaxes(whitened, -1, -2)) / 2)
    rows, columns = np.triu_indices(matrices.shape[-1], k=1)
    vectors: np.ndarray = steps[:, rows, columns]
    return vectors


def tangent_stores(
    stores: Mapping[str, SiteStore], train_rows: Mapping[str, np.ndarray]
) -> dict[str, SiteStore]:
    """Give each site's connectomes as steps from the reference of these sites' training samples.

    Sites tell each other two sums over their training samples, each with the number of samples: of
    the logarithms, and of the squared edges of the steps. The second one scales all edges by one
    number, so that penalties and learning rates mean what they mean for standardised features.

    Parameters
    ----------
    stores
        Site name to a store of correlations with their negative values.
    train_rows
        Site name to the samples, rows of the store's connectomes, that the reference and the scale
        are fitted on. Each of these samples counts the same.

    Returns
    -------
    dict
        Site name to the store with ``connectomes`` replaced, float32 in memory; a training edge
        has a mean square of 1.

    Raises
    ------
    data_prep.site_store.StoreError
        If a store holds no correlations, lost negative values, or has a matrix that is not positive
        definite; with the site.
    """
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    names = sorted(stores)
    for name in names:
        _require_correlations(name, stores[name])
    with threadpool_limits(1):  # the same bits whatever the number of cores
        sums = [_sum_of_logarithms(name, stores[name], train_rows[name]) for name in names]
        n = sum(len(train_rows[name]) for name in names)
        log_reference = _total(sums) / n
        steps = {name: _steps(name, stores[name], log_reference) for name in names}
        squares = [np.square(steps[name][train_rows[name]]).sum() for name in names]
        scale = np.sqrt(_total(squares) / (n * steps[names[0]].shape[1]))
    given = {}
    for name in names:
        scaled: Any = (steps[name] / (scale or 1)).astype(np.float32)
        given[name] = replace(stores[name], connectomes=scaled)
    return given


def _require_correlations(name: str, store: SiteStore) -> None:
    settings = store.description["connectome"]
    if settings["kind"] != "correlation":
        raise StoreError(
            f"site {name!r}: its store holds connectomes of kind {settings['kind']!r}; the tangent "
            "space is built from correlations, prepare the store with --kind correlation"
        )
    if settings["negative"] != "keep":
        raise StoreError(
            f"site {name!r}: its store was prepared with negative values set to zero, and the "
            "tangent space needs them; prepare it again with --negative keep"
        )


def _matrices(name: str, store: SiteStore, rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the matrices of rows, a chunk at a time."""
    for start in range(0, len(rows), _CHUNK):
        chunk = store.connectomes[rows[start : start + _CHUNK]]
        yield correlation_matrices(chunk, store.n_rois)


def _sum_of_logarithms(name: str, store: SiteStore, rows: np.ndarray) -> np.ndarray:
    total = np.zeros((store.n_rois, store.n_rois))
    for matrices in _matrices(name, store, rows):
        total += _logarithms(name, store, matrices).sum(axis=0)
    return total


def _logarithms(name: str, store: SiteStore, matrices: np.ndarray) -> np.ndarray:
    try:
        return matrix_logarithm(matrices)
    except ValueError as error:
        settings = store.description["connectome"]
        raise StoreError(
            f"site {name!r}: {error}, so that it has no place in the tangent space; prepare the "
            "store with --estimator ledoit-wolf or longer windows (now "
            f"{settings['estimator']}, {settings['window'] or 'whole scans'})"
        ) from error


def _steps(name: str, store: SiteStore, log_reference: np.ndarray) -> np.ndarray:
    steps = np.empty((len(store.connectomes), store.n_edges))
    start = 0
    for matrices in _matrices(name, store, np.arange(len(store.connectomes))):
        try:
            steps[start : start + len(matrices)] = tangent_vectors(matrices, log_reference)
        except ValueError:
            _logarithms(name, store, matrices)  # says so by name
            raise
        start += len(matrices)
    return steps


def _total(sums: Sequence[np.ndarray]) -> np.ndarray:
    """Add in the order of the sites' names: the same bits in whatever order they are given."""
    total: np.ndarray = np.sum(np.stack([np.asarray(one) for one in sums]), axis=0)
    return total
