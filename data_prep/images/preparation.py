"""Look at every image of a site once, and write what was found as its store."""

import hashlib
import json
import platform
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import StoreError, some_of
from data_prep.files import recover_folder
from data_prep.images.datalist import DataList, Entry, LeftOut, refuse_gaps, refuse_two_sides, stem
from data_prep.images.intensity import PIECE, Histogram, label_counts
from data_prep.images.reading import (
    AFFINE_TOLERANCE,
    Image,
    ImageError,
    file_format,
    read_image,
    read_mask,
)
from data_prep.images.store import (
    FORMAT_VERSION,
    ImageStore,
    StoredImage,
    content_checksum,
    content_size,
    read_image_store,
    write_image_store,
)

__all__ = ["ImageSettings", "describe_intensity", "prepare_images"]

# Patients below which a site is told that it can hardly be divided.
FEW_PATIENTS = 10
# Spacings of one site that differ by more than this factor are said.
SPACING_RATIO = 2.0
# How it is known whose an image is, as the description states it.
BY_NAME, BY_IMAGE = "sub-<label> of the images' names", "each image counts as a patient"
SUBJECT = re.compile(r"(?:^|/)(sub-[A-Za-z0-9]+)")
QUANTILES = {"p01": 0.01, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p99": 0.99}


@dataclass(frozen=True)
class ImageSettings:
    """How the images of a site are to be understood.

    Attributes
    ----------
    label_names : dict or None
        Name of each label id from 0 on; None: the ids that are found, without names.
    class_names : tuple of str or None
        Classes in the order of their indices; None: those that are found, sorted.
    label_map : dict
        What an id in a mask's file stands for, where it is not itself.
    channel_axis : str
        Of NumPy arrays: ``none``, ``first`` or ``last``.
    copy : bool
        Whether the store gets copies of the images.
    """

    label_names: dict[int, str | None] | None = None
    class_names: tuple[str, ...] | None = None
    label_map: dict[int, int] = field(default_factory=dict)
    channel_axis: str = "none"
    copy: bool = False

    def __post_init__(self) -> None:
        """Refuse ids that no network's outputs could stand for."""
        ids = sorted(self.label_names or ())
        if self.label_names is not None and (ids != list(range(len(ids))) or len(ids) < 2):
            raise StoreError(
                f"the labels' ids are {', '.join(map(str, ids))}; a network's outputs are numbered "
                "0 (background), 1, 2 and on without a gap: map others with --label-map, such as "
                "--label-map 255=1"
            )


@dataclass(frozen=True)
class _Found:
    """What one image holds."""

    entry: Entry
    array_shape: tuple[int, ...]
    format: str
    full_scale: str
    pixels: str
    mask_pixels: str | None
    histograms: tuple[Histogram, ...]
    facts: dict[str, Any]

    @property
    def kind(self) -> tuple[int, int, str]:
        """What all images of a site share: spatial axes, channels, bits of a picture."""
        return len(self.array_shape) - 1, self.array_shape[0], self.full_scale


def prepare_images(
    folder: Path,
    *,
    site: str,
    datalist: DataList,
    settings: ImageSettings,
    source: Mapping[str, Any],
    left_out: Sequence[LeftOut] = (),
    notes: Sequence[str] = (),
    synthetic: bool = False,
    force: bool = False,
    progress: Callable[[], object] | None = None,
) -> tuple[ImageStore, bool]:
    """Read every image of a site and write its store.

    Parameters
    ----------
    folder : Path
        Where the store goes.
    site : str
        Name of the site.
    datalist : DataList
        The images; files that are missing have been taken out.
    settings : ImageSettings
        How they are to be understood.
    source : mapping
        Where the list came from, for the description.
    left_out, notes : sequence
        What was left out, or is to be said, before any image was opened.
    synthetic : bool
        Whether the images are made up.
    force : bool
        Write even if nothing has changed.
    progress : callable, optional
        Called twice an image: after its checksum and after reading it.

    Returns
    -------
    store : ImageStore
    unchanged : bool
        Whether the store was there already, made of the same files with the same settings.

    Raises
    ------
    StoreError
        If no image is left, or the images do not fit together.
    """
    step = progress or (lambda: None)
    refuse_gaps(datalist.entries)
    entries, patients = _with_patients(datalist.entries)
    refuse_two_sides(entries)
    sums = {}
    for entry in entries:
        files = (*entry.files, *([entry.label] if entry.label else []))
        sums[entry.name] = {f: content_checksum(datalist.root / f) for f in files}
        step()
    made_from = _fingerprint(site, entries, sums, settings, datalist, left_out, synthetic)
    if not force and (store := _unchanged(folder, made_from, datalist.root, settings)) is not None:
        return store, True
    reader = _Reader(datalist.root, settings, sums)
    read = []
    for entry in entries:
        read.append(reader.look_at(entry))
        step()
    found = [item for item in read if isinstance(item, _Found)]
    out = [*left_out, *(item for item in read if isinstance(item, LeftOut))]
    found, out = _same_kind(site, found, out)
    found, out = _once(found, out)
    found, out, settings = _named(site, found, out, settings)
    if not found:
        reasons = Counter(item.reason for item in out).most_common(1)
        example = next((o for o in out if o.reason == reasons[0][0]), None) if reasons else None
        raise StoreError(
            f"site {site!r}: no image is left of {len(entries)}"
            + (f"; {example.image} {example.detail}" if example else "")
        )
    images = [
        StoredImage(
            files=item.entry.files,
            label=item.entry.label,
            class_name=item.entry.class_name,
            participant_id=str(item.entry.participant_id),
            section=item.entry.section,
            fold=item.entry.fold,
            facts=item.facts,
        )
        for item in found
    ]
    dim, channels, _ = found[0].kind
    summary = _summary(found, settings)
    notes = [
        *notes,
        *_notes(images, settings, summary, patients=patients, not_read=datalist.not_read),
    ]
    store = write_image_store(
        folder,
        images=images,
        copy_from=datalist.root if settings.copy else None,
        description={
            "GeneratedBy": [{"Name": "data_prep", "Version": version("fedbn")}],
            "site": site,
            "synthetic": synthetic,
            "source": dict(source),
            "root": str(datalist.root),
            "dim": dim,
            "channels": channels,
            "channel_names": list(datalist.channel_names[:channels]),
            "channel_axis": settings.channel_axis,
            "formats": sorted({item.format for item in found}),
            "labels": _keys(settings.label_names),
            "label_map": {str(old): new for old, new in settings.label_map.items()},
            "classes": settings.class_names and list(settings.class_names),
            "patients": patients,
            "counts": {
                "found": len(entries) + len(left_out),
                "left_out": len(out),
                "kept": len(images),
                "patients": len({image.participant_id for image in images}),
            },
            "left_out": [asdict(item) for item in out],
            "notes": notes,
            "summary": summary,
            "inputs": datalist.inputs,
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("numpy", "nibabel", "pillow")},
            },
            "made_from": made_from,
        },
    )
    return store, False


