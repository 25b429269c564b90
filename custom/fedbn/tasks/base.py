"""What a task is: all that depends on the kind of data goes through this contract.

A task reads a site's data, splits its units (patients, subjects) into training, validation and
test, turns them into samples for a network, and scores what the network says. The federation, the
studies and FLARE know nothing else of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, PrivateAttr
from torch import nn

from fedbn.core.batches import Batch, Samples, TensorSamples
from fedbn.core.networks import head_entries
from fedbn.core.training import Loss, TrainingSettings, forward_inputs
from fedbn.tasks.data import DataError, Index, SiteData, Split, SplitSettings
from fedbn.tasks.loading import Loading
from fedbn.tasks.splits import split_units


class Metric(NamedTuple):
    """A number that scores are condensed to.

    Attributes
    ----------
    name
        As in tables of results.
    title
        As a person reads it.
    higher_is_better
        Its direction.
    in_percent
        Whether a table shows it in %.
    short
        For the head of a narrow column; the title if empty.
    """

    name: str
    title: str
    higher_is_better: bool = True
    in_percent: bool = True
    short: str = ""


class Features(NamedTuple):
    """The network's inputs by name, for a task whose inputs have names.

    Attributes
    ----------
    noun
        What one of them is called: ``"feature"``.
    columns
        What a name is made of, as the columns of a table.
    names
        Of each input, in the order of the network's.
    shown
        Those of the columns that a person reads.
    """

    noun: str
    columns: tuple[str, ...]
    names: tuple[tuple[str, ...], ...]
    shown: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Scores:
    """What a network said of some units: all that is kept, sent and compared.

    Attributes
    ----------
    units
        int64 (n,): the unit of each row, as an index into the site's units.
    columns
        Name to (n,): the target and each class's probability, or a Dice score a class.
    parts
        Rows of the units' samples, where a task scores these too.
    facts
        Numbers that belong to all rows: the threshold, say.
    """

    units: np.ndarray
    columns: Mapping[str, np.ndarray]
    parts: Scores | None = None
    facts: Mapping[str, float] = field(default_factory=dict)

    def level(self, depth: int) -> Scores:
        """Return the rows of the units (0) or of their parts (1), with the facts of all."""
        if depth == 0:
            return self
        assert self.parts is not None
        return replace(self.parts, facts=self.facts)

    def arrays(self, prefix: str = "") -> dict[str, np.ndarray]:
        """Return everything as arrays by name, for a file; see :meth:`from_arrays`."""
        found = {f"{prefix}units": self.units}
        found |= {f"{prefix}column.{name}": values for name, values in self.columns.items()}
        found |= {f"{prefix}fact.{name}": np.array(value) for name, value in self.facts.items()}
        return found | (self.parts.arrays(f"{prefix}parts.") if self.parts else {})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Scores):
            return NotImplemented
        here, there = self.arrays(), other.arrays()
        return here.keys() == there.keys() and all(
            np.array_equal(array, there[name], equal_nan=array.dtype.kind == "f")
            for name, array in here.items()
        )

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], prefix: str = "") -> Scores:
        """Rebuild scores from :meth:`arrays`, also if their names have a prefix in common."""

        def named(kind: str) -> dict[str, np.ndarray]:
            start = f"{prefix}{kind}."
            return {n.removeprefix(start): a for n, a in arrays.items() if n.startswith(start)}

        parts = None
        if f"{prefix}parts.units" in arrays:
            parts = cls.from_arrays(arrays, f"{prefix}parts.")
        facts = {name: float(value) for name, value in named("fact").items()}
        return cls(arrays[f"{prefix}units"], named("column"), parts, facts)


class Task(BaseModel, ABC):
    """What is learned from what, with its settings as fields.

    Attributes
    ----------
    name
        As in an experiment: ``{"task": {"name": "connectome"}}``.
    levels
        What is scored: the unit first, then its samples, if they are scored too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    levels: ClassVar[tuple[str, ...]] = ("subject",)
    _loading: Loading = PrivateAttr(default=Loading())

    def load_as(self, loading: Loading) -> None:
        """Take what a site decides about reading its data; no result depends on it."""
        self._loading = loading

    @property
    @abstractmethod
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics of each level; the first is the headline."""

    @property
    def followed(self) -> tuple[str, ...]:
        """Names of the numbers of :meth:`follow`; the first is the headline."""
        return (f"{self.levels[0]}_{self.metrics[0].name}",)

    # ------------------------------------------------------------------------------- the data

    def has_data(self, place: Path) -> bool:
        """Whether a site's data are at a place, whole or not."""
        return place.exists()

    @abstractmethod
    def read(self, place: Path, site: str, *, verify: bool = False) -> SiteData:
        """Read a site's data.

        Parameters
        ----------
        place
            The site's own folder or file.
        site
            Its name, for messages.
        verify
            Also look at every value, as a site's preflight does.

        Raises
        ------
        DataError
            If they are missing or damaged.
        """

    def describe(self, data: SiteData) -> str:
        """Say how much a site's data are, in a few words."""
        n_samples = sum(unit.n_samples for unit in data.units)
        return f"{len(data.units)} subjects, {n_samples} samples"

    def find(self, given: Path, site: str | None = None) -> Path:
        """Return the place of one site's data: what is given, or the one in the folder given.

        Every command and setting that names data means this.

        Parameters
        ----------
        given
            The data themselves, or the folder above.
        site
            Its name; if ``None``, the folder above must hold the data of one site alone.

        Raises
        ------
        DataError
            If the folder holds the data of none, or of several.
        """
        if site is not None and (self.has_data(given / site) or not self.has_data(given)):
            return given / site
        if self.has_data(given):
            return given
        inside = sorted(given.iterdir()) if given.is_dir() else []
        found = [place for place in inside if self.has_data(place)]
        if len(found) != 1:
            names = ", ".join(place.name for place in found)
            what = f"the data of {len(found)} sites ({names})" if found else "no site's data"
            raise DataError(f"{given} holds {what}; name one site's")
        return found[0]

    def differences(self, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
        """Say in which clauses two signatures differ; empty if the sites can train together."""
        return [
            f"{name} is {a.get(name)!r} and {b.get(name)!r}"
            for name in {**a, **b}
            if a.get(name) != b.get(name)
        ]

    def check_sites(self, signatures: Mapping[str, Mapping[str, Any]]) -> None:
        """See that sites can train together.

        Raises
        ------
        DataError
            Naming two sites and what differs.
        """
        names = list(signatures)
        for name in names[1:]:
            if found := self.differences(signatures[names[0]], signatures[name]):
                raise DataError(
                    f"sites {names[0]!r} and {name!r} cannot train together: {'; '.join(found)}"
                )

    def split(self, data: SiteData, settings: SplitSettings) -> Split:
        """Divide a site's units by fold, training share and validation share.

        Raises
        ------
        DataError
            If they cannot be divided as asked.
        """
        return split_units(data, settings)

    def fit(self, data: SiteData, train: Index) -> dict[str, torch.Tensor]:
        """Fit what stays at the site and precedes the network, on its training units alone."""
        return {}

    @abstractmethod
    def samples(
        self,
        data: SiteData,
        units: Index,
        fitted: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> Samples:
        """Return the samples of some units, ready for a network on a device."""

    def clean_batches(self, samples: Samples, batch_size: int) -> Iterable[Batch]:
        """Go through training samples once in order, not augmented, none alone in a batch."""
        while len(samples) % batch_size == 1 and batch_size < len(samples):
            batch_size += 1
        return samples.batches(batch_size)

    def pooled(self, samples: Sequence[Samples]) -> Samples:
        """Join the samples of several sites, for what a federation exists to avoid.

        Their units are renumbered: each site's stay its own.
        """
        tables = [one for one in samples if isinstance(one, TensorSamples)]
        if len(tables) < len(samples):
            raise ValueError(f"task {self.name!r} cannot train on all sites' samples in one place")
        starts = np.cumsum([0, *(int(one.owners.max()) + 1 for one in tables)])
        return TensorSamples(
            torch.cat([one.inputs for one in tables]),
            torch.cat([one.targets for one in tables]),
            np.concatenate([one.owners + k for one, k in zip(tables, starts, strict=False)]),
        )

    def represented(
        self, name: str, data: Mapping[str, SiteData], train: Mapping[str, Index]
    ) -> dict[str, SiteData]:
        """Return the sites' data in a representation that is fitted on their training units.

        Raises
        ------
        DataError
            If the task has none of this name.
        """
        raise DataError(f"task {self.name!r} has no representation {name!r}")

    def facts(self, data: SiteData, split: Split) -> dict[str, Any]:
        """Return what a report says of a site's data, in aggregate."""
        return {}

    def remarks(self, facts: Mapping[str, Any]) -> list[str]:
        """Say what a person should know of a site's data, from :meth:`facts`."""
        return []

    def feature_names(self, data: SiteData) -> Features | None:
        """Name the network's inputs one by one; ``None`` where they have no names."""
        return None

    def relabelled(self, data: SiteData, order: Index) -> SiteData:
        """Return the data with unit k's class that of unit ``order[k]``, for a label permutation.

        Raises
        ------
        DataError
            If the task cannot do that.
        """
        raise DataError(f"task {self.name!r} cannot deal out the classes of its units anew")

    # ---------------------------------------------------------------------------- the network

    def forward(self, network: nn.Module, batch: Batch) -> Any:
        """Give a batch to the network; scoring may slide a window in place of this."""
        return forward_inputs(network, batch)

    @abstractmethod
    def criterion(self, training: TrainingSettings, samples: Samples) -> Loss:
        """Return the loss of local training; `samples` are those that are trained on."""

    def head(self, network: nn.Module) -> tuple[str, ...]:
        """Name the entries of the output layer."""
        return head_entries(network)

    @abstractmethod
    def check(self, network: nn.Module, name: str, data: SiteData, samples: Samples) -> None:
        """See, before round 0, that the network can take the samples and gives what is scored.

        Raises
        ------
        DataError
            Naming the site, what a sample is, and what the network said.
        """

    def bundling(self) -> Any:
        """Return how complete models are packed and asked, if the task says that itself.

        It is a :class:`fedbn.tasks.bundling.Bundling`, which stands above this module.
        """
        return None

    # ----------------------------------------------------------------------------- the scores

    @abstractmethod
    def score(self, network: nn.Module, samples: Samples) -> Scores:
        """Score a network, in eval mode, on some samples; nothing but the scores is kept."""

    @abstractmethod
    def measure(self, scores: Scores) -> dict[str, dict[str, Any]]:
        """Condense scores: level to metrics, with ``"n"`` and the ``"reasons"`` of a NaN."""

    @abstractmethod
    def follow(self, scores: Scores) -> dict[str, float]:
        """Return the numbers of :attr:`followed`, without a heavy import: for every round."""

    @abstractmethod
    def changed(self, reference: Scores, scores: Scores) -> dict[str, int]:
        """Count units that are ``"corrected"`` or ``"lost"`` from one to the other, of ``"n"``."""

    def decisions(self, train: Scores) -> dict[str, float]:
        """Choose on training units what scores are decided by; facts for the held-out ones."""
        return {}

    def unit_values(self, scores: Scores) -> dict[str, np.ndarray]:
        """Return each unit's value (n,) of the metrics that are means over units, by their names.

        By default those that the scores have a column of.
        """
        names = [metric.name for metric in self.metrics if metric.name in scores.columns]
        return {name: np.asarray(scores.columns[name], dtype=np.float64) for name in names}

    def calibration(self, scores: Scores) -> dict[str, Any] | None:
        """Say how far probabilities are from being so; ``None`` where there are none."""
        return None
