"""The site store: the folder that a hospital's data preparation hands to training.

One folder holds one site::

    NYU/
        dataset_description.json   how it was made: settings, versions, checksums, exclusions
        participants.tsv           one row a subject
        samples.tsv                one row a connectome: its subject and where its window starts
        rois.tsv                   id and name of every node
        connectomes.npy            float32 (n_samples, n_edges), edges in ``np.triu_indices`` order

This module is imported at every start of a client process, so it needs NumPy and the standard
library only.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.compatibility import CONNECTOME_SETTINGS, check_compatible, signature_differences
from data_prep.errors import StoreError
from data_prep.folds import assign_folds
from data_prep.names import check_site_name
from data_prep.store_folder import (
    DESCRIPTION,
    MISSING,
    cell,
    damaged,
    new_store,
    read_table,
    verify_checksums,
    write_table,
)
from data_prep.units import Unit

__all__ = [
    "EDGE_ORDER",
    "FORMAT_VERSION",
    "Participant",
    "SiteStore",
    "StoreError",
    "assign_folds",
    "check_compatible",
    "default_data_root",
    "find_site_stores",
    "read_description",
    "read_site_store",
    "signature_differences",
    "write_site_store",
]

FORMAT_VERSION = 1
EDGE_ORDER = "upper triangle by rows (numpy.triu_indices(n_rois, k=1))"

PARTICIPANTS = "participants.tsv"
SAMPLES = "samples.tsv"
ROIS = "rois.tsv"
CONNECTOMES = "connectomes.npy"
TABLES = (PARTICIPANTS, SAMPLES, ROIS)
TABLES_AND_ARRAY = (*TABLES, CONNECTOMES)

PARTICIPANT_COLUMNS = (
    "participant_id",
    "diagnosis",
    "age",
    "sex",
    "site",
    "n_timepoints",
    "n_windows",
)
SAMPLE_COLUMNS = ("participant_id", "window_start")
ROI_COLUMNS = ("roi_id", "name")
DIAGNOSES = {"control": 0, "autism": 1}


@dataclass(frozen=True)
class Participant:
    """One subject of a site.

    Attributes
    ----------
    participant_id : str
        BIDS style, such as ``sub-0050952``.
    diagnosis : str
        ``"autism"`` or ``"control"``.
    age : float or None
        Years at the scan; None where unknown.
    sex : str
        ``"M"``, ``"F"`` or ``"n/a"``.
    site : str
        Name of the site.
    n_timepoints : int
        Length of the scan.
    n_windows : int
        Number of connectomes, 1 for a whole scan.
    fold : int or None
        Test fold when folds were fixed in the store, else None.
    """

    participant_id: str
    diagnosis: str
    age: float | None
    sex: str
    site: str
    n_timepoints: int
    n_windows: int
    fold: int | None = None


@dataclass(frozen=True)
class SiteStore:
    """One site's connectomes and what is known about them.

    Attributes
    ----------
    path : Path
        The folder.
    site : str
        Name of the site.
    description : dict
        Content of ``dataset_description.json``.
    participants : tuple of Participant
        The subjects, in the order of the file.
    rois : tuple of (str, str)
        ROI id and name of every node.
    connectomes : np.ndarray, float32, shape (n_samples, n_edges)
        Mapped from disk, read-only, or in memory. Finite.
    sample_participant : np.ndarray, int64, shape (n_samples,)
        Index into `participants` of each sample.
    window_start : np.ndarray, int64, shape (n_samples,)
        First time point of each sample's window, 0 for whole scans.
    """

    path: Path
    site: str
    description: dict[str, Any]
    participants: tuple[Participant, ...]
    rois: tuple[tuple[str, str], ...]
    connectomes: np.ndarray = field(repr=False)
    sample_participant: np.ndarray = field(repr=False)
    window_start: np.ndarray = field(repr=False)

    @cached_property
    def labels(self) -> np.ndarray:
        """Diagnosis of each participant: int64 (n_participants,), 1 autism, 0 control."""
        return np.array([DIAGNOSES[p.diagnosis] for p in self.participants], dtype=np.int64)

    @property
    def n_rois(self) -> int:
        """Number of nodes."""
        return len(self.rois)

    @property
    def n_edges(self) -> int:
        """Number of values of one connectome, ``n_rois * (n_rois - 1) / 2``."""
        return int(self.connectomes.shape[1])

    @property
    def synthetic(self) -> bool:
        """Whether the subjects are made up."""
        return bool(self.description["synthetic"])

    @property
    def place(self) -> Path:
        """The folder."""
        return self.path

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The participants as units of a split, in the order of the file."""
        counts = np.bincount(self.sample_participant, minlength=len(self.participants))
        return tuple(
            Unit(p.participant_id, p.diagnosis, int(n), p.fold)
            for p, n in zip(self.participants, counts, strict=True)
        )

    @property
    def held_out_fold(self) -> int | None:
        """The only fold that may be held out: the one that a tangent space was fitted without."""
        fold: int | None = (self.description.get("folds") or {}).get("held_out")
        return fold

    def fingerprint(self) -> str:
        """Return a digest of the content, by the checksums that the description holds."""
        checksums = json.dumps(self.description["checksums"], sort_keys=True)
        return hashlib.sha256(checksums.encode()).hexdigest()[:16]

    def stamp(self) -> str:
        """Return sizes and times of the files: what has another stamp is to be verified."""
        found = [(self.path / name).stat() for name in (DESCRIPTION, *TABLES_AND_ARRAY)]
        return " ".join(f"{one.st_size}/{one.st_mtime_ns}" for one in found)

    def private_names(self) -> list[str]:
        """Return the participants' ids."""
        return [participant.participant_id for participant in self.participants]

    def subset(self, units: np.ndarray) -> "SiteStore":
        """Return some participants alone, in memory, without fixed folds."""
        rows = np.flatnonzero(np.isin(self.sample_participant, units))
        kept, owner = np.unique(self.sample_participant[rows], return_inverse=True)
        return replace(
            self,
            participants=tuple(replace(self.participants[k], fold=None) for k in kept),
            connectomes=self.connectomes[rows],
            sample_participant=owner,
            window_start=self.window_start[rows],
        )

    def signature(self) -> dict[str, Any]:
        """Return what must agree between sites that train together.

        Returns
        -------
        dict
            Fit for JSON. Holds no path and nothing about any subject.
        """
        settings = self.description["connectome"]
        return {
            "format_version": self.description["format_version"],
            "atlas": self.description["atlas"],
            **{name: settings[name] for name in CONNECTOME_SETTINGS},
            **{name: settings[name] for name in ("window_seconds",) if name in settings},
            "n_rois": self.n_rois,
            "n_edges": self.n_edges,
            "rois": [list(roi) for roi in self.rois],
            "reference": self.description.get("reference_split"),
            "preprocessing": self.description.get("preprocessing"),
            "synthetic": self.synthetic,
        }


