"""Weighted mean of named tensors: exact, so that the order of arrival cannot be seen.

FedBN's server step (Algorithm 1, line 9; equal weights) and FedAvg's (McMahan et al., 2017, weights
by number of samples) are the same sum over sites; which entries take part is decided before, by
:mod:`fedbn.core.normalization`.

Floating-point addition is not associative: a plain running sum gives other bits when the hospitals
answer in another order. Here each entry is held as an unevaluated, exact sum of float64 numbers
(Shewchuk's expansions with Knuth's error-free TwoSum). At the end it is rounded once (Boldo and
Melquiond, 2008: rounding to odd), divided once, and rounded to the entry's own dtype. Memory does
not grow with the number of sites: one to three float64 numbers an element suffice while the addends
of one element span less than about 100 binary orders of magnitude, and one more is taken for each
further 50 orders that they span.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from fedbn.core.normalization import AVERAGED, StateMismatchError, check_entries

FloatArray = np.ndarray

WEIGHT_RANGE = (2.0**-100, 2.0**100)
"""Weights outside of it could push a product out of float64's own range."""

LARGEST_ADDEND = float(np.finfo(np.float64).max) / 2**32
"""Of weight times value, so that no sum over sites can overflow; far above any float32."""


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
        is not finite, a weight that is not above zero, a product of both too large to be summed.
    """
    _validate_weight(weight)
    try:
        check_entries(tensors, expected, "its entries")
    except StateMismatchError as error:
        raise ContributionError(str(error)) from error
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_meta:
            raise ContributionError(f"entry {name!r} is not a dense tensor with values")
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise ContributionError(
                f"entry {name!r} holds {bad} values of {tensor.numel()} that are not finite"
            )
        largest = float(tensor.detach().abs().max()) if tensor.numel() else 0.0
        if largest * float(weight) > LARGEST_ADDEND:
            raise ContributionError(
                f"entry {name!r} holds {largest:.3g}: too large to be summed with weight {weight}"
            )


def _validate_weight(weight: float) -> None:
    try:
        positive = math.isfinite(weight) and weight > 0
    except (TypeError, OverflowError):
        positive = False
    if not positive:
        raise ContributionError(f"its weight is {weight}, expected a finite number above 0")
    if not WEIGHT_RANGE[0] <= weight <= WEIGHT_RANGE[1]:
        raise ContributionError(
            f"its weight is {weight}, expected one from {WEIGHT_RANGE[0]:.0e} "
            f"to {WEIGHT_RANGE[1]:.0e}"
        )


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
            if tensor.dtype not in AVERAGED:
                raise ContributionError(
                    f"entry {name!r} is {tensor.dtype}: only floats are averaged"
                )
        self.expected = dict(expected)
        self.reset()

    def reset(self) -> None:
        """Forget all contributions."""
        self.contributors: list[str] = []
        self._sums: dict[str, list[FloatArray]] = {}
        self._weights: list[FloatArray] = []

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
            values = widened(tensor).numpy().reshape(-1)
            _accumulate(self._sums.setdefault(name, []), values * float(weight))
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
            name: narrowed(torch.from_numpy(_rounded(self._sums[name]) / total), tensor)
            for name, tensor in self.expected.items()
        }


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as float64 on the CPU; complex ones as (..., 2), real and imaginary.

    Exact for every dtype of :data:`fedbn.core.normalization.AVERAGED`.
    """
    values = tensor.detach().to("cpu").resolve_conj()
    return (torch.view_as_real(values) if values.is_complex() else values).double()


def narrowed(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return what :func:`widened` has made of a tensor in that tensor's own dtype and shape."""
    if like.is_complex():
        values = torch.view_as_complex(values.reshape(-1, 2))
    return values.to(like.dtype).reshape(like.shape)


def _two_sum(a: FloatArray, b: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return fl(a + b) and its exact rounding error (Knuth)."""
    total = a + b
    b_part = total - a
    return total, (a - (total - b_part)) + (b - b_part)


def _accumulate(limbs: list[FloatArray], addend: FloatArray) -> None:
    """Add to an exact sum, held as any number of float64 arrays; nothing is ever rounded off."""
    addend = addend + 0.0  # -0.0 becomes 0.0: the sign of a zero sum would depend on the order
    for index, limb in enumerate(limbs):
        limbs[index], addend = _two_sum(limb, addend)
        if not addend.any():
            return
    limbs.append(addend)


def _rounded(limbs: list[FloatArray]) -> FloatArray:
    """Round the exact sum of float64 arrays to float64, once (Boldo and Melquiond, 2008)."""
    zero = np.zeros_like(limbs[0])
    high, middle, low = [*limbs, zero, zero][:3]
    upper, lower = _two_sum(middle, low)
    total, error = _two_sum(high, upper)
    tail, lost = _two_sum(error, lower)
    # Round to odd: where bits were lost and the last bit of the tail is even, step towards them.
    even = (tail.view(np.int64) & 1) == 0
    odd = np.nextafter(tail, np.copysign(np.inf, lost))
    total = total + np.where((lost != 0) & even, odd, tail)
    # Elements whose addends spanned so many orders that three numbers did not hold them are few.
    deep = np.any([limb != 0 for limb in limbs[3:]], axis=0)
    for index in np.flatnonzero(deep):
        total[index] = math.fsum(limb[index] for limb in limbs)
    return total
