"""A method chosen on training subjects alone: nested cross-validation over a list of candidates.

Who tries many methods on the same folds and reports the best one reports luck along with it (Cawley
and Talbot, JMLR 11, 2010; Varoquaux et al., NeuroImage 145, 2017). Here the choice is part of the
method: within each training part every candidate is cross-validated by subject, the best one is
fitted on all of it, and only then are the held-out subjects scored. They are not in the data that
the choice is made on: the inner stores do not contain them.

The scores of inner cross-validation are of subjects that the model has not seen, so that each site
can also choose its threshold on them; scores of training subjects are too sure for that.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedbn.core.training import derive_seed
from fedbn.federation.changes import with_changes
from fedbn.federation.experiment import Experiment
from fedbn.federation.settings_file import fault, read_json
from fedbn.study.method import Method, Outcome
from fedbn.tasks.base import Scores
from fedbn.tasks.classification import THRESHOLD, classification_metrics, two_class_scores
from fedbn.tasks.data import SiteData
from fedbn.tasks.operating_point import brier_score, choose_threshold

CANDIDATES_FILE = Path(__file__).with_name("candidates.json")
CANDIDATES_VARIABLE = "FEDBN_CANDIDATES"

Rule = Literal["half", "accuracy", "prevalence"]
"""Where a candidate decides."""

Lookup = Callable[[str], Method]
"""A method's name to the method."""

_CHANGEABLE = ("network", "rounds", "training", "standardization", "aggregation_weights")


class CandidatesError(ValueError):
    """A list of candidates that cannot be used; the message names the file and the field."""


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Member(_Settings):
    """A method with its settings.

    Attributes
    ----------
    method
        Name of one of :data:`fedbn.study.methods.METHODS`, but none that is itself chosen by
        nesting.
    changes
        Fields of the experiment, in place of the job's and the method's: ``"network"``,
        ``"rounds"``, ``"standardization"``, ``"aggregation_weights"``, and single fields of
        ``"training"``.
    """

    method: str
    changes: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _changes_no_split(self) -> Member:
        for field in self.changes:
            if field.partition(".")[0] not in _CHANGEABLE:
                raise ValueError(
                    f"{field} cannot be changed by a candidate, only {', '.join(_CHANGEABLE)}"
                )
        return self

    @property
    def key(self) -> str:
        """What tells members apart."""
        return json.dumps([self.method, self.changes], sort_keys=True)

    def experiment(self, experiment: Experiment, lookup: Lookup) -> Experiment:
        """Return the experiment changed into this member's."""
        return with_changes(lookup(self.method).experiment(experiment), self.changes)


class Candidate(_Settings):
    """One method, or several whose probabilities are averaged, and where it decides.

    Attributes
    ----------
    name
        For tables and records.
    members
        At least one; each counts the same.
    threshold
        ``"half"``: a probability of 0.5. Each site's own, chosen on the inner cross-validation's
        scores of its training subjects: ``"accuracy"``, the one that is best on them; or
        ``"prevalence"``, the one that calls as many of them patients as there are.
    """

    name: str
    members: tuple[Member, ...] = Field(min_length=1)
    threshold: Rule = "half"


class Protocol(_Settings):
    """What is chosen from, and by what.

    Attributes
    ----------
    candidates
        In order of preference: of equally good ones the first is taken.
    criterion
        Mean over sites of the inner cross-validation's ``"accuracy"`` by subject at the
        candidate's threshold, of its ``"auc"``, or of its ``"brier"`` score (the least is best).
    n_folds
        Inner folds by subject, stratified by diagnosis within each site.
    """

    candidates: tuple[Candidate, ...] = Field(min_length=1)
    criterion: Literal["accuracy", "auc", "brier"] = "accuracy"
    n_folds: int = Field(default=5, ge=2, strict=True)

    @model_validator(mode="after")
    def _distinct(self) -> Protocol:
        names = [candidate.name for candidate in self.candidates]
        twice = [name for k, name in enumerate(names) if name in names[:k]]
        if twice:
            raise ValueError(f"candidate {twice[0]!r} is there twice")
        return self

    @property
    def members(self) -> list[Member]:
        """All members of all candidates, each once."""
        found = {member.key: member for one in self.candidates for member in one.members}
        return list(found.values())

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that change with any setting."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]


