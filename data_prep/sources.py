"""Where subjects come from: ABIDE, by download or from a folder that nilearn filled.

ABIDE is read strictly. Columns are matched by the ids in each file's header, never by position,
and a file that is not complete is refused. With a local folder nothing is ever downloaded.
"""

import csv
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data_prep.errors import SourceError, some_of
from data_prep.harvard_oxford import ROIS

__all__ = [
    "ABIDE_PREPROCESSING",
    "ABIDE_SITES",
    "AbideSite",
    "SourceError",
    "Subject",
    "fetch_abide",
    "find_abide",
    "join_abide_site",
    "read_abide_subject",
    "read_roi_file",
]

#: Site name here -> ABIDE's SITE_ID.
ABIDE_SITES: Mapping[str, str] = {"NYU": "NYU", "USM": "USM", "UM": "UM_1", "UCLA": "UCLA_1"}
ABIDE_PREPROCESSING = "C-PAC, band-pass filtered, no global signal regression (filt_noglobal)"

PHENOTYPIC = "Phenotypic_V1_0b_preprocessed1.csv"
SCANS = Path("cpac") / "filt_noglobal"
SUFFIX = "_rois_ho.1D"
SCAN_NAME = re.compile(r"(?P<prefix>.+)_(?P<number>\d{7})" + re.escape(SUFFIX))

# nilearn's `quality_checked=True`: what each rater must have said.
QUALITY_CHECK: Mapping[str, tuple[str, ...]] = {
    "qc_rater_1": ("OK",),
    "qc_anat_rater_2": ("OK", "maybe"),
    "qc_func_rater_2": ("OK", "maybe"),
    "qc_anat_rater_3": ("OK",),
    "qc_func_rater_3": ("OK",),
}
PHENOTYPIC_COLUMNS = (
    "SUB_ID",
    "SITE_ID",
    "FILE_ID",
    "DX_GROUP",
    "AGE_AT_SCAN",
    "SEX",
    *QUALITY_CHECK,
)
DIAGNOSIS = {"1": "autism", "2": "control"}
SEX = {"1": "M", "2": "F"}


@dataclass(frozen=True)
class Subject:
    """One subject with its ROI time series.

    Attributes
    ----------
    participant_id : str
        BIDS style, ``sub-0050952``.
    diagnosis : str
        ``"autism"`` or ``"control"``.
    age : float or None
        Years; None where unknown.
    sex : str
        ``"M"``, ``"F"`` or ``"n/a"``.
    site : str
        Name of the site.
    series : np.ndarray, float64, shape (n_timepoints, n_rois)
        Finite; columns in the order of the ROI list.
    absent_rois : tuple of int
        Columns of ROIs without a voxel in the scan, where that is known; their series is zero.
    """

    participant_id: str
    diagnosis: str
    age: float | None
    sex: str
    site: str
    series: np.ndarray = field(repr=False)
    absent_rois: tuple[int, ...] = ()


# ----------------------------------------------------------------------------------- one .1D file


def read_roi_file(
    file: Path, rois: Sequence[tuple[str, str]] = ROIS, *, content: bytes | None = None
) -> np.ndarray:
    """Read the ROI time series of one scan.

    Parameters
    ----------
    file : Path
        Text: a header line of ROI ids (``#10 #11 ...``), then one line of numbers a time point.
    rois : sequence of (str, str)
        Ids and names that the file must have, in any order, and no others.
    content : bytes, optional
        The file's content if it was read already.

    Returns
    -------
    np.ndarray, float64, shape (n_timepoints, n_rois)
        Columns in the order of `rois`.

    Raises
    ------
    SourceError
        If the file is empty or cut off, misses an ROI or has a foreign one, or holds a value that
        is not a finite number; the message names the file and the place.
    """
    data = file.read_bytes() if content is None else content
    name = file.name
    if not data.strip():
        raise SourceError(f"{name} is empty; get the file again")
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError:
        raise SourceError(f"{name} is not a text file; get the file again") from None
    if not text.endswith("\n"):
        raise SourceError(f"{name} is cut off: its last line has no end; get the file again")
    header, *lines = text.splitlines()
    order = _column_order(name, header, rois)
    rows = []
    for number, line in enumerate(lines, start=2):
        fields = line.split()
        if len(fields) != len(order):
            raise SourceError(
                f"{name} is cut off or damaged: line {number} has {len(fields)} of "
                f"{len(order)} values; get the file again"
            )
        try:
            rows.append([float(value) for value in fields])
        except ValueError as error:
            raise SourceError(f"{name}, line {number}: {error}") from None
    if not rows:
        raise SourceError(f"{name} has a header and no time point; get the file again")
    series = np.array(rows)[:, order]
    if not np.isfinite(series).all():
        time, column = np.argwhere(~np.isfinite(series))[0]
        roi_id, roi_name = rois[column]
        raise SourceError(
            f"{name}: column #{roi_id} ({roi_name}) is {series[time, column]} at time point "
            f"{time}; leave the subject out or repair the scan"
        )
    return series


