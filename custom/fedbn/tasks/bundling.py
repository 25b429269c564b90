"""A task's complete model outside of a run: how it is packed, described and asked.

A task that has no side of its own for this (:meth:`fedbn.tasks.base.Task.bundling`) has
:class:`Bundling`: its model can be exported where nothing that was fitted precedes the network, and
asked about whatever the task reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import BaseModel
from torch import nn

from fedbn.core.batches import Samples
from fedbn.tasks.base import Task
from fedbn.tasks.classification import ClassificationTask
from fedbn.tasks.data import Index, SiteData
from fedbn.tasks.site_network import SiteNetwork

BATCH_NORM = "batch_norm"
"""The distance that every network with batch norm has."""


class PredictionError(ValueError):
    """What a model cannot be asked about; the message names it and says why."""


@dataclass(frozen=True)
class TrainedOn:
    """What a complete model was trained on, as its bundle states it.

    Attributes
    ----------
    site
        Whose it is.
    signature
        Of its data.
    reference
        From :meth:`Bundling.reference`; ``None`` if it was exported without the data.
    """

    site: str
    signature: Mapping[str, Any]
    reference: Mapping[str, Any] | None


@dataclass(frozen=True)
class Case:
    """What a model is asked about: one subject, scan, image or row of a table.

    Attributes
    ----------
    name
        As in tables.
    samples
        With nothing fitted applied: what the wrapped network takes.
    target
        Name of its class, where it is known.
    in_training
        Whether the model was trained on it; ``None`` where that is not known.
    facts
        Further columns of its row.
    parts
        Column to what tells its samples apart, (n_samples,).
    warnings
        Sentences.
    """

    name: str
    samples: Samples = field(repr=False)
    target: str | None = None
    in_training: bool | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)
    warnings: tuple[str, ...] = ()


Trained = Callable[[SiteData], np.ndarray | None]
"""Says of each unit of some data whether a model was trained on it; ``None`` if not known."""


class Bundling:
    """How a task's complete models are packed and asked.

    Parameters
    ----------
    task
        The task.

    Attributes
    ----------
    keys
        Names, in a bundle's metadata, of the data's signature and of :meth:`reference`.
    facts_model
        What the metadata state under these names, to be validated; anything if ``None``.
    word, target_word
        Columns of tables: what is asked about, and its class where that is known.
    distances_mean
        Name of each distance to the training data, to what it is in words.
    """

    keys: ClassVar[tuple[str, str]] = ("signature", "reference")
    facts_model: ClassVar[type[BaseModel] | None] = None
    word: ClassVar[str] = "case"
    target_word: ClassVar[str] = "target"
    distances_mean: ClassVar[Mapping[str, str]] = {
        BATCH_NORM: "mean squared z-score of what goes into the first batch norm"
    }

    def __init__(self, task: Task):
        self.task = task

    # ------------------------------------------------------------------------------- the network

    def wrap(self, network: nn.Module, fitted: Mapping[str, torch.Tensor]) -> nn.Module:
        """Put before a network what was fitted at the site.

        Samples with nothing fitted (``task.samples(data, units, {}, device)``) then give what
        fitted ones give the bare network.

        Raises
        ------
        ValueError
            If the task does not say how.
        """
        if fitted:
            raise ValueError(
                f"task {self.task.name!r} fits {', '.join(fitted)} at a site and does not say how "
                "they precede the network: its models cannot be exported"
            )
        return network

    def fitted_of(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what was fitted from the state dict of a wrapped network."""
        return {}

    def target(self, model: nn.Module, network: dict[str, Any]) -> dict[str, Any]:
        """Return how MONAI's configuration builds the wrapped network from that of the bare one."""
        return network

    def shape(self, model: nn.Module, recorded: Sequence[int] | None) -> tuple[int, ...]:
        """Return the shape of one sample: channels or features first.

        Parameters
        ----------
        model
            The wrapped network.
        recorded
            Of a sample that the site has held out, where it has kept that.
        """
        if recorded is None:
            raise ValueError(f"the model of task {self.task.name!r} does not say what it takes")
        return tuple(recorded)

    def example(self, model: nn.Module, shape: Sequence[int], n: int, seed: int) -> torch.Tensor:
        """Return made-up samples with nothing fitted, float32 (n, ...), to compare files on."""
        return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))

    # ------------------------------------------------------------------------------ the metadata

    def card(self, trained_on: TrainedOn, shape: Sequence[int]) -> dict[str, Any]:
        """Describe the model for people and for MONAI.

        Returns
        -------
        dict
            ``"name"``, ``"task"``, ``"data_type"``, ``"input"`` (sentence), ``"example"`` (a file
            to ask about), and ``"inputs"`` and ``"outputs"`` (what MONAI's metadata say of them).
        """
        names = class_names(self.task)
        what = f"samples of shape {tuple(shape)}"
        return {
            "name": f"{self.task.name} at {trained_on.site}",
            "task": f"Classification: {', '.join(names)}" if names else self.task.name,
            "data_type": f"data of task {self.task.name}",
            "input": f"{what}, with nothing fitted applied",
            "example": self.word.upper(),
            "inputs": {"type": "image", "format": "magnitude", "channel_def": {"0": what}},
            "outputs": {
                "type": "probabilities",
                "format": "classes",
                "num_channels": len(names),
                "channel_def": {str(k): name for k, name in enumerate(names)},
            },
        }

    def reference(self, data: SiteData, train: Index) -> dict[str, Any] | None:
        """Return what the training data were, in aggregate, to compare what is asked about with."""
        return None

    def check(self, facts: Mapping[str, Any], model: nn.Module) -> None:
        """Raise ValueError if a bundle's metadata and its network contradict each other."""

    def distances(self, model: nn.Module, inputs: Any) -> dict[str, np.ndarray]:
        """Say how far each sample of a batch is from the training data, float64 (n,) by name.

        The distance in the first batch norm is not among them: every network has it.
        """
        return {}

    # -------------------------------------------------------------------------------- being asked

    def cases(
        self,
        trained_on: TrainedOn,
        inputs: Sequence[Path],
        options: Mapping[str, Any],
        trained: Trained,
    ) -> Iterator[Case]:
        """Read what the model is asked about, one after the other.

        Parameters
        ----------
        trained_on
            What the model was trained on.
        inputs
            Files and folders.
        options
            Further options of the command line that were given, by name.
        trained
            Says on whom the model was trained.

        Raises
        ------
        PredictionError
            If one does not fit the model.
        fedbn.tasks.data.DataError
            If data are damaged.
        """
        if options:
            raise PredictionError(
                f"a model of task {self.task.name!r} takes no --{next(iter(options))}"
            )
        for place in inputs:
            yield from self.of_data(trained_on, place, trained)

    def of_data(self, trained_on: TrainedOn, place: Path, trained: Trained) -> Iterator[Case]:
        """Read the units of one site's data."""
        data = self.task.read(place, place.stem, verify=True)
        signature = json.loads(json.dumps(data.signature()))
        if differences := self.task.differences(trained_on.signature, signature):
            raise PredictionError(
                f"the data at {place} do not fit the model of site {trained_on.site!r}: "
                + "; ".join(differences)
            )
        in_training = trained(data)
        for k, unit in enumerate(data.units):
            yield Case(
                unit.id,
                self.task.samples(data, np.array([k]), {}, torch.device("cpu")),
                unit.stratum,
                None if in_training is None else bool(in_training[k]),
                **self.unit_facts(trained_on, data, k),
            )

    def unit_facts(self, trained_on: TrainedOn, data: SiteData, unit: int) -> dict[str, Any]:
        """Return what a unit's case has besides: its facts, parts and warnings."""
        return {}

    def explain(self, model: nn.Module, case: Case) -> Any:
        """Say what spoke for the answer; ``None`` where a task has no such thing."""
        return None

    def tables(self, trained_on: TrainedOn, explanation: Any) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of further tables by file name, from one case's explanation."""
        return {}


