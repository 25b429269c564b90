"""One hospital's part of a round, without any transport.

The FLARE learner and the in-process federation both call this, so that a number does not depend on
what carried the weights. A site takes the shared entries, puts its own local entries beside them,
scores the test subjects, trains, scores again, and gives both parts back.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from data_prep.site_store import SiteStore, StoreError, assign_folds
from fedbn.core import control_variates
from fedbn.core.networks import build_network, head_entries
from fedbn.core.normalization import (
    Partition,
    check_entries,
    entries,
    load_entries,
    require_batch_norm,
    split,
    trainable_names,
)
from fedbn.core.training import TrainingOutcome, derive_seed, train_epochs
from fedbn.federation.experiment import Experiment
from fedbn.tasks import evaluation

MIN_TRAINING_SUBJECTS = 4
"""Fewer training subjects than this cannot fit a batch norm that means anything."""

_CHUNK = 512


@dataclass(frozen=True)
class Preparation:
    """What is fitted once at a site, on its training subjects only, before the first round.

    Attributes
    ----------
    train_rows, test_rows
        int64, rows of the store's connectomes.
    mean, std
        float32, (n_edges,): of the training rows; zeros and ones without standardisation. An edge
        that does not vary has a standard deviation of 1.
    facts
        Counts and the fingerprint of the store, JSON-able, without a subject id or path.
    """

    train_rows: torch.Tensor
    test_rows: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor
    facts: dict[str, Any]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, for a state file."""
        return {
            "train_rows": self.train_rows,
            "test_rows": self.test_rows,
            "mean": self.mean,
            "std": self.std,
        }


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
        Class probabilities (n_test, n_classes) of the test samples: with the received shared
        entries and the site's own local ones before any training, and after it.
    """

    before: np.ndarray
    after: np.ndarray


class Site:
    """A site's data and network in memory.

    Parameters
    ----------
    name
        The site, as in the experiment.
    store
        Its connectomes.
    experiment
        What to train, and how.
    device
        Where to train; decided by the caller.
    preparation
        From an earlier :meth:`prepare`; without it one is made.

    Raises
    ------
    data_prep.site_store.StoreError
        If the store is not this site's, has one class only, too few subjects, or does not fit the
        network.
    fedbn.core.normalization.NoBatchNormError
        If the policy needs batch norm and the network has none.
    """

    def __init__(
        self,
        name: str,
        store: SiteStore,
        experiment: Experiment,
        *,
        device: torch.device | str = "cpu",
        preparation: Preparation | None = None,
    ):
        self.name = name
        self.store = store
        self.experiment = experiment
        self.device = torch.device(device)
        self.network, self.partition = make_network(experiment)
        self.network.to(self.device)
        uses_variates = experiment.algorithm.name == "scaffold"
        self.controlled = (
            trainable_names(self.network, self.partition.shared) if uses_variates else ()
        )
        self.head = head_entries(self.network) if _tunes_head(experiment) else None
        self.preparation = preparation or prepare(name, store, experiment)
        if self.preparation.facts["store"] != store_fingerprint(store):
            raise StoreError(
                f"site {name!r}: the store has changed since this job began; "
                "restore it, or start a new job"
            )
        self._train: tuple[torch.Tensor, torch.Tensor] | None = None
        self._test_inputs: torch.Tensor | None = None
        participants = store.sample_participant[self.preparation.test_rows.numpy()]
        self.test_participants = participants
        self.test_targets = store.labels[participants]

    def initial_local(self) -> dict[str, torch.Tensor]:
        """Return the local entries of the untrained network, the same at every site."""
        network, partition = make_network(self.experiment)
        return self._with_variates(entries(network, partition.local))

    def initial_shared(self) -> dict[str, torch.Tensor]:
        """Return the shared entries of the untrained network, the same as the server's."""
        network, partition = make_network(self.experiment)
        return self._with_variates(entries(network, partition.shared))

    def check_network(self) -> None:
        """Run two test samples through the network, so that a misfit is found before round 0.

        Raises
        ------
        data_prep.site_store.StoreError
            Naming the site, what a sample of the store is, and what the network said.
        """
        name = self.experiment.network.name
        try:
            probability = evaluation.predict(self.network, self.test_inputs[:2])
        except Exception as error:
            raise StoreError(
                f"site {self.name!r}: network {name} cannot take the store's samples of "
                f"{self.store.n_edges} edges: {error}"
            ) from error
        if probability.shape[1] != 2:
            raise StoreError(
                f"site {self.name!r}: network {name} has {probability.shape[1]} outputs, "
                "but there are 2 classes (control, autism)"
            )

    @property
    def test_inputs(self) -> torch.Tensor:
        """Standardised test samples on the device, (n_test, n_edges) float32; read once."""
        if self._test_inputs is None:
            self._test_inputs = self._inputs(self.preparation.test_rows)
        return self._test_inputs

    @property
    def training_data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Standardised training samples and their classes on the device; read once."""
        if self._train is None:
            rows = self.preparation.train_rows
            labels = self.store.labels[self.store.sample_participant[rows.numpy()]]
            self._train = (self._inputs(rows), torch.from_numpy(labels).to(self.device))
        return self._train

    def train_round(
        self,
        shared: Mapping[str, torch.Tensor],
        local: Mapping[str, torch.Tensor],
        round_number: int,
        on_epoch: Callable[[int, float], None] | None = None,
    ) -> RoundResult:
        """Do this site's part of one round: score the test samples, train, score them again.

        Parameters are those of :meth:`train`.
        """
        before = self.evaluate(shared, local)
        trained = self.train(shared, local, round_number, on_epoch)
        after = evaluation.predict(self.network, self.test_inputs)
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
        inputs, targets = self.training_data
        training = self.experiment.training
        if not proximal:
            training = training.model_copy(update={"proximal_mu": 0.0})
        started = time.perf_counter()
        outcome = train_epochs(
            self.network,
            inputs,
            targets,
            training,
            seed=derive_seed(self.experiment.seed, self.name, round_number, "train"),
            shared_names=self.partition.shared,
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
    ) -> np.ndarray:
        """Return the class probabilities of the test samples with these entries."""
        self.load(shared, local)
        return evaluation.predict(self.network, self.test_inputs)

    def load(self, shared: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor]) -> None:
        """Put received entries and the site's own into the network."""
        load_entries(self.network, self.network_entries(shared), self.network_entries(local))

    def network_entries(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return those of the tensors that are the network's, without control variates."""
        return control_variates.separate(tensors)[0] if self.controlled else tensors

    def finetune(self, on_epoch: Callable[[int, float], None] | None = None) -> np.ndarray:
        """Train the network as it stands for the experiment's further epochs, and score it.

        Neither the FedProx term nor a control variate takes part: there are no other sites here.

        Returns
        -------
        numpy.ndarray
            Class probabilities (n_test, n_classes) afterwards.
        """
        settings = self.experiment.finetune
        if settings is None:
            raise ValueError(f"experiment {self.experiment.name!r} has no finetune settings")
        changes = {"local_epochs": settings.epochs, "proximal_mu": 0.0}
        inputs, targets = self.training_data
        train_epochs(
            self.network,
            inputs,
            targets,
            self.experiment.training.model_copy(update=changes),
            seed=derive_seed(self.experiment.seed, self.name, "finetune"),
            only=self.head,
            on_epoch=on_epoch,
        )
        return evaluation.predict(self.network, self.test_inputs)

    def train_alone(self, on_round: Callable[[int], None] | None = None) -> np.ndarray:
        """Train the same network on this site only, as often as in the federation, and score it.

        Each round's entries are its own of the round before: no other site takes part. This is the
        SingleSet baseline, from the same initial weights, with the same order of batches.

        Returns
        -------
        numpy.ndarray
            Class probabilities (n_test, n_classes) after the last round.
        """
        shared, local = self.initial_shared(), self.initial_local()
        for round_number in range(self.experiment.rounds):
            trained = self.train(shared, local, round_number, proximal=False)
            shared, local = trained.shared, trained.local
            if on_round is not None:
                on_round(round_number)
        return evaluation.predict(self.network, self.test_inputs)

    def complete_model(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the network as it stands, with all that it needs to predict, to be kept here.

        Returns
        -------
        tensors, facts
            Every entry of the network, and the standardisation; and how to build the network, what
            its classes are, and what its samples must be.
        """
        tensors = {
            **entries(self.network, [*self.partition.shared, *self.partition.local]),
            "standardization.mean": self.preparation.mean,
            "standardization.std": self.preparation.std,
        }
        facts = {
            "network": self.experiment.network.model_dump(),
            "policy": self.experiment.policy,
            "local entries": list(self.partition.local),
            "classes": ["control", "autism"],
            "signature": self.store.signature(),
        }
        return tensors, facts

    def metrics(self, probability: np.ndarray) -> dict[str, dict[str, Any]]:
        """Score test predictions per window and per subject."""
        return evaluation.evaluate_site(self.test_targets, probability, self.test_participants)

    def quick_metrics(self, probability: np.ndarray) -> dict[str, float]:
        """Score test predictions by accuracy and cross entropy alone, at no import's cost."""
        return evaluation.quick_accuracy(self.test_targets, probability, self.test_participants)

    def subjects_changed(self, reference: np.ndarray, probability: np.ndarray) -> dict[str, int]:
        """Count test subjects by what a second model does better or worse than a first.

        Returns
        -------
        dict
            ``"corrected"``: wrong with the first and right with the second; ``"lost"``: the other
            way round; ``"n"``: all test subjects.
        """
        targets, _ = evaluation.subject_scores(self.test_targets, self.test_participants)
        right = []
        for values in (reference, probability):
            scores, _ = evaluation.subject_scores(values[:, 1], self.test_participants)
            right.append((scores >= 0.5) == (targets == 1))
        return {
            "corrected": int((~right[0] & right[1]).sum()),
            "lost": int((right[0] & ~right[1]).sum()),
            "n": len(targets),
        }

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

    def _inputs(self, rows: torch.Tensor) -> torch.Tensor:
        """Read rows of the store into one contiguous, standardised tensor on the device."""
        inputs = torch.empty((len(rows), self.store.n_edges), dtype=torch.float32)
        mean, std = self.preparation.mean, self.preparation.std
        for start in range(0, len(rows), _CHUNK):
            chunk = rows[start : start + _CHUNK].numpy()
            block = inputs[start : start + len(chunk)]
            np.take(self.store.connectomes, chunk, axis=0, out=block.numpy())
            if self.experiment.standardization == "site":
                block.sub_(mean).div_(std)
        return inputs.to(self.device)


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
    partition = split(network, experiment.policy)
    require_batch_norm(network, partition)
    if experiment.algorithm.name == "alone":
        partition = replace(partition, local=tuple(network.state_dict()), shared=())
    return network, partition


def _tunes_head(experiment: Experiment) -> bool:
    return experiment.finetune is not None and experiment.finetune.entries == "head"


def prepare(name: str, store: SiteStore, experiment: Experiment) -> Preparation:
    """Split a site's subjects and fit its standardisation on the training ones.

    Raises
    ------
    data_prep.site_store.StoreError
        If the store is another site's, or its subjects cannot be split as asked.
    """
    if store.site != name:
        raise StoreError(f"site {name!r}: its store holds the data of site {store.site!r}")
    folds = _folds(name, store, experiment)
    in_test = folds == experiment.fold
    in_train = _training_subjects(name, store, experiment, ~in_test)
    n_train = int(in_train.sum())
    if n_train < MIN_TRAINING_SUBJECTS:
        raise StoreError(
            f"site {name!r}: {n_train} training subjects of {len(folds)} are too few to train "
            f"on, at least {MIN_TRAINING_SUBJECTS} are needed"
        )
    trained = np.unique(store.labels[in_train])
    if len(trained) < 2:
        raise StoreError(
            f"site {name!r}: all {n_train} training subjects are of the diagnosis "
            f"{('control', 'autism')[trained[0]]!r}; training needs both"
        )
    test_sample = in_test[store.sample_participant]
    train_rows = np.flatnonzero(in_train[store.sample_participant])
    test_rows = np.flatnonzero(test_sample)
    evaluation.assert_disjoint_subjects(
        np.unique(store.sample_participant[train_rows]),
        np.unique(store.sample_participant[test_rows]),
    )
    if experiment.standardization == "site":
        mean, std = mean_and_std(store, train_rows)
    else:
        mean, std = np.zeros(store.n_edges), np.ones(store.n_edges)
    labels = store.labels
    facts = {
        "store": store_fingerprint(store),
        "synthetic": bool(store.is_synthetic),
        "n_train_subjects": n_train,
        "n_test_subjects": int(in_test.sum()),
        "n_train_samples": len(train_rows),
        "n_test_samples": len(test_rows),
        "autism_share_train": float(labels[in_train].mean()),
        "autism_share_test": float(labels[in_test].mean()),
    }
    return Preparation(
        train_rows=torch.from_numpy(train_rows),
        test_rows=torch.from_numpy(test_rows),
        mean=torch.from_numpy(mean.astype(np.float32)),
        std=torch.from_numpy(std.astype(np.float32)),
        facts=facts,
    )


def store_fingerprint(store: SiteStore) -> str:
    """Return a digest of the store's description, and of when and how large its array was written.

    The description holds the checksums of all files as they were written; that they still are so
    is too slow to see before every round.
    """
    content = (store.path / "dataset_description.json").read_bytes()
    array = (store.path / "connectomes.npy").stat()
    content += f"\n{array.st_size} {array.st_mtime_ns}".encode()
    return hashlib.sha256(content).hexdigest()[:16]


def _folds(name: str, store: SiteStore, experiment: Experiment) -> np.ndarray:
    """Return each subject's fold: the store's own where it fixed them, else from the seed."""
    fixed = [participant.fold for participant in store.participants]
    if all(fold is None for fold in fixed):
        return assign_folds(
            [participant.participant_id for participant in store.participants],
            [participant.diagnosis for participant in store.participants],
            experiment.n_folds,
            experiment.seed,
            site=name,
        )
    folds = np.array([-1 if fold is None else fold for fold in fixed])
    held_out = (store.description.get("folds") or {}).get("held_out")
    if set(folds) != set(range(experiment.n_folds)) or held_out not in (None, experiment.fold):
        made_for = f"{folds.max() + 1} folds"
        if held_out is not None:
            made_for = f"fold {held_out} of {folds.max() + 1}"
        if -1 in folds:
            made_for += f" and {int((folds == -1).sum())} subjects in none"
        raise StoreError(
            f"site {name!r}: its store was made for {made_for}, but the experiment asks for fold "
            f"{experiment.fold} of {experiment.n_folds}; prepare the store again for this fold"
        )
    return folds


def _training_subjects(
    name: str, store: SiteStore, experiment: Experiment, available: np.ndarray
) -> np.ndarray:
    """Draw the subjects to train on from those of the training folds, (n_subjects,) bool.

    Of each diagnosis the first ones of a shuffled order are taken, so that a smaller share is a
    part of a larger one. The order depends on the seed, the fold, the site's name and the ids of
    its training subjects alone.

    Raises
    ------
    data_prep.site_store.StoreError
        If a diagnosis would vanish, or too few subjects would be left.
    """
    share = experiment.training_share_of(name)
    if share == 1:
        return available
    seed = derive_seed(experiment.seed, name, experiment.fold, "training share")
    generator = np.random.default_rng(seed)
    by_id = sorted(np.flatnonzero(available), key=lambda k: store.participants[k].participant_id)
    taken = np.zeros_like(available)
    for label, diagnosis in enumerate(("control", "autism")):
        of_class = [k for k in by_id if store.labels[k] == label]
        members = generator.permutation(np.array(of_class, dtype=np.int64))
        n_taken = int(share * len(members) + 0.5)
        if len(members) and not n_taken:
            raise StoreError(
                f"site {name!r}: training_share {share:g} leaves none of its {len(members)} "
                f"training subjects of the diagnosis {diagnosis!r}; give a larger share"
            )
        taken[members[:n_taken]] = True
    if taken.sum() < MIN_TRAINING_SUBJECTS:
        raise StoreError(
            f"site {name!r}: training_share {share:g} leaves {taken.sum()} of "
            f"{available.sum()} training subjects, at least {MIN_TRAINING_SUBJECTS} are needed; "
            "give a larger share"
        )
    return taken


def mean_and_std(store: SiteStore, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each feature, in float64, a chunk of rows at a time."""
    chunks = [rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK)]
    total = np.zeros(store.n_edges)
    for chunk in chunks:
        total += np.sum(store.connectomes[chunk], axis=0, dtype=np.float64)
    mean = total / len(rows)
    squares = np.zeros(store.n_edges)
    for chunk in chunks:
        deviation = store.connectomes[chunk] - mean
        squares += np.einsum("ij,ij->j", deviation, deviation)
    std = np.sqrt(squares / len(rows))
    std[std < 1e-6] = 1.0
    return mean, std
