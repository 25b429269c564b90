"""The console command ``fedbn``: experiments in one process, and what a finished run says."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
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
from fedbn.settings import (
    Experiment,
    parse_network,
    parse_training_share,
    read_experiment,
)
from fedbn.site_state import atomic_write, write_json

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
        if out is not None:
            _check_writable(out)
        import torch

        from fedbn.experiment import read_stores, run_federation
        from fedbn.report.tables import run_tables

        torch.set_num_threads(1)  # as in the job: the same bits
        experiment = _changed(
            read_experiment(job), policy=policy, fold=fold, seed=seed, rounds=rounds
        )
        if experiment.continues is not None:
            raise ValueError(
                f"{job} continues job {experiment.continues.job}, whose batch norm is at the "
                "sites: submit it to FLARE"
            )
        stores = read_stores(data or default_data_root(), experiment, verify=True)
        with _progress() as progress:
            task = progress.add_task("rounds", total=experiment.rounds)
            result = run_federation(experiment, stores, on_round=lambda _: progress.advance(task))
        for table in run_tables(result.report):
            screen.print(table)
        typer.echo(f"shared weights: sha256 {result.report['shared_weights_sha256']}")
        if out is not None:
            write_json(out, result.report)


@app.command()
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
    folds: Annotated[int | None, typer.Option(help="Folds, each held out once a seed.")] = None,
    seeds: Annotated[int, typer.Option(help="Repetitions, each with folds of its own.")] = 5,
    rounds: Annotated[int | None, typer.Option(help="Communication rounds.")] = None,
    local_epochs: Annotated[int | None, typer.Option(help="Local epochs a round.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a batch.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:JSON]",
            help="Network in place of the job's: a name, with arguments as "
            "'ConnectomeMLP:{\"hidden\": [16, 16]}'.",
        ),
    ] = None,
    training_share: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Share of each site's training subjects to train on (0.25), or of some sites' "
            "(NYU=0.1,UM=0.5).",
        ),
    ] = None,
    aggregation_weights: Annotated[
        str | None, typer.Option(help="equal, or samples: what a site counts in the mean.")
    ] = None,
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
) -> None:
    """Compare methods by repeated cross-validation on a job's experiment, with paired intervals."""
    with _one_sentence():
        from fedbn import comparison
        from fedbn.report.comparison_tables import comparison_tables, difference_sentences, width
        from fedbn.report.tables import render

        if track is not None:
            from fedbn.report import tracking

            tracking.check_tracker(track)
        experiment = read_experiment(job)
        training = {
            "local_epochs": local_epochs,
            "batch_size": batch_size,
            "learning_rate": learning_rate,
        }
        given = {name: value for name, value in training.items() if value is not None}
        experiment = _changed(
            experiment.changed(fold=0),
            rounds=rounds,
            n_folds=folds,
            network=None if network is None else parse_network(network),
            training_share=None if training_share is None else parse_training_share(training_share),
            aggregation_weights=aggregation_weights,
            training={**experiment.training.model_dump(), **given},
        )
        names = [name.strip() for name in methods.split(",") if name.strip()]
        plan = comparison.plan_comparison(
            experiment, names, seeds, reference, target_loss=target_loss
        )
        try:
            with _runs_progress() as on_run:
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
        with atomic_write(out / "tables.txt") as file:
            file.write(text.encode())
        typer.echo(text, nl=False)
        if track is not None:
            typer.echo(f"MLflow store: {tracking.track(out)}")


