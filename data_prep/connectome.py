"""From ROI time series to connectome vectors, for whole scans or sliding windows.

Correlations are computed for many windows at once. A window's z-scored columns have unit
variance, which gives Ledoit and Wolf's shrinkage (2004, *Journal of Multivariate Analysis* 88)
a closed form: the shrunk correlation is the plain one times a number a window, so both estimators
cost one matrix product a window.
"""

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

__all__ = [
    "ESTIMATORS",
    "KINDS",
    "NEGATIVE_RULES",
    "ConnectomeSettings",
    "correlation_connectomes",
    "tangent_connectomes",
    "whole_scan_connectome",
    "window_starts",
]

ESTIMATORS = ("ledoit-wolf", "pearson")
KINDS = ("correlation", "partial correlation", "covariance", "tangent")
NEGATIVE_RULES = ("keep", "zero")

# |r| is held below this before Fisher's z, so that z stays finite: at most 8.4.
LARGEST_CORRELATION = 1.0 - 1e-7
# A column whose spread is below this share of its mean holds rounding and no signal.
RELATIVE_SILENCE = 1e-12
# Windows treated together: their matrices stay in the processor's cache.
WINDOWS_AT_ONCE = 16


@dataclass(frozen=True)
class ConnectomeSettings:
    """How connectomes are made; stated in the site store.

    Attributes
    ----------
    kind : str
        One of `KINDS`; all but ``"correlation"`` are for whole scans.
    estimator : str
        One of `ESTIMATORS`: ``"ledoit-wolf"`` shrinks the covariance, ``"pearson"`` does not.
    window : int or None
        Length of the sliding window in time points; None for the whole scan.
    stride : int or None
        Step between windows in time points; None for the whole scan.
    negative : str
        One of `NEGATIVE_RULES`: what happens to negative values.
    window_seconds : float or None
        The window as it was asked for, where that was in seconds; `window` follows from it and
        from the site's repetition time.
    """

    kind: str = "correlation"
    estimator: str = "ledoit-wolf"
    window: int | None = 32
    stride: int | None = 1
    negative: str = "keep"
    window_seconds: float | None = None

    def __post_init__(self) -> None:
        """Refuse values that are not allowed."""
        for name, value, allowed in (
            ("kind", self.kind, KINDS),
            ("estimator", self.estimator, ESTIMATORS),
            ("negative", self.negative, NEGATIVE_RULES),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; allowed are {', '.join(allowed)}")
        if (self.window is None) != (self.stride is None):
            raise ValueError("window and stride are given together, or neither for whole scans")
        if self.window is not None and self.kind != "correlation":
            raise ValueError(
                f"kind {self.kind!r} is for whole scans only; add --whole-scan or use correlation"
            )
        if self.window is not None and self.window < 3:
            raise ValueError(f"window is {self.window}; at least 3 time points are needed")
        if self.stride is not None and self.stride < 1:
            raise ValueError(f"stride is {self.stride}; it must be at least 1")

    @property
    def transform(self) -> str:
        """What is applied to the values: Fisher's z to correlations, nothing to the rest."""
        return "fisher z" if "correlation" in self.kind else "none"

    def describe(self) -> dict[str, Any]:
        """Return the settings as the site store states them."""
        stated = {k: v for k, v in asdict(self).items() if k != "window_seconds" or v is not None}
        return {**stated, "transform": self.transform}


def window_starts(n_timepoints: int, window: int | None, stride: int | None) -> np.ndarray:
    """Return where each window of a scan starts.

    Parameters
    ----------
    n_timepoints : int
        Length of the scan.
    window, stride : int or None
        In time points; both None for one window over the whole scan.

    Returns
    -------
    np.ndarray, int64, shape (n_windows,)
        Empty if the scan is shorter than the window.
    """
    if window is None or stride is None:
        return np.zeros(1, dtype=np.int64)
    return np.arange(0, n_timepoints - window + 1, stride, dtype=np.int64)


def correlation_connectomes(
    series: np.ndarray,
    *,
    window: int | None = None,
    stride: int | None = None,
    estimator: str = "ledoit-wolf",
    negative: str = "keep",
    out: np.ndarray | None = None,
    n_threads: int | None = None,
) -> np.ndarray:
    """Compute the Fisher-z correlation connectome of each window of a scan.

    Same values as nilearn's ``ConnectivityMeasure(kind="correlation")`` followed by Fisher's z.
    An edge of an ROI that is constant inside a window is 0.

    Parameters
    ----------
    series : np.ndarray, shape (n_timepoints, n_rois)
        ROI time series, finite, in any unit.
    window, stride : int or None
        In time points; both None for the whole scan.
    estimator : str
        ``"ledoit-wolf"`` or ``"pearson"``.
    negative : str
        ``"keep"`` or ``"zero"``.
    out : np.ndarray, float32, shape (n_windows, n_edges), optional
        Where to write, such as a part of a file on disk.
    n_threads : int, optional
        By default one for each core that this process may use.

    Returns
    -------
    np.ndarray, float32, shape (n_windows, n_edges)
        Edges in the order of ``np.triu_indices(n_rois, k=1)``; all finite, within ±8.41.

    Raises
    ------
    ValueError
        If the series has a value that is not finite, or is shorter than the window.
    """
    settings = ConnectomeSettings("correlation", estimator, window, stride, negative)
    series = _checked_series(series)
    n_timepoints, n_rois = series.shape
    length = n_timepoints if window is None else window
    starts = window_starts(n_timepoints, window, stride)
    if len(starts) == 0 or length < 3:
        raise ValueError(
            f"the scan has {n_timepoints} time points, the window needs {max(3, length)}"
        )
    n_edges = n_rois * (n_rois - 1) // 2
    if out is None:
        out = np.empty((len(starts), n_edges), dtype=np.float32)
    elif out.shape != (len(starts), n_edges) or out.dtype != np.float32:
        raise ValueError(
            f"out is {out.dtype} {out.shape}, expected float32 {(len(starts), n_edges)}"
        )
    # (n_windows, length, n_rois), a view on the series
    windows = np.lib.stride_tricks.sliding_window_view(np.ascontiguousarray(series), length, 0)
    windows = windows.transpose(0, 2, 1)[:: stride or 1]
    chunks = [slice(b, b + WINDOWS_AT_ONCE) for b in range(0, len(starts), WINDOWS_AT_ONCE)]
    n_threads = min(n_threads or _available_cores(), len(chunks))

    spare = _spare_buffers(min(WINDOWS_AT_ONCE, len(starts)), n_rois, length)

    def work(first: int) -> None:
        try:
            buffers = spare.pop()
        except IndexError:
            buffers = _Buffers.allocate(min(WINDOWS_AT_ONCE, len(starts)), n_rois, length)
        for chunk in chunks[first::n_threads]:
            _correlate(windows[chunk], settings, buffers, out[chunk])
        spare.append(buffers)

    with _one_blas_thread():
        if n_threads == 1:
            work(0)
        else:
            with ThreadPoolExecutor(n_threads) as pool:
                list(pool.map(work, range(n_threads)))
    return out


@dataclass(frozen=True)
class _Buffers:
    """Memory of one thread, used again for every chunk: fresh pages cost as much as the work."""

    x: np.ndarray
    transposed: np.ndarray
    products: np.ndarray
    r: np.ndarray

    @classmethod
    def allocate(cls, n: int, n_rois: int, length: int) -> "_Buffers":
        return cls(
            x=np.empty((n, length, n_rois)),
            transposed=np.empty((n, n_rois, length)),
            products=np.empty((n, n_rois, n_rois)),
            r=np.empty((n, n_rois * (n_rois - 1) // 2)),
        )

    def first(self, n: int) -> "_Buffers":
        """Return the part for `n` windows."""
        return _Buffers(self.x[:n], self.transposed[:n], self.products[:n], self.r[:n])


@lru_cache(maxsize=1)
def _spare_buffers(n: int, n_rois: int, length: int) -> list[_Buffers]:
    """Return the buffers that no thread uses now, kept for the next scan of the same shape."""
    return []


def _correlate(
    windows: np.ndarray, settings: ConnectomeSettings, buffers: _Buffers, out: np.ndarray
) -> None:
    """Write the connectomes of some windows, (n, length, n_rois), to `out`, (n, n_edges)."""
    n, _, n_rois = windows.shape
    buffers = buffers.first(n)
    x, r = buffers.x, buffers.r
    x[...] = windows
    active = _to_unit_norm(x)
    # A separate transposed operand: NumPy's product of an array with its own view is slower.
    buffers.transposed[...] = x.transpose(0, 2, 1)
    products = np.matmul(buffers.transposed, x, out=buffers.products)
    np.take(products.reshape(n, -1), _upper_triangle(n_rois), axis=1, out=r, mode="clip")
    if settings.estimator == "ledoit-wolf":
        r *= _ledoit_wolf_factor(x, r, active)[:, np.newaxis]
    np.clip(r, -LARGEST_CORRELATION, LARGEST_CORRELATION, out=r)
    np.arctanh(r, out=r)
    if settings.negative == "zero":
        np.maximum(r, 0.0, out=r)
    out[...] = r


def _to_unit_norm(x: np.ndarray) -> np.ndarray:
    """Centre each ROI's signal and give it unit norm, in place; count the ROIs with a signal.

    Parameters
    ----------
    x : np.ndarray, shape (n, length, n_rois)
        Overwritten; an ROI without signal becomes zero.

    Returns
    -------
    np.ndarray, float64, shape (n,)
        Number of ROIs with signal in each window.
    """
    _, length, n_rois = x.shape
    mean = x.mean(axis=1)
    x -= mean[:, np.newaxis]
    norm = np.sqrt(np.einsum("ntp,ntp->np", x, x))
    silent = norm <= RELATIVE_SILENCE * math.sqrt(length) * np.abs(mean)
    norm[silent] = np.inf
    x /= norm[:, np.newaxis]
    return n_rois - silent.sum(axis=1, dtype=np.float64)


def _ledoit_wolf_factor(x: np.ndarray, r: np.ndarray, active: np.ndarray) -> np.ndarray:
    """Return what Ledoit-Wolf shrinkage multiplies each window's correlations with.

    The shrunk covariance is ``(1 - s) S + s mu I``, ``mu = trace(S) / n_rois``. With z-scored
    signals (nilearn divides by ``length - 1``) every active variance in S is
    ``c = (length - 1) / length``, so a correlation r becomes
    ``(1 - s) c r / ((1 - s) c + s mu)``.

    Parameters
    ----------
    x : np.ndarray, shape (n, length, n_rois)
        Signals of unit norm.
    r : np.ndarray, shape (n, n_edges)
        Their correlations.
    active : np.ndarray, shape (n,)
        Number of ROIs with signal.

    Returns
    -------
    np.ndarray, shape (n,)
    """
    _, length, n_rois = x.shape
    c = (length - 1) / length
    mu = c * active / n_rois
    # Squared Frobenius norm of S, and the mean over time of each sample's own.
    norm_s = c * c * (active + 2.0 * np.einsum("ne,ne->n", r, r))
    of_sample = np.einsum("ntp,ntp->nt", x, x)
    mean_norm = (length - 1) ** 2 / length * np.einsum("nt,nt->n", of_sample, of_sample)
    spread = norm_s - n_rois * mu**2
    noise = np.minimum((mean_norm - norm_s) / length, spread)
    s = np.divide(noise, spread, out=np.zeros_like(noise), where=spread > 0)
    kept = (1.0 - s) * c
    total = kept + s * mu
    return np.divide(kept, total, out=np.zeros_like(kept), where=total > 0)


def _checked_series(series: np.ndarray) -> np.ndarray:
    series = np.asarray(series, dtype=np.float64)
    if series.ndim != 2 or series.shape[1] < 2:
        raise ValueError(
            f"series has shape {series.shape}, expected (n_timepoints, n_rois) with 2 ROIs or more"
        )
    if not np.isfinite(series).all():
        time, roi = np.argwhere(~np.isfinite(series))[0]
        raise ValueError(f"series has {series[time, roi]} at time point {time}, column {roi}")
    return series


@cache
def _upper_triangle(n_rois: int) -> np.ndarray:
    """Positions of the upper triangle in a flattened (n_rois, n_rois) matrix."""
    rows, columns = np.triu_indices(n_rois, k=1)
    return rows * n_rois + columns


def _available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def _blas() -> Any:
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController().select(user_api="blas")


@contextmanager
def _one_blas_thread() -> Iterator[None]:
    """Keep each small matrix product on one core: the windows are spread over cores instead."""
    with _blas().limit(limits=1):
        yield


# ------------------------------------------------------------ nilearn's other kinds, whole scans


def _covariance_estimator(estimator: str) -> Any:
    from sklearn.covariance import EmpiricalCovariance, LedoitWolf

    if estimator == "pearson":
        return EmpiricalCovariance(store_precision=False)
    return LedoitWolf(store_precision=False)


def _measure(kind: str, estimator: str) -> Any:
    from nilearn.connectome import ConnectivityMeasure

    return ConnectivityMeasure(cov_estimator=_covariance_estimator(estimator), kind=kind)


def whole_scan_connectome(series: np.ndarray, settings: ConnectomeSettings) -> np.ndarray:
    """Compute one connectome of a whole scan, of any kind but ``tangent``.

    Parameters
    ----------
    series : np.ndarray, shape (n_timepoints, n_rois)
        ROI time series, finite.
    settings : ConnectomeSettings
        With ``window`` None.

    Returns
    -------
    np.ndarray, float32, shape (n_edges,)
        Upper triangle; Fisher z for correlation and partial correlation, plain for covariance.

    Raises
    ------
    ValueError
        If the scan is too short for the inverse that a partial correlation needs.
    """
    series = _checked_series(series)
    if settings.kind == "correlation":
        return correlation_connectomes(
            series, estimator=settings.estimator, negative=settings.negative
        )[0]
    if settings.kind == "tangent":
        raise ValueError("tangent needs a reference group: use tangent_connectomes")
    _refuse_singular([series], settings)
    matrix = _measure(settings.kind, settings.estimator).fit_transform([series])[0]
    return _edges(matrix, settings)


def tangent_connectomes(
    series: Sequence[np.ndarray], is_training: np.ndarray, settings: ConnectomeSettings
) -> np.ndarray:
    """Compute tangent-space connectomes against a reference of training subjects only.

    Parameters
    ----------
    series : sequence of np.ndarray, each (n_timepoints, n_rois)
        One whole scan a subject.
    is_training : np.ndarray, bool, shape (n_subjects,)
        Subjects that the reference (the geometric mean of covariances) is fitted on.
    settings : ConnectomeSettings
        With kind ``"tangent"``.

    Returns
    -------
    np.ndarray, float32, shape (n_subjects, n_edges)

    Raises
    ------
    ValueError
        If fewer than two subjects are for training, or a covariance is singular.
    """
    scans = [_checked_series(one) for one in series]
    training = [scan for scan, use in zip(scans, is_training, strict=True) if use]
    if len(training) < 2:
        raise ValueError(f"tangent needs 2 training subjects or more, there are {len(training)}")
    _refuse_singular(scans, settings)
    measure = _measure("tangent", settings.estimator).fit(training)
    # One scan at a time would be refused by nilearn, though each is transformed on its own.
    return np.stack([_edges(matrix, settings) for matrix in measure.transform(scans)])


def _refuse_singular(scans: Sequence[np.ndarray], settings: ConnectomeSettings) -> None:
    if settings.kind == "covariance" or settings.estimator != "pearson":
        return
    for scan in scans:
        n_timepoints, n_rois = scan.shape
        if n_timepoints <= n_rois or (np.ptp(scan, axis=0) == 0).any():
            raise ValueError(
                f"{settings.kind} with the pearson estimator inverts the covariance, which a scan "
                f"of {n_timepoints} time points and {n_rois} ROIs does not allow; use ledoit-wolf"
            )


def _edges(matrix: np.ndarray, settings: ConnectomeSettings) -> np.ndarray:
    values = matrix[np.triu_indices(len(matrix), k=1)]
    if settings.transform == "fisher z":
        values = np.arctanh(np.clip(values, -LARGEST_CORRELATION, LARGEST_CORRELATION))
    if settings.negative == "zero":
        values = np.maximum(values, 0.0)
    return values.astype(np.float32)
