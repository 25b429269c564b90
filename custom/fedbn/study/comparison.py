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
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from data_prep.files import write_json, write_text
from fedbn.federation.experiment import Experiment
from fedbn.federation.simulation import read_sites
from fedbn.federation.site import Site
from fedbn.study import cache
from fedbn.study.execution import Unit, WorkGroup, execute, together
from fedbn.study.methods import method
from fedbn.study.plan import ComparisonError, Plan, Run
from fedbn.study.records import FORMAT, READABLE, from_earlier_format, results_csv, score_record
from fedbn.study.summary import summarise
from fedbn.tasks.data import SiteData

IDENTITY_FILE = "comparison.json"
RESULTS_FILE = "results.csv"
SUMMARY_FILE = "summary.json"

_DECIDE_NUMBERS = ("fedbn", "python", "torch", "numpy", "scikit-learn", "monai")


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
        groups = [WorkGroup(group, data_root, identity["stores"]) for group in together(units)]
        with contextlib.closing(execute(groups, processes)) as finished:
            for done, run in enumerate(finished, start=len(records) + 1):
                record = _read_record(_record_path(out, run, keys[run]), keys[run])
                if record is None:
                    raise ComparisonError(f"{run}: its file cannot be read back")
                records[run] = record
                if on_run is not None:
                    on_run(done, len(keys))
    ordered = {run: records[run] for run in plan.runs}
    rows = [row for run, record in ordered.items() for row in score_record(plan.task, run, record)]
    write_text(out / RESULTS_FILE, results_csv(rows))
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
            site: content if "n_train" in content else from_earlier_format(content)
            for site, content in record["sites"].items()
        }
    return record


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
    if not isinstance(content, dict) or content.get("format") not in READABLE:
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
                f"{run}: its file under {folder / cache.RUNS_FOLDER} is not there or "
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