def _keys(names: Mapping[int, str | None] | None) -> dict[str, str | None] | None:
    return None if names is None else {str(key): name for key, name in names.items()}


def _with_patients(entries: Sequence[Entry]) -> tuple[list[Entry], str]:
    """Give each image its patient, and say how: by the list, by BIDS names, or each its own."""
    if all(entry.participant_id is not None for entry in entries):
        return list(entries), "participant_id"
    named = [SUBJECT.findall(entry.name) for entry in entries]
    if all(named):
        who = [labels[-1] for labels in named]
        return [replace(e, participant_id=w) for e, w in zip(entries, who, strict=True)], BY_NAME
    short = Counter(stem(entry.name) for entry in entries)
    return [
        replace(e, participant_id=stem(e.name) if short[stem(e.name)] == 1 else e.name)
        for e in entries
    ], BY_IMAGE


def _fingerprint(site: str, entries: Sequence[Entry], *content: Any) -> str:
    sums, settings, datalist, left_out, synthetic = content
    parts = [version("fedbn"), FORMAT_VERSION, site, synthetic, sums, asdict(settings)]
    parts += [[asdict(entry) for entry in entries], [asdict(item) for item in left_out]]
    parts += [datalist.channel_names, datalist.not_read]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _unchanged(
    folder: Path, made_from: str, root: Path, settings: ImageSettings
) -> ImageStore | None:
    """Return the store that is there, if it is whole and was made from the same."""
    recover_folder(folder)
    try:
        store = read_image_store(folder, verify=True)
    except StoreError:
        return None
    here = settings.copy or store.root == root
    return store if here and store.description.get("made_from") == made_from else None


