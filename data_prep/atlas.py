"""An atlas at the hospital: a NIfTI label map and the table that names its regions.

The table decides which ROIs there are and in which order, so that every subject of every site has
the same columns. Image and table are compared before any scan is read: a table that counts from 0
beside an image that counts from 1 would otherwise give every region its neighbour's name.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import SourceError, some_of
from data_prep.tables import delimiter_of, split_line, text_lines

__all__ = ["UNLISTED_RULES", "Atlas", "load_nifti", "read_atlas", "read_label_table", "read_rois"]

UNLISTED_RULES = ("error", "drop")

# Columns of a table with a header, the more telling ones first; compared in lower case.
ID_COLUMNS = ("index", "id", "roi_id", "label_id", "value", "number", "no", "roi", "label")
NAME_COLUMNS = ("name", "roi_name", "label_name", "region", "structure", "description", "label")
BACKGROUND = re.compile(
    r"background|unknown|clear[ _-]?label|none|outside|unlabel+ed|\?+|n/?a", re.IGNORECASE
)
FORMS = (
    "read are csv, tsv and semicolon tables with a header (a column index, id or label and a "
    "column name), and lines of `id name` without one"
)


@dataclass(frozen=True)
class Atlas:
    """A label map and its regions.

    Attributes
    ----------
    name : str
        File name of the image without ``.nii`` or ``.nii.gz``.
    rois : tuple of (str, str)
        Id (a voxel value of the image) and name of each ROI, in the order of the table.
    image : nibabel.nifti1.Nifti1Image, int32, 3D
        Holds 0 and the ids of `rois`, each at least once.
    content : str
        SHA-256 of the labels and their place in space: the same for a file that was compressed
        again.
    image_file, labels_file : (str, str)
        File name and SHA-256.
    label_offset : int
        What was added to each id of the table.
    without_voxel : tuple of (str, str)
        Rows of the table that label no voxel, and therefore are no ROI.
    unlisted : tuple of int
        Voxel values that the table does not name and that were set to background.
    """

    name: str
    rois: tuple[tuple[str, str], ...]
    image: Any = field(repr=False)
    content: str
    image_file: tuple[str, str]
    labels_file: tuple[str, str]
    label_offset: int
    without_voxel: tuple[tuple[str, str], ...]
    unlisted: tuple[int, ...]

    @property
    def title(self) -> str:
        """What two sites must agree on, in one line."""
        return f"{self.name} ({len(self.rois)} ROIs, labels {self.content[:16]})"

    def describe(self) -> dict[str, Any]:
        """Return what the site store states."""
        return {
            "image": {"file": self.image_file[0], "sha256": self.image_file[1]},
            "labels": {"file": self.labels_file[0], "sha256": self.labels_file[1]},
            "label_offset": self.label_offset,
            "content_sha256": self.content,
            "without_voxel": [list(roi) for roi in self.without_voxel],
            "unlisted": list(self.unlisted),
        }


def read_atlas(
    image: Path, labels: Path, *, label_offset: int = 0, unlisted: str = "error"
) -> Atlas:
    """Read a label map and its table, and refuse them if they do not fit together.

    Parameters
    ----------
    image : Path
        NIfTI, 3D, whole numbers: the id of its region at every voxel, 0 for background.
    labels : Path
        As for `read_label_table`.
    label_offset : int
        Added to each id of the table.
    unlisted : str
        One of `UNLISTED_RULES`: what happens to voxel values that the table does not name.
    """
    import nibabel

    rows = [(number + label_offset, name) for number, name in read_label_table(labels)]
    values, affine, image_sha = _read_label_map(image)
    present = set(np.unique(values).tolist()) - {0}
    if not present:
        raise SourceError(f"atlas {image.name} holds no label, only 0")
    rows = _without_background(rows, labels.name, label_offset)
    foreign = sorted(present - {number for number, _ in rows})
    if foreign and unlisted == "error":
        raise SourceError(
            f"atlas {image.name} has {len(foreign)} label(s) that {labels.name} does not name "
            f"({some_of([str(n) for n in foreign])}); complete the table, or leave them out with "
            "--unlisted-labels drop"
        )
    rois = tuple((str(number), name) for number, name in rows if number in present)
    if len(rois) < 2:
        raise SourceError(
            f"{labels.name} names {len(rois)} label(s) of the atlas {image.name}; a connectome "
            "needs 2 ROIs or more"
        )
    if foreign:
        values[np.isin(values, foreign)] = 0
    return Atlas(
        name=image.name.removesuffix(".gz").removesuffix(".nii"),
        rois=rois,
        image=nibabel.Nifti1Image(values, affine),
        content=_digest(values, affine),
        image_file=(image.name, image_sha),
        labels_file=(labels.name, hashlib.sha256(labels.read_bytes()).hexdigest()),
        label_offset=label_offset,
        without_voxel=tuple((str(n), name) for n, name in rows if n not in present),
        unlisted=tuple(foreign),
    )


def _without_background(
    rows: Sequence[tuple[int, str]], file: str, label_offset: int
) -> list[tuple[int, str]]:
    """Leave out id 0 if it is called background; refuse it if it has a region's name."""
    for number, name in rows:
        if number < 0 or (number == 0 and not BACKGROUND.fullmatch(name)):
            raise SourceError(
                f"{file} gives {name!r} the id {number}"
                + (f" with --label-offset {label_offset}" if label_offset else "")
                + ", but a region's id is 1 or more and 0 is the background; if the table counts "
                "from 0 and the image from 1, add --label-offset 1"
            )
    return [row for row in rows if row[0] != 0]


