"""FedBN's convergence against FedAvg's on a two-layer network (Li et al., 2021, section 4).

N clients hold M samples each, n = N M in all. The network is

    f(x) = m^(-1/2) sum_k c_k relu(gamma_k v_k'x / |v_k|_S),   |v|_S = sqrt(v'S v),

with S the covariance of the client that x belongs to. FedAvg has one gamma_k, FedBN one for each
client. c is fixed; v and gamma are trained by gradient descent on half the squared residual. One
step of all clients on all of their samples, averaged, is a step of this descent.

The residual f - y moves by the evolution matrix Lambda = V + G, the parts of v and of gamma. FedBN
sets those entries of G to zero that belong to two clients. The theorem bounds the squared residual
by (1 - eta mu / 2)^t with mu the least eigenvalue of G at the start, of a network wide enough.
Interlacing says that this bound is never slower for FedBN. It says nothing of the residuals
themselves.

The paper defines G by the products relu(v'x_p) relu(v'x_q), in closed form in
:func:`arc_cosine_gram`. What gradient descent follows has the norms in it, that is
relu(v'x_p) relu(v'x_q) / (|v|_Sp |v|_Sq), and a scale smaller by about alpha^2 trace(S):
:func:`evolution_matrices` has that one.

All arrays are float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Problem:
    """Hold the samples of all clients, and what the network needs to know of each client.

    Attributes
    ----------
    samples : np.ndarray, shape (n, n_features)
    targets : np.ndarray, shape (n,)
    client : np.ndarray of int, shape (n,)
        Client of each sample, 0 to N - 1.
    covariance : np.ndarray, shape (N, n_features, n_features)
        Positive definite.
    """

    samples: np.ndarray
    targets: np.ndarray
    client: np.ndarray
    covariance: np.ndarray


@dataclass
class Network:
    """Hold the weights of the two-layer network.

    Attributes
    ----------
    v : np.ndarray, shape (width, n_features)
    gamma : np.ndarray, shape (width, 1) or (width, N)
        One column for FedAvg, one a client for FedBN.
    c : np.ndarray, shape (width,)
        Plus or minus one.
    """

    v: np.ndarray
    gamma: np.ndarray
    c: np.ndarray

    def columns(self, client: np.ndarray) -> np.ndarray:
        """Return the column of gamma that each sample uses, int, shape (n,)."""
        return client if self.gamma.shape[1] > 1 else np.zeros_like(client)


# ------------------------------------------------------------------------------ Gram matrices


def arc_cosine_gram(samples: np.ndarray, alpha: float = 1.0) -> np.ndarray:
    """Return G_pq = E[relu(v'x_p) relu(v'x_q)] for v ~ N(0, alpha^2 I) (section 4).

    The arc-cosine kernel of order one (Cho and Saul, 2009), with t the angle of two samples:
    alpha^2 |x_p| |x_q| (sin t + (pi - t) cos t) / (2 pi).

    Parameters
    ----------
    samples : np.ndarray, shape (n, n_features)
    alpha : float
        Standard deviation of the entries of v.

    Returns
    -------
    np.ndarray, shape (n, n)
        Symmetric and positive semi-definite; definite if no two samples are parallel.
    """
    norms = np.linalg.norm(samples, axis=1)
    scale = np.outer(norms, norms)
    cosine = np.clip(cosines(samples), -1.0, 1.0)
    angle = np.arccos(cosine)
    kernel = np.sin(angle) + (np.pi - angle) * cosine
    return np.asarray(alpha**2 * scale * kernel / (2 * np.pi))


def cosines(samples: np.ndarray) -> np.ndarray:
    """Return the cosine of each pair of samples, shape (n, n), with ones on the diagonal.

    Raises
    ------
    ValueError
        If a sample is zero: it has no direction.
    """
    norms = np.linalg.norm(samples, axis=1)
    if not norms.all():
        raise ValueError(
            f"sample {int(np.argmin(norms))} is zero everywhere, so that it has no direction; "
            "leave it out"
        )
    directions = samples / norms[:, None]
    cosine = directions @ directions.T
    np.fill_diagonal(cosine, 1.0)
    return np.asarray(cosine)


def monte_carlo_gram(
    samples: np.ndarray, alpha: float, n_draws: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Estimate :func:`arc_cosine_gram` from `n_draws` vectors v.

    Returns
    -------
    estimate, standard_error : np.ndarray, shape (n, n)
    """
    draws = np.random.default_rng(seed).standard_normal((n_draws, samples.shape[1])) * alpha
    active = np.maximum(draws @ samples.T, 0.0)
    mean = active.T @ active / n_draws
    square = (active**2).T @ active**2 / n_draws
    return mean, np.sqrt(np.maximum(square - mean**2, 0.0) / n_draws)


