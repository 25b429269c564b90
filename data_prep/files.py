"""Files and folders on disk: whole under their name or not there, and one writer at a time.

What is written goes to a hidden name beside the target and is renamed when it is on the disk. An
interrupted or killed run leaves the older content, and the next writer removes what it left.
Symbolic links are followed and stay links. Modes follow the umask, or are those of what is
replaced; what is private, as all that holds subjects, is 0600 and in a folder of 0700. Whatever
cannot be written is a `FileError`: one sentence that names the place.

Every data set, state and result goes through this module, so it needs the standard library only
(and `filelock`, at the first write).
"""

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

__all__ = [
    "BusyError",
    "FileError",
    "atomic_file",
    "atomic_folder",
    "file_checksum",
    "followed",
    "lock",
    "recover_folder",
    "write_files",
    "write_json",
    "write_text",
]

StrPath = str | os.PathLike[str]

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
#: How long a file that another process is writing is waited for, in seconds.
PATIENCE_S = 10.0


class FileError(OSError):
    """A place that cannot be written; the message is one sentence that names it."""


class BusyError(FileError):
    """A place that another process is writing now."""


def followed(path: StrPath) -> Path:
    """Return the absolute place that a path, of something there or not, leads to behind all links.

    Raises a FileError if links lead in a circle, or into a folder that is not there.
    """
    for link in (Path(path), *Path(path).parents):
        if not link.is_symlink() or link.exists():
            continue
        target = Path(os.path.realpath(link))
        if target.is_symlink():
            raise FileError(f"{link} is a symbolic link that leads back to itself; remove it")
        if not target.parent.is_dir():
            raise FileError(
                f"{link} is a symbolic link to {target}, and there is no folder {target.parent}; "
                "make it (is its disk mounted?), or remove the link"
            )
    return Path(os.path.realpath(path))


