"""Morpho-MNIST's transformations of handwritten digits (Castro et al., 2019, section 3.2).

A digit is enlarged four times, cut at half of its range, and changed as a shape: thinner or thicker
as a whole (global), swollen or fractured in places (local). Lengths are in pixels of the digit as
given; the strengths are those of the published data sets. Needs scikit-image: the extra
``fedbn[paper]``.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from data_prep.errors import SourceError

__all__ = [
    "KINDS",
    "MIXTURES",
    "Shape",
    "fracture",
    "swell",
    "thicken",
    "thin",
    "transform",
]

SCALE = 4
"""How many times a digit is enlarged."""


class Shape:
    """A digit as a shape, `SCALE` times enlarged.

    Parameters
    ----------
    image : np.ndarray of uint8, shape (height, width)
        Bright strokes on dark ground.

    Attributes
    ----------
    mask : np.ndarray of bool, shape (SCALE * height, SCALE * width)
        The strokes.

    Raises
    ------
    SourceError
        If it is of one grey value, or scikit-image is not installed.
    """

    def __init__(self, image: np.ndarray) -> None:
        large = _skimage("transform").pyramid_expand(image / 255, upscale=SCALE, order=3)
        low, high = large.min(), large.max()
        if high - low < 1e-6:
            raise SourceError("a digit of one grey value has no shape")
        self.mask: np.ndarray = large >= (low + high) / 2

    @cached_property
    def medial_axis(self) -> tuple[np.ndarray, np.ndarray]:
        """The strokes' skeleton, bool, and each point's distance to the ground, in `SCALE`ths."""
        found = _skimage("morphology").medial_axis(self.mask, return_distance=True, rng=0)
        return found[0], found[1]

    @property
    def skeleton(self) -> np.ndarray:
        """The medial axis of the strokes, bool, shaped as the mask."""
        return self.medial_axis[0]

    @property
    def thickness(self) -> float:
        """Mean thickness of the strokes, in pixels of the digit."""
        skeleton, distance = self.medial_axis
        return float(2 * distance[skeleton].mean() / SCALE)


def _skimage(part: str) -> Any:
    """Return a module of scikit-image."""
    try:
        return importlib.import_module(f"skimage.{part}")
    except ModuleNotFoundError:
        raise SourceError(
            "Morpho-MNIST needs scikit-image: install it with `pip install 'fedbn[paper]'`"
        ) from None


def thin(shape: Shape, rng: np.random.Generator, amount: float = 0.7) -> np.ndarray:
    """Return the mask, thinner by `amount` of its thickness: erosion by a disk."""
    return np.asarray(_skimage("morphology").erosion(shape.mask, _disk(shape, amount)))


def thicken(shape: Shape, rng: np.random.Generator, amount: float = 1.0) -> np.ndarray:
    """Return the mask, thicker by `amount` of its thickness: dilation by a disk."""
    return np.asarray(_skimage("morphology").dilation(shape.mask, _disk(shape, amount)))


def _disk(shape: Shape, amount: float) -> np.ndarray:
    return np.asarray(_skimage("morphology").disk(int(amount * SCALE * shape.thickness / 2)))


def swell(
    shape: Shape, rng: np.random.Generator, strength: float = 3.0, radius: float = 7.0
) -> np.ndarray:
    """Return the mask, swollen round a random point of its skeleton.

    Within R = `radius` sqrt(thickness) / 2 of the point, what lies at the distance r comes from
    the distance r (r / R)^(`strength` - 1).
    """
    row, column = _points(shape.skeleton, rng, 1)[0]
    centre = np.array([column, row])
    reach = radius * np.sqrt(shape.thickness) / 2 * SCALE

    def source(points: np.ndarray) -> np.ndarray:
        away = points - centre
        share = np.hypot(away[:, 0], away[:, 1]) / reach
        return np.asarray(centre + np.minimum(share, 1)[:, None] ** (strength - 1) * away)

    return np.asarray(_skimage("transform").warp(shape.mask.astype(float), source, order=1) >= 0.5)


def fracture(
    shape: Shape,
    rng: np.random.Generator,
    n_fractures: int = 3,
    width: float = 1.5,
    margin: float = 2.0,
) -> np.ndarray:
    """Return the mask, cut across its strokes at random points of the skeleton.

    Points within `margin` pixels of a tip or a fork are avoided where others are left. A cut has
    `width` pixels and goes half a pixel beyond the stroke on both sides.
    """
    inner = _away_from_tips_and_forks(shape.skeleton, int(margin * SCALE))
    cuts = np.zeros_like(shape.mask)
    for point in _points(inner if inner.any() else shape.skeleton, rng, n_fractures):
        half = (shape.medial_axis[1][tuple(point)] + 0.5 * SCALE) * _across(shape.skeleton, point)
        ends = np.concatenate([point + half, point - half]).astype(int)
        rows, columns = _skimage("draw").line(*ends)
        inside = (rows >= 0) & (rows < cuts.shape[0]) & (columns >= 0) & (columns < cuts.shape[1])
        cuts[rows[inside], columns[inside]] = True
    brush = _skimage("morphology").disk(int(np.ceil((width * SCALE - 1) / 2)))
    return np.asarray(shape.mask & ~_skimage("morphology").dilation(cuts, brush))


def _points(where: np.ndarray, rng: np.random.Generator, n: int) -> np.ndarray:
    points = np.argwhere(where)
    return np.asarray(points[rng.integers(len(points), size=n)])


def _away_from_tips_and_forks(skeleton: np.ndarray, margin: int) -> np.ndarray:
    """Return the skeleton without what is near a point of one, or of three and more neighbours."""
    from scipy import ndimage

    around = np.ones((3, 3))
    around[1, 1] = 0
    neighbours = ndimage.convolve(skeleton.astype(int), around, mode="constant")
    ends = skeleton & ((neighbours == 1) | (neighbours >= 3))
    return np.asarray(
        skeleton & ~_skimage("morphology").dilation(ends, _skimage("morphology").disk(margin))
    )


def _across(skeleton: np.ndarray, point: np.ndarray) -> np.ndarray:
    """Return the unit vector (row, column) across the skeleton at a point."""
    radius = 2 * SCALE
    near = np.argwhere(skeleton)
    near = near[abs(near - point).max(axis=1) <= radius]
    offsets = near - near.mean(axis=0)
    _, vectors = np.linalg.eigh(offsets.T @ offsets)
    return np.asarray(vectors[:, 0])  # of the smaller spread


def _to_pixels(mask: np.ndarray) -> np.ndarray:
    """Return a mask at the size of the digit, uint8."""
    small = _skimage("transform").pyramid_reduce(mask.astype(float), downscale=SCALE, order=3)
    return np.asarray(np.clip(np.rint(255 * small), 0, 255), dtype=np.uint8)


KINDS: Mapping[str, Callable[[Shape, np.random.Generator], np.ndarray]] = {
    "plain": lambda shape, rng: shape.mask,
    "thin": thin,
    "thick": thicken,
    "swollen": swell,
    "fractured": fracture,
}
MIXTURES: Mapping[str, Sequence[str]] = {
    "global": ("plain", "thin", "thick"),
    "local": ("plain", "swollen", "fractured"),
}
"""The two data sets of the paper: each digit is one of these, with equal chances."""


def transform(images: np.ndarray, kinds: Sequence[str], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Transform digits, each by a kind that is drawn at random.

    Parameters
    ----------
    images : np.ndarray of uint8, shape (n, height, width)
        A digit's result depends on the seed and its row, not on the other digits.
    kinds : sequence of str
        Some of :data:`KINDS`.
    seed : int

    Returns
    -------
    transformed : np.ndarray of uint8, shape (n, height, width)
    kind : np.ndarray of int, shape (n,)
        Index into `kinds`.
    """
    result = np.empty_like(images)
    chosen = np.empty(len(images), dtype=np.int64)
    for row, image in enumerate(images):
        rng = np.random.default_rng([seed, row])
        chosen[row] = rng.integers(len(kinds))
        result[row] = _to_pixels(KINDS[kinds[chosen[row]]](Shape(image), rng))
    return result, chosen
