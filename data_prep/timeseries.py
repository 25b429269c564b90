"""From a functional scan and an atlas to ROI time series, with nilearn's maskers.

The columns are those of the atlas, whatever the scan covers: a region that has no voxel in a scan
keeps its column, which is zero and is marked as absent. Every other value is that of nilearn's
``NiftiLabelsMasker`` with the same settings.
"""

import inspect
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.atlas import Atlas, _first_line, load_nifti
from data_prep.errors import SourceError, some_of

__all__ = [
    "CONFOUND_PRESETS",
    "STANDARDIZATIONS",
    "ExtractionSettings",
    "RoiSeries",
    "TooFewTimepointsError",
    "check_tr",
    "extract_time_series",
    "open_scan",
    "parse_confounds",
    "read_confounds",
    "repetition_time",
]

#: Name here -> nilearn's.
STANDARDIZATIONS: Mapping[str, str | None] = {
    "zscore": "zscore_sample",
    "psc": "psc",
    "none": None,
}

#: nilearn's `load_confounds_strategy`, written out, so that its defaults cannot change underneath.
CONFOUND_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "simple": {"strategy": ("high_pass", "motion", "wm_csf")},
    "scrubbing": {"strategy": ("high_pass", "motion", "wm_csf", "scrub"), "wm_csf": "full"},
    "compcor": {"strategy": ("high_pass", "motion", "compcor")},
    "ica_aroma": {"strategy": ("high_pass", "wm_csf", "ica_aroma")},
}
DEFAULT_CONFOUNDS = "motion,wm_csf"

#: Noise components of nilearn's `load_confounds`, and its parameters that belong to each.
COMPONENTS: Mapping[str, tuple[str, ...]] = {
    "motion": ("motion",),
    "wm_csf": ("wm_csf",),
    "global_signal": ("global_signal",),
    "high_pass": (),
    "compcor": ("compcor", "n_compcor"),
    "ica_aroma": ("ica_aroma",),
    "scrub": ("scrub", "fd_threshold", "std_dvars_threshold"),
}

# Seconds between volumes that a functional scan can have; beyond, the unit is another one.
TR_RANGE = (0.05, 30.0)
# Header and sidecar agree if they differ by less: headers hold float32.
TR_TOLERANCE = 1e-3


class TooFewTimepointsError(ValueError):
    """A scan is too short for what it should go through; the message holds the numbers."""


@dataclass(frozen=True)
class ExtractionSettings:
    """How ROI time series are made of a scan; stated in the site store.

    Attributes
    ----------
    high_pass, low_pass : float or None
        Cut-off frequencies in Hz of nilearn's Butterworth filter of order 5; None for no filter
        on that side.
    detrend : bool
        Remove a linear trend.
    standardize : str
        One of `STANDARDIZATIONS`.
    confounds : dict or None
        Parameters of nilearn's `load_confounds`, as from `parse_confounds`; None where there are
        no confounds.
    """

    high_pass: float | None = 0.01
    low_pass: float | None = 0.1
    detrend: bool = True
    standardize: str = "zscore"
    confounds: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Refuse values that are not allowed."""
        for name, value in (("high_pass", self.high_pass), ("low_pass", self.low_pass)):
            if value is not None and not 0 < value < 1000:
                raise ValueError(f"{name} is {value}; it must be a frequency in Hz, or 0 for none")
        if self.high_pass and self.low_pass and self.high_pass >= self.low_pass:
            raise ValueError(
                f"high_pass is {self.high_pass} Hz and low_pass {self.low_pass} Hz; the first must "
                "be lower"
            )
        if self.standardize not in STANDARDIZATIONS:
            raise ValueError(
                f"standardize is {self.standardize!r}; allowed are {', '.join(STANDARDIZATIONS)}"
            )

    def describe(self) -> dict[str, Any]:
        """Return the settings as the site store states them, fit for JSON."""
        confounds = self.confounds
        if confounds is not None:
            confounds = {**confounds, "strategy": list(confounds["strategy"])}
        return {
            "masker": "nilearn.maskers.NiftiLabelsMasker",
            "strategy": "mean",
            "resampling_target": "data",
            "filter": "butterworth, order 5" if self.high_pass or self.low_pass else None,
            "high_pass_hz": self.high_pass,
            "low_pass_hz": self.low_pass,
            "detrend": self.detrend,
            "standardize": self.standardize,
            "confounds": confounds,
        }

    @property
    def title(self) -> str:
        """What two sites must agree on, in one line."""
        parts = ["NiftiLabelsMasker mean"]
        if self.high_pass and self.low_pass:
            parts.append(f"band-pass {self.high_pass:g} to {self.low_pass:g} Hz")
        elif self.high_pass:
            parts.append(f"high-pass {self.high_pass:g} Hz")
        elif self.low_pass:
            parts.append(f"low-pass {self.low_pass:g} Hz")
        else:
            parts.append("no filter")
        parts.append("detrended" if self.detrend else "not detrended")
        parts.append(f"standardized {self.standardize}")
        if self.confounds is None:
            parts.append("no confounds")
        else:
            values = [f"{k}={v}" for k, v in self.confounds.items() if k != "strategy"]
            extra = [s for s in self.confounds["strategy"] if s not in self.confounds]
            parts.append(f"confounds {' '.join([*values, *extra])}")
        return ", ".join(parts)

    def clean_arguments(self, tr: float) -> dict[str, Any]:
        """Return the arguments that nilearn's ``signal.clean`` and maskers share; `tr` in s."""
        return {
            "detrend": self.detrend,
            "standardize": STANDARDIZATIONS[self.standardize],
            "standardize_confounds": True,
            "high_pass": self.high_pass,
            "low_pass": self.low_pass,
            "t_r": tr,
        }


