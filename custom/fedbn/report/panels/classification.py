"""Classes in a report: how methods rank, where they decide, what their scores are worth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedbn.report.comparison_tables import scores_table
from fedbn.report.figures import Bar, forest
from fedbn.report.html import Page, Picture
from fedbn.report.panels import class_figures as figures
from fedbn.report.panels.base import Folds, Panels
from fedbn.report.panels.held_out import HeldOut, mean_roc
from fedbn.report.tables import interval, signed
from fedbn.study import paired
from fedbn.study.summary import MACRO
from fedbn.tasks.base import Metric, Task
from fedbn.tasks.classification import AT_OWN_THRESHOLD, ClassificationTask

MIN_FOR_CALIBRATION = 30
"""Fewer held-out units than this say nothing about ten bins of scores."""

_DECISIONS = (
    "auc",
    "accuracy",
    "balanced_accuracy",
    AT_OWN_THRESHOLD,
    "sensitivity",
    "specificity",
)
_IN_POINTS = Metric("", "")


class ClassificationPanels(Panels):
    """For a task with classes; with two of them the last one is the positive class."""

    def __init__(self, task: Task):
        assert isinstance(task, ClassificationTask)
        super().__init__(task)
        self.classes = task.class_names

    @property
    def is_binary(self) -> bool:
        """Whether there are two classes."""
        return len(self.classes) == 2

    def findings(self, summary: Mapping[str, Any]) -> list[str]:
        """Say how much of FedBN's difference to the reference is its operating point.

        Empty where FedBN is not compared. Nothing is called a difference whose interval includes
        zero.
        """
        if not self.is_binary or "fedbn" not in summary["differences"]:
            return []
        reference, unit = summary["methods"][summary["reference"]]["title"], self.task.levels[0]
        found = summary["differences"]["fedbn"][MACRO][unit]
        accuracy, auc, own = (found[name] for name in ("accuracy", "auc", AT_OWN_THRESHOLD))
        if None in (accuracy["mean"], auc["mean"], own["mean"]):
            return []
        sentences = [
            f"FedBN and {reference}, macro mean by held-out {unit}: AUC x 100 {_said(auc)}; "
            f"accuracy {_said(accuracy)}; balanced accuracy {_said(found['balanced_accuracy'])}; "
            f"accuracy at a threshold that each site chose on its training {unit}s {_said(own)}."
        ]
        gain, left = 100 * accuracy["mean"], 100 * own["mean"]
        ranks_alike = auc["verdict"] not in (paired.HIGHER, paired.LOWER)
        if gain > 0 and left < gain / 2 and ranks_alike:
            is_shown = accuracy["verdict"] == paired.HIGHER
            sentences.append(
                f"FedBN's mean accuracy is {gain:.1f} points above {reference}'s; where both "
                f"decide by a threshold of each site's own, the difference is {left:+.1f}. No "
                "difference in ranking (AUC) is shown. "
                + (
                    "So what FedBN gains is mostly its operating point: where it decides, not how "
                    "it ranks."
                    if is_shown
                    else "That there is a gain is not shown either; what the means have of one "
                    "goes with the operating point: where FedBN decides, not how it ranks."
                )
            )
        elif gain > 0:
            sentences.append(
                f"FedBN's mean accuracy is {gain:.1f} points above {reference}'s, and {left:+.1f} "
                "where both decide by a threshold of each site's own: the operating point alone "
                "does not account for it."
            )
        return sentences

    def comparison(self, page: Page, summary: Mapping[str, Any], names: Sequence[str]) -> None:
        """Add the paired differences of ranking and decision, and the Brier score."""
        if not self.is_binary:
            return
        page.text(
            "A method can gain accuracy in two ways: it ranks better (AUC), or it decides at a "
            f"better place (threshold). A site with more {self.classes[1]} than {self.classes[0]} "
            "is served by a lower one; a batch norm of the site's own can learn that share, and so "
            "can a threshold that is chosen on the site's training subjects."
        )
        unit, metrics = self.task.levels[0], {m.name: m for m in self.task.metrics}
        titles = {name: str(one["title"]) for name, one in summary["methods"].items()}
        reference = titles[summary["reference"]]
        others = [name for name in names if name in summary["differences"]]
        if others:
            page.text(
                "The same paired differences for each metric. Where accuracy lies to the right, "
                "AUC at zero, and accuracy at the site's own threshold at zero too, the gain is "
                "the operating point."
            )
        page.show(
            [
                Picture(
                    f"decision_{name}",
                    forest(
                        f"{titles[name]} minus {reference}",
                        [
                            bar(
                                metrics[m].title + ("" if metrics[m].in_percent else " x 100"),
                                summary["differences"][name][MACRO][unit][m],
                                _IN_POINTS,
                            )
                            for m in _DECISIONS
                        ],
                        f"macro mean by {unit}, points",
                        synthetic=page.synthetic,
                    ),
                    f"Differences of {titles[name]} in ranking and decision.",
                )
                for name in others
            ]
        )
        page.table(scores_table(summary, unit, metrics["brier"]))

    def held_out(
        self,
        page: Page,
        scored: Mapping[str, Mapping[str, Folds]],
        shown: Mapping[str, Mapping[str, Mapping[str, Any]]],
        over: str,
    ) -> None:
        """Add ROC, confusion matrices and calibration; the first and last of two classes alone."""
        found = {
            name: {site: [HeldOut.of(one) for one in folds] for site, folds in by_site.items()}
            for name, by_site in scored.items()
        }
        if self.is_binary:
            self._decisions(page, found, shown, over)
        else:
            page.absent("ROC and calibration curves are drawn for two classes only.")
        sites = list(next(iter(found.values())))
        page.heading("Confusion matrices")
        page.text("Subjects, and their share of all of their class at the site.")
        page.show(
            [
                Picture(
                    f"confusion_{site}",
                    figures.confusions(
                        site, _at(found, site), self.classes, synthetic=page.synthetic
                    ),
                    f"Confusion matrices at site {site}.",
                    over,
                )
                for site in sites
            ]
        )
        if self.is_binary:
            self._calibration(page, found, over)

    def _decisions(
        self,
        page: Page,
        found: Mapping[str, Mapping[str, Sequence[HeldOut]]],
        shown: Mapping[str, Mapping[str, Mapping[str, Any]]],
        over: str,
    ) -> None:
        page.heading("Where each method decides")
        page.text(
            "Each curve says how a method ranks a site's held-out subjects; the mark on it is "
            "where the method decides. Two methods with one curve and two marks differ in their "
            "operating point alone. Over several seeds curve and mark are means, and a mark can "
            "lie off its curve. The AUC beside a curve is that of the tables, a mean over folds. "
            f"The bars of the next picture are the sites' true shares of {self.classes[1]}: a "
            "method that knows its site's share lies near them."
        )
        called = figures.shares_called(found, self.classes, synthetic=page.synthetic)
        alt = f"Share of subjects that each method calls {self.classes[1]}."
        pictures, without = [Picture("shares_called", called, alt, over)], []
        for site in next(iter(found.values())):
            of_site = _at(found, site)
            if any(mean_roc(repetitions) is None for repetitions in of_site.values()):
                without.append(site)
                continue
            auc = {name: shown[name].get(site, {}).get("auc") for name in found}
            curve = figures.roc(site, of_site, auc, self.classes, synthetic=page.synthetic)
            pictures.append(Picture(f"roc_{site}", curve, f"ROC curves at site {site}.", over))
        page.show(pictures)
        if without:
            page.absent(
                f"No ROC at {', '.join(without)}: the held-out subjects there are of one class."
            )

    def _calibration(
        self, page: Page, found: Mapping[str, Mapping[str, Sequence[HeldOut]]], over: str
    ) -> None:
        page.heading("Calibration")
        page.text(
            f"Scores in ten equal bins: their mean against the share of {self.classes[1]} among "
            "these subjects, the mark the larger the more of them. On the diagonal a score is a "
            f"probability; above it {self.classes[1]} is missed, below it {self.classes[0]} is "
            f"called {self.classes[1]}. Bins of fewer than five scores are left out."
        )
        sites = list(next(iter(found.values())))
        n_units = {
            site: min(len(by_site[site][0].targets) for by_site in found.values()) for site in sites
        }
        page.show(
            [
                Picture(
                    f"calibration_{site}",
                    figures.calibration(
                        site, _at(found, site), self.classes, synthetic=page.synthetic
                    ),
                    f"Calibration curves at site {site}.",
                    over,
                )
                for site in sites
                if n_units[site] >= MIN_FOR_CALIBRATION
            ]
        )
        if few := [site for site in sites if n_units[site] < MIN_FOR_CALIBRATION]:
            page.absent(
                f"Not drawn: {', '.join(few)}, with fewer than {MIN_FOR_CALIBRATION} held-out "
                "subjects."
            )


def bar(label: str, found: Mapping[str, Any], metric: Metric) -> Bar:
    """Return a difference for a picture, in points where the metric is in percent."""
    factor = 100 if metric.in_percent else 1
    mean, low, high = (
        math.nan if found[name] is None else factor * found[name]
        for name in ("mean", "low", "high")
    )
    return Bar(label, mean, low, high, found["verdict"] in (paired.HIGHER, paired.LOWER))


def _at(
    found: Mapping[str, Mapping[str, Sequence[HeldOut]]], site: str
) -> dict[str, Sequence[HeldOut]]:
    return {name: by_site[site] for name, by_site in found.items()}


def _said(found: Mapping[str, Any]) -> str:
    """Write a difference with its interval and what that allows to say."""
    span = interval(_IN_POINTS, found["low"], found["high"])
    return f"{signed(_IN_POINTS, found['mean'])} ({span}: {found['verdict']})"
