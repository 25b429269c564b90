"""The pictures of a report: each a small figure that can stand alone, as PNG bytes.

Colours are those of Okabe and Ito (2008), which people with any common form of colour blindness can
tell apart; what differs in colour differs in its marker or line too. matplotlib is imported where
it is used, and drawn on without pyplot, so that no window and no global state is needed.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedbn.report.tables import SYNTHETIC
from fedbn.study.over_sites import Line

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), "-.", (0, (7, 2, 1, 2)), (0, (3, 2)))
GREY = "#6b747d"
WIDTH = 4.8
"""Inches; with 9 point text it can be read at the width of a telephone."""
_DPI = 170


class Drawing:
    """One figure with its axes, saved as PNG, and labelled if the subjects are made up."""

    def __init__(
        self,
        height: float,
        *,
        synthetic: bool,
        width: float = WIDTH,
        rows: int = 1,
        columns: int = 1,
    ):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.06)
        self.figure = Figure(figsize=(width, height), layout=layout)
        FigureCanvasAgg(self.figure)
        self.axes: np.ndarray = self.figure.subplots(rows, columns, squeeze=False)
        for axes in self.axes.flat:
            axes.tick_params(labelsize=9)
            axes.spines[["top", "right"]].set_visible(False)
        if synthetic:
            label_synthetic(self.figure)

    def named(self, title: str, x: str = "", y: str = "", axes: Any = None) -> Any:
        """Name some axes (by default the first) and what they show; return them."""
        axes = self.axes[0, 0] if axes is None else axes
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel(x, fontsize=9)
        axes.set_ylabel(y, fontsize=9)
        return axes

    def legend(self, handles: Sequence[Any] | None = None, columns: int = 2) -> Any:
        """Write below the axes what is drawn; by default what has a label."""
        given = {} if handles is None else {"handles": handles}
        look: dict[str, Any] = {"fontsize": 8.5, "frameon": False, **given}
        return self.figure.legend(loc="outside lower center", ncols=columns, **look)

    def png(self) -> bytes:
        """Return the picture."""
        return figure_png(self.figure)


def grid(axes: Any, axis: Literal["both", "x"] = "both") -> None:
    """Draw a grid behind what is drawn; of rounds, at whole numbers."""
    axes.grid(axis=axis, color="#e4e8ec")
    axes.set_axisbelow(True)
    if axis == "both":
        axes.xaxis.get_major_locator().set_params(integer=True)


def spot(axes: Any, x: Any, y: Any, k: int, **more: Any) -> None:
    """Draw the mark of the k-th method, above what else is there."""
    style = {"markeredgecolor": "black", "markersize": 8, "zorder": 3, "clip_on": False, **more}
    axes.plot(x, y, MARKERS[k % len(MARKERS)], color=COLOURS[k % len(COLOURS)], **style)


def label_synthetic(figure: Any) -> None:
    """Write above a figure that its subjects are made up."""
    figure.suptitle(SYNTHETIC.strip(), fontsize=9, color="#8a4b00", fontweight="bold")


def figure_png(figure: Any) -> bytes:
    """Return a matplotlib figure as the bytes of a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()


@dataclass(frozen=True)
class Bar:
    """A difference with its interval, in points; ends are NaN where there is none."""

    label: str
    mean: float
    low: float
    high: float
    shown: bool


def forest(title: str, bars: Sequence[Bar], axis: str, *, synthetic: bool) -> bytes:
    """Draw differences with their intervals, one below the other.

    Filled and in colour where the interval leaves zero out; hollow and grey where it does not.
    """
    drawing = Drawing(0.36 * len(bars) + 1.55, synthetic=synthetic)
    axes = drawing.axes[0, 0]
    axes.axvline(0, color="black", linewidth=1)
    for place, bar in enumerate(bars):
        colour = COLOURS[0] if bar.shown else GREY
        if np.isfinite(bar.low):
            axes.plot([bar.low, bar.high], [place, place], color=colour, linewidth=2)
        face = colour if bar.shown else "white"
        if np.isfinite(bar.mean):
            axes.plot(bar.mean, place, "o", color=colour, markerfacecolor=face, markersize=6.5)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    drawing.named(title, axis)
    grid(axes, "x")
    drawing.legend(
        [
            handle(marker="o", color=COLOURS[0], label="interval leaves zero out"),
            handle(marker="o", color=GREY, markerfacecolor="white", label="no difference shown"),
        ]
    )
    return drawing.png()


