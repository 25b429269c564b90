"""A store's folder: written whole or not at all, with checksums, by one run at a time.

Imported at every start of a client process: NumPy's and the standard library's cost only.
"""

import errno
import glob
import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    import fcntl

__all__ = [
    "DESCRIPTION",
    "MISSING",
    "StoreError",
    "cell",
    "clean_leftovers",
    "file_checksum",
    "new_store",
    "read_table",
    "refuse_foreign_folder",
    "some_of",
    "verify_checksums",
    "write_table",
]

DESCRIPTION = "dataset_description.json"
MISSING = "n/a"


class StoreError(ValueError):
    """A site store, or what should become one, is not usable; the message says why."""


def read_table(file: Path, site: str, columns: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Read a tab-separated table whose first columns must be `columns`."""
    if not file.is_file():
        raise StoreError(f"site {site!r}: {file} is missing; make the store again")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise StoreError(
            f"site {site!r}: {file.name} is not UTF-8 text; make the store again"
        ) from None
    header = lines[0].split("\t") if lines else []
    if tuple(header[: len(columns)]) != tuple(columns):
        raise StoreError(
            f"site {site!r}: {file.name} starts with the columns {header}, expected "
            f"{list(columns)}; make the store again"
        )
    rows = [line.split("\t") for line in lines[1:]]
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise StoreError(
                f"site {site!r}: line {number} of {file.name} has {len(row)} fields, the header "
                f"has {len(header)}; make the store again"
            )
    if not rows:
        raise StoreError(f"site {site!r}: {file.name} has no rows; make the store again")
    return header, rows


def verify_checksums(
    folder: Path, site: str, description: Mapping[str, Any], names: Iterable[str]
) -> None:
    """Refuse a store of which one of these files is not as it was written."""
    for name in names:
        expected = description["checksums"].get(name)
        found = file_checksum(folder / name)
        if found != expected:
            raise StoreError(
                f"site {site!r}: {name} was changed after the store was written (sha256 "
                f"{found[:12]}…, stated {str(expected)[:12]}…); make the store again"
            )


def file_checksum(file: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file, in hexadecimal.

    Parameters
    ----------
    file : path
        Read in pieces, so a large file costs no memory.

    Returns
    -------
    str
    """
    with Path(file).open("rb") as stream:
        digest = hashlib.sha256()
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def new_store(
    folder: Path, site: str, files: Sequence[str], description: dict[str, Any]
) -> Iterator[Path]:
    """Give a temporary folder to write a store to; it takes the store's place at the end.

    Parameters
    ----------
    folder : Path
        The store. What is there as a store is replaced; any other folder that is not empty is
        refused.
    site : str
        Name of the site, for messages.
    files : sequence of str
        What is written besides the description; each gets its checksum.
    description : dict
        Written last, as it is by then, with ``checksums``.

    Yields
    ------
    Path

    Raises
    ------
    StoreError
        If the place holds something else, another run is writing there, or the disk is full.
    """
    refuse_foreign_folder(folder, files)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _no_space_sentence(site, folder), _temporary_folder(folder) as temporary:
        yield temporary
        description["checksums"] = {name: file_checksum(temporary / name) for name in files}
        text = json.dumps(description, indent=2, ensure_ascii=False, allow_nan=False)
        (temporary / DESCRIPTION).write_text(text + "\n", encoding="utf-8")
        for name in (*files, DESCRIPTION):
            _sync(temporary / name)
        _sync(temporary)
        _put_in_place(temporary, folder)


@contextmanager
def _no_space_sentence(site: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StoreError(
            f"site {site!r}: no space is left for the store in {folder.parent} "
            f"({os.strerror(error.errno)}); free some, or name another place with --out"
        ) from None


@contextmanager
def _temporary_folder(folder: Path) -> Iterator[Path]:
    """Make a folder beside the store to write to, marked as in use while this process lives."""
    temporary = folder.parent / f".{folder.name}.partial-{os.getpid()}"
    with _locked(folder.parent, wait=True):  # no other run takes the new folder for a dead one
        if clean_leftovers(folder):
            raise StoreError(f"another run is writing {folder} now; wait until it has ended")
        temporary.mkdir()
        lock = _lock(temporary)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _lock(folder: Path, *, wait: bool = False) -> int | None:
    """Lock a folder; returns what to close, or None where file systems have no locks.

    Raises BlockingIOError if another run holds the lock and `wait` is false.
    """
    if sys.platform == "win32":
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def _locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    lock = _lock(folder, wait=wait)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def refuse_foreign_folder(folder: Path, of_a_store: Iterable[str]) -> None:
    """Refuse a place that holds anything but what a store is made of."""
    for place in (folder, folder.parent):
        if place.exists() and not place.is_dir():
            raise StoreError(f"{place} is a file; choose another place for the store")
    # A BIDS data set has a description too, and must never be taken for an old store.
    names = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    if names and (
        DESCRIPTION not in names or {n for n in names if n[0] != "."} - {*of_a_store, DESCRIPTION}
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


def _sync(path: Path) -> None:
    """Have the system write a file or folder to the disk now."""
    if path.is_dir() and os.name == "nt":  # Windows cannot sync a folder
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Rename the finished folder; an old store steps aside first and is then removed."""
    aside = folder.parent / f".{folder.name}.replaced"
    if folder.is_dir() and any(folder.iterdir()):
        folder.rename(aside)
        try:
            temporary.rename(folder)
        except OSError:
            aside.rename(folder)
            raise
        shutil.rmtree(aside)
    else:
        with suppress(FileNotFoundError):
            folder.rmdir()
        temporary.rename(folder)
    _sync(folder.parent)


def clean_leftovers(folder: Path) -> bool:
    """Remove what interrupted runs left beside a store, and put a stepped-aside store back.

    Parameters
    ----------
    folder : Path
        The store.

    Returns
    -------
    bool
        Whether another run is writing this store; then nothing is done.
    """
    name = glob.escape(folder.name)
    leftovers = list(folder.parent.glob(f".{name}.partial-*"))
    for leftover in leftovers:
        try:
            with _locked(leftover):
                pass
        except FileNotFoundError:
            continue
        except BlockingIOError:
            return True
    aside = folder.parent / f".{folder.name}.replaced"
    if aside.is_dir():
        if folder.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(folder)
    for leftover in leftovers:
        shutil.rmtree(leftover, ignore_errors=True)
    return False


def some_of(ids: Sequence[str], limit: int = 5) -> str:
    """List the first few of many names, for a sentence."""
    if not ids:
        return "none"
    return ", ".join(ids[:limit]) + (f" and {len(ids) - limit} more" if len(ids) > limit else "")
