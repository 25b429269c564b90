"""Which state-dict entries belong to batch norm: the heart of the method.

FedBN (Li et al., ICLR 2021, arXiv 2102.07623, Algorithm 1) averages every entry of the network
except those of its batch-norm layers. An entry belongs to batch norm because of the *type* of the
module that holds it, never because of its name: MONAI's DenseNet121 calls its batch-norm layers
``norm1`` and its UNet ``adn.N``.

Everything here is pure: nothing is changed in place but the model handed to :func:`load_entries` or
:func:`recompute_statistics` or :func:`recompute_in_batches`.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy

Policy = Literal["fedbn", "silobn", "none"]
POLICIES: tuple[str, ...] = get_args(Policy)

AVERAGED = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
"""What can be shared: each entry is averaged in float64 and rounded to its own dtype."""

_RUNNING = re.compile(r"(running|moving)_", re.IGNORECASE)
_MOMENT = re.compile(r"(mean|avg|average|var|variance|std)\d*$", re.IGNORECASE)

_NORMALIZATION_LAYERS: tuple[type[nn.Module], ...] = (
    _NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
)


class NoBatchNormError(ValueError):
    """The network has no batch norm that a site could keep, or one without statistics."""


class StateMismatchError(ValueError):
    """Entries do not fit the network: missing or unknown names, other shapes or dtypes."""


@dataclass(frozen=True)
class Partition:
    """The entries of one network, split between the site and the federation.

    Attributes
    ----------
    policy
        ``"fedbn"``: gamma, beta, running mean and variance, and the counter stay at the site.
        ``"silobn"``: statistics and counter stay; gamma and beta are shared (Andreux et al., 2020).
        ``"none"``: all floating state is shared, statistics too (FedAvg).
        Floating means any of :data:`AVERAGED`, an entry without elements included. Under every
        policy integer and boolean entries stay: an average of them means nothing.
    local, shared
        Names in state-dict order; together they are all of ``model.state_dict()``.
    layers
        Names of the batch-norm layers, as in ``named_modules()``.
    batch_norm
        Names of all entries that belong to batch norm, whatever the policy.
    statistics_like
        Names of shared entries that look like the running statistics of another module.
    """

    policy: Policy
    local: tuple[str, ...]
    shared: tuple[str, ...]
    layers: tuple[str, ...]
    batch_norm: tuple[str, ...]
    statistics_like: tuple[str, ...] = ()

    def warning(self) -> str | None:
        """Say which shared entries look as if they should stay, where some are to stay."""
        if self.policy == "none" or not self.statistics_like:
            return None
        return (
            f"{len(self.statistics_like)} shared entries look like running statistics of a layer "
            f"that is no batch norm of PyTorch's ({_some(list(self.statistics_like))}): if they "
            "shall stay at the site, name the layer's class in batch_norm_types"
        )

    def describe(self) -> str:
        """Say in one sentence what stays and what travels, for a log or a table's caption."""
        return (
            f"policy {self.policy!r}: {len(self.layers)} batch-norm layers, "
            f"{len(self.local)} entries stay at the site, {len(self.shared)} are shared"
        )


