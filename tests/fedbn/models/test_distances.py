"""Raw connectomes in; the distances notice a scan that is unlike the site's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedbn.core.batches import TensorSamples
from fedbn.models.distances import distances, far_away, first_batch_norm, outer_fence, quartiles
from fedbn.tasks.connectome.network import ConnectomeMLP
from fedbn.tasks.connectome.task import ConnectomeTask
from fedbn.tasks.site_network import SiteNetwork


def distances_of(model, x):
    samples = TensorSamples(torch.from_numpy(x.copy()), torch.zeros(len(x), dtype=torch.int64))
    return distances(ConnectomeTask(), model, samples)


def site_network(mean=3.0, std=2.0, n=30):
    """A network whose batch norm has seen standardised features of this mean and deviation."""
    torch.manual_seed(0)
    network = ConnectomeMLP(n, (8,), input_dropout=0)
    for _ in range(80):
        network(torch.randn(64, n))
    model = SiteNetwork(network, n).eval()
    model.load_state_dict(
        {**model.state_dict(), "mean": torch.full((n,), mean), "std": torch.full((n,), std)}
    )
    return model


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_standardisation_is_a_layer():
    model = site_network()
    x = 3 + 2 * torch.randn(5, 30)
    assert torch.equal(model(x), model.network((x - 3) / 2))
    assert set(model.state_dict()) == {
        "mean", "std", *(f"network.{name}" for name in model.network.state_dict())
    }  # fmt: skip


def test_distances_are_mean_squared_z_scores(rng):
    model = site_network()
    x = (3 + 2 * rng.standard_normal((600, 30))).astype(np.float32)
    found = distances_of(model, x)
    z = (x - 3) / 2
    assert found["features"] == pytest.approx((z**2).mean(axis=1), rel=1e-5)
    layer = model.network.hidden[0]
    h = torch.relu(layer.linear(torch.from_numpy(z))).detach().numpy()
    expected = (h - layer.norm.running_mean.numpy()) ** 2 / (layer.norm.running_var.numpy() + 1e-5)
    assert found["batch_norm"] == pytest.approx(expected.mean(axis=1), rel=1e-4)
    assert found["batch_norm"].mean() == pytest.approx(1, abs=0.2)


def test_the_pattern_is_one_minus_the_correlation_with_the_mean(rng):
    model = site_network()
    mean = rng.standard_normal(30)
    model.load_state_dict({**model.state_dict(), "mean": torch.tensor(mean, dtype=torch.float32)})
    x = np.stack([2 * mean + 1, -mean, rng.standard_normal(30), np.ones(30)]).astype(np.float32)
    found = distances_of(model, x)
    expected = [0, 2, 1 - np.corrcoef(mean, x[2])[0, 1], 1]
    assert found["pattern"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "found_by"),
    [
        (lambda x: x, set()),
        (lambda x: x + 3, {"features"}),
        (lambda x: 3 * x, {"features"}),
        (lambda x: x[:, ::-1], {"pattern"}),
        (lambda x: np.zeros_like(x), {"pattern"}),
    ],
    ids=["like the training", "another offset", "another scale", "another order", "no signal"],
)
def test_a_scan_is_far_where_it_is_unlike_the_training(rng, change, found_by):
    model = site_network()
    mean = np.arange(30.0) / 30
    model.load_state_dict({**model.state_dict(), "mean": torch.tensor(mean, dtype=torch.float32)})

    def scan(n):
        """The mean connectome, with a strength that is the subject's own, and noise."""
        strength = rng.normal(1, 0.2, (n, 1))
        return (strength * mean + 0.1 * rng.standard_normal((n, 30))).astype(np.float32)

    of_training = distances_of(model, scan(100))
    reference = {name: quartiles(values) for name, values in of_training.items()}
    found = distances_of(model, change(scan(4)))
    means = {name: float(values.mean()) for name, values in found.items()}
    assert found_by <= set(far_away(means, reference))
    assert bool(far_away(means, reference)) is bool(found_by)
    assert far_away(means, None) == []


def test_the_fence_is_tukeys():
    assert outer_fence([1.0, 1.5, 2.0]) == 5
    assert outer_fence([1.0, 1.0, 1.0]) == 1


def test_channels_of_images_are_compared_over_positions():
    network = nn.Sequential(nn.Unflatten(1, (1, 5, 6)), nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3),
                            nn.Flatten(), nn.Linear(36, 2))  # fmt: skip
    model = SiteNetwork(network, 30).eval()
    x = torch.randn(4, 30)
    found = distances_of(model, x.numpy())
    inner = network[1](x.view(4, 1, 5, 6)).detach().double()
    assert found["batch_norm"] == pytest.approx(
        (inner**2 / (1 + 1e-5)).mean(dim=(1, 2, 3)).numpy(), rel=1e-5
    )


def test_a_network_without_batch_norm_has_one_distance():
    model = SiteNetwork(nn.Linear(30, 2), 30)
    assert first_batch_norm(model) is None
    assert set(distances_of(model, np.ones((1, 30), np.float32))) == {"features"}
