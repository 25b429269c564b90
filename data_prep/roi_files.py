"""ROI time series of one scan, read strictly and written: .1D, csv, tsv or npy.

Columns are matched by the ids (or the names) in the header, never by their position, and a file
with a gap is refused by row and column.
"""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import SourceError, some_of
from data_prep.files import file_checksum
from data_prep.harvard_oxford import ROIS as HARVARD_OXFORD
from data_prep.participants import JoinedSite, Subject
from data_prep.tables import delimiter_of, split_line, text_lines

__all__ = [
    "describe_series",
    "holds_series",
    "read_roi_file",
    "read_subjects",
    "refuse_foreign_series",
    "rois_of",
    "write_roi_file",
]

Rois = Sequence[tuple[str, str]]

SUFFIX = "_rois.1D"
ROIS = "rois.tsv"
DESCRIPTION = "dataset_description.json"


# --------------------------------------------------------------------------------------- reading


def rois_of(file: Path) -> list[tuple[str, str]]:
    """Return the ROIs that the header of a ``.1D``, csv or tsv names, with ids as names."""
    if file.suffix.lower() == ".npy":
        raise SourceError(f"{file.name} names no ROIs; give their table with --rois")
    ids = _header(file.name, text_lines(file, ""))[0]
    if len(ids) < 2:
        raise SourceError(f"{file.name} has {len(ids)} column; a connectome needs 2 ROIs or more")
    return [(roi_id, roi_id) for roi_id in ids]


def read_roi_file(
    file: Path, rois: Rois = HARVARD_OXFORD, *, content: bytes | None = None
) -> np.ndarray:
    """Read the ROI time series of one scan.

    Parameters
    ----------
    file : Path
        Text: a header line of ROI ids or names, then a line of numbers a time point. ``.1D``:
        separated by blanks, the header ``#10 #11 ...``. csv, tsv: separated by comma, semicolon or
        tab. ``.npy``: (n_timepoints, n_rois), columns in the order of `rois`.
    rois : sequence of (str, str)
        Ids and names that the file must have, in any order, and no others.
    content : bytes, optional
        The file's content if it was read already.

    Returns
    -------
    np.ndarray, float64, shape (n_timepoints, n_rois)
        Finite; columns in the order of `rois`.
    """
    data = file.read_bytes() if content is None else content
    series = (
        _of_npy(file.name, data, rois)
        if file.suffix.lower() == ".npy"
        else _of_text(file, data, rois)
    )
    if not len(series):
        raise SourceError(f"{file.name} has a header and no time point; get the file again")
    if not np.isfinite(series).all():
        time, column = np.argwhere(~np.isfinite(series))[0]
        roi_id, roi_name = rois[column]
        raise SourceError(
            f"{file.name}: column #{roi_id} ({roi_name}) is {series[time, column]} at time point "
            f"{time}; leave the subject out or repair the scan"
        )
    steps = np.diff(series, axis=0)
    counts = (steps != 0).all(axis=0) & np.isclose(steps, steps[:1], rtol=1e-4, atol=0).all(axis=0)
    if len(series) > 3 and counts.any():
        roi_id, _ = rois[int(np.argmax(counts))]
        raise SourceError(
            f"{file.name}: the column {roi_id!r} counts the time points and is no ROI; take it out"
        )
    return series


def read_subjects(join: JoinedSite, rois: Rois = HARVARD_OXFORD) -> Iterator[Subject]:
    """Read the ROI time series of everyone at a site; `rois` as for `read_roi_file`."""
    for person, scan in join.joined:
        who = scan.participant_id
        try:
            series = read_roi_file(scan.file, rois)
        except SourceError as error:
            raise SourceError(f"site {join.site!r}, {who}: {error}") from None
        yield Subject(who, person.diagnosis, person.age, person.sex, join.site, series)


def _of_npy(name: str, data: bytes, rois: Rois) -> np.ndarray:
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise SourceError(f"{name} is cut off or no NumPy array ({error})") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        kind = getattr(array, "dtype", "an archive of arrays")
        raise SourceError(f"{name} holds {kind}; series are real numbers")
    if array.ndim != 2 or array.shape[1] != len(rois):
        turned = array.ndim == 2 and array.shape[0] == len(rois)
        raise SourceError(
            f"{name} has the shape {array.shape}, expected (n_timepoints, {len(rois)})"
            + ("; turn it round" if turned else "")
        )
    return array.astype(np.float64)


