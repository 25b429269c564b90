"""Tasks by name: those that come with fedbn, and those of installed packages."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Mapping
from importlib.metadata import entry_points
from typing import Any

from fedbn.tasks.base import Task

ENTRY_POINTS = "fedbn.tasks"
"""Group of entry points by which an installed package brings tasks of its own."""

TASKS = {
    "classification": "fedbn.tasks.images.classification:ImageClassificationTask",
    "connectome": "fedbn.tasks.connectome.task:ConnectomeTask",
    "segmentation": "fedbn.tasks.images.segmentation:SegmentationTask",
    "tabular": "fedbn.tasks.tabular:TabularTask",
}
"""Names of the tasks that come with fedbn, to their classes."""

TASK_0_1 = {"name": "connectome"}
"""What is meant where no task is stated: version 0.1 knew one."""


class TaskError(ValueError):
    """A task that does not exist here or may not be used; one sentence."""


def make_task(settings: Task | Mapping[str, Any], allowed: Collection[str] | None = None) -> Task:
    """Make a task from its settings in an experiment.

    Parameters
    ----------
    settings
        With ``"name"``.
    allowed
        Classes of installed packages, as ``package.module.Class``, that may be used beside the
        tasks that come with fedbn; any if ``None``.

    Raises
    ------
    TaskError
        If there is no such task, it is not allowed here, or it cannot be loaded.
    pydantic.ValidationError
        If a setting is wrong.
    """
    if isinstance(settings, Task):
        return settings
    if not isinstance(settings, Mapping) or not isinstance(settings.get("name"), str):
        raise TaskError(
            f'give an object with the task\'s "name" and settings, got {settings!r:.80}'
        )
    name = settings["name"]
    place = TASKS.get(name) or _own_place(name, allowed)
    module, _, attribute = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise TaskError(f"task {name!r} ({place}) cannot be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise TaskError(f"task {name!r} ({place}) is no subclass of fedbn.tasks.base.Task")
    return found.model_validate(dict(settings))


def _own_place(name: str, allowed: Collection[str] | None) -> str:
    """Return where the class of an installed package's task is, without importing it."""
    own = entry_points(group=ENTRY_POINTS)
    places = sorted({point.value.replace(" ", "") for point in own if point.name == name})
    if not places:
        known = sorted({*TASKS, *own.names})
        close = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"
        raise TaskError(f"there is no task {name!r}{hint}")
    if len(places) > 1:
        raise TaskError(f"task {name!r} is brought by {' and '.join(places)}; remove one")
    if allowed is not None and places[0].replace(":", ".") not in {
        path.replace(":", ".") for path in allowed
    }:
        raise TaskError(
            f"task {name!r} is a class that is not allowed here: {places[0]} must be listed under "
            "allow_tasks in this installation's own local/fedbn_site.yml (for FLARE's simulator in "
            "the environment variable FEDBN_ALLOW_TASKS)"
        )
    return places[0]