def unwrap_model(model: nn.Module) -> nn.Module:
    """Take every wrapper (data-parallel, compiled) off a model.

    A wrapper puts a prefix before each key (``module.``, ``_orig_mod.``), so it is taken off before
    any key is looked at.
    """
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):  # torch.compile
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def split(
    model: nn.Module,
    policy: Policy = "fedbn",
    *,
    types: Iterable[str] = (),
) -> Partition:
    """Partition ``model.state_dict()`` into local and shared entries, by module type.

    Parameters
    ----------
    model
        Any network, wrapped or not.
    policy
        See :class:`Partition`.
    types
        Dotted paths of further classes whose modules are treated as batch norm, for networks that
        bring their own: ``"package.module.Class"``. Instance norm is not batch norm unless named
        here. A class that no module of the network is of is never imported.

    Raises
    ------
    ValueError
        If the policy is unknown, no module is of a named type, a lazy layer has no shape yet, an
        entry is not a dense tensor or of a floating dtype that is not averaged, or the entries of a
        batch-norm layer cannot be found in the state dict.
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; choose one of {', '.join(POLICIES)}")
    model = unwrap_model(model)
    # remove_duplicate=False: a module that is used twice has its entries under both names.
    modules = dict(model.named_modules(remove_duplicate=False))
    known: tuple[type[nn.Module], ...] = (
        _BatchNorm,
        *(_find_type(path, modules.values()) for path in types),
    )
    layers = {name: module for name, module in modules.items() if isinstance(module, known)}
    entries = model.state_dict(keep_vars=True)
    _check_tensors(model, entries)
    batch_norm = _entries_of(layers, entries, type(model).__name__)

    local: list[str] = []
    shared: list[str] = []
    for name, tensor in entries.items():
        kept = name in batch_norm and (
            policy == "fedbn" or (policy == "silobn" and not isinstance(tensor, nn.Parameter))
        )
        (local if kept or tensor.dtype not in AVERAGED else shared).append(name)
    return Partition(
        policy=policy,
        local=tuple(local),
        shared=tuple(shared),
        layers=tuple(layers),
        batch_norm=tuple(name for name in entries if name in batch_norm),
        statistics_like=tuple(name for name in shared if _is_like_statistics(name, entries)),
    )


def _find_type(path: str, modules: Iterable[nn.Module]) -> type[nn.Module]:
    """Return the class of some of the modules; nothing is imported for it."""
    place, _, name = path.replace(":", ".").rpartition(".")
    found = getattr(sys.modules.get(place), name, None)
    kinds = {type(module) for module in modules}
    if not isinstance(found, type) or not any(issubclass(kind, found) for kind in kinds):
        there = sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
        raise ValueError(
            f"batch_norm_types names {path!r}, and no module of the network is of this class; "
            f"there are {', '.join(there)}"
        )
    return found


def _is_like_statistics(name: str, entries: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether a buffer is called running mean, or stands as a mean beside a gamma."""
    prefix, _, last = name.rpartition(".")
    if isinstance(entries[name], nn.Parameter) or not entries[name].ndim:
        return False
    beside = (
        other.shape == entries[name].shape
        for key, other in entries.items()
        if key.rpartition(".")[0] == prefix and isinstance(other, nn.Parameter)
    )
    return bool(_RUNNING.search(last) or (_MOMENT.search(last) and any(beside)))


