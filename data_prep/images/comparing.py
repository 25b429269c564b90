"""Whether the image stores of several sites fit together, and in what they are far apart."""

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np

from data_prep.errors import StoreError
from data_prep.folds import assign_folds
from data_prep.images.intensity import Histogram, distance
from data_prep.images.store import ImageStore

__all__ = ["check_folds", "far_apart"]

# Median voxel sizes, and ranges of intensity, that differ by more than this are said.
SPACING_FACTOR, RANGE_FACTOR = 1.5, 4.0
# Kolmogorov-Smirnov distance of intensities above which two sites are said to be far apart.
INTENSITY_DISTANCE = 0.5


def check_folds(store: ImageStore, n_folds: int) -> None:
    """Refuse a site that has too few patients, or too few of a class, for so many folds.

    A data list with a test section states the split itself, and is not divided.
    """
    if "test" in store.sections:
        return
    units = [u for u, s in zip(store.units, store.sections, strict=True) if s == "training"]
    if len({unit.stratum for unit in units}) > 1:
        ids, classes = [unit.id for unit in units], [unit.stratum for unit in units]
        assign_folds(ids, classes, n_folds, 0, site=store.site)
    elif len(units) < n_folds:
        raise StoreError(
            f"site {store.site!r} has {len(units)} patient(s), too few for {n_folds} folds"
        )


def far_apart(stores: Sequence[ImageStore]) -> list[str]:
    """Say in what sites differ that train together all the same.

    Parameters
    ----------
    stores : sequence of ImageStore
        Compatible ones.

    Returns
    -------
    list of str
        One sentence each, about two sites at most: the ones that are farthest apart.
    """
    said = [_empty(store) for store in stores]
    sentences = [sentence for of_site in said for sentence in of_site]
    names = {store.site: store.description.get("channel_names") or None for store in stores}
    named = [(site, channels) for site, channels in names.items() if channels]
    sentences += [
        f"channels are {', '.join(named[0][1])} at {named[0][0]} and {', '.join(other)} at {site}"
        for site, other in named[1:]
        if other != named[0][1]
    ][:1]
    known = [s for s in stores if s.description["summary"]["spacing"]]
    if known and len(known) < len(stores):
        unknown = next(s.site for s in stores if s not in known)
        sentences.append(f"voxel sizes are known at {known[0].site} and unknown at {unknown}")
    pair, factor = _farthest(known, _spacing_factor)
    if pair and factor > SPACING_FACTOR:
        sizes = [f"{_size(s)} mm at {s.site}" for s in pair]
        sentences.append(
            f"voxel sizes are far apart, in the median {' and '.join(sizes)}: resample all "
            "sites to one, with Spacingd in the job's preprocessing"
        )
    pair, factor = _farthest(stores, _range_factor)
    if pair and factor > RANGE_FACTOR:
        ranges = [f"{_range(s)[0]:g} to {_range(s)[1]:g} at {s.site}" for s in pair]
        sentences.append(
            f"intensities have other ranges, {' and '.join(ranges)}: scale each image, "
            "for one with NormalizeIntensityd in the job's preprocessing"
        )
    pair, most = _farthest(stores, _intensity_distance)
    if pair and most > INTENSITY_DISTANCE:
        sentences.append(
            f"intensities of {pair[0].site} and {pair[1].site} are far apart: a distance of "
            f"{most:.2f}, where 1 is no overlap"
        )
    return sentences


def _empty(store: ImageStore) -> list[str]:
    summary = store.description["summary"]
    labels = [
        f"label {key} ({(store.labels or {})[int(key)]}) is in no mask of {store.site}"
        for key, found in (summary["labels"] or {}).items()
        if not found["images"]
    ]
    classes = (summary["classes"] or {}).items()
    return labels + [f"class {name!r} has no image at {store.site}" for name, n in classes if not n]


def _farthest(
    stores: Sequence[ImageStore], measure: Callable[[ImageStore, ImageStore], float]
) -> tuple[tuple[ImageStore, ImageStore] | None, float]:
    measured = [(measure(a, b), (a, b)) for a, b in combinations(stores, 2)]
    if not measured:
        return None, 0.0
    most, pair = max(measured, key=lambda item: item[0])
    return pair, most


def _spacing_factor(a: ImageStore, b: ImageStore) -> float:
    sizes = [np.array(s.description["summary"]["spacing"]["median"]) for s in (a, b)]
    ratio = sizes[0] / sizes[1]
    return float(max(ratio.max(), (1 / ratio).max()))


def _size(store: ImageStore) -> str:
    return "x".join(f"{x:g}" for x in store.description["summary"]["spacing"]["median"])


def _range(store: ImageStore) -> tuple[float, float]:
    intensity = store.description["summary"]["intensity"]
    return intensity["p01"], intensity["p99"]


def _range_factor(a: ImageStore, b: ImageStore) -> float:
    widths = [max(high - low, 1e-12) for low, high in (_range(a), _range(b))]
    return max(widths) / min(widths)


def _intensity_distance(a: ImageStore, b: ImageStore) -> float:
    """Return the largest distance of any channel."""
    channels = [s.description["summary"]["histograms"] for s in (a, b)]
    return max(
        distance(Histogram.from_description(x), Histogram.from_description(y))
        for x, y in zip(*channels, strict=True)
    )
