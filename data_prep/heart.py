"""UCI heart disease at four hospitals: the files as they are published, into one table a site."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from data_prep.errors import SourceError
from data_prep.site_store import default_data_root
from data_prep.table_store import TABLE, plain, write_table_store
from data_prep.tables import text_lines
from data_prep.terminal import one_sentence_errors, screen

__all__ = ["HEART_COLUMNS", "HEART_SITES", "heart", "prepare_heart"]

HEART_SITES = {
    "Cleveland": "processed.cleveland.data",
    "Hungarian": "processed.hungarian.data",
    "Switzerland": "processed.switzerland.data",
    "LongBeach": "processed.va.data",
}
HEART_COLUMNS = (
    "age",
    "sex",
    "cp",
    "trestbps",
    "chol",
    "fbs",
    "restecg",
    "thalach",
    "exang",
    "oldpeak",
    "slope",
    "ca",
    "thal",
    "num",
)
_NEVER_0 = [HEART_COLUMNS.index(name) for name in ("trestbps", "chol")]


@one_sentence_errors
def heart(
    source: Annotated[
        Path, typer.Option(help="Folder of UCI's four processed.*.data; nothing is downloaded.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder that gets one table a site. Default: $FEDBN_DATA, else ~/fedbn_data.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make the tables of UCI's heart disease data, one for each of its four hospitals."""
    root = out or default_data_root()
    table = Table("site", "patients", "cells missing", title="Tables")
    for site, (n_patients, n_missing) in prepare_heart(source, root).items():
        table.add_row(site, str(n_patients), str(n_missing))
    screen.print(table)
    screen.print(f"In {root}", soft_wrap=True, markup=False)


def prepare_heart(source: Path, out: Path) -> dict[str, tuple[int, int]]:
    """Write the four tables; a blood pressure or cholesterol of 0 is none and becomes missing.

    Parameters
    ----------
    source : Path
        Folder of the four ``processed.*.data`` files (Janosi et al., UCI, 1988, CC BY 4.0).
    out : Path
        Gets a folder a site.

    Returns
    -------
    dict
        Site to its number of patients and of missing cells.

    Raises
    ------
    SourceError
        If a file is missing or empty or has a line that is not of 14 columns, or a site's folder
        holds another table; then nothing is written.
    """
    tables = {site: _read(site, source / name) for site, name in HEART_SITES.items()}
    for site in tables:
        place = out / site / TABLE
        if place.exists() and text_lines(place, "table")[0] != ",".join(HEART_COLUMNS):
            raise SourceError(f"{place} is another table; name another place with --out")
    for site, rows in tables.items():
        write_table_store(out / site, HEART_COLUMNS, rows)
    return {site: (len(rows), sum(row.count("?") for row in rows)) for site, rows in tables.items()}


def _read(site: str, file: Path) -> list[list[str]]:
    rows = []
    for number, line in enumerate(text_lines(file, f"site {site!r}:"), start=1):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(HEART_COLUMNS):
            raise SourceError(
                f"site {site!r}: line {number} of {file.name} has {len(cells)} columns, expected "
                f"{len(HEART_COLUMNS)}"
            )
        for k in _NEVER_0:
            cells[k] = "?" if plain(cells[k]) == "0" else cells[k]
        rows.append(cells)
    return rows
