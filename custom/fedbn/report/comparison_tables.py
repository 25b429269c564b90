"""A comparison of methods as tables: scores, paired differences, and every metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from fedbn.federation.results import AFTER_TRAINING
from fedbn.report.tables import (
    WIDTH,
    heading,
    in_percent_but,
    in_words,
    interval,
    mean_and_spread,
    new_table,
    number,
    sentence,
    shown_metrics,
    signed,
)
from fedbn.study import paired
from fedbn.study.cache import task_of
from fedbn.study.over_sites import MIN_SITES
from fedbn.study.summary import MACRO
from fedbn.tasks.base import Metric

_LOSS = Metric("loss", "training loss", higher_is_better=False, in_percent=False)
_SHORT = {paired.NOT_SHOWN: "not shown", paired.SAME: "the same", paired.UNTOLD: "-"}
_POOLED_MARK = " *"
_POOLED = "\n* needs all sites' data in one place, which a federation exists to avoid."
_CALIBRATION = (
    " Exc. (excess): distance of mean score and share of the positive class in %, mean over sites "
    "without its sign. Slope: below 1 where scores are too sure."
)


def comparison_tables(summary: Mapping[str, Any]) -> list[Table]:
    """Build the tables of a finished comparison from the content of its ``summary.json``."""
    tables = [scores_table(summary, level) for level in levels(summary)]
    if summary["differences"]:
        tables.append(difference_table(summary))
    tables += over_sites_tables(summary)
    if summary.get(AFTER_TRAINING):
        tables.append(after_training_table(summary))
    if summary.get("convergence"):
        tables.append(convergence_table(summary))
    return [*tables, metrics_table(summary)]


def levels(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what is scored: units, and their samples where a unit has more than one."""
    unit, *parts = task_of(summary).levels
    return (unit, *(part for part in parts if summary[f"n_{part}s"] != summary[f"n_{unit}s"]))


def width(summary: Mapping[str, Any]) -> int:
    """Return the width that the tables need without a broken line: 80, unless there is much."""
    longest = max(len(_title(summary, name)) for name in summary["methods"])
    sites, metrics = summary["sites"], task_of(summary).metrics
    words = [max(map(len, [*heading(metric).split(), "00.000"])) + 2 for metric in metrics]
    more = max(0, max(map(len, sites)) - 6) + 13 * max(0, len(sites) - 4)
    return WIDTH + max(0, longest - 18) + max(more, sum(words) - 56)


def scores_table(summary: Mapping[str, Any], level: str, metric: Metric | None = None) -> Table:
    """One row a method, one column a site: a metric (the headline) and its spread over seeds."""
    sites, task = summary["sites"], task_of(summary)
    metric = metric or task.metrics[0]
    unit = task.levels[0]
    by = f"held-out {unit}" if level == unit else f"{level} of held-out {unit}s"
    table = _table(
        summary,
        f"{in_words([metric])} by {by}, mean over {summary['n_folds']} folds and "
        f"{_seeds(summary)} (standard deviation over seeds)",
        f"macro: every site counts the same.{_partial(summary, [metric])}{_pooled_note(summary)}",
        [*sites, MACRO],
    )
    for counted in dict.fromkeys((unit, level)):
        counts = [summary[f"n_{counted}s"][site] for site in sites]
        table.add_row(f"{counted}s", *map(str, counts), str(sum(counts)))
    table.add_section()
    for name in summary["methods"]:
        scores = summary["scores"][name]
        cells = (scores[scope][level][metric.name] for scope in (*sites, MACRO))
        table.add_row(_title(summary, name), *(mean_and_spread(metric, cell) for cell in cells))
    return table


def difference_table(summary: Mapping[str, Any]) -> Table:
    """One row a method and scope: the paired difference to the reference, and what it allows."""
    reference = summary["methods"][summary["reference"]]["title"]
    n_looks = sum(len(scopes) for scopes in summary["differences"].values())
    task = task_of(summary)
    unit, metric = task.levels[0], task.metrics[0]
    points = " in points" if metric.in_percent else ""
    table = _table(
        summary,
        f"difference to {reference}, {metric.title}{points} by held-out {unit}, paired in each of "
        f"{summary['n_folds']} folds and {_seeds(summary)}",
        f"{summary['confidence']:.0%} intervals and p of the corrected resampled t test: folds "
        f"share training {unit}s (Nadeau and Bengio 2003; Bouckaert and Frank 2004). A difference "
        "is called higher or lower only where its interval leaves zero out. "
        f"Of {n_looks} such intervals, about {n_looks * (1 - summary['confidence']):.1f} "
        "would leave zero out by chance alone; Holm: p adjusted for the number of methods, in the "
        f"macro mean.{_partial(summary, [metric])}{_pooled_note(summary)}",
        ["difference", "interval", "p", "Holm"],
        ["method", "site"],
        keep=True,
    )
    table.add_column("so", no_wrap=True)
    for name, scopes in summary["differences"].items():
        for k, scope in enumerate((MACRO, *summary["sites"])):
            one = scopes[scope][unit][metric.name]
            table.add_row(
                _title(summary, name) if k == 0 else "",
                scope,
                signed(metric, one["mean"]),
                interval(metric, one["low"], one["high"]),
                _plain(one["p"]),
                _plain(one["p_holm"]) if scope == MACRO else "",
                _SHORT.get(one["verdict"], one["verdict"]),
            )
        table.add_section()
    return table


