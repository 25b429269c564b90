"""Methods against each other: repeated cross-validation, paired, resumable, with honest intervals.

Every method sees the same splits, initial weights and order of batches, so that the difference of
two methods in one seed and fold is theirs and not the draw's. Each run (method, seed, fold) is one
file under ``runs/``, written atomically. What is there is not run again, and everything else
(``results.csv``, ``summary.json``) is computed from these files, so that an interrupted comparison
ends with the same bytes. Runs are done by processes of one thread each; those that begin with the
same federation (FedAvg, and FedAvg with thresholds) have it in common.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import hashlib
import io
import json
import math
import multiprocessing
import os
import signal
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbn.core.networks import build_network, head_entries
from fedbn.federation.experiment import Experiment
from fedbn.federation.results import AFTER_TRAINING, BEFORE_TRAINING, without_nan
from fedbn.federation.simulation import Federation, read_sites
from fedbn.federation.site import Site, make_network
from fedbn.federation.site_state import atomic_write, write_json
from fedbn.study import cache, paired
from fedbn.study.method import FederatedRunner, Outcome
from fedbn.study.methods import method
from fedbn.study.over_sites import summarise_over_sites
from fedbn.tasks.base import Scores, Task
from fedbn.tasks.classification import OWN_THRESHOLD, THRESHOLD, two_class_scores
from fedbn.tasks.data import SiteData

FORMAT = "fedbn-comparison-3"
_READABLE = (FORMAT, "fedbn-comparison-2", "fedbn-comparison-1")
IDENTITY_FILE = "comparison.json"
RESULTS_FILE = "results.csv"
SUMMARY_FILE = "summary.json"
MACRO, WEIGHTED = "macro", "weighted"
FINAL = "final"
"""When a row is scored whose method ends otherwise than with averaged weights."""

_WHEN = (BEFORE_TRAINING, AFTER_TRAINING, FINAL)

_DECIDE_NUMBERS = ("fedbn", "python", "torch", "numpy", "scikit-learn", "monai")


class ComparisonError(ValueError):
    """A comparison that cannot be planned or continued; one sentence."""


@dataclass(frozen=True)
class Run:
    """One unit of work: a method on one fold of one seed."""

    method: str
    seed: int
    fold: int


@dataclass(frozen=True)
class Plan:
    """What is compared.

    Attributes
    ----------
    experiment
        What all methods have in common; its seed, fold and policy are replaced.
    methods
        Names, in the order of the tables.
    n_seeds
        Seeds 0 to ``n_seeds - 1``.
    reference
        The method that the others are subtracted from.
    target_loss
        A training loss whose first round is looked for; ``None`` for the one that the reference
        has at its last round, in each seed and fold.
    """

    experiment: Experiment
    methods: tuple[str, ...]
    n_seeds: int
    reference: str
    target_loss: float | None = None

    @property
    def runs(self) -> list[Run]:
        """All units of work, method by method within each fold of each seed."""
        return [
            Run(name, seed, fold)
            for seed in range(self.n_seeds)
            for fold in range(self.experiment.n_folds)
            for name in self.methods
        ]

    @property
    def task(self) -> Task:
        """What all methods learn."""
        return self.experiment.task

    def experiment_of(self, run: Run) -> Experiment:
        """Return the experiment of one unit of work, its sites in the order of their names."""
        common = self.experiment.changed(
            seed=run.seed, fold=run.fold, sites=tuple(sorted(self.experiment.sites))
        )
        return method(run.method).experiment(common)


def plan_comparison(
    experiment: Experiment,
    methods: Sequence[str],
    n_seeds: int,
    reference: str | None = None,
    *,
    target_loss: float | None = None,
) -> Plan:
    """Check what is asked for, before anything runs.

    Parameters
    ----------
    experiment
        What all methods have in common.
    methods
        Two or more of :data:`fedbn.study.methods.METHODS`, or one alone for its table.
    n_seeds
        Repetitions, each with its own folds.
    reference
        One of `methods`; by default ``"fedavg"`` if it is among them, and otherwise the first.
    target_loss
        As in :class:`Plan`, above 0.

    Raises
    ------
    ValueError
        If a method is unknown or named twice, there is no repetition, or the experiment's network
        cannot be built or is not for one of the methods.
    """
    for name in methods:
        method(name)
    twice = [name for k, name in enumerate(methods) if name in methods[:k]]
    if twice:
        raise ComparisonError(f"method {twice[0]!r} is named twice")
    if not methods:
        raise ComparisonError("there is no method to compare")
    if n_seeds < 1:
        raise ComparisonError(f"seeds is {n_seeds}; it must be at least 1")
    if reference is None:
        reference = "fedavg" if "fedavg" in methods else methods[0]
    if reference not in methods:
        raise ComparisonError(
            f"reference {reference!r} is not among the methods ({', '.join(methods)})"
        )
    if target_loss is not None and not 0 < target_loss < math.inf:
        raise ComparisonError(f"target loss is {target_loss:g}; it must be a number above 0")
    plan = Plan(experiment, tuple(methods), n_seeds, reference, target_loss)
    build_network(experiment.network.name, experiment.network.args, experiment.seed)
    for name in methods:
        settings = plan.experiment_of(Run(name, 0, 0))
        try:
            network, _ = make_network(settings)
            if settings.finetune is not None and settings.finetune.entries == "head":
                head_entries(network)
        except ValueError as error:
            raise ComparisonError(f"method {name}: {error}") from error
    return plan


def compare(
    plan: Plan,
    data_root: Path,
    out: Path,
    *,
    processes: int = 1,
    on_run: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Run what is missing of a comparison, and write its results.

    Parameters
    ----------
    plan
        From :func:`plan_comparison`.
    data_root
        Folder with one store a site.
    out
        Gets ``comparison.json``, ``runs/``, ``results.csv`` and ``summary.json``. A folder of the
        same settings and data is continued, also with further methods or seeds.
    processes
        How many runs at a time, each on one CPU thread.
    on_run
        Called with the number of runs that are there and that of all: once before the first one
        starts, and then after each.

    Returns
    -------
    dict
        The content of ``summary.json``.

    Raises
    ------
    ComparisonError
        If `out` holds something else, or a run fails.
    fedbn.tasks.data.DataError
        If a store is missing, damaged, or made in another way than the others, or does not fit the
        network or the share of training subjects.
    """
    stores = read_sites(data_root, plan.experiment, verify=True)
    identity = _identity(plan.experiment, stores)
    if not (out / IDENTITY_FILE).is_file():
        _check_fit(plan, stores)
    cache.claim(out / IDENTITY_FILE, identity, "comparison", ComparisonError)
    keys = {run: _key(run, plan, identity) for run in plan.runs}
    records = {}
    for run, key in keys.items():
        record = _read_record(_record_path(out, run, key), key)
        if record is not None:
            records[run] = record
    missing = [run for run in plan.runs if run not in records]
    if on_run is not None:
        on_run(len(records), len(keys))
    if missing:
        units = [
            Unit(run, plan.experiment_of(run), _record_path(out, run, keys[run]), keys[run])
            for run in missing
        ]
        groups = [
            WorkGroup(together, data_root, identity["stores"]) for together in _together(units)
        ]
        for done, run in enumerate(_execute(groups, processes), start=len(records) + 1):
            record = _read_record(_record_path(out, run, keys[run]), keys[run])
            if record is None:
                raise ComparisonError(f"{_named(run)}: its file cannot be read back")
            records[run] = record
            if on_run is not None:
                on_run(done, len(keys))
    ordered = {run: records[run] for run in plan.runs}
    rows = [row for run, record in ordered.items() for row in score_record(plan.task, run, record)]
    _write_csv(out / RESULTS_FILE, rows)
    synthetic = any(store.synthetic for store in stores.values())
    summary = summarise(plan, rows, ordered, identity, synthetic=synthetic)
    write_json(out / SUMMARY_FILE, summary)
    return summary


