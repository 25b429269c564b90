"""A site's table: one csv, a row a visit, columns by their header, cells that may be missing.

::

    Cleveland/
        table.csv                  participant_id (optional), one column a measurement, the target
        dataset_description.json   optional: {"synthetic": true} for a made-up table

This module is imported at every start of a client process, so it needs NumPy and the standard
library only.
"""

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import StoreError, some_of
from data_prep.files import atomic_file, file_checksum
from data_prep.store_folder import DESCRIPTION
from data_prep.units import Unit

__all__ = ["MISSING_CELLS", "TABLE", "TableStore", "read_table_store", "write_table_store"]

TABLE = "table.csv"
PARTICIPANT = "participant_id"
MISSING_CELLS = ("", "?", "na", "n/a", "nan")
"""What a missing cell may hold, in any case."""


@dataclass(frozen=True)
class TableStore:
    """One site's table as text, one row a visit of a participant.

    Attributes
    ----------
    place : Path
        The csv file.
    site : str
        Name of the site.
    columns : tuple of str
        Header, without the participant.
    rows : tuple of tuple of str or None
        Cells in the order of `columns`, None where missing.
    ids : tuple of str
        Participant of each row; ``row-N`` (N: line of the file) where the table names none.
    target : str
        The column that is learned.
    classes : mapping
        Name of each class to the cells of the target that mean it.
    synthetic : bool
        Whether the participants are made up.
    checksum : str
        SHA-256 of the file.
    """

    place: Path
    site: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | None, ...], ...] = field(repr=False)
    ids: tuple[str, ...] = field(repr=False)
    target: str
    classes: Mapping[str, Sequence[str]]
    synthetic: bool
    checksum: str

    @cached_property
    def labels(self) -> np.ndarray:
        """Class of each row, int64 (n_rows,), an index into `classes`."""
        number = {cell: k for k, cells in enumerate(self.classes.values()) for cell in cells}
        place = self.columns.index(self.target)
        return np.array([number[str(row[place])] for row in self.rows], dtype=np.int64)

    @cached_property
    def owners(self) -> np.ndarray:
        """Participant of each row, int64 (n_rows,), an index into `units`."""
        number = {name: k for k, name in enumerate(dict.fromkeys(self.ids))}
        return np.array([number[name] for name in self.ids], dtype=np.int64)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The participants in the order of their first row."""
        names = tuple(self.classes)
        counts = np.bincount(self.owners)
        first = {name: k for k, name in reversed(list(enumerate(self.ids)))}
        return tuple(
            Unit(name, names[self.labels[first[name]]], int(n), None)
            for name, n in zip(dict.fromkeys(self.ids), counts, strict=True)
        )

    @property
    def held_out_fold(self) -> int | None:
        """No fold is fixed in a table."""
        return None

    def column(self, name: str) -> list[str | None]:
        """Return the cells of a column; all missing where the site does not have it."""
        if name not in self.columns:
            return [None] * len(self.rows)
        place = self.columns.index(name)
        return [row[place] for row in self.rows]

    def fingerprint(self) -> str:
        """Return a digest of the file's content."""
        return self.checksum[:16]

    def stamp(self) -> str:
        """Return what :meth:`fingerprint` does: the whole file is read at each start."""
        return self.fingerprint()

    def signature(self) -> dict[str, Any]:
        """Return what must agree between sites; a column may be missing at one."""
        return {"table": self.target, "classes": list(self.classes), "synthetic": self.synthetic}

    def private_names(self) -> list[str]:
        """Return the participants' ids."""
        return list(dict.fromkeys(self.ids))

    def subset(self, units: np.ndarray) -> "TableStore":
        """Return some participants alone."""
        chosen = np.flatnonzero(np.isin(self.owners, units))
        return replace(
            self,
            rows=tuple(self.rows[k] for k in chosen),
            ids=tuple(self.ids[k] for k in chosen),
        )


