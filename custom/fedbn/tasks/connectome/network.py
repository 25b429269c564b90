"""The classifier of connectomes, and the dropout that makes it fast on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fedbn.core.mlp import MLP

DROPOUT_RESOLUTION = 65536
"""Keep probabilities of :class:`PackedDropout` are multiples of one over this number."""

_FULL_INT64_RANGE = -(2**63)

_TABLES: dict[tuple[float, torch.dtype], torch.Tensor] = {}  # one for each probability in use


class PackedDropout(nn.Module):
    """Dropout whose masks are drawn as packed random bits: for wide inputs on a CPU.

    ``nn.Dropout`` draws one Bernoulli variable an element, one after the other. Here 64 elements
    share one random word, and a table of 256 x 8 numbers turns each byte of it into eight factors,
    0 or ``1 / (1 - p)``, so that masking and scaling are one multiplication.

    Each kept element is multiplied by ``1 / (1 - p)``, as in ``nn.Dropout``. In eval mode, or with
    ``p=0``, the input is returned as it is. On a device other than the CPU the stock function is
    called. Masks come from PyTorch's global CPU generator: ``torch.manual_seed`` repeats them,
    whatever the number of threads. They are not the masks that ``nn.Dropout`` would have drawn.

    Parameters
    ----------
    p : float
        Probability that an element is set to zero, ``0 <= p < 1``. Exact for multiples of 1/65536
        (so for all multiples of 1/256). Any other value is rounded to the nearest of them, by at
        most 8e-6; the scale belongs to the rounded value, so that the expectation is exact. The
        cost grows with the number of binary digits of ``p``: one random bit an element for 0.5,
        two for 0.25, sixteen for 0.1.

    Raises
    ------
    ValueError
        If ``p`` is outside of ``[0, 1)``.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p < 1:
            raise ValueError(f"dropout probability is {p!r}; it must be a number in [0, 1)")
        self.p = float(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` with a random subset of elements at zero and the rest scaled; same shape."""
        if not self.training or self.p == 0 or x.numel() == 0:
            return x
        if torch.jit.is_scripting():  # its compiler cannot take the masks of packed bits
            return nn.functional.dropout(x, self.p, training=True)
        else:  # noqa: RET505 - the compiler passes over this branch, and only over this form
            return self._masked(x)

    def _masked(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu":
            return nn.functional.dropout(x, self.p, training=True)
        if not x.is_floating_point():
            raise TypeError(f"dropout needs floating point input, got {x.dtype}")
        factors = _dropout_factors(x.shape, _keep_count(self.p), x.dtype)
        if x.requires_grad and torch.is_grad_enabled():
            return x * factors
        return factors.mul_(x)  # nothing to differentiate: the mask's memory becomes the output

    def extra_repr(self) -> str:
        """Return what ``print(module)`` shows between the parentheses."""
        return f"p={self.p}"


def _keep_count(p: float) -> int:
    """Return the keep probability in units of ``1 / DROPOUT_RESOLUTION``, at least one of them."""
    return max(1, round((1 - p) * DROPOUT_RESOLUTION))


def _dropout_factors(shape: torch.Size, keep_count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return independent factors, ``1 / keep`` with probability `keep` and else 0, in `shape`."""
    n = shape.numel()
    packed = _packed_bernoulli(-(-n // 64), keep_count)
    table = _byte_to_factors(DROPOUT_RESOLUTION / keep_count, dtype)
    factors = table.index_select(0, packed.view(torch.uint8).int())
    return factors.view(-1)[:n].view(shape)


def _packed_bernoulli(n_words: int, keep_count: int) -> torch.Tensor:
    """Return `n_words` int64 words, each of whose bits is 1 with ``keep_count / 65536``.

    The binary digits of the probability are read from the last one that is set up to the first:
    with ``q`` so far, OR with a fair bit gives ``(1 + q) / 2`` and AND gives ``q / 2``, which is
    the digit written in front of those already read.
    """
    if keep_count == DROPOUT_RESOLUTION:
        return torch.full((n_words,), -1, dtype=torch.int64)
    n_digits = DROPOUT_RESOLUTION.bit_length() - 1
    last_set = (keep_count & -keep_count).bit_length() - 1
    packed = _fair_bits(n_words)
    for digit in range(last_set + 1, n_digits):
        if keep_count >> digit & 1:
            packed |= _fair_bits(n_words)
        else:
            packed &= _fair_bits(n_words)
    return packed


def _fair_bits(n_words: int) -> torch.Tensor:
    """Return int64 words of 64 fair bits from the global generator (a sequential draw)."""
    return torch.empty(n_words, dtype=torch.int64).random_(_FULL_INT64_RANGE, None)


def _byte_to_factors(scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the (256, 8) table from the value of a byte to the factors of its eight elements."""
    table = _TABLES.get((scale, dtype))
    if table is None:
        with torch.inference_mode(False), torch.no_grad():
            bits = torch.arange(256, device="cpu")[:, None] >> torch.arange(8, device="cpu") & 1
            table = (bits.double() * scale).to(dtype)
        _TABLES[scale, dtype] = table
    return table


class ConnectomeMLP(MLP):
    """A perceptron over the edges of a connectome, with dropout that is fast for wide inputs.

    With the defaults this is the ABIDE reference's network; ``hidden=(16, 16)`` gives a 3-layer MLP
    with batch norm after each hidden layer, the form that the FedBN paper names. Parameters are
    those of :class:`fedbn.core.mlp.MLP`; 6105 edges are those of the 111 ROIs of the Harvard-Oxford
    atlas.
    """

    dropout_layer = PackedDropout

    def __init__(
        self,
        in_features: int = 6105,
        hidden: Sequence[int] = (16,),
        n_classes: int = 2,
        input_dropout: float = 0.5,
        dropout: float = 0.5,
    ):
        super().__init__(in_features, hidden, n_classes, input_dropout, dropout)
