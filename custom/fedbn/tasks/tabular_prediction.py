"""Complete models of tables: how they are described, and asked about rows of a csv."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from fedbn.core.batches import TensorSamples
from fedbn.tasks.bundling import (
    BATCH_NORM,
    Case,
    PredictionError,
    StandardizedBundling,
    Trained,
    TrainedOn,
)
from fedbn.tasks.site_network import TableNetwork


class TabularBundling(StandardizedBundling):
    """Models that take rows of a table, missing cells and all."""

    task: Any  # a TabularTask, whose module imports this one
    word = "patient"
    module = TableNetwork
    distances_mean: ClassVar[Mapping[str, str]] = {
        name: StandardizedBundling.distances_mean[name] for name in ("features", BATCH_NORM)
    }

    def card(self, trained_on: TrainedOn, shape: Sequence[int]) -> dict[str, Any]:
        """Describe the model; see :meth:`fedbn.tasks.bundling.Bundling.card`."""
        features = self.task.features
        return super().card(trained_on, shape) | {
            "name": f"{self.task.target} from a table at {trained_on.site}",
            "data_type": f"tables of {', '.join(self.task.columns)}",
            "input": (
                f"{len(features)} features in this order: {', '.join(features)}; a missing cell is "
                "NaN. Not standardised: that is a layer of the network"
            ),
            "example": "PATIENTS.csv",
            "inputs": {
                "type": "series",
                "format": "features",
                "channel_def": {str(k): name for k, name in enumerate(features)},
            },
        }

    def of_data(self, trained_on: TrainedOn, place: Path, trained: Trained) -> Iterator[Case]:
        """Read the rows of a csv, in which the class need not be known."""
        if not self.task.has_data(place):
            raise PredictionError(f"there is no table {place}")
        # A table does not name its site: it is told from another by its content alone.
        table = self.task.read(place, trained_on.site)
        columns = self.task.columns
        in_training = trained(table)
        everyone = np.arange(len(table.units))
        samples = self.task.samples(table, everyone, {}, torch.device("cpu"))
        cells = {name: np.array(table.column(name), dtype=object) for name in columns}
        for k, unit in enumerate(table.units):
            rows = np.flatnonzero(samples.owners == k)
            missing = [name for name in columns if None in cells[name][rows].tolist()]
            yield Case(
                unit.id,
                TensorSamples(samples.inputs[rows], samples.targets[rows], samples.owners[rows]),
                unit.stratum,
                None if in_training is None else bool(in_training[k]),
                {"missing": ", ".join(missing) or "none"},
            )
