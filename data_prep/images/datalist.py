"""Which images a hospital has: a Decathlon data list, or patterns of file names, and tables beside.

Nothing is opened here but the list and the tables. Paths come out relative to one folder, the root,
and never lead out of it.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any

from data_prep.errors import StoreError, some_of
from data_prep.files import file_checksum
from data_prep.images.store import SECTIONS
from data_prep.tables import read_table

__all__ = [
    "DataList",
    "Entry",
    "LeftOut",
    "absolute",
    "find_images",
    "read_datalist",
    "read_table_column",
    "refuse_gaps",
    "refuse_two_sides",
    "stem",
]


@dataclass(frozen=True)
class LeftOut:
    """One image that is not in the store."""

    image: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Entry:
    """One image as a list names it; paths as in `store.StoredImage`."""

    files: tuple[str, ...]
    label: str | None = None
    class_name: str | None = None
    participant_id: str | None = None
    section: str = "training"
    fold: int | None = None

    @property
    def name(self) -> str:
        """The (first) file."""
        return self.files[0]


@dataclass(frozen=True)
class DataList:
    """All images that a site means to use.

    Attributes
    ----------
    root : Path
        What paths are relative to; absolute.
    entries : tuple of Entry
        Each image once.
    label_names : dict or None
        Name of each label id, where the list states them.
    channel_names : tuple of str
        As the list states them.
    inputs : dict
        Checksum of the list and the tables, by file name.
    not_read : int
        Images of the list's validation or test section that have no label.
    """

    root: Path
    entries: tuple[Entry, ...]
    label_names: dict[int, str | None] | None
    channel_names: tuple[str, ...]
    inputs: dict[str, str]
    not_read: int = 0

    def with_column(
        self, field: str, file: Path, values: Mapping[str, str]
    ) -> tuple["DataList", list[str], list[str]]:
        """Return the list with a class or participant for each image, from a table.

        Parameters
        ----------
        field : str
            ``class_name`` or ``participant_id``.
        file : Path
            The table, to be named.
        values : mapping
            From an image, named by path, file name, stem or number, to the value.

        Returns
        -------
        datalist : DataList
        without_row : list of str
            Images that the table does not name; they have no value.
        without_image : list of str
            Rows that name no image.
        """
        numbers = Counter(str(int(key)) for key in values if key.isdecimal())
        by_number = {str(int(k)): k for k in values if k.isdecimal() and numbers[str(int(k))] == 1}
        used: dict[str, str] = {}
        entries, without_row = [], []
        for entry in self.entries:
            row = _row_of(entry.name, values, by_number)
            if row is None:
                without_row.append(entry.name)
                entries.append(entry)
                continue
            if row in used:
                raise StoreError(
                    f"{file.name}: {row!r} may mean {used[row]} or {entry.name}; write the paths "
                    "of images as the data list has them"
                )
            used[row] = entry.name
            entries.append(replace(entry, **{field: values[row]}))  # type: ignore[arg-type]
        changed = replace(
            self, entries=tuple(entries), inputs=self.inputs | {file.name: file_checksum(file)}
        )
        return changed, without_row, [row for row in values if row not in used]

    def without(
        self, problems: Mapping[str, Sequence[str]], *, drop: bool, site: str
    ) -> tuple["DataList", list[LeftOut]]:
        """Return the list without images that lack a file, a mask or a row.

        Parameters
        ----------
        problems : mapping
            Images, or masks without an image, by what is wrong with them.
        drop : bool
            Whether to leave them out; else any is refused.
        site : str
            Named in the message.

        Returns
        -------
        datalist : DataList
        left_out : list of LeftOut

        Raises
        ------
        StoreError
            If there is any problem, and `drop` is false.
        """
        missing = {
            entry.name: file
            for entry in self.entries
            for file in (*entry.files, *([entry.label] if entry.label else []))
            if not (self.root / file).exists()
        }
        found = {"file missing": list(missing.values()), **problems}
        if not drop and any(found.values()):
            listed = [f"{len(v)} {what} ({some_of(v, 3)})" for what, v in found.items() if v]
            raise StoreError(
                f"site {site!r}: {'; '.join(listed)}; complete the folder {self.root} or the "
                "list, or leave them out with --mismatch drop"
            )
        out = {name: LeftOut(name, "file missing", f"no {file}") for name, file in missing.items()}
        for what, names in problems.items():
            out |= {name: LeftOut(name, what, "dropped") for name in names if name not in out}
        kept = tuple(entry for entry in self.entries if entry.name not in out)
        return replace(self, entries=kept), list(out.values())


def absolute(path: Path) -> Path:
    """Return a path from the root of the file system, without following links."""
    return Path(os.path.normpath(path.expanduser().absolute()))


def stem(path: str) -> str:
    """Return a file's name without folders and endings."""
    name = Path(path).name
    return name[: -len(".nii.gz")] if name.lower().endswith(".nii.gz") else Path(name).stem


