"""What is kept of a run: the scores of its held-out units at each site, and rows made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedbn.federation.results import AFTER_TRAINING, BEFORE_TRAINING
from fedbn.study.method import Outcome
from fedbn.study.plan import Run
from fedbn.tasks.base import Scores, Task
from fedbn.tasks.classification import OWN_THRESHOLD, THRESHOLD, two_class_scores

FORMAT = "fedbn-comparison-3"
READABLE = (FORMAT, "fedbn-comparison-2", "fedbn-comparison-1")
FINAL = "final"
"""When a row is scored whose method ends otherwise than with averaged weights."""

_WHEN = (BEFORE_TRAINING, AFTER_TRAINING, FINAL)


def make_record(outcome: Outcome) -> dict[str, Any]:
    """Return all that a later analysis needs of one run at one site, without a subject's id.

    Units are numbered within the run's held-out ones. Numbers are Python's, which JSON keeps to the
    last bit.
    """
    record: dict[str, Any] = {
        "n_train": len(outcome.train.units),
        "test": scores_record(outcome.test),
    }
    if outcome.after_training is not None:
        record[AFTER_TRAINING] = {"test": scores_record(outcome.after_training.test)}
    if outcome.training_loss is not None:
        record["training_loss"] = outcome.training_loss
    if outcome.facts is not None:
        record["facts"] = outcome.facts
    return record


def scores_record(scores: Scores) -> dict[str, Any]:
    """Return scores fit for JSON, their units numbered from 0."""
    record: dict[str, Any] = {
        "units": np.unique(scores.units, return_inverse=True)[1].tolist(),
        "columns": {name: values.tolist() for name, values in scores.columns.items()},
    }
    if scores.facts:
        record["facts"] = {name: float(value) for name, value in scores.facts.items()}
    if scores.parts is not None:
        record["parts"] = scores_record(scores.parts)
    return record


def read_scores(record: Mapping[str, Any]) -> Scores:
    """Rebuild the scores of one run at one site from :func:`scores_record`."""
    return Scores(
        np.array(record["units"]),
        {name: np.array(values) for name, values in record["columns"].items()},
        read_scores(record["parts"]) if "parts" in record else None,
        record.get("facts", {}),
    )


def from_earlier_format(record: Mapping[str, Any]) -> dict[str, Any]:
    """Bring a site's record of version 0.1, which knew two classes and one task, into this form."""
    targets = np.array(record["test"]["targets"])
    owners = np.array(record["test"]["window_subjects"])
    found: dict[str, Any] = {"n_train": len(record["train"]["targets"])}
    for content in (record, record.get(AFTER_TRAINING)):
        if content is None:
            continue
        scores, parts = (np.array(content["test"][name]) for name in ("scores", "window_scores"))
        test = replace(
            two_class_scores(targets, scores),
            parts=two_class_scores(targets[owners], parts, owners),
            facts={name: content[name] for name in (THRESHOLD, OWN_THRESHOLD)},
        )
        kept = {"test": scores_record(test)}
        found |= kept if content is record else {AFTER_TRAINING: kept}
    return found | {k: record[k] for k in ("training_loss", "facts") if k in record}


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


def results_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows by method, site, seed, fold and when; numbers in full, NaN as an empty cell."""
    import pandas as pd

    frame = pd.DataFrame(rows).sort_values(
        ["method", "site", "seed", "fold", "when"],
        key=lambda column: column.map(_WHEN.index) if column.name == "when" else column,
    )
    text: str = frame.to_csv(index=False, lineterminator="\n")
    return text
