"""One site's complete network, from raw connectomes to logits, and how far a scan is from its data.

Standardisation is a layer of it, so that nobody has to remember it beside the weights. Three
distances say whether a scan resembles what the site has trained on:

- ``"features"``: the mean squared z-score of the connectome's edges, under the site's mean and
  standard deviation (over all training samples it is 1);
- ``"batch_norm"``: that of the inputs of the first batch-norm layer, under its running mean and
  variance: what the site's batch norm has seen. In training those inputs had gone through dropout,
  so that without it a typical value is below 1;
- ``"pattern"``: 1 minus Pearson's correlation of the connectome with the site's mean connectome,
  0 to 2. Regions in another order show here, and may not show in the other two.

A scan is far away where a distance is above the outer fence of the training subjects' (Tukey,
*Exploratory Data Analysis*, 1977): the upper quartile plus three times the distance between the
quartiles. Quartiles are all that is kept of the training subjects' distances.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn.core.batches import TensorSamples
from fedbn.tasks.classification import predict

NOTICE = "Research software, not a medical device: no diagnosis or treatment may rest on it."
DISTANCES = ("features", "batch_norm", "pattern")
FENCE = 3.0
_CHUNK = 512


class SiteNetwork(nn.Module):
    """A network behind the standardisation of the site whose batch norm it holds.

    Parameters
    ----------
    network : torch.nn.Module
        Takes standardised features (n, n_features).
    n_features : int
        Number of edges of a connectome.

    Attributes
    ----------
    mean, std : torch.Tensor
        Buffers, float32, (n_features,): zeros and ones until a state dict is loaded.
    """

    if TYPE_CHECKING:  # TorchScript cannot take these, nor a method's, as they are in this file
        mean: torch.Tensor
        std: torch.Tensor

    def __init__(self, network: nn.Module, n_features: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(n_features))
        self.register_buffer("std", torch.ones(n_features))
        self.network = network

    def standardize(self, x: torch.Tensor) -> torch.Tensor:
        """Return z-scores of raw connectomes, same shape."""
        return (x - self.mean) / self.std

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (n, 2), control and autism, of raw connectomes (n, n_features) float32."""
        logits: torch.Tensor = self.network((x - self.mean) / self.std)
        return logits


def probabilities_and_distances(
    model: SiteNetwork, connectomes: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Score windows, and say how far each is from the site's data.

    Parameters
    ----------
    model
        In whatever mode; scored in eval mode.
    connectomes
        float32, (n_windows, n_features), raw; may be mapped from disk.

    Returns
    -------
    probability : numpy.ndarray
        float64, (n_windows, 2).
    distances : dict
        Each of :data:`DISTANCES` to float64 (n_windows,); ``"batch_norm"`` is missing where the
        network has no batch norm with running statistics, ``"pattern"`` where features are not
        standardised, so that there is no mean connectome.
    """
    layer = first_batch_norm(model)
    pattern = model.mean.double() - model.mean.double().mean()
    probability, features, inputs, unlike = [], [], [], []

    def keep(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        inputs.append(_squared_distance(layer[1], given[0]))  # type: ignore[index]

    handle = layer[1].register_forward_pre_hook(keep) if layer else None
    try:
        for start in range(0, len(connectomes), _CHUNK):
            # A copy: PyTorch warns of arrays that are mapped read-only.
            rows = torch.from_numpy(np.array(connectomes[start : start + _CHUNK], np.float32))
            owners = np.zeros(len(rows), dtype=np.int64)
            samples = TensorSamples(rows, torch.zeros(len(rows), dtype=torch.int64), owners)
            probability.append(predict(model, samples)[0])
            z = model.standardize(rows).double()
            features.append((z**2).mean(dim=1).numpy())
            # A connectome without any variation has no pattern: its correlation counts as 0.
            centred = rows.double() - rows.double().mean(dim=1, keepdim=True)
            unlike.append(1 - torch.cosine_similarity(centred, pattern[None]).numpy())
    finally:
        if handle is not None:
            handle.remove()
    distances = {"features": np.concatenate(features)}
    if layer is not None:
        distances["batch_norm"] = np.concatenate(inputs)
    if bool(pattern.any()):
        distances["pattern"] = np.concatenate(unlike)
    return np.concatenate(probability), distances


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
    """Return the quartiles of some subjects' distances: what is kept of them."""
    return [float(q) for q in np.quantile(np.asarray(values, dtype=np.float64), (0.25, 0.5, 0.75))]


def outer_fence(of_training: list[float]) -> float:
    """Return the distance above which a scan is far away, from the training subjects' quartiles."""
    low, _, high = of_training
    return high + FENCE * (high - low)


def far_away(
    distances: Mapping[str, float], reference: Mapping[str, list[float]] | None
) -> list[str]:
    """Name the distances of a subject that are above their fence; none without a reference."""
    return [
        name
        for name, value in distances.items()
        if reference and name in reference and value > outer_fence(reference[name])
    ]
