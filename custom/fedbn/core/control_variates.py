"""SCAFFOLD's control variates (Karimireddy et al., ICML 2020, option II).

Sites whose data differ drift apart while they train alone for a round. Each site ``i`` keeps an
estimate ``c_i`` of its own gradient, the server the mean ``c`` of all of them, and every local step
is corrected by their difference::

    y   <- y - eta * (g_i(y) - c_i + c)
    c_i <- c_i - c + (x - y) / (K * eta)

with ``x`` the received and ``y`` the trained weights, ``eta`` the learning rate and ``K`` the
number of steps that were really taken. Both start at zero. They exist for shared trainable entries
alone: running statistics have no gradient, and what stays at a site drifts from nothing.

In a message and in a site's state a control variate is an entry of its own, under :data:`PREFIX`
and the name of the entry that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fedbn.core.aggregation import narrowed, widened

PREFIX = "control_variate:"
"""No state-dict entry begins with it: it holds a colon, and names of modules end with a dot."""

Tensors = dict[str, torch.Tensor]


def zeros(entries: Mapping[str, torch.Tensor], names: Iterable[str]) -> Tensors:
    """Return the control variates before the first round, by the names of their entries."""
    return {name: torch.zeros_like(entries[name], device="cpu") for name in names}


def join(entries: Mapping[str, torch.Tensor], variates: Mapping[str, torch.Tensor]) -> Tensors:
    """Put control variates behind a network's entries, each under its prefixed name."""
    return {**entries, **{PREFIX + name: tensor for name, tensor in variates.items()}}


def separate(tensors: Mapping[str, torch.Tensor]) -> tuple[Tensors, Tensors]:
    """Take apart what :func:`join` joined: the network's entries, and control variates by entry."""
    entries = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
    variates = {
        name.removeprefix(PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(PREFIX)
    }
    return entries, variates


def correction(server: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> Tensors:
    """Return ``c - c_i``, which is added to the gradient at every step."""
    return {name: server[name] - tensor for name, tensor in own.items()}


def updated(
    own: Mapping[str, torch.Tensor],
    server: Mapping[str, torch.Tensor],
    received: Mapping[str, torch.Tensor],
    trained: Mapping[str, torch.Tensor],
    *,
    n_steps: int,
    learning_rate: float,
) -> Tensors:
    """Return a site's control variate after a round: ``c_i - c + (x - y) / (K * eta)``.

    Parameters
    ----------
    own, server
        The site's and the server's control variate of this round.
    received, trained
        The shared entries before and after local training.
    n_steps
        Optimiser steps that were taken.
    learning_rate
        Of plain SGD: with another optimiser ``(x - y) / (K * eta)`` is no mean gradient.

    Raises
    ------
    FloatingPointError
        Naming the first entry whose control variate is not finite.
    """
    new = {}
    for name, tensor in own.items():
        # In float64: x and y are nearly equal, and their difference is divided by a small number.
        moved = widened(received[name]) - widened(trained[name])
        value = widened(tensor) - widened(server[name]) + moved / (n_steps * learning_rate)
        new[name] = narrowed(value, tensor)
        if not bool(torch.isfinite(new[name]).all()):
            raise FloatingPointError(
                f"the control variate of entry {name!r} is not finite after {n_steps} steps; "
                f"lower learning_rate ({learning_rate:g})"
            )
    return new
