"""What ``fedbn predict`` says on the screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from fedbn.models.bundle import Bundle
from fedbn.models.prediction import Prediction, held_out_accuracy
from fedbn.report.prediction_files import answer, notice, prediction_row

MOST_ROWS = 40


def prediction_table(bundle: Bundle, predictions: Sequence[Prediction]) -> Table:
    """Return one row a case, at most :data:`MOST_ROWS`: the columns that lead to a decision."""
    table = Table(
        title=escape(f"Model of site {bundle.site}, job {bundle.facts['job']}"),
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    rows = [_row(bundle, one) for one in predictions[:MOST_ROWS]]
    own = bundle.facts["site_threshold"]
    for name, value in rows[0].items():
        title = name.replace("probability_", "probability\nof ").replace("class_at_", "class at\n")
        title = title.replace("site_threshold", f"{own or 0:.2f} (own)")
        is_number = isinstance(value, int | float)
        table.add_column(title, overflow="fold", justify="right" if is_number else "left")
    for row in rows:
        cells = row.values()
        table.add_row(*(f"{c:.3f}" if isinstance(c, float) else escape(str(c)) for c in cells))
    return table


def _row(bundle: Bundle, prediction: Prediction) -> dict[str, object]:
    """Return what leads to a decision."""
    answer_row = answer(bundle, prediction)
    whole = prediction_row(bundle, prediction)
    parts = f"{bundle.task.levels[-1]}s"
    return {
        bundle.side.word: whole[bundle.side.word],
        **{k: v for k, v in answer_row.items() if v != "n/a" and k != "site_threshold"},
        **({parts: whole[f"n_{parts}"]} if f"n_{parts}" in whole else {}),
        "unlike the\ntraining": whole["unlike_training"],
    }


def prediction_lines(bundle: Bundle, predictions: Sequence[Prediction]) -> list[str]:
    """Return what stands below the table: warnings, accuracy where classes are known, notice."""
    word, lines = bundle.side.word, []
    if len(predictions) > MOST_ROWS:
        lines.append(f"and {len(predictions) - MOST_ROWS} more {word}s; --out writes all of them")
    for one in predictions[:MOST_ROWS]:
        lines += [f"{one.case.name}: {sentence}" for sentence in one.case.warnings]
    if bundle.facts["distances"] is None:
        lines.append(
            f"The bundle was exported without the site's data: it cannot say whether a {word} is "
            "unlike those of the training."
        )
    threshold = bundle.facts["threshold"]
    right, n = held_out_accuracy(bundle, predictions, threshold)
    if n:
        at = "" if threshold is None else f" at {threshold:g}"
        lines.append(
            f"held-out subjects: {n}, accuracy {100 * right / n:.1f} %{at} ({right} right)"
        )
    trained = sum(one.case.in_training is True for one in predictions)
    unknown = sum(
        one.case.in_training is None and one.case.target is not None for one in predictions
    )
    if trained:
        lines.append(f"the model was trained on the subjects of {trained} {word}s")
    if unknown:
        lines.append(f"of {unknown} subjects it is not known whether the model was trained on them")
    if bundle.facts.get("adaptation"):
        lines.append(f"The model was made for {bundle.site}: nobody there was trained on.")
    return [*lines, notice(bundle)]