def _digest(values: np.ndarray, affine: np.ndarray) -> str:
    digest = hashlib.sha256()
    digest.update(np.array(values.shape, dtype="<i8").tobytes())
    digest.update(np.round(affine, 4).astype("<f8").tobytes())
    digest.update(np.ascontiguousarray(values, dtype="<i4").tobytes())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------- the image


def load_nifti(file: Path) -> Any:
    """Open a NIfTI file of real numbers with a stated affine; its voxels stay on disk."""
    import nibabel

    if file.is_symlink() and not file.exists():
        raise SourceError(f"{file} is a link to a file that is not here; get that file first")
    if not file.is_file():
        raise SourceError(f"{file} is not a file; name a NIfTI image, .nii or .nii.gz")
    if not file.name.endswith((".nii", ".nii.gz")):
        raise SourceError(f"{file.name} is not named .nii or .nii.gz; convert it to NIfTI")
    try:
        image = nibabel.load(file)
    except Exception as error:  # damaged headers raise whatever their first wrong byte leads to
        raise SourceError(
            f"{file.name} is no readable NIfTI file ({_first_line(error)}); get the file again"
        ) from None
    if not isinstance(image, nibabel.Nifti1Image):  # also the class of NIfTI-2 images
        raise SourceError(f"{file.name} is no NIfTI image; convert it")
    if image.get_data_dtype().kind not in "biuf":
        raise SourceError(
            f"{file.name} has voxels of the type {_kind(image)}, and only real numbers can be "
            "averaged; convert it (the magnitude of complex values, the grey values of a picture)"
        )
    codes = int(image.header["sform_code"]), int(image.header["qform_code"])
    if codes == (0, 0):
        raise SourceError(
            f"{file.name} does not state where its voxels are (sform_code and qform_code are 0), "
            "so no atlas can be laid over it; repair its header"
        )
    affine = image.affine
    sizes = np.asarray(image.header.get_zooms()[:3])
    if (
        not np.isfinite(affine).all()
        or abs(np.linalg.det(affine[:3, :3])) < 1e-9
        or not (sizes > 0).all()
    ):
        raise SourceError(
            f"{file.name} has no usable voxel size or affine (voxel size "
            f"{' x '.join(f'{size:g}' for size in sizes)}); repair its header"
        )
    return image


def _kind(image: Any) -> str:
    names = image.get_data_dtype().names
    return "".join(names) if names else str(image.get_data_dtype())


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _read_label_map(file: Path) -> tuple[np.ndarray, np.ndarray, str]:
    """Return voxel values as int32 (x, y, z), the affine (4, 4), and the file's SHA-256."""
    image = load_nifti(file)
    if len(image.shape) == 4 and image.shape[3] > 1:
        raise SourceError(
            f"atlas {file.name} is 4D {image.shape}: a map a region, or a scan; a label map is 3D"
        )
    if len(image.shape) < 3:
        raise SourceError(f"atlas {file.name} has the shape {image.shape}; a label map is 3D")
    try:
        data = np.asanyarray(image.dataobj)
    except Exception as error:
        raise SourceError(
            f"atlas {file.name} is cut off or damaged ({_first_line(error)}); get the file again"
        ) from None
    data = data.reshape(image.shape[:3])
    if not np.isfinite(data).all():
        raise SourceError(f"atlas {file.name} has voxels that are not finite; it is no label map")
    values = np.rint(data).astype(np.int32)
    if not np.array_equal(values, data):
        wrong = data[values != data].flat[0]
        raise SourceError(
            f"atlas {file.name} has voxels that are no whole number (such as {wrong:g}): a "
            "probability map, or labels resampled without nearest neighbour"
        )
    if values.min() < 0:
        raise SourceError(f"atlas {file.name} has the negative label {values.min()}")
    return values, image.affine, hashlib.sha256(file.read_bytes()).hexdigest()


# ------------------------------------------------------------------------------------- the table


