"""A finished comparison in numbers: means, paired differences, calibration, convergence."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbn.federation.results import AFTER_TRAINING, without_nan
from fedbn.study import paired
from fedbn.study.methods import method
from fedbn.study.over_sites import summarise_over_sites
from fedbn.study.plan import Plan, Run
from fedbn.study.records import read_scores
from fedbn.tasks.base import Scores, Task

MACRO, WEIGHTED = "macro", "weighted"


def summarise(
    plan: Plan,
    rows: Sequence[Mapping[str, Any]],
    records: Mapping[Run, Mapping[str, Any]],
    identity: Mapping[str, Any],
    *,
    synthetic: bool,
) -> dict[str, Any]:
    """Condense all rows: means and spread over seeds, paired differences, calibration.

    Returns
    -------
    dict
        JSON-able. ``"scores"``: method, then site or ``"macro"`` (every site counts the same) or
        ``"weighted"`` (by units), level and metric, to mean and standard deviation over seeds
        of the mean over folds, and for means over sites the smallest number of sites that are in
        one, ``"n_sites"``. ``"differences"``: the same but ``"weighted"``, method minus
        reference, from :mod:`fedbn.study.paired`. ``"calibration"``: method and site, over the
        held-out units of all folds of a seed, mean over seeds. ``"after_training"``: of
        federated methods the same as ``"scores"``, for the sites' networks after their last
        local epochs.
        ``"convergence"``: see :func:`convergence`. ``"choices"``: see :func:`choices`.
        ``"over_sites"``: see :mod:`fedbn.study.over_sites`.
    """
    sites = list(plan.experiment.sites)
    table = _Table(plan, [row for row in rows if row["when"] != AFTER_TRAINING])
    after = [row for row in rows if row["when"] == AFTER_TRAINING]
    table_after = _Table(plan, after)
    with_after = {row["method"] for row in after}
    ratio = {site: table.test_to_train([site]) for site in sites}
    ratio[MACRO] = table.test_to_train(sites)
    scores = {
        name: {scope: _cells(table, name, scope) for scope in (*sites, MACRO, WEIGHTED)}
        for name in plan.methods
    }
    kept = {name: held_out(plan, records, name) for name in plan.methods}
    others = [name for name in plan.methods if name != plan.reference]
    differences = {
        name: {
            scope: _differences(table, name, plan.reference, scope, ratio[scope])
            for scope in (*sites, MACRO)
        }
        for name in others
    }
    for level, metric in table.columns:
        family = [differences[name][MACRO][level][metric] for name in others]
        for one, adjusted in zip(family, paired.holm([d["p"] for d in family]), strict=True):
            one["p_holm"] = adjusted
    return without_nan(
        {
            **identity,
            "synthetic": synthetic,
            "methods": {
                name: {
                    "title": method(name).title,
                    "needs_pooled_data": method(name).needs_pooled_data,
                }
                for name in plan.methods
            },
            "reference": plan.reference,
            "sites": sites,
            "n_folds": plan.experiment.n_folds,
            "n_seeds": plan.n_seeds,
            **{
                f"n_{level}s": {site: table.count(site, f"n_test_{level}s") for site in sites}
                for level in plan.task.levels
            },
            "confidence": paired.CONFIDENCE,
            "test_to_train": ratio,
            "scores": scores,
            "differences": differences,
            "over_sites": summarise_over_sites(
                plan.task,
                plan.methods,
                plan.reference,
                lambda name, column: np.stack([table.values(name, s, column) for s in sites]),
                {name: list(of.values()) for name, of in kept.items()},
                ratio[MACRO],
            ),
            AFTER_TRAINING: {
                name: {scope: _cells(table_after, name, scope) for scope in (*sites, MACRO)}
                for name in plan.methods
                if name in with_after
            },
            "convergence": convergence(plan, records, ratio[MACRO]),
            "calibration": {
                name: {site: _calibration(plan.task, of_site) for site, of_site in of.items()}
                for name, of in kept.items()
            },
            "choices": choices(records),
        }
    )


def held_out(
    plan: Plan, records: Mapping[Run, Mapping[str, Any]], name: str
) -> dict[str, list[list[Scores]]]:
    """Return a method's held-out scores: site, then seed and fold; each unit is in one fold."""
    return {
        site: [
            [
                read_scores(records[Run(name, seed, fold)]["sites"][site]["test"])
                for fold in range(plan.experiment.n_folds)
            ]
            for seed in range(plan.n_seeds)
        ]
        for site in plan.experiment.sites
    }


