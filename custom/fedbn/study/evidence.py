"""What leaving one hospital out has shown, in numbers, and which start they recommend."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbn.federation.experiment import validated
from fedbn.federation.results import without_nan
from fedbn.models.new_site import STARTS, FinishedRun, buildable, default_start
from fedbn.study import paired
from fedbn.study.cache import task_of
from fedbn.study.records import read_scores
from fedbn.study.summary import spread
from fedbn.tasks.base import Metric, Task

FORMAT = "fedbn-unseen-1"
SUMMARY_FILE = "unseen.json"

REFERENCE = "fedavg_statistics"
"""The start to beat: FedAvg's model with its statistics recomputed at the new hospital."""

OTHER_SITE = "site:"
OTHER_MEAN, OTHER_BEST = "other_site_mean", "other_site_best"
SAME_AS = {"silobn_statistics": "fedavg_statistics"}
"""Running statistics take no part in training, and what SiloBN keeps at a site is them alone: it
ends with FedAvg's weights, to the bit, and with statistics recomputed with FedAvg's network."""

LABELLED_SUBJECTS = (4, 8)
FINETUNED_STARTS = {"fedavg_statistics": "FedAvg", "fedbn_affine": "FedBN mean,"}
FINETUNED_ENTRIES = ("all", "head")
FINETUNE_EPOCHS, FINETUNE_BATCH = 20, 16
"""Set before any score was looked at, for all entries; the head was added after those had failed
on one hospital in one seed."""

MACRO = "macro"
N_METRICS = 3
"""The task's first metrics by unit: the headline is one of them."""


