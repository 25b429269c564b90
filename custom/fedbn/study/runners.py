"""How methods run in this process: an experiment and the sites' data to one outcome a site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedbn.core.batches import Samples, TensorSamples
from fedbn.core.normalization import entries, load_entries, recompute_statistics
from fedbn.core.training import derive_seed, train_epochs
from fedbn.federation.experiment import Experiment
from fedbn.federation.simulation import Federation
from fedbn.federation.site import Site
from fedbn.study import baselines
from fedbn.study.method import FederatedRunner, Outcome, Runner
from fedbn.tasks.base import Scores
from fedbn.tasks.classification import (
    OWN_THRESHOLD,
    THRESHOLD,
    ClassificationTask,
    make_scores,
)
from fedbn.tasks.data import SiteData


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
        if isinstance(site.train_samples, TensorSamples):  # as one batch, exact for every layer
            inputs = site.train_samples.inputs
            recompute_statistics(site.network, inputs, site.partition.layers)
        else:
            site.recompute_statistics()
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
    together: bool = True,
) -> dict[str, Outcome]:
    """Fit a linear classifier on the same samples as the networks.

    Parameters
    ----------
    experiment
        Its split, standardisation and seed count; its network and rounds do not.
    data
        Site name to its data, for every site of the experiment.
    fit
        One of :mod:`fedbn.study.baselines`.
    together
        One classifier over all sites; otherwise one for each site alone.
    """
    task = experiment.task
    assert isinstance(task, ClassificationTask)
    sites = [Site(name, data[name], experiment) for name in sorted(experiment.sites)]
    outcomes = {}
    for group in [sites] if together else [[site] for site in sites]:
        tables = [table(site, "a linear classifier") for site in group]
        samples = [
            baselines.SiteSamples(
                site.name, one.inputs.cpu(), one.targets.cpu().numpy(), one.owners
            )
            for site, one in zip(group, tables, strict=True)
        ]
        score = baselines.fit_classes(fit, samples, len(task.class_names), experiment.seed)
        for site in group:
            outcomes[site.name] = _of_scorer(site, score)
    return outcomes


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
    test = site.score()
    return _decided(site, test, site.task.score(site.network, site.train_samples))


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