def candidates_file() -> Path:
    """Return the file of candidates: ``$FEDBN_CANDIDATES``, else the one that comes with fedbn."""
    return Path(os.environ.get(CANDIDATES_VARIABLE) or CANDIDATES_FILE)


def read_protocol(path: Path) -> Protocol:
    """Read a file of candidates.

    Raises
    ------
    CandidatesError
        If it is not there, not JSON, or has a field that is wrong.
    """
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise CandidatesError(f"cannot read the candidates in {path}: {error}") from error
    try:
        return Protocol.model_validate(content)
    except ValidationError as error:
        raise CandidatesError(f"{path}: {fault(error, content, Protocol)}") from error


def check_protocol(protocol: Protocol, experiment: Experiment, lookup: Lookup) -> None:
    """See that every member is a method with settings that fit, before anything runs.

    Raises
    ------
    ValueError
        If a method is unknown or itself nested, or a changed field is wrong.
    """
    for member in protocol.members:
        if lookup(member.method).is_nested:
            raise CandidatesError(
                f"method {member.method!r} cannot be a candidate: it is chosen by inner "
                "cross-validation itself"
            )
        member.experiment(experiment, lookup)


@dataclass(frozen=True)
class InnerScores:
    """Scores of a site's training subjects by models that have not seen them.

    Attributes
    ----------
    targets
        0 or 1, (n_subjects,), in the order of the inner store's participants.
    scores
        Probability of the positive class, float64 (n_subjects,).
    folds
        Inner fold in which each subject was held out, (n_subjects,).
    """

    targets: np.ndarray
    scores: np.ndarray
    folds: np.ndarray

    def decisions(self, rule: Rule) -> np.ndarray:
        """Call each subject a patient or not, (n_subjects,) bool.

        A site's own threshold is chosen anew for each inner fold, on the others.
        """
        decided = np.zeros(len(self.scores), dtype=bool)
        for fold in np.unique(self.folds):
            held_out = self.folds == fold
            threshold = threshold_by(rule, self.targets[~held_out], self.scores[~held_out])
            decided[held_out] = self.scores[held_out] >= threshold
        return decided


def threshold_by(rule: Rule, targets: np.ndarray, scores: np.ndarray) -> float:
    """Choose a threshold on scores of subjects that the model has not seen.

    Parameters
    ----------
    rule
        As in :class:`Candidate`.
    targets
        0 or 1, (n,).
    scores
        Probability of class 1, (n,).

    Returns
    -------
    float
        In [0, 1]. By ``"prevalence"`` in the middle between the last score that is called a patient
        and the next one.
    """
    if rule == "half":
        return 0.5
    if rule == "accuracy":
        return choose_threshold(targets, scores)
    n_patients = int(np.sum(targets == 1))
    ordered = np.concatenate([[0.0], np.sort(scores), [1.0]])
    place = len(ordered) - 1 - n_patients
    return float((ordered[place - 1] + ordered[place]) / 2)


def run_nested(
    experiment: Experiment,
    data: Mapping[str, SiteData],
    *,
    protocol: Protocol,
    lookup: Lookup,
) -> dict[str, Outcome]:
    """Choose a candidate on the training subjects, fit it on all of them, score the held-out ones.

    Parameters
    ----------
    experiment
        Its split and seed are those of every candidate; the rest is what candidates change.
    data
        Site name to its data, for every site of the experiment.
    protocol
        What is chosen from.
    lookup
        A method's name to the method.

    Returns
    -------
    dict
        Site name to the outcome of the chosen candidate, with the choice in its facts.
    """
    check_protocol(protocol, experiment, lookup)
    by_member = cross_validate(experiment, data, protocol, lookup)
    of_candidates = {
        one.name: _averaged([by_member[member.key] for member in one.members])
        for one in protocol.candidates
    }
    values = {
        one.name: criterion(of_candidates[one.name], protocol.criterion, one.threshold)
        for one in protocol.candidates
    }
    chosen = _best(protocol, values)
    fitted = [
        lookup(member.method).run(member.experiment(experiment, lookup), data)
        for member in chosen.members
    ]
    facts = {"chosen": chosen.name, "criterion": protocol.criterion, "inner": values}
    outcomes = {}
    for site in sorted(experiment.sites):
        inner = of_candidates[chosen.name][site]
        train = _mean_scores([one[site].train for one in fitted])
        decided = {
            **experiment.task.decisions(train),
            THRESHOLD: threshold_by(chosen.threshold, inner.targets, inner.scores),
        }
        outcomes[site] = replace(
            fitted[0][site],
            test=replace(_mean_scores([one[site].test for one in fitted]), facts=decided),
            train=replace(train, facts=decided),
            after_training=None,
            training_loss=None,
            facts=facts,
        )
    return outcomes


