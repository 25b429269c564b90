"""Each site's complete model after a run, and how much the sites' batch norms differ.

The models come from a FLARE workspace, where each site has kept its own, or from the same
experiment run once more in this process. What is computed of them needs no subject; only the
embedding does, and it is given the sites with their data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbn.core.batches import TensorSamples
from fedbn.core.normalization import Partition, entries, load_entries
from fedbn.federation.experiment import Experiment
from fedbn.federation.simulation import Federation
from fedbn.federation.site import Site, make_network, split_fitted
from fedbn.federation.site_state import COMPLETE_MODEL, SiteStateError, load_checkpoint
from fedbn.tasks.classification import unit_means
from fedbn.tasks.data import DataError, SiteData

_CHUNK = 512


@dataclass(frozen=True)
class SiteModels:
    """The complete network of each site after the last round.

    Attributes
    ----------
    experiment
        What was run.
    partition
        Which entries stayed at the sites.
    by_site
        Site name to all entries of its network.
    fitted
        Site name to what the task fitted on its training units.
    """

    experiment: Experiment
    partition: Partition
    by_site: dict[str, dict[str, torch.Tensor]]
    fitted: dict[str, dict[str, torch.Tensor]]

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the batch-norm layers that have statistics."""
        any_site = next(iter(self.by_site.values()))
        return tuple(
            layer for layer in self.partition.layers if f"{layer}.running_mean" in any_site
        )


def from_workspace(workspace: Path, experiment: Experiment, job: str) -> SiteModels | None:
    """Read the models that the sites of a FLARE run have kept below a folder.

    Returns
    -------
    SiteModels or None
        ``None`` if there is no such file: at the server of a real federation there is none, and at
        a site there is its own alone.

    Raises
    ------
    fedbn.federation.site_state.SiteStateError
        If a file is damaged, or of another network.
    """
    network, partition = make_network(experiment)
    names = set(network.state_dict())
    by_site, fitted = {}, {}
    for site in experiment.sites:
        paths = sorted(workspace.rglob(f"{job}/{site}/model.pt"))
        if not paths:
            continue
        tensors, meta = load_checkpoint(paths[0], COMPLETE_MODEL)
        own, fitted[site] = split_fitted(tensors)
        if set(own) != names or meta.get("site") != site:
            raise SiteStateError(f"{paths[0]} is not the model of site {site!r} in this run")
        by_site[site] = own
    return SiteModels(experiment, partition, by_site, fitted) if by_site else None


def from_federation(
    federation: Federation, experiment: Experiment, sites: Sequence[str]
) -> SiteModels:
    """Take the models of a federation that was run in this process, in the order of `sites`."""
    by_site, fitted = {}, {}
    for name in sites:
        site = federation.load(name)
        by_site[name] = entries(site.network, tuple(site.network.state_dict()))
        fitted[name] = site.preparation.fitted
    partition = next(iter(federation.sites.values())).partition
    return SiteModels(experiment, partition, by_site, fitted)


# ---------------------------------------------------------------------- distance of batch norms


def statistics_distance(models: SiteModels, layer: str) -> np.ndarray:
    """Return how far the statistics of a batch-norm layer are from each other, site by site.

    Each channel of a site is taken as a normal distribution with the layer's running mean and
    variance. Two of them are ``sqrt((mean - mean')^2 + (sd - sd')^2)`` apart (2-Wasserstein);
    relative to the channel's standard deviation over all sites (root of the mean variance), and as
    root mean square over channels.

    Returns
    -------
    numpy.ndarray
        (n_sites, n_sites), symmetric, zeros on the diagonal, in standard deviations.
    """
    mean = _of_layer(models, layer, "running_mean")
    variance = _of_layer(models, layer, "running_var")
    scale = np.sqrt(variance.mean(axis=0)) + 1e-12
    return _root_mean_square(mean / scale, np.sqrt(variance) / scale)


def affine_distance(models: SiteModels, layer: str) -> np.ndarray:
    """Return how far gamma and beta of a layer are from each other, site by site.

    Root of the mean over channels of ``(gamma - gamma')^2 + (beta - beta')^2``.
    """
    gamma, beta = (_of_layer(models, layer, name) for name in ("weight", "bias"))
    return _root_mean_square(gamma, beta)


def by_pair(matrix: np.ndarray) -> np.ndarray:
    """Return the upper triangle of a matrix, row by row."""
    upper: np.ndarray = matrix[np.triu_indices(len(matrix), k=1)]
    return upper


def pairs(models: SiteModels) -> list[str]:
    """Name the pairs of sites in the order of :func:`by_pair`."""
    return [f"{a} - {b}" for a, b in combinations(models.by_site, 2)]


def _of_layer(models: SiteModels, layer: str, entry: str) -> np.ndarray:
    """Return an entry of a layer at all sites, (n_sites, n_channels)."""
    tensors = [tensors[f"{layer}.{entry}"] for tensors in models.by_site.values()]
    return torch.stack(tensors).double().cpu().numpy()


