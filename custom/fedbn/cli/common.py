"""What all commands have in common: the application, options, progress, and errors for people."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from data_prep.terminal import show_any_text
from fedbn.federation.changes import parse_changes, read_changes, with_changes
from fedbn.federation.experiment import Experiment, read_experiment

app = typer.Typer(
    callback=show_any_text,
    help="Federated learning in which every hospital keeps its own batch norm.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

screen = Console()

Job = Annotated[
    Path, typer.Argument(help="A job folder (jobs/abide_fedbn), or its experiment.json.")
]

DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="Folder with one store a site. Default: $FEDBN_DATA, else ~/fedbn_data.",
        show_default=False,
    ),
]


SHORT_NAMES = {
    "--name": "name",
    "--sites": "sites",
    "--rounds": "rounds",
    "--fold": "fold",
    "--folds": "n_folds",
    "--seed": "seed",
    "--policy": "policy",
    "--local-epochs": "training.local_epochs",
    "--batch-size": "training.batch_size",
    "--learning-rate": "training.learning_rate",
    "--network": "network",
    "--training-share": "training_share",
    "--aggregation-weights": "aggregation_weights",
}
"""Option to the field that it sets: ``--rounds 50`` is ``--set rounds=50``."""

Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Change a field of the job's experiment, by its dotted path, as in "
        "training.batch_size=32; the value is JSON or a text; may be repeated. Short for it: "
        f"{', '.join(SHORT_NAMES)}.",
    ),
]

ChangesFile = Annotated[
    Path | None,
    typer.Option("--set-file", metavar="FILE", help="JSON file of such changes; --set wins."),
]


class ExperimentCommand(typer.core.TyperCommand):
    """A command with ``--set``, which also goes by its short names."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write short names out before anything is looked at."""
        return super().parse_args(ctx, list(_written_out(args)))


def _written_out(args: Iterable[str]) -> Iterator[str]:
    rest = iter(args)
    for arg in rest:
        option, equals, value = arg.partition("=")
        if option not in SHORT_NAMES:
            yield arg
            continue
        yield "--set"
        value = value if equals else next(rest, "")
        yield f"{SHORT_NAMES[option]}={value}"


def changed_experiment(
    job: Path,
    changes: Iterable[str] | None,
    file: Path | None,
    decided: Collection[str] = (),
    start: Callable[[Experiment], Experiment] = lambda experiment: experiment,
) -> Experiment:
    """Read a job's experiment, with what was given on the command line.

    Parameters
    ----------
    job
        A job folder, or its experiment file.
    changes, file
        Of ``--set`` and ``--set-file``.
    decided
        Fields that the command decides by itself: to set them would have no effect.
    start
        What the command makes of the job's experiment before.

    Raises
    ------
    fedbn.federation.experiment.ExperimentError
        With the first field that is wrong.
    """
    given = {**(read_changes(file) if file else {}), **parse_changes(changes or ())}
    for path in given:
        if path.partition(".")[0] in decided:
            raise ValueError(f"{path}: this command decides it for each of its runs; leave it out")
    return with_changes(start(read_experiment(job)), given)


def check_writable(out: Path) -> None:
    """Find out before a run, not after it, that its results have no place."""
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; name a file, such as {out / 'results.json'}")
    out.parent.mkdir(parents=True, exist_ok=True)


def progress_bar() -> Progress:
    """Return a bar on stderr, shown on a terminal alone."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,  # in a file a bar is one line of no use
    )


@contextlib.contextmanager
def runs_progress() -> Iterator[Callable[[int, int], None]]:
    """Follow a comparison: a bar with the time left on a terminal, else a line now and then."""
    started = time.monotonic()
    first: list[int] = []
    with progress_bar() as progress:
        task = progress.add_task("runs", total=None)
        told = started

        def on_run(done: int, total: int) -> None:
            nonlocal told
            if not first:
                first.append(done)
                if done:
                    typer.echo(f"{done} of {total} runs are there already", err=True)
                progress.reset(task, total=total, completed=done)
            progress.update(task, completed=done)
            now = time.monotonic()
            if not progress.console.is_terminal and done > first[0] and now - told > 30:
                told = now
                left = (total - done) * (now - started) / (done - first[0])
                typer.echo(f"{done} of {total} runs, about {left / 60:.0f} min left", err=True)

        yield on_run


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """Turn what a user can mend into one sentence on stderr and exit code 1."""
    try:
        yield
    except typer.Exit:  # a RuntimeError, too, whose sentence has been said
        raise
    except (ValueError, RuntimeError, ArithmeticError, OSError) as error:
        sentence = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:
            sentence = f"cannot use {error.filename}: {error.strerror}"
        typer.echo(f"fedbn: {' '.join(sentence.split())}", err=True)
        raise typer.Exit(1) from error