# --------------------------------------------------------------------------------------- reading


def read_site_store(path: str | os.PathLike[str], *, verify: bool = False) -> SiteStore:
    """Read a site store.

    Parameters
    ----------
    path : path
        Folder of one site.
    verify : bool
        Also compare the checksum of the connectomes and look at every value. Without it only the
        tables, their checksums, and the array's header are looked at, and the connectomes stay on
        disk until they are used.

    Returns
    -------
    SiteStore

    Raises
    ------
    StoreError
        With one sentence that names the site or file and what to do.
    """
    folder = Path(path)
    description = read_description(folder)
    site = str(description["site"])
    rois = _read_rois(folder, site)
    participants = _read_participants(folder, site)
    connectomes = _map_connectomes(folder, site, n_rois=len(rois))
    sample_participant, window_start = _read_samples(folder, site, participants)
    if len(sample_participant) != len(connectomes):
        raise damaged(
            site,
            f"{SAMPLES} has {len(sample_participant)} rows and {CONNECTOMES} has "
            f"{len(connectomes)}",
        )
    verify_checksums(folder, site, description, TABLES)
    if verify:
        verify_checksums(folder, site, description, [CONNECTOMES])
        _verify_values(site, connectomes)
    return SiteStore(
        path=folder,
        site=site,
        description=description,
        participants=participants,
        rois=rois,
        connectomes=connectomes,
        sample_participant=sample_participant,
        window_start=window_start,
    )


