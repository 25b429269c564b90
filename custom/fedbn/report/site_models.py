"""Each site's complete model after a run, and how much the sites' batch norms differ.

The models come from a FLARE workspace, where each site has kept its own, or from the same
experiment run once more in this process. What is computed of them needs no subject; only the
embedding does, and it is given the sites' stores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_prep.site_store import SiteStore, StoreError
from fedbn.core.normalization import Partition, entries, load_entries
from fedbn.federation.experiment import Experiment
from fedbn.federation.simulation import Federation
from fedbn.federation.site import Site, make_network, split_fitted
from fedbn.federation.site_state import COMPLETE_MODEL, SiteStateError, load_checkpoint
from fedbn.study.methods import tensors as in_memory
from fedbn.tasks.connectome.task import rows_of
from fedbn.tasks.data import SiteData

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
    standardization
        Site name to the mean and standard deviation that its features were standardised with.
    rois
        ROI id and name of each node.
    atlas
        Its name, as in the stores.
    """

    experiment: Experiment
    partition: Partition
    by_site: dict[str, dict[str, torch.Tensor]]
    standardization: dict[str, tuple[torch.Tensor, torch.Tensor]]
    rois: tuple[tuple[str, str], ...]
    atlas: str

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
    by_site, standardization, signature = {}, {}, None
    for site in experiment.sites:
        paths = sorted(workspace.rglob(f"{job}/{site}/model.pt"))
        if not paths:
            continue
        tensors, meta = load_checkpoint(paths[0], COMPLETE_MODEL)
        own, fitted = split_fitted(tensors)
        if set(own) != names or meta.get("site") != site:
            raise SiteStateError(f"{paths[0]} is not the model of site {site!r} in this run")
        by_site[site] = own
        standardization[site] = (fitted["mean"], fitted["std"])
        signature = meta["facts"]["signature"]
    if signature is None:
        return None
    rois = tuple((str(roi_id), str(name)) for roi_id, name in signature["rois"])
    return SiteModels(
        experiment, partition, by_site, standardization, rois, str(signature["atlas"])
    )


def from_federation(
    federation: Federation, experiment: Experiment, sites: Sequence[str]
) -> SiteModels:
    """Take the models of a federation that was run in this process, in the order of `sites`."""
    by_site, standardization = {}, {}
    for name in sites:
        site = federation.load(name)
        by_site[name] = entries(site.network, tuple(site.network.state_dict()))
        fitted = site.preparation.fitted
        standardization[name] = (fitted["mean"], fitted["std"])
    any_site = next(iter(federation.sites.values()))
    store = any_site.data
    assert isinstance(store, SiteStore)
    atlas = str(store.description["atlas"])
    return SiteModels(experiment, any_site.partition, by_site, standardization, store.rois, atlas)


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
    """Subjects of all sites on two principal components.

    Attributes
    ----------
    title
        What was embedded.
    points
        (n_subjects, 2).
    owner
        Index of each subject's site, (n_subjects,).
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


def embeddings(models: SiteModels, stores: Mapping[str, SiteData]) -> list[Embedding]:
    """Embed the subjects' mean connectomes, and what goes into and comes out of the first layer.

    Every site's samples go through its own network, in eval mode; a subject is the mean of its
    windows.

    Raises
    ------
    data_prep.site_store.StoreError
        If a store is not the one that the site's model was trained on.
    """
    stages: dict[str, list[np.ndarray]] = {
        "connectomes as they are stored": [],
        "into the first batch norm": [],
        "out of the first batch norm": [],
    }
    owner = []
    for k, name in enumerate(models.by_site):
        site = checked_site(models, name, stores[name])
        for values, of_stage in zip(_of_site(site), stages.values(), strict=True):
            of_stage.append(values)
        owner.append(np.full(len(site.data.units), k))
    return [
        _embedded(title, np.concatenate(of_sites), np.concatenate(owner))
        for title, of_sites in stages.items()
    ]


def checked_site(models: SiteModels, name: str, store: SiteData) -> Site:
    """Return a site with its model loaded, if this store is what the model was trained on."""
    site = Site(name, store, models.experiment)
    mean, std = models.standardization[name]
    fitted = site.preparation.fitted
    same = all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5)
        for a, b in ((fitted["mean"], mean), (fitted["std"], std))
    )
    if not same:
        raise StoreError(
            f"site {name!r}: the store at {store.place} is not the one that its model was trained "
            "on"
        )
    load_entries(site.network, models.by_site[name])
    return site


def _of_site(site: Site) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return stored connectomes and the first layer's input and output, a mean a subject."""
    layer = site.network.get_submodule(site.partition.layers[0])
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(_: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen.append((_flat(inputs[0]), _flat(output)))

    train, test = in_memory(site.train_samples), in_memory(site.test)
    store = site.data
    assert isinstance(store, SiteStore)
    split = site.preparation.split
    rows = np.concatenate([rows_of(store, split.train), rows_of(store, split.test)])
    inputs = torch.cat([train.inputs, test.inputs])
    handle = layer.register_forward_hook(keep)
    site.network.eval()
    try:
        with torch.no_grad():
            for chunk in inputs.split(_CHUNK):
                site.network(chunk)
    finally:
        handle.remove()
    before, after = (torch.cat(part).double().cpu().numpy() for part in zip(*seen, strict=True))
    owners = store.sample_participant[rows]
    return (
        _mean_of_subjects(store.connectomes[rows].astype(np.float64), owners),
        _mean_of_subjects(before, owners),
        _mean_of_subjects(after, owners),
    )


def _flat(values: torch.Tensor) -> torch.Tensor:
    """Return (n, channels): the mean over whatever dimensions come after the channels."""
    return values if values.ndim == 2 else values.flatten(2).mean(dim=2)


def _mean_of_subjects(values: np.ndarray, owners: np.ndarray) -> np.ndarray:
    order = np.argsort(owners, kind="stable")
    _, first, counts = np.unique(owners[order], return_index=True, return_counts=True)
    means: np.ndarray = np.add.reduceat(values[order], first, axis=0) / counts[:, None]
    return means


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
