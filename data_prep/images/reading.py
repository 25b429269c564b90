"""Read an image or a mask as MONAI's ``LoadImage`` does, without the seconds MONAI takes to import.

Axes come in MONAI's order: channels first, then x, y (and z); a picture of W x H pixels is
(channels, W, H). Tests compare values, axes and affines with MONAI's own readers.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "AFFINE_TOLERANCE",
    "CHANNEL_AXES",
    "Image",
    "ImageError",
    "file_format",
    "read_image",
    "read_mask",
]

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
CHANNEL_AXES = ("none", "first", "last")
LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])
# A grid may be this far from another, in voxels, at the corner where it is farthest.
AFFINE_TOLERANCE = 0.1
# Slices of a series may be this far from even steps, as a share of the step.
UNEVEN = 0.01


class ImageError(ValueError):
    """A file cannot be used as an image or mask; the message goes on from the file's name."""


@dataclass(frozen=True)
class Image:
    """An image in memory.

    Attributes
    ----------
    array : np.ndarray, shape (channels, x, y) or (channels, x, y, z)
        Values as the file means them: after a header's slope and intercept.
    affine : np.ndarray or None, float64, shape (4, 4)
        From voxel indices to mm, RAS; None where the format has none.
    stored_as : str
        NumPy name of the type in the file.
    """

    array: np.ndarray
    affine: np.ndarray | None
    stored_as: str

    def apart(self, other: "Image") -> float:
        """Return how far the farthest corner of an equally large grid lies from this one's.

        In voxels of the smallest side; 0 where one of them has no affine.
        """
        if self.affine is None or other.affine is None:
            return 0.0
        ends = [(0, n - 1) for n in (*self.array.shape[1:], 1)[:3]]
        corners = np.array([(*corner, 1.0) for corner in product(*ends)])
        away = np.linalg.norm(corners @ (self.affine - other.affine).T, axis=1).max()
        return float(away / min(self.spacing or (1.0,)))

    @property
    def spacing(self) -> tuple[float, ...] | None:
        """Distance between voxels in mm along each axis; None where unknown."""
        if self.affine is None:
            return None
        sizes = np.sqrt((self.affine[:3, :3] ** 2).sum(axis=0))
        return tuple(round(float(size), 6) for size in sizes[: self.array.ndim - 1])


def file_format(path: Path) -> str:
    """Return ``nifti``, ``picture``, ``numpy`` or ``dicom``, by a file's name.

    Raises
    ------
    ImageError
        For any other name.
    """
    name = path.name.lower()
    if name.endswith((".nii", ".nii.gz")):
        return "nifti"
    if name.endswith(PICTURES):
        return "picture"
    if name.endswith((".npy", ".npz")):
        return "numpy"
    if name.endswith((".dcm", ".ima")) or path.is_dir():
        return "dicom"
    raise ImageError("is no NIfTI, PNG, JPEG, BMP, TIFF, NumPy or DICOM file by its name")


def read_image(
    paths: Path | Sequence[Path], *, channel_axis: str = "none", row: int | None = None
) -> Image:
    """Read an image of one file, of one file a channel, or of a row of a stack.

    Parameters
    ----------
    paths : path or sequence of path
        A folder is a DICOM series.
    channel_axis : str
        Of a NumPy array: ``none``, ``first`` or ``last``.
    row : int, optional
        Of a stack: a NumPy array whose first axis counts images. The others are not read.

    Returns
    -------
    Image

    Raises
    ------
    ImageError
        If a file is damaged, holds no image, or files do not make one image together.
    """
    files = [paths] if isinstance(paths, Path) else list(paths)
    parts = [_read(file, channel_axis, mask=False, row=row) for file in files]
    if len(parts) == 1:
        return parts[0]
    shapes = {part.array.shape for part in parts}
    if len(shapes) > 1 or next(iter(shapes))[0] != 1:
        raise ImageError(f"is made of files of the shapes {sorted(shapes)}; one channel each")
    if any(parts[0].apart(part) > AFFINE_TOLERANCE for part in parts):
        raise ImageError("is made of files that lie at different places, by their affines")
    array = np.concatenate([part.array for part in parts])
    return Image(array, parts[0].affine, parts[0].stored_as)


