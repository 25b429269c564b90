"""The methods that a hospital can choose between, by name, and one run of each in this process.

A method is a change of the experiment and a way to run it. What is compared is what each leaves at
a site: the scores of its held-out units, and of its training units for choices (a threshold, say)
that may look at nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from fedbn.core.batches import Samples, TensorSamples
from fedbn.core.normalization import entries, load_entries, recompute_statistics
from fedbn.core.training import derive_seed, train_epochs
from fedbn.federation.experiment import Experiment
from fedbn.federation.simulation import Federation
from fedbn.federation.site import Site
from fedbn.study import baselines, selection
from fedbn.study.method import FederatedRunner, Method, Outcome, Runner
from fedbn.tasks.base import Scores
from fedbn.tasks.classification import OWN_THRESHOLD, THRESHOLD, make_scores
from fedbn.tasks.data import SiteData


class ChosenMethod(Method):
    """The method that is chosen from a file of candidates."""

    def experiment(self, experiment: Experiment) -> Experiment:
        """Return the experiment, named by the candidates: others are another method.

        Raises
        ------
        ValueError
            If the file of candidates cannot be used.
        """
        protocol = selection.read_protocol(selection.candidates_file())
        selection.check_protocol(protocol, experiment, method)
        named = super().experiment(experiment)
        return named.changed(name=f"{self.name} {protocol.digest}")


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


def flare_experiment(name: str, experiment: Experiment) -> Experiment:
    """Return a job's experiment changed into a method's, for FLARE.

    Whether sites also train alone, to say what the federation gained, stays as it was; the method
    that is nothing else does not do it twice.

    Raises
    ------
    ValueError
        If there is no such method, or FLARE cannot run it.
    """
    if not method(name).in_flare:
        possible = [one.name for one in METHODS.values() if one.in_flare]
        raise ValueError(
            f"method {name!r} runs in one process alone (`fedbn compare`); FLARE runs "
            f"{', '.join(possible)}"
        )
    changed = method(name).experiment(experiment)
    alone_too = experiment.compare_with_alone and changed.algorithm.name != "alone"
    return changed.changed(compare_with_alone=alone_too)


def averaged(federation: Federation, experiment: Experiment) -> dict[str, Outcome]:
    """Score the final shared weights with each site's own entries, and what it had trained last."""
    outcomes = {}
    for name in federation.sites:
        outcomes[name] = replace(
            outcome(federation.load(name)),
            after_training=outcome(federation.load_trained(name)),
            training_loss=federation.losses[name],
        )
    return outcomes


def finetuned(federation: Federation, experiment: Experiment) -> dict[str, Outcome]:
    """Let each site train on from the final model, by itself, for the experiment's epochs."""
    outcomes = {}
    for name, common in federation.sites.items():
        site = Site(
            name,
            common.data,
            experiment,
            device=common.device,
            preparation=common.preparation,
        )
        site.load(federation.received[name], federation.local[name])
        site.finetune()
        outcomes[name] = outcome(site)
    return outcomes


def adapted(federation: Federation, experiment: Experiment) -> dict[str, Outcome]:
    """Recompute batch norm's statistics on each site's training samples.

    A site needs no label for it, and nothing of it leaves the site.
    """
    outcomes = {}
    for name in federation.sites:
        site = federation.load(name)
        inputs = table(site, "recomputed statistics").inputs
        recompute_statistics(site.network, inputs, site.partition.layers)
        outcomes[name] = outcome(site)
    return outcomes


def with_thresholds(federation: Federation, experiment: Experiment) -> dict[str, Outcome]:
    """Let each site decide by the threshold that is best on its training units."""
    return {name: at_own_threshold(outcome(federation.load(name))) for name in federation.sites}


def at_own_threshold(result: Outcome) -> Outcome:
    """Return an outcome that is decided by the threshold chosen on training units.

    Raises
    ------
    ValueError
        If the task has no threshold.
    """
    if OWN_THRESHOLD not in result.test.facts:
        raise ValueError("a threshold of a site's own needs a task of two classes")
    facts = {**result.test.facts, THRESHOLD: result.test.facts[OWN_THRESHOLD]}
    return replace(result, test=replace(result.test, facts=facts))


run_federated = FederatedRunner(averaged)
run_finetuned = FederatedRunner(finetuned)
run_adapted = FederatedRunner(adapted)
run_with_thresholds = FederatedRunner(with_thresholds)


