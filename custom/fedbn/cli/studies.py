"""``compare``, ``unseen``, ``explain``, ``theory``: methods against each other, and why."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from data_prep.files import atomic_file, write_files, write_text
from fedbn.cli.common import (
    Changes,
    ChangesFile,
    DataRoot,
    ExperimentCommand,
    Job,
    app,
    changed_experiment,
    one_sentence,
    runs_progress,
)
from fedbn.federation.experiment import Experiment
from fedbn.tasks.data import default_data_root

DECIDED = ("fold", "seed", "policy", "algorithm", "finetune")
"""Fields that methods, seeds and folds decide."""


def _first_fold(experiment: Experiment) -> Experiment:
    """All folds are run, whichever of how many the job holds out."""
    return experiment.changed(fold=0)


@app.command(cls=ExperimentCommand)
def compare(
    job: Job,
    out: Annotated[
        Path, typer.Option(help="Folder for the results; a stopped comparison is continued.")
    ],
    data: DataRoot = None,
    methods: Annotated[
        str, typer.Option(help="Methods, with commas; the tables keep their order.")
    ] = "singleset,fedavg,fedprox,fedbn",
    reference: Annotated[
        str | None,
        typer.Option(help="Method to subtract. Default: fedavg if it is there, else the first."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Repetitions, each with folds of its own.")] = 5,
    target_loss: Annotated[
        float | None,
        typer.Option(
            help="Training loss whose first round is told. Default: the reference's at its last "
            "round."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time; 0: one a CPU core.", min=0)] = 0,
    track: Annotated[
        str | None,
        typer.Option(help="mlflow: also write everything to a local MLflow store in --out."),
    ] = None,
    changes: Changes = None,
    changes_file: ChangesFile = None,
) -> None:
    """Compare methods by repeated cross-validation on a job's experiment, with paired intervals."""
    with one_sentence():
        from fedbn.report.comparison_tables import comparison_tables, difference_sentences, width
        from fedbn.report.tables import render
        from fedbn.study import comparison
        from fedbn.study.plan import plan_comparison

        if track is not None:
            from fedbn.report import tracking

            tracking.check_tracker(track)
        experiment = changed_experiment(job, changes, changes_file, DECIDED, _first_fold)
        names = [name.strip() for name in methods.split(",") if name.strip()]
        plan = plan_comparison(experiment, names, seeds, reference, target_loss=target_loss)
        try:
            with runs_progress() as on_run:
                summary = comparison.compare(
                    plan,
                    data or default_data_root(),
                    out,
                    processes=jobs or os.cpu_count() or 1,
                    on_run=on_run,
                )
        except KeyboardInterrupt:
            typer.echo("fedbn: stopped; finished runs are kept, start again to go on", err=True)
            raise typer.Exit(130) from None
        tables = comparison_tables(summary)
        sentences = difference_sentences(summary)
        text = render(tables, width=width(summary)) + "\n" + "\n".join(sentences) + "\n"
        write_text(out / "tables.txt", text)
        store = None if track is None else tracking.track(out)
        typer.echo(text, nl=False)
        if store is not None:
            typer.echo(f"MLflow store: {store}")


@app.command(cls=ExperimentCommand)
def unseen(
    job: Job,
    out: Annotated[
        Path, typer.Option(help="Folder for the results; a stopped evaluation is continued.")
    ],
    data: DataRoot = None,
    seeds: Annotated[int, typer.Option(help="Repetitions.")] = 5,
    changes: Changes = None,
    changes_file: ChangesFile = None,
) -> None:
    """Leave one hospital out at a time, to learn what a new one should start from."""
    with one_sentence():
        import torch

        from fedbn.report.tables import render
        from fedbn.report.unseen_tables import unseen_tables, width
        from fedbn.study.evidence import SUMMARY_FILE
        from fedbn.study.leave_one_site_out import leave_one_out

        torch.set_num_threads(1)  # as in every run: the same bits
        experiment = changed_experiment(job, changes, changes_file, DECIDED)
        with runs_progress() as on_run:
            summary = leave_one_out(
                experiment, data or default_data_root(), out, n_seeds=seeds, on_run=on_run
            )
        text = render(unseen_tables(summary), width=width(summary))
        write_text(out / "tables.txt", text)
        typer.echo(text, nl=False)
        typer.echo(f"evidence for `fedbn adapt --evidence`: {out / SUMMARY_FILE}")


