"""The formulas of section 4 against sampling, automatic differentiation and training."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from fedbn.core import theory


@pytest.fixture(scope="module")
def problem():
    return theory.synthetic_problem(n_clients=3, n_samples=5, n_features=6, spread=1.0, seed=2)


def network_of(problem, *, local, width=400, alpha=3.0):
    return theory.initial_network(problem, width, alpha, seed=7, local=local)


@pytest.mark.parametrize("alpha", [1.0, 2.5])
def test_the_closed_form_is_the_expectation(problem, alpha):
    exact = theory.arc_cosine_gram(problem.samples, alpha)
    estimate, error = theory.monte_carlo_gram(problem.samples, alpha, n_draws=40_000, seed=0)
    z = (estimate - exact) / error
    assert abs(z).max() < 4.5  # 120 pairs
    assert abs(z).max() > 0.5  # the standard error is no blank cheque
    wrong = (estimate - 1.1 * exact) / error
    assert abs(wrong).max() > 4.5


def test_the_closed_form_by_hand():
    gram = theory.arc_cosine_gram(np.array([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]]), alpha=2.0)
    # relu(z)^2 has mean 1/2; independent halves 1/(2 pi); opposite ones are never both positive.
    np.testing.assert_allclose(np.diag(gram), [8.0, 18.0, 2.0])
    np.testing.assert_allclose(gram[0, 1], 4 * 6 / (2 * np.pi))
    np.testing.assert_allclose(gram[0, 2], 0.0, atol=1e-12)


def test_a_sample_of_zeros_is_refused():
    with pytest.raises(ValueError, match="sample 1 is zero everywhere"):
        theory.arc_cosine_gram(np.array([[1.0, 0.0], [0.0, 0.0]]))


def test_parallel_samples_make_the_gram_matrix_singular(problem):
    samples = np.concatenate([problem.samples, 3 * problem.samples[:1]])
    assert theory.least_eigenvalue(theory.arc_cosine_gram(problem.samples)) > 1e-3
    assert abs(theory.least_eigenvalue(theory.arc_cosine_gram(samples))) < 1e-9


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("spread", [0.0, 1.5])
def test_interlacing(seed, spread):
    """mu* is the least over the clients' own blocks, and never below mu (Cauchy)."""
    data = theory.synthetic_problem(4, 6, 5, spread, seed)
    gram = theory.arc_cosine_gram(data.samples)
    star = theory.within_clients(gram, data.client)
    blocks = [
        theory.least_eigenvalue(theory.arc_cosine_gram(data.samples[data.client == i]))
        for i in range(4)
    ]
    assert theory.least_eigenvalue(star) == pytest.approx(min(blocks))
    assert theory.least_eigenvalue(star) >= theory.least_eigenvalue(gram) > 0
    assert (star == 0).sum() == 4 * 3 * 6 * 6


def test_covariances_are_as_far_apart_as_asked():
    same = theory.synthetic_problem(3, 4, 5, spread=0.0, seed=0)
    np.testing.assert_allclose(same.covariance, np.broadcast_to(np.eye(5), (3, 5, 5)), atol=1e-12)
    apart = theory.synthetic_problem(3, 4, 5, spread=2.0, seed=0)
    np.testing.assert_allclose(np.trace(apart.covariance, axis1=1, axis2=2), 5)
    assert np.linalg.eigvalsh(apart.covariance)[:, 0].min() > 0
    logs = np.log(np.linalg.eigvalsh(apart.covariance))
    np.testing.assert_allclose(logs.std(axis=1), 2.0)


def test_samples_have_their_clients_covariance():
    data = theory.synthetic_problem(2, 60_000, 3, spread=1.0, seed=1)
    for i in range(2):
        found = np.cov(data.samples[data.client == i].T)
        np.testing.assert_allclose(found, data.covariance[i], atol=0.05)
    assert np.linalg.norm(data.covariance[0] - data.covariance[1]) > 0.5


def reference(network, problem):
    """The squared residual of the paper's network, written out in torch."""
    v, gamma = (torch.tensor(a, requires_grad=True) for a in (network.v, network.gamma))
    c = torch.tensor(network.c)
    output = []
    for x, i in zip(torch.tensor(problem.samples), problem.client, strict=True):
        norm = torch.sqrt(((v @ torch.tensor(problem.covariance[i])) * v).sum(1))
        scale = gamma[:, i if gamma.shape[1] > 1 else 0]
        output.append((c * torch.relu(scale * (v @ x) / norm)).sum() / len(c) ** 0.5)
    return v, gamma, torch.stack(output)


