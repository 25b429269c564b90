"""Images in batches, by MONAI's datasets and loader: prepared once, augmented by seed.

What precedes chance (reading, preprocessing) is kept where the site's settings say. Chance is drawn
for each image from the seed of the epoch and the image's place alone, so that the bits depend
neither on the number of workers nor on what ran before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import (
    CacheDataset,
    DataLoader,
    MetaTensor,
    PersistentDataset,
    get_track_meta,
    set_track_meta,
)
from monai.data import Dataset as PlainDataset
from monai.transforms import Compose, RandCropByPosNegLabeld, RandSpatialCropSamplesd, Transform
from torch.utils.data import ConcatDataset, Dataset

from data_prep.images.reading import ImageError, read_image, read_mask
from data_prep.images.store import ImageStore
from fedbn.core.batches import Batch, batch_indices
from fedbn.core.training import derive_seed
from fedbn.tasks.data import DataError, Index
from fedbn.tasks.images.transforms import Entry, build, name_of, without_loaders
from fedbn.tasks.loading import Loading

IMAGE, LABEL = "image", "label"


class ImageBatch(Batch):
    """A batch of images.

    ``inputs`` are (n, channels, x, y[, z]) float32; ``targets`` are masks (n, 1, x, y[, z]) int64,
    or classes (n,) int64. `spacing` is (dim,), in mm, or ones where it is unknown.
    """

    spacing: tuple[float, ...] = ()


class Prepare(Transform):
    """Read an image of a store, with its mask, and apply the deterministic transforms."""

    def __init__(self, store: ImageStore, entries: Sequence[Entry], *, masks: bool):
        self.site, self.masks, self.dim = store.site, masks, store.dim
        self.channel_axis = store.description["channel_axis"]
        self.label_map = store.label_map
        self.steps = [
            (f"preprocessing.{k} ({name_of(entry)})", build("preprocessing", entry))
            for k, entry in without_loaders(entries)
        ]

    def __call__(self, record: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return ``image`` float32, ``label`` (uint8 or int32) and ``spacing`` float64 (dim,)."""
        files = record[IMAGE] if isinstance(record[IMAGE], list) else [record[IMAGE]]
        name = Path(files[0]).name
        try:
            image = read_image(
                [Path(file) for file in files],
                channel_axis=self.channel_axis,
                row=record.get("row"),
            )
            data = {IMAGE: _meta(image.array.astype(np.float32), image.affine)}
            if self.masks:
                mask = read_mask(
                    Path(record[LABEL]), self.label_map, channel_axis=self.channel_axis
                )
                data[LABEL] = _meta(mask.array.astype(np.float32), mask.affine)
        except ImageError as error:
            raise _about(self.site, name, "cannot be used", str(error)) from error
        for where, step in self.steps:
            try:
                data = step(data)
            except Exception as error:
                raise _about(self.site, name, f"does not fit task.{where}", str(error)) from error
        known = image.spacing is not None
        spacing = data[IMAGE].pixdim[: self.dim] if known else torch.ones(self.dim)
        found = {IMAGE: data[IMAGE].as_tensor().float().contiguous(), "spacing": spacing.double()}
        if self.masks:
            label = data[LABEL].as_tensor().round()
            kind = torch.uint8 if label.min() >= 0 and label.max() < 256 else torch.int32
            found[LABEL] = label.to(kind).contiguous()
        if not bool(torch.isfinite(found[IMAGE]).all()):
            raise _about(self.site, name, "has values that are not finite after preprocessing")
        return found


def _meta(array: np.ndarray, affine: np.ndarray | None) -> MetaTensor:
    return MetaTensor(torch.from_numpy(np.ascontiguousarray(array)), affine=affine)


def _about(site: str, name: str, what: str, why: str = "") -> DataError:
    """Return an error whose public sentence has neither the file's name nor a library's words."""
    reason = f": {why}" if why else ""
    return DataError(
        f"site {site!r}: image {name} {what}{reason}",
        f"site {site!r}: an image {what}; the site's own log names it",
    )


class _OnDisk(PersistentDataset):
    """Prepared images in a folder; a file that is damaged is made again."""

    def _cachecheck(self, item_transformed: Any) -> Any:
        try:
            return super()._cachecheck(item_transformed)
        except (RuntimeError, EOFError):
            damaged = Path(self.cache_dir) / f"{_content(item_transformed).decode()}.pt"
            if not damaged.is_file():
                raise
            damaged.unlink()
            return super()._cachecheck(item_transformed)


