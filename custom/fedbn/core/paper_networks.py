"""The convolutional networks of the FedBN paper (Li et al., 2021), and a small one for a CPU.

Layers and widths are those of the paper's experiments on digits and on office objects; batch norm
follows each layer but the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn


def _convolution(
    fan_in: int,
    fan_out: int,
    kernel: int,
    padding: int,
    stride: int = 1,
    pool: nn.Module | None = None,
) -> list[nn.Module]:
    """Return convolution, batch norm, ReLU, and a pooling layer if one is given."""
    layers = [
        nn.Conv2d(fan_in, fan_out, kernel, stride, padding),
        nn.BatchNorm2d(fan_out),
        nn.ReLU(inplace=True),
    ]
    return layers if pool is None else [*layers, pool]


def _linear(fan_in: int, fan_out: int) -> list[nn.Module]:
    return [nn.Linear(fan_in, fan_out), nn.BatchNorm1d(fan_out), nn.ReLU(inplace=True)]


class _ImageClassifier(nn.Module):
    """Features of an image, flattened, then a classifier."""

    def __init__(self, features: Sequence[nn.Module], classifier: Sequence[nn.Module]):
        super().__init__()
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(*classifier)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (n, n_classes) for images `x` of shape (n, channels, h, w)."""
        logits: torch.Tensor = self.classifier(torch.flatten(self.features(x), 1))
        return logits


class DigitModel(_ImageClassifier):
    """The paper's network for images of 28 x 28: 14.2 million parameters, 5 batch norms.

    Parameters
    ----------
    n_classes : int
    in_channels : int
    """

    def __init__(self, n_classes: int = 10, in_channels: int = 3):
        super().__init__(
            [
                *_convolution(in_channels, 64, 5, 2, pool=nn.MaxPool2d(2)),
                *_convolution(64, 64, 5, 2, pool=nn.MaxPool2d(2)),
                *_convolution(64, 128, 5, 2),
            ],
            [*_linear(128 * 7 * 7, 2048), *_linear(2048, 512), nn.Linear(512, n_classes)],
        )


class AlexNetBN(_ImageClassifier):
    """The paper's AlexNet with batch norm: 57.1 million parameters, 7 batch norms.

    Parameters
    ----------
    n_classes : int
    in_channels : int
        Images of 63 x 63 or more; the paper's have 256 x 256.
    """

    def __init__(self, n_classes: int = 10, in_channels: int = 3):
        super().__init__(
            [
                *_convolution(in_channels, 64, 11, 2, stride=4, pool=nn.MaxPool2d(3, 2)),
                *_convolution(64, 192, 5, 2, pool=nn.MaxPool2d(3, 2)),
                *_convolution(192, 384, 3, 1),
                *_convolution(384, 256, 3, 1),
                *_convolution(256, 256, 3, 1, pool=nn.MaxPool2d(3, 2)),
                nn.AdaptiveAvgPool2d(6),
            ],
            [*_linear(256 * 6 * 6, 4096), *_linear(4096, 4096), nn.Linear(4096, n_classes)],
        )


class SmallDigitCNN(_ImageClassifier):
    """Three convolutions with batch norm, then one linear layer: for experiments on a CPU.

    Parameters
    ----------
    n_classes : int
    in_channels : int
        Images of 8 x 8 or more, of any size.
    channels : list of int
        Width of each convolution.
    """

    def __init__(
        self, n_classes: int = 10, in_channels: int = 3, channels: Sequence[int] = (16, 32, 64)
    ):
        widths = (in_channels, *channels)
        blocks = (
            _convolution(fan_in, fan_out, 5, 2, pool=nn.MaxPool2d(2))
            for fan_in, fan_out in itertools.pairwise(widths)
        )
        super().__init__(
            [*(layer for block in blocks for layer in block), nn.AdaptiveAvgPool2d(3)],
            [nn.Linear(widths[-1] * 3 * 3, n_classes)],
        )
