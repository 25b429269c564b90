"""Where the files of one run are: a simulator workspace, a downloaded job, a job at the server."""

from __future__ import annotations

from pathlib import Path

SAVED_FILE = "FL_global_model.pt"
"""What the server saves after every round; FLARE's own default name."""

RESULTS_FILE = "results.json"


def only_file(folder: Path, name: str, advice: str, error: type[ValueError] = ValueError) -> Path:
    """Find the one file of this name below a run's folder; a file is returned as it is.

    Parameters
    ----------
    folder
        The folder, or the file itself.
    name
        The file's name.
    advice
        What to give instead, for the message.
    error
        Raised if there is none, or more than one.
    """
    if folder.is_file():
        return folder
    found = sorted(folder.rglob(name)) if folder.is_dir() else []
    if len(found) != 1:
        what = f"no {name}" if not found else f"{len(found)} files {name}"
        raise error(f"{what} in {folder}; {advice}")
    return found[0]
