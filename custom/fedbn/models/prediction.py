"""What a site's own model says of a scan: a probability, which connections spoke for it, a warning.

Here, and only here, the model meets the data preparation: a scan becomes a connectome by the same
functions as the site store that the model was trained on, with the settings that the bundle states.
What does not fit (another atlas, another set of regions, a scan that is too short) is refused; what
fits and is unlike the training subjects is scored with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_prep.connectome import (
    ConnectomeSettings,
    correlation_connectomes,
    whole_scan_connectome,
    window_starts,
)
from data_prep.errors import SourceError
from data_prep.quality import silent_rois
from data_prep.roi_files import read_roi_file
from data_prep.site_store import (
    EDGE_ORDER,
    SiteStore,
    StoreError,
    read_site_store,
    signature_differences,
)
from fedbn.federation.experiment import Experiment
from fedbn.federation.site import prepare
from fedbn.models.bundle import Bundle
from fedbn.models.site_model import check_same_data
from fedbn.models.site_network import (
    far_away,
    outer_fence,
    probabilities_and_distances,
)
from fedbn.tasks.connectome.attribution import integrated_gradients

N_CONNECTIONS = 20
"""Connections of a subject that are listed and drawn."""

TABLES = (".1d", ".csv", ".npy", ".tsv")
_DISTANCE_WORDS = {
    "features": "mean squared z-score of its connections",
    "batch_norm": "mean squared z-score of what goes into the first batch norm",
    "pattern": "1 - r with the site's mean connectome",
}


class PredictionError(ValueError):
    """A scan that the model cannot be asked about; the message names it and says why."""


@dataclass(frozen=True)
class Scan:
    """One subject's connectomes, as the model was trained on them.

    Attributes
    ----------
    name
        The file's name without its ending, or the participant of a store.
    connectomes
        float32, (n_windows, n_edges), not standardised.
    window_start
        First time point of each window, (n_windows,).
    n_timepoints
        Length of the scan.
    diagnosis
        Where a store states it, else ``None``.
    in_training
        Whether the model was trained on this subject; ``None`` where that is not known.
    warnings
        Sentences.
    """

    name: str
    connectomes: np.ndarray = field(repr=False)
    window_start: np.ndarray = field(repr=False)
    n_timepoints: int
    diagnosis: str | None = None
    in_training: bool | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prediction:
    """What the model says of one scan.

    Attributes
    ----------
    scan
        The scan, with all warnings.
    probability
        Of autism: the mean over windows.
    window_probability
        float64, (n_windows,).
    distances
        See :mod:`fedbn.models.site_network`; means over windows.
    far
        Names of the distances beyond the training subjects' outer fence; ``None`` where the bundle
        has nothing to judge them by.
    attribution
        float64, (n_edges,): what each connection adds to the log odds of autism, mean over windows.
    log_odds, baseline_log_odds
        Mean over windows, and of the site's mean training subject; the attributions add up to
        their difference.
    """

    scan: Scan
    probability: float
    window_probability: np.ndarray = field(repr=False)
    distances: dict[str, float]
    far: tuple[str, ...] | None
    attribution: np.ndarray = field(repr=False)
    log_odds: float
    baseline_log_odds: float


# ---------------------------------------------------------------------------------- reading scans


@dataclass(frozen=True)
class AtlasFiles:
    """What a functional scan needs beside it: the label map, its table, and the repetition time.

    Attributes
    ----------
    image, labels
        As for ``python -m data_prep nifti``.
    tr
        Seconds; ``None`` to read it from the scan's header or sidecar.
    """

    image: Path
    labels: Path
    tr: float | None = None


def read_scans(
    bundle: Bundle, inputs: Sequence[Path], atlas_files: AtlasFiles | None = None
) -> Iterator[Scan]:
    """Read the scans of files and site stores, one after the other.

    Parameters
    ----------
    bundle
        The model, which says what a connectome is.
    inputs
        ROI time series (``.1D``, ``.tsv`` or ``.csv``, ROI ids in the header, columns in any
        order; ``.npy``, columns in the model's order), functional scans (``.nii``, ``.nii.gz``),
        or site stores.
    atlas_files
        For functional scans.

    Raises
    ------
    PredictionError
        If a scan does not fit the model, or two have the same name.
    data_prep.site_store.StoreError
        If a store is damaged.
    """
    seen: set[str] = set()
    atlas: Any = None
    for path in inputs:
        scans: Iterator[Scan]
        if path.is_dir():
            scans = _of_store(bundle, path)
        elif path.name.endswith((".nii", ".nii.gz")):
            if atlas is None:
                atlas = _model_atlas(bundle, path, atlas_files)
            scans = iter([_of_nifti(bundle, path, atlas, atlas_files.tr if atlas_files else None)])
        else:
            scans = iter([_of_file(bundle, path)])
        for scan in scans:
            if scan.name in seen:
                raise PredictionError(
                    f"two scans are called {scan.name!r}; rename one of them, or ask for them "
                    "one after the other"
                )
            seen.add(scan.name)
            yield scan


def _of_file(bundle: Bundle, path: Path) -> Scan:
    if not path.is_file():
        raise PredictionError(f"there is no scan {path}")
    if path.suffix.lower() not in TABLES:
        raise PredictionError(
            f"{path.name} is none of the inputs that are known: ROI time series as .1D, .tsv, "
            ".csv or .npy, a functional scan as .nii or .nii.gz, or the folder of a site store"
        )
    try:
        series = read_roi_file(path, bundle.rois)
    except SourceError as error:
        raise PredictionError(
            f"the model of site {bundle.site!r} takes the {len(bundle.rois)} regions of "
            f"{bundle.signature['atlas']!r}: {error}"
        ) from error
    return scan_of_series(bundle, path.stem, series)


def scan_of_series(
    bundle: Bundle, name: str, series: np.ndarray, warnings: Sequence[str] = ()
) -> Scan:
    """Make the connectomes of a scan's ROI time series, as the model's site has made its own.

    Parameters
    ----------
    bundle
        The model.
    name
        Of the scan, for messages and tables.
    series
        float64, (n_timepoints, n_rois), columns in the order of the bundle's ROIs.
    warnings
        What is known to be unusual already.

    Raises
    ------
    PredictionError
        If the scan is too short, a region has no signal where the site leaves such scans out, or
        the kind of connectome cannot be made of one scan.
    """
    settings = _settings(bundle)
    if settings.kind == "tangent":
        raise PredictionError(
            f"the model of site {bundle.site!r} takes tangent connectomes, which need the site's "
            "training subjects as a reference: give a site store that was prepared with them"
        )
    starts = window_starts(len(series), settings.window, settings.stride)
    needed = max(3, settings.window or 3)
    if len(series) < needed:
        what = f"its windows are {needed} long" if settings.window else f"{needed} are needed"
        raise PredictionError(
            f"{name} has {len(series)} time points, too few for the model of site "
            f"{bundle.site!r}: {what}"
        )
    found = [*warnings, *_silent(bundle, name, series), *_length(bundle, len(series))]
    try:
        if settings.kind == "correlation":
            connectomes = correlation_connectomes(
                series,
                window=settings.window,
                stride=settings.stride,
                estimator=settings.estimator,
                negative=settings.negative,
            )
        else:
            connectomes = whole_scan_connectome(series, settings)[None]
    except ValueError as error:
        raise PredictionError(f"{name}: {error}") from error
    return Scan(name, connectomes, starts, len(series), warnings=tuple(found))


def _model_atlas(bundle: Bundle, path: Path, files: AtlasFiles | None) -> Any:
    """Read the atlas for functional scans, if it is the model's own."""
    from data_prep.atlas import read_atlas

    scan = bundle.facts["scan"] or {}
    if not scan.get("extraction"):
        raise PredictionError(
            f"the model of site {bundle.site!r} was trained on ROI time series, and its bundle "
            f"does not say how they were made of scans: make those of {path.name} as the site has "
            "made its own, and give them"
        )
    if files is None:
        raise PredictionError(
            f"{path.name} is a functional scan: name the label map and its table with --atlas and "
            "--labels"
        )
    described = scan.get("atlas_files") or {}
    try:
        atlas = read_atlas(
            files.image,
            files.labels,
            label_offset=int(described.get("label_offset", 0)),
            unlisted="drop" if described.get("unlisted") else "error",
        )
    except SourceError as error:
        raise PredictionError(str(error)) from error
    if atlas.title != bundle.signature["atlas"] or atlas.rois != bundle.rois:
        raise PredictionError(
            f"the model of site {bundle.site!r} was trained with the atlas "
            f"{bundle.signature['atlas']!r}, and {files.image.name} with {files.labels.name} is "
            f"{atlas.title!r}"
        )
    return atlas


def _of_nifti(bundle: Bundle, path: Path, atlas: Any, tr: float | None) -> Scan:
    """Turn a functional scan into ROI time series as the model's site has done, and those on."""
    from data_prep.timeseries import (
        ExtractionSettings,
        TooFewTimepointsError,
        extract_time_series,
        open_scan,
        read_confounds,
        repetition_time,
    )

    stated = bundle.facts["scan"]
    how = stated["extraction"]
    confounds = how["confounds"] and {
        **how["confounds"],
        "strategy": tuple(how["confounds"]["strategy"]),
    }
    settings = ExtractionSettings(
        high_pass=how["high_pass_hz"],
        low_pass=how["low_pass_hz"],
        detrend=how["detrend"],
        standardize=how["standardize"],
        confounds=confounds,
    )
    name = path.name.removesuffix(".gz").removesuffix(".nii")
    sidecar = path.with_name(f"{name}.json")
    table, mask = None, None
    try:
        image = open_scan(path)
        seconds = repetition_time(image, path, [sidecar] if sidecar.is_file() else [], tr)
        if confounds:
            table, mask = read_confounds(path, confounds, int(image.shape[3]))
        series = extract_time_series(
            path, atlas, settings, tr=seconds, confounds=table, sample_mask=mask
        )
    except TooFewTimepointsError as error:
        raise PredictionError(f"{path.name} is too short: {error}") from error
    except SourceError as error:
        raise PredictionError(str(error)) from error
    usual = stated.get("repetition_time_s")
    warnings = []
    if usual is not None and abs(usual - seconds) > 1e-3:
        warnings.append(f"repetition time {seconds:g} s; the site's training scans had {usual:g} s")
    return scan_of_series(bundle, name, series.values, warnings)


def _settings(bundle: Bundle) -> ConnectomeSettings:
    """Return how the model's connectomes are made."""
    signature = bundle.signature
    names = ("kind", "estimator", "window", "stride", "negative")
    settings = ConnectomeSettings(**{name: signature[name] for name in names})
    for name, here in (("transform", settings.transform), ("edge_order", EDGE_ORDER)):
        if signature[name] != here:
            raise PredictionError(
                f"the model of site {bundle.site!r} takes connectomes with {name} "
                f"{signature[name]!r}, this version makes {here!r}; give a site store"
            )
    return settings


def _silent(bundle: Bundle, name: str, series: np.ndarray) -> list[str]:
    silent = silent_rois(series)
    if len(silent) == 0:
        return []
    named = ", ".join(f"{bundle.rois[k][0]} ({bundle.rois[k][1]})" for k in silent[:5])
    named += f" and {len(silent) - 5} more" if len(silent) > 5 else ""
    rule = ((bundle.facts["scan"] or {}).get("quality_rule") or {}).get("silent_rois")
    if rule == "exclude":
        raise PredictionError(
            f"{name} has no signal in {named}; site {bundle.site!r} has left such scans out of "
            "its training"
        )
    return [f"no signal in {named}: all connections of it are 0"]


def _length(bundle: Bundle, n_timepoints: int) -> list[str]:
    known = (bundle.facts["scan"] or {}).get("n_timepoints")
    if not known or known[0] <= n_timepoints <= known[2]:
        return []
    usual = f"{known[0]}" if known[0] == known[2] else f"{known[0]} to {known[2]}"
    return [f"{n_timepoints} time points; the site's training scans had {usual}"]


def _of_store(bundle: Bundle, folder: Path) -> Iterator[Scan]:
    """Read the subjects of a site store."""
    store = read_site_store(folder, verify=True)
    differences = signature_differences(bundle.signature, store.signature())
    if differences:
        raise PredictionError(
            f"the store {folder} does not fit the model of site {bundle.site!r}: "
            + "; ".join(differences)
        )
    training = _training_subjects(bundle, store)
    for k, participant in enumerate(store.participants):
        rows = np.flatnonzero(store.sample_participant == k)
        yield Scan(
            name=participant.participant_id,
            connectomes=np.array(store.connectomes[rows]),
            window_start=store.window_start[rows],
            n_timepoints=participant.n_timepoints,
            diagnosis=participant.diagnosis,
            in_training=None if training is None else bool(training[k]),
            warnings=tuple(_length(bundle, participant.n_timepoints)),
        )


def _training_subjects(bundle: Bundle, store: SiteStore) -> np.ndarray | None:
    """Say of each subject whether the model was trained on it; ``None`` where that is not known.

    Another site of the federation has trained the shared weights: on whom is not known here.
    """
    if bundle.facts["experiment"] is None:
        return None
    try:
        experiment = Experiment.model_validate(bundle.facts["experiment"])
    except ValueError:  # of another version of fedbn
        return None
    if store.site not in experiment.sites:
        return np.zeros(len(store.participants), dtype=bool)
    if store.site != bundle.site:
        return None
    try:
        preparation = prepare(store.site, store, experiment)
        check_same_data(store.site, store, preparation, bundle.model)
    except StoreError:
        return None
    trained = np.zeros(len(store.participants), dtype=bool)
    trained[preparation.split.train] = True
    return trained


# ------------------------------------------------------------------------------------- predicting


def predict(bundle: Bundle, scan: Scan) -> Prediction:
    """Score one scan, attribute its score to its connections, and compare it with the training."""
    probability, distances = probabilities_and_distances(bundle.model, scan.connectomes)
    means = {name: float(values.mean()) for name, values in distances.items()}
    reference = bundle.facts["distances"]
    far = tuple(far_away(means, reference)) if reference else None
    with torch.no_grad():
        standardized = bundle.model.standardize(torch.from_numpy(scan.connectomes))
    found = integrated_gradients(bundle.model.network, standardized)
    warnings = list(scan.warnings)
    for name in far or ():
        warnings.append(
            f"unlike the scans that the model was trained on: {_DISTANCE_WORDS[name]} "
            f"{means[name]:.2f}, beyond {outer_fence(reference[name]):.2f} (median of the training "
            f"subjects {reference[name][1]:.2f})"
        )
    return Prediction(
        scan=Scan(**{**vars(scan), "warnings": tuple(warnings)}),
        probability=float(probability[:, 1].mean()),
        window_probability=probability[:, 1],
        distances=means,
        far=far,
        attribution=found.values.mean(axis=0),
        log_odds=float(found.log_odds.mean()),
        baseline_log_odds=found.baseline_log_odds,
    )


def predict_files(
    bundle: Bundle,
    inputs: Sequence[Path],
    atlas_files: AtlasFiles | None = None,
    on_scan: Callable[[], object] = lambda: None,
) -> list[Prediction]:
    """Score all scans of some files and stores; parameters are those of :func:`read_scans`.

    Raises
    ------
    PredictionError
        If there is no scan, or one does not fit the model: then none is scored.
    """
    if not inputs:
        raise PredictionError("there is no scan to ask about; name one or more with --input")
    predictions = []
    for scan in read_scans(bundle, inputs, atlas_files):
        predictions.append(predict(bundle, scan))
        on_scan()
    return predictions


def held_out_accuracy(predictions: Sequence[Prediction], threshold: float) -> tuple[int, int]:
    """Count the subjects with a diagnosis that the model was not trained on, and those right."""
    known = [p for p in predictions if p.scan.diagnosis and p.scan.in_training is False]
    right = [p for p in known if verdict(p, threshold) == p.scan.diagnosis]
    return len(right), len(known)


def verdict(prediction: Prediction, threshold: float) -> str:
    """Name the class on this side of a threshold: a score of at least it is autism."""
    return "autism" if prediction.probability >= threshold else "control"


def strongest(prediction: Prediction, n: int = N_CONNECTIONS) -> np.ndarray:
    """Return the places of the connections that spoke most, whichever way, the first the most."""
    return np.argsort(-np.abs(prediction.attribution), kind="stable")[:n]
