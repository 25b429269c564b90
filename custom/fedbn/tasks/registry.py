"""Tasks by name: those that come with fedbn, and those of installed packages."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Mapping
from importlib.metadata import entry_points
from typing import Any

from pydantic import BaseModel

from fedbn.tasks.base import Task

ENTRY_POINTS = "fedbn.tasks"
"""Group of entry points by which an installed package brings tasks of its own."""

TASKS = {
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
        Names of the installed packages' tasks that may be used; all if ``None``.

    Raises
    ------
    TaskError
        If there is no such task, or it is not allowed here.
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
    own = {} if name in TASKS else {p.name: p for p in entry_points(group=ENTRY_POINTS)}
    found: Any = None
    if name in TASKS:
        module, _, attribute = TASKS[name].partition(":")
        found = getattr(importlib.import_module(module), attribute)
    elif name in own:
        if allowed is not None and name not in allowed:
            raise TaskError(
                f"task {name!r} of package {own[name].value.partition('.')[0]!r} is not allowed "
                "at this site: its own settings must name it (allow_tasks)"
            )
        found = own[name].load()
    else:
        known = sorted({*TASKS, *own})
        close = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"
        raise TaskError(f"there is no task {name!r}{hint}")
    if not (isinstance(found, type) and issubclass(found, Task) and issubclass(found, BaseModel)):
        raise TaskError(f"task {name!r} is no subclass of fedbn.tasks.base.Task")
    return found.model_validate(dict(settings))
