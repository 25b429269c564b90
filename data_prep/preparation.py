"""Put the parts together: subjects of one site in, a site store out."""

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from data_prep.errors import StoreError, TooSmallError
from data_prep.files import atomic_folder, recover_folder
from data_prep.harvard_oxford import ATLAS, ROIS
from data_prep.participants import Subject
from data_prep.quality import Exclusion, QualityRule, apply_rule, silent_rois
from data_prep.roi_files import (
    describe_series,
    holds_series,
    refuse_foreign_series,
    write_roi_file,
)
from data_prep.site_store import (
    DIAGNOSES,
    FORMAT_VERSION,
    TABLES_AND_ARRAY,
    Participant,
    SiteStore,
    assign_folds,
    read_site_store,
    write_site_store,
)
from data_prep.store_folder import refuse_foreign_folder
from data_prep.timeseries import ExtractionSettings

__all__ = ["Bar", "FoldPlan", "Preparation", "SiteSource", "make_site_store", "no_bar"]

#: Given a title and a number of steps, a context that yields what is called after each step.
Bar = Callable[[str, int], AbstractContextManager[Callable[[], object]]]


def no_bar(title: str, total: int) -> AbstractContextManager[Callable[[], object]]:
    """Show no progress."""
    return nullcontext(lambda: None)


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
        """Return a SHA-256 that changes whenever the settings or the inputs (fit for JSON) do."""
        content = {
            "version": [version("fedbn"), FORMAT_VERSION],
            "site": site,
            "inputs": inputs,
            **self.describe(),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class SiteSource:
    """What a site's store is made of.

    Attributes
    ----------
    site : str
        Name of the site.
    subjects : iterable of Subject or Exclusion
        All that were found; read one by one, and not at all if nothing has changed.
    n_subjects : int
        How many these are.
    inputs : mapping
        Fit for JSON: the checksum of every input file, or a generator's arguments; stored.
    description : mapping
        Of the source: at least ``source`` and ``synthetic``. Looked at when the subjects have been
        read, so that reading them may add to it.
    atlas : str
        What sites must agree on, beside the ROIs.
    rois : sequence of (str, str)
        Id and name of each column of the series.
    """

    site: str
    subjects: Iterable[Subject | Exclusion]
    n_subjects: int
    inputs: Mapping[str, object]
    description: MutableMapping[str, Any]
    atlas: str = ATLAS
    rois: Sequence[tuple[str, str]] = ROIS


def make_site_store(
    folder: Path,
    source: SiteSource,
    preparation: Preparation,
    *,
    n_folds: int | None = None,
    force: bool = False,
    series_out: Path | None = None,
    bar: Bar = no_bar,
) -> tuple[SiteStore, bool]:
    """Make the store of a site, unless it is there already and nothing has changed.

    Parameters
    ----------
    folder : Path
        Where the store goes.
    source : SiteSource
    preparation : Preparation
    n_folds : int, optional
        Folds that a site must allow, to be worth a store; a smaller one is a TooSmallError.
    force : bool
        Make it in any case.
    series_out : Path, optional
        Folder that gets the ROI time series too.
    bar : callable
        Shows progress.

    Returns
    -------
    store : SiteStore
    unchanged : bool
        Whether it was there already.
    """
    site, rois = source.site, source.rois
    refuse_foreign_folder(folder, TABLES_AND_ARRAY)
    if series_out is not None:
        refuse_foreign_series(series_out)
    fingerprint = preparation.fingerprint(site, source.inputs)
    store = _unchanged_store(folder, fingerprint)
    complete = series_out is None or holds_series(series_out, fingerprint)
    if store is not None and complete and not force:
        return store, True
    found: list[Subject | Exclusion] = []
    writing = atomic_folder(series_out, private=True) if series_out else nullcontext()
    with writing as series_folder:
        with bar(f"{site}: time series", source.n_subjects) as step:
            for one in source.subjects:
                found.append(one)
                if series_folder is not None and isinstance(one, Subject):
                    write_roi_file(series_folder, one.participant_id, one.series, rois)
                step()
        _write(folder, source, found, preparation, n_folds, bar)
        store = read_site_store(folder)
        if series_folder is not None:
            names = ("extraction", "absent_rois", "inputs", "versions", "fingerprint")
            stated = {key: store.description.get(key) for key in (*source.description, *names)}
            about = {"Name": f"{site}: ROI time series", "atlas": source.atlas}
            describe_series(
                series_folder, rois, about | {k: v for k, v in stated.items() if v is not None}
            )
    return store, False


def _unchanged_store(folder: Path, fingerprint: str) -> SiteStore | None:
    """Return the store in a folder if it is whole and was made from the same inputs."""
    recover_folder(folder)
    try:
        store = read_site_store(folder, verify=True)
    except StoreError:
        return None
    return store if store.description.get("fingerprint") == fingerprint else None


def _write(
    folder: Path,
    source: SiteSource,
    found: Sequence[Subject | Exclusion],
    preparation: Preparation,
    n_folds: int | None,
    bar: Bar,
) -> None:
    """Apply the quality rule, compute the connectomes and write the store."""
    settings, site, rois = preparation.settings, source.site, source.rois
    subjects = [one for one in found if isinstance(one, Subject)]
    kept, excluded = apply_rule(subjects, preparation.rule, window=settings.window, rois=rois)
    excluded += [one for one in found if isinstance(one, Exclusion)]
    _refuse_too_small(site, kept, excluded, n_folds, _silent_in_all(subjects, rois, preparation))
    folds = None
    if plan := preparation.folds:
        ids, diagnoses = [s.participant_id for s in kept], [s.diagnosis for s in kept]
        folds = assign_folds(ids, diagnoses, plan.n_folds, plan.seed, site=site)
    starts = [window_starts(len(s.series), settings.window, settings.stride) for s in kept]
    participants = [
        Participant(
            *(s.participant_id, s.diagnosis, s.age, s.sex, site, len(s.series), len(w)),
            fold=None if folds is None else int(folds[i]),
        )
        for i, (s, w) in enumerate(zip(kept, starts, strict=True))
    ]
    lengths = Counter(len(s.series) for s in kept)
    packages = ["numpy", "nilearn", "scikit-learn"]
    packages += ["nibabel", "scipy", "pandas"] if preparation.extraction else []
    absent = {
        s.participant_id: [rois[i][0] for i in s.absent_rois] for s in subjects if s.absent_rois
    }
    description = {
        "GeneratedBy": [{"Name": "data_prep", "Version": version("fedbn")}],
        "atlas": source.atlas,
        **source.description,
        **preparation.describe(),
        "counts": {"found": len(found), "excluded": len(excluded), "kept": len(kept)},
        "excluded": [asdict(e) for e in sorted(excluded, key=lambda e: e.participant_id)],
        "subjects_by_n_timepoints": {str(n): lengths[n] for n in sorted(lengths)},
        **({"absent_rois": absent} if absent else {}),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
        "inputs": dict(source.inputs),
        "fingerprint": preparation.fingerprint(site, source.inputs),
    }
    with bar(f"{site}: connectomes", len(kept)) as step:
        write_site_store(
            folder,
            site=site,
            participants=participants,
            rois=rois,
            window_starts=starts,
            connectomes=_filler(kept, folds, preparation, step),
            description=description,
        )


def _refuse_too_small(
    site: str,
    kept: Sequence[Subject],
    excluded: Sequence[Exclusion],
    n_folds: int | None,
    silent: str,
) -> None:
    found, diagnoses = len(kept) + len(excluded), [s.diagnosis for s in kept]
    if not kept:
        reasons = ", ".join(sorted({e.reason for e in excluded})) or "none was found"
        raise TooSmallError(
            f"site {site!r}: no subject is left of {found} ({reasons}); {silent}use a shorter "
            "window or another quality rule"
        )
    if n_folds and min(map(diagnoses.count, DIAGNOSES)) < n_folds:
        of = " and ".join(f"{diagnoses.count(name)} {name}" for name in sorted(DIAGNOSES))
        raise TooSmallError(
            f"site {site!r}: {of} left of {found}, too few to train on in {n_folds} folds"
        )


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


def _filler(
    kept: Sequence[Subject],
    folds: np.ndarray | None,
    preparation: Preparation,
    step: Callable[[], object],
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
        step()

    return fill
