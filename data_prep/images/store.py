"""The image store: what a hospital's data preparation says about its images.

One folder holds one site::

    JTSC/
        dataset.json               Decathlon list: image, label, participant_id, section, fold
        participants.tsv           one row a patient
        dataset_description.json   how it was made, and what was found in every image

The images stay where they are, at ``root`` in the description, unless they were copied; paths are
relative to it, so that ``monai.data.load_decathlon_datalist(file, base_dir=root)`` reads the list.

Thousands of small images stand in one NumPy array in place of thousands of files: a *stack*, whose
first axis counts images. An image is then a file and a ``row``; all rows share the file's facts.

Imported at every start of a client process: NumPy and the standard library only.
"""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import StoreError, some_of
from data_prep.files import file_checksum
from data_prep.store_folder import DESCRIPTION, cell, new_store, verify_checksums, write_table
from data_prep.units import Unit

__all__ = [
    "SECTIONS",
    "ImageStore",
    "StoredImage",
    "content_checksum",
    "is_image_store",
    "read_image_store",
    "signature_differences",
    "write_image_store",
]

FORMAT_VERSION = 1
DATALIST = "dataset.json"
PARTICIPANTS = "participants.tsv"
TABLES = (DATALIST, PARTICIPANTS)
COPIES = "images"
SECTIONS = ("training", "validation", "test")

# Of each part of the description: what it must be.
PARTS: Mapping[str, tuple[type, ...]] = {
    "site": (str,),
    "synthetic": (bool,),
    "root": (str,),
    "dim": (int,),
    "channels": (int,),
    "channel_axis": (str,),
    "labels": (dict, type(None)),
    "label_map": (dict,),
    "classes": (list, type(None)),
    "images": (dict,),
    "summary": (dict,),
    "checksums": (dict,),
}