def cross_validate(
    experiment: Experiment,
    data: Mapping[str, SiteData],
    protocol: Protocol,
    lookup: Lookup,
) -> dict[str, dict[str, InnerScores]]:
    """Score every training subject by models that have not seen it, once for each member.

    Returns
    -------
    dict
        Member's key and site to the scores.
    """
    inner = {name: training_data(data[name], experiment) for name in experiment.sites}
    seed = derive_seed(experiment.seed, "nested", experiment.fold) % 2**31
    common = experiment.changed(n_folds=protocol.n_folds, seed=seed, training_share=1.0)
    found: dict[str, dict[str, InnerScores]] = {}
    for member in protocol.members:
        of_site = {
            name: InnerScores(
                targets=np.full(len(one.units), -1),
                scores=np.full(len(one.units), np.nan),
                folds=np.full(len(one.units), -1),
            )
            for name, one in inner.items()
        }
        for fold in range(protocol.n_folds):
            settings = member.experiment(common.changed(fold=fold), lookup)
            for name, outcome in lookup(member.method).run(settings, inner).items():
                held_out = outcome.test.units
                of_site[name].targets[held_out] = outcome.test.columns["target"]
                of_site[name].scores[held_out] = outcome.test.columns["p_1"]
                of_site[name].folds[held_out] = fold
        found[member.key] = of_site
    return found


def training_data(data: SiteData, experiment: Experiment) -> SiteData:
    """Return a site's training units alone, in memory and without fixed folds.

    Nothing of a held-out unit is in it: neither its samples nor its class.
    """
    return data.subset(experiment.task.split(data, experiment).train)


def criterion(of_site: Mapping[str, InnerScores], name: str, rule: Rule) -> float:
    """Return the mean over sites of what candidates are chosen by; NaN where none is defined."""
    values = []
    for site in sorted(of_site):
        inner = of_site[site]
        if name == "accuracy":
            values.append(float(np.mean(inner.decisions(rule) == (inner.targets == 1))))
        elif name == "auc":
            of_units = two_class_scores(inner.targets, inner.scores)
            values.append(classification_metrics(of_units)["auc"])
        else:
            values.append(brier_score(inner.targets, inner.scores))
    return math.fsum(values) / len(values)


def _best(protocol: Protocol, values: Mapping[str, float]) -> Candidate:
    sign = -1 if protocol.criterion == "brier" else 1
    return max(protocol.candidates, key=lambda one: sign * values[one.name])


def _averaged(members: Sequence[Mapping[str, InnerScores]]) -> dict[str, InnerScores]:
    """Average the scores of several members, site by site; their inner folds are the same."""
    return {
        site: replace(first, scores=_mean([member[site].scores for member in members]))
        for site, first in members[0].items()
    }


def _mean(arrays: Sequence[np.ndarray]) -> np.ndarray:
    mean: np.ndarray = np.mean(np.stack(arrays), axis=0)
    return mean


def _mean_scores(members: Sequence[Scores]) -> Scores:
    """Average the probabilities of several members on the same units, and of their parts."""
    first = members[0]
    columns = {
        name: values if name == "target" else _mean([one.columns[name] for one in members])
        for name, values in first.columns.items()
    }
    parts = [one.parts for one in members if one.parts is not None]
    return replace(first, columns=columns, parts=_mean_scores(parts) if parts else None)
