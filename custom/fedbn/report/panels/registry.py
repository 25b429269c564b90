"""Which panels a task has in a report."""

from __future__ import annotations

import importlib

from fedbn.report.panels.base import Panels
from fedbn.tasks.base import Task
from fedbn.tasks.classification import ClassificationTask

PANELS = {"connectome": "fedbn.report.panels.connectome:ConnectomePanels"}
"""Tasks with panels of their own, by name."""

FAMILIES = {ClassificationTask: "fedbn.report.panels.classification:ClassificationPanels"}
"""Panels of all other tasks of a family."""


def panels_of(task: Task) -> Panels:
    """Return a task's own panels, or those of its family."""
    families = (panels for family, panels in FAMILIES.items() if isinstance(task, family))
    path = PANELS.get(task.name) or next(families, None)
    if path is None:
        return Panels(task)
    module, _, name = path.partition(":")
    found: type[Panels] = getattr(importlib.import_module(module), name)
    return found(task)