def _check_fit(plan: Plan, stores: Mapping[str, SiteData]) -> None:
    """See that every site can be split as asked and that its samples fit the network."""
    for fold in range(plan.experiment.n_folds):
        settings = plan.experiment.changed(seed=0, fold=fold)
        for store in stores.values():
            settings.task.split(store, settings)
    with_network = [name for name in plan.methods if method(name).has_network]
    if with_network:
        settings = plan.experiment_of(Run(with_network[0], 0, 0))
        smallest = min(stores, key=lambda name: sum(u.n_samples for u in stores[name].units))
        Site(smallest, stores[smallest], settings).check_network()


# ------------------------------------------------------------------------------------ the folder


def _identity(experiment: Experiment, stores: Mapping[str, SiteData]) -> dict[str, Any]:
    """Return what all runs of one folder have in common."""
    common = cache.in_common(experiment, stores, packages=_DECIDE_NUMBERS)
    common["experiment"]["training"]["proximal_mu"] = 0.0  # the method's own
    return {"format": FORMAT, **common}


def _key(run: Run, plan: Plan, identity: Mapping[str, Any]) -> str:
    experiment = plan.experiment_of(run).model_dump(mode="json")
    content = {**identity, "experiment": experiment, "method": run.method}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _record_path(out: Path, run: Run, key: str) -> Path:
    return out / cache.RUNS_FOLDER / f"{run.method}_seed{run.seed}_fold{run.fold}_{key}.json"


