"""The console command ``fedbn``: experiments in one process, and what a finished run says."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from data_prep.site_store import default_data_root
from fedbn.settings import Experiment, read_experiment
from fedbn.site_state import write_json

app = typer.Typer(
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


@app.callback()
def _main() -> None:
    """Federated learning in which every hospital keeps its own batch norm."""


@app.command()
def run(
    job: Job,
    data: DataRoot = None,
    policy: Annotated[
        str | None, typer.Option(help="fedbn, silobn or none (FedAvg), in place of the job's.")
    ] = None,
    fold: Annotated[int | None, typer.Option(help="Fold to hold out.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Communication rounds.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write results.json here.")] = None,
) -> None:
    """Run a job's experiment inside this process: the same numbers as in FLARE, no transport."""
    with _one_sentence():
        import torch

        from fedbn.experiment import read_stores, run_federation
        from fedbn.report.tables import run_tables

        torch.set_num_threads(1)  # as in the job: the same bits
        experiment = _changed(
            read_experiment(job), policy=policy, fold=fold, seed=seed, rounds=rounds
        )
        stores = read_stores(data or default_data_root(), experiment)
        with _progress() as progress:
            task = progress.add_task("rounds", total=experiment.rounds)
            result = run_federation(experiment, stores, on_round=lambda _: progress.advance(task))
        for table in run_tables(result.report):
            screen.print(table)
        screen.print(f"shared weights: sha256 {result.report['shared_weights_sha256']}")
        if out is not None:
            write_json(out, result.report)


@app.command("cross-validate")
def cross_validate_command(
    job: Job,
    data: DataRoot = None,
    policies: Annotated[
        str, typer.Option(help="Policies to compare, with commas: fedbn, silobn, none (FedAvg).")
    ] = "fedbn,none",
    seeds: Annotated[int, typer.Option(help="Number of seeds, from 0.", min=1)] = 1,
    folds: Annotated[
        str | None, typer.Option(help="Folds to hold out, with commas; all if left out.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Communication rounds.")] = None,
    local_epochs: Annotated[int | None, typer.Option(help="Local epochs a round.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a batch.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    alone: Annotated[bool, typer.Option(help="Also train each site alone.")] = True,
    jobs: Annotated[int, typer.Option(help="Runs at a time; 0: one a CPU core.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="Write all scores here, as JSON.")] = None,
) -> None:
    """Repeat a job's experiment over folds, seeds and policies, and print one table."""
    with _one_sentence():
        from dataclasses import asdict

        from fedbn.experiment import cross_validate, plan_runs, read_stores
        from fedbn.report.tables import cross_validation_table

        experiment = read_experiment(job)
        training = {
            name: value
            for name, value in (
                ("local_epochs", local_epochs),
                ("batch_size", batch_size),
                ("learning_rate", learning_rate),
            )
            if value is not None
        }
        experiment = _changed(
            experiment,
            rounds=rounds,
            compare_with_alone=alone,
            training={**experiment.training.model_dump(), **training},
        )
        root = data or default_data_root()
        runs = plan_runs(experiment, policies.split(","), range(seeds), _numbers("folds", folds))
        # A fault in the data is told once, before any process starts.
        synthetic = any(store.is_synthetic for store in read_stores(root, experiment).values())
        with _progress() as progress:
            task = progress.add_task("runs", total=len(runs))
            scores = cross_validate(
                runs,
                root,
                processes=jobs or os.cpu_count() or 1,
                on_run=lambda done: progress.update(task, completed=done),
            )
        screen.print(cross_validation_table(scores, synthetic=synthetic))
        if out is not None:
            write_json(out, [asdict(score) for score in scores])


@app.command()
def results(
    run_folder: Annotated[
        Path, typer.Argument(help="A simulator workspace, a downloaded job, or a results.json.")
    ],
) -> None:
    """Print the tables of a finished run again."""
    with _one_sentence():
        from fedbn.report.tables import run_tables
        from fedbn.results import FORMAT

        path = _results_file(run_folder)
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{path} is not a results file of fedbn ({FORMAT})")
        for table in run_tables(content):
            screen.print(table)


def _results_file(folder: Path) -> Path:
    if folder.is_file():
        return folder
    found = sorted(folder.rglob("results.json")) if folder.is_dir() else []
    if len(found) != 1:
        what = "no results.json" if not found else f"{len(found)} files results.json"
        raise ValueError(f"{what} in {folder}; give the file, or the folder of one finished run")
    return found[0]


def _numbers(option: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--{option} takes whole numbers with commas, got {text!r}") from error


def _changed(experiment: Experiment, **changes: object) -> Experiment:
    return experiment.changed(**{k: v for k, v in changes.items() if v is not None})


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


@contextlib.contextmanager
def _one_sentence() -> Iterator[None]:
    """Turn what a user can mend into one sentence on stderr and exit code 1."""
    try:
        yield
    except (ValueError, RuntimeError, ArithmeticError, OSError) as error:
        typer.echo(f"fedbn: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    app()
