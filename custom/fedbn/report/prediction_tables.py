"""What ``fedbn predict`` says on the screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from fedbn.models.bundle import Bundle
from fedbn.models.prediction import Prediction, held_out_accuracy, verdict
from fedbn.report.prediction_files import prediction_row

MOST_ROWS = 40


def prediction_table(bundle: Bundle, predictions: Sequence[Prediction]) -> Table:
    """Return one row a scan, at most :data:`MOST_ROWS`."""
    threshold, own = bundle.facts["threshold"], bundle.facts["site_threshold"]
    table = Table(
        title=escape(f"Model of site {bundle.site}, job {bundle.facts['job']}"),
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("scan", overflow="fold")
    table.add_column("probability\nof autism", justify="right")
    table.add_column(f"class at\n{threshold:g}")
    if own is not None:
        table.add_column(f"class at\n{own:.2f} (own)")
    table.add_column("windows", justify="right")
    table.add_column("unlike the\ntraining")
    for prediction in predictions[:MOST_ROWS]:
        cells = [
            escape(prediction.scan.name),
            f"{prediction.probability:.3f}",
            verdict(prediction, threshold),
            *([] if own is None else [verdict(prediction, own)]),
            str(len(prediction.window_probability)),
            str(prediction_row(bundle, prediction)["unlike_training"]),
        ]
        table.add_row(*cells)
    return table


def prediction_lines(bundle: Bundle, predictions: Sequence[Prediction]) -> list[str]:
    """Return what stands below the table: warnings, accuracy where classes are known, notice."""
    lines = []
    if len(predictions) > MOST_ROWS:
        lines.append(f"and {len(predictions) - MOST_ROWS} more scans; --out writes all of them")
    for prediction in predictions[:MOST_ROWS]:
        lines += [f"{prediction.scan.name}: {sentence}" for sentence in prediction.scan.warnings]
    if bundle.facts["distances"] is None:
        lines.append(
            "The bundle was exported without the site's store: it cannot say whether a scan is "
            "unlike those of the training."
        )
    right, n = held_out_accuracy(predictions, bundle.facts["threshold"])
    if n:
        lines.append(
            f"held-out subjects: {n}, accuracy {100 * right / n:.1f} % at "
            f"{bundle.facts['threshold']:g} ({right} right)"
        )
    trained = sum(p.scan.in_training is True for p in predictions)
    unknown = sum(p.scan.in_training is None and p.scan.diagnosis is not None for p in predictions)
    if trained:
        lines.append(f"{trained} scans are of subjects that the model was trained on")
    if unknown:
        lines.append(f"of {unknown} subjects it is not known whether the model was trained on them")
    lines.append(str(prediction_row(bundle, predictions[0])["notice"]))
    return lines
