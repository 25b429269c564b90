"""Complete models of tables: how they are described, and how they are asked about patients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from data_prep.table_store import TableStore
from fedbn.tasks.bundling import PredictionError, StandardizedBundling, TrainedOn
from fedbn.tasks.data import SiteData
from fedbn.tasks.site_network import TableNetwork
from fedbn.tasks.tabular import TabularTask


class TabularBundling(StandardizedBundling):
    """Models that take rows of a table, NaN where a cell is missing."""

    word = "patient"
    target_word = "class_in_table"
    distances_mean: ClassVar[Mapping[str, str]] = {
        name: words
        for name, words in StandardizedBundling.distances_mean.items()
        if name != "pattern"
    }

    def wrap(self, network: nn.Module, fitted: Mapping[str, torch.Tensor]) -> TableNetwork:
        """Put the rule for missing cells and the standardisation before a network, as a layer."""
        model = TableNetwork(network, len(fitted["mean"]))
        with torch.no_grad():
            for name, values in fitted.items():
                model.get_buffer(name).copy_(values)
        return model

    def fitted_of(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what stands for a missing cell, mean and standard deviation."""
        return {name: weights[name] for name in ("fill", "mean", "std")}

    def example(self, model: nn.Module, shape: Sequence[int], n: int, seed: int) -> torch.Tensor:
        """Return normal samples with the site's mean and standard deviation, some cells missing."""
        rows = super().example(model, shape, n, seed)
        rows[torch.rand(rows.shape, generator=torch.Generator().manual_seed(seed)) < 0.1] = (
            torch.nan
        )
        return rows

    def card(self, trained_on: TrainedOn, shape: Sequence[int]) -> dict[str, Any]:
        """Describe the model; see :meth:`fedbn.tasks.bundling.Bundling.card`."""
        task = self._task
        columns = ", ".join(task.columns)
        return super().card(trained_on, shape) | {
            "name": f"{task.target} from a table at {trained_on.site}",
            "data_type": "rows of a table",
            "input": (
                f"{shape[0]} features of a table's row, of the columns {columns}; NaN where a cell "
                "is missing. Not standardised: that is a layer of the network"
            ),
            "example": "PATIENTS.csv",
            "inputs": {
                "type": "table",
                "format": "features",
                "channel_def": {str(k): name for k, name in enumerate(task.features)},
            },
        }

    def read(self, trained_on: TrainedOn, place: Path) -> SiteData:
        """Read a table; a csv does not say whose it is, and a class may be missing."""
        if not self.task.has_data(place):
            raise PredictionError(
                f"{place} is no table: give a .csv with the columns of the training's, or a folder "
                "that holds table.csv"
            )
        return self.task.read(place, trained_on.site, verify=True)

    def unit_facts(self, trained_on: TrainedOn, data: SiteData, unit: int) -> dict[str, Any]:
        """Return how many features are missing in all rows of a patient."""
        assert isinstance(data, TableStore)
        missing = np.isnan(self._task.raw(data)[data.owners == unit]).all(axis=0)
        return {"facts": {"features_missing": int(missing.sum())}}

    @property
    def _task(self) -> TabularTask:
        assert isinstance(self.task, TabularTask)
        return self.task
