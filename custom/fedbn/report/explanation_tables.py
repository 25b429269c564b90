"""The strongest edges of an experiment as a table, and on a brain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from rich.table import Table

from fedbn.report import edges
from fedbn.report.html import Picture
from fedbn.report.tables import LOOK, SYNTHETIC
from fedbn.study.explanation import N_TOP, SHARED, Explanation, strongest_in

N_SHOWN = edges.N_EDGES
WIDTH = 150


def edge_table(explanation: Explanation, n: int = N_SHOWN, n_top: int = N_TOP) -> Table:
    """One row an edge, the strongest over all sites first."""
    sites = explanation.experiment.sites
    n_folds = explanation.experiment.n_folds
    mean = {scope: explanation.weights[scope].mean(axis=0) for scope in explanation.scopes}
    spread = explanation.weights[SHARED].std(axis=0, ddof=1)
    separation = explanation.separations[SHARED].mean(axis=0)
    folds = strongest_in(explanation.weights[SHARED], n_top)
    table = Table(
        **LOOK,
        title=f"{SYNTHETIC if explanation.synthetic else ''}the {n} edges that weigh most, mean "
        f"over sites and {n_folds} folds",
        caption="Weights in thousandths of the log odds of autism; plus: a stronger edge speaks "
        "for it. In brackets: standard\ndeviation over folds. Top: folds in which the edge is "
        f"among the {n_top} strongest. Apart: what the edge adds to the\ndifference of held-out "
        "patients and controls; below zero it misleads.",
    )
    table.add_column("region", max_width=40)
    table.add_column("region", max_width=40)
    for heading in ("all sites", *sites, "top", "apart"):
        table.add_column(heading, justify="right", no_wrap=True)
    for edge in edges.strongest(mean[SHARED], len(explanation.rois), n):
        k = edge_index(edge.first, edge.second, len(explanation.rois))
        table.add_row(
            *(explanation.rois[node][1] for node in (edge.first, edge.second)),
            f"{1000 * edge.weight:+.1f} ({1000 * spread[k]:.1f})",
            *(f"{1000 * mean[site][k]:+.1f}" for site in sites),
            f"{folds[k]}/{n_folds}",
            "-" if np.isnan(separation[k]) else f"{1000 * separation[k]:+.1f}",
        )
    return table


def edge_index(first: int, second: int, n_rois: int) -> int:
    """Return the place of an edge in ``np.triu_indices(n_rois, k=1)`` order, ``first < second``."""
    return first * n_rois - first * (first + 1) // 2 + second - first - 1


def pictures(explanation: Explanation, n: int = N_SHOWN) -> Iterator[Picture]:
    """Draw each scope's strongest edges, where both regions have coordinates; else nothing."""
    for scope in explanation.scopes:
        found = edges.strongest(explanation.weights[scope].mean(axis=0), len(explanation.rois), n)
        inside, _ = edges.located(found, explanation.rois)
        if inside:
            for picture in edges.on_a_brain(
                inside, explanation.rois, synthetic=explanation.synthetic
            ):
                yield replace(picture, name=f"{scope}_{picture.name}")
