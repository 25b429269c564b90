"""What each site gained, as tables for a terminal and for a text file."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fedbn.federation.results import AFTER_TRAINING, ALONE, BEFORE_TRAINING, FEDERATED, FINETUNED
from fedbn.study.cache import task_of
from fedbn.tasks.base import Metric, Task

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
_SHARE = "_share_test"
_KIND = {ALONE: "local-only"}


def new_table(
    title: str,
    caption: str = "",
    *,
    synthetic: bool,
    left: Sequence[str] = (),
    right: Sequence[str] = (),
    keep: bool = False,
) -> Table:
    """Return an empty table.

    Parameters
    ----------
    title, caption
        Above and below it.
    synthetic
        Whether the subjects are made up, which the title then says.
    left, right
        Heads of the columns, aligned so.
    keep
        Whether no cell may be broken.
    """
    table = Table(**LOOK, title=f"{SYNTHETIC if synthetic else ''}{title}", caption=caption)
    for name in left:
        table.add_column(name, no_wrap=keep, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=keep)
    return table


def mean_and_spread(metric: Metric, cell: Mapping[str, Any]) -> str:
    """Write a mean and, in brackets, its standard deviation over seeds."""
    if cell["mean"] is None:
        return "-"
    return f"{number(metric, cell['mean'])} ({number(metric, cell['sd'])})"


# ----------------------------------------------------------------------------------- of any metric


def shown_metrics(task: Task) -> tuple[Metric, ...]:
    """Return the headline metric, and the first one that is no percentage."""
    others = (metric for metric in task.metrics[1:] if not metric.in_percent)
    return (task.metrics[0], *list(others)[:1])


def heading(metric: Metric) -> str:
    """Name a metric in a narrow column."""
    return metric.short or metric.title


def number(metric: Metric, value: float | None) -> str:
    """Write a metric's value: in %, or with three digits."""
    if value is None:
        return "-"
    return f"{100 * value:.1f}" if metric.in_percent else f"{value:.3f}"


def signed(metric: Metric, value: float | None) -> str:
    """Write a difference with its sign, in points or with three digits; -0.0 is +0.0."""
    if value is None:
        return "-"
    factor, digits = (100, 1) if metric.in_percent else (1, 3)
    return f"{round(factor * value, digits) + 0.0:+.{digits}f}"


def interval(metric: Metric, low: float | None, high: float | None) -> str:
    """Write an interval of a difference."""
    return (
        "-" if low is None or high is None else f"{signed(metric, low)} to {signed(metric, high)}"
    )


def sentence(text: str) -> str:
    """Return words with a capital at their head."""
    return text[:1].upper() + text[1:]


def in_words(metrics: Sequence[Metric]) -> str:
    """Name metrics for a caption: ``accuracy in % and AUC``."""
    return " and ".join(f"{m.title} in %" if m.in_percent else m.title for m in metrics)


def in_percent_but(metrics: Sequence[Metric]) -> str:
    """Say which of some metrics are no percentages."""
    others = "; ".join(metric.title for metric in metrics if not metric.in_percent)
    return f"In %, but: {others}." if others else "In %."


# --------------------------------------------------------------------------------------- of one run


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
    """One row a site: the federated model beside the one it could train by itself."""
    experiment = results["experiment"]
    return _pair_table(
        results,
        (ALONE, FEDERATED),
        ("local-\nonly", "federated", "gain"),
        f"what each site gained (policy {experiment['policy']}, {experiment['rounds']} rounds, "
        f"fold {experiment['fold']} of {experiment['n_folds']}, seed {experiment['seed']})",
        "Federated: the last shared weights with the site's own local entries. Local-only: the "
        "same network and number of updates on this site only. Corrected / worsened: {unit}s "
        "wrong after local-only training and right federated / the reverse. Macro: every site "
        "counts the same; weighted: by test {unit}s. One fold of few {unit}s decides nothing.",
    )


def finetuned_table(results: Mapping[str, Any]) -> Table:
    """One row a site: the federated model, and the same after further epochs at the site alone."""
    tuned = results["experiment"]["finetune"]
    entries = "" if tuned["entries"] == "all" else f", {tuned['entries']} alone"
    return _pair_table(
        results,
        (FEDERATED, FINETUNED),
        ("federated", "fine-tuned", "change"),
        f"what fine-tuning at the site changes ({tuned['epochs']} local "
        f"epoch{'' if tuned['epochs'] == 1 else 's'}{entries})",
        "Fine-tuned: each site has trained on from its federated model by itself.",
    )


