"""Complete models of connectomes: how they are described, and how a scan becomes a connectome.

Here, and only here, a model meets the data preparation: a scan becomes a connectome by the same
functions as the site store that the model was trained on, with the settings that its bundle states.
What does not fit (another atlas, another set of regions, a scan that is too short) is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn

from data_prep.connectome import (
    ConnectomeSettings,
    correlation_connectomes,
    whole_scan_connectome,
    window_starts,
)
from data_prep.errors import SourceError
from data_prep.quality import silent_rois
from data_prep.roi_files import read_roi_file
from data_prep.site_store import EDGE_ORDER, SiteStore
from fedbn.core.batches import TensorSamples
from fedbn.tasks.attribution import integrated_gradients
from fedbn.tasks.bundling import (
    Case,
    PredictionError,
    StandardizedBundling,
    Trained,
    TrainedOn,
    class_names,
    of_site,
)
from fedbn.tasks.data import Index, SiteData

N_CONNECTIONS = 20
"""Connections of a subject that are listed."""

TABLES = (".1d", ".csv", ".npy", ".tsv")


class _Connectome(BaseModel):
    """What a store's signature states, as far as a prediction needs it."""

    model_config = ConfigDict(strict=True)

    atlas: str
    kind: str
    estimator: str
    transform: str
    edge_order: str
    negative: str
    window: Annotated[int, Field(ge=3)] | None
    stride: Annotated[int, Field(ge=1)] | None
    n_edges: int
    rois: list[Annotated[list[str], Field(min_length=2, max_length=2)]]

    @model_validator(mode="after")
    def _all_pairs(self) -> _Connectome:
        if self.n_edges != len(self.rois) * (len(self.rois) - 1) // 2:
            raise ValueError(f"it states {self.n_edges} edges for {len(self.rois)} regions")
        return self


class _Facts(BaseModel):
    model_config = ConfigDict(strict=True)

    connectome: _Connectome
    scan: dict[str, Any] | None


@dataclass(frozen=True)
class Connections:
    """What each connection added to the log odds of the second class, in one scan.

    Attributes
    ----------
    values
        float64, (n_edges,), mean over windows.
    log_odds, baseline_log_odds
        Mean over windows, and of the site's mean training subject; `values` add up to their
        difference.
    """

    values: np.ndarray = field(repr=False)
    log_odds: float
    baseline_log_odds: float

    def strongest(self, n: int = N_CONNECTIONS) -> np.ndarray:
        """Return the places of those that spoke most, whichever way, the first the most."""
        return np.argsort(-np.abs(self.values), kind="stable")[:n]


