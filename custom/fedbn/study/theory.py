"""The experiment on the paper's convergence theorem: what it says, on toys and on real data.

Three questions, each with numbers: is the closed form right and does interlacing hold; does the
two-layer network train as the bound says, with more clients and with covariances further apart;
and what do the theorem's assumptions say of data that a federation has. The formulas are in
:mod:`fedbn.core.theory`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbn.core import theory
from fedbn.core.theory import Problem

METHODS = ("fedavg", "fedbn")
DELTA = 0.05
"""Probability with which the theorem may fail, where a width is computed from it."""
PARALLEL = 1e-6
"""Samples whose sine is below this count as parallel."""
_LEVEL = 0.01

OnStep = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What the toy is made of; the paper gives none of these for its synthetic experiment.

    Attributes
    ----------
    n_features, n_samples : int
        Size of a sample, and samples of a client.
    width : int
        Hidden units, m.
    alpha : float
        Spread of the first weights; more than 1.
    n_steps : int
        Of gradient descent.
    n_seeds : int
        Repetitions, each with data, targets and weights of its own.
    n_clients, spread : int, float
        Of all cells but those that vary them.
    clients, spreads : tuple
        The values that are tried.
    n_draws : int
        Vectors of the Monte Carlo check.
    n_problems : int
        Random problems on which interlacing is looked at.
    n_rows : int
        Samples of each client of real data.
    """

    n_features: int = 10
    n_samples: int = 8
    width: int = 500
    alpha: float = 5.0
    n_steps: int = 400
    n_seeds: int = 5
    n_clients: int = 8
    spread: float = 1.0
    clients: tuple[int, ...] = (2, 4, 8, 16, 32)
    spreads: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0)
    n_draws: int = 100_000
    n_problems: int = 300
    n_rows: int = 150


def check_closed_form(settings: Settings) -> dict[str, float]:
    """Compare the closed form of G with a Monte Carlo estimate, in its standard errors."""
    problem = theory.synthetic_problem(4, settings.n_samples, settings.n_features, 1.0, seed=0)
    exact = theory.arc_cosine_gram(problem.samples, settings.alpha)
    estimate, error = theory.monte_carlo_gram(
        problem.samples, settings.alpha, settings.n_draws, seed=1
    )
    upper = np.triu_indices(len(exact))
    return {
        "n_pairs": len(upper[0]),
        "n_draws": settings.n_draws,
        "largest_in_standard_errors": float(abs((estimate - exact) / error)[upper].max()),
        "relative_error": float(np.linalg.norm(estimate - exact) / np.linalg.norm(exact)),
    }


def check_interlacing(settings: Settings) -> dict[str, float]:
    """Compute mu and mu* of many random problems of random sizes."""
    rng = np.random.default_rng(0)
    mu, star = [], []
    for seed in range(settings.n_problems):
        n_clients, n_samples, n_features = rng.integers((2, 2, 3), (9, 9, 20))
        problem = theory.synthetic_problem(
            int(n_clients), int(n_samples), int(n_features), rng.uniform(0, 2), seed
        )
        gram = theory.arc_cosine_gram(problem.samples)
        mu.append(theory.least_eigenvalue(gram))
        star.append(theory.least_eigenvalue(theory.within_clients(gram, problem.client)))
    ratio = np.divide(star, mu)
    return {
        "n_problems": settings.n_problems,
        "n_violated": int((np.subtract(star, mu) < 0).sum()),
        "smallest_ratio": float(ratio.min()),
        "median_ratio": float(np.median(ratio)),
    }


def race(problem: Problem, settings: Settings, seed: int) -> dict[str, Any]:
    """Train both methods from the same function with the same step size, one over |Lambda|.

    Returns
    -------
    dict
        ``step_size``; of each method ``mu`` (the network's own Gram matrix at the start),
        ``mu_paper`` (as the paper defines it), ``least`` (of Lambda at the start), ``least_after``
        (after training), ``loss`` (squared residual over the first one, after each step).
    """
    networks = {
        name: theory.initial_network(
            problem, settings.width, settings.alpha, seed, local=name == "fedbn"
        )
        for name in METHODS
    }
    paper = theory.arc_cosine_gram(problem.samples, settings.alpha)
    found: dict[str, Any] = {}
    largest = 0.0
    for name, network in networks.items():
        v_part, gamma_part = theory.evolution_matrices(network, problem)
        values = np.linalg.eigvalsh(v_part + gamma_part)
        largest = max(largest, float(values[-1]))
        gram = paper if name == "fedavg" else theory.within_clients(paper, problem.client)
        found[name] = {
            "mu": theory.least_eigenvalue(gamma_part),
            "mu_paper": theory.least_eigenvalue(gram),
            "least": float(values[0]),
        }
    step_size = 1 / largest
    for name, network in networks.items():
        losses = theory.train(network, problem, step_size, settings.n_steps)
        found[name]["loss"] = (losses / losses[0]).tolist()
        found[name]["least_after"] = theory.least_eigenvalue(
            sum(theory.evolution_matrices(network, problem))  # type: ignore[arg-type]
        )
    return {"step_size": step_size, **found}


