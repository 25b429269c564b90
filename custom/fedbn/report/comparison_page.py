"""The page of a finished comparison: scores, differences, and what they are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbn.federation.results import AFTER_TRAINING
from fedbn.federation.simulation import Federation, federate, read_sites
from fedbn.federation.site import TEST
from fedbn.report import comparison_tables, figures, parts, site_models
from fedbn.report.html import Page, Picture
from fedbn.report.panels.base import Panels
from fedbn.report.panels.classification import bar
from fedbn.report.panels.registry import panels_of
from fedbn.report.tables import shown_metrics
from fedbn.study.comparison import ComparisonError, read_comparison
from fedbn.study.methods import method
from fedbn.study.over_sites import LOCAL_ONLY, MIN_SITES, fitted_line, gains, training_units
from fedbn.study.plan import Plan, Run
from fedbn.study.records import FORMAT
from fedbn.study.runners import run_federated
from fedbn.study.summary import MACRO, held_out
from fedbn.tasks.data import SiteData

N_DRAWN = len(figures.COLOURS)
N_GAINS = 2
_DRAWN_FIRST = ("fedbn", "fedavg", "singleset", "pooled", "fedavg_threshold", "fedavg_adabn")


def comparison_page(folder: Path, data_root: Path | None, on_step: Callable[[str], None]) -> Page:
    """Build the page of a comparison.

    Parameters
    ----------
    folder
        Of a finished ``fedbn compare``.
    data_root
        Folder of its sites' data, for what needs a model or a sample: seed 0, fold 0 is then run
        once more in this process. Without it these parts say that they are not there.
    on_step
        Called with what is begun.

    Raises
    ------
    fedbn.study.plan.ComparisonError
        If the comparison is not finished, or `data_root` holds other data.
    """
    summary, plan, records = read_comparison(folder)
    data = None if data_root is None else _same_data(data_root, plan, summary)
    names = drawn(summary)
    panels = panels_of(plan.task)
    page = Page(_title(summary), synthetic=summary["synthetic"])
    _findings(page, summary, panels)
    _scores(page, summary)
    _differences(page, summary, plan)
    _over_sites(page, summary, plan)
    on_step("drawing the held-out subjects")
    _every_metric(page, summary, plan, records, names, panels)
    runs = {} if data is None else _run_again(plan, data, on_step)
    _convergence(page, summary, runs, names)
    models = None
    why_not = f"This is computed from trained models: {parts.NEEDS_DATA}"
    if runs:
        name, federation = next(iter(runs.items()))
        experiment = plan.experiment_of(Run(name, 0, 0))
        models = site_models.from_federation(federation, experiment, summary["sites"])
    elif data is not None:
        why_not = "None of these methods is a federation whose sites keep a model to look into."
    parts.sites_inside(page, models, data, why_not, on_step)
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


# ------------------------------------------------------------------------------------- sections


def _findings(page: Page, summary: Mapping[str, Any], panels: Panels) -> None:
    page.section("What it shows")
    sentences = comparison_tables.difference_sentences(summary)
    if sentences:
        metric, unit = panels.task.metrics[0], panels.task.levels[0]
        by = f"{metric.title} by held-out {unit}, every site counting the same:"
        page.text(by[:1].upper() + by[1:], lead=True)
        page.points(sentences)
    else:
        page.text("One method alone: there is no difference to show.", lead=True)
    page.points(panels.findings(summary))


def _scores(page: Page, summary: Mapping[str, Any]) -> None:
    page.section("Scores at each site")
    unit, *parts_of_unit = comparison_tables.levels(summary)
    page.table(comparison_tables.scores_table(summary, unit))
    for level in parts_of_unit:
        page.table(comparison_tables.scores_table(summary, level), folded=f"the same by {level}")
    if summary.get(AFTER_TRAINING):
        page.table(
            comparison_tables.after_training_table(summary),
            folded="before and after the local training of the last round",
        )


def _differences(page: Page, summary: Mapping[str, Any], plan: Plan) -> None:
    page.section("Paired differences")
    if not summary["differences"]:
        page.absent("There is one method, and nothing to subtract it from.")
        return
    reference = summary["methods"][summary["reference"]]["title"]
    percent = f"{summary['confidence']:.0%}"
    unit, metric = plan.task.levels[0], plan.task.metrics[0]
    page.text(
        f"Each method minus {reference} in the same folds of the same seeds, with {percent} "
        f"intervals that allow for folds sharing training {unit}s (Nadeau and Bengio 2003). A "
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
                        bar(_title_of(summary, name), scopes[scope][unit][metric.name], metric)
                        for name, scopes in summary["differences"].items()
                    ],
                    f"{metric.title} minus {reference}'s" + (", points" * metric.in_percent),
                    synthetic=page.synthetic,
                ),
                f"Differences in {metric.title} with {percent} intervals, {scope}.",
            )
            for scope in (MACRO, *summary["sites"])
        ]
    )
    page.table(comparison_tables.difference_table(summary))


def _over_sites(page: Page, summary: Mapping[str, Any], plan: Plan) -> None:
    """Show what another site would gain, and how that goes with its size."""
    page.section("With the site as the unit")
    tables = comparison_tables.over_sites_tables(summary)
    if not tables:
        page.absent(
            f"An interval over sites needs {MIN_SITES} sites and two methods, and a comparison "
            "that was finished by this version."
        )
        return
    page.text(
        "The intervals above are for these sites' mean, were their subjects drawn again; these are "
        "for the mean over sites of which these are a sample. They hold for sites that are scored "
        "with models trained at all of them."
    )
    for table in tables:
        page.table(table)
    metrics = shown_metrics(plan.task)
    n_train = training_units(summary)
    panels = {}
    for metric in metrics:
        of_methods = gains(summary, metric.name)
        wanted = ("fedbn", summary["reference"], *of_methods)
        factor = 100 if metric.in_percent else 1
        panels[metric.title + ", points" * metric.in_percent] = [
            figures.Gains(
                _title_of(summary, name),
                n_train,
                factor * of_methods[name],
                fitted_line(n_train, factor * of_methods[name]),
                k,
            )
            for k, name in enumerate(n for n in dict.fromkeys(wanted) if n in of_methods)
            if k < N_GAINS
        ]
    if not all(panels.values()):
        page.absent(f"Gains by size are over {LOCAL_ONLY}, which is not among the methods.")
        return
    unit = plan.task.levels[0]
    png = figures.gain_by_size(panels, f"training {unit}s of the site", synthetic=page.synthetic)
    page.text(
        "One point a site and method: what it gained over training alone, mean over folds and "
        f"seeds, against its training {unit}s. The line is a least-squares fit over their "
        f"logarithm, the band its {summary['confidence']:.0%} interval. Sites share models, so "
        "the points are not independent, and what else goes with size is not taken out."
    )
    page.show([Picture("gain_by_size", png, "Each site's gain over training alone by its size.")])


def _every_metric(
    page: Page,
    summary: Mapping[str, Any],
    plan: Plan,
    records: Mapping[Run, Mapping[str, Any]],
    names: Sequence[str],
    panels: Panels,
) -> None:
    page.section("Every metric")
    page.table(comparison_tables.metrics_table(summary))
    panels.comparison(page, summary, names)
    if len(names) < len(summary["methods"]):
        left_out = [_title_of(summary, n) for n in summary["methods"] if n not in names]
        page.absent(
            f"The pictures below have room for {N_DRAWN} methods; only the tables have "
            f"{', '.join(left_out)}."
        )
    shown = {
        _title_of(summary, name): {
            site: {
                metric: cell["mean"]
                for metric, cell in summary["scores"][name][site][plan.task.levels[0]].items()
            }
            for site in summary["sites"]
        }
        for name in names
    }
    over = "Each subject held out once a seed"
    over += "." if summary["n_seeds"] == 1 else f"; mean over {summary['n_seeds']} seeds."
    scored = {_title_of(summary, name): held_out(plan, records, name) for name in names}
    panels.held_out(page, scored, shown, over)


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
    page.text(
        "Seed 0, fold 0, run once more: the site's held-out subjects scored with the round's "
        "received weights and the site's own entries, and again after its local epochs."
    )
    panels: dict[str, dict[str, list[figures.Curve]]] = {site: {} for site in summary["sites"]}
    for name, federation in runs.items():
        colour = names.index(name) if name in names else N_DRAWN - 1
        for site, of_metrics in panels.items():
            follow = federation.sites[site].task.follow
            followed = {
                number: {when: follow(found[TEST]) for when, found in of_round.items()}
                for number, of_round in federation.scores[site].items()
            }
            task, title = federation.sites[site].task, method(name).title
            for label, curve in parts.followed_curves(task, followed, title, colour).items():
                of_metrics.setdefault(label, []).append(curve)
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
        "Loss of the sites' training samples in the last local epoch of each round, measured while "
        "the weights change; the mean over sites and folds. The line is the mean over seeds, the "
        "band goes from the lowest to the highest seed. The grey line is the loss looked for: "
        f"{comparison_tables.loss_rule(summary)}. The marks stand at the median of the rounds "
        "after which runs have come to it. FedBN can have a lower training loss for a reason of "
        "no use to held-out subjects: more of its weights are a site's own."
    )
    losses = [
        figures.Losses(
            _title_of(summary, name),
            np.array(found["methods"][name]["loss"]),
            math.nan if (median := found["methods"][name]["median"]) is None else median,
            names.index(name),
        )
        for name in names
        if name in found["methods"]
    ]
    if losses:
        png = figures.training_loss(
            losses, found["target"], "loss looked for", synthetic=page.synthetic
        )
        page.show([Picture("training_loss", png, "Training loss of each method over the rounds.")])
    page.table(comparison_tables.convergence_table(summary))


# ----------------------------------------------------------------------------- one run once more


def _same_data(data_root: Path, plan: Plan, summary: Mapping[str, Any]) -> dict[str, SiteData]:
    if summary["format"] != FORMAT:
        raise ComparisonError(
            "this comparison was made by version 0.1, which did not keep what its data hold, so "
            "that it cannot be seen whether these are they; leave --data out"
        )
    data = read_sites(data_root, plan.experiment)
    for site, one in data.items():
        if one.fingerprint() != summary["stores"][site]:
            raise ComparisonError(
                f"the data of site {site!r} in {data_root} are not those of the comparison; "
                "give its folder, or none"
            )
    return data


def _run_again(
    plan: Plan, data: Mapping[str, SiteData], on_step: Callable[[str], None]
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
        runs[name] = federate(experiment, data)
    return runs


def _title(summary: Mapping[str, Any]) -> str:
    n, sites = len(summary["methods"]), summary["sites"]
    methods = "1 method" if n == 1 else f"{n} methods"
    return f"Comparison of {methods} at {', '.join(sites)}"


def _title_of(summary: Mapping[str, Any], name: str) -> str:
    return str(summary["methods"][name]["title"])
