"""The FedBN paper's rules for who trains on what, as functions of labels and row numbers.

A site's images are a pool, cut once into a training and a test part. Every site then trains on the
same number of images: a share of the *smallest* site's training part, from the front of its own.
Validation images come from the end of the training part. Office objects take 50 % and 40 %,
DomainNet 5 % and 5 %, digits 10 % and none (Li et al., 2021, section 5, and the authors' code).

Rows that show the same scene, as the digits of one house number of SVHN overlap in pixels, carry
one group number and are never on two sides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

__all__ = ["Rule", "Sides", "SplitError", "split_pool", "take_sides"]


class SplitError(ValueError):
    """Images cannot be split by a rule; the message names the site and the numbers."""


class Sides(NamedTuple):
    """Rows of a pool by what they are for; no row is in two of them."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class Rule:
    """How much of each site's training part is used.

    Attributes
    ----------
    share : float
        Training images of a site, as a share of the smallest site's training part.
    validation : float
        Validation images, as a share of the same.
    smallest : int or None
        Size of the smallest training part, where it is not the smallest of the sites at hand: 7438
        for digits, of which the paper has all of USPS.
    part : int
        Which slice of that length, from 0 on; for further clients made of the same site.
    fewer : bool
        Whether a site with too few images takes what it has, in place of an error.
    test_rest : bool
        Whether images that are neither trained on nor validated are tested as well.
    """

    share: float
    validation: float = 0.0
    smallest: int | None = None
    part: int = 0
    fewer: bool = False
    test_rest: bool = False

    def __post_init__(self) -> None:
        if not (0 < self.share <= 1 and 0 <= self.validation < 1):
            raise SplitError(
                f"share is {self.share:g} and validation {self.validation:g}; both are shares of "
                "the smallest site's training images, from 0 to 1"
            )
        if self.smallest is not None and self.smallest < 1:
            raise SplitError(f"smallest is {self.smallest}; it is a number of images")
        if self.part < 0:
            raise SplitError(f"part is {self.part}; parts are counted from 0")


def split_pool(
    labels: np.ndarray, *, test_share: float, seed: int, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Cut a pool of images into a training and a test part, stratified by class.

    Parameters
    ----------
    labels : np.ndarray of int, shape (n,)
        Class of each image.
    test_share : float
        Share of the test part. With `groups` one over a whole number, nearly kept.
    seed : int
        Of scikit-learn's ``StratifiedShuffleSplit``, or ``StratifiedGroupKFold`` with groups.
    groups : np.ndarray of int, shape (n,), optional
        Images with the same number stay together.

    Returns
    -------
    train, test : np.ndarray of int
        Row numbers; those of the training part in random order, so that its front is a sample
        (groups in random order, each in one piece).

    Raises
    ------
    SplitError
        If a class has too few images.
    """
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedShuffleSplit

    rows = np.arange(len(labels))
    try:
        if groups is None:
            shuffle = StratifiedShuffleSplit(1, test_size=test_share, random_state=seed)
            train, test = next(shuffle.split(rows, labels))
        else:
            folds = StratifiedGroupKFold(round(1 / test_share), shuffle=True, random_state=seed)
            train, test = next(folds.split(rows, labels, groups))
            # Whole groups in random order, so that what is left over shares few with the front.
            names, inverse = np.unique(groups, return_inverse=True)
            place = np.random.default_rng(seed).permutation(len(names))
            train = train[np.argsort(place[inverse[train]], kind="stable")]
    except ValueError as error:
        raise SplitError(f"{len(labels)} images cannot be split by class: {error}") from None
    return train, test


def take_sides(
    parts: Mapping[str, tuple[np.ndarray, np.ndarray]],
    rule: Rule,
    groups: Mapping[str, np.ndarray] | None = None,
) -> dict[str, Sides]:
    """Choose each site's training, validation and test images by the paper's rule.

    Parameters
    ----------
    parts : mapping
        Site to the rows of its training and its test part, as from :func:`split_pool`.
    rule : Rule
    groups : mapping, optional
        Site to the group of each row of its pool, where it has groups.

    Returns
    -------
    dict
        Site to its sides.

    Raises
    ------
    SplitError
        If a site has too few images.
    """
    smallest = rule.smallest or min(len(train) for train, _ in parts.values())
    length = smallest * rule.share
    first, last = int(length * rule.part), int(length * (rule.part + 1))
    n_validation = int(smallest * rule.validation)
    sides = {}
    for site, (train, test) in parts.items():
        if len(train) < last + n_validation and not rule.fewer:
            raise SplitError(
                f"site {site!r} has {len(train)} training images, and rows {first} to {last}"
                f"{f' and {n_validation} for validation' if n_validation else ''} are asked for; "
                "take a smaller share, or let sites have fewer"
            )
        pool = train[: len(train) - n_validation]
        chosen, validation = pool[first:last], train[len(pool) :]
        if not len(chosen):
            raise SplitError(f"site {site!r} has no image left for part {rule.part}")
        of = (groups or {}).get(site)
        validation = _apart(validation, chosen, of)
        if rule.test_rest:
            used = np.concatenate([chosen, validation])
            rest = np.setdiff1d(train, used, assume_unique=True)
            test = np.concatenate([test, _apart(rest, used, of)])
        sides[site] = Sides(chosen, validation, test)
    return sides


def _apart(rows: np.ndarray, others: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
    """Return the rows that share no group with others."""
    return rows if groups is None else rows[~np.isin(groups[rows], groups[others])]
