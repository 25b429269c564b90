"""A site's table: one csv, a row a visit, columns by their header, cells that may be missing.

::

    Cleveland/
        table.csv                  participant_id (optional), one column a measurement, the target
        dataset_description.json   optional: {"synthetic": true} for a made-up table

This module is imported at every start of a client process, so it needs NumPy and the standard
library only.
"""

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import SourceError, StoreError, some_of
from data_prep.files import atomic_file
from data_prep.store_folder import DESCRIPTION
from data_prep.tables import read_table
from data_prep.units import Unit

__all__ = [
    "MISSING_CELLS",
    "TABLE",
    "TableStore",
    "plain",
    "read_table_store",
    "write_table_store",
]

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
    cells : mapping
        Column to its cells, None where missing; the participant is no column.
    lines : tuple of int
        Line of the file that each row is.
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
    made : dict
        What was made of the cells before, by the names of the features.
    """

    place: Path
    site: str
    cells: Mapping[str, list[str | None]] = field(repr=False)
    lines: tuple[int, ...] = field(repr=False)
    ids: tuple[str, ...] = field(repr=False)
    target: str
    classes: Mapping[str, Sequence[str]]
    synthetic: bool
    checksum: str
    made: dict[tuple[str, ...], np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def labels(self) -> np.ndarray:
        """Class of each row, int64 (n_rows,), an index into `classes`; -1 where it is missing."""
        number = {cell: k for k, cells in enumerate(self.classes.values()) for cell in cells}
        cells = self.column(self.target)
        known = (-1 if cell is None else number[plain(cell)] for cell in cells)
        return np.fromiter(known, dtype=np.int64)

    @cached_property
    def owners(self) -> np.ndarray:
        """Participant of each row, int64 (n_rows,), an index into `units`."""
        number = {name: k for k, name in enumerate(dict.fromkeys(self.ids))}
        return np.array([number[name] for name in self.ids], dtype=np.int64)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The participants in the order of their first row."""
        names = (*self.classes, None)
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
        return self.cells.get(name) or [None] * len(self.lines)

    def require_classes(self) -> None:
        """See that every row's class is known, as training needs it.

        Raises
        ------
        StoreError
            With the first row where it is missing.
        """
        if self.target not in self.cells:
            raise StoreError(
                f"site {self.site!r}: {self.place} has no column {self.target!r}, which is to be "
                f"learned; it has {some_of(list(self.cells), 20)}"
            )
        if (missing := np.flatnonzero(self.labels < 0)).size:
            known = [cell for cells in self.classes.values() for cell in cells]
            raise self.cell_error(int(missing[0]), self.target, f"give one of {some_of(known, 20)}")

    def cell_error(self, row: int, column: str, to_do: str) -> StoreError:
        """Return the error for a cell; `row` counts from 0."""
        cell, where = self.column(column)[row], f"site {self.site!r}: {column!r}"
        is_what = "is missing" if cell is None else f"is {cell!r}"
        return StoreError(
            f"{where} {is_what} in row {self.lines[row]} of {self.place}; {to_do}",
            f"{where} has a cell that cannot be used, its row is in the site's own log; {to_do}",
        )

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
            cells={name: [column[k] for k in chosen] for name, column in self.cells.items()},
            lines=tuple(self.lines[k] for k in chosen),
            ids=tuple(self.ids[k] for k in chosen),
            made={},
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
        The column that is learned; where it or a cell of it is missing, a class is unknown.
    classes : mapping
        Name of each class to the cells of the target that mean it, as :func:`plain` writes them.

    Raises
    ------
    StoreError
        With the site, and the row and column of what is wrong.
    """
    file = Path(place) / TABLE if Path(place).is_dir() else Path(place)
    try:
        content = file.read_bytes()
        table = read_table(file, "table", content=content)
    except OSError as error:
        raise StoreError(f"site {site!r}: cannot read the table {file}: {error}") from error
    except SourceError as error:
        raise StoreError(f"site {site!r}: {error}") from error
    rows = [(line, fields) for line, fields in table.rows if any(fields)]
    named = list(filter(None, table.columns))
    if twice := [name for k, name in enumerate(named) if name in named[:k]]:
        raise StoreError(f"site {site!r}: {file} has the column {twice[0]!r} twice")
    if not rows:
        raise StoreError(f"site {site!r}: {file} holds no row below its header")
    lines, fields = zip(*rows, strict=True)
    columns = zip(table.columns, zip(*fields, strict=True), strict=True)
    cells = {name: list(map(_cell, column)) for name, column in columns if name}
    ids = cells.pop(PARTICIPANT, [None] * len(lines))
    store = TableStore(
        place=file,
        site=site,
        cells=cells,
        lines=lines,
        ids=tuple(name or f"row-{line}" for name, line in zip(ids, lines, strict=True)),
        target=target,
        classes=classes,
        synthetic=_synthetic(site, file),
        checksum=hashlib.sha256(content).hexdigest(),
    )
    _check_classes(store)
    return store


def plain(cell: str) -> str:
    """Return a category as a job states it: ``1`` for the ``1.0`` that a spreadsheet makes of it.

    >>> plain("1.0"), plain("2"), plain("2.5"), plain("yes")
    ('1', '2', '2.5', 'yes')
    """
    try:
        number = float(cell)
    except ValueError:
        return cell
    return str(int(number)) if number.is_integer() and "_" not in cell else cell


def _cell(text: str) -> str | None:
    text = text.strip()
    return None if text.lower() in MISSING_CELLS else text


def _check_classes(store: TableStore) -> None:
    """Refuse an unknown class, and a participant of two: no side of a stratified split has it."""
    known = [cell for cells in store.classes.values() for cell in cells]
    for row, cell in enumerate(store.column(store.target)):
        if cell is not None and plain(cell) not in known:
            raise store.cell_error(row, store.target, f"give one of {some_of(known, 20)}")
    first: dict[str, int] = {}
    for row, (name, label) in enumerate(zip(store.ids, store.labels.tolist(), strict=True)):
        if first.setdefault(name, label) != label:
            raise store.cell_error(
                row, store.target, "an earlier row of this participant is of another class"
            )


def _synthetic(site: str, file: Path) -> bool:
    description = file.parent / DESCRIPTION
    if not description.is_file():
        return False
    try:
        return bool(json.loads(description.read_text(encoding="utf-8"))["synthetic"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f'site {site!r}: {description} does not say "synthetic": true or false'
        ) from error


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
