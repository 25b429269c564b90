"""One hospital's part of a round, without any transport.

The FLARE learner and the in-process federation both call this, so that a number does not depend on
what carried the weights. A site takes the shared entries, puts its own local entries beside them,
scores, trains, scores again, and gives both parts back. What the data are, and what a score is, is
the task's affair.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from fedbn.core import control_variates
from fedbn.core.batches import Samples
from fedbn.core.networks import build_network
from fedbn.core.normalization import (
    Partition,
    check_entries,
    entries,
    load_entries,
    recomputable,
    recompute_in_batches,
    require_batch_norm,
    split,
    trainable_names,
)
from fedbn.core.training import TrainingOutcome, TrainingSettings, derive_seed, train_epochs
from fedbn.federation.experiment import Experiment
from fedbn.tasks.base import Scores
from fedbn.tasks.data import DataError, SiteData, Split

FITTED = "fitted."
"""Prefix, in a file, of what a task fitted on a site's training units."""

_FITTED_0_1 = "standardization."

OF_THE_SITE_ALONE = ("store", "stamp")
"""Facts of a preparation that tell its data from others, and that no report holds."""

TEST, VALIDATION = "test", "validation"
"""Parts of the units that are scored."""


@dataclass(frozen=True)
class Preparation:
    """What is fixed once at a site, before the first round.

    Attributes
    ----------
    split
        Who is trained on, judges the rounds, and is held out.
    fitted
        What the task fitted on the training units, such as a mean and a standard deviation.
    facts
        Counts and the fingerprint of the data, JSON-able, without an id or a path.
    """

    split: Split
    fitted: dict[str, torch.Tensor]
    facts: dict[str, Any]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, for a state file."""
        units = {name: torch.from_numpy(part) for name, part in self.split._asdict().items()}
        return units | {f"{FITTED}{name}": tensor for name, tensor in self.fitted.items()}

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any], data: SiteData
    ) -> Preparation:
        """Rebuild it from :meth:`tensors`, or from those that version 0.1 kept.

        That version kept the rows of samples, and a fingerprint of when a file was written.
        """
        if "train_rows" in tensors:
            owners = np.repeat(np.arange(len(data.units)), [u.n_samples for u in data.units])
            train, test = (np.unique(owners[tensors[f"{k}_rows"].numpy()]) for k in ("train", TEST))
            fitted = {name: tensors[name] for name in tensors if not name.endswith("_rows")}
            facts = {**facts, "store": data.fingerprint()}
            return cls(Split(train, np.empty(0, np.int64), test), fitted, facts)
        fitted = {k.removeprefix(FITTED): v for k, v in tensors.items() if k.startswith(FITTED)}
        return cls(Split(*(tensors[name].numpy() for name in Split._fields)), fitted, dict(facts))


def split_fitted(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Divide the tensors of a complete model into the network's entries and what a task fitted."""
    network, fitted = {}, {}
    for name, tensor in tensors.items():
        prefix = next((p for p in (FITTED, _FITTED_0_1) if name.startswith(p)), None)
        if prefix is None:
            network[name] = tensor
        else:
            fitted[name.removeprefix(prefix)] = tensor
    return network, fitted


@dataclass(frozen=True)
class LocalTraining:
    """What one site has after the local epochs of one round.

    Attributes
    ----------
    shared, local
        The network's entries after local training, on the CPU: those to send and those to keep.
        Under SCAFFOLD both also hold the site's control variate.
    outcome
        Losses and counts of the local training.
    training_seconds
        Wall time of the local epochs alone.
    """

    shared: dict[str, torch.Tensor]
    local: dict[str, torch.Tensor]
    outcome: TrainingOutcome
    training_seconds: float


@dataclass(frozen=True)
class RoundResult(LocalTraining):
    """What one site brings out of one round: its local training, and how well it did around it.

    Attributes
    ----------
    before, after
        Scores of each part of the units that is scored in every round: with the received shared
        entries and the site's own local ones before any training, and after it.
    """

    before: dict[str, Scores]
    after: dict[str, Scores]


