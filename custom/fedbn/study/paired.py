"""Is one method better than another, given that the folds overlap? Paired, corrected, cautious.

Differences of the runs of a repeated cross-validation are not independent: any two share training
subjects. A plain t test takes them as independent and calls far too many differences real. Nadeau
and Bengio (Machine Learning 52, 2003) correct the variance of their mean,

    var = (1 / J + n_test / n_train) * s^2,

with ``J`` differences of sample variance ``s^2``. Bouckaert and Frank (PAKDD 2004) use it for ``r``
repetitions of ``k`` folds, ``J = k * r``, with ``J - 1`` degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

CONFIDENCE = 0.95
HIGHER, LOWER = "higher", "lower"
NOT_SHOWN = "no difference shown"
SAME = "the same in every run"
UNTOLD = "cannot be told"


@dataclass(frozen=True)
class Difference:
    """A mean paired difference and how sure it is.

    Attributes
    ----------
    mean
        Of the differences, method minus reference.
    low, high
        Ends of the confidence interval; NaN if the differences do not vary, or there is one only.
    p
        Two-sided, of the corrected resampled t test; NaN where the interval is.
    standard_error
        Corrected.
    n
        Number of differences.
    """

    mean: float
    low: float
    high: float
    p: float
    standard_error: float
    n: int

    def record(self) -> dict[str, Any]:
        """Return everything, with the verdict, for a file."""
        return {**asdict(self), "verdict": verdict(self)}

    @property
    def is_shown(self) -> bool:
        """Whether the interval leaves zero out: only then may a difference be called real."""
        return self.low > 0 or self.high < 0


def compare(
    differences: Sequence[float] | np.ndarray,
    test_to_train: float,
    confidence: float = CONFIDENCE,
) -> Difference:
    """Estimate a mean paired difference over the runs of a repeated cross-validation.

    Parameters
    ----------
    differences
        Method minus reference, one for each seed and fold. Runs in which the metric is undefined
        (NaN) are left out.
    test_to_train
        Held-out subjects for each training subject: ``1 / (k - 1)`` with ``k`` folds.
    confidence
        Of the interval, in (0, 1).

    Returns
    -------
    Difference
    """
    from scipy import stats

    if not test_to_train > 0:
        raise ValueError(f"test_to_train is {test_to_train}; it must be above zero")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; it must be between 0 and 1")
    values = np.asarray(differences, dtype=np.float64)
    values = values[~np.isnan(values)]
    n = len(values)
    mean = math.fsum(values) / n if n else math.nan
    variance = float(np.var(values, ddof=1)) if n > 1 else math.nan
    error = math.sqrt((1 / n + test_to_train) * variance) if n > 1 else math.nan
    # Differences that are equal but for rounding tell nothing of how they would vary.
    if not error > 1e-12 * max(1.0, abs(mean)):
        return Difference(mean, math.nan, math.nan, math.nan, error, n)
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, n - 1))
    return Difference(mean, mean - half, mean + half, p, error, n)


def verdict(difference: Difference) -> str:
    """Say what the interval allows to say, and no more.

    Returns
    -------
    str
        :data:`HIGHER` or :data:`LOWER` where the interval leaves zero out, :data:`NOT_SHOWN` where
        it holds zero. Without an interval: :data:`SAME` if no run differs, else :data:`UNTOLD`.
    """
    if math.isnan(difference.low):
        return SAME if difference.mean == 0 else UNTOLD
    if not difference.is_shown:
        return NOT_SHOWN
    return HIGHER if difference.mean > 0 else LOWER


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p values for their number (Holm, 1979): so many looks make chance findings likely.

    Parameters
    ----------
    p_values
        One for each comparison of a family; NaN is no comparison, and stays NaN.
    """
    order = sorted((p, k) for k, p in enumerate(p_values) if not math.isnan(p))
    adjusted = [math.nan] * len(p_values)
    highest = 0.0
    for rank, (p, k) in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p))
        adjusted[k] = highest
    return adjusted
