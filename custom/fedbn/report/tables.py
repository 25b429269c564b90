"""What each site gained, as tables for a terminal and for a text file."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from fedbn.evaluation import AFTER_TRAINING, BEFORE_TRAINING
from fedbn.results import ALONE, FEDERATED

if TYPE_CHECKING:
    from fedbn.experiment import Score

SYNTHETIC = "SYNTHETIC COHORT, no patient's data\n"
WIDTH = 80
_LOOK: dict[str, Any] = {
    "box": box.SIMPLE_HEAD,
    "pad_edge": False,
    "title_justify": "left",
    "caption_justify": "left",
}
_GAIN_CAPTION = """Accuracy in % and AUC by held-out subject.
Federated: the last shared weights with the site's own local entries.
Alone: the same network and number of updates on this site only.
Won / lost: subjects wrong alone and right federated / the reverse.
Macro: every site counts the same; weighted: by test subjects.
One fold of few subjects decides nothing.
"""


def run_tables(results: Mapping[str, Any]) -> list[Table]:
    """Build the tables of one finished run.

    Parameters
    ----------
    results
        The content of ``results.json``.
    """
    return [gain_table(results), curve_table(results)]


def gain_table(results: Mapping[str, Any]) -> Table:
    """One row a site: the federated model beside the one it could train alone."""
    experiment = results["experiment"]
    table = Table(
        **_LOOK,
        title=(
            f"{_label(results)}what each site gained\n(policy {experiment['policy']}, "
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
        **_LOOK,
        title=(
            f"{_label(results)}accuracy in % by held-out subject,\n"
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


def cross_validation_table(scores: Sequence[Score], *, synthetic: bool) -> Table:
    """One row a method: accuracy by subject at each site, then the means over sites.

    A cell is the mean over seeds and, in brackets, the standard deviation over seeds of the mean
    over folds.
    """
    sites = list(dict.fromkeys(score.site for score in scores))
    folds = len({score.fold for score in scores})
    seeds = len({score.seed for score in scores})
    table = Table(
        **_LOOK,
        title=(
            f"{SYNTHETIC if synthetic else ''}accuracy by subject in %, mean over {folds} folds "
            f"and {seeds} seeds (standard deviation over seeds)"
        ),
        caption=(
            "macro: every site counts the same; 'none' shares all floating state (FedAvg); "
            "'alone' is each site without the others"
        ),
    )
    table.add_column("method")
    for heading in (*sites, "macro, subject", "macro, window", "macro AUC, subject"):
        table.add_column(heading, justify="right")
    for method in dict.fromkeys(score.method for score in scores):
        of_method = [score for score in scores if score.method == method]
        table.add_row(
            method,
            *(
                _mean_and_spread([s for s in of_method if s.site == site], "subject", "accuracy")
                for site in sites
            ),
            _mean_and_spread(of_method, "subject", "accuracy"),
            _mean_and_spread(of_method, "window", "accuracy"),
            _mean_and_spread(of_method, "subject", "auc", scale=1, digits=3),
        )
    return table


def _mean_and_spread(
    scores: Sequence[Score], level: str, metric: str, scale: float = 100, digits: int = 1
) -> str:
    """Mean over sites and folds for each seed, then mean and spread over seeds."""
    by_seed: dict[int, list[float]] = {}
    for score in scores:
        value = score.metrics[level][metric]
        if value is not None:
            by_seed.setdefault(score.seed, []).append(scale * value)
    means = [math.fsum(values) / len(values) for values in by_seed.values()]
    if not means:
        return "-"
    spread = statistics.stdev(means) if len(means) > 1 else math.nan
    return f"{statistics.fmean(means):.{digits}f} ({spread:.{digits}f})"


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


def _label(results: Mapping[str, Any]) -> str:
    return SYNTHETIC if results.get("synthetic") else ""


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _points(before: float | None, after: float | None) -> str:
    return "-" if before is None or after is None else f"{100 * (after - before):+.1f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
