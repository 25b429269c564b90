"""A folder of ROI time series, one text file a subject, for programs that start from these.

The files have the form of ABIDE's ``.1D`` files, so `sources.read_roi_file` reads them back.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.site_store import file_checksum, some_of
from data_prep.sources import SourceError, Subject

__all__ = ["RoiFolder", "write_roi_file"]

SUFFIX = "_rois.1D"
ROIS = "rois.tsv"
DESCRIPTION = "dataset_description.json"


class RoiFolder:
    """A folder that gets the ROI time series of one site.

    Its description is removed when writing begins and written last, so a folder without one is
    not complete.

    Parameters
    ----------
    path : Path
        The folder; new, empty, or one that this class wrote.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def refuse_foreign(self) -> None:
        """Raise if something is in the folder that this class did not write.

        Raises
        ------
        SourceError
        """
        if self.path.exists() and not self.path.is_dir():
            raise SourceError(f"--timeseries-out {self.path} is a file; name a folder")
        known = {ROIS, DESCRIPTION}
        foreign = sorted(
            child.name
            for child in (self.path.iterdir() if self.path.is_dir() else ())
            if child.name not in known
            and not child.name.endswith(SUFFIX)
            and not child.name.startswith(".")
        )
        if foreign:
            raise SourceError(
                f"--timeseries-out {self.path} holds something else ({some_of(foreign, 3)}); name "
                "another folder"
            )

    def is_complete(self, fingerprint: str) -> bool:
        """Return whether the folder holds, unchanged, what a run with this fingerprint wrote.

        Parameters
        ----------
        fingerprint : str
            As from `preparation.Preparation.fingerprint`.
        """
        try:
            content = json.loads((self.path / DESCRIPTION).read_text(encoding="utf-8"))
            return content["fingerprint"] == fingerprint and all(
                file_checksum(self.path / name) == sha for name, sha in content["checksums"].items()
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False

    def begin(self) -> None:
        """Make the folder, and remove what an earlier run wrote."""
        self.refuse_foreign()
        self.path.mkdir(parents=True, exist_ok=True)
        for name in (DESCRIPTION, ROIS):  # the description first: from here on it is not complete
            (self.path / name).unlink(missing_ok=True)
        for file in [*self.path.glob(f"*{SUFFIX}"), *self.path.glob(f".*{SUFFIX}.partial-*")]:
            file.unlink()

    def add(self, subject: Subject, rois: Sequence[tuple[str, str]]) -> None:
        """Write one subject's file.

        Parameters
        ----------
        subject : Subject
            With its series.
        rois : sequence of (str, str)
            Id and name of each column.
        """
        write_roi_file(self.path / f"{subject.participant_id}{SUFFIX}", subject.series, rois)

    def finish(self, rois: Sequence[tuple[str, str]], description: Mapping[str, Any]) -> None:
        """Write the ROI table and the description.

        Parameters
        ----------
        rois : sequence of (str, str)
            Id and name of each column.
        description : mapping
            Fit for JSON, with ``fingerprint``; checksums are added.
        """
        rows = "".join(f"{roi_id}\t{name}\n" for roi_id, name in rois)
        (self.path / ROIS).write_text(f"roi_id\tname\n{rows}", encoding="utf-8")
        files = [*sorted(self.path.glob(f"*{SUFFIX}")), self.path / ROIS]
        content = {
            "BIDSVersion": "1.9.0",
            "DatasetType": "derivative",
            **description,
            "checksums": {file.name: file_checksum(file) for file in files},
        }
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        temporary = self.path / f".{DESCRIPTION}.partial-{os.getpid()}"
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(self.path / DESCRIPTION)


def write_roi_file(file: Path, series: np.ndarray, rois: Sequence[tuple[str, str]]) -> None:
    """Write ROI time series in the form that `sources.read_roi_file` reads.

    Parameters
    ----------
    file : Path
        Text: a header line of ROI ids (``#10 #11 ...``), then a line a time point, separated by
        tabs. Written beside and renamed, so that it is whole or not there.
    series : np.ndarray, shape (n_timepoints, n_rois)
        Written so that the same float64 values are read back.
    rois : sequence of (str, str)
        Ids and names of the columns.
    """
    temporary = file.with_name(f".{file.name}.partial-{os.getpid()}")
    try:
        with temporary.open("w", encoding="ascii", newline="\n") as stream:
            stream.write("\t".join(f"#{roi_id}" for roi_id, _ in rois) + "\n")
            for values in series.tolist():
                stream.write("\t".join(map(repr, values)) + "\n")
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