class StandardizedBundling(Bundling):
    """For a task that fits ``mean`` and ``std`` of each feature, float32 (n_features,).

    What else it fits are buffers of `module`.

    Besides that of batch norm there are two distances. ``"features"``: the mean squared z-score
    under the site's mean and standard deviation (over all training samples it is 1).
    ``"pattern"``: 1 minus Pearson's correlation of a sample with the site's mean, 0 to 2; features
    in another order show here, and may not show in the others. It is left out where the mean has
    no variation, as without standardisation.
    """

    distances_mean: ClassVar[Mapping[str, str]] = {
        "features": "mean squared z-score of its features",
        **Bundling.distances_mean,
        "pattern": "1 - r with the site's mean sample",
    }

    module: ClassVar[type[SiteNetwork]] = SiteNetwork

    def wrap(self, network: nn.Module, fitted: Mapping[str, torch.Tensor]) -> SiteNetwork:
        """Put the standardisation before a network, as a layer."""
        model = self.module(network, len(fitted["mean"]))
        for name, buffer in model.named_buffers(recurse=False):
            buffer.copy_(fitted[name])
        return model

    def fitted_of(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return mean, standard deviation and what else was fitted."""
        own = self.module(nn.Identity(), 1).state_dict()
        return {name: weights[name] for name in own}

    def target(self, model: nn.Module, network: dict[str, Any]) -> dict[str, Any]:
        """Return how MONAI's configuration builds a :class:`SiteNetwork`."""
        name = f"{self.module.__module__}.{self.module.__qualname__}"
        return {"_target_": name, "network": network, "n_features": self.shape(model, None)[0]}

    def shape(self, model: nn.Module, recorded: Sequence[int] | None) -> tuple[int, ...]:
        """Return the shape of the mean."""
        return tuple(of_site(model).mean.shape)

    def example(self, model: nn.Module, shape: Sequence[int], n: int, seed: int) -> torch.Tensor:
        """Return normal samples with the site's mean and standard deviation."""
        return of_site(model).mean + of_site(model).std * super().example(model, shape, n, seed)

    def distances(self, model: nn.Module, inputs: Any) -> dict[str, np.ndarray]:
        """Return ``"features"`` and ``"pattern"``."""
        site = of_site(model)
        found = {"features": (site.standardize(inputs).double() ** 2).mean(dim=1).numpy()}
        pattern = site.mean.double() - site.mean.double().mean()
        if "pattern" in self.distances_mean and bool(pattern.any()):
            # A sample without any variation has no pattern: its correlation counts as 0.
            centred = inputs.double() - inputs.double().mean(dim=1, keepdim=True)
            unlike = 1 - torch.cosine_similarity(centred, pattern[None])
            found["pattern"] = unlike.numpy()
        return found


def of_site(model: nn.Module) -> SiteNetwork:
    """Return a wrapped network as what it is."""
    assert isinstance(model, SiteNetwork)
    return model


def bundling_of(task: Task) -> Bundling:
    """Return the task's own side, or the one for any task."""
    found: Bundling | None = task.bundling()
    return found or Bundling(task)


def class_names(task: Task) -> tuple[str, ...]:
    """Return the names of a task's classes; none where it has no classes."""
    return task.class_names if isinstance(task, ClassificationTask) else ()
