"""Classes from a table: numbers and categories, with missing cells, one csv a site."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator

from data_prep.table_store import TABLE, TableStore, read_table_store
from fedbn.core.batches import TensorSamples
from fedbn.tasks.classification import ClassificationTask
from fedbn.tasks.data import DataError, Index, SiteData, Split


class TabularTask(ClassificationTask):
    """Learn a column of a table from others.

    Attributes
    ----------
    target
        The column that is learned.
    classes
        Name of each class, in the order of the network's outputs, to the cells that mean it.
    numbers
        Columns of numbers, one feature each.
    categories
        Columns of categories to their values, one feature a value: 1 for the value, else 0.
    standardization
        ``"site"``: each feature is z-scored with the mean and standard deviation of the site's own
        training patients, after missing cells are filled. ``"none"``: features are used as they
        are.

    Notes
    -----
    A missing number is filled with the median of the site's own training patients, a missing
    category with their most frequent one. A column that a site has not at all is allowed: its
    features are 0, as those of an average patient, and the site's facts name it.
    """

    name: Literal["tabular"] = "tabular"
    target: str
    classes: dict[str, list[str]]
    numbers: list[str] = Field(default_factory=list)
    categories: dict[str, list[str]] = Field(default_factory=dict)
    standardization: Literal["site", "none"] = "site"

    @field_validator("classes")
    @classmethod
    def _distinct(cls, value: dict[str, list[str]]) -> dict[str, list[str]]:
        cells = [cell for of_class in value.values() for cell in of_class]
        twice = [cell for k, cell in enumerate(cells) if cell in cells[:k]]
        if len(value) < 2 or twice or not all(value.values()):
            raise ValueError(
                f"cell {twice[0]!r} means two classes"
                if twice
                else "give two classes or more, each with the cells of the target that mean it"
            )
        return value

    @model_validator(mode="after")
    def _columns(self) -> TabularTask:
        columns = [*self.numbers, *self.categories]
        twice = [name for k, name in enumerate(columns) if name in columns[:k]]
        if not columns or twice or self.target in columns:
            raise ValueError(
                f"column {twice[0]!r} is named twice"
                if twice
                else f"the target {self.target!r} is among the columns that it is learned from"
                if columns
                else "give columns to learn from: numbers, categories or both"
            )
        return self

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes as the experiment states them."""
        return tuple(self.classes)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the network's inputs in order: ``age``, ``cp=1`` and so on."""
        of_values = (f"{name}={value}" for name, v in self.categories.items() for value in v)
        return (*self.numbers, *of_values)

    def has_data(self, place: Path) -> bool:
        """Whether a table is there."""
        return place.is_file() or (place / TABLE).is_file()

    def read(self, place: Path, site: str, *, verify: bool = False) -> TableStore:
        """Read a site's table; see :meth:`fedbn.tasks.base.Task.read`."""
        store = read_table_store(place, site, self.target, self.classes)
        if verify:
            self._raw(store)
        return store

    def fit(self, data: SiteData, train: Index) -> dict[str, torch.Tensor]:
        """Return ``fill``, ``mean`` and ``std`` of each feature, float32 (n_features,)."""
        store = _table(data)
        raw = self._raw(store)[np.isin(store.owners, train)]
        known = ~np.isnan(raw)
        fill = np.zeros(raw.shape[1])
        for k in range(len(self.numbers)):
            if known[:, k].any():
                fill[k] = np.median(raw[known[:, k], k])
        start = len(self.numbers)
        for values in self.categories.values():
            part = slice(start, start + len(values))
            counts = np.nansum(raw[:, part], axis=0)
            if counts.any():
                fill[start + int(counts.argmax())] = 1
            start = part.stop
        mean, std = np.zeros_like(fill), np.ones_like(fill)
        if self.standardization == "site":
            filled = np.where(known, raw, fill)
            mean, std = filled.mean(axis=0), filled.std(axis=0)
            std[std < 1e-6] = 1.0
        numbers = {"fill": fill, "mean": mean, "std": std}
        return {name: torch.from_numpy(v.astype(np.float32)) for name, v in numbers.items()}

    def samples(
        self,
        data: SiteData,
        units: Index,
        fitted: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> TensorSamples:
        """Return the rows of some patients, filled and standardised, (n, n_features) float32."""
        store = _table(data)
        rows = np.flatnonzero(np.isin(store.owners, units))
        raw = torch.from_numpy(self._raw(store)[rows].astype(np.float32))
        filled = torch.where(raw.isnan(), fitted["fill"], raw)
        inputs = (filled - fitted["mean"]) / fitted["std"]
        targets = torch.from_numpy(store.labels[rows])
        return TensorSamples(inputs.to(device), targets, store.owners[rows])

    def facts(self, data: SiteData, split: Split) -> dict[str, Any]:
        """Add the columns that the site has not at all, and how many cells are missing."""
        store = _table(data)
        columns = [*self.numbers, *self.categories]
        cells = {name: store.column(name) for name in columns}
        absent = [name for name in columns if not any(cells[name])]
        n_missing = sum(value is None for of_column in cells.values() for value in of_column)
        return {
            **super().facts(data, split),
            "columns_without_values": absent,
            "missing_cells_share": n_missing / (len(columns) * len(store.rows)),
        }

    def describe_sample(self, data: SiteData) -> str:
        """Say how many features a row has."""
        return f"table's rows of {len(self.features)} features"

    def _raw(self, store: TableStore) -> np.ndarray:
        """Return the features of every row, float64 (n_rows, n_features), NaN where missing."""
        found = [self._numbers(store, name) for name in self.numbers]
        for name, values in self.categories.items():
            cells = self._categories(store, name, values)
            found += [
                np.array([np.nan if cell is None else float(cell == value) for cell in cells])
                for value in values
            ]
        return np.stack(found, axis=1)

    def _numbers(self, store: TableStore, name: str) -> np.ndarray:
        column = np.full(len(store.rows), np.nan)
        for k, cell in enumerate(store.column(name)):
            if cell is None:
                continue
            try:
                column[k] = float(cell)
            except ValueError:
                column[k] = np.inf
            if not np.isfinite(column[k]):
                raise DataError(
                    f"site {store.site!r}: {name!r} is {cell!r} in row {k + 2} of {store.place}, "
                    "which is no number; leave a missing cell empty"
                )
        return column

    def _categories(self, store: TableStore, name: str, values: list[str]) -> list[str | None]:
        cells = store.column(name)
        for k, cell in enumerate(cells):
            if cell is not None and cell not in values:
                raise DataError(
                    f"site {store.site!r}: {name!r} is {cell!r} in row {k + 2} of {store.place}; "
                    f"the experiment states {', '.join(values)}"
                )
        return cells


def _table(data: SiteData) -> TableStore:
    assert isinstance(data, TableStore)
    return data
