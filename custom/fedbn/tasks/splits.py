"""Units into training, validation and test: by fold, stratified, the same at every start."""

from __future__ import annotations

import numpy as np

from data_prep.folds import assign_folds
from fedbn.core.training import derive_seed
from fedbn.tasks.data import DataError, SiteData, Split, SplitSettings

MIN_TRAINING_UNITS = 4
"""Fewer training units than this cannot fit a batch norm that means anything."""


def split_units(data: SiteData, settings: SplitSettings) -> Split:
    """Divide a site's units.

    The units of ``settings.fold`` are the test. Of the others each stratum gives its training
    share, and of these its validation share; both are the first ones of a shuffled order, so that
    a smaller share is a part of a larger one. The order depends on the seed, the fold, the site's
    name and the ids of its units alone.

    Raises
    ------
    DataError
        If a stratum would vanish, or too few units would be left to train on.
    """
    folds = _folds(data, settings)
    in_test = folds == settings.fold
    in_train = ~in_test
    if (share := settings.training_share_of(data.site)) != 1:
        in_train = draw(data, settings, in_train, share, "training share")
    in_validation = np.zeros_like(in_train)
    if settings.validation_share:
        in_validation = draw(data, settings, in_train, settings.validation_share, "validation")
        in_train &= ~in_validation
    split = Split(*map(np.flatnonzero, (in_train, in_validation, in_test)))
    if len(split.train) < MIN_TRAINING_UNITS:
        raise DataError(
            f"site {data.site!r}: {len(split.train)} training subjects of {len(folds)} are too few "
            f"to train on, at least {MIN_TRAINING_UNITS} are needed"
        )
    check_disjoint(split)
    return split


def check_disjoint(split: Split) -> None:
    """Refuse a split in which a unit is on two sides: its samples look alike.

    Raises
    ------
    ValueError
        With the number of such units, and not their ids, which stay out of logs.
    """
    joined = np.concatenate(split)
    if twice := len(joined) - len(np.unique(joined)):
        raise ValueError(f"subjects on two sides of the split: {twice}; split by subject")


def draw(
    data: SiteData, settings: SplitSettings, available: np.ndarray, share: float, purpose: str
) -> np.ndarray:
    """Draw a share of each stratum from the available units, (n_units,) bool.

    Raises
    ------
    DataError
        If a stratum would vanish, or too few units would be left.
    """
    generator = np.random.default_rng(derive_seed(settings.seed, data.site, settings.fold, purpose))
    by_id = sorted(np.flatnonzero(available).tolist(), key=lambda k: data.units[k].id)
    taken = np.zeros_like(available)
    name = purpose.replace(" ", "_")
    for stratum in sorted({data.units[k].stratum or "" for k in by_id}, reverse=True):
        of_stratum = [k for k in by_id if (data.units[k].stratum or "") == stratum]
        members = generator.permutation(np.array(of_stratum, dtype=np.int64))
        n_taken = int(share * len(members) + 0.5)
        if not n_taken:
            raise DataError(
                f"site {data.site!r}: {name} {share:g} leaves none of its {len(members)} training "
                f"subjects of {stratum!r}; give a larger share"
            )
        taken[members[:n_taken]] = True
    return taken


def _folds(data: SiteData, settings: SplitSettings) -> np.ndarray:
    """Return each unit's fold: the data's own where it fixed them, else from the seed."""
    fixed = [unit.fold for unit in data.units]
    if all(unit.fold is None and unit.stratum is None for unit in data.units):
        by_id = sorted(range(len(fixed)), key=lambda k: data.units[k].id)
        folds = np.empty(len(fixed), dtype=np.int64)
        shuffled = np.random.RandomState(settings.seed).permutation(by_id)
        folds[shuffled] = np.arange(len(fixed)) % settings.n_folds
        return folds
    if all(fold is None for fold in fixed):
        return assign_folds(
            [unit.id for unit in data.units],
            [unit.stratum for unit in data.units],
            settings.n_folds,
            settings.seed,
            site=data.site,
        )
    folds = np.array([-1 if fold is None else fold for fold in fixed])
    held_out = data.held_out_fold
    if set(folds) != set(range(settings.n_folds)) or held_out not in (None, settings.fold):
        made_for = f"{folds.max() + 1} folds"
        if held_out is not None:
            made_for = f"fold {held_out} of {folds.max() + 1}"
        if -1 in folds:
            made_for += f" and {int((folds == -1).sum())} subjects in none"
        raise DataError(
            f"site {data.site!r}: its store was made for {made_for}, but the experiment asks for "
            f"fold {settings.fold} of {settings.n_folds}; prepare the store again for this fold"
        )
    return folds
