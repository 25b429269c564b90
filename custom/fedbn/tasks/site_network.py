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
        """Return the network's output, float32, for raw samples (n, n_features) float32."""
        output: torch.Tensor = self.network((x - self.mean) / self.std)
        return output.float()


class TableNetwork(SiteNetwork):
    """The same for rows of a table, whose missing cells are NaN.

    A feature with a standard deviation of 0 is 0.

    Attributes
    ----------
    fill : torch.Tensor
        Buffer, float32, (n_features,): what stands for a missing cell.
    """

    if TYPE_CHECKING:
        fill: torch.Tensor

    def __init__(self, network: nn.Module, n_features: int):
        super().__init__(network, n_features)
        self.register_buffer("fill", torch.zeros(n_features))

    def standardize(self, x: torch.Tensor) -> torch.Tensor:
        """Return z-scores of raw rows, missing cells filled, same shape."""
        return standardized_rows(x, self.fill, self.mean, self.std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the network's output, float32, for raw rows, NaN where a cell is missing."""
        output: torch.Tensor = self.network(standardized_rows(x, self.fill, self.mean, self.std))
        return output.float()


def standardized_rows(
    x: torch.Tensor, fill: torch.Tensor, mean: torch.Tensor, std: torch.Tensor
) -> torch.Tensor:
    """Fill missing cells (NaN) and z-score; a feature with a standard deviation of 0 is 0.

    All float32: `x` is (n, n_features), the others (n_features,).
    """
    z = (torch.where(torch.isnan(x), fill, x) - mean) / std
    return torch.where(std > 0, z, torch.zeros_like(z))
