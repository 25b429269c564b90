"""Predictions as files: tables and pictures, each saying that this is research software."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbn.federation.site_state import atomic_write
from fedbn.models.bundle import Bundle, is_bundle, read_bundle
from fedbn.models.prediction import (
    Prediction,
    PredictionError,
    predict_files,
    strongest,
    verdict,
)
from fedbn.models.site_network import DISTANCES, NOTICE

MOST_PICTURES = 10


def run_bundle(bundle_root: str, inputs: Sequence[str], output_dir: str) -> Path:
    """Do what ``python -m monai.bundle run`` asks for: score scans, and write tables and pictures.

    Parameters are those of ``configs/inference.json``.
    """
    bundle = read_bundle(Path(bundle_root))
    predictions = predict_files(bundle, [Path(name) for name in inputs])
    return write_predictions(bundle, predictions, Path(output_dir))


def check_out(out: Path) -> None:
    """Refuse, before any scan is scored, a place that can hold no predictions.

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
) -> Path:
    """Write ``predictions.tsv``, ``windows.tsv``, ``connections.tsv``, and a picture a scan.

    Every row and every picture says that this is research software. Tables are written whole or
    not at all.

    Parameters
    ----------
    bundle, predictions
        As from :func:`predict_files`.
    out
        A folder.
    pictures
        At most so many, for the first scans.
    on_picture
        Called after each.
    """
    check_out(out)
    tables = {
        "predictions.tsv": [prediction_row(bundle, p) for p in predictions],
        "windows.tsv": [row for p in predictions for row in _window_rows(bundle, p)],
        "connections.tsv": [row for p in predictions for row in _connection_rows(bundle, p)],
    }
    for name, rows in tables.items():
        text = "\n".join("\t".join(cells) for cells in _cells(rows)) + "\n"
        with atomic_write(out / name) as file:
            file.write(text.encode())
    if pictures:
        from fedbn.report.prediction_picture import prediction_picture

        for prediction in predictions[:pictures]:
            # A store's participants may be called anything: nothing is written elsewhere.
            name = re.sub(r"[^\w.-]", "_", prediction.scan.name)
            with atomic_write(out / f"{name}_connections.png") as file:
                file.write(prediction_picture(bundle, prediction))
            on_picture()
    return out


def prediction_row(bundle: Bundle, prediction: Prediction) -> dict[str, Any]:
    """Return one scan's row of ``predictions.tsv``."""
    facts, scan = bundle.facts, prediction.scan
    own = facts["site_threshold"]
    far = {None: "unknown", False: "no", True: "yes"}
    return {
        "scan": scan.name,
        "probability_autism": prediction.probability,
        f"class_at_{facts['threshold']:g}": verdict(prediction, facts["threshold"]),
        "class_at_site_threshold": "n/a" if own is None else verdict(prediction, own),
        "site_threshold": "n/a" if own is None else own,
        "n_windows": len(prediction.window_probability),
        "n_timepoints": scan.n_timepoints,
        "lowest_window": float(prediction.window_probability.min()),
        "highest_window": float(prediction.window_probability.max()),
        "unlike_training": far[None if prediction.far is None else bool(prediction.far)],
        **{f"distance_{name}": prediction.distances.get(name, "n/a") for name in DISTANCES},
        "warnings": "; ".join(scan.warnings) or "none",
        "diagnosis": scan.diagnosis or "n/a",
        "in_training": far[scan.in_training],
        "model": f"{bundle.site}, job {facts['job']}" + (", fine-tuned" * bool(facts["finetuned"])),
        "notice": _notice(bundle),
    }


def _notice(bundle: Bundle) -> str:
    made_up = bundle.signature.get("synthetic")
    return NOTICE + (" Trained on SYNTHETIC subjects." if made_up else "")


def _window_rows(bundle: Bundle, prediction: Prediction) -> list[dict[str, Any]]:
    scan = prediction.scan
    return [
        {
            "scan": scan.name,
            "window_start": int(start),
            "probability_autism": float(probability),
            "notice": _notice(bundle),
        }
        for start, probability in zip(scan.window_start, prediction.window_probability, strict=True)
    ]


def _connection_rows(bundle: Bundle, prediction: Prediction) -> list[dict[str, Any]]:
    first, second = np.triu_indices(len(bundle.rois), k=1)
    return [
        {
            "scan": prediction.scan.name,
            "rank": rank,
            "roi_1": bundle.rois[first[k]][0],
            "name_1": bundle.rois[first[k]][1],
            "roi_2": bundle.rois[second[k]][0],
            "name_2": bundle.rois[second[k]][1],
            "log_odds": float(prediction.attribution[k]),
            "speaks_for": "autism" if prediction.attribution[k] > 0 else "control",
            "notice": _notice(bundle),
        }
        for rank, k in enumerate(strongest(prediction), start=1)
    ]


def _cells(rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Return the header and the rows as text, without what would break a table."""
    yield list(rows[0])
    for row in rows:
        yield [
            f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())
            for value in row.values()
        ]