def file_checksum(file: StrPath) -> str:
    """Return the SHA-256 of a file in hexadecimal; it is read in pieces."""
    with Path(file).open("rb") as stream:
        digest = hashlib.sha256()
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def lock(path: StrPath, doing: str = "writing", wait_s: float = 0.0) -> Iterator[None]:
    """Keep a file or folder, there or not, for this process, by a hidden file beside it.

    Parameters
    ----------
    path : path
        The folders above are made.
    doing : str
        For the message of a BusyError: ``another run is <doing> <path> now``.
    wait_s : float
        Seconds to wait for another process.
    """
    from filelock import FileLock, Timeout

    with _one_sentence(path):
        target = followed(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(_hidden(target, "lock"), timeout=wait_s)
        try:
            held.acquire()
        except Timeout:
            raise BusyError(f"another run is {doing} {path} now; wait until it has ended") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:  # some network folders have none: go on without
                raise
    try:
        yield
    finally:
        if held.is_locked:
            with suppress(OSError):  # Windows keeps an open file
                Path(held.lock_file).unlink()
            held.release()


@contextmanager
def atomic_file(path: StrPath, *, private: bool = False) -> Iterator[IO[bytes]]:
    """Open a binary file that appears under its name when the block has ended without an error.

    Parameters
    ----------
    path : path
        The folders above are made. A device or pipe is written directly.
    private : bool
        Mode 0600. Otherwise the mode of the file that is replaced, or what the umask leaves.
    """
    named = Path(path)
    with ExitStack() as stack:
        stack.enter_context(_one_sentence(named))
        if named.exists() and not named.is_file() and not named.is_dir():
            yield stack.enter_context(named.open("wb"))
            return
        stack.enter_context(lock(named, wait_s=PATIENCE_S))
        target = followed(named)
        if target.is_dir():
            raise FileError(f"{named} is a folder; name a file")
        temporary = _hidden(target, "partial")
        temporary.unlink(missing_ok=True)  # of a killed process
        stack.callback(temporary.unlink, missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        with open(os.open(temporary, flags, 0o600 if private else 0o666), "wb") as file:  # noqa: PTH123
            yield file
            file.flush()
            os.fsync(file.fileno())
        _set_mode(temporary, like=target, private=private)
        temporary.replace(target)
        _sync(target.parent)


def write_text(path: StrPath, text: str, *, private: bool = False) -> None:
    """Write UTF-8 text as `atomic_file` does; line ends stay as they are."""
    with atomic_file(path, private=private) as file:
        file.write(text.encode())


def write_json(path: StrPath, content: Any, *, private: bool = False) -> None:
    """Write indented JSON as `atomic_file` does; NaN is a ValueError, because JSON has none."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n", private=private)


def write_files(folder: StrPath, contents: Mapping[str, bytes]) -> None:
    """Write files into a folder, each as `atomic_file` does; where one fails, none is new."""
    place, new = Path(folder), list[Path]()
    made = not place.exists()
    try:
        for name, content in contents.items():
            there = (place / name).exists()
            with atomic_file(place / name) as file:
                file.write(content)
            new += [] if there else [place / name]
    except BaseException:
        for path in new:
            path.unlink(missing_ok=True)
        if made:
            with suppress(OSError):
                place.rmdir()
        raise


@contextmanager
def atomic_folder(path: StrPath, *, private: bool = False) -> Iterator[Path]:
    """Yield a new folder that takes its name, and an older one's place, when the block has ended.

    What the older one holds is not looked at: refuse what must not be replaced before.

    Parameters
    ----------
    path : path
        The folders above are made.
    private : bool
        Modes 0700 and 0600. Otherwise those of the files that are replaced, or what the umask
        leaves.
    """
    with _one_sentence(path), lock(path):
        target = followed(path)
        _refuse_unreplaceable(path, target)
        _recover(target)
        temporary = _hidden(target, "partial")
        temporary.mkdir(mode=0o700 if private else 0o777)
        try:
            yield temporary
            for inner in (temporary, *temporary.rglob("*")):
                _set_mode(inner, like=target / inner.relative_to(temporary), private=private)
                _sync(inner)
            _swap(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def recover_folder(path: StrPath) -> None:
    """Remove what killed runs left beside a folder, and put a stepped-aside one back."""
    target = followed(path)
    if _hidden(target, "partial").exists() or _hidden(target, "replaced").exists():
        with _one_sentence(path), lock(path):
            _recover(target)


def _hidden(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}")


def _recover(target: Path) -> None:
    partial, aside = _hidden(target, "partial"), _hidden(target, "replaced")
    if aside.is_dir() and target.exists():
        shutil.rmtree(aside)
    elif aside.is_dir():
        aside.rename(target)
    if partial.is_dir():
        shutil.rmtree(partial)


def _swap(temporary: Path, target: Path) -> None:
    """Rename the finished folder; an older one steps aside first and is then removed."""
    aside = _hidden(target, "replaced")
    if target.exists():
        target.rename(aside)
    try:
        temporary.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    _sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)  # the new one is in place; the next run tries again


def _refuse_unreplaceable(path: StrPath, target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise FileError(f"{path} is a file; name a folder")
    if target.is_mount():
        raise FileError(f"{path} is where a disk is mounted; name a folder inside it")
    if not os.access(target, os.W_OK | os.X_OK):
        raise FileError(f"{path} cannot be replaced: this user may not write to it")


def _set_mode(path: Path, *, like: Path, private: bool) -> None:
    if private:
        path.chmod(0o700 if path.is_dir() else 0o600)
    elif like.exists():
        path.chmod(stat.S_IMODE(like.stat().st_mode))


def _sync(path: Path) -> None:
    """Have the system write a file or folder to the disk now."""
    if path.is_dir() and os.name == "nt":  # Windows cannot sync a folder
        return
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _one_sentence(path: StrPath) -> Iterator[None]:
    """Say of any error of the system which place was not written, and why."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        if isinstance(error, shutil.Error):  # of a copied folder, with a line a file
            number = re.search(r"\[Errno (\d+)\]", str(error))
            error = OSError(int(number[1]), os.strerror(int(number[1]))) if number else error
        reason = error.strerror or str(error)
        place = str(error.filename or path)
        if place != str(path) and not Path(place).name.startswith(f".{Path(path).name}."):
            reason = f"{place}: {reason}"
        hint = "; free some space, or name another place" if error.errno in NO_SPACE else ""
        raise FileError(f"{path} is not written and stays as it was ({reason}){hint}") from error
