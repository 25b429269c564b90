"""The paper's networks: parameters, batch norms and shapes that its text and code give."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedbn.core.networks import OWN_NETWORKS, build_network
from fedbn.core.normalization import split
from fedbn.core.paper_networks import AlexNetBN, DigitModel, SmallDigitCNN


@pytest.mark.parametrize(
    ("network", "size", "n_parameters", "n_norms"),
    [
        (DigitModel, 28, 14_219_210, 5),
        (AlexNetBN, 256, 57_063_498, 7),
        (SmallDigitCNN, 28, 71_306, 3),
    ],
)
def test_size_and_batch_norms(network, size, n_parameters, n_norms):
    model = network()
    assert sum(parameter.numel() for parameter in model.parameters()) == n_parameters
    assert (
        sum(isinstance(layer, nn.BatchNorm2d | nn.BatchNorm1d) for layer in model.modules())
        == n_norms
    )
    assert model(torch.randn(2, 3, size, size)).shape == (2, 10)


@pytest.mark.parametrize(("network", "smallest"), [(AlexNetBN, 63), (SmallDigitCNN, 8)])
def test_the_smallest_image(network, smallest):
    model = network(n_classes=4, in_channels=1).eval()
    assert model(torch.randn(1, 1, smallest, smallest)).shape == (1, 4)
    with pytest.raises(RuntimeError):
        model(torch.randn(1, 1, smallest - 1, smallest - 1))


@pytest.mark.parametrize("network", [DigitModel, AlexNetBN, SmallDigitCNN])
def test_batch_norm_comes_after_each_layer_but_the_last_and_before_the_relu(network):
    layers = [layer for layer in network().modules() if not list(layer.children())]
    weighted = [k for k, layer in enumerate(layers) if isinstance(layer, nn.Conv2d | nn.Linear)]
    for k in weighted[:-1]:
        assert isinstance(layers[k + 1], nn.BatchNorm2d | nn.BatchNorm1d)
        assert isinstance(layers[k + 2], nn.ReLU)
    assert layers[weighted[-1]] is layers[-1]


@pytest.mark.parametrize(
    ("name", "args", "n_local"),
    [
        ("DigitModel", {}, 5),
        ("AlexNetBN", {"n_classes": 3}, 7),
        ("SmallDigitCNN", {"channels": [4, 8]}, 2),
    ],
)
def test_a_job_asks_for_them_by_name(name, args, n_local):
    network = build_network(name, args, seed=0)
    assert type(network).__name__ == name in OWN_NETWORKS
    assert len(split(network).layers) == n_local
