"""What a site's own model says of a case: a score, what spoke for it, a warning.

What is asked about is read by the model's task, which refuses what does not fit. What fits and is
unlike the training data is scored with a warning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedbn.federation.experiment import Experiment
from fedbn.federation.site import prepare
from fedbn.models.bundle import Bundle
from fedbn.models.distances import distances, far_away, outer_fence
from fedbn.models.site_model import same_data
from fedbn.tasks.base import Scores
from fedbn.tasks.bundling import Case, PredictionError, class_names
from fedbn.tasks.classification import THRESHOLD, called, probabilities
from fedbn.tasks.data import DataError, SiteData


@dataclass(frozen=True)
class Prediction:
    """What the model says of one case.

    Attributes
    ----------
    case
        With all warnings.
    scores
        One row, and those of its samples where the task scores these too.
    distances
        See :mod:`fedbn.models.distances`; means over samples.
    far
        Names of the distances beyond the training units' outer fence; ``None`` where the bundle
        has nothing to judge them by.
    explanation
        What spoke for it, where the task has such a thing.
    """

    case: Case
    scores: Scores
    distances: dict[str, float]
    far: tuple[str, ...] | None
    explanation: Any = field(default=None, repr=False)

    @property
    def probability(self) -> np.ndarray:
        """Of each class, (n_classes,)."""
        found: np.ndarray = probabilities(self.scores)[0]
        return found

    @property
    def part_probability(self) -> np.ndarray:
        """Of each class, by sample, (n_samples, n_classes)."""
        assert self.scores.parts is not None
        return probabilities(self.scores.parts)


def predict(bundle: Bundle, case: Case) -> Prediction:
    """Score one case, say what spoke for it, and compare it with the training data.

    Where it cannot be said what spoke for it, that is a warning: the score stands without.
    """
    found = distances(bundle.task, bundle.model, case.samples)
    means = {name: float(values.mean()) for name, values in found.items()}
    reference = bundle.facts["distances"]
    far = tuple(far_away(means, reference)) if reference else None
    warnings = [
        f"unlike the {bundle.side.word}s that the model was trained on: "
        f"{bundle.side.distances_mean[name]} {means[name]:.2f}, beyond "
        f"{outer_fence(reference[name]):.2f} (median of the training subjects "
        f"{reference[name][1]:.2f})"
        for name in far or ()
    ]
    explanation = None
    try:
        explanation = bundle.side.explain(bundle.model, case)
    except (ArithmeticError, RuntimeError, ValueError) as error:
        warnings.append(f"what spoke for it is not known: {error}")
    return Prediction(
        case=dataclasses.replace(case, warnings=(*case.warnings, *warnings)),
        scores=bundle.task.score(bundle.model, case.samples),
        distances=means,
        far=far,
        explanation=explanation,
    )


def predict_files(
    bundle: Bundle,
    inputs: Sequence[Path],
    options: Mapping[str, Any] | None = None,
    on_case: Callable[[], object] = lambda: None,
) -> list[Prediction]:
    """Score all cases of some files and folders.

    Parameters
    ----------
    bundle
        The model.
    inputs, options
        As :meth:`fedbn.tasks.bundling.Bundling.cases` of its task takes them.
    on_case
        Called after each case.

    Raises
    ------
    PredictionError
        If there is no case, two have one name, or one does not fit the model: then none is scored.
    fedbn.tasks.data.DataError
        If data are damaged.
    """
    word = bundle.side.word
    if not inputs:
        raise PredictionError(f"there is no {word} to ask about; name one or more with --input")
    found: dict[str, Prediction] = {}
    for case in bundle.side.cases(
        bundle.trained_on, inputs, options or {}, lambda data: _trained(bundle, data)
    ):
        if case.name in found:
            raise PredictionError(
                f"two {word}s are called {case.name!r}; rename one of them, or ask for them "
                "one after the other"
            )
        found[case.name] = predict(bundle, case)
        on_case()
    return list(found.values())


def _trained(bundle: Bundle, data: SiteData) -> np.ndarray | None:
    """Say of each unit whether the model was trained on it; ``None`` where that is not known.

    Another site of the federation has trained the shared weights: on whom is not known here.
    """
    if bundle.facts["experiment"] is None:
        return None
    try:
        experiment = Experiment.model_validate(bundle.facts["experiment"])
    except ValueError:  # of another version of fedbn
        return None
    trained = np.zeros(len(data.units), dtype=bool)
    if data.site not in experiment.sites:
        return trained
    if data.site != bundle.site:
        return None
    fingerprint = bundle.facts.get("fingerprint")
    try:
        train = prepare(data.site, data, experiment).split.train
        if not same_data(bundle.task, data, train, bundle.fitted, fingerprint):
            return None
    except DataError:
        return None
    trained[train] = True
    return trained


def held_out_accuracy(
    bundle: Bundle, predictions: Sequence[Prediction], threshold: float | None
) -> tuple[int, int]:
    """Count the cases of known class that the model was not trained on, and those right."""
    known = [p for p in predictions if p.case.target and p.case.in_training is False]
    right = [p for p in known if verdict(bundle, p, threshold) == p.case.target]
    return len(right), len(known)


def verdict(bundle: Bundle, prediction: Prediction, threshold: float | None) -> str:
    """Name the class that a case is called; of two, at a threshold."""
    facts = {} if threshold is None else {THRESHOLD: threshold}
    of_case = dataclasses.replace(prediction.scores, facts=facts)
    return class_names(bundle.task)[int(called(of_case)[0])]