def _content(record: Mapping[str, Any]) -> bytes:
    content = json.dumps([record["content"], record.get("row")])
    return hashlib.sha256(content.encode()).hexdigest().encode()


def prepared(
    store: ImageStore, units: Index, entries: Sequence[Entry], loading: Loading, *, masks: bool
) -> Any:
    """Return the prepared images of some units, in the order of the store, one dict an image.

    On disk they are keyed by the transforms, the version of MONAI and the files' checksums.
    """
    records = _records(store, units)
    prepare = Compose([Prepare(store, entries, masks=masks)])
    if loading.cache == "disk" and loading.folder is not None:
        key = [entries, masks, version("monai"), store.description["channel_axis"]]
        key += [sorted(store.label_map.items())]
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        folder = loading.folder / digest
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _OnDisk(records, prepare, folder, hash_func=_content)
    if loading.cache == "none":
        return PlainDataset(records, prepare)
    try:
        return CacheDataset(records, prepare, num_workers=1, progress=False, copy_cache=False)
    except RuntimeError as error:
        raise own_error(error) from error


def _records(store: ImageStore, units: Index) -> list[dict[str, Any]]:
    wanted = set(units.tolist())
    chosen = [
        image
        for image, unit in zip(store.images, store.image_unit.tolist(), strict=True)
        if unit in wanted
    ]
    return [
        record | {"content": [image.facts["sha256"][file] for file in image.all_files]}
        for record, image in zip(store.records(wanted), chosen, strict=True)
    ]


@dataclass(frozen=True)
class Chance:
    """What is drawn anew in each epoch: patches and augmentation.

    Attributes
    ----------
    augmentation
        Entries of transforms.
    patch
        Size of the patches, none if empty.
    per_image
        Patches of an image in each epoch.
    foreground
        Share of the patches whose centre lies in a labelled structure; anywhere if ``None``.
    """

    augmentation: Sequence[Entry] = ()
    patch: tuple[int, ...] = ()
    per_image: int = 1
    foreground: float | None = None

    def transforms(self) -> Compose:
        """Build them."""
        steps = [build("augmentation", entry) for entry in self.augmentation]
        return Compose([*self._crops(), *steps])

    def _crops(self) -> list[Any]:
        if not self.patch:
            return []
        if self.foreground is None:
            crop = RandSpatialCropSamplesd
            keys = (IMAGE, LABEL)
            return [
                crop(keys, self.patch, self.per_image, random_size=False, allow_missing_keys=True)
            ]
        share = self.foreground
        return [
            RandCropByPosNegLabeld(
                (IMAGE, LABEL), LABEL, self.patch, share, 1 - share, self.per_image
            )
        ]


