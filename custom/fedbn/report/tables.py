"""What each site gained, as tables for a terminal and for a text file."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fedbn.federation.results import AFTER_TRAINING, ALONE, BEFORE_TRAINING, FEDERATED, FINETUNED

SYNTHETIC = "SYNTHETIC COHORT, no patient's data\n"
WIDTH = 80
LOOK: dict[str, Any] = {
    "box": box.SIMPLE_HEAD,
    "pad_edge": False,
    "title_justify": "left",
    "caption_justify": "left",
    "collapse_padding": True,
    "min_width": 40,
}
# Captions hold no line break within a sentence: each is wrapped once, to the width of its table.
_GAIN_CAPTION = (
    "Accuracy in % and AUC by held-out subject. Federated: the last shared weights with the site's "
    "own local entries. Alone: the same network and number of updates on this site only. Won / "
    "lost: subjects wrong alone and right federated / the reverse. Macro: every site counts the "
    "same; weighted: by test subjects. One fold of few subjects decides nothing."
)


def run_tables(results: Mapping[str, Any]) -> list[Table]:
    """Build the tables of one finished run; what each site gained comes last, where a reader ends.

    Parameters
    ----------
    results
        The content of ``results.json``.
    """
    tables = [curve_table(results)]
    if any("groups" in one for one in results["rounds"]):
        tables.append(groups_table(results))
    if any(FINETUNED in report for report in results["sites"].values()):
        tables.append(finetuned_table(results))
    return [*tables, gain_table(results)]


def gain_table(results: Mapping[str, Any]) -> Table:
    """One row a site: the federated model beside the one it could train alone."""
    experiment = results["experiment"]
    table = Table(
        **LOOK,
        title=(
            f"{_label(results)}what each site gained (policy {experiment['policy']}, "
            f"{experiment['rounds']} rounds, fold {experiment['fold']} of {experiment['n_folds']}, "
            f"seed {experiment['seed']})"
        ),
        caption=_GAIN_CAPTION,
    )
    table.add_column("site")
    for heading in ("subjects", "alone", "federated", "gain", "won / lost"):
        table.add_column(heading, justify="right")
    for heading in ("AUC\nalone", "AUC\nfederated"):
        table.add_column(heading, justify="right")
    for site, report in results["sites"].items():
        federated, alone = report[FEDERATED]["subject"], report.get(ALONE)
        own = alone["subject"] if alone else {}
        gain = report.get("gain")
        table.add_row(
            site,
            str(report["n_test_subjects"]),
            _percent(own.get("accuracy")),
            _percent(federated["accuracy"]),
            _points(own.get("accuracy"), federated["accuracy"]),
            f"{gain['corrected']} / {gain['lost']}" if gain else "-",
            _number(own.get("auc")),
            _number(federated["auc"]),
        )
    table.add_section()
    across = results["across_sites"]
    for kind, label in (("macro", "macro"), ("sample_weighted", "weighted")):
        if FEDERATED not in across:
            continue
        federated = across[FEDERATED]["subject"][kind]
        own = across[ALONE]["subject"][kind] if ALONE in across else {}
        table.add_row(
            label,
            "",
            _percent(own.get("accuracy")),
            _percent(federated["accuracy"]),
            _points(own.get("accuracy"), federated["accuracy"]),
            "",
            _number(own.get("auc")),
            _number(federated["auc"]),
        )
    return table


def curve_table(results: Mapping[str, Any]) -> Table:
    """One row a round: subject accuracy of each site before and after its local training."""
    sites = list(results["sites"])
    table = Table(
        **LOOK,
        title=(
            f"{_label(results)}accuracy in % by held-out subject, "
            "round by round, before > after local training"
        ),
        caption="Before: the round's shared weights with the site's own local entries.",
    )
    table.add_column("round", justify="right")
    for site in sites:
        table.add_column(site, justify="right")
    curves = {
        site: {point["round"]: point for point in results["sites"][site]["curve"]} for site in sites
    }
    for number in sorted({number for curve in curves.values() for number in curve}):
        table.add_row(str(number), *(_before_after(curves[site].get(number)) for site in sites))
    return table


def finetuned_table(results: Mapping[str, Any]) -> Table:
    """One row a site: the federated model, and the same after further epochs at the site alone."""
    tuned = results["experiment"]["finetune"]
    entries = "" if tuned["entries"] == "all" else f", {tuned['entries']} alone"
    table = Table(
        **LOOK,
        title=(
            f"{_label(results)}what fine-tuning at the site changes ({tuned['epochs']} local "
            f"epoch{'' if tuned['epochs'] == 1 else 's'}{entries})"
        ),
        caption=(
            "Accuracy in % and AUC by held-out subject. Fine-tuned: each site has trained on from "
            "its federated model by itself."
        ),
    )
    table.add_column("site")
    for heading in (
        "subjects", "federated", "fine-tuned", "change", "AUC\nfederated", "AUC\nfine-tuned"
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for site, report in results["sites"].items():
        if FINETUNED in report:
            before, after = report[FEDERATED]["subject"], report[FINETUNED]["subject"]
            table.add_row(site, str(report["n_test_subjects"]), *_change(before, after))
    table.add_section()
    across = results["across_sites"]
    for kind, label in (("macro", "macro"), ("sample_weighted", "weighted")):
        if FEDERATED in across and FINETUNED in across:
            before, after = across[FEDERATED]["subject"][kind], across[FINETUNED]["subject"][kind]
            table.add_row(label, "", *_change(before, after))
    return table


def groups_table(results: Mapping[str, Any]) -> Table:
    """One row a group of sites that were averaged together, and what became of it."""
    table = Table(
        **LOOK,
        title=f"{_label(results)}which sites were averaged together",
        caption=(
            "Norms of the group's mean update and of its largest site's, in its first > last "
            "round. A group is cut where the first is small while the second is not."
        ),
    )
    table.add_column("group")
    for heading in ("rounds", "mean update", "largest update"):
        table.add_column(heading, justify="right")
    table.add_column("then")
    alive: dict[tuple[str, ...], list[Mapping[str, Any]]] = {tuple(sorted(results["sites"])): []}
    for one in results["rounds"]:
        facts = {tuple(fact["sites"]): fact for fact in one.get("updates", [])}
        groups = [tuple(group) for group in one.get("groups", alive)]
        for group, seen in list(alive.items()):
            seen.append({"round": one["round"], **facts.get(group, {})})
            if group not in groups:
                table.add_row(*_group_row(group, seen))
                del alive[group]
        for group in groups:
            alive.setdefault(group, [])
    for group, seen in alive.items():
        table.add_row(*_group_row(group, seen))
    return table


def _group_row(group: tuple[str, ...], seen: list[Mapping[str, Any]]) -> tuple[str, ...]:
    """Tell of a group from what is known of it in each round in which it was averaged."""
    numbers = [one["round"] for one in seen]
    rounds = "-" if not seen else "-".join(str(n) for n in dict.fromkeys((numbers[0], numbers[-1])))
    norms = []
    for name in ("mean_norm", "largest_site_norm"):
        values = [one[name] for one in seen if one.get(name) is not None]
        ends = [values[0], values[-1]] if len(values) > 1 else values
        norms.append(" > ".join(f"{value:.2f}" for value in ends) or "-")
    cut = seen[-1].get("cut") if seen else None
    fate = "kept" if cut is None else "cut in " + " and ".join("+".join(part) for part in cut)
    return "+".join(group), rounds, *norms, fate


def render(tables: Iterable[Table], width: int = WIDTH) -> str:
    """Render tables to plain text."""
    console = Console(file=io.StringIO(), width=width, no_color=True, highlight=False)
    for table in tables:
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _before_after(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return "absent"
    before, after = point[BEFORE_TRAINING]["subject"], point[AFTER_TRAINING]["subject"]
    return f"{_percent(before['accuracy'])} > {_percent(after['accuracy'])}"


def _change(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        _percent(before["accuracy"]),
        _percent(after["accuracy"]),
        _points(before["accuracy"], after["accuracy"]),
        _number(before["auc"]),
        _number(after["auc"]),
    )


def _label(results: Mapping[str, Any]) -> str:
    return SYNTHETIC if results.get("synthetic") else ""


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _points(before: float | None, after: float | None) -> str:
    return "-" if before is None or after is None else f"{100 * (after - before):+.1f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