@dataclass(frozen=True)
class RoiSeries:
    """ROI time series of one scan.

    Attributes
    ----------
    values : np.ndarray, float64, shape (n_timepoints, n_rois)
        Finite; a column per ROI of the atlas, zero where the ROI is absent or has no signal.
    absent : tuple of int
        Columns of ROIs without a voxel in this scan.
    n_volumes : int
        Length of the scan before volumes were censored.
    n_confounds : int
        Number of regressors that were removed.
    """

    values: np.ndarray = field(repr=False)
    absent: tuple[int, ...]
    n_volumes: int
    n_confounds: int


# -------------------------------------------------------------------------------------- one scan


def check_tr(tr: float | None) -> None:
    """Raise a SourceError for a repetition time that no scan has; None is one to be found."""
    if tr is not None and not TR_RANGE[0] <= tr <= TR_RANGE[1]:
        raise SourceError(f"--tr is {tr:g} s, which no functional scan has; it is in seconds")


def open_scan(file: Path) -> Any:
    """Open a 4D NIfTI scan and check its header; the voxels stay on disk."""
    image = load_nifti(file)
    if len(image.shape) == 3:
        raise SourceError(
            f"{file.name} is 3D {image.shape}, one volume without time; name the functional scans, "
            "which are 4D"
        )
    if len(image.shape) != 4 or 0 in image.shape:
        raise SourceError(f"{file.name} has the shape {image.shape}; a functional scan is 4D")
    return image


def repetition_time(
    image: Any, file: Path, sidecars: Sequence[Path] = (), tr: float | None = None
) -> float:
    """Return the seconds between two volumes, as the user, a sidecar or the header states them.

    Parameters
    ----------
    image, file
        The scan.
    sidecars : sequence of Path
        JSON files that describe it, the nearest first; the first ``RepetitionTime`` counts.
    tr : float, optional
        Set by the user, in seconds; then header and sidecars are not looked at.
    """
    check_tr(tr)
    if tr is not None:
        return tr
    header, why_not = _header_tr(image)
    stated = _sidecar_tr(sidecars)
    if stated is None and header is None:
        looked = f"{sidecars[0].name} has no RepetitionTime" if sidecars else "it has no sidecar"
        raise SourceError(
            f"{file.name} does not state its repetition time: {why_not}, and {looked}; add it to a "
            "JSON sidecar, or set it with --tr"
        )
    if stated is not None:
        seconds, source = stated
        if header is not None and abs(header - seconds) > TR_TOLERANCE:
            raise SourceError(
                f"the header of {file.name} states a repetition time of {header:g} s and "
                f"{source.name} one of {seconds:g} s; find out which is right and set it with --tr"
            )
        name = source.name
    else:
        assert header is not None
        seconds, name = header, f"the header of {file.name}"
    if not TR_RANGE[0] <= seconds <= TR_RANGE[1]:
        raise SourceError(
            f"{name} states a repetition time of {seconds:g} s, which no functional scan has (are "
            "these milliseconds?); set it in seconds with --tr"
        )
    return seconds


