"""A network behind the standardisation of one site: raw samples in, so that nobody forgets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn


class SiteNetwork(nn.Module):
    """A network behind the standardisation of the site whose batch norm it holds.

    Parameters
    ----------
    network : torch.nn.Module
        Takes standardised features (n, n_features).
    n_features : int
        Features of a sample.

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
        """Return z-scores of raw samples, same shape."""
        return (x - self.mean) / self.std

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the network's output for raw samples (n, n_features) float32."""
        output: torch.Tensor = self.network((x - self.mean) / self.std)
        return output


class TableNetwork(SiteNetwork):
    """A network behind a site's rule for missing cells, and its standardisation.

    Attributes
    ----------
    fill : torch.Tensor
        Buffer, float32, (n_features,): what stands for a missing feature (NaN).

    Notes
    -----
    A feature whose `std` is 0 is 0 for every sample.
    """

    if TYPE_CHECKING:
        fill: torch.Tensor

    def __init__(self, network: nn.Module, n_features: int):
        super().__init__(network, n_features)
        self.register_buffer("fill", torch.zeros(n_features))

    def standardize(self, x: torch.Tensor) -> torch.Tensor:
        """Return filled z-scores of rows with NaN for missing features, same shape."""
        return standardized_rows(x, self.fill, self.mean, self.std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the network's output for rows (n, n_features) float32, NaN where missing."""
        output: torch.Tensor = self.network(standardized_rows(x, self.fill, self.mean, self.std))
        return output


def standardized_rows(
    x: torch.Tensor, fill: torch.Tensor, mean: torch.Tensor, std: torch.Tensor
) -> torch.Tensor:
    """Fill missing features (NaN) and z-score; where `std` is 0 a feature is 0.

    All float32: `x` (n, n_features), the others (n_features,).
    """
    filled = torch.where(torch.isnan(x), fill, x)
    return torch.where(std > 0, (filled - mean) / std, torch.zeros_like(filled))
