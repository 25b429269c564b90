"""A multilayer perceptron with batch norm after each hidden layer."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn


class MLP(nn.Module):
    """Multilayer perceptron with batch norm.

    Dropout on the input, then for each hidden layer Linear, ReLU, BatchNorm1d, dropout, and a last
    Linear layer to the classes.

    Parameters
    ----------
    in_features : int
        Number of features of a sample.
    hidden : tuple or list of int
        Width of each hidden layer; at least one, as batch norm follows each of them.
    n_classes : int
        Number of classes, at least two.
    input_dropout : float
        Probability of dropout on the input, in ``[0, 1)``.
    dropout : float
        Probability of dropout after each hidden layer, in ``[0, 1)``.

    Raises
    ------
    ValueError
        If a width is not a positive integer, or a probability is outside of its range.
    """

    dropout_layer: type[nn.Module] = nn.Dropout

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int] = (16,),
        n_classes: int = 2,
        input_dropout: float = 0.0,
        dropout: float = 0.0,
    ):
        super().__init__()
        if not isinstance(hidden, list | tuple) or not hidden:
            raise ValueError(f"hidden is {hidden!r}; it must list the width of one layer or more")
        _check_width("in_features", in_features)
        for width in hidden:
            _check_width("each width in hidden", width)
        _check_width("n_classes", n_classes, smallest=2)
        self.kind = type(self).__name__
        self.in_features = in_features
        self.input_dropout = self.dropout_layer(input_dropout)
        widths = (in_features, *hidden)
        self.hidden = nn.Sequential(
            *(
                self._block(fan_in, fan_out, dropout)
                for fan_in, fan_out in itertools.pairwise(widths)
            )
        )
        self.classifier = nn.Linear(widths[-1], n_classes)

    def _block(self, fan_in: int, fan_out: int, dropout: float) -> nn.Sequential:
        return nn.Sequential(
            OrderedDict[str, nn.Module](
                linear=nn.Linear(fan_in, fan_out),
                activation=nn.ReLU(),
                norm=nn.BatchNorm1d(fan_out),
                dropout=self.dropout_layer(dropout),
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (n, n_classes) for `x` of shape (n, in_features), float32."""
        if x.ndim != 2 or x.shape[1] != self.in_features:
            raise ValueError(
                f"{self.kind} takes input of shape (n, {self.in_features}), got {list(x.shape)}"
            )
        logits: torch.Tensor = self.classifier(self.hidden(self.input_dropout(x)))
        return logits


def _check_width(name: str, value: object, smallest: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {smallest}")