@dataclass(frozen=True)
class Gains:
    """A method's gain over training alone by site, with the line that was fitted to it."""

    name: str
    n_train: np.ndarray
    gain: np.ndarray
    line: Line | None
    colour: int = 0


def gain_by_size(
    panels: Mapping[str, Sequence[Gains]], axis: str, *, synthetic: bool, width: float = WIDTH
) -> bytes:
    """Draw each site's gain over its training units, one panel a metric; see :func:`fitted_line`.

    Parameters
    ----------
    panels
        Metric, with its unit, to one entry a method.
    axis
        What the training units are called.
    synthetic
        Whether the subjects are made up.
    width
        In inches.
    """
    drawing = Drawing(2.7 * len(panels) + 0.5, synthetic=synthetic, width=width, rows=len(panels))
    for axes, (metric, methods) in zip(drawing.axes[:, 0], panels.items(), strict=True):
        axes.axhline(0, color="black", linewidth=1)
        for one in methods:
            colour = COLOURS[one.colour]
            if one.line is not None:
                axes.fill_between(
                    one.line.x, one.line.low, one.line.high, color=colour, alpha=0.15, linewidth=0
                )
                axes.plot(one.line.x, one.line.y, color=colour, linestyle=LINES[one.colour])
            axes.plot(
                one.n_train, one.gain, MARKERS[one.colour], color=colour, markersize=6, alpha=0.85
            )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylabel(f"gain in {metric}", fontsize=9)
        axes.grid(color="#e4e8ec")
        axes.set_axisbelow(True)
    drawing.axes[0, 0].set_title("gain over training alone, by site", fontsize=10, loc="left")
    drawing.axes[-1, 0].set_xlabel(axis, fontsize=9)
    handles = [
        handle(
            marker=MARKERS[one.colour],
            linestyle=LINES[one.colour],
            color=COLOURS[one.colour],
            label=one.name,
        )
        for one in next(iter(panels.values()))
    ]
    drawing.legend(handles)
    return drawing.png()


@dataclass(frozen=True)
class Curve:
    """A metric over the rounds before and after local training; `colour` counts from 0."""

    name: str
    rounds: np.ndarray
    before: np.ndarray
    after: np.ndarray
    colour: int = 0


@dataclass(frozen=True)
class Losses:
    """A method's training loss (n_seeds, n_rounds), and the median of its rounds to the target."""

    name: str
    by_seed: np.ndarray
    rounds_until: float
    colour: int = 0


def training_loss(
    losses: Sequence[Losses], target: float, target_name: str, *, synthetic: bool
) -> bytes:
    """Draw the training loss of each method over the rounds, and the loss that is looked for.

    The line is the mean over seeds, the band goes from the lowest to the highest seed, and the mark
    stands where the target is first reached (median over runs).
    """
    drawing = Drawing(4.4, synthetic=synthetic)
    axes = drawing.axes[0, 0]
    axes.axhline(target, color=GREY, linewidth=1.2)
    for one in losses:
        colour, line = COLOURS[one.colour], LINES[one.colour]
        rounds = np.arange(1, one.by_seed.shape[1] + 1)
        mean = one.by_seed.mean(axis=0)
        if len(one.by_seed) > 1:
            low, high = one.by_seed.min(axis=0), one.by_seed.max(axis=0)
            axes.fill_between(rounds, low, high, color=colour, alpha=0.18, linewidth=0)
        single = MARKERS[one.colour] if len(rounds) == 1 else None
        axes.plot(rounds, mean, color=colour, linestyle=line, linewidth=1.6, marker=single)
        if np.isfinite(one.rounds_until):
            spot(axes, one.rounds_until, target, one.colour)
    handles = [
        handle(
            color=COLOURS[one.colour],
            linestyle=LINES[one.colour],
            marker=MARKERS[one.colour],
            label=one.name,
        )
        for one in losses
    ]
    handles.append(handle(color=GREY, linewidth=1.2, label=target_name))
    drawing.named("training loss, mean over sites", "rounds", "loss")
    grid(axes)
    drawing.legend(handles)
    return drawing.png()


