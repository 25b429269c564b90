"""The panels of any task: a task with more to show has a module of its own beside this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbn.report.html import Page, Picture
from fedbn.tasks.base import Features, Scores, Task

N_FEATURES = 20
"""Inputs of the network that are shown as those that weigh most."""

Folds = Sequence[Sequence[Scores]]
"""Repetitions, each the scores of some folds: every held-out unit once a repetition."""


class Panels:
    """For a task that has none: nothing but what every task has.

    Parameters
    ----------
    task
        The task.
    """

    def __init__(self, task: Task):
        self.task = task

    def findings(self, summary: Mapping[str, Any]) -> list[str]:
        """Say what a comparison shows besides its differences in the headline metric."""
        return []

    def comparison(self, page: Page, summary: Mapping[str, Any], names: Sequence[str]) -> None:
        """Add tables and pictures of a comparison's summary to its section on every metric.

        Parameters
        ----------
        page
            To add to.
        summary
            Content of ``summary.json``.
        names
            Methods that pictures have room for.
        """

    def held_out(
        self,
        page: Page,
        scored: Mapping[str, Mapping[str, Folds]],
        shown: Mapping[str, Mapping[str, Mapping[str, Any]]],
        over: str,
    ) -> None:
        """Add what the scores of held-out units show.

        Parameters
        ----------
        page
            To add to.
        scored
            Title of a method, then site, to scores.
        shown
            The same to each metric's value in the tables, for legends.
        over
            What counts and curves are means over, for captions.
        """

    def about_features(self, features: Features) -> str:
        """Say below the inputs that weigh most what else there is to know."""
        return ""

    def draw_features(
        self, features: Features, weights: np.ndarray, n: int = N_FEATURES, *, synthetic: bool
    ) -> list[Picture]:
        """Draw the `n` inputs that weigh most; no picture where there is nothing to draw on."""
        return []
