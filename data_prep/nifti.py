"""A hospital's own scans: NIfTI files with BIDS names, and the table of participants.

Scans and participants are matched by the ``sub-`` label. Nothing is guessed: two scans of one
participant, a participant without a scan, and a diagnosis in other words are said, with what to do.
"""

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from glob import has_magic
from pathlib import Path
from typing import Any

from data_prep.atlas import Atlas
from data_prep.errors import SourceError, some_of
from data_prep.files import file_checksum
from data_prep.quality import Exclusion
from data_prep.site_store import DIAGNOSES
from data_prep.sources import Subject, refuse_unmatched
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
    "LEAVE_OUT",
    "NiftiSite",
    "Scan",
    "find_fmriprep_scans",
    "find_scans",
    "join_participants",
    "parse_diagnosis_words",
    "read_participant_table",
]

DEFAULT_SPACE = "MNI152NLin2009cAsym"
#: What a word of the diagnosis column may stand for, beside the two diagnoses.
LEAVE_OUT = "leave-out"
MISSING_WORDS = ("", "n/a", "na", "nan", "none")
ENTITY = re.compile(r"([a-zA-Z]+)-([a-zA-Z0-9+]+)")
SEX = {"m": "M", "male": "M", "f": "F", "female": "F"}


@dataclass(frozen=True)
class Scan:
    """One functional scan, found by its name.

    Attributes
    ----------
    participant_id : str
        ``sub-`` and the label in the name.
    file : Path
        NIfTI.
    entities : mapping of str to str
        The key-value pairs of the BIDS name, such as ``{"sub": "01", "task": "rest"}``.
    """

    participant_id: str
    file: Path
    entities: Mapping[str, str] = field(repr=False)

    @property
    def key(self) -> str:
        """Name in the store's list of inputs; holds no folder of this machine."""
        name = self.file.name
        return name if self.participant_id in name else f"{self.participant_id}/{name}"


# ---------------------------------------------------------------------------------------- scans


def find_scans(pattern: str, wanted: Mapping[str, str | None]) -> list[Scan]:
    """Find the scans that a pattern describes.

    Parameters
    ----------
    pattern : str
        With ``*``, ``?`` and ``**``, such as ``sub-*/func/*_bold.nii.gz``.
    wanted : mapping
        Entity (``ses``, ``run``, ...) -> the value that is wanted, or None for any.

    Returns
    -------
    list of Scan
        At most one a participant, sorted.

    Raises
    ------
    SourceError
        If there is none, a name has no ``sub-`` label, or a participant has two.
    """
    if Path(pattern).is_dir():
        raise SourceError(
            f"--images {pattern} is a folder; give a pattern in quotation marks, such as "
            f"'{pattern.rstrip('/')}/sub-*/func/*_bold.nii.gz'"
        )
    files = _glob(pattern)
    if not files:
        why = "" if has_magic(pattern) else " (it has no * in it)"
        raise SourceError(f"no file fits --images '{pattern}'{why}")
    return _one_a_participant([_scan(file) for file in files], wanted)


def find_fmriprep_scans(
    folder: Path,
    wanted: Mapping[str, str | None],
    *,
    space: str = DEFAULT_SPACE,
    pattern: str | None = None,
    smoothed_by_aroma: bool = False,
) -> list[Scan]:
    """Find the preprocessed scans in fMRIPrep's folder of derivatives.

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

    Returns
    -------
    list of Scan

    Raises
    ------
    SourceError
        If there is none, or a participant has two.
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
    return _one_a_participant(in_space, wanted)


def _glob(pattern: str) -> list[Path]:
    parts = Path(pattern).parts
    # A folder that is there is meant by its name, whatever brackets are in it.
    plain = next(
        (
            i
            for i, part in enumerate(parts)
            if has_magic(part) and not Path(*parts[: i + 1]).is_dir()
        ),
        len(parts) - 1,
    )
    folder = Path(*parts[:plain])
    return sorted(file for file in folder.glob("/".join(parts[plain:])) if not file.is_dir())


def _scan(file: Path) -> Scan:
    entities = dict(ENTITY.findall(file.name.split(".")[0]))
    for folder in file.parts[-2::-1]:
        if "sub" in entities:
            break
        entities |= {k: v for k, v in ENTITY.findall(folder) if k in ("sub", "ses")}
    if "sub" not in entities:
        raise SourceError(
            f"{file} has no participant in its name; name scans as BIDS does, "
            "sub-<label>_task-rest_bold.nii.gz"
        )
    return Scan(f"sub-{entities['sub']}", file, entities)


def _one_a_participant(scans: Sequence[Scan], wanted: Mapping[str, str | None]) -> list[Scan]:
    chosen = list(scans)
    for entity, value in wanted.items():
        if value is None:
            continue
        label = value.removeprefix(f"{entity}-")
        found = sorted({scan.entities[entity] for scan in chosen if entity in scan.entities})
        chosen = [scan for scan in chosen if scan.entities.get(entity) == label]
        if not chosen:
            raise SourceError(
                f"no scan has {entity}-{label}; found are "
                + (", ".join(f"{entity}-{name}" for name in found) or f"none with {entity}-")
            )
    counts = Counter(scan.participant_id for scan in chosen)
    if twice := [who for who, count in counts.items() if count > 1]:
        own = [scan for scan in chosen if scan.participant_id == twice[0]]
        differ = sorted(
            {k for s in own for k in s.entities if len({o.entities.get(k) for o in own}) > 1}
        )
        options = {"ses": "--session", "run": "--run", "task": "--task"}
        how = [options[k] for k in differ if k in options]
        raise SourceError(
            f"{len(twice)} participant(s) have more than one scan ({some_of(twice)}), such as "
            f"{some_of([scan.file.name for scan in own], 3)}; choose one a participant with "
            f"{' and '.join(how) or 'a narrower --images'}"
        )
    return sorted(chosen, key=lambda scan: scan.participant_id)


def sidecars(scan: Scan) -> list[Path]:
    """Return the JSON files that describe a scan, the nearest first.

    Beside the file of the same name these are, as in BIDS, the ones in the folders above up to
    the data set's, whose names have no other entities than the scan's.

    Parameters
    ----------
    scan : Scan

    Returns
    -------
    list of Path
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


