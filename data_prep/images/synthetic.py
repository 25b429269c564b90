"""Made-up images from four made-up scanners, to try federated training without a patient's data.

Every image shows the same anatomy, in 2D or 3D: tissue, in it an organ, in that a core which is
round or lobed. Sites differ by their scanner alone: which structure is bright (at one, the core is
darker than its organ), noise, a smooth multiplicative bias field, blur, and the size of a voxel.
The class of an image is the form of its core, half and half everywhere, so that no method gains
from knowing a site's prevalence. Everything follows from the seed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.images.datalist import DataList, Entry

__all__ = [
    "CLASSES",
    "GENERATOR_VERSION",
    "LABELS",
    "NOTE",
    "SCANNERS",
    "Cohort",
    "Scanner",
    "write_synthetic_images",
]

NOTE = "Synthetic: made up by a random generator, no patient of this store exists."
# To be raised whenever the same seed gives other images.
GENERATOR_VERSION = 1
LABELS: Mapping[int, str | None] = {0: "background", 1: "organ", 2: "core"}
CLASSES = ("round", "lobed")
# Voxels along an axis, and how brightness 1 is stored.
SIZE, SCALE = {2: 64, 3: 32}, {2: 255, 3: 1000}
# Organ and core are larger in 3D, where a voxel is twice as long.
LARGER = {2: 1.0, 3: 1.35}


@dataclass(frozen=True)
class Scanner:
    """What a site's scanner makes of the same anatomy.

    Attributes
    ----------
    n_patients : int
        Patients of the site; every third has two images.
    levels : tuple of float
        Brightness of air, tissue, organ and core, 0 to 1.
    noise : float
        Standard deviation of what is added to each voxel, in units of brightness.
    bias : float
        Strength of the field: its natural logarithm at an edge of the image.
    blur : float
        Standard deviation of the Gaussian that the image is smoothed with, in voxels.
    voxel : float
        Length of a voxel in mm; anatomy is as large everywhere, so larger voxels show it smaller.
    """

    n_patients: int
    levels: tuple[float, float, float, float]
    noise: float
    bias: float
    blur: float
    voxel: float


SCANNERS: Mapping[str, Scanner] = {
    "NORTH": Scanner(32, (0.05, 0.35, 0.55, 0.80), 0.03, 0.10, 0.6, 1.0),
    "EAST": Scanner(24, (0.10, 0.45, 0.65, 0.35), 0.05, 0.35, 0.9, 1.2),
    "SOUTH": Scanner(28, (0.30, 0.60, 0.40, 0.70), 0.07, 0.20, 0.4, 0.9),
    "WEST": Scanner(20, (0.02, 0.18, 0.28, 0.38), 0.02, 0.45, 1.2, 1.0),
}
WITHOUT_SHIFT = Scanner(0, (0.05, 0.35, 0.55, 0.75), 0.04, 0.20, 0.7, 1.0)


@dataclass(frozen=True)
class Cohort:
    """What is made up.

    Attributes
    ----------
    dim : int
        2 (64 x 64 pixels) or 3 (32 x 32 x 32 voxels).
    seed : int
        Seed of everything; a patient does not depend on how many others there are.
    n_patients : int or None
        Patients at each site; None for each site's own number.
    shift : bool
        Whether the sites' scanners differ; without it all have the same.
    """

    dim: int = 2
    seed: int = 0
    n_patients: int | None = None
    shift: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot be made."""
        if self.dim not in SIZE:
            raise ValueError(f"dim is {self.dim}; allowed are {', '.join(map(str, SIZE))}")


