"""What tasks on images have in common: the store, its split, preprocessing and chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import numpy as np
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator
from torch import nn

from data_prep.images.store import (
    ImageStore,
    is_image_store,
    read_image_store,
    signature_differences,
)
from fedbn.core.batches import Batch, Samples
from fedbn.tasks.base import Task
from fedbn.tasks.data import DataError, Index, SiteData, Split, SplitSettings
from fedbn.tasks.images.transforms import LOADERS, Entry, check_entry, name_of
from fedbn.tasks.splits import MIN_TRAINING_UNITS, draw, split_units

if TYPE_CHECKING:
    from fedbn.tasks.images.samples import ImageBatch, ImageSamples


def entry_of(field: str) -> AfterValidator:
    """Return the validator of an entry of a field; see :mod:`fedbn.tasks.images.transforms`."""
    return AfterValidator(partial(check_entry, field))


class Patch(BaseModel):
    """Pieces of the images that training sees in place of whole ones.

    Attributes
    ----------
    size
        Voxels along each axis.
    per_image
        Patches of an image in each epoch.
    foreground
        Share of the patches whose centre lies in a labelled structure, in [0, 1]; anywhere if
        ``None``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: list[Annotated[int, Field(ge=1)]] = Field(min_length=2, max_length=3)
    per_image: int = Field(default=1, ge=1)
    foreground: float | None = Field(default=None, ge=0, le=1)


