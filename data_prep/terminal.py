"""What every command shows people: a table, a bar, or one sentence about what was wrong."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["errors", "one_sentence_errors", "progress_bar", "screen", "usage_errors"]

screen = Console()
errors = Console(stderr=True)

Command = TypeVar("Command", bound=Callable[..., Any])


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