@app.command(cls=ExperimentCommand)
def explain(
    job: Job,
    out: Annotated[
        Path, typer.Option(help="Folder for a table of all inputs, explanation.json, pictures.")
    ],
    data: DataRoot = None,
    permutations: Annotated[
        int, typer.Option(help="How often all is trained again with permuted labels.")
    ] = 3,
    top: Annotated[
        int | None,
        typer.Option(
            help="How many inputs count as the strongest. Default: 50, at most a fifth of all.",
            min=1,
            show_default=False,
        ),
    ] = None,
    draw: Annotated[bool, typer.Option(help="Draw the strongest, on a brain for edges.")] = True,
    changes: Changes = None,
    changes_file: ChangesFile = None,
) -> None:
    """Say which inputs the networks look at, at each site and over all, and how steadily."""
    with one_sentence():
        import torch

        from fedbn.federation.simulation import read_sites
        from fedbn.report.explanation_tables import WIDTH, feature_table, pictures
        from fedbn.report.tables import render
        from fedbn.study import explanation

        torch.set_num_threads(1)  # as in every run: the same bits
        experiment = changed_experiment(job, changes, changes_file, ("fold",), _first_fold)
        stores = read_sites(data or default_data_root(), experiment, verify=True)
        explanation.check_out(out)
        features = experiment.task.feature_names(next(iter(stores.values())))
        n_top = (
            explanation.number_of_top(len(features.names), top) if features else explanation.N_TOP
        )
        with runs_progress() as on_run:
            found = explanation.explain(
                experiment, stores, n_permutations=permutations, on_run=on_run
            )
        content = explanation.write_explanation(found, out, n_top)
        noun = found.features.noun
        sentences = explanation.stability_sentences(content["stability"], n_top, noun)
        text = (
            render([feature_table(found, n_top=n_top)], WIDTH) + "\n" + "\n".join(sentences) + "\n"
        )
        write_text(out / "tables.txt", text)
        if draw:
            for picture in pictures(found):
                with atomic_file(out / f"{picture.name}.png") as file:
                    file.write(picture.png)
        typer.echo(text, nl=False)
        typer.echo(f"all {noun}s: {explanation.features_file(found, out)}")


@app.command()
def theory(
    out: Annotated[Path, typer.Option(help="Folder for theory.json, tables.txt and pictures.")],
    digits: Annotated[
        Path | None,
        typer.Option(help="Folder with one .npz a digit domain, as data_prep digits takes it."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with one store of connectomes a site.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Repetitions.", min=1)] = 5,
    steps: Annotated[int, typer.Option(help="Steps of gradient descent.", min=10)] = 400,
) -> None:
    """Compute what the paper's convergence theorem says, on toy clients and on real data."""
    with one_sentence():
        from fedbn.report.tables import render
        from fedbn.report.theory import TABLE_WIDTH, pictures, theory_tables
        from fedbn.study.theory import Settings, study
        from fedbn.tasks.connectome.task import kinds_of_rows

        if out.exists() and not out.is_dir():
            raise ValueError(f"{out} is not a folder; give another --out")
        settings = Settings(n_seeds=seeds, n_steps=steps)
        found = study(
            settings,
            digits,
            None if data is None else kinds_of_rows(data, settings.n_rows),
            lambda step: typer.echo(f"{step} ...", err=True),
        )
        text = render(theory_tables(found), width=TABLE_WIDTH)
        numbers = json.dumps(found, indent=2, allow_nan=False).encode()
        write_files(out, {"theory.json": numbers, "tables.txt": text.encode(), **pictures(found)})
        typer.echo(text, nl=False)
        typer.echo(f"numbers and three pictures: {out}")
