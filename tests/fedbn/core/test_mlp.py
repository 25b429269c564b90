"""The multilayer perceptron for any table of numbers."""

from __future__ import annotations

import itertools

import pytest
import torch

from fedbn.core.networks import build_network


@pytest.mark.parametrize(("hidden", "n_classes"), [((4,), 2), ([8, 3], 5)])
def test_layers_of_an_mlp(hidden, n_classes):
    network = build_network("MLP", {"in_features": 7, "hidden": hidden, "n_classes": n_classes}, 0)
    widths = [7, *hidden]
    shapes = {name: tuple(value.shape) for name, value in network.named_parameters()}
    for k, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
        assert shapes[f"hidden.{k}.linear.weight"] == (fan_out, fan_in)
        assert shapes[f"hidden.{k}.norm.weight"] == (fan_out,)
    assert shapes["classifier.weight"] == (n_classes, widths[-1])
    assert network(torch.randn(5, 7)).shape == (5, n_classes)


def test_dropout_of_an_mlp_is_where_it_is_asked_for():
    network = build_network("MLP", {"in_features": 3, "input_dropout": 0.5, "dropout": 0.25}, 0)
    assert (network.input_dropout.p, network.hidden[0].dropout.p) == (0.5, 0.25)
    x = torch.randn(4, 3)
    assert torch.equal(network.eval()(x), network(x))
    assert not torch.equal(network.train()(x), network(x))


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"in_features": 0}, "in_features is 0; it must be an integer of at least 1"),
        ({"in_features": 3.0}, "in_features is 3.0; it must be an integer"),
        ({"in_features": 3, "hidden": []}, "must list the width of one layer or more"),
        ({"in_features": 3, "hidden": 16}, "must list the width of one layer or more"),
        ({"in_features": 3, "hidden": [True]}, "each width in hidden is True"),
        ({"in_features": 3, "n_classes": 1}, "n_classes is 1; it must be an integer of at least 2"),
        ({"in_features": 3, "dropout": 1.5}, "dropout probability has to be between 0 and 1"),
        ({}, "missing a required argument: 'in_features'"),
    ],
)
def test_an_mlp_that_cannot_be(args, sentence):
    with pytest.raises(ValueError, match=f"network 'MLP'.*{sentence}"):
        build_network("MLP", args)