def convergence(
    site: str,
    panels: Mapping[str, Sequence[Curve]],
    level: Mapping[str, float | None],
    *,
    synthetic: bool,
) -> bytes:
    """Draw what a site's held-out subjects say round by round, one panel a metric.

    Parameters
    ----------
    site
        Its name.
    panels
        Metric to one curve a method.
    level
        Metric to the value of the same network trained alone, as a line across.
    synthetic
        Whether the subjects are made up.
    """
    drawing = Drawing(2.5 * len(panels) + 0.6, synthetic=synthetic, rows=len(panels))
    handles: dict[str, Any] = {}
    for axes, (metric, curves) in zip(drawing.axes[:, 0], panels.items(), strict=True):
        for curve in curves:
            prefix = f"{curve.name}, " if len(curves) > 1 else ""
            for values, line, what in (
                (curve.before, "-", "before local training"),
                (curve.after, (0, (1.5, 1.2)), "after"),
            ):
                style = {
                    "color": COLOURS[curve.colour],
                    "linestyle": line,
                    "linewidth": 1.6,
                    "marker": MARKERS[curve.colour] if len(curve.rounds) == 1 else None,
                }
                axes.plot(curve.rounds, values, **style)
                handles[prefix + what] = handle(**style, label=prefix + what)
        value = level.get(metric)
        if value is not None:
            style = {"color": GREY, "linestyle": "-.", "linewidth": 1.3}
            axes.axhline(value, **style)
            handles["local-only"] = handle(**style, label="local-only training")
        first, last = metric == next(iter(panels)), axes is drawing.axes[-1, 0]
        drawing.named(f"{site}: round by round" * first, "round" * last, metric, axes=axes)
        grid(axes)
    drawing.legend(list(handles.values()))
    return drawing.png()


def distances(
    title: str,
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    unit: str,
    *,
    synthetic: bool,
) -> bytes:
    """Draw a table of distances as a heat map, with its numbers where there is room for them."""
    height = min(14.0, max(2.4, (0.62 if len(rows) < 9 else 0.16) * len(rows) + 1.9))
    drawing = Drawing(height, synthetic=synthetic)
    axes = drawing.axes[0, 0]
    top = float(np.nanmax(values)) or 1.0
    image = axes.imshow(values, cmap="cividis", vmin=0, vmax=top, aspect="auto")
    if len(rows) < 9 and len(columns) < 9:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                colour = "white" if value < 0.55 * top else "black"
                axes.text(
                    column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=9
                )
    axes.set_xticks(range(len(columns)), columns, fontsize=8.5, rotation=30, ha="right")
    shown = range(0, len(rows), -(-len(rows) // 70))
    axes.set_yticks(list(shown), [rows[k] for k in shown], fontsize=8.5 if len(rows) < 20 else 6)
    axes.spines[:].set_visible(False)
    drawing.named(title)
    bar = drawing.figure.colorbar(image, ax=axes, fraction=0.06)
    bar.set_label(unit, fontsize=8.5)
    bar.ax.tick_params(labelsize=8.5)
    return drawing.png()


def embedding(
    title: str,
    points: np.ndarray,
    sites: Sequence[str],
    owner: np.ndarray,
    explained: Sequence[float],
    *,
    synthetic: bool,
) -> bytes:
    """Draw subjects on two principal components, coloured by site.

    Parameters
    ----------
    title
        What was embedded.
    points
        (n_subjects, 2).
    sites
        Names.
    owner
        Index into `sites` of each subject, (n_subjects,).
    explained
        Share of the variance on each component.
    synthetic
        Whether the subjects are made up.
    """
    drawing = Drawing(4.9, synthetic=synthetic)
    axes = drawing.axes[0, 0]
    for k, site in enumerate(sites):
        members = points[owner == k]
        small: dict[str, Any] = {"alpha": 0.55, "markersize": 4, "markeredgewidth": 0, "zorder": 2}
        spot(axes, members[:, 0], members[:, 1], k, linestyle="none", **small)
        x, y = members.mean(axis=0)
        spot(axes, x, y, k, markersize=12, markeredgewidth=1.4, linestyle="none", label=site)
    drawing.named(
        title,
        f"first component, {100 * explained[0]:.0f} % of the variance",
        f"second component, {100 * explained[1]:.0f} %",
    )
    drawing.legend(columns=min(4, len(sites)))
    return drawing.png()


def handle(**style: Any) -> Any:
    """Return an entry of a legend."""
    from matplotlib.lines import Line2D

    if "marker" in style and "linestyle" not in style:
        style["linestyle"] = "none"
    return Line2D([], [], **style)
