"""The methods that a hospital can choose between, by name.

A method is a change of the experiment and a way to run it (:mod:`fedbn.study.runners`). What is
compared is what each leaves at a site: the scores of its held-out units, and of its training units
for choices (a threshold, say) that may look at nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from fedbn.federation.experiment import Experiment
from fedbn.study import baselines, selection
from fedbn.study.method import Method, Outcome, Runner
from fedbn.study.runners import (
    run_adapted,
    run_federated,
    run_finetuned,
    run_linear,
    run_pooled,
    run_represented,
    run_singleset,
    run_with_thresholds,
)
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


PLAIN_SGD = {"optimizer": "sgd", "momentum": 0.0, "learning_rate": 0.03}
"""SCAFFOLD needs plain SGD, so it is compared with averaging under plain SGD. Of 0.003, 0.01, 0.03,
0.1 and 0.3 this rate comes closest to the training loss of the ABIDE job's Adam (fold 0, seed 0).
"""

CUTS = {"name": "clustered", "split_mean_norm": 0.8, "split_site_norm": 1.6}
"""On the ABIDE job the mean update's norm falls from 1.15 to 0.8 while the largest site's stays at
2: chosen from these norms alone, without a look at any score."""


def _federated(
    name: str,
    title: str,
    policy: str,
    run: Runner = run_federated,
    training: Mapping[str, Any] | None = None,
    **more: Any,
) -> Method:
    """Make a method that FLARE can run; `more` are further changes of the experiment."""
    return Method(name, title, run, {"policy": policy, **more}, training or {})


def _here(name: str, title: str, run: Runner, policy: str = "none", **more: Any) -> Method:
    """Make a method that runs in one process alone."""
    return Method(name, title, run, {"policy": policy}, in_flare=False, **more)


def _linear(
    name: str, title: str, run: Runner, *, pooled: bool = False, raw: bool = True
) -> Method:
    """Make a method without a network; `raw`: on samples that are not standardised."""
    changes = {"policy": "none", "standardization": "none"} if raw else {"policy": "none"}
    return Method(
        name,
        title,
        run,
        changes,
        in_flare=False,
        needs_pooled_data=pooled,
        has_network=False,
        needs="classes",
    )


def _on_tangent(run: Runner, *, together: bool = True) -> Runner:
    return partial(run_represented, representation="tangent", run=run, together=together)


_ridge = partial(run_linear, fit=baselines.fit_ridge)
_federated_ridge = partial(run_linear, fit=baselines.fit_federated_ridge)
_logistic = partial(run_linear, fit=baselines.fit_logistic)
_SCAFFOLD: dict[str, Any] = {"algorithm": {"name": "scaffold"}, "training": PLAIN_SGD}

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        _federated("singleset", "SingleSet", "none", run_singleset, algorithm={"name": "alone"}),
        _federated("fedavg", "FedAvg", "none"),
        _federated("fedprox", "FedProx", "none", training={"proximal_mu": 0.01}),
        _federated("fedbn", "FedBN", "fedbn"),
        _federated("silobn", "SiloBN", "silobn"),
        _federated("fedbn_fedprox", "FedBN + FedProx", "fedbn", training={"proximal_mu": 0.01}),
        _federated("fedavg_sgd", "FedAvg, SGD", "none", training=PLAIN_SGD),
        _federated("scaffold", "SCAFFOLD", "none", **_SCAFFOLD),
        _federated("fedbn_sgd", "FedBN, SGD", "fedbn", training=PLAIN_SGD),
        _federated("fedbn_scaffold", "FedBN + SCAFFOLD", "fedbn", **_SCAFFOLD),
        _federated("clustered", "clustered FedAvg", "none", algorithm=CUTS),
        *(
            _federated(
                name, title, policy, run_finetuned, finetune={"epochs": 8, "entries": entries}
            )
            for name, title, policy, entries in (
                ("fedavg_finetune", "FedAvg + fine-tuning", "none", "all"),
                ("fedbn_finetune", "FedBN + fine-tuning", "fedbn", "all"),
                ("fedbn_finetune_head", "FedBN + fine-tuned head", "fedbn", "head"),
            )
        ),
        _here("fedavg_adabn", "FedAvg + AdaBN", run_adapted),
        _here("fedavg_threshold", "FedAvg + threshold", run_with_thresholds, needs="two classes"),
        _here(
            "fedavg_threshold_cv",
            "FedAvg + inner threshold",
            partial(run_with_inner_thresholds, name="fedavg"),
            is_nested=True,
            needs="two classes",
        ),
        _here("fedbn_tangent", "FedBN, tangent", _on_tangent(run_federated), "fedbn"),
        _linear("ridge_federated", "ridge, federated", _federated_ridge),
        _linear(
            "ridge_federated_tangent",
            "ridge, federated, tangent",
            _on_tangent(_federated_ridge),
        ),
        ChosenMethod(
            "nested",
            "chosen by nested CV",
            run_chosen,
            {"policy": "none"},
            in_flare=False,
            has_network=False,
            is_nested=True,
            needs="two classes",
        ),
        _here("pooled", "pooled", run_pooled, needs_pooled_data=True),
        _linear("ridge", "ridge, pooled", _ridge, pooled=True, raw=False),
        _linear("logistic", "logistic, pooled", _logistic, pooled=True, raw=False),
        _linear("ridge_single", "ridge, alone", partial(_ridge, together=False), raw=False),
        _linear("tangent", "logistic on tangent, pooled", _on_tangent(_logistic), pooled=True),
        _linear(
            "tangent_single",
            "logistic on tangent, alone",
            _on_tangent(partial(_logistic, together=False), together=False),
        ),
    )
}