def write_synthetic_images(folder: Path, site: str, cohort: Cohort) -> DataList:
    """Write the images and masks of one made-up site: PNG in 2D, NIfTI in 3D.

    Parameters
    ----------
    folder : Path
        Gets ``image/`` and ``label/``.
    site : str
        One of `SCANNERS`.
    cohort : Cohort
        What is made up.

    Returns
    -------
    DataList
    """
    dim, seed, shift = cohort.dim, cohort.seed, cohort.shift
    number = list(SCANNERS).index(site) + 1
    scanner = SCANNERS[site] if shift else WITHOUT_SHIFT
    field = np.random.default_rng([seed, number if shift else 0, dim]).uniform(-1, 1, (2, dim))
    entries = []
    for index in range(cohort.n_patients or SCANNERS[site].n_patients):
        rng = np.random.default_rng([seed, number, dim, index + 1])
        class_index = index % 2
        for visit in range(2 if index % 3 == 2 else 1):
            mask, bright = _anatomy(rng, dim, scanner, lobed=class_index == 1)
            image = _scanned(rng, bright, scanner, field)
            name = f"sub-{site}{index + 1:03d}_{visit + 1}"
            files = [
                _save(folder / f"{kind}/{name}", array, scanner.voxel)
                for kind, array in (("image", image), ("label", mask))
            ]
            entries.append(
                Entry(
                    files=(f"image/{files[0]}",),
                    label=f"label/{files[1]}",
                    class_name=CLASSES[class_index],
                    participant_id=f"sub-{site}{index + 1:03d}",
                )
            )
    return DataList(folder, tuple(entries), dict(LABELS), ("made up",), {})


def _anatomy(
    rng: np.random.Generator, dim: int, scanner: Scanner, *, lobed: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return a mask, uint8, and the brightness of each voxel, float64; both SIZE ** dim."""
    axis = np.linspace(-1, 1, SIZE[dim]) * scanner.voxel
    grid = np.stack(np.meshgrid(*[axis] * dim, indexing="ij"), axis=-1)
    tissue = _blob(grid, rng.uniform(-0.05, 0.05, dim), rng.uniform(0.75, 0.85, dim))
    place = rng.uniform(-0.2, 0.2, dim)
    organ = _blob(grid, place, LARGER[dim] * rng.uniform(0.42, 0.55, dim), 0.06, rng.uniform(0, 6))
    core = _blob(
        grid,
        place + rng.uniform(-0.08, 0.08, dim),
        LARGER[dim] * rng.uniform(0.22, 0.3) * np.ones(dim),
        0.4 if lobed else 0.0,
        rng.uniform(0, 6),
    )
    mask = np.zeros(grid.shape[:-1], dtype=np.uint8)
    mask[organ & tissue] = 1
    mask[core & organ & tissue] = 2
    air, flesh, *inner = scanner.levels
    bright = np.where(tissue, flesh, air)
    for label, level in enumerate(inner, start=1):
        bright = np.where(mask == label, level, bright)
    return mask, bright


def _blob(
    grid: np.ndarray, place: np.ndarray, radii: np.ndarray, lobes: float = 0.0, phase: float = 0.0
) -> np.ndarray:
    """Return where an ellipsoid is, whose edge swings five times around its last axis."""
    away = (grid - place) / radii
    around = np.arctan2(away[..., 1], away[..., 0])
    flat = (away[..., :2] ** 2).sum(-1) / np.maximum((away**2).sum(-1), 1e-12)
    edge = 1 + lobes * np.cos(5 * around + phase) * flat
    return np.sqrt((away**2).sum(-1)) < edge


def _scanned(
    rng: np.random.Generator, bright: np.ndarray, scanner: Scanner, field: np.ndarray
) -> np.ndarray:
    """Return what the scanner makes of an anatomy, as it is stored."""
    from scipy.ndimage import gaussian_filter

    dim = bright.ndim
    axis = np.linspace(-1, 1, SIZE[dim])
    grid = np.stack(np.meshgrid(*[axis] * dim, indexing="ij"), axis=-1)
    texture = gaussian_filter(rng.standard_normal(bright.shape), 1.5)
    image = gaussian_filter(bright * (1 + 0.2 * texture), scanner.blur)
    image *= np.exp(scanner.bias * (grid @ field[0] + grid**2 @ field[1]) / dim)
    image += scanner.noise * rng.standard_normal(image.shape)
    return np.clip(np.rint(image * SCALE[dim]), 0, 255 if dim == 2 else 32767)


def _save(stem: Path, array: np.ndarray, voxel: float) -> str:
    """Write an array of whole numbers; return the file's name."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    if array.ndim == 2:
        from PIL import Image

        file = stem.parent / f"{stem.name}.png"
        Image.fromarray(array.astype(np.uint8).T).save(file)
    else:
        import nibabel

        file = stem.parent / f"{stem.name}.nii.gz"
        kind = np.uint8 if array.dtype == np.uint8 else np.int16
        nibabel.save(nibabel.Nifti1Image(array.astype(kind), np.diag([voxel] * 3 + [1.0])), file)
    return file.name
