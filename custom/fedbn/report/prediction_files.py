"""Predictions as files: tables and pictures, each saying that this is research software."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_prep.files import atomic_file, write_text
from fedbn.models.bundle import Bundle, is_bundle, read_bundle
from fedbn.models.prediction import Prediction, PredictionError, predict_files, verdict
from fedbn.models.site_model import NOTICE
from fedbn.tasks.bundling import class_names

MOST_PICTURES = 10


def run_bundle(bundle_root: str, inputs: Sequence[str], output_dir: str) -> Path:
    """Do what ``python -m monai.bundle run`` asks for: score cases, and write tables and pictures.

    Parameters are those of ``configs/inference.json``.
    """
    bundle = read_bundle(Path(bundle_root))
    predictions = predict_files(bundle, [Path(name) for name in inputs])
    write_predictions(bundle, predictions, Path(output_dir))
    return Path(output_dir)


def check_out(out: Path) -> None:
    """Refuse, before anything is scored, a place that can hold no predictions.

    Raises
    ------
    PredictionError
        If it is a file, or a bundle: what is in a bundle is the bundle's.
    """
    if out.exists() and not out.is_dir():
        raise PredictionError(f"--out {out} is not a folder; name another place")
    if is_bundle(out):
        raise PredictionError(f"--out {out} is a bundle; name a folder beside it, or one inside")


def write_predictions(
    bundle: Bundle,
    predictions: Sequence[Prediction],
    out: Path,
    *,
    pictures: int = MOST_PICTURES,
    on_picture: Callable[[], object] = lambda: None,
) -> list[str]:
    """Write ``predictions.tsv``, a table of the samples, the task's own tables and pictures.

    Every row and every picture says that this is research software. Files are written whole or
    not at all, for this user alone.

    Parameters
    ----------
    bundle, predictions
        As from :func:`predict_files`.
    out
        A folder.
    pictures
        At most so many, for the first cases.
    on_picture
        Called after each.

    Returns
    -------
    list of str
        Names of the tables, and how many pictures there are.
    """
    check_out(out)
    tables = {"predictions.tsv": [prediction_row(bundle, one) for one in predictions]}
    for one in predictions:
        of_case = {f"{_part(bundle)}s.tsv": _part_rows(bundle, one)} if one.scores.parts else {}
        if one.explanation is not None:
            of_case |= bundle.side.tables(bundle.trained_on, one.explanation)
        for name, rows in of_case.items():
            named = {bundle.side.word: one.case.name}
            tables.setdefault(name, []).extend(
                {**named, **row, "notice": notice(bundle)} for row in rows
            )
    for name, rows in tables.items():
        text = "\n".join("\t".join(cells) for cells in _cells(rows)) + "\n"
        write_text(out / name, text, private=True)
    drawn = [one for one in predictions[:pictures] if one.explanation is not None]
    for one in drawn:
        from fedbn.report.prediction_picture import prediction_picture

        # A unit of some data may be called anything: nothing is written elsewhere.
        name = re.sub(r"[^\w.-]", "_", one.case.name)
        with atomic_file(out / f"{name}_connections.png", private=True) as file:
            file.write(prediction_picture(bundle, one))
        on_picture()
    n = len(drawn)
    return [*tables, *([f"{n} picture{'' if n == 1 else 's'}"] if n else [])]


def prediction_row(bundle: Bundle, prediction: Prediction) -> dict[str, Any]:
    """Return one case's row of ``predictions.tsv``."""
    facts, case, side = bundle.facts, prediction.case, bundle.side
    far = {None: "unknown", False: "no", True: "yes"}
    model = f"{bundle.site}, job {facts['job']}" + ", fine-tuned" * bool(facts["finetuned"])
    if adaptation := facts.get("adaptation"):
        model += f", initialised as {adaptation['start']}: nobody at {bundle.site} was trained on"
    return {
        side.word: case.name,
        **answer(bundle, prediction),
        **(
            {f"n_{_part(bundle)}s": len(prediction.scores.parts.units)}
            if prediction.scores.parts
            else {}
        ),
        **case.facts,
        **_range(bundle, prediction),
        "unlike_training": far[None if prediction.far is None else bool(prediction.far)],
        **{f"distance_{n}": prediction.distances.get(n, "n/a") for n in side.distances_mean},
        "warnings": "; ".join(case.warnings) or "none",
        side.target_word: case.target or "n/a",
        "in_training": far[case.in_training],
        "model": model,
        "notice": notice(bundle),
    }


def answer(bundle: Bundle, prediction: Prediction) -> dict[str, Any]:
    """Return the probability of each class (of two, the second one's), and what it is called."""
    names, facts = class_names(bundle.task), bundle.facts
    if not names:
        return {name: float(value[0]) for name, value in prediction.scores.columns.items()}
    pairs = list(zip(names, prediction.probability, strict=True))
    row: dict[str, Any] = {f"probability_{n}": float(p) for n, p in pairs[len(names) == 2 :]}
    if len(names) > 2:
        return {**row, "class": verdict(bundle, prediction, None)}
    threshold, own = facts["threshold"], facts["site_threshold"]
    return {
        **row,
        f"class_at_{threshold:g}": verdict(bundle, prediction, threshold),
        "class_at_site_threshold": "n/a" if own is None else verdict(bundle, prediction, own),
        "site_threshold": "n/a" if own is None else own,
    }


def _part(bundle: Bundle) -> str:
    """Return what a sample of a case is called."""
    return bundle.task.levels[-1]


def _range(bundle: Bundle, prediction: Prediction) -> dict[str, float]:
    if not prediction.scores.parts or not class_names(bundle.task):
        return {}
    of_parts = prediction.part_probability[:, shown_class(bundle, prediction)]
    part = _part(bundle)
    return {f"lowest_{part}": float(of_parts.min()), f"highest_{part}": float(of_parts.max())}


def shown_class(bundle: Bundle, prediction: Prediction) -> int:
    """Return the class whose probability is shown: of two the second, else the most probable."""
    two = len(class_names(bundle.task)) == 2
    return 1 if two else int(prediction.probability.argmax())


def notice(bundle: Bundle) -> str:
    """Return what every row and picture says."""
    return NOTICE + (" Trained on SYNTHETIC subjects." if bundle.synthetic else "")


def _part_rows(bundle: Bundle, prediction: Prediction) -> list[dict[str, Any]]:
    names = class_names(bundle.task)
    first = int(len(names) == 2)
    columns = {name: values.tolist() for name, values in prediction.case.parts.items()}
    columns |= {
        f"probability_{names[k]}": prediction.part_probability[:, k].tolist()
        for k in range(first, len(names))
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _cells(rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Return the header and the rows as text, without what would break a table."""
    yield list(rows[0])
    for row in rows:
        yield [
            f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())
            for value in row.values()
        ]
