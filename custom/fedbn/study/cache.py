"""A folder of finished units of work, so that what was stopped is continued and nothing repeated.

One file says what all units of the folder have in common: settings, data, versions. A folder with
other ones is not continued, for its numbers would not belong together.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.files import write_json
from fedbn.federation.experiment import Experiment, validated
from fedbn.federation.results import versions
from fedbn.tasks.base import Task
from fedbn.tasks.data import SiteData

RUNS_FOLDER = "runs"
"""Folder with one file a unit."""

# Replaced in each unit, or of no weight for the numbers.
_OF_A_UNIT = (
    "name",
    "policy",
    "algorithm",
    "finetune",
    "fold",
    "seed",
    "compare_with_alone",
    "test_curve",
    "fedbn_version",
    "continues",
)


def in_common(
    experiment: Experiment,
    data: Mapping[str, SiteData],
    *,
    packages: Sequence[str],
    without: Collection[str] = (),
) -> dict[str, Any]:
    """Return what decides the numbers of all units, fit for JSON.

    Parameters
    ----------
    experiment
        Any unit's; what units replace is left out.
    data
        Site name to its data.
    packages
        Names whose versions decide the numbers, as
        :func:`fedbn.federation.results.versions` has them.
    without
        Further fields of the experiment that are left out.
    """
    settings = experiment.model_dump(mode="json")
    left_out = {*_OF_A_UNIT, *without}
    settings = {name: value for name, value in settings.items() if name not in left_out}
    settings["sites"] = sorted(settings["sites"])
    found = versions()
    return {
        "experiment": settings,
        "stores": {site: data[site].fingerprint() for site in sorted(data)},
        "versions": {name: found[name] for name in packages},
    }


def task_of(identity: Mapping[str, Any]) -> Task:
    """Return the task of what a study has kept, also of one that version 0.1 has written."""
    return validated(identity["experiment"], "the experiment of a finished study").task


def claim(path: Path, identity: Mapping[str, Any], what: str, error: type[ValueError]) -> None:
    """Make a folder this work's, or see that it is.

    Parameters
    ----------
    path
        The file in the folder that says what all units have in common.
    identity
        What it has to say, fit for JSON.
    what
        What the work is, for messages: ``"comparison"``.
    error
        Raised, with one sentence, where the folder is another's.
    """
    out = path.parent
    if path.is_file():
        try:
            there = json.loads(path.read_bytes())
        except (OSError, ValueError) as reason:
            raise error(f"{path} is damaged ({reason}); give another --out") from reason
        difference = first_difference(there, json.loads(json.dumps(identity)))
        if difference:
            raise error(
                f"{out} holds another {what}: {difference}; give another --out, or remove it"
            )
        return
    if out.is_dir() and any(out.iterdir()):
        raise error(f"{out} is not empty and holds no {what}; give another --out")
    if out.exists() and not out.is_dir():
        raise error(f"{out} is not a folder; give another --out")
    write_json(path, identity)


def first_difference(there: Any, here: Any, where: str = "") -> str:
    """Name the first setting in which two identities differ; empty if there is none."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for name in dict.fromkeys([*here, *there]):
            inside = f"{where}.{name}" if where else str(name)
            found = first_difference(there.get(name), here.get(name), inside)
            if found:
                return found
        return ""
    if there == here:
        return ""
    if where.startswith("stores."):
        return f"the data of site {where.removeprefix('stores.')!r} have changed since"
    return f"{where.removeprefix('experiment.')} is {there} there and {here} here"


def read_unit(path: Path, key: str, part: str) -> dict[str, Any] | None:
    """Read a unit's file; ``None`` if it is not there or not whole, so that it is done again.

    Parameters
    ----------
    path
        The file.
    key
        Under which it must have been written.
    part
        What a whole one has besides.
    """
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    whole = isinstance(record, dict) and record.get("key") == key and part in record
    return record if whole else None