class Site:
    """A site's data and network in memory.

    Parameters
    ----------
    name
        The site, as in the experiment.
    data
        Its data, as the experiment's task has read them.
    experiment
        What to train, and how.
    device
        Where to train; decided by the caller.
    preparation
        From an earlier :func:`prepare`; without it one is made.

    Raises
    ------
    fedbn.tasks.data.DataError
        If the data are not this site's, cannot be split as asked, or do not fit the network.
    fedbn.core.normalization.NoBatchNormError
        If the policy needs batch norm and the network has none.
    """

    def __init__(
        self,
        name: str,
        data: SiteData,
        experiment: Experiment,
        *,
        device: torch.device | str = "cpu",
        preparation: Preparation | None = None,
    ):
        self.name = name
        self.data = data
        self.experiment = experiment
        self.task = experiment.task
        self.device = torch.device(device)
        self.network, self.partition = make_network(experiment)
        self.network.to(self.device)
        uses_variates = experiment.algorithm.name == "scaffold"
        self.controlled = (
            trainable_names(self.network, self.partition.shared) if uses_variates else ()
        )
        self.head = self.task.head(self.network) if _tunes_head(experiment) else None
        self.preparation = preparation or prepare(name, data, experiment)
        if self.preparation.facts["store"] != data.fingerprint():
            raise DataError(
                f"site {name!r}: the store has changed since this job began; "
                "restore it, or start a new job"
            )

    def initial_local(self) -> dict[str, torch.Tensor]:
        """Return the local entries of the untrained network, the same at every site."""
        network, partition = make_network(self.experiment)
        return self._with_variates(entries(network, partition.local))

    def initial_shared(self) -> dict[str, torch.Tensor]:
        """Return the shared entries of the untrained network, the same as the server's."""
        network, partition = make_network(self.experiment)
        return self._with_variates(entries(network, partition.shared))

    def check_network(self) -> None:
        """Run some test samples through the network, so that a misfit is found before round 0.

        Raises
        ------
        fedbn.tasks.data.DataError
            Naming the site, what a sample is, and what the network said.
        """
        self.task.check(self.network, self.experiment.network.name, self.data, self.test)

    @cached_property
    def train_samples(self) -> Samples:
        """The training units' samples, ready for the network on its device."""
        return self._samples(self.preparation.split.train)

    @cached_property
    def test(self) -> Samples:
        """The held-out units' samples."""
        return self._samples(self.preparation.split.test)

    @cached_property
    def scored_in_rounds(self) -> dict[str, Samples]:
        """The parts of the units that every round is scored on; the first one judges it."""
        parts = {}
        if len(self.preparation.split.validation):
            parts[VALIDATION] = self._samples(self.preparation.split.validation)
        return parts | ({TEST: self.test} if self.experiment.test_curve else {})

    def _samples(self, units: np.ndarray) -> Samples:
        return self.task.samples(self.data, units, self.preparation.fitted, self.device)

    def train_round(
        self,
        shared: Mapping[str, torch.Tensor],
        local: Mapping[str, torch.Tensor],
        round_number: int,
        on_epoch: Callable[[int, float], None] | None = None,
    ) -> RoundResult:
        """Do this site's part of one round: score, train, score again.

        Parameters are those of :meth:`train`.
        """
        self.load(shared, local)
        before = self._score_round()
        trained = self.train(shared, local, round_number, on_epoch)
        after = self._score_round()
        return RoundResult(**vars(trained), before=before, after=after)

    def train(
        self,
        shared: Mapping[str, torch.Tensor],
        local: Mapping[str, torch.Tensor],
        round_number: int,
        on_epoch: Callable[[int, float], None] | None = None,
        *,
        proximal: bool = True,
    ) -> LocalTraining:
        """Do the local epochs of one round; the same bits with and without scores around them.

        Parameters
        ----------
        shared
            Entries received from the server.
        local
            The site's own entries, as it kept them after its last round.
        round_number
            Counts from 0; with the seed and the site's name it decides the order of the batches.
        on_epoch
            Called with the epoch and its loss.
        proximal
            Whether the experiment's FedProx term applies; it has no meaning without other sites.
        """
        self.load(shared, local)
        variates = self._variates(shared, local)
        training = self.experiment.training
        if not proximal:
            training = training.model_copy(update={"proximal_mu": 0.0})
        started = time.perf_counter()
        outcome = self._train_epochs(
            training,
            seed=derive_seed(self.experiment.seed, self.name, round_number, "train"),
            shared_names=set(self.partition.shared) - set(self.partition.batch_norm),
            correction=variates and control_variates.correction(*variates),
            on_epoch=on_epoch,
        )
        training_seconds = time.perf_counter() - started
        to_send = entries(self.network, self.partition.shared)
        to_keep = entries(self.network, self.partition.local)
        if variates:
            server, own = variates
            own = control_variates.updated(
                own,
                server,
                shared,
                to_send,
                n_steps=outcome.n_steps,
                learning_rate=training.learning_rate,
            )
            to_send = control_variates.join(to_send, own)
            to_keep = control_variates.join(to_keep, own)
        return LocalTraining(
            shared=to_send,
            local=to_keep,
            outcome=outcome,
            training_seconds=training_seconds,
        )

    def evaluate(
        self, shared: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor]
    ) -> Scores:
        """Return the scores of the held-out units with these entries."""
        self.load(shared, local)
        return self.score()

    def score(self) -> Scores:
        """Return the scores of the held-out units with the network as it stands.

        Where the experiment says so, batch norm's statistics are recomputed first, and stay.
        """
        if self.experiment.statistics == "recomputed":
            self.recompute_statistics()
        return self.task.score(self.network, self.test)

    def recompute_statistics(self) -> None:
        """Replace batch norm's statistics by those of the site's own training samples."""
        size = self.experiment.training.batch_size
        batches = self.task.clean_batches(self.train_samples, size)
        recompute_in_batches(self.network, batches, self.task.forward, self.partition.layers)

    def judged(
        self, shared: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor]
    ) -> dict[str, float]:
        """Return what is followed on the validation units with these entries."""
        self.load(shared, local)
        validation = self.scored_in_rounds[VALIDATION]
        return self.task.follow(self.task.score(self.network, validation))

    def _score_round(self) -> dict[str, Scores]:
        parts = self.scored_in_rounds.items()
        return {name: self.task.score(self.network, samples) for name, samples in parts}

    def load(self, shared: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor]) -> None:
        """Put received entries and the site's own into the network."""
        load_entries(self.network, self.network_entries(shared), self.network_entries(local))

    def network_entries(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return those of the tensors that are the network's, without control variates."""
        return control_variates.separate(tensors)[0] if self.controlled else tensors

    def _train_epochs(self, training: TrainingSettings, **more: Any) -> TrainingOutcome:
        samples = self.train_samples
        loss = self.task.criterion(training, samples)
        return train_epochs(
            self.network, samples, training, loss=loss, forward=self.task.forward, **more
        )

    def finetune(self, on_epoch: Callable[[int, float], None] | None = None) -> Scores:
        """Train the network as it stands for the experiment's further epochs, and score it.

        Neither the FedProx term nor a control variate takes part: there are no other sites here.

        Returns
        -------
        Scores
            Of the held-out units, afterwards.
        """
        settings = self.experiment.finetune
        if settings is None:
            raise ValueError(f"experiment {self.experiment.name!r} has no finetune settings")
        changes = {"local_epochs": settings.epochs, "proximal_mu": 0.0}
        self._train_epochs(
            self.experiment.training.model_copy(update=changes),
            seed=derive_seed(self.experiment.seed, self.name, "finetune"),
            only=self.head,
            on_epoch=on_epoch,
        )
        return self.score()

    def train_alone(self, on_round: Callable[[int], None] | None = None) -> Scores:
        """Train the same network on this site only, as often as in the federation, and score it.

        Each round's entries are its own of the round before: no other site takes part. This is the
        SingleSet baseline, from the same initial weights, with the same order of batches.

        Returns
        -------
        Scores
            Of the held-out units, after the last round.
        """
        shared, local = self.initial_shared(), self.initial_local()
        for round_number in range(self.experiment.rounds):
            trained = self.train(shared, local, round_number, proximal=False)
            shared, local = trained.shared, trained.local
            if on_round is not None:
                on_round(round_number)
        return self.score()

    def complete_model(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the network as it stands, with all that it needs to predict, to be kept here.

        Returns
        -------
        tensors, facts
            Every entry of the network, and what the task fitted; and how to build the network, what
            is learned, and what its samples must be.
        """
        names = [*self.partition.shared, *self.partition.local]
        first = next(iter(self.test.batches(1))).inputs
        fitted = {f"{FITTED}{name}": value for name, value in self.preparation.fitted.items()}
        facts = {
            "task": self.task.model_dump(),
            "network": self.experiment.network.model_dump(),
            "policy": self.experiment.policy,
            "local entries": list(self.partition.local),
            "signature": self.data.signature(),
            "sample shape": list(first.shape[1:]) if isinstance(first, torch.Tensor) else None,
        }
        return entries(self.network, names) | fitted, facts

    def _with_variates(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Add the control variates of the start, where the algorithm has them."""
        zeros = control_variates.zeros(self.network.state_dict(), self.controlled)
        return control_variates.join(tensors, zeros)

    def _variates(
        self, shared: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] | None:
        """Return the server's and the site's control variates, or ``None`` without them."""
        if not self.controlled:
            return None
        state = entries(self.network, self.controlled)
        (_, server), (_, own) = (control_variates.separate(tensors) for tensors in (shared, local))
        check_entries(server, state, "the server's control variates")
        check_entries(own, state, "the site's control variates")
        return server, own


def make_network(experiment: Experiment) -> tuple[nn.Module, Partition]:
    """Build the experiment's network with its initial weights, and split its entries.

    Under algorithm ``"alone"`` every entry stays at the site.

    Raises
    ------
    fedbn.core.normalization.NoBatchNormError
        If the policy needs batch norm and the network has none.
    """
    settings = experiment.network
    network = build_network(settings.name, settings.args, experiment.seed)
    partition = split(network, experiment.policy, types=experiment.batch_norm_types)
    require_batch_norm(network, partition)
    if experiment.statistics == "recomputed":
        recomputable(network, partition.layers)
    if experiment.algorithm.name == "alone":
        partition = replace(partition, local=tuple(network.state_dict()), shared=())
    return network, partition


def _tunes_head(experiment: Experiment) -> bool:
    return experiment.finetune is not None and experiment.finetune.entries == "head"


def prepare(name: str, data: SiteData, experiment: Experiment) -> Preparation:
    """Split a site's units and fit what precedes the network on the training ones.

    Raises
    ------
    fedbn.tasks.data.DataError
        If the data are another site's, or their units cannot be split as asked.
    """
    if data.site != name:
        raise DataError(f"site {name!r}: its store holds the data of site {data.site!r}")
    task = experiment.task
    split = task.split(data, experiment)
    n_samples = np.array([unit.n_samples for unit in data.units])
    counts: dict[str, int] = {}
    for part, units in split._asdict().items():
        if len(units) or part != VALIDATION:
            counts[f"n_{part}_subjects"] = len(units)
            counts[f"n_{part}_samples"] = int(n_samples[units].sum())
    facts = {
        "store": data.fingerprint(),
        "stamp": data.stamp(),
        "synthetic": bool(data.synthetic),
        **counts,
        **task.facts(data, split),
    }
    return Preparation(split, task.fit(data, split.train), facts)