def choices(records: Mapping[Run, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Count how often each candidate was chosen: method and candidate to runs, most often first."""
    counts: dict[str, Counter[str]] = {}
    for run, record in records.items():
        facts = next(iter(record["sites"].values())).get("facts")
        if facts is not None:
            counts.setdefault(run.method, Counter())[facts["chosen"]] += 1
    return {name: dict(counts[name].most_common()) for name in sorted(counts)}


class _Table:
    """Rows as arrays (n_seeds, n_folds) by method, site and column."""

    def __init__(self, plan: Plan, rows: Sequence[Mapping[str, Any]]):
        import pandas as pd

        self._sites = sorted(plan.experiment.sites)
        self._levels = plan.task.levels
        self.columns = [(level, m.name) for level in self._levels for m in plan.task.metrics]
        self._names = list(dict.fromkeys(row["method"] for row in rows))
        shape = (len(self._names), len(self._sites), plan.n_seeds, plan.experiment.n_folds)
        places = (self._names, self._sites, range(shape[2]), range(shape[3]))
        if not rows:
            return
        frame = pd.DataFrame(rows).set_index(["method", "site", "seed", "fold"])
        frame = frame.loc[pd.MultiIndex.from_product(places)].drop(columns="when")
        self._of = {name: frame[name].to_numpy(np.float64).reshape(shape) for name in frame}

    def of_site(self, name: str, site: str, column: str) -> np.ndarray:
        of_site: np.ndarray = self._of[column][self._names.index(name), self._sites.index(site)]
        return of_site

    def values(self, name: str, scope: str, column: str) -> np.ndarray:
        """Of a site; or the mean over sites in each seed and fold, without undefined ones."""
        if scope not in (MACRO, WEIGHTED):
            return self.of_site(name, scope, column)
        values = self._of[column][self._names.index(name)]
        weights = np.ones_like(values)
        if scope == WEIGHTED:
            level = next(level for level in self._levels if column.startswith(f"{level}_"))
            weights = self._of[f"n_test_{level}s"][self._names.index(name)]
        defined = ~np.isnan(values)
        total = np.where(defined, weights, 0).sum(axis=0)
        with np.errstate(invalid="ignore"):
            mean: np.ndarray = np.where(defined, values * weights, 0).sum(axis=0) / total
        return mean

    def cell(self, name: str, scope: str, column: str) -> dict[str, Any]:
        """Mean and standard deviation over seeds of the mean over folds.

        Of a mean over sites also the smallest number of sites that it is over in a seed and fold.
        """
        found = spread(self.values(name, scope, column))
        if scope in (MACRO, WEIGHTED):
            values = self._of[column][self._names.index(name)]
            found["n_sites"] = int((~np.isnan(values)).sum(axis=0).min())
        return found

    def count(self, site: str, column: str) -> int:
        """Sum over the folds of one seed: each unit is held out once."""
        return int(self.of_site(self._names[0], site, column)[0].sum())

    def test_to_train(self, sites: Sequence[str]) -> float:
        def count(column: str) -> float:
            return sum(float(self.of_site(self._names[0], site, column).sum()) for site in sites)

        unit = self._levels[0]
        return count(f"n_test_{unit}s") / count(f"n_train_{unit}s")


def spread(by_fold: np.ndarray) -> dict[str, Any]:
    """Return mean and standard deviation over seeds of the mean over folds, without undefined ones.

    `by_fold` is (n_seeds, n_folds).
    """
    of_seed = [
        math.fsum(row[~np.isnan(row)]) / np.count_nonzero(~np.isnan(row))
        for row in by_fold
        if not np.isnan(row).all()
    ]
    return {
        "mean": math.fsum(of_seed) / len(of_seed) if of_seed else math.nan,
        "sd": statistics.stdev(of_seed) if len(of_seed) > 1 else math.nan,
    }


def _cells(table: _Table, name: str, scope: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for level, metric in table.columns:
        cell = table.cell(name, scope, f"{level}_{metric}")
        found.setdefault(level, {})[metric] = cell
    return found


def _differences(
    table: _Table, name: str, reference: str, scope: str, test_to_train: float
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for level, metric in table.columns:
        column = f"{level}_{metric}"
        values = table.values(name, scope, column) - table.values(reference, scope, column)
        difference = paired.compare(values.ravel(), test_to_train)
        found.setdefault(level, {})[metric] = difference.record()
    return found


def _calibration(task: Task, of_seeds: Sequence[Sequence[Scores]]) -> dict[str, Any] | None:
    """Calibration over all held-out units of a seed, then the mean over seeds."""
    of_seed = []
    for tests in of_seeds:
        found = task.calibration(joined(tests))
        if found is None:
            return None
        of_seed.append(found)
    numbers = {
        key: statistics.fmean(found[key] for found in of_seed)
        for key in of_seed[0]
        if key not in ("n", "bins")
    }
    return {"n": of_seed[0]["n"], **numbers, "bins_of_seed": [found["bins"] for found in of_seed]}


def joined(folds: Sequence[Scores]) -> Scores:
    """Join the units of several folds, none of which is in two of them."""
    columns = {
        name: np.concatenate([one.columns[name] for one in folds]) for name in folds[0].columns
    }
    return Scores(np.arange(len(next(iter(columns.values())))), columns)


def convergence(
    plan: Plan, records: Mapping[Run, Mapping[str, Any]], test_to_train: float
) -> dict[str, Any] | None:
    """Say after how many rounds each federated method's training loss is as low as a target.

    The loss of a round is the mean over sites of that of their last local epoch in it, measured
    while the weights change, with dropout.

    Parameters
    ----------
    plan
        What was compared.
    records
        For each run the content of its file.
    test_to_train
        As in :func:`fedbn.study.paired.compare`.

    Returns
    -------
    dict or None
        ``None`` without a federated method. ``"of"``: the method whose loss at its last round is
        the target of each seed and fold, or ``None`` if the plan has one number; ``"target"``: the
        mean target. ``"methods"``: for each the ``"loss"`` of each seed and round (mean over folds
        and sites), ``"last_loss"``, the number of ``"runs"`` and of those that ``"reached"`` the
        target, and of the rounds until then, counted from 1, ``"median"``, ``"low"`` and
        ``"high"`` (``None`` if that run did not reach it). ``"difference"``: rounds minus those of
        ``"of"``'s method (else of the reference), where all runs of both reached it.
    """
    losses = {
        name: loss
        for name in plan.methods
        if (loss := _round_losses(plan, records, name)) is not None
    }
    if not losses:
        return None
    compared_with = next(name for name in (plan.reference, "fedavg", *losses) if name in losses)
    last = losses[compared_with][:, :, -1]
    target = last if plan.target_loss is None else np.full_like(last, plan.target_loss)
    rounds = {name: _rounds_until(loss, target) for name, loss in losses.items()}
    found = {}
    for name, loss in losses.items():
        until = rounds[name]
        difference = None
        both = np.stack([until, rounds[compared_with]])
        if name != compared_with and np.isfinite(both).all():
            difference = paired.compare((both[0] - both[1]).ravel(), test_to_train).record()
        found[name] = {
            "loss": [[math.fsum(column) / len(column) for column in seed.T] for seed in loss],
            "last_loss": spread(loss[:, :, -1]),
            "runs": until.size,
            "reached": int(np.isfinite(until).sum()),
            "median": float(np.median(until)),
            "low": float(until.min()),
            "high": float(until.max()),
            "difference": difference,
        }
    return {
        "of": compared_with if plan.target_loss is None else None,
        "compared_with": compared_with,
        "target": math.fsum(target.ravel()) / target.size,
        "rounds": plan.experiment.rounds,
        "methods": found,
    }


def _round_losses(
    plan: Plan, records: Mapping[Run, Mapping[str, Any]], name: str
) -> np.ndarray | None:
    """Return (n_seeds, n_folds, rounds): the mean over sites of each round's last epoch."""
    of_runs = []
    for seed in range(plan.n_seeds):
        for fold in range(plan.experiment.n_folds):
            sites = records[Run(name, seed, fold)]["sites"]
            of_sites = [sites[site].get("training_loss") for site in sorted(sites)]
            if None in of_sites:
                return None
            of_runs.append(
                [
                    math.fsum(epochs[-1] for epochs in of_round) / len(of_round)
                    for of_round in zip(*of_sites, strict=True)
                ]
            )
    return np.array(of_runs).reshape(plan.n_seeds, plan.experiment.n_folds, -1)


def _rounds_until(loss: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the first round, from 1, whose loss is at most the target; infinity if there is none.

    `loss` is (n_seeds, n_folds, rounds) and `target` (n_seeds, n_folds), as is the result.
    """
    reached = loss <= target[:, :, None]
    return np.where(reached.any(axis=2), reached.argmax(axis=2) + 1.0, math.inf)
