"""Whether sites can train together: what they must have in common, and in what they differ."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from data_prep.errors import StoreError, some_of

__all__ = ["CONNECTOME_SETTINGS", "check_compatible", "signature_differences"]

# What the description must say about the connectomes, and what each is called in a message.
CONNECTOME_SETTINGS = {
    "kind": "kind of connectome",
    "estimator": "covariance estimator",
    "transform": "transform",
    "window": "window",
    "stride": "stride",
    "negative": "rule for negative values",
    "edge_order": "edge order",
}


class Store(Protocol):
    """What is asked of a site's store."""

    @property
    def site(self) -> str:
        """Name of the site."""

    @property
    def path(self) -> Path:
        """The folder."""

    def signature(self) -> dict[str, Any]:
        """Return what must agree between sites that train together."""


def signature_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Say in what two signatures differ.

    Parameters
    ----------
    a, b : mapping
        As from `SiteStore.signature`, possibly after a trip through JSON.

    Returns
    -------
    list of str
        One sentence a difference, with both values; empty if the stores fit together.
    """
    names = {
        "format_version": "store format",
        "atlas": "atlas",
        **CONNECTOME_SETTINGS,
        "n_rois": "number of ROIs",
        "n_edges": "number of edges",
        "reference": "reference split",
        "preprocessing": "preprocessing",
        "synthetic": "synthetic",
    }
    if a.get("window_seconds") is not None or b.get("window_seconds") is not None:
        # Other repetition times, other numbers of volumes.
        del names["window"]
        names["window_seconds"] = "window in seconds"
    differences = [
        f"{name}: {_show(a.get(key))} and {_show(b.get(key))}"
        for key, name in names.items()
        if a.get(key) != b.get(key)
    ]
    return differences + _roi_differences(a.get("rois") or [], b.get("rois") or [])


def _show(value: object) -> str:
    return "none" if value is None else repr(value) if not isinstance(value, str) else value


def _roi_differences(a: Sequence[Sequence[str]], b: Sequence[Sequence[str]]) -> list[str]:
    if [list(roi) for roi in a] == [list(roi) for roi in b]:
        return []
    first, second = {r[0]: r[1] for r in a}, {r[0]: r[1] for r in b}
    only_first = [i for i in first if i not in second]
    only_second = [i for i in second if i not in first]
    if only_first or only_second:
        return [
            f"ROI ids: {some_of(only_first)} only in one and {some_of(only_second)} in the other"
        ]
    renamed = [i for i in first if first[i] != second[i]]
    if renamed:
        i = renamed[0]
        return [f"name of ROI {i}: {first[i]} and {second[i]} ({len(renamed)} such ROIs)"]
    place = next(n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x[0] != y[0])
    return [f"order of the ROIs: position {place} is {a[place][0]} and {b[place][0]}"]


def check_compatible(
    stores: Iterable[Store], compare: Callable[..., list[str]] = signature_differences
) -> None:
    """Refuse stores that cannot train together.

    Parameters
    ----------
    stores : iterable of SiteStore
        One a site.
    compare : callable
        Names the differences of two signatures; `signature_differences` of connectomes.

    Raises
    ------
    StoreError
        Naming the two sites and every difference between them.
    """
    stores = list(stores)
    seen: dict[str, Path] = {}
    for store in stores:
        if store.site in seen:
            raise StoreError(
                f"{seen[store.site]} and {store.path} both hold site {store.site!r}; a site "
                "takes part once"
            )
        seen[store.site] = store.path
    for store in stores[1:]:
        differences = compare(stores[0].signature(), store.signature())
        if differences:
            raise StoreError(
                f"sites {stores[0].site!r} and {store.site!r} cannot train together: "
                f"{'; '.join(differences)}"
            )
