"""What a method is: a change of the experiment, a way to run it, and what that leaves at a site."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedbn.federation.experiment import Experiment
from fedbn.federation.simulation import Federation, federate
from fedbn.tasks.base import Scores
from fedbn.tasks.data import SiteData


@dataclass(frozen=True)
class Outcome:
    """What one run of a method leaves at one site.

    Attributes
    ----------
    test, train
        Scores of the held-out and of the training units, with the facts that they are decided by.
    after_training
        Of a federated method that ends with the averaged weights: the same for the site's network
        as its local epochs of the last round left it, before the last averaging.
    training_loss
        Of such a method: the training loss of each local epoch of each round.
    facts
        Of a method that chooses among candidates: what it chose, and by which scores.
    """

    test: Scores
    train: Scores
    after_training: Outcome | None = None
    training_loss: list[list[float]] | None = None
    facts: dict[str, Any] | None = None


Runner = Callable[[Experiment, Mapping[str, SiteData]], dict[str, Outcome]]
Finish = Callable[[Federation, Experiment], dict[str, Outcome]]


@dataclass(frozen=True)
class FederatedRunner:
    """Runs a federation, and makes of it what the method leaves at each site.

    Methods that differ in the second step alone can have the first one in common: a federation is
    the same whatever is made of it afterwards.

    Attributes
    ----------
    finish
        Federation and experiment to one outcome a site. It loads the entries that it needs, and so
        depends on nothing that another one has done to the sites' networks.
    """

    finish: Finish

    def __call__(self, experiment: Experiment, data: Mapping[str, SiteData]) -> dict[str, Outcome]:
        """Run both steps."""
        return self.finish(self.train(experiment, data), experiment)

    @staticmethod
    def train(experiment: Experiment, data: Mapping[str, SiteData]) -> Federation:
        """Run the federation, as far as methods can have it in common."""
        return federate(FederatedRunner.common(experiment), data, score_rounds=False)

    @staticmethod
    def common(experiment: Experiment) -> Experiment:
        """Return what decides the federation, without what comes after it.

        Two methods for which this is equal can share one federation.
        """
        return experiment.changed(name="federation", finetune=None, compare_with_alone=False)


@dataclass(frozen=True)
class Method:
    """A named method.

    Attributes
    ----------
    name
        As it is typed: ``fedbn``, ``fedavg``, …
    title
        As a table says it.
    run
        Runs it in this process: experiment and data to one outcome a site.
    changes
        Fields of the experiment that make it this method.
    training
        Fields of the experiment's training that make it this method.
    in_flare
        Whether FLARE can run it: not where all data would have to be in one place.
    needs_pooled_data
        Whether it needs all sites' data in one place, which a federation exists to avoid.
    has_network
        Whether it trains the experiment's network.
    is_nested
        Whether it is chosen by cross-validation inside the training subjects.
    needs
        What the task must have: ``"classes"``, ``"two classes"``, or nothing.
    """

    name: str
    title: str
    run: Runner
    changes: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    in_flare: bool = True
    needs_pooled_data: bool = False
    has_network: bool = True
    is_nested: bool = False
    needs: Literal["", "classes", "two classes"] = ""

    def experiment(self, experiment: Experiment) -> Experiment:
        """Return the experiment changed into this method's."""
        training = {**experiment.training.model_dump(), "proximal_mu": 0.0, **self.training}
        return experiment.changed(
            **{
                "name": self.name,
                "compare_with_alone": False,
                "algorithm": {},
                "finetune": None,
                "training": training,
                **self.changes,
            }
        )