def read_description(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check ``dataset_description.json`` of a store, and nothing else.

    Parameters
    ----------
    path : path
        Folder of one site.

    Returns
    -------
    dict

    Raises
    ------
    StoreError
        If there is no store, or its description is not one of this format.
    """
    folder = Path(path)
    file = folder / DESCRIPTION
    if folder.parent.exists() and not folder.parent.is_dir():
        raise StoreError(
            f"no site store at {folder}: {folder.parent} is a file; name the folder that holds the "
            "stores, with --data or FEDBN_DATA"
        )
    if not folder.is_dir():
        others = [p.name for p in find_site_stores(folder.parent)]
        what = f"no such folder, only {', '.join(others)}" if others else "no such folder"
        if folder.exists():
            what = "it is a file"
        raise StoreError(
            f"no site store at {folder} ({what}): make one "
            f"with `python -m data_prep` (nifti, series, abide) and --out {folder.parent}"
        )
    if not file.is_file():
        inner = [p.name for p in find_site_stores(folder)]
        hint = (
            f"it holds the stores {', '.join(inner)}: name one of them"
            if inner
            else "make one with `python -m data_prep` (nifti, series, abide)"
        )
        raise StoreError(f"{folder} is not a site store, it has no {DESCRIPTION}; {hint}")
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StoreError(f"{file} is not readable JSON ({error}); make the store again") from None
    if not isinstance(description, dict) or "format_version" not in description:
        raise StoreError(
            f"{file} is not the description of a site store: it states no format_version; "
            "make the store again"
        )
    if description.get("store") == "images":
        raise StoreError(f"{folder} is a store of images; name one of connectomes")
    if description["format_version"] != FORMAT_VERSION:
        raise StoreError(
            f"{file} has store format {description['format_version']!r}, this version reads "
            f"{FORMAT_VERSION}; make the store again"
        )
    connectome = description.get("connectome")
    present = set(connectome) if isinstance(connectome, dict) else set()
    missing = [key for key in ("site", "atlas", "synthetic", "checksums") if key not in description]
    missing += [f"connectome.{key}" for key in CONNECTOME_SETTINGS if key not in present]
    if missing:
        raise StoreError(f"{file} does not state {', '.join(missing)}; make the store again")
    try:
        check_site_name(str(description["site"]))
    except ValueError as error:
        raise StoreError(f"{file}: {error}; make the store again with such a --site") from None
    if wrong := _wrong_values(description):
        raise StoreError(f"{file} is damaged: {wrong}; make the store again")
    return description


def _wrong_values(description: Mapping[str, Any]) -> str | None:
    """Return the first part of a description that is of another type than what is written."""

    def are(kind: type, values: Any) -> bool:
        return isinstance(values, dict) and all(type(value) is kind for value in values.values())

    connectome = description["connectome"]
    for key in ("window", "stride"):
        value = connectome[key]
        if value is not None and (type(value) is not int or value < 1):
            return f"connectome.{key} is {value!r}"
    for key in set(CONNECTOME_SETTINGS) - {"window", "stride"}:
        if not isinstance(connectome[key], str):
            return f"connectome.{key} is {connectome[key]!r}"
    right = {
        "site": isinstance(description["site"], str),
        "atlas": isinstance(description["atlas"], str),
        "synthetic": isinstance(description["synthetic"], bool),
        "checksums": are(str, description["checksums"]),
        "counts": are(int, description.get("counts", {})),
        "excluded": isinstance(description.get("excluded", []), list)
        and all(are(str, entry) for entry in description.get("excluded", [])),
    }
    return next((f"{key} is {description[key]!r:.60}" for key, ok in right.items() if not ok), None)


def find_site_stores(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the site stores directly inside a folder, sorted by name.

    Parameters
    ----------
    folder : path
        A folder; hidden folders in it (such as an interrupted run's) are passed over.

    Returns
    -------
    list of Path
    """
    root = Path(folder)
    if not root.is_dir():
        return []
    return sorted(
        child
        for child in root.iterdir()
        if not child.name.startswith(".") and (child / DESCRIPTION).is_file()
    )


def default_data_root() -> Path:
    """Return where site stores are by default: ``$FEDBN_DATA``, else ``~/fedbn_data``.

    Returns
    -------
    Path
    """
    named = os.environ.get("FEDBN_DATA")
    return Path(named).expanduser() if named else Path.home() / "fedbn_data"


def _read_rois(folder: Path, site: str) -> tuple[tuple[str, str], ...]:
    _, rows = read_table(folder / ROIS, site, ROI_COLUMNS)
    ids = [row[0] for row in rows]
    if len(set(ids)) != len(ids):
        raise damaged(site, f"{ROIS} names an ROI id twice")
    return tuple((row[0], row[1]) for row in rows)


def _read_participants(folder: Path, site: str) -> tuple[Participant, ...]:
    header, rows = read_table(folder / PARTICIPANTS, site, PARTICIPANT_COLUMNS)
    with_fold = "fold" in header
    participants = []
    for number, row in enumerate(rows, start=2):
        value = dict(zip(header, row, strict=True))
        try:
            participant = Participant(
                participant_id=value["participant_id"],
                diagnosis=value["diagnosis"],
                age=None if value["age"] == MISSING else float(value["age"]),
                sex=value["sex"],
                site=value["site"],
                n_timepoints=int(value["n_timepoints"]),
                n_windows=int(value["n_windows"]),
                fold=int(value["fold"]) if with_fold and value["fold"] != MISSING else None,
            )
        except ValueError as error:
            raise damaged(site, f"line {number} of {PARTICIPANTS} is not valid ({error})") from None
        participants.append(participant)
    _check_participants(site, participants)
    return tuple(participants)


def _check_participants(site: str, participants: Sequence[Participant]) -> None:
    """Refuse what no store may hold, on writing as on reading."""
    seen: set[str] = set()
    for p in participants:
        if p.participant_id in seen:
            raise StoreError(f"site {site!r}: {p.participant_id} appears twice in {PARTICIPANTS}")
        seen.add(p.participant_id)
        if p.diagnosis not in DIAGNOSES:
            raise StoreError(
                f"site {site!r}: {p.participant_id} has the diagnosis {p.diagnosis!r}; allowed "
                f"are {', '.join(sorted(DIAGNOSES))}"
            )
        if p.site != site:
            raise StoreError(
                f"site {site!r}: {p.participant_id} belongs to site {p.site!r} in {PARTICIPANTS}; "
                "one store holds one site"
            )
        if p.n_windows < 1:
            raise StoreError(f"site {site!r}: {p.participant_id} has {p.n_windows} windows")


def _map_connectomes(folder: Path, site: str, *, n_rois: int) -> np.memmap:
    file = folder / CONNECTOMES
    if not file.is_file():
        raise damaged(site, f"{file} is missing")
    try:
        # Never unpickles: a header that announces Python objects is an error here.
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise damaged(site, f"{CONNECTOMES} is cut off or not a NumPy array ({error})") from None
    n_edges = n_rois * (n_rois - 1) // 2
    if not isinstance(array, np.memmap) or array.dtype != np.float32 or array.ndim != 2:
        raise damaged(
            site,
            f"{CONNECTOMES} holds {array.dtype} of shape {array.shape}, expected float32 of shape "
            f"(n_samples, n_edges)",
        )
    if array.shape[1] != n_edges:
        raise damaged(
            site,
            f"{CONNECTOMES} has {array.shape[1]} edges, but the {n_rois} ROIs of {ROIS} have "
            f"{n_edges}",
        )
    return array


def _read_samples(
    folder: Path, site: str, participants: Sequence[Participant]
) -> tuple[np.ndarray, np.ndarray]:
    _, rows = read_table(folder / SAMPLES, site, SAMPLE_COLUMNS)
    index = {p.participant_id: i for i, p in enumerate(participants)}
    try:
        owner = np.fromiter((index[row[0]] for row in rows), dtype=np.int64, count=len(rows))
        start = np.fromiter((int(row[1]) for row in rows), dtype=np.int64, count=len(rows))
    except KeyError as error:
        raise damaged(
            site, f"{SAMPLES} names {error.args[0]!r}, who is not in {PARTICIPANTS}"
        ) from None
    except ValueError as error:
        raise damaged(
            site, f"{SAMPLES} has a window_start that is not a number ({error})"
        ) from None
    found = np.bincount(owner, minlength=len(participants))
    for p, count in zip(participants, found, strict=True):
        if count != p.n_windows:
            raise damaged(
                site,
                f"{p.participant_id} has {count} rows in {SAMPLES} and n_windows {p.n_windows} in "
                f"{PARTICIPANTS}",
            )
    return owner, start


def _verify_values(site: str, connectomes: np.ndarray) -> None:
    rows = max(1, (16 << 20) // (4 * connectomes.shape[1]))
    for begin in range(0, len(connectomes), rows):
        finite = np.isfinite(connectomes[begin : begin + rows])
        if not finite.all():
            row, edge = np.argwhere(~finite)[0]
            raise damaged(
                site,
                f"{CONNECTOMES} has a value that is not finite (row {begin + row}, edge {edge})",
            )


# --------------------------------------------------------------------------------------- writing


def write_site_store(
    path: str | os.PathLike[str],
    *,
    site: str,
    participants: Sequence[Participant],
    rois: Sequence[tuple[str, str]],
    window_starts: Sequence[Sequence[int] | np.ndarray],
    connectomes: np.ndarray | Callable[[int, np.ndarray], object],
    description: Mapping[str, Any],
) -> Path:
    """Write a site store, so that an interrupted run leaves the old one or none.

    Parameters
    ----------
    path : path
        Folder of the store. What is there as a store is replaced; any other folder that is not
        empty is refused.
    site : str
        Name of the site.
    participants : sequence of Participant
        The subjects; ``n_windows`` must equal the length of their entry in `window_starts`.
    rois : sequence of (str, str)
        ROI id and name of every node.
    window_starts : sequence of sequence of int
        For each participant, the first time point of each of its windows.
    connectomes : np.ndarray, shape (n_samples, n_edges), or callable
        All rows, or a function ``fill(index, block)`` that writes the rows of participant `index`
        into ``block``, float32 (n_windows, n_edges): the rows of one participant are in memory.
    description : mapping
        Goes into ``dataset_description.json``. Must hold ``atlas``, ``synthetic`` and
        ``connectome`` (a mapping with ``kind``, ``estimator``, ``window``, ``stride``,
        ``negative``); counts, checksums and the format are added here.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    ValueError
        If no site can have this name.
    StoreError
        If the parts do not fit together, or a value is not finite.
    FileError
        If another run is writing this store, or it cannot be written (full disk, no permission).
    """
    check_site_name(site)
    folder = Path(path)
    participants, rois = list(participants), list(rois)
    if not participants:
        raise StoreError(f"site {site!r}: no subject is left, so there is nothing to store")
    _check_participants(site, participants)
    for p, starts in zip(participants, window_starts, strict=True):
        if len(starts) != p.n_windows:
            raise StoreError(
                f"site {site!r}: {p.participant_id} has n_windows {p.n_windows} and "
                f"{len(starts)} window starts"
            )
    full = _complete_description(site, participants, rois, description)
    with new_store(folder, site, TABLES_AND_ARRAY, full) as temporary:
        _write_tables(temporary, participants, rois, window_starts)
        _write_connectomes(
            temporary / CONNECTOMES, site, participants, full["n_edges"], connectomes
        )
    return folder


def _complete_description(
    site: str,
    participants: Sequence[Participant],
    rois: Sequence[tuple[str, str]],
    description: Mapping[str, Any],
) -> dict[str, Any]:
    connectome = dict(description.get("connectome", {}))
    connectome.setdefault("edge_order", EDGE_ORDER)
    connectome.setdefault("transform", "fisher z")
    missing = [key for key in ("atlas", "synthetic") if key not in description]
    missing += [f"connectome.{key}" for key in CONNECTOME_SETTINGS if key not in connectome]
    if missing:
        raise StoreError(f"site {site!r}: the description must state {', '.join(missing)}")
    n_rois = len(rois)
    return {
        "Name": f"{site}: connectomes for federated training",
        "BIDSVersion": "1.9.0",
        "DatasetType": "derivative",
        **description,
        "format_version": FORMAT_VERSION,
        "site": site,
        "connectome": connectome,
        "n_participants": len(participants),
        "n_samples": sum(p.n_windows for p in participants),
        "n_rois": n_rois,
        "n_edges": n_rois * (n_rois - 1) // 2,
    }


def _write_tables(
    folder: Path,
    participants: Sequence[Participant],
    rois: Sequence[tuple[str, str]],
    window_starts: Sequence[Sequence[int] | np.ndarray],
) -> None:
    with_fold = any(p.fold is not None for p in participants)
    header = (*PARTICIPANT_COLUMNS, "fold") if with_fold else PARTICIPANT_COLUMNS
    write_table(
        folder / PARTICIPANTS,
        header,
        ([cell(getattr(p, name)) for name in header] for p in participants),
    )
    write_table(folder / ROIS, ROI_COLUMNS, ([cell(i), cell(name)] for i, name in rois))
    write_table(
        folder / SAMPLES,
        SAMPLE_COLUMNS,
        (
            [p.participant_id, str(int(start))]
            for p, starts in zip(participants, window_starts, strict=True)
            for start in starts
        ),
    )


def _write_connectomes(
    file: Path,
    site: str,
    participants: Sequence[Participant],
    n_edges: int,
    connectomes: np.ndarray | Callable[[int, np.ndarray], object],
) -> None:
    n_samples = sum(p.n_windows for p in participants)
    if not callable(connectomes) and connectomes.shape != (n_samples, n_edges):
        raise StoreError(
            f"site {site!r}: connectomes of shape {connectomes.shape}, expected "
            f"{(n_samples, n_edges)}"
        )
    # Through the file, not mapped: a full disk under a mapped file would kill the process.
    with file.open("wb") as stream:
        header = {"descr": "<f4", "fortran_order": False, "shape": (n_samples, n_edges)}
        np.lib.format.write_array_header_1_0(stream, header)
        begin = 0
        for index, p in enumerate(participants):
            end = begin + p.n_windows
            if callable(connectomes):
                block = np.zeros((p.n_windows, n_edges), dtype="<f4")
                connectomes(index, block)
            else:
                block = np.ascontiguousarray(connectomes[begin:end], dtype="<f4")
            if not np.isfinite(block).all():
                raise StoreError(
                    f"site {site!r}: {p.participant_id} has a connectome value that is not finite"
                )
            stream.write(block.data)
            begin = end