def within_clients(gram: np.ndarray, client: np.ndarray) -> np.ndarray:
    """Return G*: `gram` with zero for each pair of samples of different clients (section 4)."""
    return np.asarray(gram * (client[:, None] == client))


def least_eigenvalue(gram: np.ndarray) -> float:
    """Return the smallest eigenvalue of a symmetric matrix."""
    return float(np.linalg.eigvalsh(gram)[0])


def loss_bound(first: float, step_size: float, mu: float, n_steps: int) -> np.ndarray:
    """Return the theorem's bound of the squared residual, (1 - eta mu / 2)^t `first`.

    Returns
    -------
    np.ndarray, shape (n_steps + 1,)
    """
    return np.asarray(first * (1 - step_size * mu / 2) ** np.arange(n_steps + 1))


# ---------------------------------------------------------------------------- data and network


def synthetic_problem(
    n_clients: int, n_samples: int, n_features: int, spread: float, seed: int
) -> Problem:
    """Draw clients that differ in the covariance of their samples (in the manner of Appendix F).

    A client's covariance is exp(`spread` A), scaled to the trace of the identity, with A a random
    symmetric matrix whose eigenvalues have mean 0 and root mean square 1. Targets are plus or
    minus one at random: the theorem asks nothing of them but to be bounded.

    Parameters
    ----------
    n_clients, n_samples, n_features : int
        Samples are those of one client.
    spread : float
        How far covariances are from the identity and from each other; 0: all are the identity.
    seed : int
        Seed of everything.
    """
    rng = np.random.default_rng(seed)
    samples, covariance = [], []
    for _ in range(n_clients):
        a = rng.standard_normal((n_features, n_features))
        a += a.T
        a -= np.trace(a) / n_features * np.eye(n_features)
        values, vectors = np.linalg.eigh(a * np.sqrt(n_features) / np.linalg.norm(a))
        variances = np.exp(spread * values)
        variances *= n_features / variances.sum()
        covariance.append(vectors * variances @ vectors.T)
        draws = rng.standard_normal((n_samples, n_features))
        samples.append(draws * np.sqrt(variances) @ vectors.T)
    return Problem(
        samples=np.concatenate(samples),
        targets=rng.choice([-1.0, 1.0], n_clients * n_samples),
        client=np.repeat(np.arange(n_clients), n_samples),
        covariance=np.stack(covariance),
    )


def initial_network(
    problem: Problem, width: int, alpha: float, seed: int, *, local: bool
) -> Network:
    """Draw the theorem's start: v ~ N(0, alpha^2 I), gamma_k = |v_k| / alpha, c = +-1.

    Parameters
    ----------
    problem : Problem
        For its sizes.
    width : int
        Number m of hidden units.
    alpha : float
        The theorem asks for more than 1: then G outweighs V.
    seed : int
        The same seed gives FedAvg and FedBN the same function.
    local : bool
        Whether each client has a gamma of its own (FedBN).
    """
    rng = np.random.default_rng(seed)
    v = alpha * rng.standard_normal((width, problem.samples.shape[1]))
    gamma = np.linalg.norm(v, axis=1, keepdims=True) / alpha
    return Network(
        v=v,
        gamma=np.repeat(gamma, len(problem.covariance) if local else 1, axis=1),
        c=rng.choice([-1.0, 1.0], width),
    )