def cell(settings: Settings, n_clients: int, spread: float) -> dict[str, Any]:
    """Race both methods on `n_seeds` problems and say what came out.

    Returns
    -------
    dict
        Fit for JSON: means over seeds, counts of seeds, and the runs themselves.
    """
    runs = []
    for seed in range(settings.n_seeds):
        problem = theory.synthetic_problem(
            n_clients, settings.n_samples, settings.n_features, spread, seed
        )
        runs.append(race(problem, settings, seed))
    loss = {name: np.array([run[name]["loss"] for run in runs]) for name in METHODS}
    below = loss["fedbn"] < loss["fedavg"]
    return {
        "n_clients": n_clients,
        "spread": spread,
        "ratio_paper": _mean(run["fedbn"]["mu_paper"] / run["fedavg"]["mu_paper"] for run in runs),
        "ratio": _mean(run["fedbn"]["mu"] / run["fedavg"]["mu"] for run in runs),
        "least_ratio": _mean(run["fedbn"]["least"] / run["fedavg"]["least"] for run in runs),
        "final": {name: float(np.exp(np.log(loss[name][:, -1]).mean())) for name in METHODS},
        "steps": {name: [_steps(curve) for curve in loss[name]] for name in METHODS},
        "fedbn_below": {str(t): int(below[:, t].sum()) for t in _looked_at(settings.n_steps)},
        "below_for_good": [_for_good(row) for row in below],
        "bound_holds": {name: sum(_holds(run, name, "mu") for run in runs) for name in METHODS},
        "paper_bound_holds": {
            name: sum(_holds(run, name, "mu_paper") for run in runs) for name in METHODS
        },
        "least_stays": {
            name: sum(run[name]["least_after"] >= run[name]["mu"] / 2 for run in runs)
            for name in METHODS
        },
        "runs": runs,
    }


def _mean(values: Iterator[float]) -> float:
    return float(np.mean(list(values)))


def _looked_at(n_steps: int) -> list[int]:
    return sorted({min(t, n_steps) for t in (5, 10, 20, 50, 100, 200, n_steps)})


def _steps(curve: np.ndarray) -> int | None:
    """Return the first step at which the loss is a hundredth of the first, if there is one."""
    reached = np.flatnonzero(curve <= _LEVEL)
    return int(reached[0]) if len(reached) else None


def _for_good(below: np.ndarray) -> int | None:
    """Return the first step from which on FedBN's loss is below FedAvg's, if it ends below."""
    not_below = np.flatnonzero(~below)
    last = int(not_below[-1]) if len(not_below) else -1
    return last + 1 if last + 1 < len(below) else None


def _holds(run: Mapping[str, Any], name: str, mu: str) -> bool:
    loss = np.array(run[name]["loss"])
    bound = theory.loss_bound(1.0, run["step_size"], run[name][mu], len(loss) - 1)
    return bool((loss <= bound * (1 + 1e-9)).all())


# --------------------------------------------------------------------------------------- real data


def describe(name: str, samples: np.ndarray, client: np.ndarray) -> dict[str, Any]:
    """Say how far samples are from the theorem's assumptions.

    Parameters
    ----------
    name : str
        Of the data.
    samples : np.ndarray, shape (n, n_features)
        As the network gets them; those of zero length are left out and counted.
    client : np.ndarray of int, shape (n,)

    Returns
    -------
    dict
        Fit for JSON. ``mu`` and ``mu_star`` are shares of the mean of G's diagonal, ``log10_width``
        belongs to samples of mean square length 1, alpha 1 and constants 1; ``mean_share`` is
        |E x|^2 / E |x|^2 of the client where it is largest; angles are in degrees between lines.
    """
    length = np.linalg.norm(samples, axis=1)
    kept = length > 0
    samples, client = samples[kept].astype(np.float64), client[kept]
    samples /= np.sqrt((samples**2).sum(1).mean())
    cosine = abs(theory.cosines(samples))
    gram = theory.arc_cosine_gram(samples)
    n = len(gram)
    unit = float(np.trace(gram)) / n
    mu = theory.least_eigenvalue(gram)
    star = theory.least_eigenvalue(theory.within_clients(gram, client))
    same = client[:, None] == client
    pairs = np.triu(np.ones_like(same), 1)
    parallel = pairs & (cosine > math.sqrt(1 - PARALLEL**2))
    shares = [
        np.square(x.mean(0)).sum() / np.square(x).sum(1).mean()
        for x in (samples[client == i] for i in np.unique(client))
    ]
    return {
        "name": name,
        "n_clients": len(shares),
        "n_samples": n,
        "n_features": samples.shape[1],
        "n_zero": int((~kept).sum()),
        "n_parallel": int(parallel.sum()),
        "smallest_angle_within": _angle(cosine[pairs & same]),
        "smallest_angle_between": _angle(cosine[pairs & ~same]),
        "mean_share": float(max(shares)),
        "mu": mu / unit,
        "mu_star": star / unit,
        "ratio": star / mu if mu > 1e-12 * unit else None,
        "log10_width": _log10_width(n, mu) if mu > 1e-12 * unit else None,
    }


