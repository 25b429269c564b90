"""The parts that a comparison's page and a run's page share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from fedbn.report import edges, figures, site_models
from fedbn.report.held_out import HeldOut, Scored, mean_roc
from fedbn.report.html import Page, Picture
from fedbn.report.site_models import SiteModels
from fedbn.report.tables import LOOK, SYNTHETIC
from fedbn.tasks.data import SiteData

MATRICES_UP_TO = 3
"""Batch-norm layers that get a heat map each; of more, all are rows of one."""

MIN_FOR_CALIBRATION = 30
"""Fewer held-out subjects than this say nothing about ten bins of scores."""

NEEDS_DATA = "give the folder of the site stores with --data to see it."
ABOUT_SCORES = (
    "The curves, counts and clouds of points on this page are made of the scores and connectomes "
    "of subjects, without ids. A small site's curve can be read back to its scores: the page "
    "belongs where the data are, and goes no further than its makers decide."
)


def ranking_pictures(
    page: Page, scored: Scored, auc: Mapping[str, Mapping[str, float | None]], over: str
) -> None:
    """Show for each site how a method ranks, where it decides, and what its scores are worth.

    Parameters
    ----------
    page
        To add to.
    scored
        Held-out subjects by method and site.
    auc
        Method and site to the AUC of its legend.
    over
        What counts and curves are means over, for the captions.
    """
    sites = list(next(iter(scored.values())))
    synthetic = page.synthetic
    page.heading("Where each method decides")
    page.text(
        "Each curve says how a method ranks a site's held-out subjects; the mark on it is where "
        "the method decides. Two methods with one curve and two marks differ in their operating "
        "point alone. Over several seeds curve and mark are means, and a mark can lie off its "
        "curve. The bars of the next picture are the sites' true shares of patients: a "
        "method that knows its site's share lies near them."
    )
    called = figures.shares_called(scored, synthetic=synthetic)
    pictures = [
        Picture("shares_called", called, "Share of subjects that each method calls patients.", over)
    ]
    without = []
    for site in sites:
        of_site = _at(scored, site)
        if any(mean_roc(repetitions) is None for repetitions in of_site.values()):
            without.append(site)
            continue
        values = {name: auc.get(name, {}).get(site) for name in scored}
        curve = figures.roc(site, of_site, values, synthetic=synthetic)
        pictures.append(Picture(f"roc_{site}", curve, f"ROC curves at site {site}.", over))
    page.show(pictures)
    if without:
        page.absent(
            f"No ROC at {', '.join(without)}: the held-out subjects there are of one class."
        )
    page.heading("Confusion matrices")
    page.text("Subjects, and their share of all patients (or controls) of the site.")
    page.show(
        [
            Picture(
                f"confusion_{site}",
                figures.confusions(site, _at(scored, site), synthetic=synthetic),
                f"Confusion matrices at site {site}.",
                over,
            )
            for site in sites
        ]
    )
    page.heading("Calibration")
    page.text(
        "Scores in ten equal bins: their mean against the share of patients among these subjects, "
        "the mark the larger the more of them. On the diagonal a score is a probability; above it "
        "patients are missed, below it controls are called patients. Bins of fewer than five "
        "scores are left out."
    )
    enough = [site for site in sites if _n_subjects(scored, site) >= MIN_FOR_CALIBRATION]
    page.show(
        [
            Picture(
                f"calibration_{site}",
                figures.calibration(site, _at(scored, site), synthetic=synthetic),
                f"Calibration curves at site {site}.",
                over,
            )
            for site in enough
        ]
    )
    if len(enough) < len(sites):
        few = ", ".join(site for site in sites if site not in enough)
        page.absent(f"Not drawn: {few}, with fewer than {MIN_FOR_CALIBRATION} held-out subjects.")


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


def site_differences(
    page: Page, models: SiteModels | None, stores: Mapping[str, SiteData] | None, why_not: str
) -> None:
    """Add the section on how different the sites are."""
    page.section("How different the sites are")
    if models is None:
        page.absent(why_not)
        return
    _batch_norm_distances(page, models)
    page.heading("Connectomes, before and after the first batch norm")
    if stores is None:
        page.absent(f"The embedding of connectomes is not here: {NEEDS_DATA}")
        return
    if not models.layers:
        page.absent("The embedding is not here: the network has no batch norm with statistics.")
        return
    found = site_models.embeddings(models, {name: stores[name] for name in models.by_site})
    page.text(
        "One small mark a subject (the mean of its windows) and one large mark a site, on the two "
        "first principal components of all subjects together (scikit-learn's PCA). Every site's "
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
                    list(models.by_site),
                    one.owner,
                    list(one.explained),
                    synthetic=page.synthetic,
                ),
                f"Subjects by site on two principal components: {one.title}.",
                f"{100 * one.between:.1f} % of the variance lies between sites.",
            )
            for k, one in enumerate(found)
        ]
    )


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


def telling_edges(page: Page, models: SiteModels | None, why_not: str) -> None:
    """Add the section on the edges that weigh most."""
    page.section("The edges that weigh most")
    if models is None:
        page.absent(why_not)
        return
    weights = edges.attribution(models)
    if weights is None or len(weights) != len(models.rois) * (len(models.rois) - 1) // 2:
        page.absent(
            f"Not for network {models.experiment.network.name}: its input is not the edges in "
            "order, followed by linear layers."
        )
        return
    found = edges.strongest(weights, len(models.rois))
    inside, outside = edges.located(found, models.rois)
    page.text(
        "The weight of an edge is the product of the trained weights along each path from it to "
        "the log odds of autism, with each batch norm's scale and without the ReLU, added up over "
        "the paths; the mean over the sites' networks. It is of one trained model (one fold, one "
        "seed) and says what that model looks at. It is no finding about autism."
    )
    if inside:
        page.show(edges.on_a_brain(inside, models.rois, synthetic=page.synthetic))
        which = "all" if not outside else f"{len(inside)} of the"
        page.text(
            f"Drawn are {which} {len(found)} strongest edges, between the centres of mass of the "
            "Harvard-Oxford maximum-probability labels (25 %, 1 mm). Orange: the stronger the "
            "edge, the higher the odds of autism; purple: the lower. ABIDE's files do not say "
            "which cortical ids are left and which right; it is inferred from the data."
        )
    else:
        page.absent(
            f"None of these edges is drawn on a brain: atlas {models.atlas!r} is not one whose "
            "coordinates this package has (Harvard-Oxford as in ABIDE)."
        )
    if inside and outside:
        known = edges.coordinates()
        nodes = {node for edge in outside for node in (edge.first, edge.second)}
        unknown = sorted(models.rois[node][0] for node in nodes if models.rois[node] not in known)
        what = "1 edge is" if len(outside) == 1 else f"{len(outside)} edges are"
        page.absent(
            f"{what} not drawn: for ROI {', '.join(unknown)} there are no coordinates that could "
            "be verified."
        )
    page.table(_edge_table(found, models.rois, synthetic=page.synthetic))


def _edge_table(
    found: Sequence[edges.Edge], rois: Sequence[tuple[str, str]], *, synthetic: bool
) -> Table:
    table = Table(
        **LOOK,
        title=f"{SYNTHETIC if synthetic else ''}the {len(found)} strongest edges",
        caption="Relative: 100 is the strongest. A plus speaks for autism.",
    )
    table.add_column("weight", justify="right")
    table.add_column("region")
    table.add_column("region")
    top = max((abs(edge.weight) for edge in found), default=1.0) or 1.0
    for edge in found:
        names = (f"{rois[node][1]} ({rois[node][0]})" for node in (edge.first, edge.second))
        table.add_row(f"{100 * edge.weight / top:+.0f}", *names)
    return table


def made_from(page: Page, facts: Mapping[str, Any]) -> None:
    """Add the section on what the page was made from, and what is in it of subjects."""
    page.section("How this was made")
    table = Table(
        **LOOK, title=f"{SYNTHETIC if page.synthetic else ''}settings and versions", caption=""
    )
    table.add_column("what")
    table.add_column("value")
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


def _at(scored: Scored, site: str) -> dict[str, list[HeldOut]]:
    return {name: by_site[site] for name, by_site in scored.items()}


def _n_subjects(scored: Scored, site: str) -> int:
    return min(len(by_site[site][0].targets) for by_site in scored.values())
