"""Classes from a table: numbers and categories, with missing cells, one csv a site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, field_validator, model_validator

from data_prep.errors import some_of
from data_prep.table_store import TABLE, TableStore, plain, read_table_store
from fedbn.core.batches import TensorSamples
from fedbn.tasks.base import Features
from fedbn.tasks.classification import ClassificationTask
from fedbn.tasks.data import DataError, Index, SiteData, Split, SplitSettings
from fedbn.tasks.site_network import standardized_rows

Cell = Annotated[str, BeforeValidator(lambda v: plain(str(v)) if isinstance(v, int | str) else v)]
"""What a category's cell holds; a job may write a number for it."""

Named = Annotated[
    tuple[tuple[str, tuple[Cell, ...]], ...],
    BeforeValidator(lambda value: list(value.items()) if isinstance(value, Mapping) else value),
]
"""Names in order, each with its cells. A job may write an object; what is kept is a list of pairs,
as the order of an object's names can be lost on the way."""


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
    category with their most frequent one. A feature that does not vary among them is 0 for
    everybody at the site. So are those of a column that a site has not at all, which is allowed;
    the site's facts name it.
    """

    name: Literal["tabular"] = "tabular"
    target: str
    classes: Named
    numbers: tuple[str, ...] = ()
    categories: Named = ()
    standardization: Literal["site", "none"] = "site"

    @field_validator("classes")
    @classmethod
    def _distinct_classes(cls, value: Named) -> Named:
        if twice := _twice([name for name, _ in value]):
            raise ValueError(f"class {twice!r} is named twice")
        if twice := _twice([cell for _, cells in value for cell in cells]):
            raise ValueError(f"cell {twice!r} means two classes")
        if len(value) < 2 or not all(cells for _, cells in value):
            raise ValueError(
                "give two classes or more, each with the cells of the target that mean it"
            )
        return value

    @field_validator("categories")
    @classmethod
    def _distinct_values(cls, value: Named) -> Named:
        for name, cells in value:
            if len(cells) < 2 or _twice(cells):
                raise ValueError(f"give two values or more of {name!r}, each once")
        return value

    @model_validator(mode="after")
    def _columns(self) -> TabularTask:
        if twice := _twice(self.columns):
            raise ValueError(f"column {twice!r} is named twice")
        if self.target in self.columns:
            raise ValueError(
                f"the target {self.target!r} is among the columns that it is learned from"
            )
        if not self.features:
            raise ValueError("give columns to learn from: numbers, categories or both")
        return self

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes as the experiment states them."""
        return tuple(name for name, _ in self.classes)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that are learned from."""
        return (*self.numbers, *(name for name, _ in self.categories))

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the network's inputs in order: ``age``, ``cp=1`` and so on."""
        of_values = (f"{name}={value}" for name, v in self.categories for value in v)
        return (*self.numbers, *of_values)

    def has_data(self, place: Path) -> bool:
        """Whether a table is there."""
        return (place if place.suffix == ".csv" else place / TABLE).is_file()

    def read(self, place: Path, site: str, *, verify: bool = False) -> TableStore:
        """Read a site's table, every cell of it; see :meth:`fedbn.tasks.base.Task.read`."""
        store = read_table_store(place, site, self.target, dict(self.classes))
        known = {name.casefold(): name for name in store.cells}
        for name in self.columns:
            if name not in store.cells and name.casefold() in known:
                raise DataError(
                    f"site {site!r}: {store.place} has a column {known[name.casefold()]!r}, which "
                    f"the job calls {name!r}; rename it"
                )
        if not any(cell is not None for name in self.columns for cell in store.column(name)):
            raise DataError(
                f"site {site!r}: {store.place} has no value in any column that the job learns "
                f"from: {some_of(self.columns, 20)}"
            )
        self.raw(store)
        return store

    def split(self, data: SiteData, settings: SplitSettings) -> Split:
        """Divide as :meth:`Task.split`; refuse a patient whose class is missing."""
        _table(data).require_classes()
        return super().split(data, settings)

    def bundling(self) -> Any:
        """Return how models of tables are packed and asked."""
        from fedbn.tasks.tabular_prediction import TabularBundling

        return TabularBundling(self)

    def fit(self, data: SiteData, train: Index) -> dict[str, torch.Tensor]:
        """Return ``fill``, ``mean`` and ``std`` of each feature, float32 (n_features,).

        A standard deviation of 0 marks a feature that is 0 for everybody.
        """
        store = _table(data)
        raw = self.raw(store)[np.isin(store.owners, train)]
        known = ~np.isnan(raw)
        fill = np.zeros(raw.shape[1])
        for k in range(len(self.numbers)):
            if known[:, k].any():
                fill[k] = np.median(raw[known[:, k], k])
        start = len(self.numbers)
        for _, values in self.categories:
            counts = np.nansum(raw[:, start : start + len(values)], axis=0)
            if counts.any():
                fill[start + int(counts.argmax())] = 1
            start += len(values)
        mean, std = np.zeros_like(fill), known.any(axis=0).astype(float)
        if self.standardization == "site":
            filled = np.where(known, raw, fill)
            mean, std = filled.mean(axis=0), filled.std(axis=0)
            std[np.ptp(filled, axis=0) == 0] = 0
        numbers = {"fill": fill, "mean": mean, "std": std}
        return {name: torch.from_numpy(v.astype(np.float32)) for name, v in numbers.items()}

    def samples(
        self,
        data: SiteData,
        units: Index,
        fitted: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> TensorSamples:
        """Return the rows of some patients, filled and standardised, (n, n_features) float32.

        With nothing fitted a missing cell is NaN.
        """
        store = _table(data)
        rows = np.flatnonzero(np.isin(store.owners, units))
        inputs = torch.from_numpy(self.raw(store)[rows].astype(np.float32))
        if fitted:
            inputs = standardized_rows(inputs, **fitted)
        targets = torch.from_numpy(store.labels[rows])
        return TensorSamples(inputs.to(device), targets, store.owners[rows])

    def facts(self, data: SiteData, split: Split) -> dict[str, Any]:
        """Add the columns that the site has not at all, and how many cells are missing."""
        store = _table(data)
        cells = {name: store.column(name) for name in self.columns}
        absent = [name for name in self.columns if not any(cells[name])]
        n_missing = sum(value is None for of_column in cells.values() for value in of_column)
        return {
            **super().facts(data, split),
            "columns_without_values": absent,
            "missing_cells_share": n_missing / (len(self.columns) * len(store.lines)),
        }

    def remarks(self, facts: Mapping[str, Any]) -> list[str]:
        """Name the columns that the site has not."""
        absent = facts.get("columns_without_values")
        return [f"columns without values: {', '.join(absent)}"] if absent else []

    def feature_names(self, data: SiteData) -> Features:
        """Name each feature."""
        return Features("feature", ("feature",), tuple((n,) for n in self.features), ("feature",))

    def relabelled(self, data: SiteData, order: Index) -> TableStore:
        """Return the table with the target of each participant's rows that of another."""
        store = _table(data)
        first = np.unique(store.owners, return_index=True)[1]
        cells = store.column(self.target)
        dealt = [cells[k] for k in first[order[store.owners]]]
        return replace(store, cells={**store.cells, self.target: dealt})

    def describe_sample(self, data: SiteData) -> str:
        """Say how many features a row has."""
        return f"table's rows of {len(self.features)} features"

    def raw(self, data: SiteData) -> np.ndarray:
        """Return the features of every row, float64 (n_rows, n_features), NaN where missing."""
        store, names = _table(data), self.features
        if names not in store.made:
            found = [self._numbers(store, name) for name in self.numbers]
            for name, values in self.categories:
                cells = self._categories(store, name, values)
                found += [
                    np.array([np.nan if cell is None else float(cell == value) for cell in cells])
                    for value in values
                ]
            store.made[names] = np.stack(found, axis=1)
        return store.made[names]

    def _numbers(self, store: TableStore, name: str) -> np.ndarray:
        column = np.full(len(store.lines), np.nan)
        for row, cell in enumerate(store.column(name)):
            if cell is None:
                continue
            try:
                column[row] = np.inf if "_" in cell else float(cell)  # 1_000 is a number in Python
            except ValueError:
                column[row] = np.inf
            if not np.isfinite(column[row]):
                raise store.cell_error(row, name, "give a number, or leave a missing cell empty")
        return column

    def _categories(self, store: TableStore, name: str, values: Sequence[str]) -> list[str | None]:
        cells = [None if cell is None else plain(cell) for cell in store.column(name)]
        for row, cell in enumerate(cells):
            if cell is not None and cell not in values:
                raise store.cell_error(row, name, f"the job states {some_of(values, 20)}")
        return cells


def _twice(names: Sequence[str]) -> str | None:
    """Return a name that is there twice."""
    return next((name for k, name in enumerate(names) if name in names[:k]), None)


def _table(data: SiteData) -> TableStore:
    assert isinstance(data, TableStore)
    return data