def _angle(cosine: np.ndarray) -> float | None:
    return float(np.degrees(np.arccos(min(1.0, cosine.max())))) if cosine.size else None


def _log10_width(n: int, mu: float) -> float:
    """Return log10 of the theorem's width, max of n^4 log(n/d) / mu^4 and n^2 log(n/d) / mu^2."""
    logarithm = math.log10(math.log(n / DELTA))
    return logarithm + max(4 * math.log10(n / mu), 2 * math.log10(n / mu))


def standardised(samples: np.ndarray, client: np.ndarray) -> np.ndarray:
    """Return samples with mean 0 and standard deviation 1 for each feature of each client."""
    result = np.empty_like(samples, dtype=np.float64)
    for i in np.unique(client):
        rows = client == i
        centred = samples[rows] - samples[rows].mean(0)
        deviation = centred.std(0)
        result[rows] = centred / np.where(deviation > 0, deviation, 1)
    return result


def _stacked(clients: Sequence[np.ndarray], settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Return a sample of each client's rows, and the client of each row."""
    chosen = []
    for i, rows in enumerate(clients):
        order = np.random.default_rng([0, i]).permutation(len(rows))[: settings.n_rows]
        chosen.append(np.asarray(rows[np.sort(order)], dtype=np.float64))
    client = np.repeat(np.arange(len(chosen)), [len(rows) for rows in chosen])
    return np.concatenate(chosen), client


def digits(folder: Path, settings: Settings) -> dict[str, list[np.ndarray]]:
    """Read samples of the five digit domains as pixels in [-1, 1]."""
    from fedbn.tasks.images.digits import digit_rows

    return {"digits, pixels in [-1, 1]": digit_rows(folder, settings.n_rows)}


def described(
    data: Mapping[str, Sequence[np.ndarray]], settings: Settings
) -> Iterator[dict[str, Any]]:
    """Describe each kind of samples, (n, n_features) a client; the first also standardised."""
    for k, (name, clients) in enumerate(data.items()):
        samples, client = _stacked(clients, settings)
        yield describe(name, samples, client)
        if k == 0:
            name = f"{name.partition(',')[0]}, standardised"
            yield describe(name, standardised(samples, client), client)


# ------------------------------------------------------------------------------------- the whole


def study(
    settings: Settings,
    digit_folder: Path | None = None,
    own: Mapping[str, Sequence[np.ndarray]] | None = None,
    on_step: OnStep = lambda _: None,
) -> dict[str, Any]:
    """Run the whole experiment.

    Parameters
    ----------
    settings : Settings
    digit_folder : Path, optional
        Folder with one ``.npz`` a digit domain.
    own : mapping, optional
        Further samples for :func:`described`: name to one array a client.
    on_step : callable
        Told what begins.

    Returns
    -------
    dict
        Fit for JSON.
    """
    data: list[dict[str, Any]] = []
    on_step("data")
    problem = theory.synthetic_problem(
        settings.n_clients, settings.n_samples, settings.n_features, settings.spread, seed=0
    )
    data.append(describe("the toy", problem.samples, problem.client))
    if digit_folder is not None:
        data += described(digits(digit_folder, settings), settings)
    data += described(own or {}, settings)
    on_step("closed form and interlacing")
    found: dict[str, Any] = {
        "settings": asdict(settings),
        "data": data,
        "closed_form": check_closed_form(settings),
        "interlacing": check_interlacing(settings),
    }
    cells: dict[tuple[int, float], dict[str, Any]] = {}
    for n_clients, spread in [
        *((n, settings.spread) for n in settings.clients),
        *((settings.n_clients, spread) for spread in settings.spreads),
    ]:
        if (n_clients, spread) not in cells:
            on_step(f"{n_clients} clients, spread {spread:g}")
            cells[n_clients, spread] = cell(settings, n_clients, spread)
    found["clients"] = [cells[n, settings.spread] for n in settings.clients]
    found["spreads"] = [cells[settings.n_clients, spread] for spread in settings.spreads]
    return found