class UnseenError(ValueError):
    """A leave-one-hospital-out that cannot be run or used; one sentence."""


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes
    ----------
    name, title
        As in the results, and as a table says it.
    needs
        ``""`` for a start without a label; ``"labels"``; ``"site models"``, which never leave a
        site; or ``"hindsight"``, which no one has.
    """

    name: str
    title: str
    needs: str = ""


ROWS: tuple[Row, ...] = (
    *(
        Row(start.name, start.title, "" if start.can_be_built else "site statistics")
        for start in STARTS.values()
        if start.name not in SAME_AS
    ),
    Row(OTHER_MEAN, "another site's FedBN model, mean over sites", "site models"),
    Row(OTHER_BEST, "another site's FedBN model, the best", "hindsight"),
    *(
        Row(
            f"{start}+{n}_{tuned}",
            f"{title} recomputed, {tuned} trained on {n} labelled",
            "labels",
        )
        for start, title in FINETUNED_STARTS.items()
        for tuned in FINETUNED_ENTRIES
        for n in LABELLED_SUBJECTS
    ),
)


# ---------------------------------------------------------------------------------------- numbers


def summarise(
    records: Sequence[Mapping[str, Any]], identity: Mapping[str, Any], *, synthetic: bool
) -> dict[str, Any]:
    """Condense all units: means and spread over seeds, and differences with two intervals.

    Returns
    -------
    dict
        JSON-able. ``"scores"``: row, then hospital or ``"macro"`` (every hospital counts the same),
        to mean and standard deviation over seeds of each metric by unit. ``"differences"``: for
        each pair of rows, first minus second, in the macro mean, with ``"hospitals"``, the interval
        for yet another hospital (:func:`fedbn.study.paired.compare` over the hospitals, whose
        training sets overlap), and for the headline metric, if it is a mean over units,
        ``"subjects"``, that for further ones of these hospitals.
    """
    task = task_of(identity)
    hospitals = sorted({str(record["hospital"]) for record in records})
    seeds = sorted({int(record["seed"]) for record in records})
    table = {
        (str(record["hospital"]), int(record["seed"])): _score_record(task, record)
        for record in records
    }
    rows = [row for row in ROWS if all(row.name in scored for scored in table.values())]
    names = [row.name for row in rows]
    scores = {
        name: {
            **{site: _spread([[table[site, seed][name]] for seed in seeds]) for site in hospitals},
            MACRO: _spread([[table[site, seed][name] for site in hospitals] for seed in seeds]),
        }
        for name in names
    }
    differences = {
        name: {
            other: _difference(table, hospitals, seeds, name, other)
            for other in names
            if other != name
        }
        for name in names
    }
    return without_nan(
        {
            **identity,
            "synthetic": synthetic,
            "hospitals": hospitals,
            f"n_{task.levels[0]}s": {
                hospital: table[hospital, seeds[0]][REFERENCE].n for hospital in hospitals
            },
            "n_seeds": len(seeds),
            "reference": REFERENCE,
            "confidence": paired.CONFIDENCE,
            "rows": [asdict(row) for row in rows],
            "scores": scores,
            "differences": differences,
        }
    )


@dataclass(frozen=True)
class _Scored:
    """One line of the table at one hospital and seed: metrics, and the headline's of each unit.

    The latter are none where the metric is no mean over units.
    """

    metrics: dict[str, float]
    of_units: np.ndarray
    n: int


def _score_record(task: Task, record: Mapping[str, Any]) -> dict[str, _Scored]:
    scored = {}
    for name, kept in record["scores"].items():
        scores = read_scores(kept)
        measured = task.measure(scores)[task.levels[0]]
        metrics = {metric.name: measured[metric.name] for metric in task.metrics[:N_METRICS]}
        of_units = task.unit_values(scores).get(task.metrics[0].name, np.empty(0))
        scored[name] = _Scored(metrics, of_units, len(scores.units))
    others = [found for name, found in scored.items() if name.startswith(OTHER_SITE)]
    headline = task.metrics[0]
    scored[OTHER_MEAN] = _Scored(
        {name: statistics.fmean(o.metrics[name] for o in others) for name in others[0].metrics},
        np.mean([one.of_units for one in others], axis=0),
        others[0].n,
    )
    best = max if headline.higher_is_better else min
    scored[OTHER_BEST] = best(others, key=lambda found: found.metrics[headline.name])
    return scored


def _spread(of_seeds: Sequence[Sequence[_Scored]]) -> dict[str, dict[str, float]]:
    """Mean over hospitals in each seed, then mean and standard deviation over seeds."""
    return {
        metric: spread(np.array([[o.metrics[metric] for o in of_seed] for of_seed in of_seeds]))
        for metric in of_seeds[0][0].metrics
    }


def _difference(
    table: Mapping[tuple[str, int], Mapping[str, _Scored]],
    hospitals: Sequence[str],
    seeds: Sequence[int],
    name: str,
    other: str,
) -> dict[str, Any]:
    """Subtract one row from another, in the macro mean, with intervals."""
    found: dict[str, Any] = {}
    pairs = {
        site: [(table[site, seed][name], table[site, seed][other]) for seed in seeds]
        for site in hospitals
    }
    for metric in pairs[hospitals[0]][0][0].metrics:
        of_hospital = {
            site: statistics.fmean(a.metrics[metric] - b.metrics[metric] for a, b in of_site)
            for site, of_site in pairs.items()
        }
        over = paired.compare(list(of_hospital.values()), 1 / (len(hospitals) - 1))
        found[metric] = {
            "mean": over.mean,
            "of_hospital": of_hospital,
            "hospitals": {
                "low": over.low,
                "high": over.high,
                "p": over.p,
                "verdict": paired.verdict(over),
            },
        }
    by_unit = [
        np.mean([a.of_units - b.of_units for a, b in of_site], axis=0) for of_site in pairs.values()
    ]
    if by_unit[0].size:
        low, high = subject_interval(by_unit)
        next(iter(found.values()))["subjects"] = {"low": low, "high": high}
    return found


def subject_interval(by_subject: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the normal interval of a mean over hospitals of means over subjects.

    Parameters
    ----------
    by_subject
        For each hospital the subjects' differences, (n_subjects,), mean over seeds.
    """
    from scipy import stats

    mean = statistics.fmean(float(values.mean()) for values in by_subject)
    variance = sum(float(values.var(ddof=1)) / len(values) for values in by_subject)
    error = math.sqrt(variance) / len(by_subject)
    half = float(stats.norm.ppf((1 + paired.CONFIDENCE) / 2)) * error
    return mean - half, mean + half


# ------------------------------------------------------------------------------- what to start from


@dataclass(frozen=True)
class Recommendation:
    """Which start to build from a run, and why.

    Attributes
    ----------
    start
        Its name.
    sentences
        Why, for people.
    """

    start: str
    sentences: tuple[str, ...]


def read_evidence(path: Path) -> dict[str, Any]:
    """Read the summary of a leave-one-hospital-out.

    Raises
    ------
    UnseenError
        If there is none, or it is of something else.
    """
    path = path / SUMMARY_FILE if path.is_dir() else path
    content: Any = None
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_bytes())
    if not isinstance(content, dict) or content.get("format") != FORMAT or "scores" not in content:
        raise UnseenError(f"{path} is no summary of `fedbn unseen` ({FORMAT})")
    return content


