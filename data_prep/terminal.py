"""What every command shows people: a table, a bar, or one sentence about what was wrong."""

import codecs
import functools
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = [
    "errors",
    "one_sentence_errors",
    "progress_bar",
    "screen",
    "show_any_text",
    "usage_errors",
]

screen = Console()
errors = Console(stderr=True)

Command = TypeVar("Command", bound=Callable[..., Any])


def show_any_text() -> None:
    """Let the screen take any text: of a character that its encoding lacks, something stays.

    Called before every command. A frame's line becomes ``-`` and all else ``?``; without this a
    table would end a command whose encoding is not UTF-8 after all its work.
    """

    def replaced(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        lost = error.object[error.start : error.end]
        return "".join("-" if "\u2500" <= c <= "\u257f" else "?" for c in lost), error.end

    codecs.register_error("fedbn.screen", replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="fedbn.screen")


def one_sentence_errors(command: Command) -> Command:
    """Turn the errors that a user can mend into one sentence and exit code 1."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (OSError, ValueError) as error:  # StoreError and SourceError are ValueErrors
            sentence = str(error)
            if isinstance(error, OSError) and error.filename and error.strerror:
                sentence = f"{error.filename}: {error.strerror}"
            errors.print(f"error: {sentence}", style="red", markup=False, soft_wrap=True)
            raise typer.Exit(1) from None

    return wrapped  # type: ignore[return-value]


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn a bad setting into a usage error, exit code 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal; what it yields moves it by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    ) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)