@app.command()
def unseen(
    job: Job,
    out: Annotated[
        Path, typer.Option(help="Folder for the results; a stopped evaluation is continued.")
    ],
    data: DataRoot = None,
    seeds: Annotated[int, typer.Option(help="Repetitions.")] = 5,
    rounds: Annotated[int | None, typer.Option(help="Communication rounds.")] = None,
    local_epochs: Annotated[int | None, typer.Option(help="Local epochs a round.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a batch.")] = None,
) -> None:
    """Leave one hospital out at a time, to learn what a new one should start from."""
    with _one_sentence():
        import torch

        from fedbn.report.tables import render
        from fedbn.report.unseen_tables import unseen_tables, width
        from fedbn.unseen import SUMMARY_FILE, leave_one_out

        torch.set_num_threads(1)  # as in every run: the same bits
        experiment = read_experiment(job)
        training = {"local_epochs": local_epochs, "batch_size": batch_size}
        given = {name: value for name, value in training.items() if value is not None}
        experiment = _changed(
            experiment, rounds=rounds, training={**experiment.training.model_dump(), **given}
        )
        with _runs_progress() as on_run:
            summary = leave_one_out(
                experiment, data or default_data_root(), out, n_seeds=seeds, on_run=on_run
            )
        text = render(unseen_tables(summary), width=width(summary))
        with atomic_write(out / "tables.txt") as file:
            file.write(text.encode())
        typer.echo(text, nl=False)
        typer.echo(f"evidence for `fedbn adapt --evidence`: {out / SUMMARY_FILE}")


@app.command()
def adapt(
    run_folder: Annotated[
        Path,
        typer.Option(
            "--run",
            help="A simulator workspace, a downloaded job, or the job's folder at the server.",
        ),
    ],
    data: Annotated[Path, typer.Option(help="The new hospital's store.")],
    out: Annotated[Path, typer.Option(help="Folder for model.pt and adaptation.json.")],
    evidence: Annotated[
        Path | None,
        typer.Option(help="Result of `fedbn unseen`: what did best is built, where it can be."),
    ] = None,
    start: Annotated[
        str | None, typer.Option(help="Start to build in place of the recommended one.")
    ] = None,
) -> None:
    """Make a complete model for a hospital that took no part, from its own unlabelled scans."""
    with _one_sentence():
        import torch

        from data_prep.site_store import read_site_store
        from fedbn import adaptation
        from fedbn.unseen import read_evidence, recommend

        torch.set_num_threads(1)  # as in every run: the same bits
        run = adaptation.read_run(run_folder)
        store = read_site_store(data, verify=True)
        found = recommend(run, None if evidence is None else read_evidence(evidence))
        why = " ".join(found.sentences)
        if start is not None:
            why = f"asked for with --start; recommended was {found.start!r}: {why}"
        report = adaptation.adapt(run, store, out, start=start or found.start, why=why)
        for sentence in found.sentences:
            typer.echo(sentence)
        typer.echo(f"{out / adaptation.MODEL_FILE}: {report['title']}")
        for name, value in report["used"].items():
            typer.echo(f"  {name}: {value}")


@app.command()
def explain(
    job: Job,
    out: Annotated[Path, typer.Option(help="Folder for edges.csv, explanation.json, pictures.")],
    data: DataRoot = None,
    policy: Annotated[
        str | None, typer.Option(help="fedbn, silobn or none (FedAvg), in place of the job's.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Communication rounds.")] = None,
    local_epochs: Annotated[int | None, typer.Option(help="Local epochs a round.")] = None,
    permutations: Annotated[
        int, typer.Option(help="How often all is trained again with permuted diagnoses.")
    ] = 3,
    top: Annotated[int, typer.Option(help="How many edges count as the strongest.", min=1)] = 50,
    draw: Annotated[bool, typer.Option(help="Draw the strongest edges on a brain.")] = True,
) -> None:
    """Say which connections the networks look at, at each site and over all, and how steadily."""
    with _one_sentence():
        import torch

        from fedbn import explanation
        from fedbn.experiment import read_stores
        from fedbn.report.explanation_tables import WIDTH, edge_table, pictures
        from fedbn.report.tables import render

        torch.set_num_threads(1)  # as in every run: the same bits
        experiment = read_experiment(job)
        training = experiment.training.model_dump()
        if local_epochs is not None:
            training["local_epochs"] = local_epochs
        experiment = _changed(
            experiment.changed(fold=0), policy=policy, rounds=rounds, training=training
        )
        stores = read_stores(data or default_data_root(), experiment, verify=True)
        explanation.check_out(out)
        with _runs_progress() as on_run:
            found = explanation.explain(
                experiment, stores, n_permutations=permutations, on_run=on_run
            )
        content = explanation.write_explanation(found, out, top)
        sentences = explanation.stability_sentences(content["stability"], top)
        text = render([edge_table(found, n_top=top)], WIDTH) + "\n" + "\n".join(sentences) + "\n"
        with atomic_write(out / "tables.txt") as file:
            file.write(text.encode())
        typer.echo(text, nl=False)
        if draw:
            for picture in pictures(found):
                with atomic_write(out / f"{picture.name}.png") as file:
                    file.write(picture.png)
        typer.echo(f"all edges: {out / explanation.EDGES_FILE}")