# ---------------------------------------------------------------------------------- participants


@dataclass(frozen=True)
class ParticipantRow:
    """One row of the table of participants."""

    participant_id: str
    diagnosis: str
    age: float | None
    sex: str


def parse_diagnosis_words(entries: Sequence[str]) -> dict[str, str]:
    """Read what the words of the diagnosis column stand for.

    Parameters
    ----------
    entries : sequence of str
        ``WORD=autism``, ``WORD=control`` or ``WORD=leave-out``.

    Returns
    -------
    dict
        Word in lower case -> ``"autism"``, ``"control"`` or ``"leave-out"``. The two diagnoses
        themselves are always in it.

    Raises
    ------
    ValueError
        If an entry has another form.
    """
    words = {name: name for name in DIAGNOSES}
    for entry in entries:
        word, equals, meaning = entry.rpartition("=")
        if not equals or meaning.strip() not in (*DIAGNOSES, LEAVE_OUT):
            raise ValueError(
                f"diagnosis word is {entry!r}; write WORD=autism, WORD=control or WORD={LEAVE_OUT}"
            )
        words[word.strip().lower()] = meaning.strip()
    return words


def read_participant_table(
    file: Path, words: Mapping[str, str], diagnosis_column: str = "diagnosis"
) -> tuple[list[ParticipantRow], list[tuple[str, str]]]:
    """Read a BIDS ``participants.tsv``, or the same as csv.

    Parameters
    ----------
    file : Path
        Columns ``participant_id``, the diagnosis, and if there are ``age`` and ``sex`` (or
        ``gender``).
    words : mapping
        As from `parse_diagnosis_words`.
    diagnosis_column : str
        Name of the column.

    Returns
    -------
    rows : list of ParticipantRow
        Those with a diagnosis of the two.
    left_out : list of (str, str)
        Participants that `words` leaves out, and why.

    Raises
    ------
    SourceError
        If a column is missing, a participant stands twice, or a word is not known.
    """
    if not file.is_file():
        raise SourceError(f"participants table {file} is not a file")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise SourceError(
            f"participants table {file.name} is not UTF-8 text; save it as tab-separated text"
        ) from None
    lines = text.splitlines()
    if not text.strip():
        raise SourceError(f"participants table {file.name} is empty; get the file again")
    first = lines[0]
    delimiter = next((d for d in ("\t", ";", ",") if d in first), "\t")
    reader = csv.DictReader(lines, delimiter=delimiter, restval="")
    columns = [name or "" for name in reader.fieldnames or ()]
    for needed, option in (("participant_id", ""), (diagnosis_column, "--diagnosis-column")):
        if needed not in columns:
            raise SourceError(
                f"participants table {file.name} has no column {needed!r}, only "
                f"{', '.join(columns)}"
                + ("; separate its columns by tabs" if len(columns) == 1 else "")
                + (f"; name the diagnosis column with {option}" if option else "")
            )
    optional = {
        name: next((c for c in columns if c.lower() in names), None)
        for name, names in (("age", ("age",)), ("sex", ("sex", "gender")))
    }
    rows, left_out = [], []
    unknown: Counter[str] = Counter()
    seen: set[str] = set()
    for number, row in enumerate(reader, start=2):
        who = _participant_id(row["participant_id"] or "")
        if not who:
            raise SourceError(f"participants table {file.name}, line {number}: no participant_id")
        if who in seen:
            raise SourceError(f"participants table {file.name} has two rows of {who}")
        seen.add(who)
        word = (row[diagnosis_column] or "").strip()
        meaning = words.get(word.lower())
        if meaning is None:
            unknown[word or "(empty)"] += 1
        elif meaning == LEAVE_OUT:
            left_out.append((who, f"{diagnosis_column} {word or 'empty'}"))
        else:
            age_column, sex_column = optional["age"], optional["sex"]
            age = _age(row[age_column] if age_column else "", file.name, number)
            sex = (row[sex_column] if sex_column else "") or ""
            rows.append(ParticipantRow(who, meaning, age, SEX.get(sex.strip().lower(), "n/a")))
    if unknown:
        found = [f"{word!r} ({count})" for word, count in unknown.most_common()]
        word = next(iter(unknown)).replace("(empty)", "")
        raise SourceError(
            f"participants table {file.name}: the column {diagnosis_column!r} has the word(s) "
            f"{some_of(found)}, and only autism and control are known; say what each means with "
            f"--diagnosis-word '{word}=MEANING', MEANING one of {', '.join(DIAGNOSES)}, {LEAVE_OUT}"
        )
    if not rows:
        raise SourceError(f"participants table {file.name} has no row to use")
    return rows, left_out


