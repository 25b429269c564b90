"""A finished comparison in a local MLflow store: parameters, metrics of every run, and files.

The store is one SQLite file and one folder beside the results; nothing is sent anywhere, and
MLflow's own usage reports are switched off. MLflow is an optional extra and imported where it is
used. What is there already is not written twice.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedbn.federation.results import AFTER_TRAINING
from fedbn.study.comparison import (
    IDENTITY_FILE,
    RESULTS_FILE,
    SUMMARY_FILE,
    read_comparison,
    score_record,
)
from fedbn.tasks.base import Task

TRACKERS = ("mlflow",)
STORE_FILE = "mlflow.db"
ARTEFACTS_FOLDER = "mlflow_artefacts"
EXPERIMENT = "fedbn compare"
_NEEDED = ("mlflow", "sqlalchemy", "alembic")
_NO_REPORTS = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
_FILES = (RESULTS_FILE, SUMMARY_FILE, IDENTITY_FILE, "tables.txt")
_MOST_AT_ONCE = 1000  # metrics in one of MLflow's batches


def check_tracker(name: str) -> None:
    """Refuse a tracker that is unknown or not installed, before anything runs.

    Raises
    ------
    ValueError
        One sentence.
    """
    if name not in TRACKERS:
        raise ValueError(f"unknown tracker {name!r}; choose from {', '.join(TRACKERS)}")
    missing = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise ValueError(
            f"--track {name} needs {', '.join(missing)}: install the extra with "
            "`pip install 'fedbn[mlflow]'`"
        )


def track(folder: Path) -> str:
    """Write a finished comparison to the MLflow store in its folder.

    Returns
    -------
    str
        The store's address, as ``mlflow ui --backend-store-uri`` takes it.
    """
    check_tracker("mlflow")
    os.environ.update(_NO_REPORTS)
    from mlflow.tracking import MlflowClient

    summary, plan, records = read_comparison(folder)
    store = f"sqlite:///{(folder / STORE_FILE).resolve()}"
    client = MlflowClient(tracking_uri=store)
    experiment = _experiment(client, (folder / ARTEFACTS_FOLDER).resolve().as_uri())
    key = _digest(summary)
    parent = _found(client, experiment, "fedbn.comparison", key)
    if parent is not None and parent.info.status == "FINISHED":
        return store
    if parent is None:
        name = f"{len(plan.methods)} methods, {plan.n_seeds} seeds"
        parent = _begin(client, experiment, name, {"fedbn.comparison": key})
    parent_id = parent.info.run_id
    _log(client, parent_id, _parameters(summary), _summary_metrics(summary))
    for run, record in records.items():
        tags = {"fedbn.run": f"{key}-{record['key']}", "mlflow.parentRunId": parent_id}
        child = _found(client, experiment, "fedbn.run", tags["fedbn.run"])
        if child is not None and child.info.status == "FINISHED":
            continue
        if child is None:
            name = f"{run.method}, seed {run.seed}, fold {run.fold}"
            child = _begin(client, experiment, name, tags)
        parameters = {"method": run.method, "seed": run.seed, "fold": run.fold}
        _log(
            client,
            child.info.run_id,
            parameters,
            _run_metrics(plan.task, score_record(plan.task, run, record)),
        )
        client.set_terminated(child.info.run_id)
    for name in _FILES:
        if (folder / name).is_file():
            client.log_artifact(parent_id, str(folder / name))
    client.set_terminated(parent_id)
    return store


def _experiment(client: Any, artefacts: str) -> str:
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is not None:
        return str(found.experiment_id)
    return str(client.create_experiment(EXPERIMENT, artifact_location=artefacts))


def _found(client: Any, experiment: str, tag: str, value: str) -> Any:
    runs = client.search_runs([experiment], f"tags.`{tag}` = '{value}'", max_results=1)
    return runs[0] if runs else None


def _begin(client: Any, experiment: str, name: str, tags: Mapping[str, str]) -> Any:
    return client.create_run(experiment, tags=dict(tags), run_name=name)


def _log(
    client: Any, run_id: str, parameters: Mapping[str, Any], metrics: Mapping[str, float]
) -> None:
    from mlflow.entities import Metric, Param

    now = int(1000 * time.time())
    params = [Param(name, str(value)) for name, value in parameters.items()]
    client.log_batch(run_id, params=params)
    logged = [Metric(name, value, now, 0) for name, value in metrics.items()]
    for start in range(0, len(logged), _MOST_AT_ONCE):
        client.log_batch(run_id, metrics=logged[start : start + _MOST_AT_ONCE])


def _parameters(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **dict(_flat(summary["experiment"], "")),
        **dict(_flat(summary["versions"], "version.")),
        "methods": ",".join(summary["methods"]),
        "reference": summary["reference"],
        "n_seeds": summary["n_seeds"],
        "synthetic": summary["synthetic"],
    }


def _flat(settings: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _summary_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return ``method/scope/level/metric`` means, and differences with the ends of intervals."""
    metrics = {
        f"{name}/{scope}/{level}/{metric}": cell["mean"]
        for name, scopes in summary["scores"].items()
        for scope, levels in scopes.items()
        for level, cells in levels.items()
        for metric, cell in cells.items()
    }
    for name, scopes in summary["differences"].items():
        for scope, levels in scopes.items():
            for level, found in levels.items():
                for part in ("mean", "low", "high", "p"):
                    metrics[f"{name}/{scope}/{level}/accuracy_difference_{part}"] = found[
                        "accuracy"
                    ][part]
    return {name: float(value) for name, value in metrics.items() if value is not None}


def _run_metrics(task: Task, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return ``site/level/metric`` of one run, and the mean over sites where it is defined.

    What a site's network scored after its local epochs of the last round is below
    ``after_training/``.
    """
    metrics: dict[str, float] = {}
    for is_after, prefix in ((False, ""), (True, f"{AFTER_TRAINING}/")):
        scored = [row for row in rows if (row["when"] == AFTER_TRAINING) == is_after]
        for level in task.levels:
            for metric in task.metrics:
                name = f"{level}/{metric.name}"
                values = {row["site"]: float(row[f"{level}_{metric.name}"]) for row in scored}
                defined = {site: value for site, value in values.items() if not math.isnan(value)}
                metrics |= {f"{prefix}{site}/{name}": value for site, value in defined.items()}
                if defined:
                    metrics[f"{prefix}macro/{name}"] = float(np.mean(list(defined.values())))
    return metrics


def _digest(summary: Mapping[str, Any]) -> str:
    parts = ("experiment", "stores", "versions", "methods", "n_seeds", "reference")
    content = json.dumps({name: summary[name] for name in parts}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
