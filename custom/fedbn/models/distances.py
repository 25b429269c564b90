"""How far samples are from the data that a site has trained on.

Every network with batch norm has the distance ``"batch_norm"``: the mean squared z-score of the
inputs of its first batch-norm layer, under that layer's running mean and variance. In training
those inputs had gone through dropout, so that without it a typical value is below 1. A task may
have further ones (:meth:`fedbn.tasks.bundling.Bundling.distances`).

A case is far away where a distance is above the outer fence of the training units' (Tukey,
*Exploratory Data Analysis*, 1977): the upper quartile plus three times the distance between the
quartiles. Quartiles are all that is kept of the training units' distances.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn.core.batches import Samples
from fedbn.tasks.base import Task
from fedbn.tasks.bundling import BATCH_NORM, bundling_of

FENCE = 3.0
_CHUNK = 512


def distances(task: Task, model: nn.Module, samples: Samples) -> dict[str, np.ndarray]:
    """Say how far each sample is from the site's training data.

    Parameters
    ----------
    task
        What the model has learned.
    model
        A wrapped network, in eval mode.
    samples
        With nothing fitted applied.

    Returns
    -------
    dict
        Name to float64 (n_samples,). ``"batch_norm"`` is missing where the network has no batch
        norm with running statistics, or takes a sample in pieces.
    """
    side, layer = bundling_of(task), first_batch_norm(model)
    seen: list[np.ndarray] = []
    of_batches: list[dict[str, np.ndarray]] = []

    def keep(module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(module, _BatchNorm)
        seen.append(_squared_distance(module, given[0]))

    handle = layer[1].register_forward_pre_hook(keep) if layer else None
    try:
        with torch.no_grad():
            for batch in samples.batches(_CHUNK):
                task.forward(model, batch)
                of_batches.append(side.distances(model, batch.inputs))
    finally:
        if handle is not None:
            handle.remove()
    found = {name: np.concatenate([one[name] for one in of_batches]) for name in of_batches[0]}
    if seen and sum(map(len, seen)) == len(samples):
        found[BATCH_NORM] = np.concatenate(seen)
    return {name: found[name] for name in side.distances_mean if name in found}


def first_batch_norm(model: nn.Module) -> tuple[str, _BatchNorm] | None:
    """Return the first batch-norm layer with running statistics and its name, if there is one."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            return name, module
    return None


def _squared_distance(layer: _BatchNorm, inputs: torch.Tensor) -> np.ndarray:
    """Return the mean squared z-score of each sample under a layer's running statistics, (n,)."""
    x = inputs.detach().double().cpu().flatten(2) if inputs.ndim > 2 else inputs.detach().double()
    assert layer.running_mean is not None
    assert layer.running_var is not None
    shape = (1, -1, *[1] * (x.ndim - 2))
    mean, variance = (t.double().view(shape) for t in (layer.running_mean, layer.running_var))
    distance: np.ndarray = ((x - mean) ** 2 / (variance + layer.eps)).flatten(1).mean(dim=1).numpy()
    return distance


def quartiles(values: np.ndarray) -> list[float]:
    """Return the quartiles of some units' distances: what is kept of them."""
    return [float(q) for q in np.quantile(np.asarray(values, dtype=np.float64), (0.25, 0.5, 0.75))]


def outer_fence(of_training: list[float]) -> float:
    """Return the distance above which a case is far away, from the training units' quartiles."""
    low, _, high = of_training
    return high + FENCE * (high - low)


def far_away(found: Mapping[str, float], reference: Mapping[str, list[float]] | None) -> list[str]:
    """Name the distances of a case that are above their fence; none without a reference."""
    return [
        name
        for name, value in found.items()
        if reference and name in reference and value > outer_fence(reference[name])
    ]
