"""Would a hospital like these gain? Differences with the hospital as the unit, and by its size.

The interval over folds (:mod:`fedbn.study.paired`) asks whether one method is better in the mean
over these sites, were their subjects drawn and divided again. The intervals here ask for the mean
over sites of which these are a sample. A site's difference is one number, the mean over folds and
seeds. They condition on what the sites have in common: all of them are scored with the same trained
models, and the training sets of two folds overlap. ``benchmarks/hospital_intervals.py`` measures
how often each is wrong because of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedbn.study import paired
from fedbn.study.paired import CONFIDENCE
from fedbn.tasks.base import Scores, Task

LOCAL_ONLY = "singleset"
"""Each site trained alone: what a gain of federating is measured from."""
N_DRAWS = 2000
MIN_SITES = 3
"""Fewer sites have no interval, no rank test and no line."""


@dataclass(frozen=True)
class OverSites:
    """The mean over sites of a difference.

    Attributes
    ----------
    mean
        Every site counts the same.
    low, high
        Ends of the t interval of :func:`over_sites`, with ``n - 1`` degrees of freedom; NaN below
        :data:`MIN_SITES` sites, or where they do not vary.
    p
        Two-sided, of that t test.
    wilcoxon_p
        Two-sided, of the signed-rank test; sites without a difference are left out.
    n_higher, n_lower
        Sites with a difference above and below zero.
    n
        Sites where the metric is defined.
    """

    mean: float
    low: float
    high: float
    p: float
    wilcoxon_p: float
    n_higher: int
    n_lower: int
    n: int


def over_sites(
    differences: np.ndarray, test_to_train: float, *, models_vary: bool = True
) -> OverSites:
    """Estimate the mean over sites of a difference.

    A plain t test over ``n`` sites takes their differences as independent. They are not: the sites
    are scored with the same models, and other training subjects would have moved all of them
    together, which no spread between sites shows. What a mean over sites is not sure of for these
    same sites, were their subjects drawn again, it cannot be sure of for others: the variance of
    the mean is the larger one of ``s^2 / n``, ``s^2`` being that of the sites' means over runs, and
    of the variance of :mod:`fedbn.study.paired` for the mean over sites in each run.

    Parameters
    ----------
    differences
        (n_sites, n_seeds, n_folds). NaN is left out, as is a site that has nothing else.
    test_to_train
        As in :func:`fedbn.study.paired.compare`.
    models_vary
        Whether the second variance is looked at; without it this is the plain t test.
    """
    from scipy import stats

    runs = np.asarray(differences, dtype=np.float64)
    runs = runs.reshape(len(runs), math.prod(runs.shape[1:]))
    runs = runs[~np.isnan(runs).all(axis=1)]
    values: np.ndarray = np.asarray(np.nanmean(runs, axis=1))
    n = len(values)
    mean = math.fsum(values) / n if n else math.nan
    low = high = p = wilcoxon = math.nan
    signs = np.sign(np.round(values, 12))  # equal but for rounding is equal
    error = float(np.std(values, ddof=1)) / math.sqrt(n) if n >= MIN_SITES else math.nan
    if models_vary and n >= MIN_SITES:
        defined = runs[:, ~np.isnan(runs).all(axis=0)]
        of_runs = paired.compare(np.nanmean(defined, axis=0), test_to_train).standard_error
        error = float(np.nanmax([error, of_runs]))
    if error > 1e-12 * max(1.0, abs(mean)):
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * error
        low, high = mean - half, mean + half
        p = 2 * float(stats.t.sf(abs(mean) / error, n - 1))
    if n >= MIN_SITES and signs.any():
        wilcoxon = signed_rank_p(np.round(values, 12)[signs != 0])
    return OverSites(
        mean, low, high, p, wilcoxon, int((signs > 0).sum()), int((signs < 0).sum()), n
    )


def signed_rank_p(values: np.ndarray) -> float:
    """Return Wilcoxon's two-sided signed-rank p, exact also with ties; no value is zero.

    Every sign is as likely as its opposite, so that the sum of the positive ranks is distributed
    as the product of one polynomial a rank. SciPy's own with ties draws every sign: seconds.
    """
    from scipy import stats

    ranks = np.round(2 * stats.rankdata(np.abs(values))).astype(int)  # halves become whole
    ways = np.ones(1)
    for rank in ranks:
        ways = np.pad(ways, (0, rank)) + np.pad(ways, (rank, 0))
    ways /= ways.sum()
    seen = int(ranks[values > 0].sum())
    return min(1.0, 2 * float(min(ways[: seen + 1].sum(), ways[seen:].sum())))


def hierarchical_bootstrap(
    differences: Sequence[np.ndarray], n_draws: int = N_DRAWS, seed: int = 0
) -> tuple[float, float, float]:
    """Estimate the mean over units by drawing sites with replacement, then each one's units.

    Parameters
    ----------
    differences
        For each site (n_seeds, n_units): how a unit's value differs in each seed. A drawn site is
        scored in one seed, drawn too: what varies over seeds is part of the interval.
    n_draws
        Of the bootstrap.
    seed
        Decides the draws.

    Returns
    -------
    mean, low, high
        Every unit counts the same; the percentile interval.
    """
    rng = np.random.default_rng(seed)
    n_sites = len(differences)
    sizes = np.array([one.shape[1] for one in differences], dtype=np.float64)
    mean = float(np.dot([one.mean() for one in differences], sizes) / sizes.sum())
    times = rng.multinomial(n_sites, np.full(n_sites, 1 / n_sites), size=n_draws)
    total = np.zeros(n_draws)
    for site, values in enumerate(differences):
        drawn = np.repeat(np.arange(n_draws), times[:, site])
        n_seeds, n_units = values.shape
        rows = rng.integers(n_seeds, size=(len(drawn), 1))
        sums = values[rows, rng.integers(n_units, size=(len(drawn), n_units))].sum(axis=1)
        total += np.bincount(drawn, weights=sums, minlength=n_draws)
    alpha = (1 - CONFIDENCE) / 2
    low, high = np.quantile(total / (times @ sizes), [alpha, 1 - alpha])
    return mean, float(low), float(high)


def rank_correlation(
    x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray
) -> tuple[float, float, float]:
    """Return Spearman's rank correlation and its interval.

    The interval is Fisher's with the variance of Bonett and Wright (Psychometrika 65, 2000),
    ``(1 + r^2 / 2) / (n - 3)``; NaN below four points, or where one side does not vary.
    """
    from scipy import stats

    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(a) < 4 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan, math.nan, math.nan
    r = float(stats.spearmanr(a, b).statistic)
    half = stats.norm.ppf((1 + CONFIDENCE) / 2) * math.sqrt((1 + r**2 / 2) / (len(a) - 3))
    z = math.atanh(min(max(r, -1 + 1e-12), 1 - 1e-12))
    return r, math.tanh(z - half), math.tanh(z + half)


@dataclass(frozen=True)
class Line:
    """A least-squares line over ``log2`` of the training units, with its interval.

    Attributes
    ----------
    slope, slope_low, slope_high
        Change of the gain where a site has twice as many training units.
    x, y, low, high
        Training units from the smallest site's to the largest's, the line, and the ends of the
        interval of its mean.
    """

    slope: float
    slope_low: float
    slope_high: float
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray


def fitted_line(n_train: Sequence[float] | np.ndarray, gains: np.ndarray) -> Line | None:
    """Fit a line to gains over ``log2`` of training units; ``None`` where there is none to fit."""
    from scipy import stats

    x, y = np.log2(np.asarray(n_train, dtype=np.float64)), np.asarray(gains, dtype=np.float64)
    if len(x) < MIN_SITES or np.ptp(x) == 0:
        return None
    fit = stats.linregress(x, y)
    t = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(x) - 2))
    grid = np.linspace(x.min(), x.max(), 50)
    residual = math.sqrt(float(((y - fit.intercept - fit.slope * x) ** 2).sum()) / (len(x) - 2))
    spread = np.sqrt(1 / len(x) + (grid - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum())
    line, half = fit.intercept + fit.slope * grid, t * residual * spread
    ends = (fit.slope - t * fit.stderr, fit.slope + t * fit.stderr)
    return Line(fit.slope, *ends, 2**grid, line, line - half, line + half)


# ---------------------------------------------------------------------------------- a comparison


def references(methods: Sequence[str], reference: str) -> list[str]:
    """Name what the others are subtracted from: the reference, and training alone if compared."""
    return [reference, *(n for n in (LOCAL_ONLY,) if n in methods and n != reference)]


def summarise_over_sites(
    task: Task,
    methods: Sequence[str],
    reference: str,
    values: Callable[[str, str], np.ndarray],
    kept: Mapping[str, Sequence[Sequence[Sequence[Scores]]]],
    test_to_train: float,
) -> dict[str, Any]:
    """Condense a comparison over its sites.

    Parameters
    ----------
    task
        What was learned.
    methods, reference
        As in the comparison.
    values
        Gives (n_sites, n_seeds, n_folds) of a method and a column, ``"subject_auc"``.
    kept
        Method to what its held-out units were scored at each site, in each seed and fold.
    test_to_train
        As in :func:`fedbn.study.paired.compare`.

    Returns
    -------
    dict
        Reference (see :func:`references`), other method, level and metric to the fields of
        :class:`OverSites`; for metrics that are means over units also ``"weighted"``, with the
        ``"mean"``, ``"low"`` and ``"high"`` of :func:`hierarchical_bootstrap`.
    """
    of_units = {n: [_unit_values(task, of_site) for of_site in kept[n]] for n in methods}

    def between(name: str, other: str, level: str, metric: str) -> dict[str, Any]:
        column = f"{level}_{metric}"
        differences = values(name, column) - values(other, column)
        found: dict[str, Any] = asdict(over_sites(differences, test_to_train))
        own = list(zip(of_units[name], of_units[other], strict=True))
        if level == task.levels[0] and all(metric in a and metric in b for a, b in own):
            drawn = hierarchical_bootstrap([a[metric] - b[metric] for a, b in own])
            found["weighted"] = dict(zip(("mean", "low", "high"), drawn, strict=True))
        return found

    return {
        other: {
            name: {
                level: {m.name: between(name, other, level, m.name) for m in task.metrics}
                for level in task.levels
            }
            for name in methods
            if name != other
        }
        for other in references(methods, reference)
    }


def _unit_values(task: Task, kept: Sequence[Sequence[Scores]]) -> dict[str, np.ndarray]:
    """Return metric to (n_seeds, n_units), each unit held out once a seed."""
    of_seeds = [[task.unit_values(fold) for fold in of_seed] for of_seed in kept]
    names = set.intersection(*(set(fold) for of_seed in of_seeds for fold in of_seed))
    return {
        name: np.stack([np.concatenate([fold[name] for fold in folds]) for folds in of_seeds])
        for name in names
    }


def gains(summary: Mapping[str, Any], metric: str) -> dict[str, np.ndarray]:
    """Return each method's gain over training alone at each site, in the order of the sites.

    `summary` is the content of ``summary.json``; without training alone there is no gain.
    """
    scores, sites = summary["scores"], summary["sites"]
    if LOCAL_ONLY not in scores:
        return {}
    unit = next(iter(scores[LOCAL_ONLY][sites[0]]))
    means = {
        name: np.array([scores[name][s][unit][metric]["mean"] for s in sites], np.float64)
        for name in scores
    }
    return {name: m - means[LOCAL_ONLY] for name, m in means.items() if name != LOCAL_ONLY}


def training_units(summary: Mapping[str, Any]) -> np.ndarray:
    """Return each site's mean number of training units in a fold, in the order of the sites."""
    sites, ratio = summary["sites"], summary["test_to_train"]
    unit = next(iter(next(iter(summary["scores"].values()))[sites[0]]))
    n_folds = summary["n_folds"]
    return np.array([summary[f"n_{unit}s"][s] / (ratio[s] * n_folds) for s in sites])
