"""Find and read the results of a finished run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedbn.results import FORMAT


def results_file(folder: Path) -> Path:
    """Find the one ``results.json`` of a run's folder; a file is returned as it is.

    Raises
    ------
    ValueError
        If there is none, or more than one.
    """
    if folder.is_file():
        return folder
    found = sorted(folder.rglob("results.json")) if folder.is_dir() else []
    if len(found) != 1:
        what = "no results.json" if not found else f"{len(found)} files results.json"
        raise ValueError(f"{what} in {folder}; give the file, or the folder of one finished run")
    return found[0]


def read_results(path: Path) -> dict[str, Any]:
    """Read a results file.

    Raises
    ------
    ValueError
        If it is something else.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is not a results file of fedbn ({FORMAT})")
    return content
