"""``export``, ``predict``, ``adapt``: a hospital's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbn.cli.common import app, one_sentence, progress_bar, screen
from fedbn.tasks.data import default_data_root

SiteData = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="The site's data, or the folder above. Default: $FEDBN_DATA, else ~/fedbn_data.",
        show_default=False,
    ),
]


@app.command()
def export(
    run_folder: Annotated[
        Path,
        typer.Option("--run", help="The site's FLARE workspace, or its folder of one job."),
    ],
    site: Annotated[str, typer.Option(help="The site's name in the job.")],
    out: Annotated[Path, typer.Option(help="Folder of the bundle; an older bundle is replaced.")],
    data: SiteData = None,
    finetuned: Annotated[
        bool, typer.Option("--finetuned", help="The model after fine-tuning at the site.")
    ] = False,
) -> None:
    """Make a site's own model, with its own batch norm, into a MONAI bundle that can predict."""
    with one_sentence():
        import torch

        from fedbn.models.bundle import export_bundle
        from fedbn.models.site_model import NOTICE, find_kept_model, read_own_data, site_facts
        from fedbn.tasks.bundling import bundling_of
        from fedbn.tasks.data import DataError

        torch.set_num_threads(1)
        place = data or default_data_root()
        kept = find_kept_model(run_folder, site, finetuned=finetuned, data=place)
        try:
            found = read_own_data(kept, place, required=data is not None)
            facts = site_facts(kept, run_folder, found)
        except DataError as error:
            if data is not None:
                raise
            typer.echo(f"without the store: {error}", err=True)
            facts = site_facts(kept, run_folder, None)
        _, compiled = export_bundle(kept, facts, out)
        typer.echo(f"{out}: the model of site {site}, from {kept.origin}")
        checked = "models/model.pt and models/model.ts" if compiled else "models/model.pt"
        typer.echo(f"{checked} give the logits of the kept model to within 1e-5")
        if facts.scores is not None:
            of_units, headline = facts.scores[kept.task.levels[0]], kept.task.metrics[0]
            typer.echo(
                f"held-out {kept.task.levels[0]}s: {of_units['n']}, {headline.title} "
                f"{100 * (of_units[headline.name] or 0):.1f} %"
            )
        if facts.distances is None:
            typer.echo(
                "exported without the site's data (--data): the bundle cannot warn of "
                f"{bundling_of(kept.task).word}s unlike those of the training"
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
            help="What the model is asked about: a site's data; of connectomes also ROI time "
            "series (.1D, .tsv, .csv) and functional scans (.nii.gz). More may follow.",
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
    pictures: Annotated[int, typer.Option(help="Draw at most so many.", min=0)] = 10,
) -> None:
    """Ask a site's own model: probabilities, what spoke for them, and warnings."""
    with one_sentence():
        import torch

        from fedbn.models import prediction
        from fedbn.models.bundle import read_bundle
        from fedbn.report import prediction_files
        from fedbn.report.prediction_tables import prediction_lines, prediction_table

        torch.set_num_threads(1)  # many small products: more threads only wait for each other
        if out is not None:
            prediction_files.check_out(out)
        named = {"atlas": atlas, "labels": labels, "tr": tr}
        options = {name: value for name, value in named.items() if value is not None}
        bundle = read_bundle(model)
        with progress_bar() as progress:
            task = progress.add_task(f"{bundle.side.word}s", total=None)
            predictions = prediction.predict_files(
                bundle, [*inputs, *(more or [])], options, on_case=lambda: progress.advance(task)
            )
        if out is not None:
            with progress_bar() as progress:
                task = progress.add_task("pictures", total=min(pictures, len(predictions)))
                written = prediction_files.write_predictions(
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
            typer.echo(f"{out}: {', '.join(written)}")


@app.command()
def adapt(
    run_folder: Annotated[
        Path,
        typer.Option(
            "--run",
            help="A simulator workspace, a downloaded job, or the job's folder at the server.",
        ),
    ],
    data: Annotated[Path, typer.Option(help="The new hospital's data, or the folder above.")],
    out: Annotated[Path, typer.Option(help="Folder for model.pt and adaptation.json.")],
    evidence: Annotated[
        Path | None,
        typer.Option(help="Result of `fedbn unseen`: what did best is built, where it can be."),
    ] = None,
    start: Annotated[
        str | None, typer.Option(help="Start to build in place of the recommended one.")
    ] = None,
) -> None:
    """Make a complete model for a hospital that took no part, from its own unlabelled data."""
    with one_sentence():
        import torch

        from fedbn.models import new_site
        from fedbn.study.evidence import read_evidence, recommend

        torch.set_num_threads(1)  # as in every run: the same bits
        run = new_site.read_run(run_folder)
        place = run.experiment.task.find(data)
        store = run.experiment.task.read(place, place.stem, verify=True)
        found = recommend(run, None if evidence is None else read_evidence(evidence))
        why = " ".join(found.sentences)
        if start is not None:
            why = f"asked for with --start; recommended was {found.start!r}: {why}"
        report = new_site.adapt(run, store, out, start=start or found.start, why=why)
        for sentence in found.sentences:
            typer.echo(sentence)
        for sentence in report["warnings"]:
            typer.echo(f"warning: {sentence}", err=True)
        typer.echo(f"{out / new_site.MODEL_FILE}: {report['title']}")
        for name, value in report["used"].items():
            typer.echo(f"  {name}: {value}")