def _column_order(name: str, header: str, rois: Sequence[tuple[str, str]]) -> np.ndarray:
    """Return which column of the file holds each ROI."""
    if not header.startswith("#"):
        raise SourceError(f"{name} has no header line of ROI ids (#10 #11 ...)")
    ids = [entry.lstrip("#") for entry in header.split()]
    known = dict(rois)
    column = {roi_id: place for place, roi_id in enumerate(ids)}
    problems = []
    if missing := [f"#{i} ({n})" for i, n in rois if i not in column]:
        problems.append(f"misses the ROI columns {some_of(missing)}")
    if foreign := [f"#{i}" for i in ids if i not in known]:
        problems.append(f"has the foreign ROI columns {some_of(foreign)}")
    if len(column) != len(ids):
        twice = sorted({f"#{i}" for i in ids if ids.count(i) > 1})
        problems.append(f"has the ROI columns {some_of(twice)} more than once")
    if problems:
        raise SourceError(
            f"{name} {' and '.join(problems)}; it was not made with the {len(rois)}-ROI atlas"
        )
    return np.array([column[i] for i, _ in rois])


def refuse_unmatched(site: str, problems: Mapping[str, Sequence[str]], what_to_do: str) -> None:
    """Raise if scans and the rows that describe them do not belong together one to one.

    Parameters
    ----------
    site : str
        Name of the site.
    problems : mapping
        What is wrong, as ``"scan(s) without a row"``, to whom it concerns; perhaps to nobody.
    what_to_do : str
        Before the option that leaves them out.

    Raises
    ------
    SourceError
        If it concerns anybody, with the first few.
    """
    told = [f"{len(who)} {what} ({some_of(who)})" for what, who in problems.items() if who]
    if told:
        raise SourceError(
            f"site {site!r}: {' and '.join(told)}; {what_to_do} leave them out with --mismatch drop"
        )


# ------------------------------------------------------------------------------------------ ABIDE


@dataclass(frozen=True)
class AbideRow:
    """One usable row of the phenotypic table and its scan."""

    participant_id: str
    diagnosis: str
    age: float | None
    sex: str
    scan: Path


@dataclass(frozen=True)
class AbideSite:
    """What the phenotypic table and the folder of scans hold for one site.

    Attributes
    ----------
    site : str
        Name of the site.
    joined : tuple of AbideRow
        Rows that have a scan and passed ABIDE's quality check, sorted by id.
    not_checked : tuple of (str, str)
        Rows that did not pass the quality check, or of which no scan was released; with why.
    without_scan : tuple of str
        Rows whose scan should be in the folder and is not.
    without_row : tuple of str
        Scans of this site in the folder that no row describes.
    """

    site: str
    joined: tuple[AbideRow, ...]
    not_checked: tuple[tuple[str, str], ...]
    without_scan: tuple[str, ...]
    without_row: tuple[str, ...]

    @property
    def expected(self) -> int:
        """Number of rows that passed the quality check."""
        return len(self.joined) + len(self.without_scan)

    @property
    def dropped(self) -> list[tuple[str, str, str]]:
        """Who, reason and detail of every row without scan and scan without row."""
        return [
            *((who, "phenotypic row without scan", "dropped") for who in self.without_scan),
            *((scan, "scan without phenotypic row", "dropped") for scan in self.without_row),
        ]

    def refuse_mismatch(self) -> None:
        """Raise if a row has no scan, or a scan no row."""
        problems = {
            "phenotypic row(s) without a scan": self.without_scan,
            "scan(s) without a phenotypic row": self.without_row,
        }
        refuse_unmatched(self.site, problems, "complete the folder or")


def find_abide(source: Path) -> Path:
    """Find the folder ``ABIDE_pcp`` that nilearn fills.

    Parameters
    ----------
    source : Path
        That folder, the folder it is in, or the one above.

    Returns
    -------
    Path

    Raises
    ------
    SourceError
        If the phenotypic table is in none of these places.
    """
    if not source.is_dir():
        raise SourceError(f"--source {source} is not a folder")
    for folder in (source, source / "ABIDE_pcp", *sorted(source.glob("*/ABIDE_pcp"))):
        if (folder / PHENOTYPIC).is_file():
            return folder
    raise SourceError(
        f"--source {source} holds no ABIDE_pcp/{PHENOTYPIC}; name the folder that nilearn's "
        "fetch_abide_pcp was given as data_dir"
    )


def fetch_abide(sites: Sequence[str], data_dir: Path | None = None) -> Path:
    """Download what is missing of ABIDE's ROI time series, through nilearn.

    Parameters
    ----------
    sites : sequence of str
        Names out of `ABIDE_SITES`.
    data_dir : Path, optional
        Where to keep it; by default nilearn's own data folder.

    Returns
    -------
    Path
        The folder ``ABIDE_pcp``.

    Raises
    ------
    SourceError
        If the download fails.
    """
    from nilearn.datasets import fetch_abide_pcp, get_data_dirs

    try:
        fetch_abide_pcp(
            data_dir=data_dir,
            pipeline="cpac",
            band_pass_filtering=True,
            global_signal_regression=False,
            derivatives=["rois_ho"],
            SITE_ID=[ABIDE_SITES[site] for site in sites],
            verbose=0,
        )
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SourceError(
            f"ABIDE could not be downloaded ({reason}); name a local copy with --source"
        ) from None
    roots = [Path(root) for root in get_data_dirs(data_dir)]
    return find_abide(next(root for root in roots if (root / "ABIDE_pcp" / PHENOTYPIC).is_file()))


