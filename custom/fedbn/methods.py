"""The methods that a hospital can choose between, by name, and one run of each in this process.

A method is a change of the experiment and a way to run it. What is compared is what each leaves at
a site: the probabilities of its held-out subjects, and of its training subjects for choices (a
threshold, say) that may look at nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from data_prep.site_store import SiteStore
from fedbn import evaluation
from fedbn.experiment import federate
from fedbn.normalization import entries, load_entries
from fedbn.settings import Experiment
from fedbn.site import Site
from fedbn.training import derive_seed, train_epochs


@dataclass(frozen=True)
class Outcome:
    """What one run of a method leaves at one site.

    Attributes
    ----------
    test_targets, train_targets
        int64 (n_windows,): 1 autism, 0 control.
    test_participants, train_participants
        int64 (n_windows,): each window's subject, as an index into the site's participants.
    test_probability, train_probability
        float64 (n_windows, n_classes).
    """

    test_targets: np.ndarray
    test_participants: np.ndarray
    test_probability: np.ndarray
    train_targets: np.ndarray
    train_participants: np.ndarray
    train_probability: np.ndarray


Runner = Callable[[Experiment, Mapping[str, SiteStore]], dict[str, Outcome]]


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
        Runs it in this process: experiment and stores to one outcome a site.
    changes
        Fields of the experiment that make it this method.
    training
        Fields of the experiment's training that make it this method.
    in_flare
        Whether FLARE can run it: not where all data would have to be in one place.
    """

    name: str
    title: str
    run: Runner
    changes: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    in_flare: bool = True

    def experiment(self, experiment: Experiment) -> Experiment:
        """Return the experiment changed into this method's."""
        training = {**experiment.training.model_dump(), "proximal_mu": 0.0, **self.training}
        return experiment.changed(
            name=self.name, compare_with_alone=False, training=training, **self.changes
        )


def method(name: str) -> Method:
    """Return a method by its name.

    Raises
    ------
    ValueError
        With the names that there are.
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; choose from {', '.join(METHODS)}")
    return METHODS[name]


def run_federated(experiment: Experiment, stores: Mapping[str, SiteStore]) -> dict[str, Outcome]:
    """Run the experiment as a federation; each site ends with its own local entries."""
    federation = federate(experiment, stores)
    outcomes = {}
    for name, site in federation.sites.items():
        load_entries(site.network, federation.shared, federation.local[name])
        outcomes[name] = outcome(site)
    return outcomes


def run_singleset(experiment: Experiment, stores: Mapping[str, SiteStore]) -> dict[str, Outcome]:
    """Train every site alone, on its own data only."""
    outcomes = {}
    for name in experiment.sites:
        site = Site(name, stores[name], experiment)
        site.train_alone()
        outcomes[name] = outcome(site)
    return outcomes


def run_pooled(experiment: Experiment, stores: Mapping[str, SiteStore]) -> dict[str, Outcome]:
    """Train one network on the training samples of all sites in one place.

    The upper reference, and what a federation exists to avoid: raw data leave their site. Each
    site's features are standardised as in the federation; batch norm sees all sites together.
    """
    sites = [Site(name, stores[name], experiment) for name in experiment.sites]
    inputs = torch.cat([site.training_data[0] for site in sites])
    targets = torch.cat([site.training_data[1] for site in sites])
    network = sites[0].network
    for number in range(experiment.rounds):
        seed = derive_seed(experiment.seed, "pooled", number, "train")
        train_epochs(network, inputs, targets, experiment.training, seed=seed)
    state = entries(network, network.state_dict())
    outcomes = {}
    for site in sites:
        load_entries(site.network, state)
        outcomes[site.name] = outcome(site)
    return outcomes


def outcome(site: Site) -> Outcome:
    """Score a site's held-out and training samples with its network as it stands."""
    inputs, targets = site.training_data
    return Outcome(
        test_targets=site.test_targets,
        test_participants=site.test_participants,
        test_probability=evaluation.predict(site.network, site.test_inputs),
        train_targets=targets.cpu().numpy(),
        train_participants=site.store.sample_participant[site.preparation.train_rows.numpy()],
        train_probability=evaluation.predict(site.network, inputs),
    )


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("singleset", "SingleSet", run_singleset, {"policy": "none"}),
        Method("fedavg", "FedAvg", run_federated, {"policy": "none"}),
        Method("fedprox", "FedProx", run_federated, {"policy": "none"}, {"proximal_mu": 0.01}),
        Method("fedbn", "FedBN", run_federated, {"policy": "fedbn"}),
        Method("silobn", "SiloBN", run_federated, {"policy": "silobn"}),
        Method(
            "fedbn_fedprox",
            "FedBN + FedProx",
            run_federated,
            {"policy": "fedbn"},
            {"proximal_mu": 0.01},
        ),
        Method("pooled", "pooled", run_pooled, {"policy": "none"}, in_flare=False),
    )
}
