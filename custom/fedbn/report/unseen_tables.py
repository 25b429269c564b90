"""Leave-one-hospital-out as tables: what each start reaches at a hospital that was not seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from fedbn.report.tables import (
    WIDTH,
    heading,
    in_words,
    interval,
    mean_and_spread,
    new_table,
    number,
    shown_metrics,
    signed,
)
from fedbn.study.cache import task_of
from fedbn.study.evidence import MACRO

_NOTES = {
    "site statistics": (" *", "* needs the sites' running statistics, which never leave them."),
    "site models": (" +", "+ needs the sites' own models, which never leave them."),
    "hindsight": (" ++", "++ chosen by its score here: no hospital can."),
    "labels": ("", ""),
    "": ("", ""),
}


def unseen_tables(summary: Mapping[str, Any]) -> list[Table]:
    """Build the tables from the content of ``unseen.json``: scores, then differences."""
    return [score_table(summary), difference_table(summary)]


def width(summary: Mapping[str, Any]) -> int:
    """Return the width that the tables need without a broken line."""
    return WIDTH + 60 + 13 * max(0, len(summary["hospitals"]) - 4)


def score_table(summary: Mapping[str, Any]) -> Table:
    """One row a start, one column a left-out hospital: the headline metric, spread over seeds."""
    hospitals, task = summary["hospitals"], task_of(summary)
    metric, unit = task.metrics[0], task.levels[0]
    others = [m for m in reversed(task.metrics[1:]) if m.name in _any(summary)]
    notes = dict.fromkeys(_NOTES[row["needs"]][1] for row in summary["rows"])
    also = f"; so do {in_words(others)}" if others else ""
    table = new_table(
        f"{in_words([metric])} at a hospital that took no part, by {unit},"
        f"\nmean over {summary['n_seeds']} seeds (standard deviation over seeds)",
        "\n".join([f"Macro: every hospital counts the same{also}.", *filter(None, notes)]),
        synthetic=summary["synthetic"],
        left=["start"],
        right=[*hospitals, MACRO, *map(heading, others)],
        keep=True,
    )
    counts = [summary[f"n_{unit}s"][hospital] for hospital in hospitals]
    table.add_row(f"{unit}s", *map(str, counts), str(sum(counts)))
    table.add_section()
    for row in summary["rows"]:
        cells = summary["scores"][row["name"]]
        table.add_row(
            _title(row),
            *(mean_and_spread(metric, cells[one][metric.name]) for one in (*hospitals, MACRO)),
            *(number(other, cells[MACRO][other.name]["mean"]) for other in others),
        )
    return table


def difference_table(summary: Mapping[str, Any]) -> Table:
    """One row a start: its difference to the start to beat, and what it allows to say."""
    reference = next(row for row in summary["rows"] if row["name"] == summary["reference"])
    n, task = len(summary["hospitals"]), task_of(summary)
    metric = task.metrics[0]
    others = [m for m in shown_metrics(task)[1:] if m.name in _any(summary)]
    points, unit = " in points" if metric.in_percent else "", task.levels[0]
    table = new_table(
        f"difference to {reference['title']!r},\nmacro {metric.title}{points}",
        f"{summary['confidence']:.0%} intervals. Another hospital: t over {n} hospitals, "
        "corrected because\ntheir training sets overlap (Nadeau and Bengio 2003). Further "
        f"{unit}s: of these\nhospitals with these models. Only the first is of a new one.",
        synthetic=summary["synthetic"],
        left=["start"],
        right=["difference", "another hospital", f"further {unit}s", *map(heading, others)],
        keep=True,
    )
    table.add_column("so", no_wrap=True)
    for row in summary["rows"]:
        if row is reference:
            continue
        found = summary["differences"][row["name"]][summary["reference"]]
        one = found[metric.name]
        intervals = (
            one.get(over) or {"low": None, "high": None} for over in ("hospitals", "subjects")
        )
        table.add_row(
            _title(row),
            signed(metric, one["mean"]),
            *(interval(metric, ends["low"], ends["high"]) for ends in intervals),
            *(signed(other, found[other.name]["mean"]) for other in others),
            one["hospitals"]["verdict"],
        )
    return table


def _any(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what is known of one row, by metric."""
    found: Mapping[str, Any] = summary["scores"][summary["reference"]][MACRO]
    return found


def _title(row: Mapping[str, Any]) -> str:
    return str(row["title"]) + _NOTES[row["needs"]][0]