def _of_text(file: Path, data: bytes, rois: Rois) -> np.ndarray:
    name = file.name
    lines = text_lines(file, "", content=data)
    if file.suffix.lower() == ".1d" and not data.endswith((b"\n", b"\r")):
        raise SourceError(f"{name} is cut off: its last line has no end; get the file again")
    ids, delimiter = _header(name, lines)
    order = _column_order(name, ids, rois)
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        fields = split_line(line, delimiter, f"{name}, line {number}")
        if len(fields) != len(ids):
            hint = "get the file again"
            if number == 2 and len(fields) == len(ids) + 1:
                hint = "if its rows have names, write it without (in R: row.names = FALSE)"
            raise SourceError(
                f"{name} is cut off or damaged: line {number} has {len(fields)} of {len(ids)} "
                f"values; {hint}"
            )
        try:
            rows.append([float(value) for value in fields])
        except ValueError:
            _refuse_no_number(f"{name}, line {number}", ids, fields)
            raise
        if "_" in line:  # which Python takes for a separator of thousands
            _refuse_no_number(f"{name}, line {number}", ids, fields)
    series = np.array(rows).reshape(len(rows), len(ids))
    return series[:, order]


def _refuse_no_number(where: str, ids: Sequence[str], fields: Sequence[str]) -> None:
    for roi_id, text in zip(ids, fields, strict=True):
        try:
            float(text.replace("_", "no"))
        except ValueError:
            what = f"holds {text!r}, no number" if text else "is empty"
            raise SourceError(
                f"{where}: the column {roi_id!r} {what}; leave the subject out or repair the file"
            ) from None


def _header(name: str, lines: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the ids in the header, and what separates them."""
    delimiter = None if name.lower().endswith(".1d") else delimiter_of(lines[0])
    ids = [i.lstrip("#").strip() for i in split_line(lines[0], delimiter, f"{name}, line 1")]
    if name.lower().endswith(".1d") and not lines[0].startswith("#"):
        raise SourceError(f"{name} has no header line of ROI ids (#10 #11 ...)")
    if "" in ids:
        raise SourceError(
            f"{name}: column {ids.index('') + 1} has no name in the header; write it without the "
            "names of the rows (in R: row.names = FALSE, in pandas: index=False)"
        )
    if twice := sorted({roi_id for roi_id in ids if ids.count(roi_id) > 1}):
        raise SourceError(f"{name} has the ROI columns #{some_of(twice)} more than once")
    return ids, delimiter


def _column_order(name: str, ids: Sequence[str], rois: Rois) -> np.ndarray:
    """Return which column of the file holds each ROI, by id or else by name."""
    known = dict(rois)
    if set(ids) == set(known.values()) and len(known) == len(ids):
        return np.array([ids.index(roi_name) for _, roi_name in rois])
    problems = []
    if missing := [f"#{i} ({roi_name})" for i, roi_name in rois if i not in ids]:
        problems.append(f"misses the ROI columns {some_of(missing)}")
    if foreign := [f"#{roi_id}" for roi_id in ids if roi_id not in known]:
        problems.append(f"has the foreign ROI columns {some_of(foreign)}")
    if problems:
        raise SourceError(
            f"{name} {' and '.join(problems)}; it was not made with the {len(rois)}-ROI atlas"
        )
    return np.array([ids.index(roi_id) for roi_id, _ in rois])


# --------------------------------------------------------------------------------------- writing


def refuse_foreign_series(path: Path) -> None:
    """Raise if something is in a folder, there or not, that is no series written here."""
    if path.exists() and not path.is_dir():
        raise SourceError(f"--timeseries-out {path} is a file; name a folder")
    foreign = sorted(
        child.name
        for child in (path.iterdir() if path.is_dir() else ())
        if child.name not in (ROIS, DESCRIPTION)
        and not child.name.endswith(SUFFIX)
        and not child.name.startswith(".")
    )
    if foreign:
        raise SourceError(
            f"--timeseries-out {path} holds something else ({some_of(foreign, 3)}); name another "
            "folder"
        )


def holds_series(path: Path, fingerprint: str) -> bool:
    """Return whether a folder holds, unchanged, what a run with this fingerprint wrote."""
    try:
        content = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
        return content["fingerprint"] == fingerprint and all(
            file_checksum(path / name) == sha for name, sha in content["checksums"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write_roi_file(folder: Path, participant_id: str, series: np.ndarray, rois: Rois) -> None:
    """Write ``<participant_id>_rois.1D``, from which `read_roi_file` reads the same float64 values.

    `series` is (n_timepoints, n_rois), `rois` the ids and names of its columns.
    """
    with (folder / f"{participant_id}{SUFFIX}").open("w", encoding="ascii", newline="\n") as stream:
        stream.write("\t".join(f"#{roi_id}" for roi_id, _ in rois) + "\n")
        for values in series.tolist():
            stream.write("\t".join(map(repr, values)) + "\n")


def describe_series(folder: Path, rois: Rois, description: Mapping[str, Any]) -> None:
    """Write the ROI table and the description, with checksums of all, of a folder of series."""
    rows = "".join(f"{roi_id}\t{name}\n" for roi_id, name in rois)
    (folder / ROIS).write_text(f"roi_id\tname\n{rows}", encoding="utf-8")
    content = {
        "BIDSVersion": "1.9.0",
        "DatasetType": "derivative",
        **description,
        "checksums": {file.name: file_checksum(file) for file in sorted(folder.iterdir())},
    }
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    (folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")
