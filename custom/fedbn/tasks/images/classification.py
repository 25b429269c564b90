"""Classes of whole images."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator
from torch import nn

from data_prep.images.store import ImageStore
from fedbn.core.batches import Samples
from fedbn.tasks.base import Scores
from fedbn.tasks.classification import ClassificationTask, make_scores, predict
from fedbn.tasks.data import DataError, SiteData
from fedbn.tasks.images.task import ImageTask, Patch

_BATCH = 64


class ImageClassificationTask(ClassificationTask, ImageTask):
    """Learn the class of an image.

    A patient's probabilities are the mean over its images; whole images are scored.

    Attributes
    ----------
    classes
        Names of the classes, as the stores have them and in the order of the network's outputs.
    """

    name: Literal["classification"] = "classification"
    one_size: ClassVar[bool] = True
    classes: list[str] = Field(min_length=2)

    @field_validator("patch")
    @classmethod
    def _no_masks(cls, value: Patch | None) -> Patch | None:
        if value is not None and value.foreground is not None:
            raise ValueError("foreground needs masks, which this task does not read; leave it out")
        return value

    @property
    def masked(self) -> bool:
        """The targets are classes."""
        return False

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes as the experiment states them."""
        return tuple(self.classes)

    def check_store(self, store: ImageStore) -> None:
        """See that every image has a class, and that the classes are the job's."""
        super().check_store(store)
        if store.classes != self.class_names:
            found = ", ".join(store.classes or ()) or "none"
            raise DataError(
                f"site {store.site!r}: the classes of its store are {found}, the job's are "
                f"{', '.join(self.classes)}; make the store again with --class-names "
                f"{','.join(self.classes)}"
            )
        if without := sum(image.class_name is None for image in store.images):
            raise DataError(
                f"site {store.site!r}: {without} of its {len(store.images)} images have no class; "
                "make the store again with --mismatch drop"
            )

    def describe_sample(self, data: SiteData) -> str:
        """Say how many channels an image has."""
        assert isinstance(data, ImageStore)
        return f"site's images of {data.channels} channels"

    def check(self, network: nn.Module, name: str, data: SiteData, samples: Samples) -> None:
        """See that images can be prepared, and that the network gives a logit a class."""
        self.check_images(data)
        super().check(network, name, data, samples)

    def score(self, network: nn.Module, samples: Samples) -> Scores:
        """Return each unit's class and probabilities."""
        found: Any = predict(network, samples, _BATCH)
        return make_scores(*found, parts=False)
