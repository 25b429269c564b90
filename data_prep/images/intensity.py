"""Intensities of images, counted in bins that any two images or sites have in common.

A bin's width is a power of two and its edges are multiples of it, so that counts of any two images
can be added, and two sites compared, exactly: the finer bins are summed into the coarser ones. What
comes out does not depend on the order of the images.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Histogram", "distance", "label_counts"]

# An integer of 16 bits has a bin of its own; what is stored of a site is coarser.
FINE_BINS, STORED_BINS = 1 << 16, 256
# The smallest bin, as a power of two below the largest value: float32 has 24 digits.
DIGITS = 24
PIECE = 1 << 20


@dataclass(frozen=True)
class Histogram:
    """How many values lie in each of ``[(first + i) * width, (first + i + 1) * width)``.

    Attributes
    ----------
    exponent : int
        ``width`` is 2 to this power; 0 or more for whole numbers.
    first : int
        Number of the first bin.
    counts : np.ndarray, int64
        One a bin.
    """

    exponent: int
    first: int
    counts: np.ndarray

    @property
    def width(self) -> float:
        """Width of a bin, in units of intensity."""
        return 2.0**self.exponent

    @classmethod
    def of(cls, values: np.ndarray) -> "Histogram":
        """Count finite values of any shape."""
        low, high = float(values.min()), float(values.max())
        exponent = 0
        if values.dtype.kind == "f":
            exponent = math.frexp(max(abs(low), abs(high)))[1] - DIGITS
        while (high // 2.0**exponent) - (low // 2.0**exponent) >= FINE_BINS:
            exponent += 1
        first = int(low // 2.0**exponent)
        counts = np.zeros(int(high // 2.0**exponent) - first + 1, dtype=np.int64)
        flat = values.ravel(order="K")
        for begin in range(0, flat.size, PIECE):
            piece = flat[begin : begin + PIECE]
            if values.dtype.kind == "f":
                bins = np.floor(piece.astype(np.float64) / 2.0**exponent).astype(np.int64)
            else:
                bins = piece.astype(np.int64) >> exponent
            counts += np.bincount(bins - first, minlength=len(counts))
        return cls(exponent, first, counts)

    def coarser(self, exponent: int) -> "Histogram":
        """Return the same values in bins that are as wide or wider."""
        bins = (self.first + np.arange(len(self.counts))) >> (exponent - self.exponent)
        first = int(bins[0])
        counts = np.zeros(int(bins[-1]) - first + 1, dtype=np.int64)
        np.add.at(counts, bins - first, self.counts)
        return Histogram(exponent, first, counts)

    def to_store(self) -> "Histogram":
        """Return the same values in at most `STORED_BINS` bins."""
        exponent, last = self.exponent, self.first + len(self.counts) - 1
        while (last >> (exponent - self.exponent)) - (
            self.first >> (exponent - self.exponent)
        ) >= STORED_BINS:
            exponent += 1
        return self.coarser(exponent)

    @classmethod
    def sum(cls, parts: Sequence["Histogram"]) -> "Histogram":
        """Return the values of several together, in bins as wide as the widest."""
        exponent = max(part.exponent for part in parts)
        aligned = [part.coarser(exponent) for part in parts]
        first = min(part.first for part in aligned)
        counts = np.zeros(max(p.first + len(p.counts) for p in aligned) - first, dtype=np.int64)
        for part in aligned:
            counts[part.first - first :][: len(part.counts)] += part.counts
        return cls(exponent, first, counts)

    def quantile(self, share: float) -> float:
        """Return the value below which this share lies, to the width of a bin."""
        cumulated = np.cumsum(self.counts)
        index = int(np.searchsorted(cumulated, share * cumulated[-1], side="left"))
        return (self.first + min(index, len(self.counts) - 1)) * self.width

    def describe(self) -> dict[str, Any]:
        """Return what a store keeps, fit for JSON."""
        return {
            "width": self.width,
            "first": self.first * self.width,
            "counts": self.counts.tolist(),
        }

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> "Histogram":
        """Return the histogram that `describe` has written."""
        exponent = round(math.log2(description["width"]))
        first = round(description["first"] / 2.0**exponent)
        return cls(exponent, first, np.array(description["counts"], dtype=np.int64))


def distance(a: Histogram, b: Histogram) -> float:
    """Return how far two distributions of intensities are apart, 0 to 1.

    The largest difference of the cumulative distributions (Kolmogorov-Smirnov), on the wider of
    the two bin widths: 0 for equal ones, 1 for two that do not overlap.
    """
    exponent = max(a.exponent, b.exponent)
    a, b = a.coarser(exponent), b.coarser(exponent)
    first = min(a.first, b.first)
    last = max(a.first + len(a.counts), b.first + len(b.counts))
    cumulated = []
    for part in (a, b):
        counts = np.zeros(last - first)
        counts[part.first - first :][: len(part.counts)] = part.counts
        cumulated.append(np.cumsum(counts) / counts.sum())
    return float(np.abs(cumulated[0] - cumulated[1]).max())


def label_counts(mask: np.ndarray) -> dict[int, int]:
    """Return how many voxels each label id of a mask has; uint16, any shape."""
    flat = mask.ravel(order="K")
    total = np.zeros(1 << 16, dtype=np.int64)
    for begin in range(0, flat.size, PIECE):
        total += np.bincount(flat[begin : begin + PIECE], minlength=len(total))
    return {int(label): int(total[label]) for label in np.flatnonzero(total)}
