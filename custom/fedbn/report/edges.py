"""The edges that weigh most in a trained network, by name and on a brain.

Attribution is the simplest there is for the paper's network: the weights along every path from an
edge to the log odds of autism, multiplied and added up, with each batch norm's scale
``gamma / sqrt(running_var + eps)`` and without the ReLU. Features are standardised, so that it is
the change of the log odds for one standard deviation of an edge, were every unit on.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np
import torch

from fedbn.federation.site import make_network
from fedbn.report.figures import figure_png, label_synthetic
from fedbn.report.html import Picture
from fedbn.report.site_models import SiteModels
from fedbn.tasks.connectome.network import ConnectomeMLP

COORDINATES_FILE = "harvard_oxford_mni.tsv"
N_EDGES = 20
_VIEWS = (
    ("z", "above", "From above: all of them."),
    ("l", "left", "From the left: those inside the left hemisphere."),
    ("r", "right", "From the right: those inside the right hemisphere."),
)


@dataclass(frozen=True)
class Edge:
    """An edge between two nodes, by their place in the list of ROIs, and its weight."""

    first: int
    second: int
    weight: float


def attribution(models: SiteModels) -> np.ndarray | None:
    """Return the path weight of each edge, mean over sites, (n_edges,).

    ``None`` if the network is not a :class:`ConnectomeMLP`, whose input is the edges in order and
    whose layers are linear but for the ReLU.
    """
    network, _ = make_network(models.experiment)
    if not isinstance(network, ConnectomeMLP):
        return None
    of_sites = [_path_weights(network, tensors) for tensors in models.by_site.values()]
    mean: np.ndarray = np.mean(of_sites, axis=0)
    return mean


def _path_weights(network: ConnectomeMLP, tensors: dict[str, torch.Tensor]) -> np.ndarray:
    """Multiply from the output back to the input."""
    classifier = tensors["classifier.weight"].double()
    weights = classifier[1] - classifier[0]
    for k in reversed(range(len(network.hidden))):
        norm, linear = f"hidden.{k}.norm", f"hidden.{k}.linear"
        eps = float(network.get_submodule(norm).eps)  # type: ignore[arg-type]
        scale = torch.sqrt(tensors[f"{norm}.running_var"].double() + eps)
        weights = weights * tensors[f"{norm}.weight"].double() / scale
        weights = weights @ tensors[f"{linear}.weight"].double()
    return weights.cpu().numpy()


def strongest(weights: np.ndarray, n_rois: int, n: int = N_EDGES) -> list[Edge]:
    """Return the `n` edges of the largest weight, whatever its sign, the largest first."""
    first, second = np.triu_indices(n_rois, k=1)
    order = np.argsort(-np.abs(weights), kind="stable")[:n]
    return [Edge(int(first[k]), int(second[k]), float(weights[k])) for k in order]


@functools.cache
def coordinates() -> dict[tuple[str, str], tuple[float, float, float]]:
    """Return the MNI coordinates in mm of the regions by id and name; see the head of the file."""
    text = resources.files("fedbn.report").joinpath(COORDINATES_FILE).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {
        (row["roi_id"], row["name"]): (float(row["x"]), float(row["y"]), float(row["z"]))
        for row in csv.DictReader(lines, delimiter="\t")
    }


def located(
    edges: Sequence[Edge], rois: Sequence[tuple[str, str]]
) -> tuple[list[Edge], list[Edge]]:
    """Divide edges into those with coordinates at both ends and those without."""
    known = coordinates()
    inside = [edge for edge in edges if rois[edge.first] in known and rois[edge.second] in known]
    return inside, [edge for edge in edges if edge not in inside]


def on_a_brain(
    edges: Sequence[Edge], rois: Sequence[tuple[str, str]], *, synthetic: bool
) -> list[Picture]:
    """Draw edges, all with coordinates, on a glass brain from three sides."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure
    from nilearn.plotting import plot_connectome

    nodes = sorted({node for edge in edges for node in (edge.first, edge.second)})
    place = {node: k for k, node in enumerate(nodes)}
    matrix = np.zeros((len(nodes), len(nodes)))
    for edge in edges:
        a, b = place[edge.first], place[edge.second]
        matrix[a, b] = matrix[b, a] = edge.weight
    points = np.array([coordinates()[rois[node]] for node in nodes])
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
