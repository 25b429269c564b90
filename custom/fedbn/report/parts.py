"""The parts that a comparison's page and a run's page share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedbn.federation.results import AFTER_TRAINING, BEFORE_TRAINING
from fedbn.federation.site import Site
from fedbn.report import figures, site_models
from fedbn.report.html import Page, Picture
from fedbn.report.panels.base import N_FEATURES
from fedbn.report.panels.registry import panels_of
from fedbn.report.site_models import SiteModels
from fedbn.report.tables import new_table
from fedbn.study.explanation import feature_weights, features_of, strongest_first
from fedbn.tasks.base import Task
from fedbn.tasks.bundling import class_names
from fedbn.tasks.data import SiteData

MATRICES_UP_TO = 3
"""Batch-norm layers that get a heat map each; of more, all are rows of one."""

NEEDS_DATA = "give the folder of the site stores with --data to see it."
ABOUT_SCORES = (
    "The curves, counts and clouds of points on this page are made of the scores and samples "
    "of subjects, without ids. A small site's curve can be read back to its scores: the page "
    "belongs where the data are, and goes no further than its makers decide."
)


def followed_curves(
    task: Task,
    followed: Mapping[int, Mapping[str, Mapping[str, float]]],
    name: str,
    colour: int = 0,
) -> dict[str, figures.Curve]:
    """Return the first and the last number that a task follows as curves, by what they are.

    Parameters
    ----------
    task
        The task.
    followed
        Round, and before or after training, to these numbers.
    name
        Of the method.
    colour
        Counts from 0.
    """
    rounds = np.array(sorted(followed))
    curves = {}
    for number in dict.fromkeys((task.followed[0], task.followed[-1])):
        label, factor = followed_label(task, number)
        before, after = (
            factor * np.array([followed[k].get(when, {}).get(number, math.nan) for k in rounds])
            for when in (BEFORE_TRAINING, AFTER_TRAINING)
        )
        if not (np.isnan(before).all() and np.isnan(after).all()):
            curves[label] = figures.Curve(name, rounds, before, after, colour)
    return curves


def followed_label(task: Task, number: str) -> tuple[str, int]:
    """Return what a followed number is called, and what it is multiplied by."""
    for level in task.levels:
        for metric in task.metrics:
            if number == f"{level}_{metric.name}":
                percent = ", %" if metric.in_percent else ""
                return f"{metric.title} by {level}{percent}", 100 if metric.in_percent else 1
    return number.replace("_", " "), 1


def convergence_pictures(
    page: Page,
    panels: Mapping[str, Mapping[str, Sequence[figures.Curve]]],
    level: Mapping[str, Mapping[str, float | None]],
) -> None:
    """Show each site's curves; `panels` and `level` are by site, then metric."""
    page.show(
        [
            Picture(
                f"convergence_{site}",
                figures.convergence(site, of_site, level.get(site, {}), synthetic=page.synthetic),
                f"Metrics round by round at site {site}.",
            )
            for site, of_site in panels.items()
        ]
    )


def sites_inside(
    page: Page,
    models: SiteModels | None,
    data: Mapping[str, SiteData] | None,
    why_not: str,
    on_step: Callable[[str], None],
) -> None:
    """Add the sections on how the sites' networks differ, and on what they look at.

    Parameters
    ----------
    page
        To add to.
    models
        The sites' models, or ``None``.
    data
        The sites' data, or ``None``.
    why_not
        What is said where there is no model.
    on_step
        Called with what is begun.
    """
    on_step("drawing how the sites differ")
    page.section("How different the sites are")
    if models is None:
        page.absent(why_not)
    else:
        _batch_norm_distances(page, models)
    sites = None if models is None or data is None else site_models.checked_sites(models, data)
    page.heading("Samples, before and after the first batch norm")
    if sites is None:
        page.absent(why_not if models is None else f"The embedding is not here: {NEEDS_DATA}")
    else:
        _embeddings(page, sites)
    page.section("The inputs that weigh most")
    if sites is None:
        page.absent(why_not if models is None else f"This is computed from samples: {NEEDS_DATA}")
    else:
        on_step("attributing the sites' scores to the inputs")
        _features(page, sites)


def _embeddings(page: Page, sites: Mapping[str, Site]) -> None:
    if not next(iter(sites.values())).partition.layers:
        page.absent("The embedding is not here: the network has no batch norm with statistics.")
        return
    try:
        found = site_models.embeddings(sites)
    except ValueError as error:
        page.absent(f"The embedding is not here: {error}.")
        return
    unit = next(iter(sites.values())).task.levels[0]
    page.text(
        f"One small mark a {unit} (the mean of its samples) and one large mark a site, on the two "
        f"first principal components of all {unit}s together (scikit-learn's PCA). Every site's "
        "samples went through its own network. The share below each picture is how much of the "
        "variance, over all features and not these two alone, lies between the sites' means."
    )
    page.show(
        [
            Picture(
                f"embedding_{k + 1}",
                figures.embedding(
                    one.title,
                    one.points,
                    list(sites),
                    one.owner,
                    list(one.explained),
                    synthetic=page.synthetic,
                ),
                f"{unit}s by site on two principal components: {one.title}.",
                f"{100 * one.between:.1f} % of the variance lies between sites.",
            )
            for k, one in enumerate(found)
        ]
    )


