"""``run``, ``job``, ``results``, ``report``, ``resume``: one experiment, and what a run says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from data_prep.files import write_json
from fedbn.cli.common import (
    Changes,
    ChangesFile,
    DataRoot,
    ExperimentCommand,
    Job,
    app,
    changed_experiment,
    check_writable,
    one_sentence,
    progress_bar,
    screen,
)
from fedbn.federation.experiment import Experiment
from fedbn.tasks.data import default_data_root


@app.command(cls=ExperimentCommand)
def run(
    job: Job,
    data: DataRoot = None,
    out: Annotated[Path | None, typer.Option(help="Write results.json here.")] = None,
    changes: Changes = None,
    changes_file: ChangesFile = None,
) -> None:
    """Run a job's experiment inside this process: the same numbers as in FLARE, no transport."""
    with one_sentence():
        if out is not None:
            check_writable(out)
        import torch

        from fedbn.federation.simulation import read_sites, run_federation
        from fedbn.federation.site import make_network
        from fedbn.report.tables import run_tables

        torch.set_num_threads(1)  # as in the job: the same bits
        experiment = changed_experiment(job, changes, changes_file)
        if experiment.continues is not None:
            raise ValueError(
                f"{job} continues job {experiment.continues.job}, whose batch norm is at the "
                "sites: submit it to FLARE"
            )
        stores = read_sites(data or default_data_root(), experiment, verify=True)
        if doubt := make_network(experiment)[1].warning():
            typer.echo(f"fedbn: {doubt}", err=True)
        with progress_bar() as progress:
            task = progress.add_task("rounds", total=experiment.rounds)
            result = run_federation(experiment, stores, on_round=lambda _: progress.advance(task))
        if out is not None:
            write_json(out, result.report)
        for table in run_tables(result.report) if result.report["sites"] else ():
            screen.print(table)
        typer.echo(f"shared weights: sha256 {result.report['shared_weights_sha256']}")
        if failed := result.report.get("not_scored"):
            raise ValueError("; ".join(f"{n} is not wholly scored: {e}" for n, e in failed.items()))


@app.command(name="job", cls=ExperimentCommand)
def make_job(
    job: Job,
    out: Annotated[Path, typer.Option(help="The new job folder.")],
    method: Annotated[
        str | None, typer.Option(help="A method that FLARE can run, in place of the job's own.")
    ] = None,
    changes: Changes = None,
    changes_file: ChangesFile = None,
) -> None:
    """Write the FLARE job folder of another method or other settings, wired like a job."""
    with one_sentence():
        from fedbn.core.networks import check_allowed
        from fedbn.federation.job_folder import job_name, write_job
        from fedbn.study.methods import flare_experiment

        def start(experiment: Experiment) -> Experiment:
            found = experiment if method is None else flare_experiment(method, experiment)
            return found.changed(name=job_name(out))

        experiment = changed_experiment(job, changes, changes_file, ("continues",), start)
        for line in write_job(job, out, experiment):
            typer.echo(line)
        n_sites = len(experiment.sites)
        typer.echo(f"{out}: run it with `nvflare simulator {out} -n {n_sites}`, or submit it")
        try:
            check_allowed(experiment.network.name, ())
        except ValueError as error:
            typer.echo(str(error))


@app.command()
def results(
    run_folder: Annotated[
        Path, typer.Argument(help="A simulator workspace, a downloaded job, or a results.json.")
    ],
) -> None:
    """Print the tables of a finished run again."""
    with one_sentence():
        from fedbn.report.reading import early_end, read_results, results_file
        from fedbn.report.tables import run_tables

        found = read_results(results_file(run_folder))
        for table in run_tables(found) if found["sites"] else ():
            screen.print(table)
        if (why := early_end(found)) is not None:
            typer.echo(why)


@app.command()
def report(
    folder: Annotated[
        Path,
        typer.Argument(help="A comparison, a simulator workspace, a downloaded job, results.json."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to. Default: report inside the folder.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with one store a site, for what needs a model or a connectome."),
    ] = None,
) -> None:
    """Write one self-contained page, and its pictures as PNG, from a finished comparison or run."""
    with one_sentence():
        from fedbn.report.writing import write_report

        path = write_report(folder, out, data, lambda step: typer.echo(f"{step} ...", err=True))
        typer.echo(f"{path} and {len(list(path.parent.glob('*.png')))} pictures beside it")


@app.command()
def resume(
    run: Annotated[
        Path,
        typer.Option(
            help="What the run left: the server's folder of the job, its downloaded result, or a "
            "simulator workspace."
        ),
    ],
    job: Annotated[Path, typer.Option(help="The job folder that was submitted.")],
    out: Annotated[Path, typer.Option(help="The new job folder.")],
    rounds: Annotated[
        int | None, typer.Option(help="All rounds, those before included. Default: the job's.")
    ] = None,
    min_sites: Annotated[
        int | None,
        typer.Option(help="Sites that a round needs, and FLARE's min_clients.", min=1),
    ] = None,
) -> None:
    """Make the job that goes on where a run has ended, with every site's own batch norm."""
    with one_sentence():
        from fedbn.federation.resume import continue_job

        experiment = continue_job(run, job, out, rounds=rounds, min_sites=min_sites)
        continues = experiment.continues
        assert continues is not None
        left = experiment.rounds - continues.after_round - 1
        typer.echo(
            f"{out} continues job {continues.job} after round {continues.after_round} (counted "
            f"from 0): {left} of {experiment.rounds} rounds are left. Submit it as any job"
            + (
                f", in a workspace other than {continues.workspace}"
                if continues.workspace is not None
                else ""
            )
        )
