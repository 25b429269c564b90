"""Put the parts together: subjects of one site in, a site store out."""

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.connectome import (
    ConnectomeSettings,
    correlation_connectomes,
    tangent_connectomes,
    whole_scan_connectome,
    window_starts,
)
from data_prep.files import recover_folder
from data_prep.harvard_oxford import ATLAS, ROIS
from data_prep.quality import Exclusion, QualityRule, apply_rule, silent_rois
from data_prep.site_store import (
    FORMAT_VERSION,
    Participant,
    SiteStore,
    StoreError,
    assign_folds,
    read_site_store,
    write_site_store,
)
from data_prep.sources import Subject
from data_prep.timeseries import ExtractionSettings

__all__ = ["FoldPlan", "Preparation", "build_site_store", "unchanged_store"]


@dataclass(frozen=True)
class FoldPlan:
    """Folds that are fixed in the store.

    Attributes
    ----------
    n_folds, seed : int
        As in `site_store.assign_folds`.
    fold : int or None
        The held-out fold, which a tangent reference must not see; None for other kinds.
    """

    n_folds: int
    seed: int
    fold: int | None = None

    def __post_init__(self) -> None:
        """Refuse a fold that does not exist."""
        if self.n_folds < 2:
            raise ValueError(f"folds is {self.n_folds}; at least 2 are needed")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must not be negative")
        if self.fold is not None and not 0 <= self.fold < self.n_folds:
            raise ValueError(
                f"fold is {self.fold}; with {self.n_folds} folds it is 0 to {self.n_folds - 1}"
            )


@dataclass(frozen=True)
class Preparation:
    """Everything that decides the content of a store, except the subjects themselves.

    Attributes
    ----------
    settings : ConnectomeSettings
        How connectomes are made.
    rule : QualityRule
        Who is left out.
    folds : FoldPlan or None
        Folds fixed in the store; tangent connectomes need them.
    extraction : ExtractionSettings or None
        How time series are made of scans; None where the source has time series.
    """

    settings: ConnectomeSettings
    rule: QualityRule
    folds: FoldPlan | None = None
    extraction: ExtractionSettings | None = None

    def __post_init__(self) -> None:
        """Tangent needs a held-out fold, and no other kind has one."""
        held_out = self.folds is not None and self.folds.fold is not None
        if (self.settings.kind == "tangent") != held_out:
            raise ValueError(
                "tangent connectomes need --folds and --fold, to keep the test subjects out of "
                "the reference"
                if not held_out
                else "--fold is for --kind tangent only; --folds alone fixes folds in the store"
            )

    def describe(self) -> dict[str, Any]:
        """Return the settings as the store states them."""
        folds = asdict(self.folds) if self.folds else None
        extraction = {"extraction": self.extraction.describe()} if self.extraction else {}
        return {
            **extraction,
            "connectome": self.settings.describe(),
            "quality_rule": self.rule.describe(),
            "folds": folds,
            "reference_split": folds if self.settings.kind == "tangent" else None,
        }

    def fingerprint(self, site: str, inputs: Mapping[str, object]) -> str:
        """Return what changes whenever the settings or the inputs do.

        Parameters
        ----------
        site : str
            Name of the site.
        inputs : mapping
            Fit for JSON: the checksum of every input file, or a generator's arguments.

        Returns
        -------
        str
            SHA-256 in hexadecimal.
        """
        content = {
            "version": [version("fedbn"), FORMAT_VERSION],
            "site": site,
            "inputs": inputs,
            **self.describe(),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def unchanged_store(folder: Path, fingerprint: str) -> SiteStore | None:
    """Return the store in a folder if it is whole and was made from the same inputs.

    What an interrupted run left beside it is removed first.

    Parameters
    ----------
    folder : Path
        Where the store may be.
    fingerprint : str
        As from `Preparation.fingerprint`.

    Returns
    -------
    SiteStore or None
    """
    recover_folder(folder)
    try:
        store = read_site_store(folder, verify=True)
    except StoreError:
        return None
    return store if store.description.get("fingerprint") == fingerprint else None


def build_site_store(
    folder: Path,
    *,
    site: str,
    subjects: Sequence[Subject],
    preparation: Preparation,
    inputs: Mapping[str, object],
    description: Mapping[str, Any],
    atlas: str = ATLAS,
    rois: Sequence[tuple[str, str]] = ROIS,
    unread: Sequence[Exclusion] = (),
    on_subject: Callable[[], object] | None = None,
) -> tuple[SiteStore, list[Exclusion]]:
    """Apply the quality rule, compute the connectomes and write the store.

    Parameters
    ----------
    folder : Path
        Where the store goes.
    site : str
        Name of the site.
    subjects : sequence of Subject
        All that were found.
    preparation : Preparation
        Settings.
    inputs : mapping
        Checksums of the input files, or a generator's arguments; stored.
    description : mapping
        About the source: at least ``source`` and ``synthetic``.
    atlas : str
        What sites must agree on, beside the ROIs.
    rois : sequence of (str, str)
        Id and name of each column of the series.
    unread : sequence of Exclusion
        Subjects that were found, and left out before their series was read.
    on_subject : callable, optional
        Called after each subject's connectomes.

    Returns
    -------
    store : SiteStore
    excluded : list of Exclusion

    Raises
    ------
    StoreError
        If no subject is left, or the folds asked for are not possible.
    """
    settings = preparation.settings
    kept, excluded = apply_rule(subjects, preparation.rule, window=settings.window, rois=rois)
    excluded = sorted([*unread, *excluded], key=lambda e: e.participant_id)
    found = len(subjects) + len(unread)
    if not kept:
        reasons = ", ".join(sorted({e.reason for e in excluded})) or "none was found"
        raise StoreError(
            f"site {site!r}: no subject is left of {found} ({reasons}); "
            f"{_silent_in_all(subjects, rois, preparation)}use a shorter window or another quality "
            "rule"
        )
    folds = _folds(site, kept, preparation.folds)
    packages = ["numpy", "nilearn", "scikit-learn"]
    packages += ["nibabel", "scipy", "pandas"] if preparation.extraction else []
    starts = [window_starts(len(s.series), settings.window, settings.stride) for s in kept]
    write_site_store(
        folder,
        site=site,
        participants=[
            Participant(
                participant_id=s.participant_id,
                diagnosis=s.diagnosis,
                age=s.age,
                sex=s.sex,
                site=site,
                n_timepoints=len(s.series),
                n_windows=len(w),
                fold=None if folds is None else int(folds[i]),
            )
            for i, (s, w) in enumerate(zip(kept, starts, strict=True))
        ],
        rois=rois,
        window_starts=starts,
        connectomes=_filler(kept, folds, preparation, on_subject),
        description={
            "GeneratedBy": [{"Name": "data_prep", "Version": version("fedbn")}],
            "atlas": atlas,
            **description,
            **preparation.describe(),
            "counts": {"found": found, "excluded": len(excluded), "kept": len(kept)},
            "excluded": [asdict(e) for e in excluded],
            **_absent_rois(subjects, rois),
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in packages},
            },
            "inputs": dict(inputs),
            "fingerprint": preparation.fingerprint(site, inputs),
        },
    )
    return read_site_store(folder), excluded