# -------------------------------------------------------------------------------------- one image


@dataclass(frozen=True)
class _Reader:
    root: Path
    settings: ImageSettings
    sums: Mapping[str, Mapping[str, str]]

    def look_at(self, entry: Entry) -> _Found | LeftOut:
        axis = self.settings.channel_axis
        try:
            image = read_image([self.root / file for file in entry.files], channel_axis=axis)
        except ImageError as error:
            return LeftOut(entry.name, "image cannot be used", str(error))
        if image.array.dtype.kind == "f" and (bad := int((~np.isfinite(image.array)).sum())):
            detail = f"has {bad} value(s) that are not finite"
            return LeftOut(entry.name, "not finite", detail)
        channels = [Histogram.of(channel) for channel in image.array]
        facts = self._facts(entry, image, Histogram.sum(channels))
        mask_pixels = None
        if entry.label is not None:
            try:
                mask = read_mask(
                    self.root / entry.label, self.settings.label_map, channel_axis=axis
                )
            except ImageError as error:
                return LeftOut(entry.name, "mask cannot be used", f"{entry.label} {error}")
            if unlike := _unlike(image, mask):
                return LeftOut(entry.name, *unlike)
            facts["label_voxels"] = {str(k): n for k, n in label_counts(mask.array).items()}
            mask_pixels = _checksum(mask.array)
        kind = file_format(self.root / entry.name)
        return _Found(
            entry=entry,
            array_shape=image.array.shape,
            format=kind,
            full_scale=image.stored_as if kind == "picture" else "",
            pixels=_checksum(image.array),
            mask_pixels=mask_pixels,
            histograms=tuple(channel.to_store() for channel in channels),
            facts=facts,
        )

    def _facts(self, entry: Entry, image: Image, histogram: Histogram) -> dict[str, Any]:
        files = (*entry.files, *([entry.label] if entry.label else []))
        spacing = image.spacing
        return {
            "shape": list(image.array.shape[1:]),
            "spacing": None if spacing is None else list(spacing),
            "stored_as": image.stored_as,
            "intensity": describe_intensity(image.array, histogram),
            "bytes": {file: content_size(self.root / file) for file in files},
            "sha256": dict(self.sums[entry.name]),
        }


def _checksum(array: np.ndarray) -> str:
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape}".encode())
    digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def describe_intensity(array: np.ndarray, histogram: Histogram) -> dict[str, float]:
    """Summarise the values of all channels together."""
    mean = float(array.mean(dtype=np.float64))
    flat = array.ravel(order="K")
    squares = 0.0
    for begin in range(0, flat.size, PIECE):
        piece = flat[begin : begin + PIECE].astype(np.float64) - mean
        squares += float(piece @ piece)
    values = {
        "min": float(array.min()),
        **{name: histogram.quantile(share) for name, share in QUANTILES.items()},
        "max": float(array.max()),
        "mean": mean,
        "std": float(np.sqrt(squares / flat.size)),
    }
    return {name: float(f"{value:.6g}") for name, value in values.items()}


def _unlike(image: Image, mask: Image) -> tuple[str, str] | None:
    """Say in what a mask's grid is not its image's."""
    sizes = ["x".join(map(str, part.array.shape[1:])) for part in (image, mask)]
    if sizes[0] != sizes[1]:
        return "mask of another size", f"is {sizes[0]}, its mask {sizes[1]}"
    if (voxels := image.apart(mask)) <= AFFINE_TOLERANCE:
        return None
    detail = f"lies elsewhere than its mask: up to {voxels:.2g} voxels apart"
    return "mask of another affine", detail


# -------------------------------------------------------------------------------- images together

Both = tuple[list[_Found], list[LeftOut]]