@dataclass(frozen=True)
class StoredImage:
    """One image of a site, as the store knows it.

    Attributes
    ----------
    files : tuple of str
        Relative to the store's root: one file, or one a channel; a folder is a DICOM series.
    label : str or None
        The mask.
    class_name : str or None
        Class of the whole image.
    participant_id : str
        Whose image it is.
    section : str
        ``training``, ``validation`` or ``test``, as the data list has it.
    fold : int or None
        Test fold, where the data list has one.
    facts : mapping
        ``shape``, ``spacing`` (mm or None), ``stored_as``, ``intensity``, ``label_voxels``,
        ``bytes`` and ``sha256`` of each file.
    row : int or None
        Which image of a stack; its facts are those of the stack.
    """

    files: tuple[str, ...]
    label: str | None
    class_name: str | None
    participant_id: str
    section: str
    fold: int | None
    facts: Mapping[str, Any]
    row: int | None = None

    @property
    def name(self) -> str:
        """The (first) file, by which people know the image."""
        return self.files[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Size along x, y (and z), in voxels."""
        return tuple(self.facts["shape"])

    @property
    def all_files(self) -> tuple[str, ...]:
        """Files of image and mask."""
        return self.files if self.label is None else (*self.files, self.label)


@dataclass(frozen=True)
class ImageStore:
    """One site's images and what is known about them.

    Attributes
    ----------
    path : Path
        The folder of the store.
    root : Path
        What the images' paths are relative to.
    description : dict
        Content of ``dataset_description.json``.
    images : tuple of StoredImage
        Sorted by patient, then by name.
    """

    path: Path
    root: Path
    description: dict[str, Any]
    images: tuple[StoredImage, ...]

    @property
    def site(self) -> str:
        """Name of the site."""
        return str(self.description["site"])

    @property
    def synthetic(self) -> bool:
        """Whether the images are made up."""
        return bool(self.description["synthetic"])

    @property
    def dim(self) -> int:
        """Number of spatial axes, 2 or 3."""
        return int(self.description["dim"])

    @property
    def channels(self) -> int:
        """Number of channels of every image."""
        return int(self.description["channels"])

    @property
    def labels(self) -> dict[int, str] | None:
        """Name of each label id, 0 (background) first; None without masks."""
        labels = self.description["labels"]
        if labels is None:
            return None
        return {int(key): name or f"label {key}" for key, name in labels.items()}

    @property
    def label_map(self) -> dict[int, int]:
        """What an id in the masks' files stands for, where it is not itself."""
        return {int(old): new for old, new in self.description["label_map"].items()}

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the images' classes in the order of their indices; None without classes."""
        classes = self.description["classes"]
        return None if classes is None else tuple(classes)

    @property
    def place(self) -> Path:
        """The folder."""
        return self.path

    @property
    def held_out_fold(self) -> int | None:
        """Any fold may be held out."""
        return None

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The patients, sorted by id: what a split divides."""
        units = []
        for who, images in self._by_patient.items():
            classes = Counter(image.class_name for image in images)
            most = max(sorted(classes, key=str), key=lambda name: classes[name])
            units.append(Unit(who, most, len(images), images[0].fold))
        return tuple(units)

    @cached_property
    def sections(self) -> tuple[str, ...]:
        """Section of each unit in the data list; a patient is in one only."""
        return tuple(images[0].section for images in self._by_patient.values())

    @cached_property
    def image_unit(self) -> np.ndarray:
        """Index of the unit of each image: int64, shape (n_images,)."""
        index = {who: i for i, who in enumerate(self._by_patient)}
        return np.array([index[image.participant_id] for image in self.images], dtype=np.int64)

    @cached_property
    def _by_patient(self) -> dict[str, list[StoredImage]]:
        grouped: dict[str, list[StoredImage]] = {}
        for image in self.images:
            grouped.setdefault(image.participant_id, []).append(image)
        return grouped

    def records(self, units: Iterable[int] | None = None) -> list[dict[str, Any]]:
        """Return the dictionaries that MONAI's transforms and datasets take.

        Parameters
        ----------
        units : iterable of int, optional
            Indices into `units`; all by default.

        Returns
        -------
        list of dict
            In the order of the images: ``image`` (absolute path, or a list of them), ``label``
            (absolute path of the mask), ``class`` (int) and ``row`` (int, of a stack) where there
            is one, ``unit`` (int).
        """
        wanted = range(len(self.units)) if units is None else set(units)
        records = []
        for image, unit in zip(self.images, self.image_unit.tolist(), strict=True):
            if unit not in wanted:
                continue
            files = [str(self.root / file) for file in image.files]
            record: dict[str, Any] = {"image": files[0] if len(files) == 1 else files}
            if image.label is not None:
                record["label"] = str(self.root / image.label)
            if image.class_name is not None:
                record["class"] = (self.classes or ()).index(image.class_name)
            if image.row is not None:
                record["row"] = image.row
            records.append(record | {"unit": unit})
        return records

    def stack(self) -> np.ndarray | None:
        """Return the stack that all images are rows of, mapped from disk; None if there is none.

        Returns
        -------
        np.ndarray, shape (n, x, y, channels) or as ``channel_axis`` of the description says
            `StoredImage.row` is an index into it.
        """
        files = {image.name for image in self.images}
        if len(files) != 1 or self.images[0].row is None:
            return None
        return np.asarray(np.load(self.root / files.pop(), mmap_mode="r", allow_pickle=False))

    def subset(self, units: Sequence[int] | np.ndarray) -> "ImageStore":
        """Return the store with these units alone, given by their indices."""
        wanted = set(units)
        kept = [
            image
            for image, unit in zip(self.images, self.image_unit.tolist(), strict=True)
            if unit in wanted
        ]
        return replace(self, images=tuple(kept))

    def fingerprint(self) -> str:
        """Return what changes when any image, mask, class, patient or fold does.

        Returns
        -------
        str
            SHA-256 in hexadecimal; times and places of files do not count.
        """
        content = [self.signature(), self.description["label_map"]]
        content += [[_entry(image), dict(image.facts["sha256"])] for image in self.images]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def stamp(self) -> str:
        """Return sizes and times of the files: what has another stamp is to be verified."""
        places = [self.path / name for name in (DESCRIPTION, *TABLES)]
        places += [self.root / file for file in _facts_by_file(self.images)]
        found = [file.stat() for place in places for file in _content(place)]
        times = json.dumps([[one.st_size, one.st_mtime_ns] for one in found])
        return hashlib.sha256(times.encode()).hexdigest()

    def signature(self) -> dict[str, Any]:
        """Return what must agree between sites that train together.

        Returns
        -------
        dict
            Fit for JSON. Holds no path and nothing about any patient.
        """
        names = self.description["labels"]
        return {
            "store": "images",
            "format_version": FORMAT_VERSION,
            "dim": self.dim,
            "channels": self.channels,
            "labels": names and {key: name and name.lower() for key, name in names.items()},
            "classes": self.classes and list(self.classes),
            "synthetic": self.synthetic,
        }

    def private_names(self) -> list[str]:
        """Return what must not stand in any message that leaves the site."""
        names = {str(self.root), str(self.path)}
        names |= {image.participant_id for image in self.images}
        for file in _facts_by_file(self.images):
            names |= {file, Path(file).name, _stem(file)}
        return sorted(names)


def _stem(file: str) -> str:
    return Path(file).name.removesuffix(".gz").rpartition(".")[0] or Path(file).name


def _order(image: StoredImage) -> tuple[Any, ...]:
    return image.participant_id, image.files, image.row or 0


def _facts_by_file(images: Iterable[StoredImage]) -> dict[str, Mapping[str, Any]]:
    """Return each file of images and masks once, with the facts of its image."""
    return {file: image.facts for image in images for file in image.all_files}


def _entry(image: StoredImage) -> dict[str, Any]:
    """Return an image as the data list has it."""
    entry: dict[str, Any] = {"image": image.files[0] if len(image.files) == 1 else [*image.files]}
    optional = {"row": image.row, "label": image.label, "class": image.class_name}
    optional["fold"] = image.fold
    entry |= {key: value for key, value in optional.items() if value is not None}
    return entry | {"participant_id": image.participant_id}


# --------------------------------------------------------------------------------------- reading


def is_image_store(folder: Path) -> bool:
    """Say whether a folder is a store of images, by its description."""
    try:
        description = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(description, dict) and description.get("store") == "images"


def read_image_store(
    path: str | os.PathLike[str], *, verify: bool = False, root: Path | None = None
) -> ImageStore:
    """Read an image store.

    Parameters
    ----------
    path : path
        Folder of one site.
    verify : bool
        Also compare the checksum of every image and mask. Without it only the tables' checksums
        are compared, and that every file is there with its size.
    root : Path, optional
        Where the images are now, if they have been moved.

    Returns
    -------
    ImageStore

    Raises
    ------
    StoreError
        With one sentence that names the site or file and what to do.
    """
    folder = Path(path)
    description = _read_description(folder)
    site = description["site"]
    verify_checksums(folder, site, description, TABLES)
    datalist = json.loads((folder / DATALIST).read_text(encoding="utf-8"))
    images = []
    for section in SECTIONS:
        for entry in datalist.get(section, []):
            files = entry["image"]
            names = (files,) if isinstance(files, str) else tuple(files)
            facts = description["images"].get(names[0])
            if facts is None:
                raise StoreError(
                    f"site {site!r}: {DESCRIPTION} says nothing about {names[0]}; make the store "
                    "again"
                )
            images.append(
                StoredImage(
                    files=names,
                    label=entry.get("label"),
                    class_name=entry.get("class"),
                    participant_id=entry["participant_id"],
                    section=section,
                    fold=entry.get("fold"),
                    facts=facts,
                    row=entry.get("row"),
                )
            )
    images.sort(key=_order)
    found = root or folder / description["root"]  # an absolute root stays itself
    store = ImageStore(folder, Path(found), description, tuple(images))
    _check_files(store, verify=verify)
    return store


def _read_description(folder: Path) -> dict[str, Any]:
    file = folder / DESCRIPTION
    how = "make one with `python -m data_prep images` or `synthetic --images`"
    if not file.is_file():
        raise StoreError(f"no image store at {folder}; {how}")
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StoreError(f"{file} is not readable JSON ({error}); make the store again") from None
    if not isinstance(description, dict) or description.get("store") != "images":
        raise StoreError(f"{folder} is not an image store; {how}")
    if description.get("format_version") != FORMAT_VERSION:
        raise StoreError(
            f"{file} has image store format {description.get('format_version')!r}, this version "
            f"reads {FORMAT_VERSION}; make the store again"
        )
    for part, kinds in PARTS.items():
        if not isinstance(description.get(part), kinds):
            raise StoreError(
                f"{file} is damaged: {part} is {description.get(part)!r:.60}; make the store again"
            )
    return description


def _check_files(store: ImageStore, *, verify: bool) -> None:
    """Refuse a store whose images are not there, or not those it was made from."""
    how = "make the store again, with `python -m data_prep images`"
    if not store.root.is_dir():
        raise StoreError(
            f"site {store.site!r}: the images' folder {store.root} is not there; {how}"
        )
    changed = []
    missing = []
    for file, facts in _facts_by_file(store.images).items():
        place = store.root / file
        if not place.exists():
            missing.append(file)
        elif content_size(place) != facts["bytes"][file] or (
            verify and content_checksum(place) != facts["sha256"][file]
        ):
            changed.append(file)
    if missing:
        raise StoreError(
            f"site {store.site!r}: {some_of(missing, 3)} of {store.root} is missing; bring the "
            f"file(s) back, or {how}"
        )
    if changed:
        raise StoreError(
            f"site {store.site!r}: {some_of(changed, 3)} of {store.root} was changed after the "
            f"store was written; {how}"
        )


def _content(place: Path) -> list[Path]:
    return sorted(f for f in place.iterdir() if f.is_file()) if place.is_dir() else [place]


def content_size(place: Path) -> int:
    """Return the bytes of a file, or of all files of a folder."""
    return sum(file.stat().st_size for file in _content(place))


def content_checksum(place: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of a folder's files."""
    if not place.is_dir():
        return file_checksum(place)
    content = [(file.name, file_checksum(file)) for file in _content(place)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


# --------------------------------------------------------------------------------------- writing


def write_image_store(
    path: Path,
    *,
    images: Sequence[StoredImage],
    description: dict[str, Any],
    copy_from: Path | None = None,
) -> ImageStore:
    """Write an image store, so that an interrupted run leaves the old one or none.

    Parameters
    ----------
    path : Path
        Folder of the store; an old store there is replaced, anything else refused.
    images : sequence of StoredImage
        At least one.
    description : dict
        All of ``dataset_description.json`` but ``images`` and what is derived.
    copy_from : Path, optional
        Root of the images, which are copied into the store; else they are only referred to.

    Returns
    -------
    ImageStore

    Raises
    ------
    StoreError
        If the place is taken or full, or another run is writing there.
    """
    images = sorted(images, key=_order)
    site = description["site"]
    if copy_from is not None:
        description = description | {"root": COPIES}
    full = {
        "Name": f"{site}: images for federated training",
        "store": "images",
        "format_version": FORMAT_VERSION,
        **description,
        "images": {image.name: dict(image.facts) for image in images},
    }
    store = ImageStore(path, path, full, tuple(images))
    datalist = {
        "name": site,
        "modality": {str(i): name for i, name in enumerate(full.get("channel_names") or ())},
        "labels": {str(key): name for key, name in (store.labels or {}).items()},
        "numTraining": sum(image.section == "training" for image in images),
        **{s: [_entry(i) for i in images if i.section == s] for s in SECTIONS},
    }
    with new_store(path, site, TABLES, full, also=[COPIES]) as temporary:
        text = json.dumps(datalist, indent=1, ensure_ascii=False)
        (temporary / DATALIST).write_text(text + "\n", encoding="utf-8")
        header = ("participant_id", "site", "section", "stratum", "n_images", "fold")
        rows = (
            [cell(v) for v in (u.id, site, section, u.stratum, u.n_samples, u.fold)]
            for u, section in zip(store.units, store.sections, strict=True)
        )
        write_table(temporary / PARTICIPANTS, header, rows)
        if copy_from is not None:
            for file in _facts_by_file(images):
                _copy(copy_from / file, temporary / COPIES / file)
    return read_image_store(path)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, copy_function=shutil.copyfile, dirs_exist_ok=True)
    else:
        shutil.copyfile(source, target)


# ------------------------------------------------------------------------ do sites fit together?


def signature_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Say in what two signatures differ.

    Parameters
    ----------
    a, b : mapping
        As from `ImageStore.signature`, possibly after a trip through JSON.

    Returns
    -------
    list of str
        One sentence a difference, with both values; empty if the stores fit together.
    """
    names = {
        "store": "kind of store",
        "format_version": "store format",
        "dim": "number of spatial axes",
        "channels": "number of channels",
        "synthetic": "synthetic",
    }
    differences = [
        f"{name}: {a.get(key)} and {b.get(key)}"
        for key, name in names.items()
        if a.get(key) != b.get(key)
    ]
    return [*differences, *_label_differences(a, b), *_class_differences(a, b)]


def _label_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    first, second = a.get("labels"), b.get("labels")
    if first is None or second is None:
        return [] if first == second else ["masks: only one of them has any"]
    if set(first) != set(second):
        return [
            f"label ids: {', '.join(first)} and {', '.join(second)} (name all of them with "
            "--label-names where one is only absent)"
        ]
    return [
        f"name of label {key}: {first[key]} and {second[key]}"
        for key in first
        if first[key] and second[key] and first[key] != second[key]
    ]


def _class_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    first, second = a.get("classes"), b.get("classes")
    if first == second:
        return []
    if first is None or second is None:
        return ["classes: only one of them has any"]
    return [
        f"classes: {', '.join(first)} and {', '.join(second)} (name the same, in the same order, "
        "with --class-names)"
    ]
