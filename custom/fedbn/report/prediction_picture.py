"""One scan's prediction as a picture: which connections spoke for it, by name and on a brain.

Attribution is by integrated gradients (see :mod:`fedbn.tasks.attribution`) against the
site's mean training subject, in log odds. The picture says how much of the whole it draws.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbn.models.bundle import Bundle
from fedbn.models.prediction import Prediction
from fedbn.models.site_model import NOTICE
from fedbn.report.figures import COLOURS, GREY, figure_png
from fedbn.report.panels.connectome import Edge, Roi, connectivity, located
from fedbn.report.tables import SYNTHETIC
from fedbn.tasks.connectome.prediction import rois_of

N_BARS = 15
FOR_AUTISM, FOR_CONTROL = COLOURS[1], COLOURS[0]
_NAME_WIDTH = 34


def prediction_picture(bundle: Bundle, prediction: Prediction) -> bytes:
    """Draw the connections that spoke most for or against autism, and return a PNG.

    Bars are drawn for all of them; on the brain are those whose regions both have coordinates, and
    without any the brain is left out.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rois, found = rois_of(bundle.trained_on), prediction.explanation
    first, second = np.triu_indices(len(rois), k=1)
    edges = [
        Edge(rois[first[k]], rois[second[k]], float(found.values[k]))
        for k in found.strongest(N_BARS)
    ]
    on_brain, _ = located(edges)
    figure = Figure(figsize=(10, 6.4) if on_brain else (7.6, 6.4))
    FigureCanvasAgg(figure)
    # Left of the axes is room for two names of regions; below is room for what the bars mean.
    bars = figure.add_axes((0.43, 0.24, 0.2, 0.58) if on_brain else (0.57, 0.24, 0.38, 0.58))
    _draw_bars(bars, edges)
    if on_brain:
        _draw_brain(figure, on_brain)
    _write_words(figure, bundle, prediction, edges)
    return figure_png(figure)


def _draw_bars(axes: Any, edges: Sequence[Edge]) -> None:
    names = [f"{_name(edge.first)} | {_name(edge.second)}" for edge in edges]
    values = [edge.weight for edge in edges]
    colours = [FOR_AUTISM if value > 0 else FOR_CONTROL for value in values]
    hatches = ["" if value > 0 else "////" for value in values]
    drawn = axes.barh(range(len(edges)), values, color=colours, height=0.72, edgecolor="white")
    for bar, hatch in zip(drawn, hatches, strict=True):
        bar.set_hatch(hatch)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set_yticks(range(len(edges)), names, fontsize=7)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=8)
    axes.locator_params(axis="x", nbins=4)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("← control      autism →\nadded log odds", fontsize=8)


def _name(roi: Roi) -> str:
    return textwrap.shorten(roi[1] or roi[0], _NAME_WIDTH, placeholder="…")


def _draw_brain(figure: Any, edges: Sequence[Edge]) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from nilearn.plotting import plot_connectome

    matrix, points = connectivity(edges)
    top = float(np.abs(matrix).max())
    plot_connectome(
        matrix,
        points,
        figure=figure,
        axes=(0.65, 0.26, 0.34, 0.54),
        display_mode="z",
        node_color="#333333",
        node_size=16,
        edge_cmap=LinearSegmentedColormap.from_list("verdict", [FOR_CONTROL, "white", FOR_AUTISM]),
        edge_vmin=-top,
        edge_vmax=top,
        annotate=True,
    )


def _write_words(
    figure: Any, bundle: Bundle, prediction: Prediction, edges: Sequence[Edge]
) -> None:
    windows, found = prediction.part_probability[:, 1], prediction.explanation
    title = f"{prediction.case.name}: probability of autism {prediction.probability[1]:.2f}"
    if len(windows) > 1:
        title += f" (its {len(windows)} windows {windows.min():.2f} to {windows.max():.2f})"
    figure.text(0.02, 0.955, title, fontsize=11, fontweight="bold")
    lines = [f"Model of site {bundle.site}, job {bundle.facts['job']}."]
    lines += [f"Warning: {sentence}." for sentence in prediction.case.warnings]
    figure.text(
        0.02,
        0.94,
        "\n".join(line for text in lines for line in textwrap.wrap(text, 125)[:2]),
        fontsize=8,
        va="top",
        color="#8a4b00" if prediction.case.warnings else "black",
    )
    drawn = sum(edge.weight for edge in edges)
    whole = found.log_odds - found.baseline_log_odds
    explanation = (
        f"What each of the {len(edges)} strongest connections adds to the log odds of autism, "
        f"against the mean training subject of {bundle.site}: integrated gradients (Sundararajan "
        f"et al., 2017), mean over windows. These add up to {drawn:+.2f}; all "
        f"{len(found.values)} connections to {whole:+.2f} (log odds "
        f"{found.log_odds:+.2f}, of the mean training subject "
        f"{found.baseline_log_odds:+.2f}). It explains this model, not the subject."
    )
    figure.text(0.02, 0.085, textwrap.fill(explanation, 150), fontsize=7.5, va="bottom")
    synthetic = f"{SYNTHETIC.strip()}. " if bundle.synthetic else ""
    figure.text(0.02, 0.03, synthetic + NOTICE, fontsize=10, fontweight="bold", color="#8a4b00")