def _same_kind(site: str, found: list[_Found], out: list[LeftOut]) -> Both:
    """Keep the images of the kind that most have; refuse a site that is half and half."""
    kinds = Counter(item.kind for item in found)
    if len(kinds) < 2:
        return found, out
    named = [f"{n} of {_kind(kind)}" for kind, n in kinds.most_common()]
    kind, most = kinds.most_common(1)[0]
    if 2 * most <= len(found):
        raise StoreError(
            f"site {site!r}: the images are of different kinds ({', '.join(named)}); make a store "
            "of each kind"
        )
    detail = f"where most images here are {_kind(kind)}"
    other = [i for i in found if i.kind != kind]
    out += [LeftOut(i.entry.name, "another kind", f"is {_kind(i.kind)}, {detail}") for i in other]
    return [i for i in found if i.kind == kind], out


def _kind(kind: tuple[int, int, str]) -> str:
    dim, channels, full_scale = kind
    plural = "s" if channels > 1 else ""
    return f"{dim}D with {channels} channel{plural}" + (f" of {full_scale}" if full_scale else "")


def _once(found: list[_Found], out: list[LeftOut]) -> Both:
    """Keep the first of images with the same pixels, which would be on both sides of a split."""
    first: dict[str, _Found] = {}
    for item in found:
        other = first.setdefault(item.pixels, item)
        if other is not item:
            detail = f"has the same pixels as {other.entry.name}"
            if (other.mask_pixels, other.entry.class_name) != (
                item.mask_pixels,
                item.entry.class_name,
            ):
                detail += ", with another label"
            out.append(LeftOut(item.entry.name, "duplicate", detail))
    return list(first.values()), out


def _named(
    site: str, found: list[_Found], out: list[LeftOut], settings: ImageSettings
) -> tuple[list[_Found], list[LeftOut], ImageSettings]:
    """Fix the label ids and classes of the site; leave out images with others."""
    masks = [item for item in found if item.entry.label is not None]
    if masks:
        ids = Counter(int(key) for item in masks for key in item.facts["label_voxels"])
        if set(ids) == {0}:
            raise StoreError(f"site {site!r}: all {len(masks)} masks are empty")
        names = settings.label_names
        if names is None:
            if sorted(ids) != list(range(len(ids))) or len(ids) < 2:
                raise StoreError(_strange_ids(site, masks, ids))
            names = dict.fromkeys(sorted(ids))
        settings = replace(settings, label_names=names)
        kept = []
        for item in found:
            strange = [k for k in item.facts.get("label_voxels", {}) if int(k) not in names]
            if not strange:
                kept.append(item)
                continue
            detail = f"has a mask with {', '.join(strange)}, which is no label"
            out.append(LeftOut(item.entry.name, "label id", f"{detail} ({_listed(names)})"))
        found = kept
    else:
        settings = replace(settings, label_names=None)
    if not any(item.entry.class_name is not None for item in found):
        return found, out, replace(settings, class_names=None)
    return _classes(found, out, settings)


def _strange_ids(site: str, masks: Sequence[_Found], ids: Counter[int]) -> str:
    shown = ", ".join(map(str, sorted(ids)[:8])) + (", ..." if len(ids) > 8 else "")
    rare = min(sorted(ids, reverse=True), key=lambda key: ids[key])
    example = next(item.entry.name for item in masks if str(rare) in item.facts["label_voxels"])
    return (
        f"site {site!r}: the masks hold {shown} (for one, the mask of {example} {rare}); a "
        "network's outputs are numbered 0 (background), 1, 2 and on: say what they mean with "
        "--label-map, such as --label-map 255=1, or name all ids with --label-names, such as "
        "background,tumour"
    )


def _listed(names: Mapping[int, str | None]) -> str:
    return ", ".join(f"{key} {name}" if name else str(key) for key, name in names.items())


def _has_foreground(facts: Mapping[str, Any]) -> bool:
    return any(key != "0" for key in facts.get("label_voxels", {}))


def _classes(
    found: list[_Found], out: list[LeftOut], settings: ImageSettings
) -> tuple[list[_Found], list[LeftOut], ImageSettings]:
    """Give each image its class as it is written in the settings; leave out other classes."""
    names = settings.class_names
    if names is None:
        names = tuple(sorted({str(i.entry.class_name) for i in found if i.entry.class_name}))
    written = {name.lower(): name for name in names}
    kept = []
    for item in found:
        name = (item.entry.class_name or "").lower()
        if name in written:
            kept.append(replace(item, entry=replace(item.entry, class_name=written[name])))
        else:
            detail = f"is of class {item.entry.class_name!r}" if name else "has no class"
            wanted = f"{detail}; wanted are {', '.join(names)}"
            out.append(LeftOut(item.entry.name, "class", wanted))
    return kept, out, replace(settings, class_names=names)


