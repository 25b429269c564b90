"""A store's folder: written whole or not at all, with checksums, by one run at a time.

Imported at every start of a client process: NumPy's and the standard library's cost only.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_prep.errors import StoreError
from data_prep.files import atomic_folder, file_checksum

__all__ = [
    "DESCRIPTION",
    "MISSING",
    "cell",
    "damaged",
    "new_store",
    "read_table",
    "refuse_foreign_folder",
    "verify_checksums",
    "write_table",
]

DESCRIPTION = "dataset_description.json"
MISSING = "n/a"


def damaged(site: str, what: str) -> StoreError:
    """Return the error of a store that is not as it was written."""
    return StoreError(f"site {site!r}: {what}; make the store again")


def read_table(file: Path, site: str, columns: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Read a tab-separated table whose first columns must be `columns`."""
    if not file.is_file():
        raise damaged(site, f"{file} is missing")
    try:
        # Rows end at line ends only: a name may hold U+2028 and its like.
        lines = file.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        raise damaged(site, f"{file.name} is not UTF-8 text") from None
    header = lines[0].split("\t")
    if tuple(header[: len(columns)]) != tuple(columns):
        raise damaged(
            site, f"{file.name} starts with the columns {header}, expected {list(columns)}"
        )
    rows = [line.split("\t") for line in lines[1:]]
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise damaged(
                site,
                f"line {number} of {file.name} has {len(row)} fields, the header has {len(header)}",
            )
    if not rows:
        raise damaged(site, f"{file.name} has no rows")
    return header, rows


def verify_checksums(
    folder: Path, site: str, description: Mapping[str, Any], names: Iterable[str]
) -> None:
    """Refuse a store of which one of these files is not as it was written."""
    for name in names:
        expected = description["checksums"].get(name)
        found = file_checksum(folder / name)
        if found != expected:
            raise damaged(
                site,
                f"{name} was changed after the store was written (sha256 {found[:12]}…, stated "
                f"{str(expected)[:12]}…)",
            )


@contextmanager
def new_store(
    folder: Path,
    site: str,
    files: Sequence[str],
    description: dict[str, Any],
    also: Sequence[str] = (),
) -> Iterator[Path]:
    """Give a temporary folder to write a store to; it takes the store's place at the end.

    Parameters
    ----------
    folder : Path
        The store. What is there as a store is replaced; any other folder that is not empty is
        refused.
    files : sequence of str
        What is written besides the description; each gets its checksum.
    description : dict
        Written last, as it is by then, with ``checksums``.
    also : sequence of str
        Folders in it that have no checksum of their own.
    """
    refuse_foreign_folder(folder, [*files, *also])
    with atomic_folder(folder, private=True) as temporary:
        yield temporary
        description["checksums"] = {name: file_checksum(temporary / name) for name in files}
        text = json.dumps(description, indent=2, ensure_ascii=False, allow_nan=False)
        (temporary / DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def refuse_foreign_folder(folder: Path, of_a_store: Iterable[str]) -> None:
    """Refuse a place that holds anything but what a store is made of."""
    for place in (folder, folder.parent):
        if place.exists() and not place.is_dir():
            raise StoreError(f"{place} is a file; choose another place for the store")
    # A BIDS data set has a description too, and must never be taken for an old store.
    names = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    foreign = {n for n in names if n[0] != "."} - {*of_a_store, DESCRIPTION}
    if names and (
        foreign
        or DESCRIPTION not in names
        or b'"format_version"' not in (folder / DESCRIPTION).read_bytes()
    ):
        raise StoreError(
            f"{folder} holds something that is not a site store; choose another place or empty it"
        )


def cell(value: object) -> str:
    """Return a value as a table's cell."""
    if value is None or value == "" or (isinstance(value, float) and not math.isfinite(value)):
        return MISSING
    text = str(value)
    if any(mark in text for mark in "\t\r\n"):
        raise StoreError(f"{text!r} holds a tab or a line break, which a table cannot store")
    return text


def write_table(file: Path, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write a tab-separated table."""
    with file.open("w", encoding="utf-8", newline="\n") as stream:
        stream.write("\t".join(header) + "\n")
        stream.writelines("\t".join(row) + "\n" for row in rows)
