"""The page of a finished comparison: scores, differences, and what they are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from fedbn.federation.results import AFTER_TRAINING, BEFORE_TRAINING
from fedbn.federation.simulation import Federation, federate, read_sites
from fedbn.federation.site import TEST
from fedbn.report import comparison_tables, figures, held_out, parts, site_models
from fedbn.report.html import Page, Picture
from fedbn.report.tables import LOOK, SYNTHETIC
from fedbn.study import paired
from fedbn.study.comparison import (
    MACRO,
    ComparisonError,
    Plan,
    Run,
    read_comparison,
)
from fedbn.study.methods import method, run_federated
from fedbn.tasks.classification import AT_OWN_THRESHOLD
from fedbn.tasks.data import SiteData

N_DRAWN = len(figures.COLOURS)
_DRAWN_FIRST = ("fedbn", "fedavg", "singleset", "pooled", "fedavg_threshold", "fedavg_adabn")
_DECISIONS = (
    ("AUC x 100", "auc"),
    ("accuracy", "accuracy"),
    ("balanced accuracy", "balanced_accuracy"),
    ("accuracy, own threshold", AT_OWN_THRESHOLD),
    ("sensitivity", "sensitivity"),
    ("specificity", "specificity"),
)


def comparison_page(folder: Path, data_root: Path | None, on_step: Callable[[str], None]) -> Page:
    """Build the page of a comparison.

    Parameters
    ----------
    folder
        Of a finished ``fedbn compare``.
    data_root
        Folder of its site stores, for what needs a model or a connectome: seed 0, fold 0 is then
        run once more in this process. Without it these parts say that they are not there.
    on_step
        Called with what is begun.

    Raises
    ------
    fedbn.study.comparison.ComparisonError
        If the comparison is not finished, or `data_root` holds other data.
    """
    summary, plan, records = read_comparison(folder)
    stores = None if data_root is None else _same_stores(data_root, plan, summary)
    names = drawn(summary)
    page = Page(_title(summary), synthetic=summary["synthetic"])
    _findings(page, summary)
    _scores(page, summary)
    _differences(page, summary)
    on_step("drawing the held-out subjects")
    _ranking(page, summary, plan, records, names)
    runs = {} if stores is None else _run_again(plan, stores, on_step)
    _convergence(page, summary, runs, names)
    models = None
    why_not = f"This is computed from trained models: {parts.NEEDS_DATA}"
    if runs:
        name, federation = next(iter(runs.items()))
        models = site_models.from_federation(
            federation, plan.experiment_of(Run(name, 0, 0)), summary["sites"]
        )
    elif stores is not None:
        why_not = "None of these methods is a federation whose sites keep a model to look into."
    on_step("drawing how the sites differ")
    parts.site_differences(page, models, stores, why_not)
    parts.telling_edges(page, models, why_not)
    parts.made_from(
        page,
        {
            **parts.settings_facts(plan.experiment.model_dump(), summary["versions"]),
            "methods": ", ".join(summary["methods"]),
            "seeds": f"0 to {summary['n_seeds'] - 1}" if summary["n_seeds"] > 1 else "0",
        },
    )
    return page


def drawn(summary: Mapping[str, Any]) -> list[str]:
    """Choose the methods of the pictures that have room for few, in the order of the tables."""
    wanted = (summary["reference"], *_DRAWN_FIRST, *summary["methods"])
    chosen = [name for name in dict.fromkeys(wanted) if name in summary["methods"]][:N_DRAWN]
    return [name for name in summary["methods"] if name in chosen]


def operating_point_sentences(summary: Mapping[str, Any]) -> list[str]:
    """Say how much of FedBN's difference to the reference is its operating point.

    Empty where FedBN is not compared. Nothing is called a difference whose interval holds zero.
    """
    if "fedbn" not in summary["differences"]:
        return []
    reference = summary["methods"][summary["reference"]]["title"]
    found = summary["differences"]["fedbn"][MACRO]["subject"]
    accuracy, auc, own = (found[name] for name in ("accuracy", "auc", AT_OWN_THRESHOLD))
    if None in (accuracy["mean"], auc["mean"], own["mean"]):
        return []
    sentences = [
        f"FedBN and {reference}, macro mean by held-out subject: AUC x 100 {_said(auc)}; "
        f"accuracy {_said(accuracy)}; balanced accuracy {_said(found['balanced_accuracy'])}; "
        f"accuracy at a threshold that each site chose on its training subjects {_said(own)}."
    ]
    gain, left = 100 * accuracy["mean"], 100 * own["mean"]
    ranks_alike = auc["verdict"] not in (paired.HIGHER, paired.LOWER)
    if gain > 0 and left < gain / 2 and ranks_alike:
        is_shown = accuracy["verdict"] == paired.HIGHER
        sentences.append(
            f"FedBN's mean accuracy is {gain:.1f} points above {reference}'s; where both decide by "
            f"a threshold of each site's own, the difference is {left:+.1f}. No difference in "
            "ranking (AUC) is shown. "
            + (
                "So what FedBN gains is mostly its operating point: where it decides, not how it "
                "ranks."
                if is_shown
                else "That there is a gain is not shown either; what the means have of one goes "
                "with the operating point: where FedBN decides, not how it ranks."
            )
        )
    elif gain > 0:
        sentences.append(
            f"FedBN's mean accuracy is {gain:.1f} points above {reference}'s, and {left:+.1f} "
            "where both decide by a threshold of each site's own: the operating point alone does "
            "not account for it."
        )
    return sentences


# ------------------------------------------------------------------------------------- sections


def _findings(page: Page, summary: Mapping[str, Any]) -> None:
    page.section("What it shows")
    sentences = comparison_tables.difference_sentences(summary)
    if sentences:
        page.text("Accuracy by held-out subject, every site counting the same:", lead=True)
        page.points(sentences)
    else:
        page.text("One method alone: there is no difference to show.", lead=True)
    page.points(operating_point_sentences(summary))


def _scores(page: Page, summary: Mapping[str, Any]) -> None:
    page.section("Scores at each site")
    page.table(comparison_tables.accuracy_table(summary, "subject"))
    if summary["n_windows"] != summary["n_subjects"]:
        page.table(comparison_tables.accuracy_table(summary, "window"), folded="the same by window")
    if summary.get(AFTER_TRAINING):
        page.table(
            comparison_tables.after_training_table(summary),
            folded="before and after the local training of the last round",
        )


def _differences(page: Page, summary: Mapping[str, Any]) -> None:
    page.section("Paired differences")
    if not summary["differences"]:
        page.absent("There is one method, and nothing to subtract it from.")
        return
    reference = summary["methods"][summary["reference"]]["title"]
    percent = f"{summary['confidence']:.0%}"
    page.text(
        f"Each method minus {reference} in the same folds of the same seeds, with {percent} "
        "intervals that allow for folds sharing training subjects (Nadeau and Bengio 2003). A "
        "difference is in colour only where its interval leaves zero out; what is hollow and "
        "grey is not shown to be a difference, whatever its mean."
    )
    page.show(
        [
            Picture(
                f"differences_{scope}",
                figures.forest(
                    "all sites, each counting the same" if scope == MACRO else scope,
                    [
                        _bar(_title_of(summary, name), scopes[scope]["subject"]["accuracy"])
                        for name, scopes in summary["differences"].items()
                    ],
                    f"accuracy minus {reference}'s, points",
                    synthetic=page.synthetic,
                ),
                f"Differences in accuracy with {percent} intervals, {scope}.",
            )
            for scope in (MACRO, *summary["sites"])
        ]
    )
    page.table(comparison_tables.difference_table(summary))


def _ranking(
    page: Page,
    summary: Mapping[str, Any],
    plan: Plan,
    records: Mapping[Run, Mapping[str, Any]],
    names: Sequence[str],
) -> None:
    page.section("Ranking and operating point")
    page.text(
        "A method can gain accuracy in two ways: it ranks subjects better (AUC), or it decides at "
        "a better place (threshold). A site with more patients than controls is served by a lower "
        "one; a batch norm of the site's own can learn that share, and so can a threshold that is "
        "chosen on the site's training subjects."
    )
    page.table(comparison_tables.operating_point_table(summary))
    others = [name for name in names if name in summary["differences"]]
    if others:
        reference = summary["methods"][summary["reference"]]["title"]
        page.text(
            "The same paired differences for each metric. Where accuracy lies to the right, AUC at "
            "zero, and accuracy at the site's own threshold at zero too, the gain is the operating "
            "point."
        )
        page.show(
            [
                Picture(
                    f"decision_{name}",
                    figures.forest(
                        f"{_title_of(summary, name)} minus {reference}",
                        [
                            _bar(label, summary["differences"][name][MACRO]["subject"][metric])
                            for label, metric in _DECISIONS
                        ],
                        "macro mean by subject, points",
                        synthetic=page.synthetic,
                    ),
                    f"Differences of {_title_of(summary, name)} in ranking and decision.",
                )
                for name in others
            ]
        )
    page.table(brier_table(summary))
    if len(names) < len(summary["methods"]):
        left_out = [_title_of(summary, n) for n in summary["methods"] if n not in names]
        page.absent(
            f"The pictures below have room for {N_DRAWN} methods; only the tables have "
            f"{', '.join(left_out)}."
        )
    scored = held_out.of_comparison(plan, records, names)
    auc = {
        _title_of(summary, name): {
            site: summary["scores"][name][site]["subject"]["auc"]["mean"]
            for site in summary["sites"]
        }
        for name in names
    }
    over = "Each subject held out once a seed"
    over += "." if summary["n_seeds"] == 1 else f"; mean over {summary['n_seeds']} seeds."
    parts.ranking_pictures(page, scored, auc, over)
    page.text(
        "The AUC beside a curve is that of the tables, a mean over folds; the curve joins the "
        "folds of a seed."
    )


def brier_table(summary: Mapping[str, Any]) -> Table:
    """One row a method, one column a site: the Brier score and its spread over seeds."""
    scopes = (*summary["sites"], MACRO)
    table = Table(
        **LOOK,
        title=(
            f"{SYNTHETIC if summary['synthetic'] else ''}Brier score by held-out subject, mean "
            "over folds and seeds (standard deviation over seeds)"
        ),
        caption="Mean squared distance of score and class: 0 is best, a constant 0.5 has 0.25.",
    )
    table.add_column("method")
    for scope in scopes:
        table.add_column(scope, justify="right")
    for name in summary["methods"]:
        cells = [summary["scores"][name][scope]["subject"]["brier"] for scope in scopes]
        table.add_row(_title_of(summary, name), *map(_cell, cells))
    return table


def _convergence(
    page: Page,
    summary: Mapping[str, Any],
    runs: Mapping[str, Federation],
    names: Sequence[str],
) -> None:
    page.section("Convergence")
    _training_loss(page, summary, names)
    page.heading("Held-out subjects, round by round")
    if not runs:
        page.absent(
            "A comparison keeps the scores of the last round only. Those of each round are shown "
            f"for a federation that is run once more (seed 0, fold 0): {parts.NEEDS_DATA}"
        )
        return
    sites = summary["sites"]
    page.text(
        "Seed 0, fold 0, run once more: the site's held-out subjects scored with the round's "
        "received weights and the site's own entries, and again after its local epochs."
    )
    panels: dict[str, dict[str, list[figures.Curve]]] = {site: {} for site in sites}
    for name, federation in runs.items():
        for site in sites:
            for metric, curve in _curves(name, names, federation, site).items():
                panels[site].setdefault(metric, []).append(curve)
    parts.convergence_pictures(page, panels, {})


def _training_loss(page: Page, summary: Mapping[str, Any], names: Sequence[str]) -> None:
    """Show how fast the training loss falls, and how many rounds it takes to a target."""
    page.heading("Training loss")
    found = summary.get("convergence")
    if not found:
        page.absent(
            "None of these methods is a federation whose comparison has kept its training loss."
        )
        return
    page.text(
        "Cross entropy of the sites' training windows in the last local epoch of each round, "
        "measured while the weights change and with dropout; the mean over sites and folds. The "
        "line is the mean over seeds, the band goes from the lowest to the highest seed. The "
        "grey line is the loss looked for: "
        f"{comparison_tables.loss_rule(summary)}. The marks stand at the median of the rounds "
        "after which runs have come to it. FedBN can have a lower training loss for a reason of "
        "no use to held-out subjects: more of its weights are a site's own."
    )
    shown = [name for name in names if name in found["methods"]]
    losses = [
        figures.Losses(
            _title_of(summary, name),
            np.array(found["methods"][name]["loss"]),
            math.nan if (median := found["methods"][name]["median"]) is None else median,
            names.index(name),
        )
        for name in shown
    ]
    if losses:
        png = figures.training_loss(
            losses, found["target"], "loss looked for", synthetic=page.synthetic
        )
        page.show([Picture("training_loss", png, "Training loss of each method over the rounds.")])
    page.table(comparison_tables.convergence_table(summary))


def _curves(
    name: str, names: Sequence[str], federation: Federation, site: str
) -> dict[str, figures.Curve]:
    """Return a method's curves by metric, in its colour of the other pictures."""
    of_site = federation.scores[site]
    follow = federation.sites[site].task.follow
    before = [follow(found[BEFORE_TRAINING][TEST]) for found in of_site.values()]
    after = [follow(found[AFTER_TRAINING][TEST]) for found in of_site.values()]
    rounds = np.array(list(of_site))
    return {
        label: figures.Curve(
            method(name).title,
            rounds,
            factor * np.array([found[metric] for found in before]),
            factor * np.array([found[metric] for found in after]),
            names.index(name) if name in names else N_DRAWN - 1,
        )
        for label, metric, factor in (
            ("accuracy by subject, %", "subject_accuracy", 100),
            ("cross entropy by window", "cross_entropy", 1),
        )
    }


