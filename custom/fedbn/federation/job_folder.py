"""FLARE job folders made from another one: the same wiring, another experiment."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_prep.files import atomic_folder, write_json, write_text
from fedbn.federation.experiment import (
    EXPERIMENT_FILE,
    Experiment,
    ExperimentError,
    read_experiment,
)
from fedbn.federation.settings_file import read_json

_META = "meta.json"
_NOT_COPIED = shutil.ignore_patterns("__pycache__", ".__nvfl_*")


class JobFolderError(ValueError):
    """A job folder that cannot be made; the message says why, and what to do."""


def check_job_name(name: str) -> None:
    """Refuse what cannot name a job and the Python package in its ``app/custom``.

    Raises
    ------
    fedbn.federation.experiment.ExperimentError
        With what can.
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise ExperimentError(
            f"{name!r} cannot name a job and its package: give a name of letters, digits and "
            "'_' that begins with a letter"
        )


def job_name(folder: Path) -> str:
    """Return a job's name like that of its folder."""
    name = re.sub(r"\W", "_", folder.resolve().name, flags=re.ASCII)
    return name if name[:1].isalpha() else f"job_{name}"


@contextmanager
def new_job_folder(source: Path, out: Path) -> Iterator[Path]:
    """Copy a job folder, without FLARE's signatures, to where nothing is.

    Parameters
    ----------
    source
        The job folder; it stays as it is.
    out
        Where the copy is when the block has ended without an error; otherwise nothing is there.

    Yields
    ------
    Path
        The copy, to be changed.

    Raises
    ------
    JobFolderError
        If `source` is no job folder, or `out` is there already or inside of it.
    """
    if out.exists():
        raise JobFolderError(f"{out} is there already; give a new folder with --out")
    if not (source / _META).is_file():
        raise JobFolderError(f"{source} is no FLARE job folder: it has no {_META}")
    if out.resolve().is_relative_to(source.resolve()):
        raise JobFolderError(f"{out} is inside of {source}; give a folder outside with --out")
    with atomic_folder(out) as folder:
        shutil.copytree(source, folder, ignore=_NOT_COPIED, dirs_exist_ok=True)
        yield folder


def write_job(source: Path, out: Path, experiment: Experiment) -> list[str]:
    """Make the job folder that runs an experiment, wired like another job.

    Its name is the experiment's.

    Parameters
    ----------
    source
        The job folder that is copied.
    out
        The new job folder; it must not be there.
    experiment
        What it runs.

    Returns
    -------
    list of str
        A line for each field that differs from the other job: ``"rounds: 12 -> 50"``.

    Raises
    ------
    JobFolderError, fedbn.federation.experiment.ExperimentError, data_prep.files.FileError
        In one sentence; then nothing has been written.
    """
    check_job_name(experiment.name)
    before = read_experiment(source)
    if before.continues is not None:
        raise JobFolderError(
            f"{source} continues job {before.continues.job} and belongs to its run; give the job "
            "that it was made from"
        )
    with new_job_folder(source, out) as folder:
        try:
            meta = read_json(folder / _META)
        except ValueError as error:
            raise JobFolderError(f"cannot read {source / _META}: {error}") from error
        package = folder / "app" / "custom" / f"{meta.get('name')}_job"
        write_json(folder / _META, _meta(source, meta, before, experiment))
        write_experiment(folder, experiment)
        if [path.name for path in package.glob("*")] == ["__init__.py"]:
            package.rename(package.with_name(f"{experiment.name}_job"))
        lines = list(_differences(before.model_dump(), experiment.model_dump()))
        write_text(folder / "README.md", _card(meta.get("name"), experiment, lines))
    return lines


def write_experiment(folder: Path, experiment: Experiment) -> None:
    """Write an experiment into each app of a job folder."""
    for path in folder.glob(f"*/config/{EXPERIMENT_FILE}"):
        write_json(path, experiment.model_dump(mode="json"))


def _meta(
    source: Path, meta: dict[str, Any], before: Experiment, experiment: Experiment
) -> dict[str, Any]:
    n_needed = meta.get("min_clients")
    if n_needed == len(before.sites):
        n_needed = len(experiment.sites)
    if n_needed and n_needed > len(experiment.sites):
        raise JobFolderError(
            f"{source / _META} asks for {n_needed} clients, but there are "
            f"{len(experiment.sites)} sites"
        )
    gone = set(before.sites) - set(experiment.sites)
    resources = {
        site: spec for site, spec in meta.get("resource_spec", {}).items() if site not in gone
    }
    named = {place for places in meta.get("deploy_map", {}).values() for place in places}
    if named & set(before.sites) and set(before.sites) != set(experiment.sites):
        raise JobFolderError(f"{source / _META} names sites in its deploy_map; write '@ALL' there")
    changes = {"name": experiment.name, "resource_spec": resources, "min_clients": n_needed}
    return {**meta, **changes}


def _differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            inner = f"{path}.{key}" if path else key
            yield from _differences(before.get(key), after.get(key), inner)
    elif before != after:
        yield f"{path}: {json.dumps(before)} -> {json.dumps(after)}"


def _card(source: str | None, experiment: Experiment, lines: list[str]) -> str:
    return f"""# {experiment.name}: a variant of {source}

```
nvflare simulator {experiment.name} -n {len(experiment.sites)}
```

Made by `fedbn job`. Wiring, data and terms of use are those of {source}; in
`app/config/{EXPERIMENT_FILE}` differ:

```
{chr(10).join(lines)}
```
"""