def _read_record(path: Path, key: str) -> dict[str, Any] | None:
    """Read one run's file; ``None`` if it has to be run again."""
    record = cache.read_unit(path, key, "sites")
    if record is not None:
        record["sites"] = {
            site: content if "n_train" in content else _from_earlier_format(content)
            for site, content in record["sites"].items()
        }
    return record


# ----------------------------------------------------------------------------------- units of work


@dataclass(frozen=True)
class Unit:
    """One run to be done, and where its file goes."""

    run: Run
    experiment: Experiment
    path: Path
    key: str


@dataclass(frozen=True)
class WorkGroup:
    """Runs that one process does one after the other; all begin with the same federation, if any.

    Attributes
    ----------
    units
        Of one seed and fold.
    data_root
        Folder with one store a site.
    fingerprints
        Site name to the fingerprint that its store must have.
    """

    units: tuple[Unit, ...]
    data_root: Path
    fingerprints: Mapping[str, str]


def _together(units: Iterable[Unit]) -> list[tuple[Unit, ...]]:
    """Gather the runs that begin with the same federation; every other run is by itself."""
    groups: dict[Any, list[Unit]] = {}
    for unit in units:
        runner = method(unit.run.method).run
        key: Any = unit.run
        if isinstance(runner, FederatedRunner):
            key = runner.common(unit.experiment).model_dump_json()
        groups.setdefault(key, []).append(unit)
    return [tuple(group) for group in groups.values()]


def _execute(groups: Sequence[WorkGroup], processes: int) -> Iterable[Run]:
    """Do the work in several processes; yield each run when its file is there."""
    context = multiprocessing.get_context("spawn")
    workers = max(1, min(processes, len(groups)))
    stop = context.Event()
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_worker, initargs=(stop,)
    ) as pool:
        with _without_interrupts():
            futures = {pool.submit(_do, group): group for group in groups}
        try:
            for future in as_completed(futures):
                future.result()
                yield from (unit.run for unit in futures[future].units)
        except BrokenProcessPool as error:
            raise ComparisonError(
                "a process of the comparison was ended from outside, for want of memory perhaps; "
                "start again with fewer --jobs: finished runs are kept"
            ) from error
        except (KeyboardInterrupt, GeneratorExit):
            stop.set()  # runs that have begun are given up: nobody waits for them
            raise
        finally:  # after a run that failed, those that have begun are finished and kept
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Let processes that are started here never see Ctrl-C: the parent decides when to stop."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_writing = threading.Lock()
"""Held while a run's file is written: a process that is told to end does so before or after it."""


def _start_worker(stop: Event) -> None:
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    waits = [stop.wait] if parent is None else [stop.wait, parent.join]
    for wait in waits:  # no process is left behind whose parent has stopped or was killed
        threading.Thread(target=_end_after, args=(wait,), daemon=True).start()


def _end_after(wait: Callable[[], object]) -> None:
    wait()
    with _writing:
        os._exit(1)


@functools.cache
def _stores(data_root: Path, task: Task, sites: tuple[str, ...]) -> dict[str, SiteData]:
    """Read the stores once a process."""
    return {site: task.read(data_root / site, site) for site in sites}