def _root_mean_square(*parts: np.ndarray) -> np.ndarray:
    total = sum((part[:, None, :] - part[None, :, :]) ** 2 for part in parts)
    distance: np.ndarray = np.sqrt(np.mean(total, axis=-1))
    return distance


# ------------------------------------------------------------------------------------- embedding


@dataclass(frozen=True)
class Embedding:
    """Units of all sites on two principal components.

    Attributes
    ----------
    title
        What was embedded.
    points
        (n_units, 2).
    owner
        Index of each unit's site, (n_units,).
    explained
        Share of the variance on each component, (2,).
    between
        Share of the variance, over all features, that lies between the sites' means.
    """

    title: str
    points: np.ndarray
    owner: np.ndarray
    explained: np.ndarray
    between: float


def checked_sites(models: SiteModels, data: Mapping[str, SiteData]) -> dict[str, Site]:
    """Return the sites with their models loaded, if these data are what they were trained on.

    Raises
    ------
    fedbn.tasks.data.DataError
        Naming the site whose data are others.
    """
    return {name: checked_site(models, name, data[name]) for name in models.by_site}


def checked_site(models: SiteModels, name: str, data: SiteData) -> Site:
    """Return one such site; see :func:`checked_sites`."""
    site = Site(name, data, models.experiment)
    here, there = site.preparation.fitted, models.fitted[name]
    same = here.keys() == there.keys() and all(
        one.shape == there[key].shape and torch.allclose(one, there[key], rtol=1e-4, atol=1e-5)
        for key, one in here.items()
    )
    if not same:
        raise DataError(
            f"site {name!r}: the store at {data.place} is not the one that its model was trained on"
        )
    load_entries(site.network, models.by_site[name])
    return site


def embeddings(sites: Mapping[str, Site]) -> list[Embedding]:
    """Embed the units' mean samples, and what goes into and comes out of the first batch norm.

    Every site's samples go through its own network, in eval mode.

    Raises
    ------
    ValueError
        If the task does not hold a site's samples in memory.
    """
    stages: dict[str, list[np.ndarray]] = {
        "samples before standardisation": [],
        "into the first batch norm": [],
        "out of the first batch norm": [],
    }
    owner = []
    for k, site in enumerate(sites.values()):
        for values, of_stage in zip(_of_site(site), stages.values(), strict=True):
            of_stage.append(values)
        owner.append(np.full(len(stages["into the first batch norm"][-1]), k))
    return [
        _embedded(title, np.concatenate(of_sites), np.concatenate(owner))
        for title, of_sites in stages.items()
    ]


def _of_site(site: Site) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return samples and the first layer's input and output, a mean a unit."""
    layer = site.network.get_submodule(site.partition.layers[0])
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(_: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen.append((_flat(inputs[0]), _flat(output)))

    split = site.preparation.split
    units = np.concatenate([split.train, split.test])
    samples = _samples(site, units, site.preparation.fitted)
    handle = layer.register_forward_hook(keep)
    site.network.eval()
    try:
        with torch.no_grad():
            for chunk in samples.inputs.split(_CHUNK):
                site.network(chunk)
    finally:
        handle.remove()
    before, after = (torch.cat(part).double().cpu().numpy() for part in zip(*seen, strict=True))
    plain = _samples(site, units, not_standardised(site.preparation.fitted)).inputs.flatten(1)
    stages = (plain.double().cpu().numpy(), before, after)
    first, into, out = (unit_means(values, samples.owners)[0] for values in stages)
    return first, into, out


def _samples(site: Site, units: np.ndarray, fitted: Mapping[str, torch.Tensor]) -> TensorSamples:
    samples = site.task.samples(site.data, units, fitted, site.device)
    if not isinstance(samples, TensorSamples):
        raise ValueError(f"task {site.task.name!r} does not hold its samples in memory")
    return samples


def not_standardised(fitted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what a task fitted with a mean of 0 and a standard deviation of 1."""
    plain = {"mean": torch.zeros_like, "std": torch.ones_like}
    return {name: plain[name](one) if name in plain else one for name, one in fitted.items()}


def _flat(values: torch.Tensor) -> torch.Tensor:
    """Return (n, channels): the mean over whatever dimensions come after the channels."""
    return values if values.ndim == 2 else values.flatten(2).mean(dim=2)


def _embedded(title: str, values: np.ndarray, owner: np.ndarray) -> Embedding:
    from sklearn.decomposition import PCA

    pca = PCA(2, random_state=0)
    return Embedding(
        title=title,
        points=pca.fit_transform(values),
        owner=owner,
        explained=pca.explained_variance_ratio_,
        between=share_between(values, owner),
    )


def share_between(values: np.ndarray, owner: np.ndarray) -> float:
    """Return the share of the total sum of squares that lies between group means, in [0, 1]."""
    centred = values - values.mean(axis=0)
    between = sum(
        float(np.sum(owner == k)) * float(np.sum(centred[owner == k].mean(axis=0) ** 2))
        for k in np.unique(owner)
    )
    total = float(np.sum(centred**2))
    return between / total if total else 0.0
