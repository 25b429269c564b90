"""Autism against control from connectomes: the samples are windows of a subject's session."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from data_prep.compatibility import signature_differences
from data_prep.site_store import (
    DESCRIPTION,
    DIAGNOSES,
    SiteStore,
    find_site_stores,
    read_site_store,
)
from fedbn.core.batches import TensorSamples
from fedbn.tasks.base import Features
from fedbn.tasks.classification import ClassificationTask
from fedbn.tasks.data import Index, SiteData

_CHUNK = 512


class ConnectomeTask(ClassificationTask):
    """Two diagnoses from site stores of connectomes.

    Attributes
    ----------
    standardization
        ``"site"``: each edge is z-scored with the mean and standard deviation of the site's own
        training samples. ``"none"``: edges are used as they are stored.
    """

    name: Literal["connectome"] = "connectome"
    standardization: Literal["site", "none"] = "site"
    levels: ClassVar[tuple[str, ...]] = ("subject", "window")

    @property
    def class_names(self) -> tuple[str, ...]:
        """Control and autism."""
        return tuple(DIAGNOSES)

    def has_data(self, place: Path) -> bool:
        """Whether a store's description is there."""
        return (place / DESCRIPTION).is_file()

    def read(self, place: Path, site: str, *, verify: bool = False) -> SiteStore:
        """Read a site store; see :meth:`fedbn.tasks.base.Task.read`."""
        return read_site_store(place, verify=verify)

    def bundling(self) -> Any:
        """Return how models of connectomes are packed and asked about scans."""
        from fedbn.tasks.connectome.prediction import ConnectomeBundling

        return ConnectomeBundling(self)

    def describe(self, data: SiteData) -> str:
        """Say how many connectomes there are."""
        store = _store(data)
        n_connectomes, n_edges = store.connectomes.shape
        return f"{len(store.units)} subjects, {n_connectomes} connectomes of {n_edges} edges"

    def differences(self, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
        """Name atlas, ROIs and settings of connectomes that differ."""
        return signature_differences(a, b)

    def fit(self, data: SiteData, train: Index) -> dict[str, torch.Tensor]:
        """Return ``mean`` and ``std`` of each edge, float32 (n_edges,); zeros and ones without.

        An edge that does not vary has a standard deviation of 1.
        """
        store = _store(data)
        mean, std = np.zeros(store.n_edges), np.ones(store.n_edges)
        if self.standardization == "site":
            mean, std = mean_and_std(store, rows_of(store, train))
        return {
            "mean": torch.from_numpy(mean.astype(np.float32)),
            "std": torch.from_numpy(std.astype(np.float32)),
        }

    def represented(
        self, name: str, data: Mapping[str, SiteData], train: Mapping[str, Index]
    ) -> dict[str, SiteData]:
        """Return connectomes in the ``"tangent"`` space of the training subjects' mean."""
        if name != "tangent":
            return super().represented(name, data, train)
        from fedbn.tasks.connectome.tangent import tangent_stores

        stores = {site: _store(one) for site, one in data.items()}
        rows = {site: rows_of(store, train[site]) for site, store in stores.items()}
        return {**tangent_stores(stores, rows)}

    def samples(
        self,
        data: SiteData,
        units: Index,
        fitted: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> TensorSamples:
        """Read the windows of some subjects into one contiguous tensor, standardised if fitted."""
        store = _store(data)
        rows = rows_of(store, units)
        inputs = torch.empty((len(rows), store.n_edges), dtype=torch.float32)
        for start in range(0, len(rows), _CHUNK):
            chunk = rows[start : start + _CHUNK]
            block = inputs[start : start + len(chunk)]
            np.take(store.connectomes, chunk, axis=0, out=block.numpy())
            if self.standardization == "site" and fitted:
                block.sub_(fitted["mean"]).div_(fitted["std"])
        owners = store.sample_participant[rows]
        return TensorSamples(inputs.to(device), torch.from_numpy(store.labels[owners]), owners)

    def feature_names(self, data: SiteData) -> Features:
        """Name each edge by the id and name of both of its ROIs."""
        rois = _store(data).rois
        names = tuple((*rois[a], *rois[b]) for a, b in itertools.combinations(range(len(rois)), 2))
        return Features("edge", ("roi_a", "name_a", "roi_b", "name_b"), names, ("name_a", "name_b"))

    def relabelled(self, data: SiteData, order: Index) -> SiteStore:
        """Return the store with each subject's diagnosis that of another."""
        store = _store(data)
        people = (
            replace(one, diagnosis=store.participants[k].diagnosis)
            for one, k in zip(store.participants, order, strict=True)
        )
        return replace(store, participants=tuple(people))

    def describe_sample(self, data: SiteData) -> str:
        """Say how many edges a connectome has."""
        return f"store's samples of {_store(data).n_edges} edges"


def _store(data: SiteData) -> SiteStore:
    assert isinstance(data, SiteStore)
    return data


def rows_of(store: SiteStore, units: Index) -> np.ndarray:
    """Return the rows of some subjects' windows, in order."""
    return np.flatnonzero(np.isin(store.sample_participant, units))


def mean_and_std(store: SiteStore, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each edge, in float64, a chunk of rows at a time."""
    chunks = [rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK)]
    total = np.zeros(store.n_edges)
    for chunk in chunks:
        total += np.sum(store.connectomes[chunk], axis=0, dtype=np.float64)
    mean = total / len(rows)
    squares = np.zeros(store.n_edges)
    for chunk in chunks:
        deviation = store.connectomes[chunk] - mean
        squares += np.einsum("ij,ij->j", deviation, deviation)
    std = np.sqrt(squares / len(rows))
    std[std < 1e-6] = 1.0
    return mean, std


def kinds_of_rows(root: Path, n: int) -> dict[str, list[np.ndarray]]:
    """Return the connectomes of each site below a folder: one a subject, and the first `n`.

    The latter are windows of few subjects, so that neighbours are among them; without windows they
    are left out.
    """
    stores = [read_site_store(path) for path in find_site_stores(root)]
    first = [
        store.connectomes[np.unique(store.sample_participant, return_index=True)[1]]
        for store in stores
    ]
    kinds = {"connectomes, one a subject": first}
    if any(len(store.connectomes) > len(rows) for store, rows in zip(stores, first, strict=True)):
        kinds["connectomes, overlapping windows"] = [store.connectomes[:n] for store in stores]
    return kinds