class _Drawn(Dataset):
    """Prepared images after chance: an index is a place and a seed, or no seed for none."""

    def __init__(self, images: Any, chance: Chance):
        self.images, self.transform = images, chance.transforms()

    def __getitem__(self, index: tuple[int, int | None]) -> list[dict[str, Any]]:
        place, seed = index
        item = prepared_item(self.images, place)
        if seed is None or not self.transform.transforms:
            return [item]
        spacing = item["spacing"]
        self.transform.set_random_state(seed % 2**32)
        with _untracked(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            drawn = self.transform({k: v.clone() for k, v in item.items() if k != "spacing"})
        parts = drawn if isinstance(drawn, list) else [drawn]
        return [{k: _plain(v) for k, v in part.items()} | {"spacing": spacing} for part in parts]


@contextlib.contextmanager
def _untracked() -> Iterator[None]:
    """Have MONAI keep no record of transforms, which costs more than small ones themselves."""
    tracked = get_track_meta()
    set_track_meta(False)
    try:
        yield
    finally:
        set_track_meta(tracked)


def prepared_item(images: Any, place: int) -> dict[str, Any]:
    """Return a prepared image; MONAI's report of a fault is taken off our own."""
    try:
        item: dict[str, Any] = images[place]
        return item
    except RuntimeError as error:
        raise own_error(error) from error


def own_error(error: BaseException) -> BaseException:
    """Return the :class:`DataError` that caused an error, or the error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, DataError):
            return cause
        cause = cause.__cause__
    return error


def _plain(value: Any) -> Any:
    return value.as_tensor() if isinstance(value, MetaTensor) else value


class ImageSamples:
    """A site's images, prepared, as samples; see :class:`fedbn.core.batches.Samples`.

    Parameters
    ----------
    images
        From :func:`prepared`.
    owners
        int64 (n,): unit of each image.
    chance
        What training draws.
    device
        Of the batches.
    workers
        Loader processes for batches that are drawn.
    classes
        int64 (n,), the targets; without them these are the masks.
    site
        For messages.
    """

    def __init__(
        self,
        images: Any,
        owners: np.ndarray,
        chance: Chance,
        device: torch.device,
        *,
        workers: int = 0,
        classes: torch.Tensor | None = None,
        site: str = "",
    ):
        self.images, self.owners, self.chance = images, owners, chance
        self.device, self.workers, self.site = device, workers, site
        self.targets = classes

    def __len__(self) -> int:
        return len(self.owners)

    def batches(self, batch_size: int, seed: int | None = None) -> Iterator[ImageBatch]:
        """Go through all images once; with a seed, an image may give several patches."""
        if seed is None:
            rows = list(torch.arange(len(self)).split(batch_size))
            return self._load(rows, None, self.chance)
        order = torch.Generator().manual_seed(seed)
        return self._load(batch_indices(len(self), batch_size, order), seed, self.chance)

    def chance_of(self, place: int) -> ImageBatch:
        """Draw one image as training does."""
        return self._batch([place], [_Drawn(self.images, self.chance)[place, 0]])

    def clean_batches(self, batch_size: int) -> Iterator[ImageBatch]:
        """Go through all images once as training sees them, patches too, without augmentation."""
        n_batches = max(1, len(self) // batch_size)
        rows = torch.arange(len(self)).tensor_split(n_batches)
        return self._load(rows, 0, replace(self.chance, augmentation=()))

    def _load(
        self, rows: Iterable[torch.Tensor], seed: int | None, chance: Chance
    ) -> Iterator[ImageBatch]:
        plan = [
            [(k, None if seed is None else derive_seed(seed, "image", k)) for k in part.tolist()]
            for part in rows
        ]
        loader = DataLoader(
            _Drawn(self.images, chance),
            batch_sampler=plan,
            num_workers=self.workers if seed is not None else 0,
            collate_fn=list,
            generator=torch.Generator().manual_seed(0),
        )
        try:
            for places, items in zip(plan, loader, strict=True):
                yield self._batch([place for place, _ in places], items)
        except DataError as error:  # of a loader process it has the traceback in it
            last = str(error).splitlines()[-1]
            unnamed = f"site {self.site!r}: an image cannot be used; the site's own log names it"
            public = error.public if error.public != str(error) else unnamed
            raise DataError(last.partition("StoreError: ")[2] or last, public) from error
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise DataError(
                f"site {self.site!r}: a loader process ended, for want of memory or of "
                "shared memory (/dev/shm); lower workers in the site's settings, 0 takes none"
            ) from error

    def _batch(self, places: list[int], items: list[list[dict[str, Any]]]) -> ImageBatch:
        parts = [part for of_image in items for part in of_image]
        whose = np.repeat(places, [len(of_image) for of_image in items])
        shapes = sorted({tuple(part[IMAGE].shape[1:]) for part in parts})
        if len(shapes) > 1:
            raise DataError(
                f"site {self.site!r}: images of one batch have sizes {shapes[0]} and {shapes[-1]}; "
                "give the task a patch, or preprocessing that makes all one size (Resized, "
                "SpatialPadd, ResizeWithPadOrCropd)"
            )
        inputs = torch.stack([part[IMAGE].float() for part in parts]).to(self.device)
        if self.targets is None:
            targets = torch.stack([part[LABEL] for part in parts]).long().to(self.device)
        else:
            targets = self.targets[whose].to(self.device)
        batch = ImageBatch(inputs, targets, self.owners[whose])
        batch.spacing = tuple(parts[0]["spacing"].tolist())
        return batch


def joined(samples: Sequence[ImageSamples]) -> ImageSamples:
    """Join the images of several sites; their units are renumbered, each site's stay its own."""
    starts = np.cumsum([0, *(int(one.owners.max()) + 1 for one in samples)])
    first = samples[0]
    targets = [one.targets for one in samples if one.targets is not None]
    return ImageSamples(
        ConcatDataset([one.images for one in samples]),
        np.concatenate([one.owners + k for one, k in zip(samples, starts, strict=False)]),
        first.chance,
        first.device,
        workers=first.workers,
        classes=torch.cat(targets) if targets else None,
        site="pooled",
    )