def over_sites_tables(summary: Mapping[str, Any]) -> list[Table]:
    """One table a reference, one row a method and metric: differences with the site as the unit."""
    if len(summary["sites"]) < MIN_SITES:
        return []
    return [
        _over_sites_table(summary, reference, of_methods)
        for reference, of_methods in summary.get("over_sites", {}).items()
        if of_methods
    ]


def _over_sites_table(
    summary: Mapping[str, Any], reference: str, of_methods: Mapping[str, Any]
) -> Table:
    task = task_of(summary)
    unit, percent = task.levels[0], f"{summary['confidence']:.0%}"
    table = _table(
        summary,
        f"difference to {summary['methods'][reference]['title']} by held-out {unit}, with the "
        f"{len(summary['sites'])} sites as the unit",
        f"A site's difference is its mean over {summary['n_folds']} folds and {_seeds(summary)}. "
        f"Interval: {percent}, t over sites, but never surer than over folds: sites share models. "
        "Signed-rank: p of Wilcoxon's test, not corrected for that. Weighted: every "
        f"{unit} counts the same, bootstrap of sites and then {unit}s, for metrics that are means "
        f"over {unit}s. Not adjusted for their number.{_pooled_note(summary)}",
        ["mean", "interval", "signed-\nrank", "sites\n+ / -", "weighted,\ninterval"],
        ["method", "metric"],
        keep=True,
    )
    metrics = [m for k, m in enumerate(task.metrics) if k < 2 or not m.in_percent]
    for name, levels_of in of_methods.items():
        for k, metric in enumerate(metrics):
            one = levels_of[unit][metric.name]
            drawn = one.get("weighted") or dict.fromkeys(("low", "high"))
            table.add_row(
                _title(summary, name) if k == 0 else "",
                heading(metric),
                signed(metric, one["mean"]),
                interval(metric, one["low"], one["high"]),
                _plain(one["wilcoxon_p"]),
                f"{one['n_higher']} / {one['n_lower']}",
                interval(metric, drawn["low"], drawn["high"]),
            )
        table.add_section()
    return table


def metrics_table(summary: Mapping[str, Any]) -> Table:
    """One row a method: every metric, and how far its scores are probabilities, as macro means."""
    task = task_of(summary)
    unit = task.levels[0]
    calibrated = any(of_site for of in summary["calibration"].values() for of_site in of.values())
    named = [f"{sentence(m.short)}: {m.title}." for m in task.metrics if m.short]
    low = [m.title for m in task.metrics if not m.higher_is_better]
    table = _table(
        summary,
        f"every metric by held-out {unit}, macro mean over sites",
        f"{in_percent_but(task.metrics)} {' '.join(named)}"
        + (f" Lower is better: {'; '.join(low)}." if low else "")
        + (_CALIBRATION if calibrated else "")
        + f"{_partial(summary, task.metrics)}{_pooled_note(summary)}",
        [*map(heading, task.metrics), *(("exc.", "slope") if calibrated else ())],
    )
    for name in summary["methods"]:
        scores = summary["scores"][name][MACRO][unit]
        cells = [number(metric, scores[metric.name]["mean"]) for metric in task.metrics]
        if calibrated:
            of_sites = list(summary["calibration"][name].values())
            slopes = [one["slope"] for one in of_sites]
            excess = sum(abs(one["excess"]) for one in of_sites) / len(of_sites)
            cells += [
                f"{100 * excess:.1f}",
                _plain(None if None in slopes else sum(slopes) / len(slopes)),
            ]
        table.add_row(_title(summary, name), *cells)
    return table


def after_training_table(summary: Mapping[str, Any]) -> Table:
    """One row a federated method: its sites' scores before and after local training."""
    task = task_of(summary)
    unit, metrics = task.levels[0], shown_metrics(task)
    table = _table(
        summary,
        f"the last round by held-out {unit}, macro mean over sites (standard deviation over seeds)",
        f"{sentence(in_words(metrics))}. Before: the final shared weights with each site's own "
        "entries, as in the other tables. After: each site's network after its local epochs of "
        f"the last round, before the last averaging.{_partial(summary, metrics)}",
        [f"{metric.title}\n{when}" for metric in metrics for when in ("before", "after")],
    )
    for name, scopes in summary[AFTER_TRAINING].items():
        ends = [found[MACRO][unit] for found in (summary["scores"][name], scopes)]
        cells = (mean_and_spread(m, end[m.name]) for m in metrics for end in ends)
        table.add_row(_title(summary, name), *cells)
    return table


