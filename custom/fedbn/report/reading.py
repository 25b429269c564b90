"""Find and read the results of a finished run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbn.federation.results import FORMAT
from fedbn.federation.run_folder import RESULTS_FILE, only_file


def results_file(folder: Path) -> Path:
    """Find the one ``results.json`` of a run's folder; a file is returned as it is.

    Raises
    ------
    ValueError
        If there is none, or more than one.
    """
    return only_file(folder, RESULTS_FILE, "give the file, or the folder of one finished run")


def read_results(path: Path) -> dict[str, Any]:
    """Read a results file.

    Raises
    ------
    ValueError
        If it is something else.
    """
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is not a results file of fedbn ({FORMAT})")
    return content


def early_end(results: Mapping[str, Any]) -> str | None:
    """Return one sentence on a run that failed or was aborted; ``None`` if it came to its end."""
    status = results.get("status", "completed")
    if status == "completed":
        return None
    verb = "was" if status == "aborted" else "has"
    n_done = len(results["rounds"])
    return f"this run {verb} {status} after {n_done} rounds of this job: {results.get('reason')}"