def _check_tensors(model: nn.Module, entries: Mapping[str, object]) -> None:
    for name, tensor in entries.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"entry {name!r} of {type(model).__name__} is a {type(tensor).__name__}, "
                "not a tensor: such extra state cannot be federated"
            )
        if is_lazy(tensor):
            raise ValueError(
                f"entry {name!r} of {type(model).__name__} has no shape yet; "
                "give its layer the sizes where the network is built (BatchNorm1d(64) in place of "
                "LazyBatchNorm1d()): server and sites compare the entries before any batch is seen"
            )
        floating = tensor.is_floating_point() or tensor.is_complex()
        if tensor.layout != torch.strided or (floating and tensor.dtype not in AVERAGED):
            kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
            raise ValueError(
                f"entry {name!r} of {type(model).__name__} is {kind}; an entry to be federated is "
                f"dense, of integers, booleans or {', '.join(_name(dtype) for dtype in AVERAGED)}"
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _entries_of(
    layers: Mapping[str, nn.Module], entries: Mapping[str, torch.Tensor], network: str
) -> set[str]:
    """Return the names of all entries that hold a tensor of one of the layers.

    A tensor is looked for under its layer's name and by its memory: it can stand a second time
    under a name outside of the layer, and a wrapper inside the network (activation checkpointing)
    can name modules and entries differently.
    """
    by_memory: dict[int, list[str]] = {}
    for name, tensor in entries.items():
        by_memory.setdefault(_memory(tensor), []).append(name)
    found: set[str] = set()
    for layer, module in layers.items():
        prefix = f"{layer}." if layer else ""
        of_layer = {name for name in entries if name.startswith(prefix)}
        own = [_memory(tensor) for tensor in module.state_dict(keep_vars=True).values()]
        own += [_memory(entries[name]) for name in of_layer]
        of_layer.update(name for memory in own for name in by_memory.get(memory, ()))
        if own and not of_layer:
            raise ValueError(
                f"the state dict of {network} has no entry of its batch-norm layer {layer!r}; "
                "take the wrapper that renames or gathers its entries off before it is federated"
            )
        found |= of_layer
    return found


def _memory(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() or id(tensor)  # no address: an empty tensor, or one on "meta"


def affine_names(network: nn.Module, partition: Partition) -> tuple[str, ...]:
    """Return the names of gamma and beta that stay at a site: trained, of batch norm, and local."""
    state = network.state_dict(keep_vars=True)
    local = set(partition.local)
    return tuple(
        name
        for name in partition.batch_norm
        if name in local and isinstance(state[name], nn.Parameter)
    )


def statistics_names(network: nn.Module, partition: Partition) -> tuple[str, ...]:
    """Return the names of the running means and variances that stay at a site."""
    state = network.state_dict()
    affine = set(affine_names(network, partition))
    return tuple(
        name
        for name in partition.batch_norm
        if name in partition.local and name not in affine and state[name].is_floating_point()
    )


def require_batch_norm(model: nn.Module, partition: Partition) -> None:
    """Refuse a network without batch norm, and one with nothing else to share.

    Under policy ``"none"`` (FedAvg) a network without batch norm is welcome. Batch norm without
    running statistics is refused under every policy: it scores each unit by those that happen to
    share its batch.

    Raises
    ------
    NoBatchNormError
        Naming the network, the normalisation layers that it has, and how to get batch norm.
    """
    name = type(unwrap_model(model)).__name__
    modules = dict(unwrap_model(model).named_modules())
    for layer, module in modules.items():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise NoBatchNormError(
                f"batch-norm layer {layer!r} of network {name} keeps no running statistics, so "
                "that a unit's score depends on the others in its batch; build it with "
                "track_running_stats=True"
            )
    if partition.policy != "none" and not set(partition.local) & set(partition.batch_norm):
        counts = Counter(
            type(module).__name__
            for module in modules.values()
            if isinstance(module, _NORMALIZATION_LAYERS)
        )
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        raise NoBatchNormError(
            f"network {name} has no batch-norm layer{' with entries' if partition.layers else ''} "
            f"(normalisation layers found: "
            f"{found or 'none'}), so policy {partition.policy!r} would be plain FedAvg; build it "
            "with batch norm (norm='batch' for most MONAI networks) or choose policy 'none'"
        )
    if not partition.shared:
        raise NoBatchNormError(
            f"network {name} consists of batch norm alone: policy {partition.policy!r} "
            "leaves nothing to share"
        )


def entries(model: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Copy the named entries out of a model, on the CPU.

    Copies, because ``state_dict()`` hands out the live tensors: what was saved or sent must not
    change with the next training step.
    """
    state = unwrap_model(model).state_dict()
    copies = {name: state[name].detach().to("cpu", copy=True) for name in names}
    return {name: copy.resolve_conj().resolve_neg().contiguous() for name, copy in copies.items()}


def bits(tensor: torch.Tensor) -> bytes:
    """Return a tensor's values as they lie in memory, row by row: of any dtype, and of none."""
    values = tensor.detach().to("cpu").contiguous().reshape(-1)
    # Without elements a tensor can have strides that allow no view.
    return values.view(torch.uint8).numpy().tobytes() if values.numel() else b""


def trainable_names(model: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of the named entries that are trained, in state-dict order; a tied weight once.

    Parameters
    ----------
    model
        The network; wrapped or not.
    names
        Names of entries of its state dict.
    """
    wanted, seen, found = set(names), set(), []
    for name, tensor in unwrap_model(model).state_dict(keep_vars=True).items():
        if name in wanted and tensor.requires_grad and id(tensor) not in seen:
            seen.add(id(tensor))
            found.append(name)
    return tuple(found)


def check_entries(
    given: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], what: str
) -> None:
    """Compare names, shapes and dtypes; raise one sentence with the difference of both sides.

    Raises
    ------
    StateMismatchError
        Naming up to three missing and three unknown entries, or the first wrong shape or dtype.
    """
    missing = [name for name in expected if name not in given]
    unknown = [name for name in given if name not in expected]
    if missing or unknown:
        parts = []
        if missing:
            parts.append(f"{len(missing)} missing ({_some(missing)})")
        if unknown:
            parts.append(f"{len(unknown)} unknown ({_some(unknown)})")
        raise StateMismatchError(f"{what} do not fit the network: {', '.join(parts)}")
    for name, tensor in expected.items():
        other = given[name]
        if not isinstance(other, torch.Tensor):
            raise StateMismatchError(
                f"{what} do not fit the network: entry {name!r} is a {type(other).__name__}, "
                "expected a tensor"
            )
        if other.shape != tensor.shape or other.dtype != tensor.dtype:
            raise StateMismatchError(
                f"{what} do not fit the network: entry {name!r} is "
                f"{tuple(other.shape)} {other.dtype}, expected {tuple(tensor.shape)} {tensor.dtype}"
            )


def load_entries(model: nn.Module, *parts: Mapping[str, torch.Tensor]) -> None:
    """Load shared and local entries, which together must be the whole state of the model.

    Parameters
    ----------
    model
        The network; wrapped or not. Values are copied into its own tensors, on its own device.
    parts
        Mappings from names to tensors, disjoint, whose union is ``model.state_dict()``.

    Raises
    ------
    StateMismatchError
        If a name is missing, unknown or given twice, or a shape or dtype differs.
    """
    model = unwrap_model(model)
    joined: dict[str, torch.Tensor] = {}
    for part in parts:
        twice = [name for name in part if name in joined]
        if twice:
            raise StateMismatchError(f"entries given twice: {_some(twice)}")
        joined.update(part)
    check_entries(joined, model.state_dict(), "the entries")
    model.load_state_dict(joined, strict=True)


def recompute_statistics(model: nn.Module, inputs: torch.Tensor, names: Iterable[str] = ()) -> None:
    """Replace batch norm's running statistics by those of some unlabelled samples.

    Adaptive batch normalisation (Li et al., 2016, arXiv 1603.04779): weights, gamma and beta stay.
    The samples go through the network once, as one batch, so that the statistics are exact, with
    dropout off, as they will be used. A layer below normalises with its own new statistics.

    Parameters
    ----------
    model
        The network; its statistics change in place, and each module is left in its mode.
    inputs
        At least two samples, (n, ...), on the network's device.
    names
        Of the layers, as :attr:`Partition.layers`; by default PyTorch's own batch norm.

    Raises
    ------
    ValueError
        If there are fewer than two samples.
    NoBatchNormError
        If no layer has running statistics, or one is none of PyTorch's.
    """
    if len(inputs) < 2:
        raise ValueError(f"statistics need at least two samples, got {len(inputs)}")
    with _normalising_by_batch(model, names) as layers, torch.no_grad():
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # a cumulative mean: of one batch, the batch's own statistics
        model(inputs)


def recompute_in_batches(
    model: nn.Module,
    batches: Iterable[Any],
    forward: Callable[[nn.Module, Any], Any],
    names: Iterable[str] = (),
) -> None:
    """Replace batch norm's running statistics by those of samples that come in batches.

    PreciseBN (Wu and Johnson, 2021, arXiv 2105.07576, section 3): the mean and variance over all
    values that reach a layer, each batch normalised by its own statistics, dropout off. Batches are
    joined by their counts in float64 (Chan et al., 1983), so that their sizes do not matter.

    Parameters
    ----------
    model
        The network; its statistics change in place, and each module is left in its mode.
    batches
        At least one, none of a single value a channel.
    forward
        Gives a batch to the network.
    names
        Of the layers, as :attr:`Partition.layers`; by default PyTorch's own batch norm.

    Raises
    ------
    ValueError
        If there is no batch.
    NoBatchNormError
        If no layer has running statistics, or one is none of PyTorch's.
    """
    found: dict[nn.Module, tuple[float, torch.Tensor, torch.Tensor]] = {}

    def look(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        values = inputs[0].detach().double().transpose(0, 1).flatten(1)
        count, mean = float(values.shape[1]), values.mean(dim=1)
        squares = (values - mean[:, None]).square().sum(dim=1)
        if layer in found:
            n, old, sums = found[layer]
            step = mean - old
            squares = sums + squares + step.square() * (n * count / (n + count))
            mean, count = old + step * (count / (n + count)), n + count
        found[layer] = count, mean, squares

    with _normalising_by_batch(model, names) as layers, torch.no_grad():
        hooks = [layer.register_forward_pre_hook(look) for layer in layers]
        try:
            for layer in layers:
                layer.momentum = 0.0  # the old statistics stay until all batches are seen
            for batch in batches:
                forward(model, batch)
        finally:
            for hook in hooks:
                hook.remove()
        if not found:
            raise ValueError("statistics need at least one batch")
        for layer in filter(found.__contains__, layers):
            count, mean, squares = found[layer]
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(squares / max(count - 1, 1))


def recomputable(model: nn.Module, names: Iterable[str] = ()) -> list[_BatchNorm]:
    """Return the layers whose running statistics can be recomputed.

    Parameters
    ----------
    model
        The network.
    names
        Of its batch-norm layers, as :attr:`Partition.layers`; by default PyTorch's own.

    Raises
    ------
    NoBatchNormError
        If there are none, or one of the named is none of PyTorch's.
    """
    modules = dict(model.named_modules())
    for name in names:
        if not isinstance(modules[name], _BatchNorm):
            raise NoBatchNormError(
                f"layer {name!r} is a {type(modules[name]).__name__}, which is none of PyTorch's "
                "batch norms: its statistics cannot be recomputed"
            )
    layers = [
        module
        for module in modules.values()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    ]
    if not layers:
        raise NoBatchNormError("the network has no batch norm whose statistics could be recomputed")
    return layers


@contextlib.contextmanager
def _normalising_by_batch(model: nn.Module, names: Iterable[str]) -> Iterator[list[_BatchNorm]]:
    """Put all of a network into eval mode but its batch norm, and everything back afterwards."""
    layers = recomputable(model, names)
    modes = {module: module.training for module in model.modules()}
    momenta = [layer.momentum for layer in layers]
    try:
        model.eval()
        for layer in layers:
            layer.training = True
        yield layers
    finally:
        for module, mode in modes.items():
            module.training = mode
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown}, …"