def _participant_id(text: str) -> str:
    """Return the BIDS id of `sub-01` or of `01`."""
    label = text.strip().removeprefix("sub-")
    return f"sub-{label}" if label else ""


def _age(text: str | None, file: str, number: int) -> float | None:
    value = (text or "").strip()
    if value.lower() in MISSING_WORDS:
        return None
    try:
        age = float(value.removesuffix("+"))  # 89+ is how ages are held back
    except ValueError:
        age = math.nan
    if not 0 <= age < 150:
        raise SourceError(
            f"participants table {file}, line {number}: age {value!r} is no number of years; "
            "write n/a where it is unknown"
        )
    return age


# ------------------------------------------------------------------------------------------ join


@dataclass(frozen=True)
class NiftiSite:
    """What the table of participants and the scans hold for one site.

    Attributes
    ----------
    site : str
        Name of the site.
    joined : tuple of (ParticipantRow, Scan)
        Sorted by id, which is that of the scan.
    left_out : tuple of (str, str)
        Participants that a diagnosis word leaves out; with why.
    without_scan : tuple of str
        Participants of whom no scan was found.
    without_row : tuple of str
        Scans that no row describes.
    """

    site: str
    joined: tuple[tuple[ParticipantRow, Scan], ...]
    left_out: tuple[tuple[str, str], ...]
    without_scan: tuple[str, ...]
    without_row: tuple[str, ...]

    @property
    def expected(self) -> int:
        """Number of participants with one of the two diagnoses."""
        return len(self.joined) + len(self.without_scan)

    @property
    def dropped(self) -> list[tuple[str, str, str]]:
        """Who, reason and detail of everyone who did not come as far as the quality rule."""
        return [
            *((who, "left out by diagnosis", why) for who, why in self.left_out),
            *((who, "participant without scan", "dropped") for who in self.without_scan),
            *((name, "scan without participant", "dropped") for name in self.without_row),
        ]

    def refuse_mismatch(self) -> None:
        """Raise if a participant has no scan, or a scan no participant."""
        problems = {
            "participant(s) without a scan": self.without_scan,
            "scan(s) without a row in the participants table": self.without_row,
        }
        refuse_unmatched(self.site, problems, "complete the folder or the table, or")


def join_participants(
    site: str,
    rows: Sequence[ParticipantRow],
    left_out: Sequence[tuple[str, str]],
    scans: Sequence[Scan],
) -> NiftiSite:
    """Match participants with scans.

    An id of digits only, from which a spreadsheet took the zeros in front (``50952`` for
    ``sub-0050952``), is matched by its number if that leaves no choice.

    Parameters
    ----------
    site : str
        Name of the site.
    rows, left_out : sequences
        As from `read_participant_table`.
    scans : sequence of Scan
        One a participant.

    Returns
    -------
    NiftiSite

    Raises
    ------
    SourceError
        If nothing matches at all.
    """
    remaining = {scan.participant_id: scan for scan in scans}
    ids = [row.participant_id for row in rows] + [who for who, _ in left_out]
    same = _matches(ids, list(remaining))
    joined, without_scan = [], []
    for row in rows:
        scan = remaining.pop(same.get(row.participant_id, ""), None)
        if scan is None:
            without_scan.append(row.participant_id)
        else:
            joined.append((row, scan))
    for who, _ in left_out:
        remaining.pop(same.get(who, ""), None)
    if not joined:
        raise SourceError(
            f"site {site!r}: no participant of the table has a scan; the table has "
            f"{some_of(ids, 3)}, the scans are of {some_of([s.participant_id for s in scans], 3)}"
        )
    return NiftiSite(
        site=site,
        joined=tuple(sorted(joined, key=lambda pair: pair[1].participant_id)),
        left_out=tuple(sorted(left_out)),
        without_scan=tuple(sorted(without_scan)),
        without_row=tuple(sorted(scan.key for scan in remaining.values())),
    )