def read_table_store(
    place: str | os.PathLike[str], site: str, target: str, classes: Mapping[str, Sequence[str]]
) -> TableStore:
    """Read a site's table.

    Parameters
    ----------
    place : path
        The csv file, or the folder that holds ``table.csv``.
    site : str
        Name of the site.
    target : str
        The column that is learned.
    classes : mapping
        Name of each class to the cells of the target that mean it.

    Raises
    ------
    StoreError
        With the site, and the row and column of what is wrong.
    """
    file = Path(place) / TABLE if Path(place).is_dir() else Path(place)
    try:
        checksum = file_checksum(file)
        with file.open(newline="", encoding="utf-8-sig") as text:
            lines = list(csv.reader(text, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise StoreError(f"site {site!r}: cannot read the table {file}: {error}") from error
    if len(lines) < 2:
        raise StoreError(f"site {site!r}: {file} holds no row below its header")
    header = [name.strip() for name in lines[0]]
    twice = [name for k, name in enumerate(header) if name in header[:k]]
    if twice or "" in header:
        raise StoreError(
            f"site {site!r}: {file} has "
            + (f"the column {twice[0]!r} twice" if twice else "a column without a name")
        )
    if target not in header:
        raise StoreError(
            f"site {site!r}: {file} has no column {target!r}, which is to be learned; it has "
            f"{some_of(header, 20)}"
        )
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(header):
            raise StoreError(
                f"site {site!r}: row {number} of {file} has {len(line)} cells, the header "
                f"{len(header)}"
            )
    own = header.index(PARTICIPANT) if PARTICIPANT in header else None
    columns = tuple(name for name in header if name != PARTICIPANT)
    cells = [[_cell(value) for value in line] for line in lines[1:]]
    ids = tuple(
        f"row-{number}" if own is None else str(line[own] or f"row-{number}")
        for number, line in enumerate(cells, start=2)
    )
    rows = tuple(tuple(v for k, v in enumerate(line) if k != own) for line in cells)
    _check_target(site, file, columns.index(target), rows, target, classes)
    store = TableStore(file, site, columns, rows, ids, target, classes, _synthetic(file), checksum)
    _check_units(store)
    return store


def _cell(text: str) -> str | None:
    text = text.strip()
    return None if text.lower() in MISSING_CELLS else text


def _check_target(
    site: str,
    file: Path,
    place: int,
    rows: Sequence[Sequence[str | None]],
    target: str,
    classes: Mapping[str, Sequence[str]],
) -> None:
    known = {cell for cells in classes.values() for cell in cells}
    for number, row in enumerate(rows, start=2):
        if row[place] not in known:
            got = "is missing" if row[place] is None else f"is {row[place]!r}"
            raise StoreError(
                f"site {site!r}: {target!r} {got} in row {number} of {file}; it must be one of "
                f"{some_of(sorted(known), 20)}"
            )


def _check_units(store: TableStore) -> None:
    """Refuse a participant of two classes: it would be on no side of a stratified split."""
    classes: dict[str, int] = {}
    for number, (name, label) in enumerate(zip(store.ids, store.labels.tolist(), strict=True), 2):
        if classes.setdefault(name, label) != label:
            raise StoreError(
                f"site {store.site!r}: the participant of row {number} of {store.place} has rows "
                "of two classes"
            )


def _synthetic(file: Path) -> bool:
    description = file.parent / DESCRIPTION
    if not description.is_file():
        return False
    try:
        return bool(json.loads(description.read_text(encoding="utf-8"))["synthetic"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{description} does not say whether the table is synthetic") from error


def write_table_store(
    folder: str | os.PathLike[str], header: Sequence[str], rows: Iterable[Sequence[object]]
) -> Path:
    """Write a site's table, whole or not at all.

    Parameters
    ----------
    folder : path
        Gets ``table.csv``.
    header : sequence of str
        Names of the columns.
    rows : iterable of sequences
        Cells in the order of the header.

    Returns
    -------
    Path
        The file.
    """
    file = Path(folder) / TABLE
    file.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    with atomic_file(file, private=True) as out:
        out.write(text.getvalue().encode())
    return file