def read_label_table(file: Path) -> list[tuple[int, str]]:
    """Read the ids and names of an atlas's regions.

    Read are

    - tables with a header, separated by tab, comma or semicolon (BIDS ``dseg.tsv``, and the csv
      tables that come with many atlases): one column of ids, the first found of ``index``,
      ``id``, ``roi_id``, ``label_id``, ``value``, ``number``, ``no``, ``roi``, ``label``, and one
      of names, the first found of ``name``, ``roi_name``, ``label_name``, ``region``,
      ``structure``, ``description``, ``label``; other columns are passed over;
    - lines without a header, separated by the same signs or by blanks: ``id name``, as in AAL3's
      ``.txt`` (a repeated id at the end of a line is passed over) and FreeSurfer's colour tables
      (``id name R G B A``). Lines that start with ``#`` are comments.

    Returns
    -------
    list of (int, str)
        In the order of the file; id 0 and ids without voxels included.
    """
    try:
        everything = text_lines(file, "labels table")
    except SourceError as error:
        raise SourceError(f"{error}; {FORMS}") from None
    lines = [
        (number, line.strip())
        for number, line in enumerate(everything, start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not lines or lines[0][1].startswith(("<", "{", "[")):
        what = "is not a table of text" if lines else "holds comments only"
        raise SourceError(f"labels table {file.name} {what}; {FORMS}")
    delimiter = delimiter_of(lines[0][1])
    where = f"labels table {file.name}, line"
    fields = [(n, split_line(line, delimiter, f"{where} {n}")) for n, line in lines]
    if any(_whole_number(value) is not None for value in fields[0][1]):
        rows = [(n, _headless_row(file.name, n, f, delimiter)) for n, f in fields]
    else:
        rows = _rows_below_header(file.name, fields)
    return _checked_rows(file.name, rows)


def read_rois(file: Path) -> list[tuple[str, str]]:
    """Read the ids and names of regions as `read_label_table` does, without a background."""
    rows = _without_background(read_label_table(file), file.name, 0)
    return [(str(number), name) for number, name in rows]


def _whole_number(text: str) -> int | None:
    match = re.fullmatch(r"([+-]?\d+)(\.0*)?", text.strip())
    return int(match[1]) if match else None


def _rows_below_header(
    file: str, fields: Sequence[tuple[int, list[str]]]
) -> list[tuple[int, tuple[str, str]]]:
    header = [name.lower().strip().replace(" ", "_") for name in fields[0][1]]
    id_column = next((name for name in ID_COLUMNS if name in header), None)
    name_column = next((n for n in NAME_COLUMNS if n in header and n != id_column), None)
    if id_column is None or name_column is None:
        raise SourceError(
            f"labels table {file} has the columns {', '.join(fields[0][1])}, of which none is "
            f"known as the {'id' if id_column is None else 'name'}; {FORMS}"
        )
    at = header.index(id_column), header.index(name_column)
    rows = []
    for number, values in fields[1:]:
        if len(values) != len(header):
            raise SourceError(
                f"labels table {file}, line {number}: {len(values)} field(s), the header has "
                f"{len(header)}"
            )
        rows.append((number, (values[at[0]], values[at[1]])))
    return rows


def _headless_row(
    file: str, number: int, values: list[str], delimiter: str | None
) -> tuple[str, str]:
    """Return id and name of a line such as `1 Precentral_L`."""
    rest = values[1:]
    if delimiter is None or len(rest) > 1:
        if len(rest) == 5 and all(_whole_number(v) is not None for v in rest[1:]):
            rest = rest[:1]  # FreeSurfer: a colour follows
        elif len(rest) > 1 and rest[-1] == values[0]:
            rest = rest[:-1]  # AAL3: the id again
    if _whole_number(values[0]) is None or not rest or (delimiter is not None and len(rest) > 1):
        raise SourceError(
            f"labels table {file}, line {number}: {' '.join(values)!r} is not `id name`; {FORMS}"
        )
    return values[0], " ".join(rest)


def _checked_rows(file: str, rows: Sequence[tuple[int, tuple[str, str]]]) -> list[tuple[int, str]]:
    seen: dict[int, int] = {}
    result = []
    for number, (roi_id, name) in rows:
        value = _whole_number(roi_id)
        if value is None:
            raise SourceError(f"labels table {file}, line {number}: {roi_id!r} is no whole number")
        if value in seen:
            raise SourceError(
                f"labels table {file} has the id {value} twice, in lines {seen[value]} and {number}"
            )
        if not name:
            raise SourceError(f"labels table {file}, line {number}: id {value} has no name")
        seen[value] = number
        result.append((value, name))
    if not result:
        raise SourceError(f"labels table {file} has a header and no row")
    return result
