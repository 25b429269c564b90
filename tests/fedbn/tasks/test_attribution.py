"""Attributions add up, fall on the inputs that matter, and leave the network as it was."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from fedbn.tasks import attribution
from fedbn.tasks.attribution import integrated_gradients
from fedbn.tasks.connectome.network import ConnectomeMLP


def trained(hidden=(8,), in_features=12, seed=0):
    """A network whose batch norm has seen data, left in training mode."""
    torch.manual_seed(seed)
    network = ConnectomeMLP(in_features, hidden)
    for _ in range(5):
        network(2 * torch.randn(32, in_features) + 1)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return network


@pytest.mark.parametrize("hidden", [(8,), (8, 8)])
def test_the_attributions_of_each_sample_add_up(hidden):
    network = trained(hidden)
    inputs = 3 * torch.randn(20, 12)
    found = integrated_gradients(network, inputs)
    with torch.no_grad():
        logits = network.eval()(torch.cat([inputs, torch.zeros(1, 12)])).double()
    expected = (logits[:, 1] - logits[:, 0]).numpy()
    assert np.abs(found.values.sum(axis=1) - (expected[:-1] - expected[-1])).max() < 2e-3
    assert np.abs(found.gap).max() <= 1e-3 * max(1, np.abs(expected[:-1] - expected[-1]).max())
    assert found.log_odds == pytest.approx(expected[:-1], abs=1e-5)
    assert found.baseline_log_odds == pytest.approx(expected[-1], abs=1e-5)


def test_a_gradient_times_input_would_not_add_up():
    """The positive control of the test above: the property is not had for nothing."""
    network = trained().eval()
    inputs = (3 * torch.randn(20, 12)).requires_grad_()
    log_odds = network(inputs).diff()[:, 0]
    (gradient,) = torch.autograd.grad(log_odds.sum(), inputs)
    baseline = network(torch.zeros(1, 12)).diff()[0, 0]
    gap = (gradient * inputs).sum(dim=1) - (log_odds - baseline)
    assert gap.abs().max() > 0.02


def test_a_linear_network_gets_weight_times_distance():
    network = nn.Linear(3, 2)
    x, baseline = torch.tensor([[1.0, -2.0, 4.0]]), torch.tensor([0.5, 0.0, 4.0])
    found = integrated_gradients(network, x, baseline)
    weight = (network.weight[1] - network.weight[0]).detach()
    assert found.values[0] == pytest.approx(((x[0] - baseline) * weight).numpy(), abs=1e-6)
    assert found.values[0, 2] == 0


def test_an_input_without_influence_gets_nothing():
    network = trained()
    with torch.no_grad():
        network.hidden[0].linear.weight[:, 5] = 0
    values = integrated_gradients(network, torch.randn(6, 12)).values
    assert np.all(values[:, 5] == 0)
    assert np.all(np.abs(values).sum(axis=1) > 0)


def test_each_sample_is_attributed_on_its_own(monkeypatch):
    network, inputs = trained(), torch.randn(7, 12)
    together = integrated_gradients(network, inputs, tolerance=1e-2).values
    monkeypatch.setattr(attribution, "_NUMBERS", 40)  # so that lines are cut over several batches
    alone = [integrated_gradients(network, x[None], tolerance=1e-2).values[0] for x in inputs]
    assert together == pytest.approx(np.stack(alone), abs=1e-12)


def test_the_short_way_through_the_first_layer_gives_the_same():
    """The same network as a plain sequence is differentiated back to its inputs."""
    network, inputs = trained((8, 8)), 3 * torch.randn(9, 12)
    sequence = nn.Sequential(*network.children())
    short = integrated_gradients(network, inputs, torch.ones(12)).values
    assert short == pytest.approx(
        integrated_gradients(sequence, inputs, torch.ones(12)).values, abs=1e-12
    )


def test_a_convolution_is_attributed_too():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 16, 2)
    )
    found = integrated_gradients(network, torch.randn(4, 1, 6, 6))
    assert found.values.shape == (4, 1, 6, 6)
    assert np.abs(found.gap).max() < 1e-3


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_weight_that_is_computed_anew_in_each_pass_is_attributed_too(norm):
    torch.manual_seed(0)
    network = nn.Sequential(norm(nn.Linear(5, 4)), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    network(torch.randn(8, 5)).sum().backward()  # leaves a weight with a graph
    inputs = 3 * torch.randn(6, 5)
    found = integrated_gradients(network, inputs)
    with torch.no_grad():
        expected = network.eval()(inputs).diff()[:, 0].numpy()
    assert found.log_odds == pytest.approx(expected, abs=1e-5)
    assert np.abs(found.gap).max() < 1e-2


def test_the_network_is_left_as_it_was():
    network = trained()
    before = copy.deepcopy(network.state_dict())
    integrated_gradients(network, torch.randn(3, 12))
    assert network.training
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in network.parameters())


@pytest.mark.parametrize(
    ("network", "inputs", "baseline", "sentence"),
    [
        (nn.Linear(3, 2), torch.zeros(0, 3), None, "there is no sample to attribute"),
        (nn.Linear(3, 2), torch.zeros(1, 3), torch.zeros(4), r"shape \(4,\), a sample \(3,\)"),
        (nn.Linear(3, 3), torch.zeros(1, 3), None, r"gives logits \(n, 2\)"),
    ],
)
def test_refusals(network, inputs, baseline, sentence):
    with pytest.raises(ValueError, match=sentence):
        integrated_gradients(network, inputs, baseline)


def test_what_does_not_add_up_is_an_error(monkeypatch):
    monkeypatch.setattr(attribution, "MOST_STEPS", attribution.FEWEST_STEPS)
    with pytest.raises(ArithmeticError, match="20 samples do not add up to within 1e-09"):
        integrated_gradients(trained(), 3 * torch.randn(20, 12), tolerance=1e-9)
    broken = nn.Linear(3, 2)
    nn.init.constant_(broken.weight, float("nan"))
    with pytest.raises(FloatingPointError, match="no finite score"):
        integrated_gradients(broken, torch.zeros(1, 3))
