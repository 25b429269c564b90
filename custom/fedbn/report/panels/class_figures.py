"""Pictures of classes: how methods rank, where they decide, and what their scores are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedbn.report.figures import COLOURS, LINES, MARKERS, Drawing, grid, handle, spot
from fedbn.report.panels.held_out import GRID, HeldOut, calibration_points, confusion, mean_roc


def roc(
    site: str,
    scored: Mapping[str, Sequence[HeldOut]],
    auc: Mapping[str, float | None],
    classes: Sequence[str],
    *,
    synthetic: bool,
) -> bytes:
    """Draw the ROC of each method at one site, and where on it the method decides.

    Raises
    ------
    ValueError
        If the site's held-out units are of one class.
    """
    drawing = Drawing(5.2, synthetic=synthetic)
    axes = drawing.axes[0, 0]
    axes.plot([0, 1], [0, 1], color="#b4bac1", linewidth=1)
    for k, (name, repetitions) in enumerate(scored.items()):
        curve = mean_roc(repetitions)
        if curve is None:
            raise ValueError(f"site {site!r}: the held-out units are of one class")
        value = auc.get(name)
        label = name if value is None else f"{name}, AUC {value:.2f}"
        axes.plot(GRID, curve, color=COLOURS[k], linestyle=LINES[k], linewidth=1.6)
        counts = confusion(repetitions)
        false, true = (row[1] / row.sum() for row in counts)
        spot(axes, false, true, k, label=label)
    called = (f"share of {name} called {classes[1]}" for name in classes)
    drawing.named(f"{site}: ROC, and where each method decides", *called)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    drawing.legend()
    return drawing.png()


def calibration(
    site: str,
    scored: Mapping[str, Sequence[HeldOut]],
    classes: Sequence[str],
    *,
    synthetic: bool,
) -> bytes:
    """Draw the share of positives against the score, in bins; the more units the larger."""
    drawing = Drawing(5.2, synthetic=synthetic)
    axes = drawing.axes[0, 0]
    axes.plot([0, 1], [0, 1], color="#b4bac1", linewidth=1)
    for k, (name, repetitions) in enumerate(scored.items()):
        points = np.array(calibration_points(repetitions)).reshape(-1, 3)
        axes.plot(points[:, 0], points[:, 1], color=COLOURS[k], linestyle=LINES[k], linewidth=1.3)
        axes.scatter(
            points[:, 0],
            points[:, 1],
            s=12 + 5 * points[:, 2],
            marker=MARKERS[k],
            color=COLOURS[k],
            alpha=0.85,
            label=name,
            zorder=3,
            clip_on=False,
        )
    drawing.named(f"{site}: are scores probabilities?", "mean score", f"share of {classes[1]}")
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    for mark in drawing.legend().legend_handles:
        mark.set_sizes([40.0])
    return drawing.png()


def confusions(
    site: str,
    scored: Mapping[str, Sequence[HeldOut]],
    classes: Sequence[str],
    *,
    synthetic: bool,
) -> bytes:
    """Draw one confusion matrix a method: units, and their share of the row."""
    columns = min(2, len(scored)) if len(classes) < 4 else 1
    rows = -(-len(scored) // columns)
    height = (0.55 + 0.6 * len(classes)) * rows + 0.5
    drawing = Drawing(height, synthetic=synthetic, rows=rows, columns=columns)
    for axes in drawing.axes.flat[len(scored) :]:
        axes.set_visible(False)
    for axes, (name, repetitions) in zip(drawing.axes.flat, scored.items(), strict=False):
        counts = confusion(repetitions)
        share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-12)
        axes.imshow(share, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        for (row, column), n in np.ndenumerate(counts):
            axes.text(
                column,
                row,
                f"{n:.0f}\n{100 * share[row, column]:.0f} %",
                ha="center",
                va="center",
                fontsize=9,
                color="white" if share[row, column] > 0.55 else "black",
            )
        places = range(len(classes))
        axes.set_xticks(places, [f"called\n{one}" for one in classes], fontsize=8.5)
        axes.set_yticks(places, classes, fontsize=8.5)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(f"{site}, {name}", fontsize=9.5, loc="left")
    return drawing.png()


def shares_called(
    scored: Mapping[str, Mapping[str, Sequence[HeldOut]]],
    classes: Sequence[str],
    *,
    synthetic: bool,
) -> bytes:
    """Draw for each site the share of positives, and the share that each method calls so."""
    sites = list(next(iter(scored.values())))
    drawing = Drawing(0.75 * len(sites) + 1.7, synthetic=synthetic)
    axes = drawing.axes[0, 0]
    for row, site in enumerate(sites):
        share = np.mean([one.targets.mean() for one in next(iter(scored.values()))[site]])
        axes.plot([share, share], [row - 0.38, row + 0.38], color="black", linewidth=3)
    spread = np.linspace(-0.26, 0.26, len(scored)) if len(scored) > 1 else np.zeros(1)
    for k, (name, by_site) in enumerate(scored.items()):
        called = [np.mean([one.called.mean() for one in by_site[site]]) for site in sites]
        rows = np.arange(len(sites)) + spread[k]
        spot(axes, called, rows, k, markersize=7, markeredgecolor=COLOURS[k], label=name)
    axes.set_yticks(range(len(sites)), sites)
    axes.set_ylim(len(sites) - 0.45, -0.55)
    axes.set_xlim(0, 1)
    grid(axes, "x")
    drawing.named(f"share called {classes[1]}")
    bar = handle(color="black", linewidth=3, label=f"are {classes[1]}")
    drawing.legend([bar, *axes.get_legend_handles_labels()[0]])
    return drawing.png()
