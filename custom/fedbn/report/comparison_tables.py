"""A comparison of methods as tables: scores, paired differences, and the operating point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from fedbn.federation.results import AFTER_TRAINING
from fedbn.report.tables import LOOK, SYNTHETIC, WIDTH
from fedbn.study import paired

MACRO = "macro"
_LEVEL = {"subject": "by held-out subject", "window": "by window of held-out subjects"}
_SHORT = {paired.NOT_SHOWN: "not shown", paired.SAME: "the same", paired.UNTOLD: "-"}
_POOLED_MARK = " *"
_POOLED = "\n* needs all sites' data in one place, which a federation exists to avoid."


def comparison_tables(summary: Mapping[str, Any]) -> list[Table]:
    """Build the tables of a finished comparison from the content of its ``summary.json``."""
    has_windows = summary["n_windows"] != summary["n_subjects"]
    levels = ("subject", "window") if has_windows else ("subject",)
    tables = [accuracy_table(summary, level) for level in levels]
    if summary["differences"]:
        tables.append(difference_table(summary))
    if summary.get(AFTER_TRAINING):
        tables.append(after_training_table(summary))
    if summary.get("convergence"):
        tables.append(convergence_table(summary))
    return [*tables, operating_point_table(summary)]


def width(summary: Mapping[str, Any]) -> int:
    """Return the width that the tables need without a broken line: 80, unless there is much."""
    longest = max(len(_title(summary, name)) for name in summary["methods"])
    return WIDTH + max(0, longest - 18) + 13 * max(0, len(summary["sites"]) - 4)


def accuracy_table(summary: Mapping[str, Any], level: str) -> Table:
    """One row a method, one column a site: mean accuracy and its spread over seeds."""
    sites = summary["sites"]
    table = _table(
        summary,
        f"accuracy in % {_LEVEL[level]}, mean over {summary['n_folds']} folds and "
        f"{_seeds(summary)} (standard deviation over seeds)",
        f"macro: every site counts the same.{_pooled_note(summary)}",
    )
    table.add_column("method", no_wrap=True)
    for site in sites:
        table.add_column(site, justify="right")
    table.add_column(MACRO, justify="right")
    for unit in ("subjects", "windows") if level == "window" else ("subjects",):
        counts = [summary[f"n_{unit}"][site] for site in sites]
        table.add_row(unit, *map(str, counts), str(sum(counts)))
    table.add_section()
    for name in summary["methods"]:
        scores = summary["scores"][name]
        table.add_row(
            _title(summary, name),
            *(_percent(scores[scope][level]["accuracy"]) for scope in (*sites, MACRO)),
        )
    return table


def difference_table(summary: Mapping[str, Any]) -> Table:
    """One row a method and scope: the paired difference to the reference, and what it allows."""
    reference = summary["methods"][summary["reference"]]["title"]
    n_looks = sum(len(scopes) for scopes in summary["differences"].values())
    table = _table(
        summary,
        f"difference to {reference}, accuracy in points by held-out subject, paired in each of "
        f"{summary['n_folds']} folds and {_seeds(summary)}",
        f"{summary['confidence']:.0%} intervals and p of the corrected resampled t test: folds "
        "share training subjects (Nadeau and Bengio 2003; Bouckaert and Frank 2004). A difference "
        "is called higher or lower only where its interval leaves zero out. "
        f"Of {n_looks} such intervals, about {n_looks * (1 - summary['confidence']):.1f} "
        "would leave zero out by chance alone; Holm: p adjusted for the number of methods, in the "
        f"macro mean.{_pooled_note(summary)}",
    )
    table.add_column("method", no_wrap=True)
    table.add_column("site")
    for heading in ("difference", "interval", "p", "Holm"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("so", no_wrap=True)
    for name, scopes in summary["differences"].items():
        for k, scope in enumerate((MACRO, *summary["sites"])):
            one = scopes[scope]["subject"]["accuracy"]
            table.add_row(
                _title(summary, name) if k == 0 else "",
                scope,
                points(one["mean"]),
                interval(one["low"], one["high"]),
                _plain(one["p"]),
                _plain(one["p_holm"]) if scope == MACRO else "",
                _SHORT.get(one["verdict"], one["verdict"]),
            )
        table.add_section()
    return table


def operating_point_table(summary: Mapping[str, Any]) -> Table:
    """One row a method: how well it ranks, and where it decides, as macro means by subject."""
    table = _table(
        summary,
        "ranking and operating point by held-out subject, macro mean over sites",
        "AUC does not depend on the threshold; accuracy, balanced accuracy, sensitivity and "
        "specificity (in %) do. Own: accuracy at a threshold that each site chose on its training "
        "subjects. Brier: mean squared error of the score, lower is better. Exc. (excess): "
        "distance of mean score and share of patients in %, mean over sites without its sign. "
        f"Slope: below 1 where scores are too sure.{_pooled_note(summary)}",
    )
    table.add_column("method", no_wrap=True)
    for heading in ("AUC", "acc.", "own", "bal.", "sens.", "spec.", "Brier", "exc.", "slope"):
        table.add_column(heading, justify="right")
    for name in summary["methods"]:
        scores = summary["scores"][name][MACRO]["subject"]
        calibration = list(summary["calibration"][name].values())
        slopes = [one["slope"] for one in calibration]
        table.add_row(
            _title(summary, name),
            _plain(scores["auc"]["mean"], 3),
            *(
                _plain_percent(scores[metric]["mean"])
                for metric in (
                    "accuracy",
                    "accuracy_own_threshold",
                    "balanced_accuracy",
                    "sensitivity",
                    "specificity",
                )
            ),
            _plain(scores["brier"]["mean"], 3),
            _plain_percent(sum(abs(one["excess"]) for one in calibration) / len(calibration)),
            _plain(None if None in slopes else sum(slopes) / len(slopes)),
        )
    return table


def after_training_table(summary: Mapping[str, Any]) -> Table:
    """One row a federated method: its sites' scores before and after local training."""
    table = _table(
        summary,
        "the last round by held-out subject, macro mean over sites (standard deviation over seeds)",
        "Accuracy in %. Before: the final shared weights with each site's own entries, as in the "
        "other tables. After: each site's network after its local epochs of the last round, before "
        "the last averaging.",
    )
    table.add_column("method", no_wrap=True)
    for heading in ("accuracy\nbefore", "accuracy\nafter", "AUC\nbefore", "AUC\nafter"):
        table.add_column(heading, justify="right")
    for name, scopes in summary[AFTER_TRAINING].items():
        ends = [found[MACRO]["subject"] for found in (summary["scores"][name], scopes)]
        table.add_row(
            _title(summary, name),
            *(_percent(end["accuracy"]) for end in ends),
            *(_spread(end["auc"]) for end in ends),
        )
    return table


