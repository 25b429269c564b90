"""Which round was the best so far, judged on validation units: the same in FLARE and in process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedbn.federation.experiment import Experiment


class BestRound:
    """Follows the mean over sites of the task's headline metric on validation units.

    A round is judged by the model that it ends with: the averaged weights beside each site's own
    entries of that round. Of equally good rounds the first one counts.

    Parameters
    ----------
    experiment
        Its task says which number is the headline, and whether more is better.

    Attributes
    ----------
    number
        The best round so far; ``None`` before one was judged.
    value
        Its mean over sites.
    """

    def __init__(self, experiment: Experiment):
        task = experiment.task
        self.headline = task.followed[0]
        self.number: int | None = None
        self.value = math.nan
        self._sign = 1 if task.metrics[0].higher_is_better else -1
        self._patience = experiment.patience
        self._since = 0

    def judge(self, number: int, of_sites: Mapping[str, Mapping[str, Any]]) -> bool:
        """Take a round's numbers, as sites follow them; return whether it is the best so far."""
        values = [
            float(found[self.headline])
            for _, found in sorted(of_sites.items())
            if found.get(self.headline) is not None
        ]
        if not values:
            return False
        mean = math.fsum(values) / len(values)
        if self.number is None or self._sign * (mean - self.value) > 0:
            self.number, self.value, self._since = number, mean, 0
            return True
        self._since += 1
        return False

    @property
    def is_over(self) -> bool:
        """Whether so many rounds were no better that the run ends."""
        return self._patience is not None and self._since >= self._patience

    def facts(self) -> dict[str, Any]:
        """Return what a report says of it."""
        return {"round": self.number, self.headline: self.value}
