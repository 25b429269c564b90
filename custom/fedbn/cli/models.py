"""``export``, ``predict``, ``adapt``: a hospital's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from data_prep.site_store import default_data_root
from fedbn.cli.common import DataRoot, app, one_sentence, progress_bar, screen


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
    with one_sentence():
        import torch

        from data_prep.site_store import StoreError
        from fedbn.models.bundle import export_bundle
        from fedbn.models.site_model import find_kept_model, read_own_store, site_facts
        from fedbn.models.site_network import NOTICE

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
    with one_sentence():
        import torch

        from fedbn.models import prediction
        from fedbn.models.bundle import read_bundle
        from fedbn.report import prediction_files
        from fedbn.report.prediction_tables import prediction_lines, prediction_table

        torch.set_num_threads(1)  # many small products: more threads only wait for each other
        if (atlas is None) != (labels is None):
            raise ValueError("--atlas and --labels are given together: a label map and its table")
        if out is not None:
            prediction_files.check_out(out)
        files = prediction.AtlasFiles(atlas, labels, tr) if atlas and labels else None
        bundle = read_bundle(model)
        with progress_bar() as progress:
            task = progress.add_task("scans", total=None)
            predictions = prediction.predict_files(
                bundle, [*inputs, *(more or [])], files, on_scan=lambda: progress.advance(task)
            )
        if out is not None:
            with progress_bar() as progress:
                total = min(pictures, len(predictions))
                task = progress.add_task("pictures", total=total)
                prediction_files.write_predictions(
                    bundle,
                    predictions,
                    out,
                    pictures=pictures,
                    on_picture=lambda: progress.advance(task),
                )
        screen.print(prediction_table(bundle, predictions))
        for line in prediction_lines(bundle, predictions):
            typer.echo(line)
        if out is not None:
            drawn = f"{total} picture{'' if total == 1 else 's'}"
            typer.echo(f"{out}: predictions.tsv, windows.tsv, connections.tsv, {drawn}")


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
    out: Annotated[Path, typer.Option(help="Folder for model.pt and new_site.json.")],
    evidence: Annotated[
        Path | None,
        typer.Option(help="Result of `fedbn unseen`: what did best is built, where it can be."),
    ] = None,
    start: Annotated[
        str | None, typer.Option(help="Start to build in place of the recommended one.")
    ] = None,
) -> None:
    """Make a complete model for a hospital that took no part, from its own unlabelled scans."""
    with one_sentence():
        import torch

        from data_prep.site_store import read_site_store
        from fedbn.models import new_site
        from fedbn.study.leave_one_site_out import read_evidence, recommend

        torch.set_num_threads(1)  # as in every run: the same bits
        run = new_site.read_run(run_folder)
        store = read_site_store(data, verify=True)
        found = recommend(run, None if evidence is None else read_evidence(evidence))
        why = " ".join(found.sentences)
        if start is not None:
            why = f"asked for with --start; recommended was {found.start!r}: {why}"
        report = new_site.adapt(run, store, out, start=start or found.start, why=why)
        for sentence in found.sentences:
            typer.echo(sentence)
        typer.echo(f"{out / new_site.MODEL_FILE}: {report['title']}")
        for name, value in report["used"].items():
            typer.echo(f"  {name}: {value}")