def convergence_table(summary: Mapping[str, Any]) -> Table:
    """One row a federated method: how many rounds it takes to a training loss."""
    found = summary["convergence"]
    other = summary["methods"][found["compared_with"]]["title"]
    table = _table(
        summary,
        f"rounds until the training loss is at most {loss_rule(summary)}, of {found['rounds']}",
        "Training loss: cross entropy in the last local epoch of a round, measured while the "
        "weights change and with dropout, mean over sites. Reached: runs that come to it. "
        f"Difference to {other} in rounds, paired, where all runs of both reach it, with the "
        f"{summary['confidence']:.0%} interval of the corrected resampled t test. Last loss: at "
        "the last round (standard deviation over seeds).",
    )
    table.add_column("method", no_wrap=True)
    for heading in ("median", "range", "reached", "difference", "interval", "last loss"):
        table.add_column(heading, justify="right", no_wrap=True)
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
            _spread(one["last_loss"]),
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
    """Say for each method what its macro accuracy by subject shows, and what was chosen."""
    reference = summary["methods"][summary["reference"]]["title"]
    sentences = []
    for name, scopes in summary["differences"].items():
        one = scopes[MACRO]["subject"]["accuracy"]
        title = summary["methods"][name]["title"]
        if one["low"] is None:
            sentences.append(f"{title} and {reference}: {one['verdict']}.")
            continue
        span = f"{summary['confidence']:.0%} interval {interval(one['low'], one['high'])}"
        if one["verdict"] in (paired.HIGHER, paired.LOWER):
            sentences.append(
                f"{title} is {abs(100 * one['mean']):.1f} points {one['verdict']} than "
                f"{reference} ({span})."
            )
        else:
            sentences.append(
                f"{title} against {reference}: {paired.NOT_SHOWN} "
                f"({points(one['mean'])} points, {span} holds zero)."
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


def interval(low: float | None, high: float | None) -> str:
    """Write an interval in points."""
    return "-" if low is None or high is None else f"{points(low)} to {points(high)}"


def _table(summary: Mapping[str, Any], title: str, caption: str) -> Table:
    label = SYNTHETIC if summary["synthetic"] else ""
    return Table(**LOOK, title=label + title, caption=caption)


def _title(summary: Mapping[str, Any], name: str) -> str:
    facts = summary["methods"][name]
    return str(facts["title"]) + (_POOLED_MARK if facts["needs_pooled_data"] else "")


def _pooled_note(summary: Mapping[str, Any]) -> str:
    pooled = any(facts["needs_pooled_data"] for facts in summary["methods"].values())
    return _POOLED if pooled else ""


def _seeds(summary: Mapping[str, Any]) -> str:
    return f"{summary['n_seeds']} seed{'' if summary['n_seeds'] == 1 else 's'}"


def _percent(cell: Mapping[str, Any]) -> str:
    mean, sd = cell["mean"], cell["sd"]
    return "-" if mean is None else f"{100 * mean:.1f} ({_plain_percent(sd)})"


def _spread(cell: Mapping[str, Any]) -> str:
    return "-" if cell["mean"] is None else f"{cell['mean']:.3f} ({_plain(cell['sd'], 3)})"


def _rounds(value: float | None) -> str:
    return "never" if value is None else f"{value:g}"


def points(value: float | None) -> str:
    """Write a difference in points, with its sign; what rounds to zero has that of zero."""
    return "-" if value is None else f"{round(100 * value, 1) + 0.0:+.1f}"


def _plain(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _plain_percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
