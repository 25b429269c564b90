"""The FedBN paper's image sets by domain: digits, office objects and DomainNet.

Each reader returns one :class:`Domain` a site, whose images are read when they are asked for. What
is read is what people have on their disks:

- digits: one ``.npz`` a domain (``mnist.npz``, ``svhn.npz``, ``usps.npz``, ``mnist_m.npz`` and
  ``synth_digits.npz``, or ``synth_standin.npz``), with images ``x...`` (uint8, grey or RGB) and
  classes ``y...`` of the same ending (``x_train`` and ``y_train``, as Keras has them); all endings
  make one pool. ``house...`` numbers rows that belong together.
- office: a folder or a zip file for each domain, with a folder of pictures for each class.
- DomainNet: its folders of pictures and its lists ``<domain>_train.txt`` and ``<domain>_test.txt``,
  lines of ``<domain>/<class>/<file> <number>``.

A picture that stands twice in a domain, bit for bit, is taken once: a copy in the test part of what
was trained on would be scored as if it were new.
"""

import hashlib
import io
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.errors import SourceError

__all__ = [
    "DIGIT_STANDIN",
    "DOMAINNET_CLASSES",
    "OFFICE_CLASSES",
    "Domain",
    "read_digits",
    "read_domainnet",
    "read_office",
]

DIGIT_STANDIN = "SynthStandIn"
"""Site name of digits that stand in for SynthDigits and are not it."""

# In the paper's order of clients; of the two forms of the fourth the first that is there.
DIGIT_FILES: Mapping[str, str] = {
    "MNIST": "mnist.npz",
    "SVHN": "svhn.npz",
    "USPS": "usps.npz",
    "SynthDigits": "synth_digits.npz",
    DIGIT_STANDIN: "synth_standin.npz",
    "MNIST-M": "mnist_m.npz",
}
DIGIT_CLASSES = tuple("0123456789")
OFFICE_CLASSES = (
    "back_pack",
    "bike",
    "calculator",
    "headphones",
    "keyboard",
    "laptop_computer",
    "monitor",
    "mouse",
    "mug",
    "projector",
)
# As collections name their folders, without underscores.
OFFICE_DOMAINS: Mapping[str, tuple[str, ...]] = {
    "amazon": ("amazon",),
    "caltech": ("caltech", "caltech10", "caltech_10"),
    "dslr": ("dslr",),
    "webcam": ("webcam",),
}
DOMAINNET_CLASSES = (
    "bird",
    "feather",
    "headphones",
    "ice_cream",
    "teapot",
    "tiger",
    "whale",
    "windmill",
    "wine_glass",
    "zebra",
)
DOMAINNET_DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
PICTURES = (".jpg", ".jpeg", ".png", ".bmp")

Reader = Callable[[int, int], np.ndarray]
"""From a row and a size to an image, uint8, (size, size, 3)."""


@dataclass(frozen=True)
class Domain:
    """One domain's images, which become one site or several.

    Attributes
    ----------
    site : str
        Name of the site.
    labels : np.ndarray of int, shape (n,)
        Class of each image, an index into `classes`.
    classes : tuple of str
    groups : np.ndarray of int, shape (n,), or None
        Images with the same number show the same scene.
    n_train : int or None
        Where the split is given: so many first rows are for training.
    copies : tuple of (str, str)
        Images that were left out because they are exact copies, and of which.
    digest : str
        Of all images and classes: another where any of them is.
    read : callable
        From a row and a size to an image, uint8, shape (size, size, 3).
    """

    site: str
    labels: np.ndarray
    classes: tuple[str, ...]
    groups: np.ndarray | None
    n_train: int | None
    copies: tuple[tuple[str, str], ...]
    digest: str
    read: Reader

    def images(self, rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
        """Yield the images of these rows, uint8, shape (size, size, 3)."""
        for row in rows.tolist():
            yield self.read(row, size)


def _resized(picture: Any, size: int) -> np.ndarray:
    """Return a Pillow picture as RGB, uint8, shape (size, size, 3)."""
    from PIL import Image

    return np.asarray(picture.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))


class _Distinct(NamedTuple):
    """Which rows hold an image that does not stand in a row before."""

    rows: np.ndarray
    copies: tuple[tuple[str, str], ...]
    digest: str