@app.command()
def results(
    run_folder: Annotated[
        Path, typer.Argument(help="A simulator workspace, a downloaded job, or a results.json.")
    ],
) -> None:
    """Print the tables of a finished run again."""
    with _one_sentence():
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
    with _one_sentence():
        from fedbn.report.writing import write_report

        path = write_report(folder, out, data, lambda step: typer.echo(f"{step} ...", err=True))
        typer.echo(f"{path} and {len(list(path.parent.glob('*.png')))} pictures beside it")


@app.command()
def doctor(
    site_config: Annotated[
        Path | None,
        typer.Option(help="The site's fedbn_site.yml. Default: local/fedbn_site.yml of the kit."),
    ] = None,
    kit: Annotated[
        Path | None,
        typer.Option(
            help="The site's startup kit: the folder that holds startup/ and local/. Default: this "
            "folder, if it is one.",
            show_default=False,
        ),
    ] = None,
    job: Annotated[
        Path | None, typer.Option(help="A job folder, to find out whether it can train here.")
    ] = None,
) -> None:
    """Look whether this machine is ready for a federation, before a client is started."""
    with _one_sentence():
        from fedbn.doctor import FAILED, examine

        if kit is None and (Path.cwd() / "startup" / "fed_client.json").is_file():
            kit = Path.cwd()
        statuses = []
        for finding in examine(kit, site_config, job):
            typer.echo(f"{finding.status:<8} {finding.subject}: {finding.sentence}")
            statuses.append(finding.status)
        if kit is None:
            typer.echo("no startup kit was looked at: give --kit FOLDER")
        if n_failed := statuses.count(FAILED):
            raise ValueError(
                f"{n_failed} of {len(statuses)} lines failed: do what they say, and run it again"
            )


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
    with _one_sentence():
        from fedbn.resume import continue_job

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


@app.command()
def export(
    run_folder: Annotated[
        Path,
        typer.Option("--run", help="The site's FLARE workspace, or its folder of one job."),
    ],
    site: Annotated[str, typer.Option(help="The site's name in the job.")],
    out: Annotated[Path, typer.Option(help="Folder of the bundle; an older bundle is replaced.")],
    data: DataRoot = None,
    finetuned: Annotated[
        bool, typer.Option("--finetuned", help="The model after fine-tuning at the site.")
    ] = False,
) -> None:
    """Make a site's own model, with its own batch norm, into a MONAI bundle that can predict."""
    with _one_sentence():
        import torch

        from data_prep.site_store import StoreError
        from fedbn.bundle import export_bundle
        from fedbn.kept_model import find_kept_model, read_own_store, site_facts
        from fedbn.site_network import NOTICE

        torch.set_num_threads(1)
        store = read_own_store(data or default_data_root(), site, required=data is not None)
        kept = find_kept_model(run_folder, site, finetuned=finetuned, store=store)
        try:
            facts = site_facts(kept, run_folder, store)
        except StoreError as error:
            if data is not None:
                raise
            typer.echo(f"without the store: {error}", err=True)
            facts = site_facts(kept, run_folder, None)
        _, compiled = export_bundle(kept, facts, out)
        typer.echo(f"{out}: the model of site {site}, from {kept.origin}")
        checked = "models/model.pt and models/model.ts" if compiled else "models/model.pt"
        typer.echo(f"{checked} give the logits of the kept model to within 1e-5")
        if facts.scores is not None:
            of_subject = facts.scores["subject"]
            typer.echo(
                f"held-out subjects: {of_subject['n']}, accuracy "
                f"{100 * (of_subject['accuracy'] or 0):.1f} %"
            )
        if facts.distances is None:
            typer.echo(
                "exported without the site's store (--data): the bundle cannot warn of scans "
                "unlike those of the training"
            )
        typer.echo("It holds the site's own batch norm: it stays at the site.")
        typer.echo(NOTICE)


