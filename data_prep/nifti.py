"""A hospital's own scans: NIfTI files with BIDS names, from raw folders or fMRIPrep's derivatives.

All of a scan but its voxels is looked at before any scan is read, so that most mistakes are said
before hours of work.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.atlas import Atlas
from data_prep.errors import SourceError, some_of
from data_prep.files import file_checksum
from data_prep.participants import JoinedSite, Person, Subject
from data_prep.preparation import Preparation, SiteSource
from data_prep.quality import Exclusion
from data_prep.scans import ENTITY, Scan, find_files, one_a_participant, scan_of
from data_prep.timeseries import (
    ExtractionSettings,
    TooFewTimepointsError,
    extract_time_series,
    open_scan,
    read_confounds,
    repetition_time,
)

__all__ = [
    "DEFAULT_SPACE",
    "CheckedScan",
    "check_scan",
    "find_fmriprep_scans",
    "find_scans",
    "fmriprep_version",
    "nifti_source",
    "one_repetition_time",
    "read_nifti_subject",
    "sidecars",
]

DEFAULT_SPACE = "MNI152NLin2009cAsym"


def find_scans(pattern: str, wanted: Mapping[str, str | None]) -> list[Scan]:
    """Find one scan a participant, sorted, by a pattern such as ``sub-*/func/*_bold.nii.gz``.

    `wanted` is entity (``ses``, ``run``, ...) -> the value that is wanted, or None for any.
    """
    files = find_files(pattern, "--images", "sub-*/func/*_bold.nii.gz")
    return one_a_participant([_scan(file) for file in files], "--images", wanted)


def _scan(file: Path) -> Scan:
    scan = scan_of(file)
    if scan is None:
        raise SourceError(
            f"{file} has no participant in its name; name scans as BIDS does, "
            "sub-<label>_task-rest_bold.nii.gz"
        )
    return scan


def find_fmriprep_scans(
    folder: Path,
    wanted: Mapping[str, str | None],
    *,
    space: str = DEFAULT_SPACE,
    pattern: str | None = None,
    smoothed_by_aroma: bool = False,
) -> list[Scan]:
    """Find the preprocessed scans in fMRIPrep's folder of derivatives, at most one a participant.

    Parameters
    ----------
    folder : Path
        The one with ``sub-*`` in it.
    wanted : mapping
        As for `find_scans`.
    space : str
        Of the template; it must be the atlas's.
    pattern : str, optional
        Inside the folder, to narrow the search.
    smoothed_by_aroma : bool
        Take ``desc-smoothAROMAnonaggr`` files, as the strategy ``ica_aroma`` needs.
    """
    if not folder.is_dir():
        raise SourceError(f"--fmriprep {folder} is not a folder")
    if pattern is not None and Path(pattern).is_absolute():
        raise SourceError(f"--images {pattern} must be relative: it is looked for in --fmriprep")
    files = sorted(folder.glob(pattern or "sub-*/**/func/*_bold.nii*"))
    scans = [_scan(file) for file in files if file.name.endswith((".nii", ".nii.gz"))]
    desc = "smoothAROMAnonaggr" if smoothed_by_aroma else "preproc"
    described = [scan for scan in scans if scan.entities.get("desc") == desc]
    if not described:
        raise SourceError(
            f"--fmriprep {folder} holds no scan named sub-*_desc-{desc}_bold.nii.gz"
            + (f" that fits '{pattern}'" if pattern else "")
            + "; name the folder of derivatives that has sub-* in it"
        )
    in_space = [scan for scan in described if scan.entities.get("space") == space]
    if not in_space:
        found = sorted({scan.entities.get("space", "none (the scanner's own)") for scan in scans})
        raise SourceError(
            f"--fmriprep {folder} holds no scan in the space {space}, only {', '.join(found)}; "
            "choose the atlas's with --space"
        )
    return one_a_participant(in_space, "--images", wanted)


def sidecars(scan: Scan) -> list[Path]:
    """Return the JSON files that describe a scan, the nearest first.

    Beside the file of the same name these are, as in BIDS, the ones in the folders above up to
    the data set's, whose names have no other entities than the scan's.
    """
    stem = scan.file.name.removesuffix(".gz").removesuffix(".nii")
    suffix = stem.rpartition("_")[2]
    found = [scan.file.with_name(f"{stem}.json")]
    folder = scan.file.parent
    for _ in range(4):  # func, session, subject, data set
        own = [
            file
            for file in folder.glob(f"*{suffix}.json")
            if file.name.removesuffix(".json").rpartition("_")[2] == suffix
            and set(ENTITY.findall(file.name.split(".")[0])) <= set(scan.entities.items())
        ]
        found += sorted(own, key=lambda file: len(file.name), reverse=True)
        if (folder / "dataset_description.json").is_file() or folder == folder.parent:
            break
        folder = folder.parent
    return [file for file in dict.fromkeys(found) if file.is_file()]


@dataclass(frozen=True)
class CheckedScan:
    """A scan whose header was found good.

    Attributes
    ----------
    person, scan
        As in `participants.JoinedSite.joined`.
    tr : float
        Repetition time in seconds.
    n_volumes : int
        Length.
    inputs : mapping of str to str
        SHA-256 of every file that was or will be read for it.
    """

    person: Person
    scan: Scan
    tr: float
    n_volumes: int
    inputs: Mapping[str, str]


def check_scan(
    site: str,
    person: Person,
    scan: Scan,
    settings: ExtractionSettings,
    tr: float | None,
) -> CheckedScan:
    """Look at all of a scan but its voxels; `tr` is the repetition time set by the user, if any."""
    try:
        image = open_scan(scan.file)
        described_by = sidecars(scan)
        seconds = repetition_time(image, scan.file, described_by, tr)
        n_volumes = int(image.shape[3])
        inputs = {scan.key: file_checksum(scan.file)}
        if tr is None:
            inputs |= {f"{scan.key}: {f.name}": file_checksum(f) for f in described_by}
        if settings.confounds is not None:
            for file in _confound_files(scan):
                inputs[f"{scan.key}: {file.name}"] = file_checksum(file)
            with suppress(TooFewTimepointsError):  # for the quality rule
                read_confounds(scan.file, settings.confounds, n_volumes)
    except SourceError as error:
        raise SourceError(f"site {site!r}, {scan.participant_id}: {error}") from None
    return CheckedScan(person, scan, seconds, n_volumes, inputs)


def _confound_files(scan: Scan) -> list[Path]:
    """Return the table of confounds beside a scan of fMRIPrep, and its JSON file.

    Those describe this scan whose names have no other entities.
    """
    own = dict(scan.entities)
    own["desc"] = "confounds"
    return [
        file
        for file in sorted(scan.file.parent.glob("*desc-confounds_*"))
        if file.suffix in (".tsv", ".json")
        and set(ENTITY.findall(file.name.split(".")[0])) <= set(own.items())
    ]


def one_repetition_time(site: str, scans: Sequence[CheckedScan]) -> float:
    """Return the repetition time in seconds that all scans share.

    If they differ it is refused: a window of as many volumes would be another time.
    """
    usual = Counter(round(scan.tr, 3) for scan in scans).most_common()
    if len(usual) > 1:
        listed = ", ".join(f"{count} with {tr:g} s" for tr, count in usual)
        other = [s.scan.participant_id for s in scans if round(s.tr, 3) != usual[0][0]]
        raise SourceError(
            f"site {site!r}: the scans have different repetition times ({listed}; {some_of(other)} "
            "differ), so a window would not be the same time in all; take one kind with --images, "
            "--task or --run, or correct a wrong header with --tr"
        )
    return scans[0].tr


def read_nifti_subject(
    checked: CheckedScan,
    site: str,
    atlas: Atlas,
    settings: ExtractionSettings,
    shortest: int,
) -> Subject | Exclusion:
    """Turn one scan into a subject's ROI time series, or into an exclusion if it is too short.

    `shortest` is the fewest volumes of use; a shorter scan is not read.
    """
    scan, person = checked.scan, checked.person
    kept = checked.n_volumes
    try:
        confounds, sample_mask = None, None
        if settings.confounds is not None:
            confounds, sample_mask = read_confounds(
                scan.file, settings.confounds, checked.n_volumes
            )
        kept = kept if sample_mask is None else len(sample_mask)
        if kept < shortest:
            raise TooFewTimepointsError(f"{kept} time points, {shortest} needed")
        series = extract_time_series(
            scan.file,
            atlas,
            settings,
            tr=checked.tr,
            confounds=confounds,
            sample_mask=sample_mask,
        )
    except TooFewTimepointsError as error:
        left = "" if kept == checked.n_volumes else f" ({checked.n_volumes} before censoring)"
        return Exclusion(scan.participant_id, "too few time points", f"{error}{left}")
    except SourceError as error:
        raise SourceError(f"site {site!r}, {scan.participant_id}: {error}") from None
    return Subject(
        participant_id=scan.participant_id,
        diagnosis=person.diagnosis,
        age=person.age,
        sex=person.sex,
        site=site,
        series=series.values,
        absent_rois=series.absent,
    )


def fmriprep_version(folder: Path) -> list[dict[str, Any]]:
    """Return name and version of what fMRIPrep's folder says made it; empty if it does not say."""
    file = folder / "dataset_description.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return [
            {key: str(entry[key]) for key in ("Name", "Version") if key in entry}
            for entry in content["GeneratedBy"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def nifti_source(
    join: JoinedSite,
    scans: Sequence[CheckedScan],
    regions: Atlas,
    preparation: Preparation,
    seconds: float,
    about: dict[str, Any],
    inputs: dict[str, Any],
) -> SiteSource:
    """Return what the store of checked scans is made of.

    `seconds` is their repetition time, `about` what the store states of the source, `inputs` the
    checksums of what was read beside scans and atlas.
    """
    extraction = preparation.extraction
    assert extraction is not None
    made_of = ", ".join(str(about[key]) for key in ("name", "space") if key in about)
    description: dict[str, Any] = {
        "source": about,
        "preprocessing": f"{extraction.title} ({made_of})",
        "synthetic": False,
        "atlas_files": regions.describe(),
        "repetition_time_s": seconds,
        "join": join.describe(),
    }

    def subjects() -> Iterator[Subject | Exclusion]:
        shortest = preparation.rule.shortest(preparation.settings.window)
        for checked in scans:  # one scan in memory at a time
            one = read_nifti_subject(checked, join.site, regions, extraction, shortest)
            if isinstance(one, Subject) and len(one.series) < checked.n_volumes:
                censored = description.setdefault("censored_volumes", {})
                censored[one.participant_id] = checked.n_volumes - len(one.series)
            yield one

    inputs = {
        **inputs,
        **{name: sha for checked in scans for name, sha in checked.inputs.items()},
        **dict([regions.image_file, regions.labels_file]),
        "label_offset": regions.label_offset,
        "unlisted_labels": list(regions.unlisted),
        "repetition_time": seconds,
        **join.describe(),
    }
    return SiteSource(
        *(join.site, subjects(), len(scans), inputs, description), regions.title, regions.rois
    )
