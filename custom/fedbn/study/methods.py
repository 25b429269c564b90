"""The methods that a hospital can choose between, by name, and one run of each in this process.

A method is a change of the experiment and a way to run it. What is compared is what each leaves at
a site: the probabilities of its held-out subjects, and of its training subjects for choices (a
threshold, say) that may look at nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from data_prep.site_store import SiteStore
from fedbn.core.normalization import entries, load_entries, recompute_statistics
from fedbn.core.training import derive_seed, train_epochs
from fedbn.federation.experiment import Experiment
from fedbn.federation.simulation import Federation
from fedbn.federation.site import Site, prepare
from fedbn.study import baselines, selection
from fedbn.study.method import FederatedRunner, Method, Outcome, Runner
from fedbn.tasks import evaluation
from fedbn.tasks.connectome.tangent import tangent_stores
from fedbn.tasks.operating_point import choose_threshold


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
            common.store,
            experiment,
            device=common.device,
            preparation=common.preparation,
        )
        site.load(federation.received[name], federation.local[name])
        site.finetune()
        outcomes[name] = outcome(site)
    return outcomes


def adapted(federation: Federation, experiment: Experiment) -> dict[str, Outcome]:
    """Recompute batch norm's statistics on each site's training scans.

    A site needs no label for it, and nothing of it leaves the site.
    """
    outcomes = {}
    for name in federation.sites:
        site = federation.load(name)
        recompute_statistics(site.network, site.training_data[0])
        outcomes[name] = outcome(site)
    return outcomes


def with_thresholds(federation: Federation, experiment: Experiment) -> dict[str, Outcome]:
    """Let each site choose its threshold on its training subjects."""
    outcomes = {}
    for name in federation.sites:
        result = outcome(federation.load(name))
        outcomes[name] = replace(result, threshold=own_threshold(result))
    return outcomes


run_federated = FederatedRunner(averaged)
run_finetuned = FederatedRunner(finetuned)
run_adapted = FederatedRunner(adapted)
run_with_thresholds = FederatedRunner(with_thresholds)


def own_threshold(result: Outcome) -> float:
    """Choose a site's threshold on the scores of its training subjects, and on nothing else."""
    owners = result.train_participants
    scores, _ = evaluation.subject_scores(result.train_probability[:, 1], owners)
    targets, _ = evaluation.subject_scores(result.train_targets, owners)
    return choose_threshold(targets.astype(np.int64), scores)


def run_linear(
    experiment: Experiment,
    stores: Mapping[str, SiteStore],
    *,
    fit: baselines.Fit,
    together: bool,
) -> dict[str, Outcome]:
    """Fit a linear classifier on the same standardised samples as the networks.

    Parameters
    ----------
    experiment
        Its split, standardisation and seed count; its network and rounds do not.
    stores
        Site name to store, for every site of the experiment.
    fit
        One of :mod:`fedbn.study.baselines`.
    together
        One classifier on the samples of all sites in one place; otherwise one for each site alone.
    """
    sites = [Site(name, stores[name], experiment) for name in sorted(experiment.sites)]
    outcomes = {}
    for group in [sites] if together else [[site] for site in sites]:
        inputs = torch.cat([site.training_data[0] for site in group])
        targets = torch.cat([site.training_data[1] for site in group])
        owners = [f"{site.name}/{k}" for site in group for k in _training_participants(site)]
        score = fit(inputs, targets.numpy(), np.array(owners), experiment.seed)
        for site in group:
            outcomes[site.name] = _outcome(
                site, score(site.test_inputs), score(site.training_data[0])
            )
    return outcomes


def run_federated_ridge(
    experiment: Experiment, stores: Mapping[str, SiteStore]
) -> dict[str, Outcome]:
    """Fit one ridge regression over all sites by sums over their samples; no sample leaves a site.

    Parameters are those of :func:`run_linear`.
    """
    sites = [Site(name, stores[name], experiment) for name in sorted(experiment.sites)]
    samples = [
        baselines.SiteSamples(
            site.training_data[0].cpu(),
            site.training_data[1].cpu().numpy(),
            _training_participants(site),
        )
        for site in sites
    ]
    score = baselines.fit_federated_ridge(samples, experiment.seed)
    return {
        site.name: _outcome(site, score(site.test_inputs), score(site.training_data[0]))
        for site in sites
    }


def run_on_tangent(
    experiment: Experiment,
    stores: Mapping[str, SiteStore],
    *,
    run: Runner,
    together: bool = True,
) -> dict[str, Outcome]:
    """Run a method on connectomes in the tangent space of the training subjects' mean.

    Parameters
    ----------
    experiment
        Its split decides the training subjects.
    stores
        Site name to a store of correlations, for every site of the experiment.
    run
        The method.
    together
        One reference of all sites' training subjects, the same as if their matrices were in one
        place; otherwise each site has its own.
    """
    unscaled = experiment.changed(standardization="none")
    rows = {
        name: prepare(name, stores[name], unscaled).train_rows.numpy() for name in experiment.sites
    }
    given: dict[str, SiteStore] = {}
    for group in [tuple(rows)] if together else [(name,) for name in rows]:
        given |= tangent_stores({name: stores[name] for name in group}, rows)
    return run(experiment, given)


def run_chosen(experiment: Experiment, stores: Mapping[str, SiteStore]) -> dict[str, Outcome]:
    """Run the candidate that inner cross-validation on the training subjects chooses."""
    protocol = selection.read_protocol(selection.candidates_file())
    return selection.run_nested(experiment, stores, protocol=protocol, lookup=method)


def run_with_inner_thresholds(
    experiment: Experiment, stores: Mapping[str, SiteStore], *, name: str
) -> dict[str, Outcome]:
    """Run a method; each site chooses its threshold on inner cross-validation's scores."""
    only = selection.Candidate(
        name=name, members=(selection.Member(method=name),), threshold="accuracy"
    )
    protocol = selection.Protocol(candidates=(only,))
    return selection.run_nested(experiment, stores, protocol=protocol, lookup=method)


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
    sites = [Site(name, stores[name], experiment) for name in sorted(experiment.sites)]
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
    return _outcome(
        site,
        evaluation.predict(site.network, site.test_inputs),
        evaluation.predict(site.network, site.training_data[0]),
    )


def _outcome(site: Site, test: np.ndarray, train: np.ndarray) -> Outcome:
    return Outcome(
        test_targets=site.test_targets,
        test_participants=site.test_participants,
        test_probability=test,
        train_targets=site.training_data[1].cpu().numpy(),
        train_participants=_training_participants(site),
        train_probability=train,
    )


def _training_participants(site: Site) -> np.ndarray:
    owners: np.ndarray = site.store.sample_participant[site.preparation.train_rows.numpy()]
    return owners


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
            partial(run_on_tangent, run=run_federated),
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
                    partial(run_on_tangent, run=run_federated_ridge),
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
                    run_on_tangent,
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
