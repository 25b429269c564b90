"""A federation inside one process: the same training and aggregation, no transport.

For comparisons over folds and seeds, and for parity: a simulator run and an in-process run of the
same experiment give the same weights, because both are made of
:class:`fedbn.federation.site.Site` and :class:`fedbn.federation.server.Server`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedbn.federation.best_round import BestRound
from fedbn.federation.experiment import Experiment
from fedbn.federation.results import AFTER_TRAINING, BEFORE_TRAINING, run_report, site_report
from fedbn.federation.server import make_server
from fedbn.federation.site import VALIDATION, Preparation, RoundResult, Site, make_network
from fedbn.tasks.base import Scores
from fedbn.tasks.data import SiteData


@dataclass(frozen=True)
class FederationResult:
    """What a federation leaves behind.

    Attributes
    ----------
    shared
        The last shared entries.
    local
        Site name to the local entries that the site keeps.
    report
        As ``results.json`` of a FLARE run.
    """

    shared: dict[str, torch.Tensor]
    local: dict[str, dict[str, torch.Tensor]]
    report: dict[str, Any]


def read_sites(root: Path, experiment: Experiment, *, verify: bool = False) -> dict[str, SiteData]:
    """Read the data of every site of an experiment from ``root/<site>``, and see that they fit.

    Parameters
    ----------
    root
        Folder with one site's data each.
    experiment
        Names the sites and the task.
    verify
        Also look at every value, as a site's preflight does; it costs a second or two.

    Raises
    ------
    fedbn.tasks.data.DataError
        If a site's are missing or damaged, or made in another way than the others'.
    """
    task = experiment.task
    found = {site: task.read(root / site, site, verify=verify) for site in experiment.sites}
    task.check_sites({site: data.signature() for site, data in found.items()})
    return found


@dataclass(frozen=True)
class Federation:
    """A federation after its last round, with its sites still in memory.

    Attributes
    ----------
    sites
        Site name to the site.
    shared
        All that the server holds after the last round: the shared entries, and what the algorithm
        adds to them.
    local
        Site name to the local entries that the site keeps.
    received
        Site name to the shared entries that the site receives last.
    facts
        What the algorithm has to tell of each round; empty for a plain mean.
    scores
        Site name, round, and before or after training, to the scores of each part of the units that
        is scored in every round.
    sent
        Site name to the shared entries that the site sent last.
    losses
        Site name to the training loss of each local epoch of each round, as
        :class:`fedbn.core.training.TrainingOutcome` measures it.
    best_round
        Which round was chosen, where rounds are judged; `shared`, `local` and `received` are its.
    """

    sites: dict[str, Site]
    shared: dict[str, torch.Tensor]
    local: dict[str, dict[str, torch.Tensor]]
    received: dict[str, dict[str, torch.Tensor]]
    facts: list[dict[str, Any]]
    scores: dict[str, dict[int, dict[str, dict[str, Scores]]]]
    sent: dict[str, dict[str, torch.Tensor]]
    losses: dict[str, list[list[float]]]
    best_round: dict[str, Any] | None = None

    def load(self, name: str) -> Site:
        """Return a site with the final entries, received and its own, in its network."""
        site = self.sites[name]
        site.load(self.received[name], self.local[name])
        return site

    def load_trained(self, name: str) -> Site:
        """Return a site with its network as its local epochs of the last round left it."""
        site = self.sites[name]
        site.load(self.sent[name], self.local[name])
        return site


def federate(
    experiment: Experiment,
    data: Mapping[str, SiteData],
    *,
    device: torch.device | str = "cpu",
    on_round: Callable[[int], None] | None = None,
    score_rounds: bool = True,
    preparations: Mapping[str, Preparation] | None = None,
) -> Federation:
    """Run all rounds of an experiment over its sites, one after the other, in this process.

    Parameters
    ----------
    experiment
        What to run.
    data
        Site name to its data, for every site of the experiment.
    device
        Where every site trains.
    on_round
        Called with the number of each finished round.
    score_rounds
        Whether every round is scored before and after local training; without it `scores` stay
        empty, the weights are the same, and a sixth of the time is saved.
    preparations
        Site name to its preparation, where they are others than the experiment's.
    """
    prepared = preparations or {}
    sites = {
        name: Site(name, data[name], experiment, device=device, preparation=prepared.get(name))
        for name in experiment.sites
    }
    for site in sites.values():
        site.check_network()
    server = make_server(experiment, *make_network(experiment))
    local = {name: site.initial_local() for name, site in sites.items()}
    sent: dict[str, dict[str, torch.Tensor]] = {}
    losses: dict[str, list[list[float]]] = {name: [] for name in sites}
    facts: list[dict[str, Any]] = []
    scores: dict[str, dict[int, dict[str, dict[str, Scores]]]] = {name: {} for name in sites}
    best = _Best(experiment)
    for number in range(experiment.rounds):
        server.reset()
        model = _Model(server.state(), {n: server.message(n) for n in sites}, dict(local))
        judged: dict[str, dict[str, float]] = {}
        for name, site in sites.items():
            train = site.train_round if score_rounds or experiment.judges_rounds else site.train
            result = train(model.received[name], local[name], number)
            local[name], sent[name] = result.local, result.shared
            losses[name].append(result.outcome.losses)
            weight = 1 if experiment.aggregation_weights == "equal" else result.outcome.n_samples
            server.add(name, result.shared, weight)
            if isinstance(result, RoundResult):
                scores[name][number] = {
                    BEFORE_TRAINING: result.before,
                    AFTER_TRAINING: result.after,
                }
                if VALIDATION in result.before:
                    judged[name] = site.task.follow(result.before[VALIDATION])
        server.update()
        facts.append(server.facts())
        if on_round is not None:
            on_round(number)
        if number and best.judge(number - 1, judged, model):
            break
    model = _Model(server.state(), {n: server.message(n) for n in sites}, local)
    if experiment.judges_rounds:
        judged = {n: site.judged(model.received[n], local[n]) for n, site in sites.items()}
        best.judge(len(facts) - 1, judged, model)
        model = best.model(model)
    return Federation(
        sites=sites,
        shared=model.shared,
        local=model.local,
        received=model.received,
        facts=facts,
        scores=scores,
        sent=sent,
        losses=losses,
        best_round=best.facts() if experiment.judges_rounds else None,
    )


@dataclass(frozen=True)
class _Model:
    """What server and sites hold after a round; none of it is changed later."""

    shared: dict[str, torch.Tensor]
    received: dict[str, dict[str, torch.Tensor]]
    local: dict[str, dict[str, torch.Tensor]]


class _Best:
    """Keeps the model of the best round, of all sites together or of each by itself."""

    def __init__(self, experiment: Experiment):
        self._mode = experiment.best_round
        self._of_all = BestRound(experiment)
        self._of_site = {name: BestRound(experiment) for name in experiment.sites}
        self._kept: dict[str, _Model] = {}

    def judge(self, number: int, judged: Mapping[str, dict[str, float]], model: _Model) -> bool:
        """Judge the model that a round has ended with; return whether the run is over."""
        if self._of_all.judge(number, judged) and self._mode == "validation":
            self._kept = dict.fromkeys(self._of_site, model)
        for name, followed in judged.items():
            better = self._of_site[name].judge(number, {name: followed})
            if better and self._mode == "site_validation":
                self._kept[name] = model
        return self._of_all.is_over

    def model(self, last: _Model) -> _Model:
        """Return the chosen model: what each site is scored with."""
        if self._mode == "last":
            return last
        shared = last.shared
        if self._mode == "validation":
            shared = next(iter(self._kept.values())).shared
        return _Model(
            shared,
            {name: model.received[name] for name, model in self._kept.items()},
            {name: model.local[name] for name, model in self._kept.items()},
        )

    def facts(self) -> dict[str, Any]:
        """Return what a report says of the choice."""
        found = self._of_all.facts()
        if self._mode == "site_validation":
            found["sites"] = {name: one.number for name, one in self._of_site.items()}
        return found


def run_federation(
    experiment: Experiment,
    data: Mapping[str, SiteData],
    *,
    device: torch.device | str = "cpu",
    on_round: Callable[[int], None] | None = None,
) -> FederationResult:
    """Run an experiment in this process and report it as a FLARE run would be.

    What fails after the last round at one site loses nothing else; the report says so under
    ``"not_scored"``. Parameters are those of :func:`federate`.
    """
    federation = federate(experiment, data, device=device, on_round=on_round)
    reports: dict[str, dict[str, Any]] = {}
    more: dict[str, Any] = {}
    for name, rounds in federation.scores.items():
        site = federation.sites[name]
        final = finetuned = alone = None
        try:
            final = site.evaluate(federation.received[name], federation.local[name])
            finetuned = site.finetune() if experiment.finetune else None
            alone = site.train_alone() if experiment.compare_with_alone else None
        except (ValueError, RuntimeError, ArithmeticError) as error:
            more.setdefault("not_scored", {})[name] = str(error)
        if final is not None:
            reports[name] = site_report(site, final, alone, rounds, finetuned=finetuned)
    of_rounds = [
        {"round": n, "accepted": sorted(federation.sites), "refused": {}, "missing": [], **facts}
        for n, facts in enumerate(federation.facts)
    ]
    if federation.best_round is not None:
        more["best_round"] = federation.best_round
    report = run_report(
        experiment, reports, of_rounds, federation.shared, transport="in process", **more
    )
    return FederationResult(shared=federation.shared, local=federation.local, report=report)