def run_linear(
    experiment: Experiment,
    data: Mapping[str, SiteData],
    *,
    fit: baselines.Fit,
    together: bool,
) -> dict[str, Outcome]:
    """Fit a linear classifier on the same standardised samples as the networks.

    Parameters
    ----------
    experiment
        Its split, standardisation and seed count; its network and rounds do not.
    data
        Site name to its data, for every site of the experiment.
    fit
        One of :mod:`fedbn.study.baselines`.
    together
        One classifier on the samples of all sites in one place; otherwise one for each site alone.
    """
    sites = [Site(name, data[name], experiment) for name in sorted(experiment.sites)]
    outcomes = {}
    for group in [sites] if together else [[site] for site in sites]:
        tables = [table(site, "a linear classifier") for site in group]
        inputs = torch.cat([one.inputs for one in tables])
        targets = torch.cat([one.targets for one in tables])
        owners = [
            f"{site.name}/{k}" for site, one in zip(group, tables, strict=True) for k in one.owners
        ]
        score = fit(inputs, targets.numpy(), np.array(owners), experiment.seed)
        for site in group:
            outcomes[site.name] = _of_scorer(site, score)
    return outcomes


def run_federated_ridge(experiment: Experiment, data: Mapping[str, SiteData]) -> dict[str, Outcome]:
    """Fit one ridge regression over all sites by sums over their samples; no sample leaves a site.

    Parameters are those of :func:`run_linear`.
    """
    sites = [Site(name, data[name], experiment) for name in sorted(experiment.sites)]
    tables = [table(site, "a ridge regression") for site in sites]
    samples = [
        baselines.SiteSamples(one.inputs.cpu(), one.targets.cpu().numpy(), one.owners)
        for one in tables
    ]
    score = baselines.fit_federated_ridge(samples, experiment.seed)
    return {site.name: _of_scorer(site, score) for site in sites}


def run_represented(
    experiment: Experiment,
    data: Mapping[str, SiteData],
    *,
    representation: str,
    run: Runner,
    together: bool = True,
) -> dict[str, Outcome]:
    """Run a method on the data in a representation that is fitted on the training units.

    Parameters
    ----------
    experiment
        Its split decides the training units.
    data
        Site name to its data, for every site of the experiment.
    representation
        One that the task has.
    run
        The method.
    together
        Fitted over all sites' training units, the same as if they were in one place; otherwise
        each site fits its own.
    """
    task = experiment.task
    train = {name: task.split(data[name], experiment).train for name in experiment.sites}
    given: dict[str, SiteData] = {}
    for group in [tuple(train)] if together else [(name,) for name in train]:
        given |= task.represented(representation, {name: data[name] for name in group}, train)
    return run(experiment, given)


def run_chosen(experiment: Experiment, data: Mapping[str, SiteData]) -> dict[str, Outcome]:
    """Run the candidate that inner cross-validation on the training subjects chooses."""
    protocol = selection.read_protocol(selection.candidates_file())
    return selection.run_nested(experiment, data, protocol=protocol, lookup=method)


def run_with_inner_thresholds(
    experiment: Experiment, data: Mapping[str, SiteData], *, name: str
) -> dict[str, Outcome]:
    """Run a method; each site chooses its threshold on inner cross-validation's scores."""
    only = selection.Candidate(
        name=name, members=(selection.Member(method=name),), threshold="accuracy"
    )
    protocol = selection.Protocol(candidates=(only,))
    return selection.run_nested(experiment, data, protocol=protocol, lookup=method)


def run_singleset(experiment: Experiment, data: Mapping[str, SiteData]) -> dict[str, Outcome]:
    """Train every site alone, on its own data only."""
    outcomes = {}
    for name in experiment.sites:
        site = Site(name, data[name], experiment)
        site.train_alone()
        outcomes[name] = outcome(site)
    return outcomes


def run_pooled(experiment: Experiment, data: Mapping[str, SiteData]) -> dict[str, Outcome]:
    """Train one network on the training samples of all sites in one place.

    The upper reference, and what a federation exists to avoid: raw data leave their site. Each
    site's features are standardised as in the federation; batch norm sees all sites together.
    """
    sites = [Site(name, data[name], experiment) for name in sorted(experiment.sites)]
    task, network = experiment.task, sites[0].network
    samples = task.pooled([site.train_samples for site in sites])
    loss = task.criterion(experiment.training, samples)
    for number in range(experiment.rounds):
        seed = derive_seed(experiment.seed, "pooled", number, "train")
        train_epochs(
            network, samples, experiment.training, seed=seed, loss=loss, forward=task.forward
        )
    state = entries(network, network.state_dict())
    outcomes = {}
    for site in sites:
        load_entries(site.network, state)
        outcomes[site.name] = outcome(site)
    return outcomes


def outcome(site: Site) -> Outcome:
    """Score a site's held-out and training units with its network as it stands."""
    score = site.task.score
    return _decided(site, score(site.network, site.test), score(site.network, site.train_samples))


def _decided(site: Site, test: Scores, train: Scores) -> Outcome:
    facts = site.task.decisions(train)
    return Outcome(replace(test, facts=facts), replace(train, facts=facts))


def _of_scorer(site: Site, score: baselines.Scorer) -> Outcome:
    """Score a site's units by something other than a network."""
    parts = len(site.task.levels) > 1
    found = [
        make_scores(score(one.inputs), one.targets.cpu().numpy(), one.owners, parts=parts)
        for one in (tensors(site.test), tensors(site.train_samples))
    ]
    return _decided(site, *found)


