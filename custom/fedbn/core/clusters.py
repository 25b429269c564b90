"""Groups of sites by the direction of their updates (Sattler et al., 2019, arXiv 1910.01991).

Near a stationary point of the averaged model the updates of sites with the same data distribution
vanish together, and those of sites with different ones point in different directions and cancel.
So a group is split in two where its mean update is small although one of its sites still wants to
move: along the bipartition whose largest cosine similarity across the cut is smallest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Bipartition:
    """A group of sites cut in two.

    Attributes
    ----------
    parts
        Names of the sites of either side, sorted; the side of the first name comes first.
    similarity
        The largest cosine similarity of two updates across the cut.
    """

    parts: tuple[tuple[str, ...], tuple[str, ...]]
    similarity: float


def norm(update: np.ndarray) -> float:
    """Return the Euclidean norm; the same bits whatever the number of threads."""
    return float(np.sqrt(np.square(update).sum()))


def cosine_similarity(left: np.ndarray, right: np.ndarray) -> float:
    """Return the cosine of the angle between two updates; 0 if one of them is zero."""
    scale = norm(left) * norm(right)
    return float((left * right).sum()) / scale if scale else 0.0


def should_split(
    mean_update: np.ndarray,
    updates: Mapping[str, np.ndarray],
    *,
    mean_norm: float,
    site_norm: float,
) -> bool:
    """Tell whether the mean update is small while some site's is large.

    Parameters
    ----------
    mean_update
        The weighted mean of all updates.
    updates
        Site name to its update, flattened.
    mean_norm, site_norm
        The paper's epsilon 1 and epsilon 2.
    """
    largest = max(norm(update) for update in updates.values())
    return len(updates) > 1 and norm(mean_update) < mean_norm and largest > site_norm


def bipartition(updates: Mapping[str, np.ndarray]) -> Bipartition:
    """Cut two or more sites in two so that the largest similarity across the cut is smallest.

    Joining the most similar pairs first until two parts are left finds it exactly (algorithm 1
    there). Equal similarities are taken in the order of names, so that the order of sites in
    `updates` cannot be seen.
    """
    names = sorted(updates)
    if len(names) < 2:
        raise ValueError(f"a group of {len(names)} sites cannot be cut in two")
    pairs = sorted(
        (-cosine_similarity(updates[a], updates[b]), a, b)
        for k, a in enumerate(names)
        for b in names[k + 1 :]
    )
    part_of: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
    for _, a, b in pairs:
        if len(set(part_of.values())) == 2:
            break
        joined = tuple(sorted({*part_of[a], *part_of[b]}))
        part_of.update(dict.fromkeys(joined, joined))
    first, second = sorted(set(part_of.values()))
    across = max(-negative for negative, a, b in pairs if part_of[a] != part_of[b])
    return Bipartition(parts=(first, second), similarity=across)