def _distinct(names: Sequence[str], contents: Iterable[bytes], labels: np.ndarray) -> _Distinct:
    seen: dict[bytes, int] = {}
    copies = []
    whole = hashlib.sha256(labels.tobytes())
    for row, content in enumerate(contents):
        digest = hashlib.sha256(content).digest()
        whole.update(digest)
        if digest in seen:
            copies.append((names[row], names[seen[digest]]))
        else:
            seen[digest] = row
    rows = np.array(list(seen.values()), dtype=np.int64)
    return _Distinct(rows, tuple(copies), whole.hexdigest())


# ----------------------------------------------------------------------------------------- digits


def read_digits(folder: Path) -> list[Domain]:
    """Read the digit domains of a folder.

    Parameters
    ----------
    folder : Path
        With one ``.npz`` a domain.

    Returns
    -------
    list of Domain
        In the paper's order.

    Raises
    ------
    SourceError
        If a domain is missing, or its arrays do not belong together.
    """
    there = {site: folder / name for site, name in DIGIT_FILES.items()}
    if there["SynthDigits"].is_file():
        del there[DIGIT_STANDIN]
    else:
        del there["SynthDigits"]
    missing = [file.name for file in there.values() if not file.is_file()]
    if missing:
        raise SourceError(
            f"{folder} has no {', '.join(missing)}; write one .npz a domain, with images x and "
            "classes y (synth_standin.npz where SynthDigits cannot be had)"
        )
    return [_digit_domain(site, file) for site, file in there.items()]


def _digit_domain(site: str, file: Path) -> Domain:
    images: list[np.ndarray] = []
    labels, groups, n_before = [], [], 0
    has_groups = False
    with np.load(file, allow_pickle=False) as archive:
        for name in sorted((n for n in archive.files if n.startswith("x")), key=_train_first):
            x, y = archive[name], archive.get("y" + name[1:])
            _check_digits(file, name, x, y)
            house = archive.get("house" + name[1:])
            has_groups |= house is not None
            # Rows without a number are groups of their own.
            alone = -1 - n_before - np.arange(len(x))
            groups.append(alone if house is None else house.astype(np.int64))
            images.extend(x)
            labels.append(y.astype(np.int64))
            n_before += len(x)
    if not images:
        raise SourceError(f"{file} has no images x")
    classes = np.concatenate(labels)
    names = [f"row {row} of {file.name}" for row in range(len(images))]
    kept, copies, digest = _distinct(names, (image.tobytes() for image in images), classes)

    def read(row: int, size: int) -> np.ndarray:
        from PIL import Image

        return _resized(Image.fromarray(images[kept[row]]), size)

    return Domain(
        site=site,
        labels=classes[kept],
        classes=DIGIT_CLASSES,
        groups=np.concatenate(groups)[kept] if has_groups else None,
        n_train=None,
        copies=copies,
        digest=digest,
        read=read,
    )


def _train_first(name: str) -> tuple[bool, str]:
    return not name.endswith("train"), name


def _check_digits(file: Path, name: str, x: np.ndarray, y: np.ndarray | None) -> None:
    if y is None:
        raise SourceError(f"{file} has images {name} but no classes y{name[1:]}")
    if x.dtype != np.uint8 or x.shape[3:] not in ((), (3,)) or x.ndim < 3:
        raise SourceError(
            f"{file}: {name} is {x.dtype} {x.shape}; images are uint8, (n, height, width) or "
            "(n, height, width, 3)"
        )
    if y.shape != (len(x),) or not ((y >= 0) & (y <= 9)).all():
        raise SourceError(f"{file}: y{name[1:]} holds no digit 0 to 9 for each of {len(x)} images")


# ------------------------------------------------------------------------------- office, DomainNet


def read_office(folder: Path) -> list[Domain]:
    """Read Office-Caltech10, from a folder or a zip file for each domain.

    Parameters
    ----------
    folder : Path
        With ``amazon``, ``caltech`` (or ``caltech10``), ``dslr`` and ``webcam``: folders, or zip
        files whose name ends so. Classes may be named without underscores, or ``laptop``.

    Returns
    -------
    list of Domain

    Raises
    ------
    SourceError
        If a domain or a class is missing.
    """
    return [_office_domain(folder, site, names) for site, names in OFFICE_DOMAINS.items()]


