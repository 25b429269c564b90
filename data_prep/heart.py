"""UCI heart disease at four hospitals: the files as they are published, into one table a site."""

from pathlib import Path

from data_prep.errors import SourceError
from data_prep.table_store import plain, write_table_store

__all__ = ["HEART_COLUMNS", "HEART_SITES", "prepare_heart"]

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


def prepare_heart(source: Path, out: Path) -> dict[str, int]:
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
        Site to its number of patients.

    Raises
    ------
    SourceError
        If a file is missing or empty, or has a line that is not of 14 columns.
    """
    tables = {site: _read(site, source / name) for site, name in HEART_SITES.items()}
    for site, rows in tables.items():
        write_table_store(out / site, HEART_COLUMNS, rows)
    return {site: len(rows) for site, rows in tables.items()}


def _read(site: str, file: Path) -> list[list[str]]:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"site {site!r}: cannot read {file}: {error}") from error
    if not lines:
        raise SourceError(f"site {site!r}: {file} is empty")
    rows = []
    for number, line in enumerate(lines, start=1):
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
