"""What a comparison compares: methods, seeds and folds, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedbn.core.networks import build_network, head_entries
from fedbn.federation.experiment import Experiment
from fedbn.federation.site import make_network
from fedbn.study.methods import method
from fedbn.tasks.base import Task
from fedbn.tasks.classification import ClassificationTask


class ComparisonError(ValueError):
    """A comparison that cannot be planned or continued; one sentence."""


@dataclass(frozen=True)
class Run:
    """One unit of work: a method on one fold of one seed."""

    method: str
    seed: int
    fold: int

    def __str__(self) -> str:
        return f"method {self.method}, seed {self.seed}, fold {self.fold}"


@dataclass(frozen=True)
class Plan:
    """What is compared.

    Attributes
    ----------
    experiment
        What all methods have in common; its seed, fold and policy are replaced.
    methods
        Names, in the order of the tables.
    n_seeds
        Seeds 0 to ``n_seeds - 1``.
    reference
        The method that the others are subtracted from.
    target_loss
        A training loss whose first round is looked for; ``None`` for the one that the reference
        has at its last round, in each seed and fold.
    """

    experiment: Experiment
    methods: tuple[str, ...]
    n_seeds: int
    reference: str
    target_loss: float | None = None

    @property
    def runs(self) -> list[Run]:
        """All units of work, method by method within each fold of each seed."""
        return [
            Run(name, seed, fold)
            for seed in range(self.n_seeds)
            for fold in range(self.experiment.n_folds)
            for name in self.methods
        ]

    @property
    def task(self) -> Task:
        """What all methods learn."""
        return self.experiment.task

    def experiment_of(self, run: Run) -> Experiment:
        """Return the experiment of one unit of work, its sites in the order of their names."""
        common = self.experiment.changed(
            seed=run.seed, fold=run.fold, sites=tuple(sorted(self.experiment.sites))
        )
        return method(run.method).experiment(common)


def _check_task(name: str, task: Task) -> None:
    """Refuse a method that the task has no place for."""
    n_classes = len(task.class_names) if isinstance(task, ClassificationTask) else 0
    fits = {"": True, "classes": n_classes > 1, "two classes": n_classes == 2}
    if not fits[needs := method(name).needs]:
        has = f"{n_classes} classes" if n_classes else "none"
        raise ComparisonError(f"method {name} needs {needs}, but task {task.name!r} has {has}")


def plan_comparison(
    experiment: Experiment,
    methods: Sequence[str],
    n_seeds: int,
    reference: str | None = None,
    *,
    target_loss: float | None = None,
) -> Plan:
    """Check what is asked for, before anything runs.

    Parameters
    ----------
    experiment
        What all methods have in common.
    methods
        Two or more of :data:`fedbn.study.methods.METHODS`, or one alone for its table.
    n_seeds
        Repetitions, each with its own folds.
    reference
        One of `methods`; by default ``"fedavg"`` if it is among them, and otherwise the first.
    target_loss
        As in :class:`Plan`, above 0.

    Raises
    ------
    ValueError
        If a method is unknown, named twice or not for the task, there is no repetition, or the
        experiment's network cannot be built or is not for one of the methods.
    """
    for name in methods:
        method(name)
    twice = [name for k, name in enumerate(methods) if name in methods[:k]]
    if twice:
        raise ComparisonError(f"method {twice[0]!r} is named twice")
    if not methods:
        raise ComparisonError("there is no method to compare")
    if n_seeds < 1:
        raise ComparisonError(f"seeds is {n_seeds}; it must be at least 1")
    if reference is None:
        reference = "fedavg" if "fedavg" in methods else methods[0]
    if reference not in methods:
        raise ComparisonError(
            f"reference {reference!r} is not among the methods ({', '.join(methods)})"
        )
    if target_loss is not None and not 0 < target_loss < math.inf:
        raise ComparisonError(f"target loss is {target_loss:g}; it must be a number above 0")
    for name in methods:
        _check_task(name, experiment.task)
    plan = Plan(experiment, tuple(methods), n_seeds, reference, target_loss)
    build_network(experiment.network.name, experiment.network.args, experiment.seed)
    for name in methods:
        settings = plan.experiment_of(Run(name, 0, 0))
        try:
            network, _ = make_network(settings)
            if settings.finetune is not None and settings.finetune.entries == "head":
                head_entries(network)
        except ValueError as error:
            raise ComparisonError(f"method {name}: {error}") from error
    return plan
