"""A site's data as the federation knows them: units, and how they are divided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from data_prep.errors import StoreError
from data_prep.site_store import default_data_root as default_data_root
from data_prep.units import Unit as Unit

DataError = StoreError
"""A site's data that cannot be read or trained on; one sentence."""

Index = np.ndarray
"""int64 (n,): units, as indices into ``data.units``."""


class SiteData(Protocol):
    """One site's data: a connectome store, a table, a list of images."""

    @property
    def site(self) -> str:
        """Name of the site."""
        ...

    @property
    def synthetic(self) -> bool:
        """Whether the patients are made up."""
        ...

    @property
    def units(self) -> Sequence[Unit]:
        """The patients or subjects: none is ever on both sides of a split."""
        ...

    @property
    def held_out_fold(self) -> int | None:
        """The only fold that may be held out, where the data were prepared for it."""
        ...

    @property
    def place(self) -> Path:
        """Where the data are, for messages that stay at the site."""
        ...

    def fingerprint(self) -> str:
        """Return a digest of the content: the same for a copy, another after any change."""
        ...

    def stamp(self) -> str:
        """Return what is cheap to see and changes whenever a file is written; a hint alone."""
        ...

    def signature(self) -> dict[str, Any]:
        """Return what must agree between sites; no path and nothing about one unit."""
        ...

    def private_names(self) -> Iterable[str]:
        """Name what must be taken out of every message."""
        ...

    def subset(self, units: Index) -> SiteData:
        """Return the data of some units alone, in memory, without fixed folds."""
        ...


class Split(NamedTuple):
    """Which units are trained on, judge the rounds, and are held out; each sorted."""

    train: Index
    validation: Index
    test: Index


class SplitSettings(Protocol):
    """What decides a split; an experiment has it."""

    @property
    def n_folds(self) -> int:
        """Folds by unit."""
        ...

    @property
    def fold(self) -> int:
        """The one that is held out."""
        ...

    @property
    def seed(self) -> int:
        """Of the folds and of every draw."""
        ...

    @property
    def validation_share(self) -> float:
        """Share of the training units that judge the rounds, in [0, 1)."""
        ...

    def training_share_of(self, site: str) -> float:
        """Share of its training units that a site uses, in (0, 1]."""
        ...