def _office_domain(folder: Path, site: str, names: tuple[str, ...]) -> Domain:
    root = _domain_root(folder, site, names)
    known = {_plain(name): i for i, name in enumerate(OFFICE_CLASSES)}
    known["laptop"] = known["laptopcomputer"]
    pictures: list[tuple[str, int]] = []
    found = set()
    for place in sorted(root.iterdir(), key=lambda p: p.name):
        label = known.get(_plain(place.name))
        if label is not None and place.is_dir():
            found.add(label)
            files = sorted(f.name for f in place.iterdir() if f.name.lower().endswith(PICTURES))
            pictures += [(f"{place.name}/{name}", label) for name in files]
    missing = [name for i, name in enumerate(OFFICE_CLASSES) if i not in found]
    if missing:
        raise SourceError(f"{root} has no folder for {', '.join(missing)}")

    return _picture_domain(site, OFFICE_CLASSES, root, pictures, None)


def _picture_domain(
    site: str,
    classes: tuple[str, ...],
    root: Any,
    pictures: list[tuple[str, int]],
    n_train: int | None,
) -> Domain:
    labels = np.array([label for _, label in pictures], dtype=np.int64)
    contents = (root.joinpath(path).read_bytes() for path, _ in pictures)
    kept, copies, digest = _distinct([path for path, _ in pictures], contents, labels)

    def read(row: int, size: int) -> np.ndarray:
        return _read_picture(root.joinpath(pictures[kept[row]][0]), size)

    return Domain(
        site=site,
        labels=labels[kept],
        classes=classes,
        groups=None,
        n_train=None if n_train is None else int((kept < n_train).sum()),
        copies=copies,
        digest=digest,
        read=read,
    )


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _domain_root(folder: Path, site: str, names: tuple[str, ...]) -> Any:
    """Return the folder of a domain's classes, a path on the disk or inside a zip file."""
    for name in names:
        if (folder / name).is_dir():
            return folder / name
        for archive in sorted(folder.glob(f"*{name}.zip")):
            inside = zipfile.Path(archive)
            return next((inside / n for n in names if (inside / n).is_dir()), inside)
    raise SourceError(f"{folder} has no folder and no zip file of the domain {site!r}")


def _read_picture(place: Path | zipfile.Path, size: int) -> np.ndarray:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(place.read_bytes())) as picture:
            return _resized(picture, size)
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise SourceError(f"{place} cannot be read as a picture ({error})") from None


def read_domainnet(folder: Path) -> list[Domain]:
    """Read the ten classes of DomainNet that the paper takes, with the given split.

    Parameters
    ----------
    folder : Path
        With ``clipart_train.txt``, ``clipart_test.txt``, ``clipart/`` and so on.

    Returns
    -------
    list of Domain
        Rows of the training list come first; `n_train` of them.

    Raises
    ------
    SourceError
        If a list is missing or holds anything else, a class is missing, or a picture is not there.
    """
    return [_domainnet_domain(folder, site) for site in DOMAINNET_DOMAINS]


def _domainnet_domain(folder: Path, site: str) -> Domain:
    train, test = (_domainnet_list(folder / f"{site}_{part}.txt") for part in ("train", "test"))
    pictures = train + test
    both = {path for path, _ in train} & {path for path, _ in test}
    if both:
        raise SourceError(f"{site}: {min(both)} is in the training and in the test list")
    absent = [path for path, _ in pictures if not (folder / path).is_file()]
    if absent:
        raise SourceError(f"{folder} lacks {absent[0]} of its lists ({len(absent)} such pictures)")
    missing = set(range(len(DOMAINNET_CLASSES))) - {label for _, label in train}
    if missing:
        raise SourceError(
            f"{site}_train.txt names no picture of {DOMAINNET_CLASSES[min(missing)]!r}"
        )
    return _picture_domain(site, DOMAINNET_CLASSES, folder, pictures, len(train))


def _domainnet_list(file: Path) -> list[tuple[str, int]]:
    """Return path and class of each picture of the ten classes; a class is its folder's name."""
    if not file.is_file():
        raise SourceError(f"{file} is missing; DomainNet has a training and a test list a domain")
    known = {name: i for i, name in enumerate(DOMAINNET_CLASSES)}
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        path, _, label = line.strip().rpartition(" ")
        parts = path.split("/")
        if len(parts) < 3 or not label.isdecimal() or ".." in parts:
            raise SourceError(
                f"{file.name}, line {number}: {line!r:.80} is not <domain>/<class>/<file> <number>"
            )
        if parts[-2] in known:
            found.append((path, known[parts[-2]]))
    return found
