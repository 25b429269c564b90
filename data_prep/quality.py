"""Which subjects are left out, and why: one rule, one table.

The default is the paper's rule: a subject with an ROI that has no signal is left out, and so is
one whose scan is shorter than the window. Other rules are options, and the store states which
one was used.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from data_prep.participants import Subject

__all__ = ["SILENT_ROI_RULES", "Exclusion", "QualityRule", "apply_rule"]

SILENT_ROI_RULES = ("exclude", "keep-zero")


@dataclass(frozen=True)
class Exclusion:
    """One subject that is not in the store.

    Attributes
    ----------
    participant_id : str
        Who.
    reason : str
        A short class of reasons, the same for all subjects it applies to.
    detail : str
        What was found in this subject.
    """

    participant_id: str
    reason: str
    detail: str


@dataclass(frozen=True)
class QualityRule:
    """The rule for leaving subjects out.

    Attributes
    ----------
    silent_rois : str
        ``"exclude"``: a subject with an ROI without signal is left out. ``"keep-zero"``: it stays,
        and the edges of that ROI are zero.
    min_timepoints : int or None
        Shortest scan that is kept. None: the window, or 3 for whole scans.
    same_length : bool
        Leave out a subject whose scan is shorter or longer than most at the site.
    """

    silent_rois: str = "exclude"
    min_timepoints: int | None = None
    same_length: bool = False

    def __post_init__(self) -> None:
        """Refuse values that are not allowed."""
        if self.silent_rois not in SILENT_ROI_RULES:
            raise ValueError(
                f"silent_rois is {self.silent_rois!r}; allowed are {', '.join(SILENT_ROI_RULES)}"
            )
        if self.min_timepoints is not None and self.min_timepoints < 3:
            raise ValueError(f"min_timepoints is {self.min_timepoints}; at least 3 are needed")

    def shortest(self, window: int | None) -> int:
        """Return the fewest time points that are kept with a window, or None for whole scans."""
        return max(self.min_timepoints or 0, window or 3)

    def describe(self) -> dict[str, Any]:
        """Return the rule as the site store states it."""
        return asdict(self)


def silent_rois(series: np.ndarray) -> np.ndarray:
    """Return the columns of a series (n_timepoints, n_rois) that are constant: without signal."""
    return np.flatnonzero(series.max(axis=0) == series.min(axis=0))


def apply_rule(
    subjects: Sequence[Subject],
    rule: QualityRule,
    *,
    window: int | None,
    rois: Sequence[tuple[str, str]],
) -> tuple[list[Subject], list[Exclusion]]:
    """Divide the subjects of a site into those kept and those left out, each with its reason.

    Parameters
    ----------
    subjects : sequence of Subject
    rule : QualityRule
    window : int or None
        Length of the sliding window; None for whole scans.
    rois : sequence of (str, str)
        Id and name of each column, for the messages.
    """
    shortest = rule.shortest(window)
    usual = Counter(len(s.series) for s in subjects).most_common(1)[0][0] if subjects else 0
    kept, excluded = [], []
    for subject in subjects:
        length = len(subject.series)
        silent = silent_rois(subject.series)
        if length < shortest:
            found = ("too few time points", f"{length} time points, {shortest} needed")
        elif rule.same_length and length != usual:
            found = ("other scan length", f"{length} time points, most at the site have {usual}")
        elif len(silent) and rule.silent_rois == "exclude":
            found = ("ROI without signal", _without_signal(subject, silent, rois))
        else:
            kept.append(subject)
            continue
        excluded.append(Exclusion(subject.participant_id, *found))
    return kept, excluded


def _without_signal(
    subject: Subject, silent: np.ndarray, rois: Sequence[tuple[str, str]], limit: int = 10
) -> str:
    """Name the ROIs, those without a voxel in the scan apart from those with silent voxels."""
    absent = set(subject.absent_rois)
    parts = []
    for what, columns in (
        ("absent from the scan: ", [i for i in silent if i in absent]),
        ("no signal in ", [i for i in silent if i not in absent]),
    ):
        if columns:
            named = ", ".join(f"{rois[i][0]} ({rois[i][1]})" for i in columns[:limit])
            rest = len(columns) - limit
            parts.append(what + named + (f" and {rest} more" if rest > 0 else ""))
    return "; ".join(parts)