def _silent_in_all(
    subjects: Sequence[Subject], rois: Sequence[tuple[str, str]], preparation: Preparation
) -> str:
    """Name the ROIs that nobody has a signal in: they may be beyond what the scanner was set to."""
    silent = [set(silent_rois(s.series).tolist()) for s in subjects]
    common = sorted(set.intersection(*silent)) if silent else []
    if not common:
        return ""
    named = [f"{rois[i][0]} ({rois[i][1]})" for i in common[:5]]
    more = f" and {len(common) - 5} more" if len(common) > 5 else ""
    how = (
        "take the row(s) out of the labels table and add --unlisted-labels drop, or "
        if preparation.extraction
        else ""
    )
    return f"nobody has a signal in ROI {', '.join(named)}{more}: {how}"


def _absent_rois(
    subjects: Sequence[Subject], rois: Sequence[tuple[str, str]]
) -> dict[str, dict[str, list[str]]]:
    """Return the ids of the ROIs that each subject's scan lacks, if any subject lacks one."""
    absent = {
        s.participant_id: [rois[i][0] for i in s.absent_rois] for s in subjects if s.absent_rois
    }
    return {"absent_rois": absent} if absent else {}


def _folds(site: str, kept: Sequence[Subject], plan: FoldPlan | None) -> np.ndarray | None:
    if plan is None:
        return None
    return assign_folds(
        [s.participant_id for s in kept],
        [s.diagnosis for s in kept],
        plan.n_folds,
        plan.seed,
        site=site,
    )


def _filler(
    kept: Sequence[Subject],
    folds: np.ndarray | None,
    preparation: Preparation,
    on_subject: Callable[[], object] | None,
) -> Callable[[int, np.ndarray], None]:
    """Return the function that writes one subject's connectomes into their place on disk."""
    settings = preparation.settings
    tangent: np.ndarray | None = None
    if settings.kind == "tangent" and folds is not None and preparation.folds is not None:
        is_training = folds != preparation.folds.fold
        tangent = tangent_connectomes([s.series for s in kept], is_training, settings)

    def fill(index: int, block: np.ndarray) -> None:
        series = kept[index].series
        if tangent is not None:
            block[0] = tangent[index]
        elif settings.kind == "correlation":
            correlation_connectomes(
                series,
                window=settings.window,
                stride=settings.stride,
                estimator=settings.estimator,
                negative=settings.negative,
                out=block,
            )
        else:
            block[0] = whole_scan_connectome(series, settings)
        if on_subject is not None:
            on_subject()

    return fill