def table(site: Site, what: str) -> TensorSamples:
    """Return a site's training samples as one tensor.

    Raises
    ------
    ValueError
        If the task does not hold them in memory; `what` needs that.
    """
    samples = site.train_samples
    if not isinstance(samples, TensorSamples):
        raise ValueError(f"{what} needs samples in memory, task {site.task.name!r} has none")
    return samples


def tensors(samples: Samples) -> TensorSamples:
    """Return samples that are known to lie in memory."""
    assert isinstance(samples, TensorSamples)
    return samples


PLAIN_SGD = {"optimizer": "sgd", "momentum": 0.0, "learning_rate": 0.03}
"""SCAFFOLD needs plain SGD, so it is compared with averaging under plain SGD. Of 0.003, 0.01, 0.03,
0.1 and 0.3 this rate comes closest to the training loss of the ABIDE job's Adam (fold 0, seed 0).
"""

CUTS = {"name": "clustered", "split_mean_norm": 0.8, "split_site_norm": 1.6}
"""On the ABIDE job the mean update's norm falls from 1.15 to 0.8 while the largest site's stays at
2: chosen from these norms alone, without a look at any score."""

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "singleset",
            "SingleSet",
            run_singleset,
            {"policy": "none", "algorithm": {"name": "alone"}},
        ),
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
        *(
            Method(
                name,
                title,
                run_federated,
                {"policy": policy, "algorithm": {"name": algorithm}},
                PLAIN_SGD,
            )
            for name, title, policy, algorithm in (
                ("fedavg_sgd", "FedAvg, SGD", "none", "average"),
                ("scaffold", "SCAFFOLD", "none", "scaffold"),
                ("fedbn_sgd", "FedBN, SGD", "fedbn", "average"),
                ("fedbn_scaffold", "FedBN + SCAFFOLD", "fedbn", "scaffold"),
            )
        ),
        Method(
            "clustered", "clustered FedAvg", run_federated, {"policy": "none", "algorithm": CUTS}
        ),
        *(
            Method(
                name,
                title,
                run_finetuned,
                {"policy": policy, "finetune": {"epochs": 8, "entries": tuned}},
            )
            for name, title, policy, tuned in (
                ("fedavg_finetune", "FedAvg + fine-tuning", "none", "all"),
                ("fedbn_finetune", "FedBN + fine-tuning", "fedbn", "all"),
                ("fedbn_finetune_head", "FedBN + fine-tuned head", "fedbn", "head"),
            )
        ),
        Method("fedavg_adabn", "FedAvg + AdaBN", run_adapted, {"policy": "none"}, in_flare=False),
        Method(
            "fedavg_threshold",
            "FedAvg + threshold",
            run_with_thresholds,
            {"policy": "none"},
            in_flare=False,
        ),
        Method(
            "fedavg_threshold_cv",
            "FedAvg + inner threshold",
            partial(run_with_inner_thresholds, name="fedavg"),
            {"policy": "none"},
            in_flare=False,
            is_nested=True,
        ),
        Method(
            "fedbn_tangent",
            "FedBN, tangent",
            partial(run_represented, representation="tangent", run=run_federated),
            {"policy": "fedbn"},
            in_flare=False,
        ),
        *(
            Method(
                name,
                title,
                run,
                {"policy": "none", "standardization": "none"},
                in_flare=False,
                has_network=False,
            )
            for name, title, run in (
                ("ridge_federated", "ridge, federated", run_federated_ridge),
                (
                    "ridge_federated_tangent",
                    "ridge, federated, tangent",
                    partial(run_represented, representation="tangent", run=run_federated_ridge),
                ),
            )
        ),
        ChosenMethod(
            "nested",
            "chosen by nested CV",
            run_chosen,
            {"policy": "none"},
            in_flare=False,
            has_network=False,
            is_nested=True,
        ),
        Method(
            "pooled",
            "pooled",
            run_pooled,
            {"policy": "none"},
            in_flare=False,
            needs_pooled_data=True,
        ),
        *(
            Method(
                name,
                title,
                partial(run_linear, fit=fit, together=together),
                {"policy": "none"},
                in_flare=False,
                needs_pooled_data=together,
                has_network=False,
            )
            for name, title, fit, together in (
                ("ridge", "ridge, pooled", baselines.fit_ridge, True),
                ("logistic", "logistic, pooled", baselines.fit_logistic, True),
                ("ridge_single", "ridge, alone", baselines.fit_ridge, False),
            )
        ),
        *(
            Method(
                name,
                title,
                partial(
                    run_represented,
                    representation="tangent",
                    run=partial(run_linear, fit=baselines.fit_logistic, together=together),
                    together=together,
                ),
                {"policy": "none", "standardization": "none"},
                in_flare=False,
                needs_pooled_data=together,
                has_network=False,
            )
            for name, title, together in (
                ("tangent", "logistic on tangent, pooled", True),
                ("tangent_single", "logistic on tangent, alone", False),
            )
        ),
    )
}