# ----------------------------------------------------------------------------- one run once more


def _same_stores(data_root: Path, plan: Plan, summary: Mapping[str, Any]) -> dict[str, SiteData]:
    stores = read_sites(data_root, plan.experiment)
    for site, store in stores.items():
        if store.fingerprint() != summary["stores"][site]:
            raise ComparisonError(
                f"the data of site {site!r} in {data_root} are not those of the comparison; "
                "give its folder, or none"
            )
    return stores


def _run_again(
    plan: Plan, stores: Mapping[str, SiteData], on_step: Callable[[str], None]
) -> dict[str, Federation]:
    """Run seed 0, fold 0 of the federation to look into, and of the reference beside it."""
    federated = [name for name in plan.methods if method(name).run is run_federated]
    local = [n for n in federated if method(n).changes.get("policy") in ("fedbn", "silobn")]
    first = "fedbn" if "fedbn" in local else next(iter([*local, *federated]), None)
    names = [first] if first else []
    if first and plan.reference in federated and plan.reference != first:
        names.append(plan.reference)
    runs = {}
    for name in names:
        on_step(f"running {method(name).title} once more (seed 0, fold 0)")
        experiment = plan.experiment_of(Run(name, 0, 0)).changed(test_curve=True)
        runs[name] = federate(experiment, stores)
    return runs


# ------------------------------------------------------------------------------------- wording


def _title(summary: Mapping[str, Any]) -> str:
    n, sites = len(summary["methods"]), summary["sites"]
    methods = "1 method" if n == 1 else f"{n} methods"
    return f"Comparison of {methods} at {', '.join(sites)}"


def _title_of(summary: Mapping[str, Any], name: str) -> str:
    return str(summary["methods"][name]["title"])


def _bar(label: str, found: Mapping[str, Any]) -> figures.Bar:
    mean, low, high = (
        math.nan if found[name] is None else 100 * found[name] for name in ("mean", "low", "high")
    )
    shown = found["verdict"] in (paired.HIGHER, paired.LOWER)
    return figures.Bar(label, mean, low, high, shown)


def _said(found: Mapping[str, Any]) -> str:
    """Write a difference with its interval and what that allows to say."""
    interval = comparison_tables.interval(found["low"], found["high"])
    return f"{comparison_tables.points(found['mean'])} ({interval}: {found['verdict']})"


def _cell(cell: Mapping[str, Any]) -> str:
    if cell["mean"] is None:
        return "-"
    spread = "-" if cell["sd"] is None else f"{cell['sd']:.3f}"
    return f"{cell['mean']:.3f} ({spread})"
