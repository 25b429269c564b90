"""The experiment on the convergence theorem as tables and three pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from fedbn.core.theory import loss_bound
from fedbn.report.figures import COLOURS, GREY, LINES, MARKERS, WIDTH, Drawing
from fedbn.report.tables import LOOK
from fedbn.study.theory import METHODS

TITLES = {"fedavg": "FedAvg", "fedbn": "FedBN"}
TABLE_WIDTH = 110


def theory_tables(found: Mapping[str, Any]) -> list[Table]:
    """Build the tables from the content of ``theory.json``."""
    return [
        check_table(found),
        toy_table(found["clients"], found["settings"], "number of clients", "n_clients"),
        toy_table(found["spreads"], found["settings"], "spread of covariances", "spread"),
        data_table(found),
    ]


def check_table(found: Mapping[str, Any]) -> Table:
    """Say whether the closed form and interlacing hold."""
    table = Table(**LOOK, title="formulas against sampling", show_header=False)
    closed, interlacing = found["closed_form"], found["interlacing"]
    table.add_row(
        "closed form of G against Monte Carlo",
        f"{closed['n_pairs']} entries, {closed['n_draws']:,} vectors: at most "
        f"{closed['largest_in_standard_errors']:.1f} standard errors away",
    )
    table.add_row(
        "mu* >= mu",
        f"violated in {interlacing['n_violated']} of {interlacing['n_problems']} random problems; "
        f"mu* / mu at least {interlacing['smallest_ratio']:.2f}, median "
        f"{interlacing['median_ratio']:.1f}",
    )
    return table


def toy_table(
    cells: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], what: str, key: str
) -> Table:
    """One row a cell: how the bounds and the trainings of both methods compare."""
    n = settings["n_seeds"]
    table = Table(
        **LOOK,
        title=f"two-layer network: {what} (means and counts of {n} seeds, "
        f"{settings['n_steps']} steps)",
        caption="Ratios FedBN / FedAvg at the start: of the least eigenvalue of G as the paper "
        "defines it, of G with the network's norms, and of the evolution matrix Lambda. Loss: "
        "squared residual over its start (geometric mean). Below from: first step from which "
        "FedBN's loss stays below. Bound holds: with the network's G / with the paper's.",
    )
    table.add_column(key.removeprefix("n_"), justify="right")
    for heading in (
        "mu* / mu", "the same,\nnetwork's G", "Lambda", "loss\nFedAvg", "loss\nFedBN",
        "FedBN below\nat 10 / at end", "below\nfrom", "bound holds\nFedAvg", "bound holds\nFedBN",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for cell in cells:
        below = cell["fedbn_below"]
        table.add_row(
            f"{cell[key]:g}",
            *(f"{cell[name]:.1f}" for name in ("ratio_paper", "ratio", "least_ratio")),
            *(f"{cell['final'][name]:.1e}" for name in METHODS),
            f"{below.get('10', '-')} / {below[str(settings['n_steps'])]}",
            _span(cell["below_for_good"]),
            *(f"{cell['bound_holds'][m]} / {cell['paper_bound_holds'][m]}" for m in METHODS),
        )
    return table


def _span(steps: Sequence[int | None]) -> str:
    reached = [step for step in steps if step is not None]
    if not reached:
        return "never"
    never = len(steps) - len(reached)
    return f"{min(reached)}-{max(reached)}" + (f", {never} never" if never else "")


def data_table(found: Mapping[str, Any]) -> Table:
    """One row a data set: what the theorem's assumptions say of it."""
    table = Table(
        **LOOK,
        title="the assumptions on data",
        caption="Angle: the smallest between two samples (as lines, in degrees), within a client "
        "and between clients; 0 is parallel. Mean: |E x|^2 / E |x|^2 of the client where it is "
        "largest; the theorem wants 0. mu, mu*: shares of the mean of G's diagonal. Width: what "
        "the theorem asks for with samples of mean square length 1, alpha 1 and constants 1.",
    )
    table.add_column("data")
    for heading in (
        "clients", "samples", "parallel", "angle\nwithin", "angle\nbetween", "mean", "mu", "mu*",
        "mu* / mu", "width",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for one in found["data"]:
        table.add_row(
            one["name"],
            str(one["n_clients"]),
            str(one["n_samples"]),
            str(one["n_parallel"]),
            *(_number(one[f"smallest_angle_{side}"], "{:.1f}") for side in ("within", "between")),
            f"{one['mean_share']:.2f}",
            f"{one['mu']:.1e}",
            f"{one['mu_star']:.1e}",
            _number(one["ratio"], "{:.2f}"),
            _number(one["log10_width"], "10^{:.0f}"),
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


# ---------------------------------------------------------------------------------------- pictures


def pictures(found: Mapping[str, Any]) -> dict[str, bytes]:
    """Draw the three pictures; file name to PNG."""
    return {
        "theory_loss.png": loss_picture(found),
        "theory_sweeps.png": sweep_picture(found),
        "theory_data.png": data_picture(found),
    }


def loss_picture(found: Mapping[str, Any]) -> bytes:
    """Draw the losses of all seeds at the common cell, and the bounds of the first seed."""
    settings = found["settings"]
    cell = next(c for c in found["spreads"] if c["spread"] == settings["spread"])
    drawing = Drawing(4.0, synthetic=False)
    axes = drawing.axes[0, 0]
    first = cell["runs"][0]
    for k, name in enumerate(METHODS):
        losses = np.array([run[name]["loss"] for run in cell["runs"]])
        axes.plot(losses[1:].T, color=COLOURS[k], linewidth=0.6, alpha=0.5)
        axes.plot(losses[0], color=COLOURS[k], linewidth=1.8, label=TITLES[name])
        for mu, line, whose in (
            ("mu", LINES[1], "network's G"),
            ("mu_paper", LINES[2], "paper's G"),
        ):
            bound = loss_bound(1.0, first["step_size"], first[name][mu], losses.shape[1] - 1)
            label = f"{TITLES[name]}: bound, {whose}"
            axes.plot(bound, color=COLOURS[k], linestyle=line, linewidth=1.2, label=label)
    axes.set_yscale("log")
    axes.set_ylim(bottom=float(losses.min()) / 10, top=2)
    axes.set_xlabel("steps of gradient descent", fontsize=9)
    axes.set_ylabel("squared residual over its start", fontsize=9)
    axes.set_title(
        f"{settings['n_clients']} clients, spread {settings['spread']:g}", fontsize=10, loc="left"
    )
    drawing.figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return drawing.png()


def sweep_picture(found: Mapping[str, Any]) -> bytes:
    """Draw bounds and losses against the number of clients and the spread of covariances."""
    drawing = Drawing(5.2, synthetic=False, width=1.5 * WIDTH, rows=2, columns=2)
    for column, (part, key, title) in enumerate(
        (("clients", "n_clients", "clients"), ("spreads", "spread", "spread of covariances"))
    ):
        cells = found[part]
        x = [cell[key] for cell in cells]
        above, below = drawing.axes[:, column]
        for k, (name, label) in enumerate(
            (("ratio_paper", "paper's G"), ("ratio", "network's G"), ("least_ratio", "Lambda")), 2
        ):
            y = [cell[name] for cell in cells]
            above.plot(x, y, color=COLOURS[k], marker=MARKERS[k], label=f"of {label}")
        above.axhline(1, color=GREY, linewidth=0.8)
        for k, name in enumerate(METHODS):
            y = [cell["final"][name] for cell in cells]
            below.plot(x, y, color=COLOURS[k], marker=MARKERS[k], label=f"loss: {TITLES[name]}")
        for axes in (above, below):
            axes.set_yscale("log")
            if key == "n_clients":
                axes.set_xscale("log", base=2)
                axes.set_xticks(x, [str(n) for n in x])
        below.set_xlabel(title, fontsize=9)
    drawing.axes[0, 0].set_ylabel("least eigenvalue, FedBN / FedAvg", fontsize=9)
    drawing.axes[1, 0].set_ylabel(f"loss after {found['settings']['n_steps']} steps", fontsize=9)
    handles = [h for axes in drawing.axes[:, 0] for h in axes.get_legend_handles_labels()[0]]
    drawing.figure.legend(
        handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False
    )
    return drawing.png()


def data_picture(found: Mapping[str, Any]) -> bytes:
    """Draw the least eigenvalues of G and G* of each data set."""
    data = found["data"][::-1]
    drawing = Drawing(1.4 + 0.4 * len(data), synthetic=False, width=1.3 * WIDTH)
    axes = drawing.axes[0, 0]
    for k, (name, label) in enumerate((("mu", "mu, of G"), ("mu_star", "mu*, of G*"))):
        values = [max(one[name], 1e-9) for one in data]
        axes.plot(values, range(len(data)), MARKERS[k], color=COLOURS[k], label=label)
    axes.set_xscale("log")
    axes.set_yticks(range(len(data)), [one["name"] for one in data])
    axes.set_ylim(-0.6, len(data) - 0.4)
    axes.set_xlabel("least eigenvalue, share of the mean of G's diagonal", fontsize=9)
    axes.grid(axis="x", color="#e4e8ec")
    drawing.figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return drawing.png()