def read_mask(
    path: Path, label_map: Mapping[int, int] | None = None, *, channel_axis: str = "none"
) -> Image:
    """Read a mask of label ids.

    Parameters
    ----------
    path : Path
        One file.
    label_map : mapping, optional
        What an id in the file stands for, where it is not itself.
    channel_axis : str
        As for `read_image`.

    Returns
    -------
    Image
        Of one channel, of whole numbers from 0 on.

    Raises
    ------
    ImageError
        If it is damaged, or holds anything but label ids.
    """
    if path.suffix.lower() in (".jpg", ".jpeg"):
        raise ImageError("is a JPEG, whose compression changes label ids; save masks as PNG")
    mask = _read(path, channel_axis, mask=True)
    array = mask.array
    if len(array) != 1:
        raise ImageError(f"has {len(array)} channels; a mask has one, of label ids")
    if array.dtype.kind == "f":
        if not np.isfinite(array).all() or (array != np.rint(array)).any():
            raise ImageError("has values that are no whole numbers, so no label ids")
        array = array.astype(np.int64)
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < 1 << 16:
        raise ImageError(f"has values from {array.min()} to {array.max()}, which are no label ids")
    array = array.astype(np.uint16)
    if label_map:
        mapped = array.copy()
        for old, new in label_map.items():
            mapped[array == old] = new
        array = mapped
    return Image(array, mask.affine, mask.stored_as)


def _read(path: Path, channel_axis: str, *, mask: bool, row: int | None = None) -> Image:
    readers: dict[str, Callable[[], Image]] = {
        "nifti": lambda: _read_nifti(path),
        "picture": lambda: _read_picture(path, mask=mask),
        "numpy": lambda: _read_numpy(path, channel_axis, row),
        "dicom": lambda: _read_dicom(path),
    }
    reader = readers[file_format(path)]
    try:
        image = reader()
    except (ImageError, MemoryError):
        raise
    except Exception as error:  # decoders raise many kinds for damaged files
        words = " ".join(str(error).split()) or type(error).__name__
        raise ImageError(f"cannot be read, it is damaged or cut off ({words[:160]})") from None
    array = image.array
    if array.dtype.kind not in "buif":
        raise ImageError(f"holds {array.dtype}, which is no image")
    if array.size == 0 or array.ndim not in (3, 4):
        raise ImageError(f"has {array.ndim - 1} axes of the lengths {array.shape[1:]}; 2 or 3")
    return image


def _type(dtype: np.dtype) -> str:
    """Name a type of values, whatever the order of its bytes."""
    return str(dtype.newbyteorder("="))


def _read_nifti(path: Path) -> Image:
    import nibabel

    file = nibabel.load(path)
    affine = np.asarray(file.affine, dtype=np.float64)
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine)) < 1e-12:
        raise ImageError("has an affine that places no voxel; correct its header")
    array = np.asanyarray(file.dataobj)
    if array.ndim == 4:
        array = np.moveaxis(array, 3, 0)
    elif array.ndim in (2, 3):
        array = array[np.newaxis]
    else:
        raise ImageError(f"has {array.ndim} axes; an image has 2, 3, or 4 with the channels last")
    if array.dtype == np.float64:
        array = array.astype(np.float32)  # as MONAI does
    return Image(array, affine, _type(file.get_data_dtype()))


def _read_picture(path: Path, *, mask: bool) -> Image:
    from PIL import Image as Pillow

    with warnings.catch_warnings(), Pillow.open(path) as picture:
        warnings.simplefilter("ignore")
        if (pages := getattr(picture, "n_frames", 1)) > 1:
            raise ImageError(f"has {pages} pages; save each as a file, or use NIfTI")
        if picture.mode == "P" and not mask:
            raise ImageError("has a palette, whose numbers are no intensities; save it as RGB")
        array = np.asarray(picture)
    array = np.moveaxis(array, 0, 1)
    array = array[np.newaxis] if array.ndim == 2 else np.moveaxis(array, -1, 0)
    return Image(array, None, _type(array.dtype))