def _header_tr(image: Any) -> tuple[float | None, str]:
    """Return the header's repetition time in seconds, or None and why there is none."""
    zooms = image.header.get_zooms()
    value = float(zooms[3]) if len(zooms) > 3 else 0.0
    unit = image.header.get_xyzt_units()[1]
    factor = {"sec": 1.0, "msec": 1e-3, "usec": 1e-6}.get(unit)
    if not np.isfinite(value) or value <= 0:
        return None, f"its header says {value:g}"
    if factor is None:
        return None, f"its header has {value:g} without a unit of time"
    # float32 in the header: 1.35 is stored as 1.3500000238
    return float(f"{value * factor:.7g}"), ""


def _sidecar_tr(sidecars: Sequence[Path]) -> tuple[float, Path] | None:
    for file in sidecars:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise SourceError(f"sidecar {file.name} is not readable JSON ({error})") from None
        value = content.get("RepetitionTime") if isinstance(content, dict) else None
        if value is None:
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise SourceError(
                f"sidecar {file.name} has the RepetitionTime {value!r}; it must be seconds"
            )
        return float(value), file
    return None


def extract_time_series(
    file: Path,
    atlas: Atlas,
    settings: ExtractionSettings,
    *,
    tr: float,
    confounds: Any = None,
    sample_mask: np.ndarray | None = None,
) -> RoiSeries:
    """Average a scan over each ROI of an atlas and clean the series.

    The labels are resampled to the scan's grid, nearest neighbour. Voxels that are not finite in
    the whole scan (as some programs mark the outside of the brain) count as 0, as in nilearn.

    Parameters
    ----------
    file : Path
        NIfTI, 4D. This scan alone is held in memory.
    atlas : Atlas
        The regions.
    settings : ExtractionSettings
        Filter, trend, scale.
    tr : float
        Repetition time in seconds.
    confounds : pandas.DataFrame, shape (n_volumes, n_confounds), optional
        Removed from the series; as from `read_confounds`.
    sample_mask : np.ndarray, int, optional
        Volumes that are kept; None for all.

    Raises
    ------
    TooFewTimepointsError
        If filter and confounds leave nothing of so short a scan.
    SourceError
        If the file is cut off or damaged, or no ROI lies inside the scan.
    """
    from nilearn.image import get_data
    from nilearn.maskers import NiftiLabelsMasker
    from nilearn.signal import clean

    image = open_scan(file)
    n_volumes = image.shape[3]
    n_confounds = 0 if confounds is None else confounds.shape[1]
    n_kept = n_volumes if sample_mask is None else len(sample_mask)
    _refuse_too_short(n_kept, n_confounds, settings, tr)
    with _quiet():
        try:
            data = get_data(image)  # cached in the image, which the masker then reads
        except Exception as error:
            raise SourceError(
                f"{file.name} is cut off or damaged ({_first_line(error)}); get the file again"
            ) from None
        _refuse_damaged_volumes(file, data)
        labels, present = _labels_on_grid_of(image, file, atlas)
        masker = NiftiLabelsMasker(
            labels,
            standardize=None,
            resampling_target="data",
            strategy="mean",
            keep_masked_labels=False,
            reports=False,
        )
        raw = masker.fit_transform(image)
        if raw.shape != (n_volumes, len(present)):
            raise SourceError(
                f"nilearn made series of shape {raw.shape} of {len(present)} regions in "
                f"{n_volumes} volumes of {file.name}; please report this with nilearn's version"
            )
        column = {roi_id: i for i, roi_id in enumerate(present)}
        del data, image, masker  # only the series go on
        has_signal = raw.max(axis=0) > raw.min(axis=0)
        try:
            cleaned = clean(
                raw,
                confounds=confounds,
                sample_mask=sample_mask,
                extrapolate=False,
                **settings.clean_arguments(tr),
            )
        except ValueError as error:
            raise SourceError(
                f"{file.name} cannot be filtered ({_first_line(error)}); leave the participant "
                "out, or use other settings"
            ) from None
    values = np.zeros((len(cleaned), len(atlas.rois)))
    for place, (roi_id, name) in enumerate(atlas.rois):
        i = column.get(int(roi_id))
        # A region without signal is exactly 0, not what rounding in the filter leaves of it.
        if i is None or not has_signal[i]:
            continue
        values[:, place] = cleaned[:, i]
        if not np.isfinite(values[:, place]).all():
            raise SourceError(
                f"{file.name}: the series of ROI {roi_id} ({name}) is not finite after "
                f"{settings.title}; use other settings"
            )
    absent = tuple(p for p, (roi_id, _) in enumerate(atlas.rois) if int(roi_id) not in column)
    return RoiSeries(values, absent, n_volumes, n_confounds)