class ConnectomeBundling(StandardizedBundling):
    """Models that take the edges of connectomes, and scans to ask them about."""

    keys = ("connectome", "scan")
    facts_model = _Facts
    word = "scan"
    target_word = "diagnosis"
    distances_mean: ClassVar[Mapping[str, str]] = {
        **StandardizedBundling.distances_mean,
        "features": "mean squared z-score of its connections",
        "pattern": "1 - r with the site's mean connectome",
    }

    def card(self, trained_on: TrainedOn, shape: Sequence[int]) -> dict[str, Any]:
        """Describe the model; see :meth:`fedbn.tasks.bundling.Bundling.card`."""
        about = trained_on.signature
        windows = "the whole scan"
        if about["window"]:
            windows = f"windows of {about['window']} time points, {about['stride']} apart"
        control, patient = class_names(self.task)
        data_type = f"{about['kind']} connectomes, {about['atlas']}"
        return super().card(trained_on, shape) | {
            "name": f"{patient.capitalize()} from connectomes at {trained_on.site}",
            "task": f"Classification of a resting-state fMRI connectome: {patient} or {control}",
            "data_type": data_type,
            "input": (
                f"{data_type}: {shape[0]} edges between {about['n_rois']} regions, {windows}, "
                f"estimator {about['estimator']}, transform {about['transform']}, negative values: "
                f"{about['negative']}. Not standardised: that is a layer of the network"
            ),
            "example": "SCAN_rois.1D",
            "inputs": {
                "type": "series",
                "format": "connectome",
                "modality": "fMRI",
                "channel_def": {"0": "edges in numpy.triu_indices order, not standardised"},
            },
        }

    def check(self, facts: Mapping[str, Any], model: nn.Module) -> None:
        """See that the network takes as many edges as the metadata state."""
        n_edges = facts["connectome"]["n_edges"]
        if self.shape(model, None) != (n_edges,):
            raise ValueError(f"the network takes {self.shape(model, None)[0]} edges, not {n_edges}")

    def reference(self, data: SiteData, train: Index) -> dict[str, Any]:
        """Return the scans' lengths, and how they were prepared."""
        assert isinstance(data, SiteStore)
        lengths = np.array([data.participants[k].n_timepoints for k in train])
        stated = ("extraction", "repetition_time_s", "atlas_files", "quality_rule")
        return {
            "n_timepoints": [int(lengths.min()), int(np.median(lengths)), int(lengths.max())],
            **{key: data.description[key] for key in stated if key in data.description},
        }

    def cases(
        self,
        trained_on: TrainedOn,
        inputs: Sequence[Path],
        options: Mapping[str, Any],
        trained: Trained,
    ) -> Iterator[Case]:
        """Read scans of files and site stores.

        Those are ROI time series (``.1D``, ``.tsv`` or ``.csv``, ROI ids in the header, columns in
        any order); functional scans (``.nii``, ``.nii.gz``), which need the options ``atlas`` and
        ``labels`` (as for ``python -m data_prep nifti``) and, where no file states it, ``tr`` in
        seconds; and site stores.
        """
        if ("atlas" in options) != ("labels" in options):
            raise PredictionError(
                "--atlas and --labels are given together: a label map and its table"
            )
        atlas: Any = None
        for path in inputs:
            if path.is_dir():
                yield from self.of_data(trained_on, path, trained)
            elif path.name.endswith((".nii", ".nii.gz")):
                atlas = atlas or _model_atlas(trained_on, path, options)
                yield _of_nifti(trained_on, path, atlas, options.get("tr"))
            else:
                yield _of_file(trained_on, path)

    def unit_facts(self, trained_on: TrainedOn, data: SiteData, unit: int) -> dict[str, Any]:
        """Return a subject's time points, where its windows start, and whether it is unusual."""
        assert isinstance(data, SiteStore)
        n_timepoints = data.participants[unit].n_timepoints
        return {
            "facts": {"n_timepoints": n_timepoints},
            "parts": {"window_start": data.window_start[data.sample_participant == unit]},
            "warnings": tuple(_length(trained_on, n_timepoints)),
        }

    def explain(self, model: nn.Module, case: Case) -> Connections:
        """Attribute a scan's score to its connections, by integrated gradients."""
        assert isinstance(case.samples, TensorSamples)
        site = of_site(model)
        with torch.no_grad():
            standardized = site.standardize(case.samples.inputs)
        found = integrated_gradients(site.network, standardized)
        return Connections(
            found.values.mean(axis=0), float(found.log_odds.mean()), found.baseline_log_odds
        )

    def tables(self, trained_on: TrainedOn, explanation: Any) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of ``connections.tsv``: the strongest ones of a scan."""
        rois = rois_of(trained_on)
        classes = class_names(self.task)
        first, second = np.triu_indices(len(rois), k=1)
        rows = [
            {
                "rank": rank,
                "roi_1": rois[first[k]][0],
                "name_1": rois[first[k]][1],
                "roi_2": rois[second[k]][0],
                "name_2": rois[second[k]][1],
                "log_odds": float(explanation.values[k]),
                "speaks_for": classes[int(explanation.values[k] > 0)],
            }
            for rank, k in enumerate(explanation.strongest(), start=1)
        ]
        return {"connections.tsv": rows}


def rois_of(trained_on: TrainedOn) -> tuple[tuple[str, str], ...]:
    """Return id and name of each region, in the order of the model."""
    return tuple((str(roi_id), str(name)) for roi_id, name in trained_on.signature["rois"])


def _of_file(trained_on: TrainedOn, path: Path) -> Case:
    if not path.is_file():
        raise PredictionError(f"there is no scan {path}")
    if path.suffix.lower() not in TABLES:
        raise PredictionError(
            f"{path.name} is none of the inputs that are known: ROI time series as .1D, .tsv, "
            ".csv or .npy, a functional scan as .nii or .nii.gz, or the folder of a site store"
        )
    rois = rois_of(trained_on)
    try:
        series = read_roi_file(path, rois)
    except SourceError as error:
        raise PredictionError(
            f"the model of site {trained_on.site!r} takes the {len(rois)} regions of "
            f"{trained_on.signature['atlas']!r}: {error}"
        ) from error
    return scan_of_series(trained_on, path.stem, series)


def scan_of_series(
    trained_on: TrainedOn, name: str, series: np.ndarray, warnings: Sequence[str] = ()
) -> Case:
    """Make the connectomes of a scan's ROI time series, as the model's site has made its own.

    Parameters
    ----------
    trained_on
        What the model was trained on.
    name
        Of the scan, for messages and tables.
    series
        float64, (n_timepoints, n_rois), columns in the order of the model's ROIs.
    warnings
        What is known to be unusual already.

    Raises
    ------
    PredictionError
        If the scan is too short, a region has no signal where the site leaves such scans out, or
        the kind of connectome cannot be made of one scan.
    """
    settings = _settings(trained_on)
    site = trained_on.site
    if settings.kind == "tangent":
        raise PredictionError(
            f"the model of site {site!r} takes tangent connectomes, which need the site's "
            "training subjects as a reference: give a site store that was prepared with them"
        )
    starts = window_starts(len(series), settings.window, settings.stride)
    needed = max(3, settings.window or 3)
    if len(series) < needed:
        what = f"its windows are {needed} long" if settings.window else f"{needed} are needed"
        raise PredictionError(
            f"{name} has {len(series)} time points, too few for the model of site {site!r}: {what}"
        )
    found = [*warnings, *_silent(trained_on, name, series), *_length(trained_on, len(series))]
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
    of_one = np.zeros(len(connectomes), dtype=np.int64)
    samples = TensorSamples(torch.from_numpy(connectomes), torch.from_numpy(of_one), of_one)
    return Case(
        name,
        samples,
        facts={"n_timepoints": len(series)},
        parts={"window_start": np.asarray(starts)},
        warnings=tuple(found),
    )


def _model_atlas(trained_on: TrainedOn, path: Path, options: Mapping[str, Any]) -> Any:
    """Read the atlas for functional scans, if it is the model's own."""
    from data_prep.atlas import read_atlas

    reference = trained_on.reference or {}
    if not reference.get("extraction"):
        raise PredictionError(
            f"the model of site {trained_on.site!r} was trained on ROI time series, and its bundle "
            f"does not say how they were made of scans: make those of {path.name} as the site has "
            "made its own, and give them"
        )
    if "atlas" not in options:
        raise PredictionError(
            f"{path.name} is a functional scan: name the label map and its table with --atlas and "
            "--labels"
        )
    described = reference.get("atlas_files") or {}
    try:
        atlas = read_atlas(
            options["atlas"],
            options["labels"],
            label_offset=int(described.get("label_offset", 0)),
            unlisted="drop" if described.get("unlisted") else "error",
        )
    except SourceError as error:
        raise PredictionError(str(error)) from error
    stated = trained_on.signature["atlas"]
    if atlas.title != stated or atlas.rois != rois_of(trained_on):
        raise PredictionError(
            f"the model of site {trained_on.site!r} was trained with the atlas {stated!r}, and "
            f"{options['atlas'].name} with {options['labels'].name} is {atlas.title!r}"
        )
    return atlas