def _read_numpy(path: Path, channel_axis: str, row: int | None) -> Image:
    array: Any = np.load(path, mmap_mode=None if row is None else "r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        with array as archive:
            if len(archive.files) != 1:
                raise ImageError(f"holds {len(archive.files)} arrays; save one a file")
            array = archive[archive.files[0]]
    if row is not None:
        if not 0 <= row < len(array):
            raise ImageError(f"has {len(array)} images, and none in row {row}")
        array = np.array(array[row])
    if channel_axis == "none":
        array = array[np.newaxis]
    elif channel_axis == "last":
        array = np.moveaxis(array, -1, 0)
    return Image(array, None, _type(array.dtype))


def _read_dicom(path: Path) -> Image:
    try:
        import pydicom
    except ModuleNotFoundError:
        raise ImageError(
            "is DICOM, which needs pydicom: install it with `pip install 'fedbn[dicom]'`"
        ) from None
    files = [path] if not path.is_dir() else sorted(f for f in path.iterdir() if f.is_file())
    slices = []
    for file in files:
        try:
            slices.append(pydicom.dcmread(file))
        except pydicom.errors.InvalidDicomError:
            if not path.is_dir():
                raise
    if not slices:
        raise ImageError("is a folder without a DICOM file")
    series = {str(s.get("SeriesInstanceUID", "")) for s in slices}
    if len(series) > 1:
        raise ImageError(f"holds {len(series)} DICOM series; put each into a folder of its own")
    if any(int(s.get("NumberOfFrames", 1)) > 1 for s in slices):
        raise ImageError("is a DICOM file of many frames; convert it to NIfTI")
    # By InstanceNumber, as MONAI stacks them, so that a mask made of its array still fits.
    slices.sort(key=lambda s: int(s.get("InstanceNumber") or 0))
    if len({(s.Rows, s.Columns, *map(float, s.PixelSpacing)) for s in slices}) > 1:
        raise ImageError("is a DICOM series whose slices differ in size or spacing")
    pixels = []
    for s in slices:
        slope, intercept = s.get("RescaleSlope"), s.get("RescaleIntercept")
        values = s.pixel_array.swapaxes(0, 1)
        if slope is not None or intercept is not None:
            values = values.astype(np.float32) * float(slope or 1) + float(intercept or 0)
        pixels.append(values)
    if pixels[0].ndim != 2:
        raise ImageError("is a DICOM series of colour pictures; save them as PNG or TIFF")
    array = np.stack(pixels, axis=-1) if len(pixels) > 1 else pixels[0]
    return Image(array[np.newaxis], _dicom_affine(slices), _type(slices[0].pixel_array.dtype))


def _dicom_affine(slices: Sequence[Any]) -> np.ndarray:
    """Return the affine of a series, after C.7.6.2.1.1 of DICOM PS3.3; x runs along a row."""
    first = slices[0]
    row, column = np.reshape([float(x) for x in first.ImageOrientationPatient], (2, 3))
    step = np.cross(row, column)
    if len(slices) > 1:
        positions = np.array([[float(x) for x in s.ImagePositionPatient] for s in slices])
        steps = np.diff(positions, axis=0)
        step = steps.mean(axis=0)
        if np.linalg.norm(steps - step, axis=1).max() > UNEVEN * np.linalg.norm(step):
            raise ImageError(
                "is a DICOM series whose slices are not in even steps: one is missing, stands "
                "twice, or the numbering is another"
            )
    between_rows, between_columns = (float(x) for x in first.PixelSpacing)
    affine = np.eye(4)
    affine[:3, :3] = np.stack([row * between_columns, column * between_rows, step], axis=1)
    affine[:3, 3] = [float(x) for x in first.ImagePositionPatient]
    return LPS_TO_RAS @ affine