class _Pass(NamedTuple):
    """Hold what both the outputs and their derivatives are made of."""

    sv: np.ndarray  # (N, width, n_features): S_i v_k
    norm: np.ndarray  # (n, width): |v_k| in the covariance of each sample's client
    unit: np.ndarray  # (n, width): v_k'x / |v_k|_S
    gamma: np.ndarray  # (n, width): of each sample's client
    active: np.ndarray  # (n, width): derivative of the ReLU


def _forward(network: Network, problem: Problem) -> _Pass:
    sv = network.v @ problem.covariance
    norm = np.sqrt(np.einsum("nkd,kd->nk", sv, network.v))[problem.client]
    unit = problem.samples @ network.v.T / norm
    gamma = network.gamma.T[network.columns(problem.client)]
    return _Pass(sv, norm, unit, gamma, gamma * unit > 0)


def _outputs(network: Network, found: _Pass) -> np.ndarray:
    hidden = found.active * found.gamma * found.unit
    return np.asarray(hidden @ network.c / np.sqrt(len(network.c)))


def outputs(network: Network, problem: Problem) -> np.ndarray:
    """Return f at each sample, shape (n,)."""
    return _outputs(network, _forward(network, problem))


def gradients(network: Network, problem: Problem) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the gradient of half the squared residual, and the squared residual.

    Returns
    -------
    v, gamma : np.ndarray
        Shaped as in the network.
    squared_residual : float
        |f - y|^2, summed over all samples.
    """
    found = _forward(network, problem)
    residual = _outputs(network, found) - problem.targets
    pull = residual[:, None] * found.active * network.c / np.sqrt(len(network.c))
    columns = network.columns(problem.client)
    gamma = (_one_hot(columns, network.gamma.shape[1]) @ (pull * found.unit)).T
    weight = pull * found.gamma / found.norm
    along = _one_hot(problem.client, len(problem.covariance)) @ (weight * found.unit / found.norm)
    v = weight.T @ problem.samples - np.einsum("nk,nkd->kd", along, found.sv)
    return v, gamma, float(residual @ residual)


def _one_hot(index: np.ndarray, n: int) -> np.ndarray:
    return np.asarray(np.arange(n)[:, None] == index, dtype=np.float64)


def evolution_matrices(network: Network, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Return the two parts of the evolution matrix Lambda, of v and of gamma.

    Their sum is J J' with J the derivatives of the outputs by all weights, so that a small step
    takes the residual r to r - eta Lambda r.

    Returns
    -------
    v_part, gamma_part : np.ndarray, shape (n, n)
        At the start the second is G of FedAvg, G* of FedBN, with the norms that the paper's
        definition leaves out.
    """
    found = _forward(network, problem)
    width = len(network.c)
    unit = found.active * found.unit
    gamma_part = within_clients(unit @ unit.T / width, network.columns(problem.client))
    slope = found.active * found.gamma / found.norm
    across = (
        problem.samples[:, None, :]
        - (found.unit / found.norm)[:, :, None] * (found.sv[problem.client])
    )
    rows = (slope[:, :, None] * across).reshape(len(slope), -1)
    return rows @ rows.T / width, gamma_part


def train(network: Network, problem: Problem, step_size: float, n_steps: int) -> np.ndarray:
    """Train v and gamma in place by full-batch gradient descent.

    Returns
    -------
    np.ndarray, shape (n_steps + 1,)
        The squared residual |f - y|^2 at the start and after each step.

    Raises
    ------
    FloatingPointError
        If it grows beyond all bounds.
    """
    losses = np.empty(n_steps + 1)
    for t in range(n_steps + 1):
        v, gamma, losses[t] = gradients(network, problem)
        if not np.isfinite(losses[t]):
            raise FloatingPointError(
                f"the residual is not finite after {t} steps; lower the step size {step_size:g}"
            )
        if t < n_steps:
            network.v -= step_size * v
            network.gamma -= step_size * gamma
    return losses