def _row_of(image: str, values: Mapping[str, str], by_number: Mapping[str, str]) -> str | None:
    short = stem(image)
    for key in (image, Path(image).name, short):
        if key in values:
            return key
    return by_number.get(str(int(short))) if short.isdecimal() else None


# -------------------------------------------------------------------------------- Decathlon list


def read_datalist(file: Path, root: Path | None = None) -> DataList:
    """Read a Decathlon data list.

    Parameters
    ----------
    file : Path
        JSON with ``training``, ``validation`` and ``test``: lists of ``{"image": ...,
        "label": ...}``, and optional ``participant_id``, ``class``, ``fold``. A label that is a
        whole number is a class. ``labels`` and ``modality`` (or nnU-Net's ``channel_names``) name
        label ids and channels.
    root : Path, optional
        What paths are relative to; the list's folder by default.

    Returns
    -------
    DataList

    Raises
    ------
    StoreError
        If it is no such list, a path leads out of the root, an image stands in it twice, or a
        patient is on two sides.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise StoreError(f"data list {file} is not readable JSON ({error})") from None
    sections = [content.get(s) or [] for s in SECTIONS] if isinstance(content, dict) else []
    if not any(sections) or not all(isinstance(section, list) for section in sections):
        raise StoreError(
            f"data list {file} has no list under {', '.join(SECTIONS)}; write it as MONAI's "
            "load_decathlon_datalist reads it"
        )
    base = absolute(root or file.parent)
    names = _label_names(file, content.get("labels"))
    entries: list[Entry] = []
    not_read = 0
    for section, listed in zip(SECTIONS, sections, strict=True):
        for number, raw in enumerate(listed, start=1):
            where = f"data list {file.name}, {section} entry {number}"
            entry = _entry(raw, section, _Paths(base, where, with_root=root is not None), names)
            if section != "training" and entry.label is None and entry.class_name is None:
                not_read += 1
            else:
                entries.append(entry)
    if not entries:
        raise StoreError(f"data list {file} has no image with a label")
    _refuse_twice(file.name, entries)
    channels = content.get("modality") or content.get("channel_names") or {}
    return DataList(
        root=base,
        entries=tuple(entries),
        label_names=names,
        channel_names=tuple(map(str, channels.values())) if isinstance(channels, dict) else (),
        inputs={file.name: file_checksum(file)},
        not_read=not_read,
    )


def _label_names(file: Path, labels: object) -> dict[int, str | None] | None:
    """Read ``{"0": "background", ...}``, or the same the other way round as nnU-Net has it."""
    if not labels:
        return None
    try:
        if not isinstance(labels, dict):
            raise ValueError
        if all(isinstance(value, int) for value in labels.values()):
            labels = {value: key for key, value in labels.items()}
        return {
            int(key): str(name) for key, name in sorted(labels.items(), key=lambda i: int(i[0]))
        }
    except ValueError:
        raise StoreError(
            f"data list {file}: labels is {labels!r:.60}; write {{'0': 'background', '1': ...}}"
        ) from None


@dataclass(frozen=True)
class _Paths:
    """Turns the paths of one entry into paths inside the root."""

    root: Path
    where: str
    with_root: bool

    def inside(self, text: object) -> str:
        if not isinstance(text, str) or not text.strip():
            raise StoreError(f"{self.where}: {text!r} is no path of a file")
        if Path(text).is_absolute() and not self.with_root:
            raise StoreError(
                f"{self.where}: {text} is an absolute path; name the folder that it is in with "
                "--root, or write paths relative to the list's folder"
            )
        place = Path(os.path.normpath(self.root / text))
        if not place.is_relative_to(self.root) or place == self.root:
            raise StoreError(
                f"{self.where}: {text} leads out of {self.root}; name a folder that holds all "
                "images with --root"
            )
        return place.relative_to(self.root).as_posix()


def _entry(
    raw: object, section: str, paths: _Paths, names: Mapping[int, str | None] | None
) -> Entry:
    if isinstance(raw, str):
        raw = {"image": raw}
    if not isinstance(raw, dict) or "image" not in raw:
        raise StoreError(f"{paths.where} has no image: {raw!r:.80}")
    images = raw["image"] if isinstance(raw["image"], list) else [raw["image"]]
    label, class_name = raw.get("label"), raw.get("class")
    if isinstance(label, int) and not isinstance(label, bool):
        class_name = class_name or (names or {}).get(label) or str(label)
        label = None
    fold, who = raw.get("fold"), raw.get("participant_id")
    if fold is not None and (not isinstance(fold, int) or fold < 0):
        raise StoreError(f"{paths.where}: fold is {fold!r}; write a whole number from 0")
    return Entry(
        files=tuple(paths.inside(image) for image in images),
        label=None if label is None else paths.inside(label),
        class_name=None if class_name is None else str(class_name),
        participant_id=None if who is None else str(who),
        section=section,
        fold=fold,
    )


def _refuse_twice(what: str, entries: Sequence[Entry]) -> None:
    images = Counter(file for entry in entries for file in entry.files)
    twice = [file for file, count in images.items() if count > 1]
    if twice:
        raise StoreError(
            f"{what} names the image {some_of(twice, 3)} more than once; keep one entry of each"
        )
    both = [entry.label for entry in entries if entry.label in images]
    if both:
        raise StoreError(f"{what} names {both[0]} as an image and as a label; correct the list")


def refuse_gaps(entries: Sequence[Entry]) -> None:
    """Refuse folds or patients that are given for some images only."""
    for field in ("participant_id", "fold"):
        part = [e for e in entries if field != "fold" or e.section == "training"]
        without = [e.name for e in part if getattr(e, field) is None]
        if without and len(without) < len(part):
            raise StoreError(
                f"{len(without)} of {len(part)} images have no {field} ({some_of(without, 3)}); "
                "give it for all of them or for none"
            )


def refuse_two_sides(entries: Sequence[Entry]) -> None:
    """Refuse a patient who is in two sections or folds."""
    for field in ("section", "fold"):
        sides: dict[str, set[Any]] = {}
        for entry in entries:
            sides.setdefault(str(entry.participant_id), set()).add(getattr(entry, field))
        both = {who: found for who, found in sides.items() if len(found) > 1}
        if both:
            who, found = next(iter(both.items()))
            raise StoreError(
                f"patient {who!r} is in the {field}s {', '.join(map(str, sorted(found)))} of the "
                f"data list ({len(both)} such patient(s)); a patient is on one side only"
            )


# ------------------------------------------------------------------------------ patterns of names


def find_images(images: str, labels: str | None) -> tuple[DataList, list[str], list[str]]:
    """Find images, and the mask of each, by patterns.

    Parameters
    ----------
    images, labels : str
        Patterns; an image and a mask belong together where the ``*`` stand for the same text.

    Returns
    -------
    datalist : DataList
    without_mask : list of str
        Images without a mask; they are in the list.
    without_image : list of str
        Masks without an image; they are not.

    Raises
    ------
    StoreError
        If a pattern finds nothing, or two images have one mask.
    """
    found = _matches(images, "--images")
    masks = _matches(labels, "--labels") if labels else {}
    root = Path(os.path.commonpath([f.parent for f in (*found.values(), *masks.values())]))

    def relative(file: Path) -> str:
        return file.relative_to(root).as_posix()

    if masks and not set(found) & set(masks):
        raise StoreError(
            f"no mask belongs to an image: in {images} the * stand for {_shown(found)}, in "
            f"{labels} for {_shown(masks)}; write patterns whose * stand for the same text"
        )
    entries = tuple(
        Entry((relative(file),), relative(masks[key]) if key in masks else None)
        for key, file in found.items()
    )
    datalist = DataList(root, entries, None, (), {})
    without_mask = [relative(found[key]) for key in found if masks and key not in masks]
    return datalist, without_mask, [relative(masks[key]) for key in masks if key not in found]


def _matches(pattern: str, option: str) -> dict[tuple[str, ...], Path]:
    """Return the files of a pattern by the text that its wildcards stand for."""
    # A folder that is there is meant by its name, whatever brackets are in it.
    parts = absolute(Path(pattern)).parts
    plain = [Path(*parts[: i + 1]).is_dir() for i in range(len(parts))]
    pieces = [escape(p) if there else p for p, there in zip(parts[1:], plain[1:], strict=True)]
    expression = re.compile(_expression("/".join(pieces)))
    found: dict[tuple[str, ...], Path] = {}
    for file in sorted(Path(parts[0]).glob("/".join(pieces))):
        match = expression.fullmatch(file.relative_to(parts[0]).as_posix())
        if file.name.startswith(".") or match is None:  # such as macOS's ._ files
            continue
        key = match.groups()
        if key in found:
            raise StoreError(f"{option} {pattern}: {found[key]} and {file} cannot be told apart")
        found[key] = Path(file)
    if not found:
        raise StoreError(
            f"{option} {pattern} finds no file; keep the quotation marks around the pattern"
        )
    return found


def _expression(pattern: str) -> str:
    """Translate a pattern into a regular expression with a group for each wildcard."""
    kinds = {"**/": "((?:.*/)?)", "*": "([^/]*)", "?": "([^/])"}
    parts = []
    for part in re.split(r"(\*\*/|\*|\?|\[[^]]+\])", pattern):
        if part in ("[[]", "[?]", "[*]"):  # escaped
            parts.append(re.escape(part[1]))
        elif part.startswith("["):
            parts.append(f"({part.replace('[!', '[^', 1)})")
        else:
            parts.append(kinds.get(part) or re.escape(part))
    return "".join(parts)


def _shown(found: Mapping[tuple[str, ...], Path]) -> str:
    return some_of([" and ".join(key) for key in found], 2)


# ----------------------------------------------------------------------------------------- tables


def read_table_column(file: Path, column: str, rows: str | None = None) -> dict[str, str]:
    """Read what a table says about each image.

    Parameters
    ----------
    file : Path
        Text with tab, comma or semicolon between columns, with a header; one column is ``image``.
    column : str
        Wanted; upper and lower case are the same.
    rows : str, optional
        ``COLUMN=VALUE``: only these rows, such as one hospital's of a common table.

    Returns
    -------
    dict
        From the image column to the wanted one; empty values are left out.

    Raises
    ------
    SourceError, StoreError
        If it cannot be read, a column is missing, or an image stands in it twice.
    """
    table = read_table(file, "table")
    table = replace(table, columns=tuple(name.lower() for name in table.columns))
    only, _, value = (rows or "").partition("=")
    images, values = table.column("image"), table.column(column.lower())
    wanted = table.column(only.strip().lower()) if rows else None
    found: dict[str, str] = {}
    for number, fields in table.rows:
        if wanted is not None and fields[wanted] != value.strip():
            continue
        image = fields[images]
        if image in found:
            raise StoreError(
                f"{table.title}, line {number}: image {image!r} stands in it twice; with "
                "--rows COLUMN=VALUE the rows of one hospital alone are read"
            )
        if image and fields[values]:
            found[image] = fields[values]
    if not found:
        raise StoreError(f"table {file.name} has no row to use{f' with {rows}' if rows else ''}")
    return found
