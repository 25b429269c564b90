"""SCAFFOLD's arithmetic against numbers computed by hand."""

from __future__ import annotations

import pytest
import torch
from classifier import train_classifier
from torch import nn

from fedbn.core import control_variates
from fedbn.core.training import TrainingSettings


def test_names_keep_variates_and_entries_apart():
    entries = {"a.weight": torch.ones(2), "a.bias": torch.zeros(1)}
    zeros = control_variates.zeros(entries, ["a.weight"])
    joined = control_variates.join(entries, zeros)
    assert list(joined) == ["a.weight", "a.bias", "control_variate:a.weight"]
    assert joined["control_variate:a.weight"].tolist() == [0, 0]
    found, variates = control_variates.separate(joined)
    assert list(found) == ["a.weight", "a.bias"]
    assert list(variates) == ["a.weight"]


def test_the_update_by_hand():
    """c_i' = c_i - c + (x - y) / (K eta) = 0.5 - 0.25 + (3 - 2) / (4 * 0.125) = 2.25."""
    new = control_variates.updated(
        {"w": torch.tensor([0.5])},
        {"w": torch.tensor([0.25])},
        {"w": torch.tensor([3.0]), "other": torch.ones(1)},
        {"w": torch.tensor([2.0]), "other": torch.zeros(1)},
        n_steps=4,
        learning_rate=0.125,
    )
    assert {name: tensor.tolist() for name, tensor in new.items()} == {"w": [2.25]}
    assert new["w"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_the_update_has_the_dtype_of_its_entry(dtype):
    factor = 1 - 2j if dtype.is_complex else 1
    own, server, received, trained = (
        {"w": torch.tensor([value * factor]).to(dtype)} for value in (0.5, 0.25, 3.0, 2.0)
    )
    new = control_variates.updated(own, server, received, trained, n_steps=4, learning_rate=0.125)
    assert torch.equal(new["w"], torch.tensor([2.25 * factor]).to(dtype))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_is_refused(broken):
    with pytest.raises(FloatingPointError, match=r"entry 'w' is not finite after 2 steps; lower"):
        control_variates.updated(
            {"w": torch.zeros(1)},
            {"w": torch.zeros(1)},
            {"w": torch.tensor([broken])},
            {"w": torch.zeros(1)},
            n_steps=2,
            learning_rate=0.1,
        )


class Slope(nn.Module):
    """Logits (0, w * x): the gradient of the cross entropy is sigmoid(w x) x for class 0."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.0]))

    def forward(self, x):
        return torch.cat([torch.zeros_like(x), self.w * x], dim=1)


def sgd(**changes):
    return TrainingSettings(
        **{
            "optimizer": "sgd",
            "learning_rate": 0.5,
            "weight_decay": 0.0,
            "batch_size": 2,
            "local_epochs": 1,
            **changes,
        }
    )


def test_a_step_by_hand():
    """At w = 0 the mean gradient of two samples x = 1 and x = 3 of class 0 is (0.5 + 1.5) / 2 = 1.

    With c - c_i = 0.25 the step is w <- 0 - 0.5 * (1 + 0.25) = -0.625.
    """
    model = Slope()
    outcome = train_classifier(
        model,
        torch.tensor([[1.0], [3.0]]),
        torch.tensor([0, 0]),
        sgd(),
        seed=0,
        correction={"w": torch.tensor([0.25])},
    )
    assert outcome.n_steps == 1
    assert model.w.item() == -0.625
    # c_i' = c_i - c + (x - y) / (K eta) = -0.25 + 0.625 / 0.5 = 1: the mean gradient itself
    new = control_variates.updated(
        {"w": torch.tensor([0.0])},
        {"w": torch.tensor([0.25])},
        {"w": torch.tensor([0.0])},
        {"w": model.w.detach()},
        n_steps=outcome.n_steps,
        learning_rate=0.5,
    )
    assert new["w"].item() == 1.0


def test_the_new_variate_is_the_mean_gradient_over_the_steps_really_taken():
    """Five samples in batches of two are two steps an epoch, not three: the last has three."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(5, 1), torch.tensor([0, 1, 0, 1, 0])
    plain, corrected = Slope(), Slope()
    settings = sgd(local_epochs=3, learning_rate=0.1)
    server, own = {"w": torch.tensor([0.7])}, {"w": torch.tensor([-0.4])}
    train_classifier(plain, inputs, targets, settings, seed=1)
    outcome = train_classifier(
        corrected,
        inputs,
        targets,
        settings,
        seed=1,
        correction=control_variates.correction(server, own),
    )
    assert outcome.n_steps == 6
    assert plain.w.item() != corrected.w.item()
    received, trained = {"w": torch.zeros(1)}, {"w": corrected.w.detach()}
    new = control_variates.updated(
        own, server, received, trained, n_steps=outcome.n_steps, learning_rate=0.1
    )
    moved = -0.1 * outcome.n_steps * (new["w"].item() + 0.7 + 0.4)
    assert corrected.w.item() == pytest.approx(moved, rel=1e-6)


def test_a_correction_of_nothing_changes_no_bit():
    inputs, targets = torch.randn(6, 1), torch.tensor([0, 1, 0, 1, 0, 1])
    plain, corrected = Slope(), Slope()
    train_classifier(plain, inputs, targets, sgd(), seed=1)
    zero = {"w": torch.zeros(1)}
    train_classifier(corrected, inputs, targets, sgd(), seed=1, correction=zero)
    assert torch.equal(plain.w, corrected.w)


def test_an_unused_weight_is_corrected_all_the_same():
    model = Slope()
    model.unused = nn.Parameter(torch.tensor([1.0]))
    correction = {"unused": torch.tensor([2.0])}
    inputs, targets = torch.ones(2, 1), torch.tensor([0, 0])
    train_classifier(model, inputs, targets, sgd(), seed=0, correction=correction)
    assert model.unused.item() == 0.0
    assert correction["unused"].item() == 2.0


@pytest.mark.parametrize(
    ("correction", "reason"),
    [
        ({"v": torch.zeros(1)}, "no such trained entry for 'v'"),
        ({"w": torch.zeros(2)}, r"shape \(2,\) for 'w'"),
    ],
)
def test_a_correction_that_does_not_fit_is_refused(correction, reason):
    with pytest.raises(ValueError, match=f"correction of a gradient: {reason}"):
        train_classifier(
            Slope(),
            torch.ones(2, 1),
            torch.tensor([0, 0]),
            sgd(),
            seed=0,
            correction=correction,
        )
