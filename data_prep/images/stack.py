"""An image store whose images stand in one array: for thousands of small pictures."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from data_prep.errors import StoreError
from data_prep.files import file_checksum, recover_folder
from data_prep.images.intensity import Histogram
from data_prep.images.preparation import describe_intensity
from data_prep.images.store import (
    FORMAT_VERSION,
    ImageStore,
    StoredImage,
    read_image_store,
    write_image_store,
)

__all__ = ["Picture", "unchanged_stack", "write_stack"]

STACK = "stack.npy"


class Picture(NamedTuple):
    """What is known of one picture of a stack; fields as in `store.StoredImage`."""

    class_name: str
    participant_id: str
    section: str


def made_from(*content: Any) -> str:
    """Return a digest of what decides a store, fit for JSON."""
    parts = [version("fedbn"), FORMAT_VERSION, *content]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def unchanged_stack(folder: Path, digest: str) -> ImageStore | None:
    """Return the store that is there, if it is whole and was made from the same content."""
    recover_folder(folder)
    try:
        store = read_image_store(folder, verify=True)
    except StoreError:
        return None
    return store if store.description.get("made_from") == digest else None


def write_stack(
    folder: Path,
    *,
    site: str,
    images: Iterable[np.ndarray],
    pictures: Sequence[Picture],
    classes: Sequence[str],
    source: Mapping[str, Any],
    digest: str,
    left_out: Sequence[Mapping[str, str]] = (),
    notes: Sequence[str] = (),
) -> ImageStore:
    """Write pictures of one size as the store of a site.

    Parameters
    ----------
    folder : Path
        Of the store; an old store there is replaced.
    site : str
        Its name.
    images : iterable of np.ndarray, uint8, shape (height, width, 3)
        RGB; read one by one.
    pictures : sequence of Picture
        One an image.
    classes : sequence of str
        In the order of their indices.
    source : mapping
        Where the pictures are from and by which rules, for the description.
    digest : str
        Of what decides the store, from `made_from`.
    left_out : sequence of mapping
        ``image``, ``reason`` and ``detail`` of each.
    notes : sequence of str
        What is to be said to people.

    Returns
    -------
    ImageStore
    """
    with TemporaryDirectory() as temporary:
        file = Path(temporary) / STACK
        stack = _write_array(file, images, len(pictures))
        facts = _facts(stack, file)
        channels = [Histogram.of(stack[..., channel]) for channel in range(3)]
        stored = [
            StoredImage((STACK,), None, p.class_name, p.participant_id, p.section, None, facts, row)
            for row, p in enumerate(pictures)
        ]
        counts = Counter(p.class_name for p in pictures)
        shape = dict.fromkeys(("min", "median", "max"), facts["shape"])
        return write_image_store(
            folder,
            images=stored,
            copy_from=Path(temporary),
            description={
                "GeneratedBy": [{"Name": "data_prep", "Version": version("fedbn")}],
                "site": site,
                "synthetic": False,
                "source": dict(source),
                "root": "",
                "dim": 2,
                "channels": 3,
                "channel_names": ["R", "G", "B"],
                "channel_axis": "last",
                "formats": ["numpy"],
                "labels": None,
                "label_map": {},
                "classes": list(classes),
                "counts": {
                    "found": len(pictures) + len(left_out),
                    "left_out": len(left_out),
                    "kept": len(pictures),
                    "patients": len({p.participant_id for p in pictures}),
                },
                "left_out": [dict(item) for item in left_out],
                "notes": list(notes),
                "summary": {
                    "shape": shape,
                    "spacing": None,
                    "stored_as": {"uint8": len(pictures)},
                    "intensity": facts["intensity"],
                    "histograms": [channel.to_store().describe() for channel in channels],
                    "labels": None,
                    "classes": {name: counts[name] for name in classes},
                },
                "made_from": digest,
            },
        )


def _write_array(file: Path, images: Iterable[np.ndarray], n: int) -> np.ndarray:
    """Write images as (n, x, y, channels), in the order of axes in which pictures are read."""
    stack = None
    for row, image in enumerate(images):
        turned = image.transpose(1, 0, 2)
        if stack is None:
            stack = np.lib.format.open_memmap(file, "w+", np.uint8, (n, *turned.shape))
        stack[row] = turned
    assert stack is not None
    stack.flush()
    return stack


def _facts(stack: np.ndarray, file: Path) -> dict[str, Any]:
    """Describe all images of a stack together."""
    return {
        "shape": list(stack.shape[1:3]),
        "spacing": None,
        "stored_as": "uint8",
        "intensity": describe_intensity(stack, Histogram.of(stack)),
        "bytes": {STACK: file.stat().st_size},
        "sha256": {STACK: file_checksum(file)},
    }