@app.command()
def predict(
    model: Annotated[Path, typer.Option(help="A bundle, as from `fedbn export`.")],
    inputs: Annotated[
        list[Path],
        typer.Option(
            "--input",
            help="ROI time series (.1D, .tsv, .csv), a functional scan (.nii.gz), or a site store; "
            "more may follow.",
        ),
    ],
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="[INPUT]...", help="More of them.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the tables and pictures; else only the screen.")
    ] = None,
    atlas: Annotated[Path | None, typer.Option(help="Label map, for functional scans.")] = None,
    labels: Annotated[Path | None, typer.Option(help="Table of the label map's regions.")] = None,
    tr: Annotated[
        float | None, typer.Option(help="Repetition time in seconds, where no file states it.")
    ] = None,
    pictures: Annotated[int, typer.Option(help="Draw at most so many scans.", min=0)] = 10,
) -> None:
    """Ask a site's own model about scans: probabilities, what spoke for them, and warnings."""
    with _one_sentence():
        import torch

        from fedbn import prediction
        from fedbn.bundle import read_bundle
        from fedbn.report.prediction_tables import prediction_lines, prediction_table

        torch.set_num_threads(1)  # many small products: more threads only wait for each other
        if (atlas is None) != (labels is None):
            raise ValueError("--atlas and --labels are given together: a label map and its table")
        if out is not None:
            prediction.check_out(out)
        files = prediction.AtlasFiles(atlas, labels, tr) if atlas and labels else None
        bundle = read_bundle(model)
        with _progress() as progress:
            task = progress.add_task("scans", total=None)
            predictions = prediction.predict_files(
                bundle, [*inputs, *(more or [])], files, on_scan=lambda: progress.advance(task)
            )
        screen.print(prediction_table(bundle, predictions))
        for line in prediction_lines(bundle, predictions):
            typer.echo(line)
        if out is not None:
            with _progress() as progress:
                total = min(pictures, len(predictions))
                task = progress.add_task("pictures", total=total)
                prediction.write_predictions(
                    bundle,
                    predictions,
                    out,
                    pictures=pictures,
                    on_picture=lambda: progress.advance(task),
                )
            drawn = f"{total} picture{'' if total == 1 else 's'}"
            typer.echo(f"{out}: predictions.tsv, windows.tsv, connections.tsv, {drawn}")


def _check_writable(out: Path) -> None:
    """Find out before a run, not after it, that its results have no place."""
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; name a file, such as {out / 'results.json'}")
    out.parent.mkdir(parents=True, exist_ok=True)


def _changed(experiment: Experiment, **changes: object) -> Experiment:
    return experiment.changed(**{k: v for k, v in changes.items() if v is not None})


def _progress() -> Progress:
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
def _runs_progress() -> Iterator[Callable[[int, int], None]]:
    """Follow a comparison: a bar with the time left on a terminal, else a line now and then."""
    started = time.monotonic()
    first: list[int] = []
    with _progress() as progress:
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
def _one_sentence() -> Iterator[None]:
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


if __name__ == "__main__":
    app()