def _do(work: WorkGroup) -> None:
    federation: Federation | None = None
    for unit in work.units:
        run, experiment = unit.run, unit.experiment
        stores = _stores(work.data_root, experiment.task, experiment.sites)
        for site, store in stores.items():
            if store.fingerprint() != work.fingerprints[site]:
                raise ComparisonError(f"the data of site {site!r} changed during the comparison")
        runner = method(run.method).run
        try:
            if isinstance(runner, FederatedRunner):
                federation = federation or runner.train(experiment, stores)
                outcomes = runner.finish(federation, experiment)
            else:
                outcomes = runner(experiment, stores)
        except (ValueError, RuntimeError, ArithmeticError) as error:
            raise ComparisonError(f"{_named(run)}: {error}") from error
        content = {
            "format": FORMAT,
            "key": unit.key,
            **asdict(run),
            "sites": {site: make_record(outcomes[site]) for site in sorted(outcomes)},
        }
        with _writing, atomic_write(unit.path) as file:
            file.write(json.dumps(content, allow_nan=False).encode())


def _named(run: Run) -> str:
    return f"method {run.method}, seed {run.seed}, fold {run.fold}"


def make_record(outcome: Outcome) -> dict[str, Any]:
    """Return all that a later analysis needs of one run at one site, without a subject's id.

    Units are numbered within the run's held-out ones. Numbers are Python's, which JSON keeps to the
    last bit.
    """
    record: dict[str, Any] = {
        "n_train": len(outcome.train.units),
        "test": _scores_record(outcome.test),
    }
    if outcome.after_training is not None:
        record[AFTER_TRAINING] = {"test": _scores_record(outcome.after_training.test)}
    if outcome.training_loss is not None:
        record["training_loss"] = outcome.training_loss
    if outcome.facts is not None:
        record["facts"] = outcome.facts
    return record


def _scores_record(scores: Scores) -> dict[str, Any]:
    record: dict[str, Any] = {
        "units": np.unique(scores.units, return_inverse=True)[1].tolist(),
        "columns": {name: values.tolist() for name, values in scores.columns.items()},
    }
    if scores.facts:
        record["facts"] = {name: float(value) for name, value in scores.facts.items()}
    if scores.parts is not None:
        record["parts"] = _scores_record(scores.parts)
    return record


def read_scores(record: Mapping[str, Any]) -> Scores:
    """Rebuild the scores of one run at one site from what :func:`make_record` keeps of them."""
    return Scores(
        np.array(record["units"]),
        {name: np.array(values) for name, values in record["columns"].items()},
        read_scores(record["parts"]) if "parts" in record else None,
        record.get("facts", {}),
    )


def _from_earlier_format(record: Mapping[str, Any]) -> dict[str, Any]:
    """Bring a site's record of version 0.1, which knew two classes and windows, into this form."""
    targets = np.array(record["test"]["targets"])
    owners = np.array(record["test"]["window_subjects"])
    found: dict[str, Any] = {"n_train": len(record["train"]["targets"])}
    for content in (record, record.get(AFTER_TRAINING)):
        if content is None:
            continue
        scores, windows = (np.array(content["test"][name]) for name in ("scores", "window_scores"))
        test = replace(
            two_class_scores(targets, scores),
            parts=two_class_scores(targets[owners], windows, owners),
            facts={name: content[name] for name in (THRESHOLD, OWN_THRESHOLD)},
        )
        kept = {"test": _scores_record(test)}
        found |= kept if content is record else {AFTER_TRAINING: kept}
    return found | {k: record[k] for k in ("training_loss", "facts") if k in record}


# ---------------------------------------------------------------------------------------- numbers


