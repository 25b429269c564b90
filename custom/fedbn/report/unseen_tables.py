"""Leave-one-hospital-out as tables: what each start reaches at a hospital that was not seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from fedbn.report.comparison_tables import interval, points
from fedbn.report.tables import LOOK, SYNTHETIC, WIDTH
from fedbn.study.leave_one_site_out import MACRO

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
    """One row a start, one column a left-out hospital: mean accuracy and its spread over seeds."""
    hospitals = summary["hospitals"]
    notes = dict.fromkeys(_NOTES[row["needs"]][1] for row in summary["rows"])
    table = Table(
        **LOOK,
        title=f"{_label(summary)}accuracy in % at a hospital that took no part, by subject,\nmean "
        f"over {summary['n_seeds']} seeds (standard deviation over seeds)",
        caption="\n".join(
            [
                "Macro: every hospital counts the same; so do AUC and balanced accuracy.",
                *(note for note in notes if note),
            ]
        ),
    )
    table.add_column("start", no_wrap=True)
    for heading in (*hospitals, MACRO, "AUC", "balanced"):
        table.add_column(heading, justify="right", no_wrap=True)
    counts = [summary["n_subjects"][hospital] for hospital in hospitals]
    table.add_row("subjects", *map(str, counts), str(sum(counts)))
    table.add_section()
    for row in summary["rows"]:
        cells = summary["scores"][row["name"]]
        table.add_row(
            _title(row),
            *(_percent(cells[scope]["accuracy"]) for scope in (*hospitals, MACRO)),
            f"{cells[MACRO]['auc']['mean']:.3f}",
            f"{100 * cells[MACRO]['balanced_accuracy']['mean']:.1f}",
        )
    return table


def difference_table(summary: Mapping[str, Any]) -> Table:
    """One row a start: its difference to the start to beat, and what it allows to say."""
    reference = next(row for row in summary["rows"] if row["name"] == summary["reference"])
    n = len(summary["hospitals"])
    table = Table(
        **LOOK,
        title=f"{_label(summary)}difference to {reference['title']!r},\nmacro accuracy in points",
        caption=f"{summary['confidence']:.0%} intervals. Another hospital: t over {n} hospitals, "
        "corrected because\ntheir training sets overlap (Nadeau and Bengio 2003). Further "
        "subjects: of these\nhospitals with these models. Only the first is of a new one.",
    )
    table.add_column("start", no_wrap=True)
    for heading in ("difference", "another hospital", "further subjects", "AUC"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("so", no_wrap=True)
    for row in summary["rows"]:
        if row is reference:
            continue
        found = summary["differences"][row["name"]][summary["reference"]]
        accuracy = found["accuracy"]
        table.add_row(
            _title(row),
            points(accuracy["mean"]),
            *(
                interval(accuracy[over]["low"], accuracy[over]["high"])
                for over in ("hospitals", "subjects")
            ),
            f"{found['auc']['mean']:+.3f}",
            accuracy["hospitals"]["verdict"],
        )
    return table


def _label(summary: Mapping[str, Any]) -> str:
    return SYNTHETIC if summary["synthetic"] else ""


def _title(row: Mapping[str, Any]) -> str:
    return str(row["title"]) + _NOTES[row["needs"]][0]


def _percent(cell: Mapping[str, Any]) -> str:
    spread = "" if cell["sd"] is None else f" ({100 * cell['sd']:.1f})"
    return f"{100 * cell['mean']:.1f}{spread}"