def read_phenotypic(folder: Path) -> list[dict[str, str]]:
    """Read ABIDE's phenotypic table.

    Parameters
    ----------
    folder : Path
        The folder ``ABIDE_pcp``.

    Returns
    -------
    list of dict
        One a row, with at least the columns that are needed here.

    Raises
    ------
    SourceError
        If a column is missing, or a subject has two rows.
    """
    with (folder / PHENOTYPIC).open(encoding="utf-8", errors="replace", newline="") as stream:
        reader = csv.DictReader(stream)
        missing = [name for name in PHENOTYPIC_COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise SourceError(f"{PHENOTYPIC} misses the columns {some_of(missing)}")
        rows = list(reader)
    seen: set[str] = set()
    for row in rows:
        if row["SUB_ID"] in seen:
            raise SourceError(f"{PHENOTYPIC} has two rows with SUB_ID {row['SUB_ID']}")
        seen.add(row["SUB_ID"])
    return rows


def join_abide_site(folder: Path, site: str, rows: Sequence[Mapping[str, str]]) -> AbideSite:
    """Match a site's phenotypic rows with its scans, by file name.

    Parameters
    ----------
    folder : Path
        The folder ``ABIDE_pcp``.
    site : str
        Name out of `ABIDE_SITES`.
    rows : sequence of mapping
        As from `read_phenotypic`.

    Returns
    -------
    AbideSite
    """
    own_rows = [row for row in rows if row["SITE_ID"] == ABIDE_SITES[site]]
    scans = {file.name: file for file in _scans_of(folder, ABIDE_SITES[site])}
    joined, not_checked, without_scan = [], [], []
    for row in own_rows:
        participant_id = _participant_id(row)
        scan = scans.pop(f"{row['FILE_ID']}{SUFFIX}", None)
        if row["FILE_ID"] == "no_filename":
            not_checked.append((participant_id, "no scan in the release"))
        elif failed := [c for c, allowed in QUALITY_CHECK.items() if row[c] not in allowed]:
            found = ", ".join(f"{c} {row[c] or 'empty'}" for c in failed)
            not_checked.append((participant_id, f"failed ABIDE's quality check: {found}"))
        elif scan is None:
            without_scan.append(participant_id)
        else:
            joined.append(_abide_row(row, participant_id, scan))
    return AbideSite(
        site=site,
        joined=tuple(sorted(joined, key=lambda row: row.participant_id)),
        not_checked=tuple(sorted(not_checked)),
        without_scan=tuple(sorted(without_scan)),
        without_row=tuple(sorted(scans)),
    )


def _scans_of(folder: Path, abide_site: str) -> Iterator[Path]:
    for file in sorted((folder / SCANS).glob(f"*{SUFFIX}")):
        match = SCAN_NAME.fullmatch(file.name)
        if match and match["prefix"].casefold() == abide_site.casefold():
            yield file


def _participant_id(row: Mapping[str, str]) -> str:
    """Return the BIDS id; ABIDE writes 50952 in the table and 0050952 in file names."""
    try:
        return f"sub-{int(float(row['SUB_ID'])):07d}"
    except ValueError:
        raise SourceError(f"{PHENOTYPIC} has the SUB_ID {row['SUB_ID']!r}, no number") from None


def _abide_row(row: Mapping[str, str], participant_id: str, scan: Path) -> AbideRow:
    diagnosis = DIAGNOSIS.get(row["DX_GROUP"].removesuffix(".0"))
    if diagnosis is None:
        raise SourceError(
            f"{PHENOTYPIC}: {participant_id} has DX_GROUP {row['DX_GROUP']!r}; allowed are 1 "
            "(autism) and 2 (control)"
        )
    try:
        age = float(row["AGE_AT_SCAN"])
    except ValueError:
        age = math.nan
    return AbideRow(
        participant_id=participant_id,
        diagnosis=diagnosis,
        age=age if 0 < age < 150 else None,  # ABIDE writes -9999 for unknown
        sex=SEX.get(row["SEX"].removesuffix(".0"), "n/a"),
        scan=scan,
    )


def read_abide_subject(
    row: AbideRow, site: str, on_read: Callable[[str, str], object] | None = None
) -> Subject:
    """Read one subject's scan.

    Parameters
    ----------
    row : AbideRow
        The subject.
    site : str
        Name of the site.
    on_read : callable, optional
        Called with the scan's file name and its SHA-256.

    Returns
    -------
    Subject
    """
    content = row.scan.read_bytes()
    if on_read is not None:
        on_read(row.scan.name, hashlib.sha256(content).hexdigest())
    try:
        series = read_roi_file(row.scan, content=content)
    except SourceError as error:
        raise SourceError(f"site {site!r}, {row.participant_id}: {error}") from None
    return Subject(row.participant_id, row.diagnosis, row.age, row.sex, site, series)