@pytest.mark.parametrize("local", [False, True])
def test_gradients_are_those_of_automatic_differentiation(problem, local):
    network = network_of(problem, local=local, width=9)
    network.gamma = network.gamma * np.random.default_rng(0).normal(size=network.gamma.shape)
    v, gamma, output = reference(network, problem)
    half = ((output - torch.tensor(problem.targets)) ** 2).sum() / 2
    half.backward()
    got_v, got_gamma, squared = theory.gradients(network, problem)
    np.testing.assert_allclose(theory.outputs(network, problem), output.detach().numpy())
    np.testing.assert_allclose(got_v, v.grad.numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(got_gamma, gamma.grad.numpy(), rtol=1e-9, atol=1e-12)
    assert squared == pytest.approx(2 * half.item())


@pytest.mark.parametrize("local", [False, True])
def test_the_evolution_matrix_is_that_of_the_jacobian(problem, local):
    network = network_of(problem, local=local, width=9)
    v, gamma, output = reference(network, problem)
    rows = [torch.autograd.grad(f, (v, gamma), retain_graph=True) for f in output]
    for k, part in enumerate(theory.evolution_matrices(network, problem)):
        jacobian = np.stack([row[k].numpy().ravel() for row in rows])
        np.testing.assert_allclose(part, jacobian @ jacobian.T, atol=1e-10)


def test_both_methods_start_from_the_same_function(problem):
    networks = [network_of(problem, local=local) for local in (False, True)]
    assert networks[0].gamma.shape == (400, 1)
    assert networks[1].gamma.shape == (400, 3)
    np.testing.assert_array_equal(*(theory.outputs(network, problem) for network in networks))
    (v, gram), (v_star, star) = (theory.evolution_matrices(n, problem) for n in networks)
    np.testing.assert_array_equal(v, v_star)
    np.testing.assert_allclose(star, theory.within_clients(gram, problem.client))


def test_the_networks_gram_matrix_is_the_papers_up_to_the_norms():
    """With the identity as covariance |v|^2 is independent of v's direction: a factor alpha^2 d."""
    data = theory.synthetic_problem(2, 4, 5, spread=0.0, seed=0)
    network = theory.initial_network(data, 60_000, alpha=2.0, seed=0, local=False)
    _, gram = theory.evolution_matrices(network, data)
    np.testing.assert_allclose(
        gram * 2.0**2 * 5, theory.arc_cosine_gram(data.samples, 2.0), atol=0.4
    )
    np.testing.assert_allclose(gram * 5, theory.arc_cosine_gram(data.samples), atol=0.1)


def test_the_gradient_never_changes_the_length_of_v_at_first_order(problem):
    """Normalised weights: the function does not depend on |v_k|."""
    network = network_of(problem, local=True)
    v, _, _ = theory.gradients(network, problem)
    along = (v * network.v).sum(1) / np.linalg.norm(v, axis=1) / np.linalg.norm(network.v, axis=1)
    assert abs(along).max() < 1e-12


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_holds_and_a_bound_of_another_matrix_does_not(local, seed):
    data = theory.synthetic_problem(4, 6, 8, spread=1.0, seed=seed)
    network = theory.initial_network(data, 600, alpha=5.0, seed=seed, local=local)
    v_part, gamma_part = theory.evolution_matrices(network, data)
    step_size = 1 / np.linalg.eigvalsh(v_part + gamma_part)[-1]
    losses = theory.train(network, data, step_size, 200)
    bound = theory.loss_bound(losses[0], step_size, theory.least_eigenvalue(gamma_part), 200)
    assert (losses <= bound * (1 + 1e-12)).all()
    assert (losses[1:] < losses[:-1]).all()
    steep = theory.loss_bound(losses[0], step_size, np.linalg.eigvalsh(gamma_part)[-1], 200)
    assert (losses > steep).any()


def test_training_takes_the_number_of_steps_that_it_says(problem):
    network = network_of(problem, local=True)
    twin = copy.deepcopy(network)
    losses = theory.train(network, problem, 0.01, 3)
    for t in range(3):
        v, gamma, squared = theory.gradients(twin, problem)
        assert squared == losses[t]
        twin.v -= 0.01 * v
        twin.gamma -= 0.01 * gamma
    np.testing.assert_array_equal(twin.v, network.v)
    np.testing.assert_array_equal(twin.gamma, network.gamma)
    assert losses[3] == theory.gradients(twin, problem)[2]


def test_a_step_that_is_too_large_is_one_sentence(problem):
    with (
        np.errstate(all="ignore"),
        pytest.raises(FloatingPointError, match="lower the step size 1e\\+200"),
    ):
        theory.train(network_of(problem, local=False), problem, 1e200, 50)
