"""The server's side of each algorithm: what goes to a site, and what is made of what comes back.

The in-process federation and the FLARE aggregator call the same objects. Whatever the algorithm,
bits do not depend on the order in which sites are added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fedbn.core import clusters, control_variates
from fedbn.core.aggregation import (
    ContributionError,
    WeightedMean,
    validate_contribution,
    widened,
)
from fedbn.core.normalization import (
    Partition,
    StateMismatchError,
    check_entries,
    entries,
    trainable_names,
)
from fedbn.federation.experiment import Experiment

Tensors = dict[str, torch.Tensor]

_SITE = f"{control_variates.PREFIX}site "
_GROUP = "group "
"""Names of saved entries that belong to one site or group begin with these; module names do not."""


class Server:
    """One model for all sites: the weighted mean of what they send.

    Parameters
    ----------
    shared
        The shared entries before the first round; they are also the schema of a contribution.
    """

    def __init__(self, shared: Mapping[str, torch.Tensor]):
        self.shared = dict(shared)
        self._mean = WeightedMean(shared)

    def message(self, site: str) -> Tensors:
        """Return what a site receives in this round."""
        return self.shared

    def addressees(self, sites: Sequence[str]) -> list[list[str]]:
        """Gather the sites that receive the same message."""
        return [list(sites)]

    def reset(self) -> None:
        """Forget this round's contributions."""
        self._mean.reset()

    def add(self, site: str, tensors: Mapping[str, torch.Tensor], weight: float = 1.0) -> None:
        """Take one site's contribution; on an error nothing is changed.

        Raises
        ------
        fedbn.core.aggregation.ContributionError
            With the reason.
        """
        self._mean.add(site, tensors, weight)

    def update(self) -> None:
        """End the round: make what the sites receive next.

        Raises
        ------
        fedbn.core.aggregation.ContributionError
            If nobody has contributed.
        """
        self.shared = self._mean.result()

    def state(self) -> Tensors:
        """Return everything that the server holds, by name, to save it or to compare two runs."""
        return self.shared

    def facts(self) -> dict[str, Any]:
        """Return what a report says of the last round beside scores; nothing for a plain mean."""
        return {}

    def saved(self) -> tuple[Tensors, dict[str, Any]]:
        """Return all that is needed to go on from here in another run.

        Returns
        -------
        tensors, facts
            :meth:`state` and what else the algorithm remembers, by name; facts that JSON can hold.
        """
        return self.state(), {}

    def restore(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from what :meth:`saved` has returned in an earlier run; the bits are the same.

        Raises
        ------
        fedbn.core.normalization.StateMismatchError
            If it was saved by another algorithm or for another network.
        """
        check_entries(tensors, self.shared, "the saved entries")
        self.shared = dict(tensors)


class ScaffoldServer(Server):
    """The weighted mean of the models, and of all sites' latest control variates.

    With every site present this is the paper's server step with a global learning rate of 1. Of a
    site that misses a round the control variate that it sent last counts on, which is the paper's
    ``c + |S| / N * mean(c_i' - c_i)``; a contribution that the server refused leaves no trace.

    Parameters
    ----------
    shared
        The network's shared entries.
    trained
        Names of those that are trained.
    """

    def __init__(self, shared: Mapping[str, torch.Tensor], trained: Sequence[str]):
        super().__init__(control_variates.join(shared, control_variates.zeros(shared, trained)))
        self._latest: dict[str, tuple[Tensors, float]] = {}

    def add(self, site: str, tensors: Mapping[str, torch.Tensor], weight: float = 1.0) -> None:
        """Take one site's entries and control variate."""
        super().add(site, tensors, weight)
        _, variates = control_variates.separate(tensors)
        copies = {name: tensor.detach().clone() for name, tensor in variates.items()}
        self._latest[site] = (copies, weight)

    def update(self) -> None:
        """Average the models of this round's sites and the control variates of all sites."""
        present = set(self._mean.contributors)
        model = self._mean.result()
        if self._latest.keys() - present:
            network, variates = control_variates.separate(model)
            mean = WeightedMean(variates)
            for site, (latest, weight) in self._latest.items():
                mean.add(site, latest, weight)
            model = control_variates.join(network, mean.result())
        self.shared = model

    def saved(self) -> tuple[Tensors, dict[str, Any]]:
        """Return the shared entries, the mean variate, and each site's latest one with its weight.

        What is of one site must not be sent to another.
        """
        latest = {
            f"{_SITE}{site}:{name}": tensor
            for site, (variates, _) in sorted(self._latest.items())
            for name, tensor in variates.items()
        }
        weights = {site: weight for site, (_, weight) in sorted(self._latest.items())}
        return {**self.state(), **latest}, {"site_weights": weights}

    def restore(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Go on with the control variates of the server and of every site."""
        of_sites = {name: tensor for name, tensor in tensors.items() if name.startswith(_SITE)}
        shared = {name: tensor for name, tensor in tensors.items() if name not in of_sites}
        weights = facts.get("site_weights")
        if not isinstance(weights, dict):
            raise StateMismatchError("the saved entries hold no control variates of SCAFFOLD")
        _, variates = control_variates.separate(self.shared)
        latest = {}
        for site, weight in weights.items():
            prefix = f"{_SITE}{site}:"
            own = {n.removeprefix(prefix): t for n, t in of_sites.items() if n.startswith(prefix)}
            check_entries(own, variates, f"the saved control variates of site {site!r}")
            latest[site] = (own, float(weight))
        super().restore(shared, {})
        self._latest = latest


class ClusteredServer(Server):
    """One model for each group of sites; all sites are one group until their updates disagree.

    A group is looked at in each round in which all of its sites have contributed, and is cut in
    two at most once a round; see :mod:`fedbn.core.clusters`. The parts go on from the means of
    their own sites. Which sites are together depends on their updates alone, never on the order
    of sites.

    Parameters
    ----------
    shared
        The network's shared entries.
    trained
        Names of those that are trained; a running mean has no update that points anywhere.
    sites
        All sites of the experiment.
    mean_norm, site_norm
        Thresholds of a split.
    """

    def __init__(
        self,
        shared: Mapping[str, torch.Tensor],
        trained: Sequence[str],
        sites: Sequence[str],
        *,
        mean_norm: float,
        site_norm: float,
    ):
        super().__init__(shared)
        self.trained = tuple(trained)
        self.mean_norm = mean_norm
        self.site_norm = site_norm
        self.groups: dict[tuple[str, ...], Tensors] = {tuple(sorted(sites)): self.shared}
        self._contributions: dict[str, tuple[Tensors, float]] = {}
        self._facts: list[dict[str, Any]] = []

    def message(self, site: str) -> Tensors:
        """Return the model of the group that a site belongs to."""
        return self.groups[self._group_of(site)]

    def addressees(self, sites: Sequence[str]) -> list[list[str]]:
        """Gather the sites of each group."""
        together: dict[tuple[str, ...], list[str]] = {}
        for site in sites:
            together.setdefault(self._group_of(site), []).append(site)
        return list(together.values())

    def reset(self) -> None:
        """Forget this round's contributions."""
        self._contributions = {}

    def add(self, site: str, tensors: Mapping[str, torch.Tensor], weight: float = 1.0) -> None:
        """Take one site's entries; they are kept until the round ends."""
        self._group_of(site)
        if site in self._contributions:
            raise ContributionError("it has contributed to this round already")
        validate_contribution(tensors, self.shared, weight)
        copies = {name: tensors[name].detach().clone() for name in self.shared}
        self._contributions[site] = (copies, weight)

    def update(self) -> None:
        """Look at each group, cut it where its updates disagree, and average within each part."""
        if not self._contributions:
            raise ContributionError("no contribution was accepted")
        self._facts = []
        groups: dict[tuple[str, ...], Tensors] = {}
        for members, model in sorted(self.groups.items()):
            for part in self._parts(members, model):
                groups[part] = self._mean_of(part) or model
        self.groups = groups

    def state(self) -> Tensors:
        """Return each group's entries, under the names of its sites."""
        return {
            f"{_GROUP}{'+'.join(members)}:{name}": tensor
            for members, model in sorted(self.groups.items())
            for name, tensor in model.items()
        }

    def facts(self) -> dict[str, Any]:
        """Return each group's update norms in the last round, and where it was cut."""
        return {"groups": [list(group) for group in sorted(self.groups)], "updates": self._facts}

    def saved(self) -> tuple[Tensors, dict[str, Any]]:
        """Return each group's entries, and who belongs to it."""
        return self.state(), {"groups": [list(group) for group in sorted(self.groups)]}

    def restore(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Go on with the groups as they were."""
        sites = sorted(site for members in self.groups for site in members)
        saved = facts.get("groups")
        if not isinstance(saved, list) or sorted(s for group in saved for s in group) != sites:
            raise StateMismatchError(f"the saved entries hold no groups of {', '.join(sites)}")
        groups = {}
        for group in saved:
            prefix = f"{_GROUP}{'+'.join(group)}:"
            own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            check_entries(own, self.shared, f"the saved entries of group {'+'.join(group)}")
            groups[tuple(group)] = own
        self.groups = groups

    def _group_of(self, site: str) -> tuple[str, ...]:
        for members in self.groups:
            if site in members:
                return members
        raise ContributionError(f"site {site!r} belongs to no group of this federation")

    def _mean_of(self, members: Sequence[str]) -> Tensors | None:
        present = [site for site in members if site in self._contributions]
        if not present:
            return None
        self._mean.reset()
        for site in present:
            self._mean.add(site, *self._contributions[site])
        return self._mean.result()

    def _parts(self, members: tuple[str, ...], model: Tensors) -> tuple[tuple[str, ...], ...]:
        """Return the group as it is, or the two that it is cut into."""
        if any(site not in self._contributions for site in members):
            return (members,)
        updates = {site: self._difference(self._contributions[site][0], model) for site in members}
        mean = self._mean_of(members)
        assert mean is not None
        mean_update = self._difference(mean, model)
        fact: dict[str, Any] = {
            "sites": list(members),
            "mean_norm": clusters.norm(mean_update),
            "largest_site_norm": max(clusters.norm(update) for update in updates.values()),
        }
        self._facts.append(fact)
        if not clusters.should_split(
            mean_update, updates, mean_norm=self.mean_norm, site_norm=self.site_norm
        ):
            return (members,)
        cut = clusters.bipartition(updates)
        fact |= {"cut": [list(part) for part in cut.parts], "similarity_across": cut.similarity}
        return cut.parts

    def _difference(self, after: Tensors, before: Tensors) -> np.ndarray:
        """Return one site's update of the trained entries, flattened to float64."""
        return np.concatenate(
            [
                (widened(after[name]) - widened(before[name])).numpy().reshape(-1)
                for name in self.trained
            ]
        )


def make_server(
    experiment: Experiment,
    network: nn.Module,
    partition: Partition,
    shared: Mapping[str, torch.Tensor] | None = None,
) -> Server:
    """Make the server of an experiment's algorithm.

    Parameters
    ----------
    experiment
        What is run.
    network, partition
        The network with its initial weights, and what of it is shared.
    shared
        Other shared entries to start from.
    """
    start = dict(shared) if shared is not None else entries(network, partition.shared)
    algorithm = experiment.algorithm
    if algorithm.name == "scaffold":
        return ScaffoldServer(start, trainable_names(network, partition.shared))
    if algorithm.name == "clustered":
        assert algorithm.split_mean_norm is not None  # the settings see to it
        assert algorithm.split_site_norm is not None
        return ClusteredServer(
            start,
            trainable_names(network, partition.shared),
            experiment.sites,
            mean_norm=algorithm.split_mean_norm,
            site_norm=algorithm.split_site_norm,
        )
    return Server(start)


def warm_start(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the network's shared entries out of what a server has saved, to start anew from.

    What belongs to the algorithm stays behind: control variates start at zero in every run.

    Raises
    ------
    fedbn.core.normalization.StateMismatchError
        If the server held a model for each of several groups of sites: there is no one to take.
    """
    entries, _ = control_variates.separate(tensors)
    groups = {name.partition(":")[0] for name in entries if name.startswith(_GROUP)}
    if len(groups) > 1:
        raise StateMismatchError(
            f"the saved weights are of {len(groups)} groups of sites "
            f"({', '.join(sorted(group.removeprefix(_GROUP) for group in groups))}): no single "
            "model can be taken from them; continue that run with `fedbn resume`"
        )
    return {
        name.partition(":")[2] if name.startswith(_GROUP) else name: tensor
        for name, tensor in entries.items()
    }
