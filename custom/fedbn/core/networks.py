"""Any network by name: the one description of a network in a job becomes a module.

Nothing here knows of federation, and MONAI is imported only when one of its networks is asked for.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

OWN_NETWORKS = {
    "ConnectomeMLP": "fedbn.tasks.connectome.network.ConnectomeMLP",
    "MLP": "fedbn.core.mlp.MLP",
    "DigitModel": "fedbn.core.paper_networks.DigitModel",
    "AlexNetBN": "fedbn.core.paper_networks.AlexNetBN",
    "SmallDigitCNN": "fedbn.core.paper_networks.SmallDigitCNN",
}
"""Short names of this package's networks, to their classes."""


_DOWNLOADS = re.compile(r"pretrain|download|repo_id|(^|_)url(_|$)")
_FILES = re.compile(r"^(weights|checkpoint|ckpt)(_path|_file)?$")
"""Arguments that bring weights from elsewhere where they are set; the second kind by a name."""


class NoHeadError(ValueError):
    """The network has no linear layer that could be called its head."""


def head_entries(network: nn.Module) -> tuple[str, ...]:
    """Return the names of the entries of a network's last linear layer.

    Raises
    ------
    NoHeadError
        If there is none.
    """
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise NoHeadError(
            f"network {type(network).__name__} has no linear layer that is its head; "
            "fine-tune all entries"
        )
    prefix = f"{linear[-1]}." if linear[-1] else ""
    return tuple(name for name in network.state_dict() if name.startswith(prefix))


def check_allowed(name: str, allowed: Collection[str]) -> None:
    """Refuse a network that is neither MONAI's nor this package's, nor in a list.

    Parameters
    ----------
    name : str
        As a job names it.
    allowed : collection of str
        Dotted paths of classes that may be built besides.

    Raises
    ------
    ValueError
        If it may not be built.
    """
    known = {*OWN_NETWORKS.values(), *(path.replace(":", ".") for path in allowed)}
    if ("." in name or ":" in name) and name.replace(":", ".") not in known:
        raise ValueError(
            f"network {name!r} is a class that is not allowed here: a job names a network of "
            f"monai.networks.nets or one of {', '.join(OWN_NETWORKS)}, and any other class must be "
            "listed under allow_networks in this installation's own local/fedbn_site.yml (for "
            "FLARE's simulator in the environment variable FEDBN_ALLOW_NETWORKS)"
        )


def build_network(
    name: str, args: Mapping[str, Any] | None = None, seed: int | None = None
) -> nn.Module:
    """Build a network from its description in a job.

    Parameters
    ----------
    name : str
        one of :data:`OWN_NETWORKS`; or the name of a network in ``monai.networks.nets``
        (``"DenseNet121"``, ``"resnet18"``); or the dotted path of the researcher's own, as
        ``"package.module.Class"`` or ``"package.module:Class"``.
    args : mapping, optional
        Keyword arguments of the network.
    seed : int, optional
        Seed of the initial weights. The global random state is then left as it was. Without a seed
        the weights are drawn from the global generator.

    Returns
    -------
    torch.nn.Module
        On the CPU, in training mode.

    Raises
    ------
    ValueError
        If there is no such network (the sentence lists names that are close), if it does not take
        these arguments, or if they would bring weights from elsewhere.
    """
    factory = _find_factory(name)
    args = dict(args or {})
    _check_arguments(name, factory, args)
    if seed is None:
        return _call_factory(name, factory, args)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return _call_factory(name, factory, args)


def _find_factory(name: str) -> Callable[..., Any]:
    """Return the class or function that builds the network `name`."""
    name = OWN_NETWORKS.get(name, name)
    if ":" in name or "." in name:
        return _import_factory(name)
    known = _monai_networks()
    if name in known:
        return known[name]
    # MONAI has most classes under several spellings; the one with most capitals sorts first.
    by_folded_name = {key.lower(): key for key in sorted((*known, *OWN_NETWORKS))[::-1]}
    matches = difflib.get_close_matches(name.lower(), by_folded_name, n=5, cutoff=0.6)
    hint = ", ".join(by_folded_name[match] for match in matches)
    raise ValueError(
        f"unknown network {name!r}; "
        + (f"close names: {hint}" if hint else "there is no close name")
        + f" ({', '.join(OWN_NETWORKS)}, a network of monai.networks.nets, or a path "
        "'package.module.Class')"
    )


def _monai_networks() -> dict[str, Callable[..., Any]]:
    """Return MONAI's network classes, and its functions that build one (``resnet18``), by name."""
    nets = importlib.import_module("monai.networks.nets")
    return {
        name: value
        for name, value in vars(nets).items()
        if not name.startswith("_")
        and "pretrained" not in name
        and (
            (inspect.isclass(value) and issubclass(value, nn.Module))
            or (inspect.isfunction(value) and value.__module__.startswith(nets.__name__))
        )
    }


def _import_factory(path: str) -> Callable[..., Any]:
    """Return the class at a dotted path, refusing what is not a network."""
    module_name, _, attribute = path.rpartition(":" if ":" in path else ".")
    try:
        if not module_name or not attribute:
            raise ImportError("it names no module")
        module = importlib.import_module(module_name)
    except (ImportError, TypeError, ValueError) as error:
        raise ValueError(f"network {path!r} cannot be imported: {error}") from error
    if not hasattr(module, attribute):
        matches = difflib.get_close_matches(attribute, dir(module), n=5)
        hint = f"; close names: {', '.join(matches)}" if matches else ""
        raise ValueError(f"module {module_name!r} has no network {attribute!r}{hint}")
    factory = getattr(module, attribute)
    if not (inspect.isclass(factory) and issubclass(factory, nn.Module)):
        raise ValueError(f"{path!r} is not a network: it must be a subclass of torch.nn.Module")
    return factory


def _check_arguments(name: str, factory: Callable[..., Any], args: Mapping[str, Any]) -> None:
    signature = inspect.signature(factory)
    try:
        signature.bind(**args)
    except TypeError as error:
        allowed = ", ".join(signature.parameters)
        raise ValueError(f"network {name!r}: {error}; its arguments are {allowed}") from error
    defaults = {key: one.default for key, one in signature.parameters.items()}
    for key, value in {**defaults, **args}.items():
        given = value not in (None, False, "", inspect.Parameter.empty)
        if given and (_DOWNLOADS.search(key) or (_FILES.search(key) and isinstance(value, str))):
            raise ValueError(
                f"network {name!r}: its argument {key} is {value!r}"
                f"{'' if key in args else ' where it is not given'}, which brings weights from "
                "elsewhere; switch it off (false or null): a job's weights begin from its seed"
            )


def _call_factory(name: str, factory: Callable[..., Any], args: Mapping[str, Any]) -> nn.Module:
    try:
        network = factory(**args)
    except Exception as error:
        raise ValueError(
            f"network {name!r} cannot be built with the arguments {dict(args)!r}: {error}"
        ) from error
    if not isinstance(network, nn.Module):
        raise ValueError(f"{name!r} builds {type(network).__name__}, which is not a network")
    return network
