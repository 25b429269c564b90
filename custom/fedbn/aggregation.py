"""Weighted mean of named tensors: exact, so that the order of arrival cannot be seen.

FedBN's server step (Algorithm 1, line 9; equal weights) and FedAvg's (McMahan et al., 2017, weights
by number of samples) are the same sum over sites; which entries take part is decided before, by
:mod:`fedbn.normalization`.

Floating-point addition is not associative: a plain running sum gives other bits when the hospitals
answer in another order. Here each entry is summed as an unevaluated sum of three float64 numbers
(Shewchuk's expansions with Knuth's error-free TwoSum), which is exact as long as the addends of one
element span less than about 100 binary orders of magnitude. It is then rounded once (Boldo and
Melquiond, 2008: rounding to odd), divided once, and rounded to the entry's own dtype. Memory is
three float64 numbers an element, however many sites contribute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from fedbn.normalization import StateMismatchError, check_entries

FloatArray = np.ndarray


class ContributionError(ValueError):
    """A contribution that must not enter the sum; the message is the reason."""


def validate_contribution(
    tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], weight: float
) -> None:
    """Check a contribution completely, before any of it is accumulated.

    Parameters
    ----------
    tensors
        What a site sent: names to tensors.
    expected
        Names, shapes and dtypes that must be met (values are not looked at).
    weight
        The site's weight: a finite number above zero.

    Raises
    ------
    ContributionError
        With the reason: a missing or unknown name, another shape or dtype, a value or weight that
        is not finite, a weight that is not above zero.
    """
    try:
        check_entries(tensors, expected, "its entries")
    except StateMismatchError as error:
        raise ContributionError(str(error)) from error
    for name, tensor in tensors.items():
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise ContributionError(
                f"entry {name!r} holds {bad} values of {tensor.numel()} that are not finite"
            )
    if not math.isfinite(weight) or weight <= 0:
        raise ContributionError(f"its weight is {weight}, expected a finite number above 0")


class WeightedMean:
    """Running weighted mean over sites; bits do not depend on the order of :meth:`add`.

    Parameters
    ----------
    expected
        Names to tensors whose shapes and dtypes a contribution must have.

    Examples
    --------
    >>> mean = WeightedMean({"w": torch.zeros(2)})
    >>> mean.add("NYU", {"w": torch.tensor([1.0, 2.0])}, weight=1)
    >>> mean.add("UM", {"w": torch.tensor([4.0, 2.0])}, weight=2)
    >>> mean.result()["w"].tolist()
    [3.0, 2.0]
    """

    def __init__(self, expected: Mapping[str, torch.Tensor]):
        for name, tensor in expected.items():
            if not tensor.is_floating_point():
                raise ContributionError(
                    f"entry {name!r} is {tensor.dtype}: only floats are averaged"
                )
        self.expected = dict(expected)
        self.reset()

    def reset(self) -> None:
        """Forget all contributions."""
        self.contributors: list[str] = []
        self._sums: dict[str, list[FloatArray]] = {}
        self._weights = [np.zeros(1), np.zeros(1), np.zeros(1)]

    def add(self, site: str, tensors: Mapping[str, torch.Tensor], weight: float = 1.0) -> None:
        """Validate one site's contribution, then accumulate it; on an error nothing is changed.

        Raises
        ------
        ContributionError
            As :func:`validate_contribution`, and if this site has contributed already.
        """
        if site in self.contributors:
            raise ContributionError("it has contributed to this round already")
        validate_contribution(tensors, self.expected, weight)
        for name, tensor in tensors.items():
            # Exact for float32 entries and whole-number weights below 2**29; otherwise one rounding
            # that depends on this contribution alone.
            product = tensor.detach().to("cpu", torch.float64).numpy() * float(weight)
            if name not in self._sums:
                self._sums[name] = [np.zeros_like(product) for _ in range(3)]
            _accumulate(self._sums[name], product)
        _accumulate(self._weights, np.array([float(weight)]))
        self.contributors.append(site)

    def result(self) -> dict[str, torch.Tensor]:
        """Return the mean of all contributions: sum of weight times tensor over sum of weights.

        Raises
        ------
        ContributionError
            If nobody has contributed.
        """
        if not self.contributors:
            raise ContributionError("no contribution was accepted")
        total = float(_rounded(self._weights)[0])
        return {
            name: torch.from_numpy(np.asarray(_rounded(self._sums[name]) / total)).to(tensor.dtype)
            for name, tensor in self.expected.items()
        }


def _two_sum(a: FloatArray, b: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return fl(a + b) and its exact rounding error (Knuth)."""
    total = a + b
    b_part = total - a
    return total, (a - (total - b_part)) + (b - b_part)


def _accumulate(limbs: list[FloatArray], addend: FloatArray) -> None:
    for index, limb in enumerate(limbs):
        limbs[index], addend = _two_sum(limb, addend)


def _rounded(limbs: list[FloatArray]) -> FloatArray:
    """Round the exact sum of three float64 arrays to float64, once (Boldo and Melquiond, 2008)."""
    high, middle, low = limbs
    upper, lower = _two_sum(middle, low)
    total, error = _two_sum(high, upper)
    tail, lost = _two_sum(error, lower)
    # Round to odd: where bits were lost and the last bit of the tail is even, step towards them.
    even = (np.atleast_1d(tail).view(np.int64) & 1).reshape(np.shape(tail)) == 0
    odd = np.nextafter(tail, np.copysign(np.inf, lost))
    return total + np.where((lost != 0) & even, odd, tail)