def _matches(table_ids: Sequence[str], scan_ids: Sequence[str]) -> dict[str, str]:
    """Return the scan's id of each id of the table that has one."""
    same = {who: who for who in table_ids if who in set(scan_ids)}

    def by_number(ids: Sequence[str]) -> dict[int, list[str]]:
        groups: dict[int, list[str]] = {}
        for who in ids:
            label = who.removeprefix("sub-").removesuffix(".0")
            if who not in same and label.isdecimal():
                groups.setdefault(int(label), []).append(who)
        return groups

    scans = by_number(scan_ids)
    for number, whos in by_number(table_ids).items():
        if len(whos) == 1 and len(scans.get(number, [])) == 1:
            same[whos[0]] = scans[number][0]
    return same


# ------------------------------------------------------------------------------- from scan to row


@dataclass(frozen=True)
class CheckedScan:
    """A scan whose header was found good.

    Attributes
    ----------
    row, scan
        As in `NiftiSite.joined`.
    tr : float
        Repetition time in seconds.
    n_volumes : int
        Length.
    inputs : mapping of str to str
        SHA-256 of every file that was or will be read for it.
    """

    row: ParticipantRow
    scan: Scan
    tr: float
    n_volumes: int
    inputs: Mapping[str, str]


def check_scan(
    site: str,
    row: ParticipantRow,
    scan: Scan,
    settings: ExtractionSettings,
    tr: float | None,
) -> CheckedScan:
    """Look at all of a scan but its voxels, so that mistakes are said before hours of work.

    Parameters
    ----------
    site : str
        Name of the site, for messages.
    row, scan
        As in `NiftiSite.joined`.
    settings : ExtractionSettings
        Its confounds, if any, are read.
    tr : float or None
        Repetition time set by the user.

    Returns
    -------
    CheckedScan

    Raises
    ------
    SourceError
        Naming site and subject.
    """
    try:
        image = open_scan(scan.file)
        described_by = sidecars(scan)
        seconds = repetition_time(image, scan.file, described_by, tr)
        n_volumes = int(image.shape[3])
        inputs = {scan.key: file_checksum(scan.file)}
        if tr is None:
            inputs |= {f"{scan.key}: {f.name}": file_checksum(f) for f in described_by}
        if settings.confounds is not None:
            for file in confound_files(scan):
                inputs[f"{scan.key}: {file.name}"] = file_checksum(file)
            with suppress(TooFewTimepointsError):  # for the quality rule
                read_confounds(scan.file, settings.confounds, n_volumes)
    except SourceError as error:
        raise SourceError(f"site {site!r}, {scan.participant_id}: {error}") from None
    return CheckedScan(row, scan, seconds, n_volumes, inputs)


def confound_files(scan: Scan) -> list[Path]:
    """Return the table of confounds beside a scan, and its JSON file.

    Parameters
    ----------
    scan : Scan
        Of fMRIPrep.

    Returns
    -------
    list of Path
        Those that describe this scan: their names have no other entities.
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
    """Return the repetition time that all scans share, or refuse.

    Parameters
    ----------
    site : str
        Name of the site.
    scans : sequence of CheckedScan
        At least one.

    Returns
    -------
    float
        Seconds.

    Raises
    ------
    SourceError
        If they differ: a window of as many time points would be another time.
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
    """Turn one scan into a subject's ROI time series.

    Parameters
    ----------
    checked : CheckedScan
        The scan.
    site : str
        Name of the site.
    atlas : Atlas
        The regions.
    settings : ExtractionSettings
        How.
    shortest : int
        Fewest time points of use; a shorter scan is not read.

    Returns
    -------
    Subject or Exclusion
        The latter if the scan is too short.

    Raises
    ------
    SourceError
        Naming site and subject.
    """
    scan, row = checked.scan, checked.row
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
        diagnosis=row.diagnosis,
        age=row.age,
        sex=row.sex,
        site=site,
        series=series.values,
        absent_rois=series.absent,
    )


def fmriprep_version(folder: Path) -> list[dict[str, Any]]:
    """Return what fMRIPrep's folder says made it, name and version.

    Parameters
    ----------
    folder : Path
        The folder of derivatives.

    Returns
    -------
    list of dict
        Empty if it does not say.
    """
    file = folder / "dataset_description.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return [
            {key: str(entry[key]) for key in ("Name", "Version") if key in entry}
            for entry in content["GeneratedBy"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []
