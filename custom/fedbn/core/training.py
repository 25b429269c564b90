"""Local epochs at one site: plain PyTorch, and the terms that federated methods add to a step.

All randomness of a call comes from its `seed`: the order of batches and the dropout masks do not
depend on what ran before, on other sites, or on the number of threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from torch import nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from fedbn.core.batches import Batch, Samples, check_batch_size
from fedbn.core.normalization import split, trainable_names, unwrap_model


class TrainingSettings(BaseModel):
    """How a site trains in one round.

    Attributes
    ----------
    optimizer
        ``"sgd"``, ``"adam"`` (weight decay as an L2 penalty) or ``"adamw"`` (decoupled).
    learning_rate, weight_decay, momentum
        As in ``torch.optim``; momentum is for ``"sgd"`` alone.
    batch_size
        Samples in a batch, at least two. The last batch of an epoch is smaller, or larger by one.
    local_epochs
        Passes over the site's training samples in one round.
    class_weights
        Weights of the classes in the cross entropy: none, one number a class, or ``"balanced"``
        for ``n / (number of classes present * samples of the class)`` at the site.
    proximal_mu
        FedProx's mu (Li et al., MLSys 2020); 0 leaves the term out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    optimizer: Literal["sgd", "adam", "adamw"] = "adam"
    learning_rate: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    batch_size: int = 32
    local_epochs: int = Field(default=1, ge=1)
    class_weights: Literal["balanced"] | list[float] | None = None
    proximal_mu: float = Field(default=0.0, ge=0)

    @field_validator("batch_size")
    @classmethod
    def _trains_batch_norm(cls, value: int) -> int:
        return check_batch_size(value)

    @field_validator("class_weights")
    @classmethod
    def _positive(cls, value: list[float] | str | None) -> list[float] | str | None:
        if isinstance(value, list) and (len(value) < 2 or min(value) <= 0):
            raise ValueError(f"class_weights are {value}; give one positive number for each class")
        return value

    @model_validator(mode="after")
    def _momentum_for_sgd(self) -> TrainingSettings:
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(
                f"momentum is {self.momentum}, but optimizer {self.optimizer!r} takes none; "
                "use 'sgd' or leave momentum at 0"
            )
        return self


@dataclass(frozen=True)
class TrainingOutcome:
    """What a call of :func:`train_epochs` did.

    Attributes
    ----------
    losses
        Loss of each epoch, without the FedProx term: the mean over batches, each weighted
        by its number of samples, measured while the weights change.
    n_samples
        Training samples of the site, each seen once an epoch.
    n_steps
        Optimiser steps, over all epochs.
    """

    losses: list[float]
    n_samples: int
    n_steps: int


def derive_seed(seed: int, *labels: str | int) -> int:
    """Derive a seed for one purpose, such as ``derive_seed(seed, site, round, "order")``.

    A hash, so that a site's numbers depend on its own name and not on how many sites there are or
    in which order they come. The same on every machine and in every version of Python.

    Returns
    -------
    int
        In ``[0, 2**63)``. Labels ``1`` and ``"1"`` give different seeds.
    """
    parts = [label if isinstance(label, str) else operator.index(label) for label in labels]
    digest = hashlib.sha256(json.dumps([operator.index(seed), *parts]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


Forward = Callable[[nn.Module, Batch], Any]
"""Network and batch to the network's outputs."""

Loss = Callable[[Any, Batch], torch.Tensor]
"""Outputs and batch to a scalar."""


def forward_inputs(network: nn.Module, batch: Batch) -> Any:
    """Give a batch's inputs to the network."""
    return network(batch.inputs)


def proximal_term(
    parameters: Collection[torch.Tensor], reference: Collection[torch.Tensor], mu: float
) -> torch.Tensor:
    """Return FedProx's ``mu / 2 * sum ||w - w_reference||^2`` (Li et al., MLSys 2020, eq. 2)."""
    squares = [
        (weight - fixed).square().sum() for weight, fixed in zip(parameters, reference, strict=True)
    ]
    return mu / 2 * torch.stack(squares).sum()


def train_epochs(
    model: nn.Module,
    samples: Samples,
    settings: TrainingSettings,
    *,
    seed: int,
    loss: Loss,
    forward: Forward = forward_inputs,
    shared_names: Collection[str] = (),
    reference: Mapping[str, torch.Tensor] | None = None,
    correction: Mapping[str, torch.Tensor] | None = None,
    only: Collection[str] | None = None,
    on_epoch: Callable[[int, float], None] | None = None,
) -> TrainingOutcome:
    """Train a network for ``settings.local_epochs`` passes over a site's samples.

    The optimiser is made afresh in each call: its state (Adam's moments, momentum) is neither
    carried from round to round nor sent. The moments of a site's last round belong to weights that
    the average has since replaced, and a site that misses a round or restarts is then no different
    from one that does not.

    Parameters
    ----------
    model : torch.nn.Module
        What is trained is this very module, wrapped (data-parallel, compiled) or not, in place, on
        the device where it is. Parameters that do not require a gradient stay as they are. It is
        left in training mode.
    samples : Samples
        At least two.
    settings : TrainingSettings
        Optimiser, batches, epochs and FedProx's mu.
    seed : int
        Decides all randomness of the call. The global random state is left as it was.
    loss : callable
        The network's outputs and a batch to a scalar, the mean over the batch's samples.
    forward : callable
        Network and batch to outputs.
    shared_names : collection of str
        Names of shared state-dict entries, without a wrapper's prefix. The FedProx term is over
        those of them that are trained, and never over an entry of batch norm.
    reference : mapping from str to torch.Tensor, optional
        The received weights that the FedProx term pulls towards; by default those of `model` when
        the call begins.
    correction : mapping from str to torch.Tensor, optional
        Added to the gradient of these entries at every step: SCAFFOLD's ``c - c_i``.
    only : collection of str, optional
        Names of the only entries to train. All others stay as they are: no gradient is taken, and
        batch norm normalises with its running statistics, which do not move.
    on_epoch : callable, optional
        Called as ``on_epoch(epoch, loss)`` after each epoch, counted from 0. It may raise to stop.

    Returns
    -------
    TrainingOutcome

    Raises
    ------
    ValueError
        If there are fewer than two samples, or data, network and settings do not fit together.
    FloatingPointError
        If the loss or an entry of the state becomes infinite or NaN. The model is then of no use:
        load the last good state.
    """
    trained = _trained_parameters(model, only)
    if not trained:
        raise ValueError(f"network {type(model).__name__} has no parameter to train")
    device = trained[0].device
    proximal = _proximal_pairs(model, settings.proximal_mu, shared_names, reference)
    corrected = _corrected_pairs(model, correction)
    optimizer = _Optimizer(trained, settings)
    losses: list[float] = []
    n_steps = 0
    model.train()
    for epoch in range(settings.local_epochs):
        batch_losses: list[torch.Tensor] = []
        sizes: list[int] = []
        with seeded_rng(derive_seed(seed, "masks", epoch), device), _frozen_but(model, only):
            for batch in samples.batches(settings.batch_size, derive_seed(seed, "order", epoch)):
                value = loss(forward(model, batch), batch)
                batch_losses.append(value.detach())
                sizes.append(len(batch.owners))
                if proximal:
                    value = value + proximal_term(*proximal, settings.proximal_mu)
                optimizer.zero_grad()
                value.backward()
                if corrected:
                    _add_to_gradients(corrected)
                optimizer.step()
        n_steps += len(sizes)
        losses.append(_epoch_loss(batch_losses, sizes))
        _check_finite(model, losses[-1], epoch, settings)
        if on_epoch is not None:
            on_epoch(epoch, losses[-1])
    optimizer.zero_grad()
    return TrainingOutcome(losses=losses, n_samples=len(samples), n_steps=n_steps)


@contextlib.contextmanager
def seeded_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Seed PyTorch's global generators for the CPU and `device`, and put them back afterwards."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


class _Optimizer:
    """A new optimiser over some parameters, by PyTorch's own functions.

    ``torch.optim``'s classes call these same functions, but the first one that is made in a process
    imports ``torch._dynamo`` and sympy: 1.5 s, which a simulator that starts a process for every
    task would pay for every task. Fused where PyTorch can: one pass over weights, gradients and
    moments.
    """

    def __init__(self, parameters: list[nn.Parameter], settings: TrainingSettings):
        self.parameters = parameters
        self.settings = settings
        self.fused = all(
            parameter.is_floating_point() and parameter.device.type in ("cpu", "cuda")
            for parameter in parameters
        )
        if settings.optimizer == "sgd":
            self.momenta: list[torch.Tensor | None] = [None] * len(parameters)
        else:
            self.means = [torch.zeros_like(parameter) for parameter in parameters]
            self.squares = [torch.zeros_like(parameter) for parameter in parameters]
            # Counters live beside the weights for the fused kernel, on the CPU otherwise.
            self.steps = [
                torch.zeros(
                    (), dtype=torch.float32, device=parameter.device if self.fused else "cpu"
                )
                for parameter in parameters
            ]

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient; others are left out, as in PyTorch."""
        used = []
        gradients = []
        for k, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                used.append(k)
                gradients.append(parameter.grad)
        parameters: list[torch.Tensor] = [self.parameters[k] for k in used]
        rate, decay = self.settings.learning_rate, self.settings.weight_decay
        if self.settings.optimizer == "sgd":
            momenta = [self.momenta[k] for k in used]
            sgd(
                parameters,
                gradients,
                momenta,
                fused=self.fused,
                foreach=False,
                weight_decay=decay,
                momentum=self.settings.momentum,
                lr=rate,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            for k, momentum in zip(used, momenta, strict=True):
                self.momenta[k] = momentum
            return
        update = adamw if self.settings.optimizer == "adamw" else adam
        update(
            parameters,
            gradients,
            [self.means[k] for k in used],
            [self.squares[k] for k in used],
            [],
            [self.steps[k] for k in used],
            fused=self.fused,
            foreach=False,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=rate,
            weight_decay=decay,
            eps=1e-8,
            maximize=False,
        )


def _trained_parameters(model: nn.Module, only: Collection[str] | None) -> list[nn.Parameter]:
    """Return the parameters that a call trains, in the order of ``model.parameters()``."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if only is None:
        return parameters
    state = unwrap_model(model).state_dict(keep_vars=True)
    unknown = sorted(set(only) - state.keys())
    if unknown:
        raise ValueError(f"the network has no entry {unknown[0]!r} ({len(unknown)} unknown names)")
    chosen = {id(state[name]) for name in only}
    return [parameter for parameter in parameters if id(parameter) in chosen]


@contextlib.contextmanager
def _frozen_but(model: nn.Module, only: Collection[str] | None) -> Iterator[None]:
    """Hold still everything but some entries: no gradients, and no buffer moves."""
    if only is None:
        yield
        return
    model = unwrap_model(model)
    trained = {id(parameter) for parameter in _trained_parameters(model, only)}
    frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in trained]
    # A module with a buffer may update it in training, as batch norm and spectral norm do.
    moving = [
        module
        for prefix, module in model.named_modules()
        for name, _ in module.named_buffers(prefix, recurse=False)
        if name not in only
    ]
    try:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for module in moving:
            module.training = False
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
        for module in moving:
            module.training = True


def _corrected_pairs(
    model: nn.Module, correction: Mapping[str, torch.Tensor] | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the weights whose gradients are corrected, each with its correction."""
    if not correction:
        return []
    state = unwrap_model(model).state_dict(keep_vars=True)
    pairs = []
    for name, tensor in correction.items():
        weight = state.get(name)
        if weight is None or not weight.requires_grad or weight.shape != tensor.shape:
            got = "no such trained entry" if weight is None else f"shape {tuple(tensor.shape)}"
            raise ValueError(f"correction of a gradient: {got} for {name!r}")
        pairs.append((weight, tensor.detach().to(weight.device, weight.dtype, copy=True)))
    return pairs


@torch.no_grad()
def _add_to_gradients(corrected: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for weight, added in corrected:
        # A weight that this batch did not use has the gradient zero, and is corrected all the same.
        weight.grad = added.clone() if weight.grad is None else weight.grad.add_(added)


def _proximal_pairs(
    model: nn.Module,
    mu: float,
    shared_names: Collection[str],
    reference: Mapping[str, torch.Tensor] | None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """Return the weights that the FedProx term is over, and the fixed ones it pulls them to."""
    if mu == 0:
        return None
    state = unwrap_model(model).state_dict(keep_vars=True)
    unknown = sorted(set(shared_names) - state.keys())
    if unknown:
        raise ValueError(f"the network has no entry {unknown[0]!r} ({len(unknown)} unknown names)")
    held = trainable_names(model, set(shared_names) - set(split(model).batch_norm))
    weights = {name: state[name] for name in held}
    if not weights:
        raise ValueError(
            f"proximal_mu is {mu}, but shared_names has no trainable entry outside of batch norm; "
            "name the shared entries, or set proximal_mu to 0"
        )
    fixed = []
    for name, weight in weights.items():
        source = weight if reference is None else reference.get(name)
        if source is None or source.shape != weight.shape:
            got = "no such entry" if source is None else f"shape {tuple(source.shape)}"
            raise ValueError(
                f"reference for the FedProx term: {got} for {name!r}, "
                f"expected shape {tuple(weight.shape)}"
            )
        fixed.append(source.detach().to(weight.device, weight.dtype, copy=True))
    return [_real(weight) for weight in weights.values()], [_real(one) for one in fixed]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _epoch_loss(batch_losses: list[torch.Tensor], sizes: list[int]) -> float:
    """Return the mean of the batches' losses, weighted by samples; the epoch's only wait."""
    values = torch.stack(batch_losses).tolist()
    return sum(loss * size for loss, size in zip(values, sizes, strict=True)) / sum(sizes)


def _check_finite(model: nn.Module, loss: float, epoch: int, settings: TrainingSettings) -> None:
    broken = f"the loss is {loss}" if not math.isfinite(loss) else None
    if broken is None:
        for name, tensor in unwrap_model(model).state_dict().items():
            if not bool(torch.isfinite(tensor).all()):
                broken = f"entry {name!r} has values that are not finite"
                break
    if broken is not None:
        raise FloatingPointError(
            f"training failed in local epoch {epoch + 1} of {settings.local_epochs}: {broken}; "
            f"lower learning_rate ({settings.learning_rate:g}) or look for outliers in the inputs"
        )