def _features(page: Page, sites: Mapping[str, Site]) -> None:
    any_site = next(iter(sites.values()))
    try:
        features = features_of(any_site)
        of_sites = [feature_weights(site).weight for site in sites.values()]
    except (ValueError, ArithmeticError) as error:
        page.absent(f"Not here: {error}.")
        return
    weights = np.mean(of_sites, axis=0)
    panels, positive = panels_of(any_site.task), class_names(any_site.task)[-1]
    page.text(
        f"The weight of a {features.noun} is its mean absolute attribution (integrated gradients, "
        f"Sundararajan et al., 2017) over the subjects, in log odds of {positive}, with the sign "
        "of the direction; the mean over the sites' networks, as `fedbn explain` has it. It is of "
        "one trained model (one fold, one seed) and says what that model looks at: it is no "
        f"finding about {positive}. How steady it is over folds, `fedbn explain` says."
    )
    page.show(panels.draw_features(features, weights, synthetic=page.synthetic))
    if about := panels.about_features(features):
        page.text(about)
    table = new_table(
        f"the {min(N_FEATURES, len(weights))} {features.noun}s that weigh most",
        f"Weight in thousandths of the log odds; a plus speaks for {positive}.",
        synthetic=page.synthetic,
        left=features.columns,
        right=["weight"],
    )
    for k in strongest_first(weights)[:N_FEATURES].tolist():
        table.add_row(*features.names[k], f"{1000 * weights[k]:+.1f}")
    page.table(table)


def _batch_norm_distances(page: Page, models: SiteModels) -> None:
    page.heading("Distance of batch-norm statistics")
    if not models.layers:
        page.absent("The network has no batch norm with statistics.")
        return
    if len(models.by_site) < 2:
        page.absent(
            f"The models of {' and '.join(models.by_site)} alone are here: in a federation each "
            "site keeps its own."
        )
        return
    local = set(models.partition.local)
    if f"{models.layers[0]}.running_mean" not in local:
        page.absent(
            f"Under policy {models.partition.policy!r} the statistics are shared: they are the "
            "same at every site."
        )
        return
    page.text(
        "Each channel of a batch-norm layer is taken as a normal distribution with the running "
        "mean and variance that the site has kept. The distance of two sites is "
        "sqrt((difference of means)² + (difference of standard deviations)²), in standard "
        "deviations of the channel, as root mean square over the layer's channels."
    )
    statistics = {layer: site_models.statistics_distance(models, layer) for layer in models.layers}
    pictures = _heat_maps(page, models, statistics, "statistics", "standard deviations")
    affine = {
        layer: site_models.affine_distance(models, layer)
        for layer in models.layers
        if f"{layer}.weight" in local
    }
    if affine:
        page.text(
            "Gamma and beta, which the sites keep too, are compared by the root mean square of "
            "their differences."
        )
        pictures += _heat_maps(page, models, affine, "gamma and beta", "root mean square")
    page.show(pictures)


def _heat_maps(
    page: Page, models: SiteModels, values: Mapping[str, np.ndarray], what: str, unit: str
) -> list[Picture]:
    """One heat map of sites by sites a layer; for a deep network one of layers by pairs."""
    sites, synthetic = list(models.by_site), page.synthetic
    file = f"distance_{what.replace(' ', '_')}"
    if len(values) <= MATRICES_UP_TO:
        return [
            Picture(
                f"{file}_{k + 1}",
                figures.distances(
                    f"{what} of {layer}", matrix, sites, sites, unit, synthetic=synthetic
                ),
                f"Distance of {what} between sites in layer {layer}.",
            )
            for k, (layer, matrix) in enumerate(values.items())
        ]
    table = np.stack([site_models.by_pair(matrix) for matrix in values.values()])
    names = site_models.pairs(models)
    png = figures.distances(
        f"{what}, layer by layer", table, list(values), names, unit, synthetic=synthetic
    )
    return [Picture(file, png, f"Distance of {what} for each layer and pair of sites.")]


def made_from(page: Page, facts: Mapping[str, Any]) -> None:
    """Add the section on what the page was made from, and what is in it of subjects."""
    page.section("How this was made")
    table = new_table("settings and versions", synthetic=page.synthetic, left=["what", "value"])
    for name, value in facts.items():
        table.add_row(name, str(value))
    page.table(table)
    page.text(ABOUT_SCORES)


def settings_facts(experiment: Mapping[str, Any], versions: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a reader needs to repeat it, by name."""
    training = experiment["training"]
    network = experiment["network"]
    return {
        "network": _arguments({"name": network["name"], **network["args"]}),
        "rounds": experiment["rounds"],
        "local epochs": training["local_epochs"],
        "batch size": training["batch_size"],
        "optimiser": f"{training['optimizer']}, learning rate {training['learning_rate']:g}, "
        f"weight decay {training['weight_decay']:g}",
        "aggregation weights": experiment["aggregation_weights"],
        **_share_fact(experiment["training_share"]),
        "task": _arguments(experiment["task"]),
        "folds": experiment["n_folds"],
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def _arguments(named: Mapping[str, Any]) -> str:
    arguments = ", ".join(f"{name}={value}" for name, value in named.items() if name != "name")
    return f"{named['name']}({arguments})"


def _share_fact(share: float | Mapping[str, float]) -> dict[str, str]:
    """Name the share of training subjects, where it is not all of them."""
    if share == 1:
        return {}
    text = (
        f"{share:g}"
        if not isinstance(share, Mapping)
        else ", ".join(f"{site} {of_site:g}" for site, of_site in share.items())
    )
    return {"share of training subjects": text}