def _of_nifti(trained_on: TrainedOn, path: Path, atlas: Any, tr: float | None) -> Case:
    """Turn a functional scan into ROI time series as the model's site has done, and those on."""
    from data_prep.timeseries import (
        ExtractionSettings,
        TooFewTimepointsError,
        extract_time_series,
        open_scan,
        read_confounds,
        repetition_time,
    )

    stated = trained_on.reference or {}
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
    return scan_of_series(trained_on, name, series.values, warnings)


def _settings(trained_on: TrainedOn) -> ConnectomeSettings:
    """Return how the model's connectomes are made."""
    signature = trained_on.signature
    names = ("kind", "estimator", "window", "stride", "negative")
    settings = ConnectomeSettings(**{name: signature[name] for name in names})
    for name, here in (("transform", settings.transform), ("edge_order", EDGE_ORDER)):
        if signature[name] != here:
            raise PredictionError(
                f"the model of site {trained_on.site!r} takes connectomes with {name} "
                f"{signature[name]!r}, this version makes {here!r}; give a site store"
            )
    return settings


def _silent(trained_on: TrainedOn, name: str, series: np.ndarray) -> list[str]:
    silent = silent_rois(series)
    if len(silent) == 0:
        return []
    rois = rois_of(trained_on)
    named = ", ".join(f"{rois[k][0]} ({rois[k][1]})" for k in silent[:5])
    named += f" and {len(silent) - 5} more" if len(silent) > 5 else ""
    rule = ((trained_on.reference or {}).get("quality_rule") or {}).get("silent_rois")
    if rule == "exclude":
        raise PredictionError(
            f"{name} has no signal in {named}; site {trained_on.site!r} has left such scans out of "
            "its training"
        )
    return [f"no signal in {named}: all connections of it are 0"]


def _length(trained_on: TrainedOn, n_timepoints: int) -> list[str]:
    known = (trained_on.reference or {}).get("n_timepoints")
    if not known or known[0] <= n_timepoints <= known[2]:
        return []
    usual = f"{known[0]}" if known[0] == known[2] else f"{known[0]} to {known[2]}"
    return [f"{n_timepoints} time points; the site's training scans had {usual}"]
