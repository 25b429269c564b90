"""Masks from images: Dice, surface Dice and the 95th percentile of surface distances.

Scores are of the images after preprocessing. A structure that is in neither truth nor prediction
says nothing: it is left out of that image's row and counted, so that no mean holds a NaN. One that
only one of both has, has Dice and surface Dice 0 and no surface distance.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import nn

from data_prep.images.store import ImageStore
from fedbn.core.batches import Batch, Samples
from fedbn.core.training import Loss, TrainingSettings
from fedbn.tasks.base import Metric, Scores
from fedbn.tasks.data import DataError, SiteData, Split
from fedbn.tasks.images.task import ImageTask, by, entry_of
from fedbn.tasks.images.transforms import Entry, build

Measure = Literal["dice", "surface_dice", "hd95"]
_LOSS = {"_target_": "DiceCELoss", "softmax": True, "to_onehot_y": True}
_INFERER = {"_target_": "SimpleInferer"}
_TITLES = {"dice": "Dice", "surface_dice": "surface Dice", "hd95": "HD95"}


class SegmentationTask(ImageTask):
    """Learn masks.

    Attributes
    ----------
    classes
        Names of the label ids 1, 2 and on; the network has one output more, the background's.
    loss
        A loss of MONAI or ``torch.nn.CrossEntropyLoss``.
    inferer
        How a network looks at a whole image when it is scored.
    scores
        What is measured.
    tolerance
        Of the surface Dice, in mm where the spacing is known and in voxels elsewhere.
    """

    name: Literal["segmentation"] = "segmentation"
    classes: list[str] = Field(min_length=1)
    loss: Annotated[Entry, entry_of("loss")] = Field(default_factory=lambda: dict(_LOSS))
    inferer: Annotated[Entry, entry_of("inferer")] = Field(default_factory=lambda: dict(_INFERER))
    scores: list[Measure] = Field(default=["dice", "surface_dice", "hd95"], min_length=1)
    tolerance: float = Field(default=1.0, ge=0, allow_inf_nan=False)

    @field_validator("scores")
    @classmethod
    def _dice_is_the_headline(cls, value: list[Measure]) -> list[Measure]:
        if value[0] != "dice" or len(set(value)) < len(value):
            raise ValueError(f"give each score once and dice first, got {value}")
        return value

    @property
    def masked(self) -> bool:
        """The targets are masks."""
        return True

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Each measure's mean over classes, then each class's."""
        found = []
        for measure in self.scores:
            distance = measure == "hd95"
            for suffix, of in (("", ""), *((f"_{k}", f", {n}") for k, n in self._numbered)):
                title = f"{_TITLES[measure]}{of}"
                found.append(Metric(f"{measure}{suffix}", title, not distance, not distance))
        return tuple(found)

    @property
    def followed(self) -> tuple[str, ...]:
        """The mean Dice."""
        return (f"{self.levels[0]}_dice",)

    @property
    def _numbered(self) -> list[tuple[int, str]]:
        return list(enumerate(self.classes, 1))

    # ------------------------------------------------------------------------------- the data

    def check_store(self, store: ImageStore) -> None:
        """See that every image has a mask, and that no label id is beyond the outputs."""
        super().check_store(store)
        if without := sum(image.label is None for image in store.images):
            raise DataError(
                f"site {store.site!r}: {without} of its {len(store.images)} images have no mask; "
                "make the store from images with masks"
            )
        ids = store.labels or {}
        if ids and max(ids) > len(self.classes):
            raise DataError(
                f"site {store.site!r}: its masks have label id {max(ids)} ({ids[max(ids)]}), but "
                f"the task has {len(self.classes)} classes ({', '.join(self.classes)}), ids 1 to "
                f"{len(self.classes)}; name all in the job, or merge ids with --label-map"
            )

    def facts(self, data: SiteData, split: Split) -> dict[str, Any]:
        """Say in what distances are."""
        assert isinstance(data, ImageStore)
        known = all(image.facts["spacing"] is not None for image in data.images)
        return {"distances_in": "mm" if known else "voxels"}

    def check_item(self, data: SiteData, item: Mapping[str, Any]) -> None:
        """See that image and mask have one size, and that label ids are among the outputs."""
        image, label = (tuple(item[key].shape) for key in ("image", "label"))
        if image[1:] != label[1:]:
            raise DataError(
                f"site {data.site!r}: after preprocessing an image is {by(image[1:])} and its mask "
                f"{by(label[1:])}; give spatial transforms the keys image and label"
            )
        low, high = int(item["label"].min()), int(item["label"].max())
        if low < 0 or high > len(self.classes):
            raise DataError(
                f"site {data.site!r}: after preprocessing a mask has label ids from {low} to "
                f"{high}, but the task has ids 0 to {len(self.classes)}; masks are resized and "
                'rotated with mode "nearest"'
            )

    # ---------------------------------------------------------------------------- the network

    def head(self, network: nn.Module) -> tuple[str, ...]:
        """Name the entries of the last convolution or linear layer."""
        kinds = (nn.Linear, nn.modules.conv._ConvNd)
        last = [name for name, module in network.named_modules() if isinstance(module, kinds)][-1]
        return tuple(name for name in network.state_dict() if name.startswith(f"{last}."))

    def criterion(self, training: TrainingSettings, samples: Samples) -> Loss:
        """Return the experiment's loss; class weights are the loss's own."""
        if training.class_weights is not None:
            raise ValueError(
                "training.class_weights are for classes of whole images; give the task's loss a "
                '"weight", one number a class'
            )
        module = build("loss", self.loss)
        squeeze = isinstance(module, nn.CrossEntropyLoss)

        def of_batch(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
            module.to(outputs.device)
            targets = batch.targets.squeeze(1) if squeeze else batch.targets
            value: torch.Tensor = module(outputs, targets)
            return value

        return of_batch

    def check(self, network: nn.Module, name: str, data: SiteData, samples: Samples) -> None:
        """See that images can be prepared, and that the network gives an output a class."""
        batch = self.check_images(data)
        sample = f"images of {batch.inputs.shape[1]} channels, {by(batch.inputs.shape[2:])}"
        device = next(network.parameters()).device
        try:
            logits = self._infer(network, batch.inputs.to(device))
        except Exception as error:
            raise DataError(
                f"site {data.site!r}: network {name} cannot take the site's {sample}: {error}"
            ) from error
        n_outputs = len(self.classes) + 1
        expected = (1, n_outputs, *batch.inputs.shape[2:])
        if not isinstance(logits, torch.Tensor) or tuple(logits.shape) != expected:
            got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
            raise DataError(
                f"site {data.site!r}: network {name} gives {got} for {sample}, but the task needs "
                f"{expected}: one output for the background and each of {', '.join(self.classes)}"
            )
        self.criterion(TrainingSettings(), samples)(logits.cpu(), batch)

    @cached_property
    def _inferer(self) -> Any:
        return build("inferer", self.inferer)

    def _infer(self, network: nn.Module, inputs: torch.Tensor) -> Any:
        training = [module for module in network.modules() if module.training]
        network.eval()
        try:
            with torch.no_grad():
                return self._inferer(inputs, lambda part: self.precisely(network, part))
        finally:
            for module in training:
                module.training = True

    # ----------------------------------------------------------------------------- the scores

    def score(self, network: nn.Module, samples: Samples) -> Scores:
        """Return each unit's measures by class, the mean over its images; NaN where undefined."""
        if len(samples) == 0:
            raise ValueError("there is no image to score")
        device = next(network.parameters()).device
        rows, owners = [], []
        for batch in samples.batches(1):
            logits = self._infer(network, batch.inputs.to(device))
            if not bool(torch.isfinite(logits).all()):
                raise FloatingPointError("the network gives no finite score for an image")
            called = logits.argmax(dim=1, keepdim=True).cpu()
            rows.append(self._measured(called, batch.targets.cpu(), batch.spacing))  # type: ignore[attr-defined]
            owners.append(int(batch.owners[0]))
        return self._by_unit(np.array(rows), np.array(owners))

    def _measured(
        self, called: torch.Tensor, truth: torch.Tensor, spacing: tuple[float, ...]
    ) -> list[float]:
        """Return the measures of one image, measure by measure, class by class."""
        from monai.metrics import (
            compute_dice,
            compute_hausdorff_distance,
            compute_surface_dice,
        )
        from monai.networks.utils import one_hot

        n = len(self.classes)
        called, truth = one_hot(called, n + 1), one_hot(truth, n + 1)
        here, there = (mask[0, 1:].flatten(1).any(dim=1).numpy() for mask in (called, truth))
        both, one = here & there, here ^ there
        found: list[float] = []
        kept = torch.from_numpy(np.concatenate([[True], both]))
        masks = called[:, kept], truth[:, kept]
        limits = [self.tolerance] * int(both.sum())
        of_both = {
            "dice": lambda: compute_dice(*masks, include_background=False),
            "surface_dice": lambda: compute_surface_dice(*masks, limits, spacing=list(spacing)),
            "hd95": lambda: compute_hausdorff_distance(
                *masks, percentile=95, spacing=list(spacing)
            ),
        }
        for measure in self.scores:
            values = np.full(n, np.nan)
            values[one] = np.nan if measure == "hd95" else 0.0
            if both.any():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # MONAI calls itself with old arguments
                    values[both] = of_both[measure]()[0].numpy()
            found += values.tolist()
        return found

    def _by_unit(self, rows: np.ndarray, owners: np.ndarray) -> Scores:
        """Average the images of each unit in which a measure is defined."""
        units, position = np.unique(owners, return_inverse=True)
        known = ~np.isnan(rows)
        names = [f"{measure}_{k}" for measure in self.scores for k, _ in self._numbered]
        columns = {}
        for name, values, defined in zip(names, rows.T, known.T, strict=True):
            counts = np.bincount(position, defined, len(units))
            sums = np.bincount(position, np.where(defined, values, 0.0), len(units))
            columns[name] = np.divide(
                sums, counts, out=np.full(len(units), np.nan), where=counts > 0
            )
        return Scores(units.astype(np.int64), columns)

    def follow(self, scores: Scores) -> dict[str, float]:
        """Return the mean Dice."""
        return {self.followed[0]: self._means(scores, "dice")[0]}

    def measure(self, scores: Scores) -> dict[str, dict[str, Any]]:
        """Return each measure's mean over the units in which it is defined.

        Returns
        -------
        dict
            ``"dice"`` is the mean over the classes of ``"dice_1"`` and on; ``"left_out_dice_1"``
            counts the units that the class says nothing about. A class without any unit is left out
            of the mean over classes.
        """
        found: dict[str, Any] = {}
        reasons = {}
        for measure in self.scores:
            mean, of_class = self._means(scores, measure)
            found[measure] = mean
            for (k, title), value in zip(self._numbered, of_class, strict=True):
                name = f"{measure}_{k}"
                found[name] = value
                found[f"left_out_{name}"] = int(np.isnan(scores.columns[name]).sum())
                if np.isnan(value):
                    reasons[name] = f"{title} is absent in all of the {len(scores.units)} subjects"
            if np.isnan(mean):
                reasons[measure] = "no class has a score"
        return {self.levels[0]: {**found, "n": len(scores.units), "reasons": reasons}}

    def changed(self, reference: Scores, scores: Scores) -> dict[str, int]:
        """Count units whose mean Dice is higher (``"corrected"``) or lower (``"lost"``)."""
        was, now = (_row_means(self._table(one, "dice")) for one in (reference, scores))
        return {
            "corrected": int((now > was).sum()),
            "lost": int((now < was).sum()),
            "n": len(scores.units),
        }

    def _table(self, scores: Scores, measure: str) -> np.ndarray:
        return np.stack([scores.columns[f"{measure}_{k}"] for k, _ in self._numbered], axis=1)

    def _means(self, scores: Scores, measure: str) -> tuple[float, list[float]]:
        of_class = _row_means(self._table(scores, measure).T)
        return float(_row_means(of_class[None])[0]), of_class.tolist()


def _row_means(table: np.ndarray) -> np.ndarray:
    """Average each row's numbers; NaN where it has none."""
    known = ~np.isnan(table)
    sums, counts = np.where(known, table, 0.0).sum(axis=1), known.sum(axis=1)
    return np.divide(sums, counts, out=np.full(len(table), np.nan), where=counts > 0)
