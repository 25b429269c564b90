"""What FLARE's simulator and its kits ask of a folder, and what FLARE does not say of it."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from data_prep.files import BusyError, FileError, lock


class WorkspaceError(ValueError):
    """A folder in which FLARE cannot start a process."""


def check_path(path: Path, what: str) -> None:
    """Refuse a path that FLARE cannot hand to a process: it splits commands as a shell does.

    Parameters
    ----------
    path
        As it will stand in a command.
    what
        Whose it is, for the message: ``"the workspace"``.

    Raises
    ------
    WorkspaceError
        If it has a blank, a quotation mark, a backslash or a ``#``.
    """
    try:
        split = shlex.split(str(path), True)
    except ValueError:  # an open quotation mark
        split = []
    if split != [str(path)]:
        raise WorkspaceError(
            f"the path of {what}, {str(path)!r}, has a blank, a quotation mark, a backslash or a "
            "#, at which FLARE splits the commands of its processes: none could start; take a "
            "folder without"
        )


@contextlib.contextmanager
def keeping(workspace: Path) -> Iterator[None]:
    """Hold a simulator's workspace for one run, by a hidden file beside it.

    FLARE deletes what is in a workspace whenever a simulator starts, before any of a job is read;
    so only what calls this before FLARE can save another run's.

    Raises
    ------
    WorkspaceError
        If no process could start there.
    data_prep.files.BusyError
        If another run holds it.
    """
    check_path(workspace.absolute(), "the workspace")
    check_path(Path(sys.executable), "this Python")
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lock(workspace, "using"))
        except BusyError as error:
            raise BusyError(f"{error}, or name another workspace") from error
        except FileError:  # nothing can be written beside it: go on without
            pass
        yield