# ---------------------------------------------------------------------------------------- summary


def _summary(found: Sequence[_Found], settings: ImageSettings) -> dict[str, Any]:
    """Describe all images of a site together, without naming any."""
    facts = [item.facts for item in found]
    spacings = [f["spacing"] for f in facts if f["spacing"] is not None]
    voxels: Counter[str] = Counter()
    images: Counter[str] = Counter()
    for f in facts:
        voxels.update(f.get("label_voxels", {}))
        images.update(f.get("label_voxels", {}).keys())
    total = sum(voxels.values())
    classes = Counter(item.entry.class_name for item in found)
    return {
        "shape": _spread([f["shape"] for f in facts]),
        "spacing": _spread(spacings) if spacings else None,
        "stored_as": dict(sorted(Counter(f["stored_as"] for f in facts).items())),
        "intensity": {
            name: float(np.median([f["intensity"][name] for f in facts]))
            for name in facts[0]["intensity"]
        },
        "histograms": [
            Histogram.sum([item.histograms[channel] for item in found]).to_store().describe()
            for channel in range(found[0].array_shape[0])
        ],
        "labels": settings.label_names
        and {
            str(key): {"fraction": voxels[str(key)] / total, "images": images[str(key)]}
            for key in settings.label_names
        },
        "classes": settings.class_names and {name: classes[name] for name in settings.class_names},
    }


def _spread(rows: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    array = np.array(rows)
    return {
        name: [float(f"{value:.6g}") for value in function(array, axis=0)]
        for name, function in (("min", np.min), ("median", np.median), ("max", np.max))
    }


def _notes(
    images: Sequence[StoredImage],
    settings: ImageSettings,
    summary: Mapping[str, Any],
    *,
    patients: str,
    not_read: int,
) -> list[str]:
    """Say what is allowed and yet worth a look."""
    notes = []
    n_patients = len({image.participant_id for image in images})
    if patients == BY_IMAGE:
        notes.append(
            "each image counts as a patient of its own, since nothing says whose it is; where a "
            "patient has several, one may stand on both sides of a split, and scores come out too "
            "high: write participant_id into the list, or give --participants"
        )
    elif patients == BY_NAME:
        notes.append(f"{n_patients} patients, by the sub-<label> in the images' names")
    if n_patients < FEW_PATIENTS:
        notes.append(
            f"{n_patients} patient(s) only: they can hardly be divided for training and test"
        )
    if not_read:
        notes.append(
            f"{not_read} image(s) of the list's validation or test have no label: not read"
        )
    if settings.label_names is None and settings.class_names is None:
        notes.append("no masks and no classes: these images can be predicted, not trained on")
    empty = sum(i.label is not None and not _has_foreground(i.facts) for i in images)
    if empty:
        notes.append(f"{empty} of {len(images)} masks are empty")
    for key, name in (settings.label_names or {}).items():
        if not summary["labels"][str(key)]["images"]:
            notes.append(f"label {key}{f' ({name})' if name else ''} is in no mask")
    notes += [f"class {n!r} has no image" for n, k in (summary["classes"] or {}).items() if not k]
    shared = [label for label, n in Counter(i.label for i in images).items() if label and n > 1]
    if shared:
        notes.append(f"{len(shared)} mask(s) belong to more than one image, such as {shared[0]}")
    constant = [i.name for i in images if i.facts["intensity"]["std"] == 0]
    if constant:
        notes.append(f"all values are the same in {some_of(constant, 3)}")
    if len(summary["stored_as"]) > 1:
        kinds = ", ".join(f"{n} {kind}" for kind, n in summary["stored_as"].items())
        notes.append(f"values are stored in different types ({kinds}); look at the intensities")
    spacing = summary["spacing"]
    if spacing and max(np.divide(spacing["max"], spacing["min"])) > SPACING_RATIO:
        notes.append(f"spacings differ, from {spacing['min']} to {spacing['max']} mm")
    return notes
