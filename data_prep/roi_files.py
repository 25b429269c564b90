"""A folder of ROI time series, one text file a subject, for programs that start from these.

The files have the form of ABIDE's ``.1D`` files, so `sources.read_roi_file` reads them back.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import SourceError, some_of
from data_prep.files import file_checksum

__all__ = ["describe_series", "holds_series", "refuse_foreign_series", "write_roi_file"]

SUFFIX = "_rois.1D"
ROIS = "rois.tsv"
DESCRIPTION = "dataset_description.json"


def refuse_foreign_series(path: Path) -> None:
    """Raise if something is in a folder that is no ROI time series written here.

    Parameters
    ----------
    path : Path
        Need not exist.

    Raises
    ------
    SourceError
    """
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
    """Return whether a folder holds, unchanged, what a run with this fingerprint wrote.

    Parameters
    ----------
    path : Path
        The folder.
    fingerprint : str
        As from `preparation.Preparation.fingerprint`.
    """
    try:
        content = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
        return content["fingerprint"] == fingerprint and all(
            file_checksum(path / name) == sha for name, sha in content["checksums"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write_roi_file(
    folder: Path, participant_id: str, series: np.ndarray, rois: Sequence[tuple[str, str]]
) -> None:
    """Write one subject's ROI time series in the form that `sources.read_roi_file` reads.

    Parameters
    ----------
    folder : Path
        Gets ``<participant_id>_rois.1D``: a header line of ROI ids (``#10 #11 ...``), then a line
        a time point, separated by tabs.
    participant_id : str
        BIDS style.
    series : np.ndarray, shape (n_timepoints, n_rois)
        Written so that the same float64 values are read back.
    rois : sequence of (str, str)
        Ids and names of the columns.
    """
    with (folder / f"{participant_id}{SUFFIX}").open("w", encoding="ascii", newline="\n") as stream:
        stream.write("\t".join(f"#{roi_id}" for roi_id, _ in rois) + "\n")
        for values in series.tolist():
            stream.write("\t".join(map(repr, values)) + "\n")


def describe_series(
    folder: Path, rois: Sequence[tuple[str, str]], description: Mapping[str, Any]
) -> None:
    """Write the ROI table and the description of a folder of series.

    Parameters
    ----------
    folder : Path
        With all subjects' files.
    rois : sequence of (str, str)
        Id and name of each column.
    description : mapping
        Fit for JSON, with ``fingerprint``; checksums are added.
    """
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
