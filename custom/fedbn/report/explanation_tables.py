"""The inputs that weigh most, as a table and, where the task draws them, as pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from rich.table import Table

from fedbn.report.html import Picture
from fedbn.report.panels.base import N_FEATURES
from fedbn.report.panels.registry import panels_of
from fedbn.report.tables import new_table
from fedbn.study.explanation import N_TOP, SHARED, Explanation, strongest_first, strongest_in
from fedbn.tasks.classification import ClassificationTask

WIDTH = 150


def feature_table(explanation: Explanation, n: int = N_FEATURES, n_top: int = N_TOP) -> Table:
    """One row an input, the strongest over all sites first."""
    features, sites = explanation.features, explanation.experiment.sites
    n_folds, task = explanation.experiment.n_folds, explanation.experiment.task
    assert isinstance(task, ClassificationTask)
    positive, noun = task.class_names[-1], features.noun
    mean = {scope: explanation.weights[scope].mean(axis=0) for scope in explanation.scopes}
    spread = explanation.weights[SHARED].std(axis=0, ddof=1)
    separation = explanation.separations[SHARED].mean(axis=0)
    folds = strongest_in(explanation.weights[SHARED], n_top)
    table = new_table(
        f"the {min(n, len(spread))} {noun}s that weigh most, mean over sites and {n_folds} folds",
        f"Weights in thousandths of the log odds of {positive}; plus: a larger value "
        "speaks for it. In brackets: standard deviation over folds. Top: folds in which the "
        f"{noun} is among the {n_top} strongest. Apart: what the {noun} adds to the difference of "
        "held-out subjects of both classes; below zero it misleads.",
        synthetic=explanation.synthetic,
        left=features.shown,
        right=["all sites", *sites, "top", "apart"],
    )
    shown = [features.columns.index(column) for column in features.shown]
    for k in strongest_first(mean[SHARED])[:n].tolist():
        table.add_row(
            *(features.names[k][place] for place in shown),
            f"{1000 * mean[SHARED][k]:+.1f} ({1000 * spread[k]:.1f})",
            *(f"{1000 * mean[site][k]:+.1f}" for site in sites),
            f"{folds[k]}/{n_folds}",
            "-" if np.isnan(separation[k]) else f"{1000 * separation[k]:+.1f}",
        )
    return table


def pictures(explanation: Explanation, n: int = N_FEATURES) -> Iterator[Picture]:
    """Draw each scope's strongest inputs, where the task has a picture for them."""
    panels = panels_of(explanation.experiment.task)
    for scope in explanation.scopes:
        weights = explanation.weights[scope].mean(axis=0)
        drawn = panels.draw_features(
            explanation.features, weights, n, synthetic=explanation.synthetic
        )
        for picture in drawn:
            yield replace(picture, name=f"{scope}_{picture.name}")
