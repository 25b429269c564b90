"""Connectomes in a report: the edges that weigh most, on a brain."""

from __future__ import annotations

import csv
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np

from fedbn.report.figures import figure_png, label_synthetic
from fedbn.report.html import Picture
from fedbn.report.panels.base import N_FEATURES
from fedbn.report.panels.classification import ClassificationPanels
from fedbn.tasks.base import Features

COORDINATES_FILE = "harvard_oxford_mni.tsv"
_VIEWS = (
    ("z", "above", "From above: all of them."),
    ("l", "left", "From the left: those inside the left hemisphere."),
    ("r", "right", "From the right: those inside the right hemisphere."),
)

Roi = tuple[str, str]
"""Id and name."""


@dataclass(frozen=True)
class Edge:
    """An edge between two ROIs and its weight."""

    first: Roi
    second: Roi
    weight: float


class ConnectomePanels(ClassificationPanels):
    """Edges, drawn where both of their ROIs have coordinates."""

    def about_features(self, features: Features) -> str:
        """Say what is drawn, and what is not."""
        known, rois = coordinates(), {roi for one in features.names for roi in (one[:2], one[2:])}
        unknown = sorted(roi[0] for roi in rois if roi not in known)
        if len(unknown) == len(rois):
            return (
                "No edge is drawn on a brain: the atlas is not one whose coordinates this package "
                "has (Harvard-Oxford as in ABIDE)."
            )
        text = (
            "Edges are drawn between the centres of mass of the Harvard-Oxford maximum-probability "
            "labels (25 %, 1 mm). Orange: the stronger the edge, the higher the odds of autism; "
            "purple: the lower. ABIDE's files do not say which cortical ids are left and which "
            "right; it is inferred from the data."
        )
        if unknown:
            text += (
                f" An edge of ROI {', '.join(unknown)} is not drawn: there are no coordinates that "
                "could be verified."
            )
        return text

    def draw_features(
        self, features: Features, weights: np.ndarray, n: int = N_FEATURES, *, synthetic: bool
    ) -> list[Picture]:
        """Draw the strongest edges from three sides."""
        places = np.argsort(-np.abs(weights), kind="stable")[:n].tolist()
        names = features.names
        edges = [Edge(names[k][:2], names[k][2:], float(weights[k])) for k in places]
        inside, _ = located(edges)
        return on_a_brain(inside, synthetic=synthetic) if inside else []


@functools.cache
def coordinates() -> dict[tuple[str, str], tuple[float, float, float]]:
    """Return the MNI coordinates in mm of the regions by id and name; see the head of the file."""
    text = (
        resources.files("fedbn.report.panels")
        .joinpath(COORDINATES_FILE)
        .read_text(encoding="utf-8")
    )
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {
        (row["roi_id"], row["name"]): (float(row["x"]), float(row["y"]), float(row["z"]))
        for row in csv.DictReader(lines, delimiter="\t")
    }


def located(edges: Sequence[Edge]) -> tuple[list[Edge], list[Edge]]:
    """Divide edges into those with coordinates at both ends and those without."""
    known = coordinates()
    inside = [edge for edge in edges if edge.first in known and edge.second in known]
    return inside, [edge for edge in edges if edge not in inside]


def connectivity(edges: Sequence[Edge]) -> tuple[np.ndarray, np.ndarray]:
    """Return edges, all with coordinates, as a symmetric matrix, and its nodes' MNI coordinates."""
    nodes = sorted({node for edge in edges for node in (edge.first, edge.second)})
    matrix = np.zeros((len(nodes), len(nodes)))
    for edge in edges:
        a, b = nodes.index(edge.first), nodes.index(edge.second)
        matrix[a, b] = matrix[b, a] = edge.weight
    return matrix, np.array([coordinates()[node] for node in nodes])


def on_a_brain(edges: Sequence[Edge], *, synthetic: bool) -> list[Picture]:
    """Draw edges, all with coordinates, on a glass brain from three sides."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure
    from nilearn.plotting import plot_connectome

    matrix, points = connectivity(edges)
    top = float(np.abs(matrix).max())
    pictures = []
    for view, name, caption in _VIEWS:
        figure = Figure(figsize=(4.8, 4.2))
        plot_connectome(
            matrix,
            points,
            figure=figure,
            axes=(0.0, 0.0, 0.86, 0.9),
            display_mode=view,
            node_color="#333333",
            node_size=18,
            edge_cmap="PuOr_r",
            edge_vmin=-top,
            edge_vmax=top,
            colorbar=True,
            annotate=True,
        )
        if synthetic:
            label_synthetic(figure)
        pictures.append(
            Picture(
                name=f"edges_{name}",
                png=figure_png(figure),
                alt=f"The edges that weigh most, on a glass brain. {caption}",
                caption=caption,
            )
        )
    return pictures