def convergence_table(summary: Mapping[str, Any]) -> Table:
    """One row a federated method: how many rounds it takes to a training loss."""
    found = summary["convergence"]
    other = summary["methods"][found["compared_with"]]["title"]
    table = _table(
        summary,
        f"rounds until the training loss is at most {loss_rule(summary)}, of {found['rounds']}",
        "Training loss: in the last local epoch of a round, measured while the weights change, "
        "mean over sites. Reached: runs that come to it. "
        f"Difference to {other} in rounds, paired, where all runs of both reach it, with the "
        f"{summary['confidence']:.0%} interval of the corrected resampled t test. Last loss: at "
        "the last round (standard deviation over seeds).",
        ["median", "range", "reached", "difference", "interval", "last loss"],
        keep=True,
    )
    for name, one in found["methods"].items():
        difference = one["difference"] or dict.fromkeys(("mean", "low", "high"))
        low, high = difference["low"], difference["high"]
        table.add_row(
            _title(summary, name),
            _rounds(one["median"]),
            f"{_rounds(one['low'])} to {_rounds(one['high'])}" if one["reached"] else "-",
            f"{one['reached']} of {one['runs']}",
            "-" if difference["mean"] is None else f"{difference['mean']:+.1f}",
            "-" if low is None or high is None else f"{low:+.1f} to {high:+.1f}",
            mean_and_spread(_LOSS, one["last_loss"]),
        )
    return table


def loss_rule(summary: Mapping[str, Any]) -> str:
    """Say which training loss is looked for."""
    found = summary["convergence"]
    if found["of"] is None:
        return f"{found['target']:g}"
    title = summary["methods"][found["of"]]["title"]
    return f"{title}'s at its last round (in each seed and fold; {found['target']:.3f} on average)"


def difference_sentences(summary: Mapping[str, Any]) -> list[str]:
    """Say for each method what its macro headline metric shows, and what was chosen."""
    reference = summary["methods"][summary["reference"]]["title"]
    sentences = []
    for name, scopes in summary["differences"].items():
        title, task = summary["methods"][name]["title"], task_of(summary)
        metric = task.metrics[0]
        one = scopes[MACRO][task.levels[0]][metric.name]
        if one["low"] is None:
            sentences.append(f"{title} and {reference}: {one['verdict']}.")
            continue
        points = " points" if metric.in_percent else ""
        span = f"{summary['confidence']:.0%} interval {interval(metric, one['low'], one['high'])}"
        if one["verdict"] in (paired.HIGHER, paired.LOWER):
            by = signed(metric, abs(one["mean"])).removeprefix("+")
            sentences.append(f"{title} is {by}{points} {one['verdict']} than {reference} ({span}).")
        else:
            sentences.append(
                f"{title} against {reference}: {paired.NOT_SHOWN} "
                f"({signed(metric, one['mean'])}{points}, {span} includes zero)."
            )
    for name, counts in summary.get("choices", {}).items():
        if len(counts) > 1:
            taken = ", ".join(
                f"{candidate} {'once' if n == 1 else f'{n} times'}"
                for candidate, n in counts.items()
            )
            title = summary["methods"][name]["title"]
            sentences.append(f"{title}: of {sum(counts.values())} runs it took {taken}.")
    return sentences


def _partial(summary: Mapping[str, Any], metrics: Sequence[Metric]) -> str:
    """Say over how few sites a macro mean is in some fold, where a metric is undefined."""
    unit, n = task_of(summary).levels[0], len(summary["sites"])
    titles: dict[int, list[str]] = {}
    for metric in metrics:
        cells = (scopes[MACRO][unit][metric.name] for scopes in summary["scores"].values())
        titles.setdefault(min(cell.get("n_sites", n) for cell in cells), []).append(metric.title)
    return "".join(
        f" {sentence(', '.join(of))}: over as few as {fewest} of {n} sites in a fold, where it is "
        "defined."
        for fewest, of in titles.items()
        if fewest < n
    )


def _table(
    summary: Mapping[str, Any],
    title: str,
    caption: str,
    right: Sequence[str],
    left: Sequence[str] = ("method",),
    *,
    keep: bool = False,
) -> Table:
    synthetic = summary["synthetic"]
    return new_table(title, caption, synthetic=synthetic, left=left, right=right, keep=keep)


def _title(summary: Mapping[str, Any], name: str) -> str:
    facts = summary["methods"][name]
    return str(facts["title"]) + (_POOLED_MARK if facts["needs_pooled_data"] else "")


def _pooled_note(summary: Mapping[str, Any]) -> str:
    pooled = any(facts["needs_pooled_data"] for facts in summary["methods"].values())
    return _POOLED if pooled else ""


def _seeds(summary: Mapping[str, Any]) -> str:
    return f"{summary['n_seeds']} seed{'' if summary['n_seeds'] == 1 else 's'}"


def _rounds(value: float | None) -> str:
    return "never" if value is None else f"{value:g}"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