def _labels_on_grid_of(image: Any, file: Path, atlas: Atlas) -> tuple[Any, list[int]]:
    """Resample an atlas as nilearn's masker does, and return the ids that are left, sorted.

    They are not asked of the masker: its `region_ids_` and `region_atlas_` hold lost labels, or
    other numbers, in some versions of nilearn, and columns would shift.
    """
    from nilearn.image import get_data, resample_img
    from nilearn.image.resampling import BoundingBoxError

    labels = atlas.image
    if labels.shape != image.shape[:3] or not np.allclose(labels.affine, image.affine):
        try:
            labels = resample_img(
                labels,
                target_affine=image.affine,
                target_shape=image.shape[:3],
                interpolation="nearest",
            )
        except BoundingBoxError:
            labels = None
    present = [] if labels is None else np.setdiff1d(get_data(labels), [0]).astype(int).tolist()
    if not present:
        raise SourceError(
            f"no region of the atlas {atlas.name} lies inside {file.name}; the scan must be in the "
            "atlas's space"
        )
    return labels, present


def _refuse_damaged_volumes(file: Path, data: np.ndarray) -> None:
    """Refuse a voxel that is not finite at some times only: nilearn would make it 0 there."""
    if not np.issubdtype(data.dtype, np.floating):
        return
    bad = [int(np.count_nonzero(~np.isfinite(data[..., t]))) for t in range(data.shape[3])]
    if min(bad) != max(bad):
        t = int(np.argmax(bad))
        raise SourceError(
            f"{file.name}: {bad[t]} voxels of volume {t} are not finite, {min(bad)} in others; "
            "repair the scan or leave the participant out"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep nilearn's warnings from the screen: lost labels and fills are reported in our words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _refuse_too_short(
    n_timepoints: int, n_confounds: int, settings: ExtractionSettings, tr: float
) -> None:
    """Raise a TooFewTimepointsError if so few volumes do not survive filter and confounds."""
    for cutoff in (settings.low_pass, settings.high_pass):
        if cutoff and cutoff >= 0.5 / tr:
            raise SourceError(
                f"a cut-off of {cutoff:g} Hz is not possible with a repetition time of {tr:g} s: "
                f"it must be below {0.5 / tr:.4g} Hz; lower --low-pass, or 0 for none"
            )
    needed = _shortest_filtered(settings.high_pass, settings.low_pass, tr)
    if n_timepoints < needed:
        raise TooFewTimepointsError(f"{n_timepoints} time points, {needed} needed by the filter")
    if n_timepoints <= n_confounds + 2:  # the mean and the trend take one each
        raise TooFewTimepointsError(
            f"{n_timepoints} time points, more than {n_confounds + 2} needed to remove "
            f"{n_confounds} confounds"
        )


@lru_cache(maxsize=16)
def _shortest_filtered(high_pass: float | None, low_pass: float | None, tr: float) -> int:
    """Return the length of the shortest series that nilearn's filter takes."""
    from nilearn.signal import butterworth

    if high_pass is None and low_pass is None:
        return 1
    for length in range(2, 100):
        try:
            butterworth(np.zeros((length, 1)), 1.0 / tr, low_pass, high_pass)
        except ValueError:  # SciPy: shorter than the padding
            continue
        return length
    return 100


# ------------------------------------------------------------------------------------- confounds