class ImageTask(Task):
    """A task on an image store.

    Attributes
    ----------
    preprocessing
        MONAI's dictionary transforms without chance, in order, on ``image`` (and ``label``). The
        images are read before, channel first, in float32.
    augmentation
        Transforms with chance, drawn anew for each training image in each epoch.
    patch
        Pieces that training sees; whole images without it.
    """

    one_size: ClassVar[bool] = False
    preprocessing: list[Annotated[Entry, entry_of("preprocessing")]] = Field(default_factory=list)
    augmentation: list[Annotated[Entry, entry_of("augmentation")]] = Field(default_factory=list)
    patch: Patch | None = None

    @field_validator("preprocessing")
    @classmethod
    def _loaders_first(cls, value: list[Entry]) -> list[Entry]:
        names = [name_of(entry) for entry in value]
        first = next((k for k, name in enumerate(names) if name not in LOADERS), len(names))
        if late := [name for name in names[first:] if name in LOADERS]:
            raise ValueError(f"{late[0]} may only stand at the beginning")
        return value

    @property
    def masked(self) -> bool:
        """Whether the targets are masks."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------- the data

    def has_data(self, place: Path) -> bool:
        """Whether an image store is there."""
        return is_image_store(place)

    def read(self, place: Path, site: str, *, verify: bool = False) -> ImageStore:
        """Read a site's store, and see that it has what is learned."""
        store = read_image_store(place, verify=verify)
        self.check_store(store)
        return store

    def check_store(self, store: ImageStore) -> None:
        """See that a store has what is learned.

        Raises
        ------
        DataError
            Naming the site and what it lacks.
        """
        if self.patch and len(self.patch.size) != store.dim:
            raise DataError(
                f"site {store.site!r}: its images have {store.dim} axes, but patches of "
                f"{by(self.patch.size)} have {len(self.patch.size)}"
            )

    def describe(self, data: SiteData) -> str:
        """Say how many images of how many patients there are."""
        return f"{len(data.units)} subjects, {len(_store(data).images)} images"

    def differences(self, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
        """Say in what two stores differ."""
        return signature_differences(a, b)

    def split(self, data: SiteData, settings: SplitSettings) -> Split:
        """Divide by the list's own sections where it has a test section, else by fold.

        Of its own sections the training one gives its training share, and without a validation
        section also the validation share.
        """
        sections = np.array(_store(data).sections)
        if "test" not in sections:
            return split_units(data, settings)
        train, validation, test = (sections == name for name in ("training", "validation", "test"))
        if (share := settings.training_share_of(data.site)) != 1:
            train = draw(data, settings, train, share, "training share")
        if settings.validation_share and not validation.any():
            validation = draw(data, settings, train, settings.validation_share, "validation")
            train = train & ~validation
        if not settings.validation_share:
            validation = np.zeros_like(validation)
        split = Split(*map(np.flatnonzero, (train, validation, test)))
        if len(split.train) < MIN_TRAINING_UNITS:
            raise DataError(
                f"site {data.site!r}: its list has {len(split.train)} training subjects, at least "
                f"{MIN_TRAINING_UNITS} are needed"
            )
        return split

    def samples(
        self,
        data: SiteData,
        units: Index,
        fitted: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> ImageSamples:
        """Return the images of some units; they are read when they are gone through."""
        from fedbn.tasks.images.samples import Chance, ImageSamples, prepared

        store = _store(data)
        wanted = np.isin(store.image_unit, units)
        classes = None
        if not self.masked:
            classes = torch.tensor([r["class"] for r in store.records(units.tolist())])
        patch = self.patch
        chance = Chance(
            self.augmentation,
            tuple(patch.size) if patch else (),
            patch.per_image if patch else 1,
            patch.foreground if patch else None,
        )
        return ImageSamples(
            prepared(store, units, self.preprocessing, self._loading, masks=self.masked),
            store.image_unit[wanted],
            chance,
            device,
            workers=self._loading.workers,
            classes=classes,
            site=store.site,
        )

    def clean_batches(self, samples: Samples, batch_size: int) -> Any:
        """Go through training images once, as patches where training has these."""
        return cast("ImageSamples", samples).clean_batches(batch_size)

    def pooled(self, samples: Sequence[Samples]) -> Samples:
        """Join the images of several sites."""
        from fedbn.tasks.images.samples import joined

        return joined(cast("Sequence[ImageSamples]", samples))

    # ---------------------------------------------------------------------------- the network

    def forward(self, network: nn.Module, batch: Batch) -> Any:
        """Give a batch to the network, in the precision that the site allows."""
        return self.precisely(network, batch.inputs)

    def precisely(self, network: nn.Module, inputs: torch.Tensor) -> Any:
        """Return the network's output in float32, computed as the site's settings say."""
        if self._loading.amp == "off":
            return network(inputs)
        with torch.autocast(inputs.device.type, torch.bfloat16):
            return network(inputs).float()

    def check_images(self, data: SiteData) -> ImageBatch:
        """Prepare every image once, draw one as training does, and return the first as it is.

        Raises
        ------
        DataError
            If an image cannot be prepared, is smaller than a patch, or does not fit the others.
        """
        from fedbn.tasks.images.samples import IMAGE, prepared_item

        everyone = np.arange(len(data.units))
        samples = self.samples(data, everyone, {}, torch.device("cpu"))
        shapes: dict[tuple[int, ...], int] = {}
        for place in range(len(samples)):
            item = prepared_item(samples.images, place)
            shapes.setdefault(tuple(item[IMAGE].shape[1:]), place)
            self.check_item(data, item)
        for what, size in self._crops():
            small = [s for s in shapes if any(a < b for a, b in zip(s, size, strict=False))]
            if small:
                raise DataError(
                    f"site {data.site!r}: {what} of {by(size)} is larger than an image of "
                    f"{by(small[0])} after preprocessing; make it smaller, or add SpatialPadd to "
                    "the preprocessing"
                )
        if len(shapes) > 1 and (self.one_size or not self._crops()):
            a, b = list(shapes)[:2]
            patch = "" if self.one_size else "a patch, or "
            raise DataError(
                f"site {data.site!r}: after preprocessing its images have sizes {by(a)} and "
                f"{by(b)}; give the task {patch}preprocessing that makes all one size "
                "(Resized, SpatialPadd, ResizeWithPadOrCropd)"
            )
        try:
            for place in list(shapes.values())[:2]:
                samples.chance_of(place)
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"site {data.site!r}: task.augmentation cannot take its images: {error}"
            ) from error
        return next(samples.batches(1))

    def check_item(self, data: SiteData, item: Mapping[str, Any]) -> None:
        """See that a prepared image can be learned from."""

    def _crops(self) -> list[tuple[str, list[int]]]:
        """Return what training crops to, and its size."""
        found = [("patch", list(self.patch.size))] if self.patch else []
        for entry in self.augmentation:
            size = entry.get("spatial_size", entry.get("roi_size"))
            if "Crop" in name_of(entry) and isinstance(size, list | int):
                found.append((name_of(entry), size if isinstance(size, list) else [size] * 3))
        return found


def by(size: Sequence[int]) -> str:
    """Write a size as people do."""
    return " x ".join(map(str, size))


def _store(data: SiteData) -> ImageStore:
    assert isinstance(data, ImageStore)
    return data