def recommend(run: FinishedRun, evidence: Mapping[str, Any] | None) -> Recommendation:
    """Choose the start that did best on the federation's own hospitals, not the one by its name.

    Parameters
    ----------
    run
        The run that a new hospital starts from.
    evidence
        From :func:`read_evidence`, or ``None``.

    Raises
    ------
    UnseenError
        If the evidence is of another network or task, or of made-up subjects.
    """
    if evidence is None:
        name = default_start(run)
        said = [
            f"there is no evidence: {STARTS[name].title!r} is what the run's policy "
            f"{run.experiment.policy!r} suggests, not what was found best; `fedbn unseen` measures "
            "it on the federation's own hospitals, and --evidence takes its result"
        ]
        if run.experiment.policy == "fedbn" and run.affine is None:
            said.append(f"gamma is 1 and beta 0 at the start: {run.no_affine}")
        return Recommendation(name, tuple(said))
    reservations = _check_evidence(run, evidence)
    metric = run.experiment.task.metrics[0]
    value = {
        name: evidence["scores"][name][MACRO][metric.name]["mean"]
        for name, start in STARTS.items()
        if start.can_be_built and name in evidence["scores"]
    }
    ranked = sorted(value, key=value.__getitem__, reverse=metric.higher_is_better)
    best = ranked[0]
    judged = {name: SAME_AS.get(name, name) for name in buildable(run)}
    built = min(judged, key=lambda name: ranked.index(judged[name]))
    chosen = judged[built]
    how = "highest" if metric.higher_is_better else "lowest"
    said = [
        f"on {len(evidence['hospitals'])} hospitals left out one at a time, {evidence['n_seeds']} "
        f"seeds, {STARTS[best].title!r} has the {how} {metric.title} by "
        f"{run.experiment.task.levels[0]} without labels: {_value(metric, value[best])}"
    ]
    if chosen == best:
        said.append(_told(evidence, metric, best, ranked[1]))
    else:
        said.append(_told(evidence, metric, best, chosen))
        start = STARTS[best]
        if start.policy != run.experiment.policy:
            said.append(
                f'it needs a run with "policy": "{start.policy}"; of what this run '
                f'("{run.experiment.policy}") allows, {STARTS[chosen].title!r} is the best and '
                "was built"
            )
        else:
            said.append(f"it cannot be built: {run.no_affine}; {STARTS[chosen].title!r} was built")
    return Recommendation(built, (*said, *reservations))


def _value(metric: Metric, value: float) -> str:
    return f"{100 * value:.1f} %" if metric.in_percent else f"{value:.3f}"


def _told(evidence: Mapping[str, Any], metric: Metric, name: str, other: str) -> str:
    found = evidence["differences"][name][other][metric.name]
    factor, digits, unit = (100, 1, " points") if metric.in_percent else (1, 3, "")

    def span(ends: Mapping[str, Any]) -> str:
        return " to ".join(f"{factor * ends[end]:+.{digits}f}" for end in ("low", "high"))

    over = found["hospitals"]
    interval = "no interval" if over["low"] is None else f"95 % interval {span(over)}"
    told = (
        f"that is {factor * found['mean']:+.{digits}f}{unit} to {STARTS[other].title!r} "
        f"({interval} for yet another hospital: {over['verdict']}"
    )
    if "subjects" in found:
        told += f"; {span(found['subjects'])} for further subjects of these"
    return f"{told})"


def _check_evidence(run: FinishedRun, evidence: Mapping[str, Any]) -> list[str]:
    """Refuse evidence that says nothing of the run; say in what else it is another."""
    experiment = validated(evidence["experiment"], "the evidence")
    there, here = (one.model_dump(mode="json") for one in (experiment, run.experiment))
    for name in ("network", "task"):
        if there[name] != here[name]:
            raise UnseenError(
                f"the evidence is of another {name} ({there[name]}) than the run's "
                f"({here[name]}); run `fedbn unseen` with the run's own experiment"
            )
    if evidence.get("synthetic") and run.signature and not run.signature.get("synthetic"):
        raise UnseenError(
            "the evidence is of a synthetic cohort and the run's sites are real; run "
            "`fedbn unseen` on scans of patients"
        )
    here["sites"] = sorted(here["sites"])
    here["training"] = {**here["training"], "proximal_mu": 0.0}  # as the evidence has it
    names = ("sites", "rounds", "training", "aggregation_weights")
    other = [name for name in names if there[name] != here[name]]
    return [f"mind that the evidence was made with other {' and '.join(other)}"] if other else []