def _pair_table(
    results: Mapping[str, Any],
    kinds: tuple[str, str],
    headings: tuple[str, str, str],
    title: str,
    caption: str,
) -> Table:
    """One row a site, and two for all of them: what two kinds of models score."""
    task = task_of(results)
    unit, metrics = task.levels[0], shown_metrics(task)
    has_gain = kinds[0] == ALONE
    moved_head = ["corrected/\nworsened"] if has_gain else []
    pairs = [f"{heading(metric)}\n{name}" for metric in metrics[1:] for name in headings[:2]]
    table = new_table(
        title,
        f"{sentence(in_words(metrics))} by held-out {unit}. {caption.format(unit=unit)}"
        + undefined_sites(results, kinds, metrics)
        + "".join(
            f" {site}: {remark}."
            for site, report in results["sites"].items()
            for remark in task.remarks(report)
        ),
        synthetic=results.get("synthetic", False),
        left=["site"],
        right=[f"{unit}s", *headings, *moved_head, *pairs],
    )

    def add(name: str, n: str, found: Sequence[Mapping[str, Any]], moved: str) -> None:
        first, *others = (tuple(one.get(m.name) for one in found) for m in metrics)
        before, after = first
        gain = None if before is None or after is None else after - before
        cells = [*(number(metrics[0], one) for one in first), signed(metrics[0], gain)]
        cells += [moved] if has_gain else []
        cells += [number(m, v) for m, pair in zip(metrics[1:], others, strict=True) for v in pair]
        table.add_row(name, n, *cells)

    for site, report in results["sites"].items():
        if kinds[1] in report:
            gain = report.get("gain")
            moved = f"{gain['corrected']} / {gain['lost']}" if gain else "-"
            found = [report[kind][unit] if kind in report else {} for kind in kinds]
            add(site, str(report["n_test_subjects"]), found, moved)
    table.add_section()
    across = results["across_sites"]
    if kinds[1] in across:
        for kind, label in (("macro", "macro"), ("sample_weighted", "weighted")):
            found = [across[name][unit][kind] if name in across else {} for name in kinds]
            add(label, "", found, "")
    return table


def undefined_sites(
    results: Mapping[str, Any], kinds: Sequence[str], metrics: Sequence[Metric]
) -> str:
    """Say over how many sites means are, where a site has no value for a metric."""
    unit, sites = task_of(results).levels[0], results["sites"]
    said = []
    for metric in metrics:
        without = [
            name
            for name, report in sites.items()
            if any(kind in report and report[kind][unit][metric.name] is None for kind in kinds)
        ]
        if without:
            said.append(
                f" The means of {metric.title} are over {len(sites) - len(without)} of "
                f"{len(sites)} sites: it is undefined at {', '.join(without)}."
            )
    return "".join(said)


def metrics_table(results: Mapping[str, Any]) -> Table:
    """One row a site and model: every metric by held-out unit, and the shares of classes."""
    task = task_of(results)
    unit = task.levels[0]
    kinds = (ALONE, FEDERATED, FINETUNED)
    measured = [r[k][unit] for r in results["sites"].values() for k in kinds if k in r]
    metrics = [m for m in task.metrics if any(m.name in one for one in measured)]
    any_site = next(iter(results["sites"].values()))
    shares = [name for name in any_site if name.endswith(_SHARE)]
    table = new_table(
        f"every metric by held-out {unit}",
        in_percent_but(metrics) + undefined_sites(results, kinds, metrics),
        synthetic=results.get("synthetic", False),
        left=["site", "model"],
        right=[*map(heading, metrics), *(f"{s.removesuffix(_SHARE)} in %" for s in shares)],
    )
    for site, report in results["sites"].items():
        for kind in kinds:
            if kind in report:
                cells = (number(m, report[kind][unit].get(m.name)) for m in metrics)
                of_classes = (f"{100 * report[name]:.0f}" for name in shares)
                table.add_row(site, _KIND.get(kind, kind), *cells, *of_classes)
        table.add_section()
    return table


def curve_of(report: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], str]:
    """Return a site's scores round by round, and of which units they are."""
    if report["curve"] or not report.get("validation_curve"):
        return report["curve"], "held-out"
    return report["validation_curve"], "validation"


def curve_table(results: Mapping[str, Any]) -> Table:
    """One row a round: the headline metric of each site before and after its local training."""
    task, sites = task_of(results), list(results["sites"])
    metric, unit = task.metrics[0], task.levels[0]
    found = {site: curve_of(report) for site, report in results["sites"].items()}
    whose = next(iter(found.values()))[1] if found else "held-out"
    table = new_table(
        f"{in_words([metric])} by {whose} {unit}, round by round, before > after local training",
        "Before: the round's shared weights with the site's own local entries.",
        synthetic=results.get("synthetic", False),
        right=["round", *sites],
    )
    curves = {
        site: {point["round"]: point for point in curve} for site, (curve, _) in found.items()
    }
    for k in sorted({k for curve in curves.values() for k in curve}):
        cells = []
        for site in sites:
            point = curves[site].get(k)
            ends = point and [
                number(metric, point[when][unit][metric.name])
                for when in (BEFORE_TRAINING, AFTER_TRAINING)
            ]
            cells.append(" > ".join(ends) if ends else "absent")
        table.add_row(str(k), *cells)
    return table


def groups_table(results: Mapping[str, Any]) -> Table:
    """One row a group of sites that were averaged together, and what became of it."""
    table = new_table(
        "which sites were averaged together",
        "Norms of the group's mean update and of its largest site's, in its first > last round. A "
        "group is cut where the first is small while the second is not.",
        synthetic=results.get("synthetic", False),
        left=["group"],
        right=["rounds", "mean update", "largest update"],
    )
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