def parse_confounds(text: str) -> dict[str, Any]:
    """Read a confound strategy, such as ``simple`` or ``motion=basic,wm_csf,scrub``.

    Entries are separated by commas: a name of `CONFOUND_PRESETS`, a noise component of nilearn's
    `load_confounds`, or ``parameter=value``. A parameter that is named as a component (such as
    ``motion=basic``) asks for that component too. Returned are all parameters of `load_confounds`
    that matter, with their values written out; an unknown entry is a ValueError.
    """
    from nilearn.interfaces.fmriprep import load_confounds

    usual = {p.name: p.default for p in inspect.signature(load_confounds).parameters.values()}
    owners = {name: owner for owner, names in COMPONENTS.items() for name in names}
    entries = [part.strip() for part in text.split(",") if part.strip()]
    strategy: list[str] = []
    values: dict[str, Any] = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        # compcor and ica_aroma are both: a strategy when they stand alone, else a component.
        alone = name not in COMPONENTS or [e for e in entries if "=" not in e] == [name]
        if name in CONFOUND_PRESETS and not equals and alone:
            preset = CONFOUND_PRESETS[name]
            strategy += preset["strategy"]
            values = {k: v for k, v in preset.items() if k != "strategy"} | values
        elif name in COMPONENTS and not equals:
            strategy.append(name)
        elif equals and name in owners:
            values[name] = _like(usual[name], name, value)
            strategy += [name] if name in COMPONENTS else []
        else:
            raise ValueError(
                f"confounds has the unknown entry {entry!r}; known are the strategies "
                f"{', '.join(CONFOUND_PRESETS)}, the components {', '.join(COMPONENTS)}, and "
                "settings of these such as motion=basic"
            )
    strategy = list(dict.fromkeys(strategy))
    if not strategy:
        raise ValueError(
            f"confounds is {text!r}; name a strategy ({', '.join(CONFOUND_PRESETS)}), components "
            f"({', '.join(COMPONENTS)}), or none"
        )
    if "compcor" in strategy and "high_pass" not in strategy:
        raise ValueError("confounds: compcor needs high_pass, as fMRIPrep filtered before it")
    if idle := [name for name in values if owners[name] not in strategy]:
        raise ValueError(f"confounds sets {idle[0]} without the component that it belongs to")
    names = [name for component in strategy for name in COMPONENTS[component]]
    return {"strategy": tuple(strategy), **{name: values.get(name, usual[name]) for name in names}}


def _like(usual: Any, name: str, text: str) -> Any:
    """Return a parameter's value in the type of its default; nilearn looks at the words."""
    if isinstance(usual, str) and not (name == "n_compcor" and text != usual):
        return text
    try:
        value = float(text) if isinstance(usual, float) else int(text)
    except ValueError:
        value = -1
    if not 0 <= value < math.inf:
        raise ValueError(f"confounds has {name}={text}; it must be a number, 0 or more")
    return value


def read_confounds(
    file: Path, parameters: Mapping[str, Any], n_volumes: int
) -> tuple[Any, np.ndarray | None]:
    """Read a scan's confounds as fMRIPrep wrote them, through nilearn's `load_confounds`.

    The first value of a derivative does not exist; nilearn fills it with the second.

    Parameters
    ----------
    file : Path
        The scan, ``*_desc-preproc_bold.nii.gz``; its confounds table is beside it.
    parameters : mapping
        As from `parse_confounds`.
    n_volumes : int
        Length of the scan.

    Returns
    -------
    confounds : pandas.DataFrame, shape (n_volumes, n_confounds), or None
        None if the strategy needs no regressor.
    sample_mask : np.ndarray, int, or None
        Volumes that are kept; None for all.

    Raises
    ------
    TooFewTimepointsError
        If every volume is censored.
    SourceError
        If there is no table, it lacks a column, has another length than the scan, or has a value
        that is not finite.
    """
    from nilearn.interfaces.fmriprep import load_confounds

    with _quiet():
        try:
            table, sample_mask = load_confounds(str(file), demean=True, **parameters)
        except Exception as error:  # pandas and nilearn raise many kinds for damaged tables
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise SourceError(
                f"the confounds of {file.name} cannot be read ({reason}); complete them, or choose "
                "another strategy with --confounds"
            ) from None
    if sample_mask is not None and len(sample_mask) == 0:
        raise TooFewTimepointsError("0 time points left by censoring")
    if table is None or table.shape[1] == 0:
        return None, sample_mask
    if len(table) != n_volumes:
        raise SourceError(
            f"the confounds of {file.name} have {len(table)} rows and the scan has {n_volumes} "
            "volumes; get the files of one fMRIPrep run"
        )
    finite = np.isfinite(table.to_numpy(dtype=np.float64))
    if not finite.all():
        row = int(np.argwhere(~finite)[0, 0])
        wrong = [str(name) for name in table.columns[~finite.all(axis=0)]]
        raise SourceError(
            f"the confounds of {file.name} have no finite value in the column(s) {some_of(wrong)} "
            f"(first in row {row + 1}); leave the participant out, or choose a strategy without "
            "them with --confounds"
        )
    return table, sample_mask