def score_record(task: Task, run: Run, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Score one run, as in ``results.csv``; an undefined metric is NaN.

    Returns
    -------
    list of dict
        One row a site; of a federated method two. ``"when"`` is ``"before_training"`` for the final
        shared weights with the site's own entries, before any further local training, and
        ``"after_training"`` for the site's network after its local epochs of the last round, before
        the last averaging. Of a method that ends otherwise it is ``"final"``.
    """
    rows = []
    for site, content in record["sites"].items():
        after = content.get(AFTER_TRAINING)
        scored = {FINAL: content}
        if after is not None:
            scored = {BEFORE_TRAINING: content, AFTER_TRAINING: after}
        for when, found in scored.items():
            scores = read_scores(found["test"])
            row: dict[str, Any] = {
                "method": run.method,
                "site": site,
                "seed": run.seed,
                "fold": run.fold,
                "when": when,
                f"n_train_{task.levels[0]}s": content["n_train"],
            }
            for depth, level in enumerate(task.levels):
                row[f"n_test_{level}s"] = len(scores.level(depth).units)
            rows.append(row | dict(scores.facts) | _metrics(task, scores))
    return rows


def _metrics(task: Task, scores: Scores) -> dict[str, float]:
    """Return every metric of every level; one that is undefined is NaN."""
    measured = task.measure(scores)
    return {
        f"{level}_{metric.name}": measured[level].get(metric.name, math.nan)
        for level in task.levels
        for metric in task.metrics
    }


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows sorted by method, site, seed, fold and when, numbers in full, NaN as empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in sorted(
        rows,
        key=lambda r: (r["method"], r["site"], r["seed"], r["fold"], _WHEN.index(r["when"])),
    ):
        writer.writerow(
            {
                name: "" if isinstance(value, float) and math.isnan(value) else value
                for name, value in row.items()
            }
        )
    with atomic_write(path) as file:
        file.write(text.getvalue().encode())


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
        ``"weighted"`` (by subjects), level and metric, to mean and standard deviation over seeds
        of the mean over folds. ``"differences"``: the same but ``"weighted"``, method minus
        reference, from :mod:`fedbn.study.paired`. ``"calibration"``: method and site, over the
        held-out subjects of all folds of a seed, mean over seeds. ``"after_training"``: of
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
                lambda name: _held_out(plan, records, name),
                ratio[MACRO],
            ),
            AFTER_TRAINING: {
                name: {scope: _cells(table_after, name, scope) for scope in (*sites, MACRO)}
                for name in plan.methods
                if name in with_after
            },
            "convergence": convergence(plan, records, ratio[MACRO]),
            "calibration": {
                name: {site: _calibration(plan, records, name, site) for site in sites}
                for name in plan.methods
            },
            "choices": choices(records),
        }
    )


def _held_out(
    plan: Plan, records: Mapping[Run, Mapping[str, Any]], name: str
) -> list[list[list[Scores]]]:
    """Return a method's held-out scores by site, seed and fold."""
    places = [
        [Run(name, s, f) for f in range(plan.experiment.n_folds)] for s in range(plan.n_seeds)
    ]
    return [
        [[read_scores(records[run]["sites"][site]["test"]) for run in folds] for folds in places]
        for site in plan.experiment.sites
    ]


def choices(records: Mapping[Run, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Count how often each candidate was chosen: method and candidate to runs, most often first."""
    counts: dict[str, Counter[str]] = {}
    for run, record in records.items():
        facts = next(iter(record["sites"].values())).get("facts")
        if facts is not None:
            counts.setdefault(run.method, Counter())[facts["chosen"]] += 1
    return {name: dict(counts[name].most_common()) for name in sorted(counts)}


class _Table:
    """Rows by method, site and column as arrays (n_seeds, n_folds)."""

    def __init__(self, plan: Plan, rows: Sequence[Mapping[str, Any]]):
        self._rows = {(r["method"], r["site"], r["seed"], r["fold"]): r for r in rows}
        self._sites = sorted(plan.experiment.sites)
        self._any = plan.methods[0]
        self._levels = plan.task.levels
        self.columns = [(level, m.name) for level in self._levels for m in plan.task.metrics]
        self._shape = (plan.n_seeds, plan.experiment.n_folds)

    def of_site(self, name: str, site: str, column: str) -> np.ndarray:
        values = [self._rows[(name, site, *place)][column] for place in np.ndindex(*self._shape)]
        return np.array(values, dtype=np.float64).reshape(self._shape)

    def values(self, name: str, scope: str, column: str) -> np.ndarray:
        """Of a site; or the mean over sites in each seed and fold, without undefined ones."""
        if scope not in (MACRO, WEIGHTED):
            return self.of_site(name, scope, column)
        values = np.stack([self.of_site(name, site, column) for site in self._sites])
        weights = np.ones_like(values)
        if scope == WEIGHTED:
            level = next(level for level in self._levels if column.startswith(f"{level}_"))
            count = f"n_test_{level}s"
            weights = np.stack([self.of_site(name, site, count) for site in self._sites])
        defined = ~np.isnan(values)
        total = np.where(defined, weights, 0).sum(axis=0)
        with np.errstate(invalid="ignore"):
            mean: np.ndarray = np.where(defined, values * weights, 0).sum(axis=0) / total
        return mean

    def cell(self, name: str, scope: str, column: str) -> dict[str, Any]:
        """Mean and standard deviation over seeds of the mean over folds."""
        return spread(self.values(name, scope, column))

    def count(self, site: str, column: str) -> int:
        """Sum over the folds of one seed: each subject is held out once."""
        return int(self.of_site(self._any, site, column)[0].sum())

    def test_to_train(self, sites: Sequence[str]) -> float:
        def count(column: str) -> float:
            return sum(float(self.of_site(self._any, site, column).sum()) for site in sites)

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
        found.setdefault(level, {})[metric] = {
            **asdict(difference),
            "verdict": paired.verdict(difference),
        }
    return found


def _calibration(
    plan: Plan, records: Mapping[Run, Mapping[str, Any]], name: str, site: str
) -> dict[str, Any] | None:
    """Calibration over all held-out units of a seed, then the mean over seeds."""
    of_seed = []
    for seed in range(plan.n_seeds):
        tests = [
            read_scores(records[Run(name, seed, fold)]["sites"][site]["test"])
            for fold in range(plan.experiment.n_folds)
        ]
        found = plan.task.calibration(joined(tests))
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

    The loss of a round is the mean over sites of the cross entropy in their last local epoch of it,
    measured while the weights change, with dropout.

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
            estimate = paired.compare((both[0] - both[1]).ravel(), test_to_train)
            difference = {**asdict(estimate), "verdict": paired.verdict(estimate)}
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


def read_summary(folder: Path) -> dict[str, Any]:
    """Read the summary of a finished comparison.

    Raises
    ------
    ComparisonError
        If there is none, or it is of something else.
    """
    path = folder / SUMMARY_FILE if folder.is_dir() else folder
    content: Any = None
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_bytes())
    if not isinstance(content, dict) or content.get("format") not in _READABLE:
        raise ComparisonError(f"{path} is not the summary of a comparison ({FORMAT})")
    return content


def read_comparison(folder: Path) -> tuple[dict[str, Any], Plan, dict[Run, dict[str, Any]]]:
    """Read a finished comparison with the scores that its runs have kept.

    Returns
    -------
    summary, plan, records
        The content of ``summary.json``; what was compared; and for each run the content of its
        file.

    Raises
    ------
    ComparisonError
        If `folder` holds no finished comparison, or a run's file is not there.
    """
    summary = read_summary(folder)
    identity = {name: summary[name] for name in ("format", "experiment", "stores", "versions")}
    experiment = Experiment(**{**summary["experiment"], "sites": summary["sites"]})
    plan = Plan(experiment, tuple(summary["methods"]), summary["n_seeds"], summary["reference"])
    records = {}
    for run in plan.runs:
        record = _kept_record(folder, run, _key(run, plan, identity))
        if record is None:
            raise ComparisonError(
                f"{_named(run)}: its file under {folder / cache.RUNS_FOLDER} is not there or "
                "not whole; start the comparison again, it runs what is missing"
            )
        records[run] = record
    return summary, plan, records


def _kept_record(folder: Path, run: Run, key: str) -> dict[str, Any] | None:
    """Read a run's file; or the only one of its name, where a method's settings were others then.

    All runs of a folder have its data and common settings, so that a method that this version
    defines in another way can still be read, though not continued.
    """
    record = _read_record(_record_path(folder, run, key), key)
    if record is not None:
        return record
    paths = list((folder / cache.RUNS_FOLDER).glob(_record_path(folder, run, "*").name))
    return _read_record(paths[0], paths[0].stem.rpartition("_")[2]) if len(paths) == 1 else None
