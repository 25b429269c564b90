"""Classes from samples: probabilities, by sample and by unit, and what they are worth.

A unit's probability of a class is the mean over its samples. With two classes the second one is
the positive class, and a unit whose probability of it reaches the threshold is called positive;
with more the most probable one is called.

scikit-learn is imported inside of the functions that need it: a FLARE client that only follows the
training (:meth:`ClassificationTask.follow`) does not pay for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from fedbn.core.batches import Batch, Samples
from fedbn.core.training import Loss, TrainingSettings
from fedbn.tasks import operating_point
from fedbn.tasks.base import Metric, Scores, Task
from fedbn.tasks.data import DataError, SiteData, Split, SplitSettings

THRESHOLD, OWN_THRESHOLD = "threshold", "own_threshold"
AT_OWN_THRESHOLD = "accuracy_own_threshold"

ANY_CLASSES = (
    Metric("accuracy", "accuracy", short="acc."),
    Metric("balanced_accuracy", "balanced accuracy", short="bal."),
    Metric("auc", "AUC", in_percent=False),
)
TWO_CLASSES = (
    *ANY_CLASSES,
    Metric("sensitivity", "sensitivity", short="sens."),
    Metric("specificity", "specificity", short="spec."),
    Metric("brier", "Brier score", higher_is_better=False, in_percent=False, short="Brier"),
    Metric(AT_OWN_THRESHOLD, "accuracy, own threshold", short="own"),
)

_BATCH = 512


class ClassificationTask(Task):
    """What tasks with classes have in common; ``class_names`` in the order of the outputs."""

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Those of two classes; of more, what is defined for any number, and each one's recall."""
        if len(self.class_names) == 2:
            return TWO_CLASSES
        recalls = (Metric(f"recall_{k}", f"recall of {n}") for k, n in enumerate(self.class_names))
        return (*ANY_CLASSES, *recalls)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the network's outputs."""
        raise NotImplementedError

    @property
    def followed(self) -> tuple[str, ...]:
        """Accuracy by unit, by sample where samples are scored too, and the cross entropy."""
        return (*(f"{level}_accuracy" for level in self.levels), "cross_entropy")

    def split(self, data: SiteData, settings: SplitSettings) -> Split:
        """Divide as :meth:`Task.split`; refuse training units of one class."""
        split = super().split(data, settings)
        trained = {data.units[k].stratum for k in split.train}
        if len(trained) < 2:
            raise DataError(
                f"site {data.site!r}: all {len(split.train)} training subjects are of the class "
                f"{next(iter(trained))!r}; training needs at least two"
            )
        return split

    def facts(self, data: SiteData, split: Split) -> dict[str, Any]:
        """Return each class's share among training and test units; of two the second one's."""
        names = self.class_names[1:] if len(self.class_names) == 2 else self.class_names
        return {
            f"{name}_share_{part}": float(np.mean([data.units[k].stratum == name for k in units]))
            for part, units in (("train", split.train), ("test", split.test))
            for name in names
        }

    def criterion(self, training: TrainingSettings, samples: Samples) -> Loss:
        """Return the cross entropy, with class weights if the training has them."""
        criterion: nn.CrossEntropyLoss | None = None

        def cross_entropy(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
            nonlocal criterion
            if criterion is None:
                criterion = _criterion(training, logits, samples)
            value: torch.Tensor = criterion(logits, batch.targets)
            return value

        return cross_entropy

    def check(self, network: nn.Module, name: str, data: SiteData, samples: Samples) -> None:
        """See that the network gives a logit a class for two samples; see :meth:`Task.check`."""
        sample = self.describe_sample(data)
        try:
            probability, _, _ = predict(network, _First(samples, 2), 2)
        except Exception as error:
            raise DataError(
                f"site {data.site!r}: network {name} cannot take the {sample}: {error}"
            ) from error
        if probability.shape[1] != len(self.class_names):
            raise DataError(
                f"site {data.site!r}: network {name} has {probability.shape[1]} outputs, "
                f"but there are {len(self.class_names)} classes ({', '.join(self.class_names)})"
            )

    def describe_sample(self, data: SiteData) -> str:
        """Say what a sample of a site's data is, for a message."""
        return "site's samples"

    def score(self, network: nn.Module, samples: Samples) -> Scores:
        """Return each unit's class and probabilities, and each sample's if they are a level."""
        return make_scores(*predict(network, samples), parts=len(self.levels) > 1)

    def follow(self, scores: Scores) -> dict[str, float]:
        """Return accuracies and the mean cross entropy of the samples, in nats."""
        found = {
            f"{level}_accuracy": float(np.mean(called(one) == one.columns["target"]))
            for level, one in zip(self.levels, self._levels(scores), strict=False)
        }
        last = scores.parts or scores
        of_target = probabilities(last)[np.arange(len(last.units)), last.columns["target"]]
        smallest = np.finfo(np.float64).tiny  # a probability that underflowed to 0 costs 708 nats
        return found | {
            "cross_entropy": float(-np.mean(np.log(np.clip(of_target, smallest, None))))
        }

    def measure(self, scores: Scores) -> dict[str, dict[str, Any]]:
        """Return the metrics of each level; see :func:`classification_metrics`."""
        return {
            level: classification_metrics(one)
            for level, one in zip(self.levels, self._levels(scores), strict=False)
        }

    def changed(self, reference: Scores, scores: Scores) -> dict[str, int]:
        """Count units called wrong by one and right by the other."""
        was, now = (called(one) == one.columns["target"] for one in (reference, scores))
        return {
            "corrected": int((~was & now).sum()),
            "lost": int((was & ~now).sum()),
            "n": len(scores.units),
        }

    def decisions(self, train: Scores) -> dict[str, float]:
        """Return the threshold, and the best one on the training units; none for many classes."""
        if len(self.class_names) > 2:
            return {}
        own = operating_point.choose_threshold(train.columns["target"], train.columns["p_1"])
        return {THRESHOLD: 0.5, OWN_THRESHOLD: own}

    def unit_values(self, scores: Scores) -> dict[str, np.ndarray]:
        """Return what accuracies and the Brier score of two classes are means of."""
        targets = scores.columns["target"]
        found = {"accuracy": (called(scores) == targets).astype(np.float64)}
        if len(self.class_names) == 2:
            found["brier"] = (scores.columns["p_1"] - targets) ** 2
            if (own := scores.facts.get(OWN_THRESHOLD)) is not None:
                at_own = (scores.columns["p_1"] >= own) == (targets == 1)
                found[AT_OWN_THRESHOLD] = at_own.astype(np.float64)
        return found

    def calibration(self, scores: Scores) -> dict[str, Any] | None:
        """See :func:`fedbn.tasks.operating_point.calibration`; of two classes alone."""
        if len(self.class_names) > 2:
            return None
        return operating_point.calibration(scores.columns["target"], scores.columns["p_1"])

    def _levels(self, scores: Scores) -> list[Scores]:
        depths = range(len(self.levels) if scores.parts is not None else 1)
        return [scores.level(depth) for depth in depths]


class _First:
    """The first samples of some, as one batch."""

    def __init__(self, samples: Samples, n: int):
        self._samples, self._n = samples, min(n, len(samples))
        self.owners = samples.owners[: self._n]

    def __len__(self) -> int:
        return self._n

    def batches(self, batch_size: int, seed: int | None = None) -> Iterator[Batch]:
        yield next(iter(self._samples.batches(self._n)))


def predict(
    network: nn.Module, samples: Samples, batch_size: int = _BATCH
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the class probabilities of each sample.

    Parameters
    ----------
    network : torch.nn.Module
        Gives logits (n, n_classes). It is put into eval mode and then back: each of its modules is
        left in the mode in which it was.
    samples : Samples
        At least one.
    batch_size : int
        Samples at a time. It decides speed and memory, and the result up to rounding only.

    Returns
    -------
    probability, targets, owners : numpy.ndarray
        float64 (n, n_classes), rows sum to one; int64 (n,); int64 (n,).

    Raises
    ------
    ValueError
        If there is no sample, `batch_size` is not positive, or the output is not (n, n_classes).
    FloatingPointError
        If a logit is not finite.
    """
    if len(samples) == 0:
        raise ValueError("there is no sample to predict")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    first = next(network.parameters(), None)
    training = [module for module in network.modules() if module.training]
    outputs, targets = [], []
    network.eval()
    try:
        with torch.no_grad():
            for batch in samples.batches(batch_size):
                inputs = batch.inputs if first is None else batch.inputs.to(first.device)
                outputs.append(network(inputs))
                targets.append(batch.targets)
    finally:
        for module in training:
            module.training = True
    one = outputs[0]
    if not isinstance(one, torch.Tensor) or one.ndim != 2 or one.is_complex():
        raise ValueError("prediction needs a network that gives logits (n, n_classes)")
    logits = torch.cat(outputs).cpu().double()
    if not bool(torch.isfinite(logits).all()):
        n_bad = int((~torch.isfinite(logits).all(dim=1)).sum())
        raise FloatingPointError(f"the network gives no finite score for {n_bad} samples")
    probability: np.ndarray = logits.softmax(dim=1).numpy()
    return probability, torch.cat(targets).cpu().numpy(), samples.owners


def make_scores(
    probability: np.ndarray, targets: np.ndarray, owners: np.ndarray, *, parts: bool
) -> Scores:
    """Average each unit's samples.

    Parameters
    ----------
    probability
        (n, n_classes).
    targets, owners
        Class and unit of each sample, (n,).
    parts
        Whether the samples' own rows are kept.

    Raises
    ------
    ValueError
        If a unit has samples of two classes.
    """
    of_unit, units = unit_means(probability, owners)
    classes, _ = unit_means(np.asarray(targets, dtype=np.float64), owners)
    mixed = int((classes != np.round(classes)).sum())
    spread, _ = unit_means(np.asarray(targets, dtype=np.float64) ** 2, owners)
    mixed = max(mixed, int((spread - classes**2 > 1e-9).sum()))
    if mixed:
        raise ValueError(f"{mixed} of {len(units)} subjects have samples of two classes")
    return Scores(
        units,
        {"target": classes.astype(np.int64), **_columns(of_unit)},
        Scores(owners, {"target": targets, **_columns(probability)}) if parts else None,
    )


def _columns(probability: np.ndarray) -> dict[str, np.ndarray]:
    return {f"p_{k}": probability[:, k] for k in range(probability.shape[1])}


def unit_means(values: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Average the values of each unit's samples.

    Parameters
    ----------
    values : numpy.ndarray
        Shape (n,) or (n, k).
    owners : numpy.ndarray
        Unit of each sample, numbers or names, shape (n,).

    Returns
    -------
    means : numpy.ndarray
        float64, shape (n_units,) or (n_units, k).
    units : numpy.ndarray
        The distinct units, sorted, in the order of `means`.
    """
    values, owners = np.asarray(values, dtype=np.float64), np.asarray(owners)
    if owners.ndim != 1 or values.ndim not in (1, 2) or len(owners) != len(values):
        raise ValueError(
            f"values have shape {values.shape} and units {owners.shape}: give one unit a sample"
        )
    units, position = np.unique(owners, return_inverse=True)
    counts = np.bincount(position, minlength=len(units))
    columns = values[:, None] if values.ndim == 1 else values
    means = np.empty((len(units), columns.shape[1]))
    for k, column in enumerate(columns.T):
        means[:, k] = np.bincount(position, weights=column, minlength=len(units)) / counts
    return (means[:, 0] if values.ndim == 1 else means), units


def two_class_scores(
    targets: np.ndarray, positive: np.ndarray, units: np.ndarray | None = None
) -> Scores:
    """Return scores of two classes from the probability of the second one, (n,)."""
    rows = np.arange(len(targets)) if units is None else units
    positive = np.asarray(positive, dtype=np.float64)
    return Scores(rows, {"target": targets, "p_0": 1 - positive, "p_1": positive})


def probabilities(scores: Scores) -> np.ndarray:
    """Return the probabilities of the classes, (n, n_classes)."""
    n_classes = sum(name.startswith("p_") for name in scores.columns)
    return np.stack([scores.columns[f"p_{k}"] for k in range(n_classes)], axis=1)


def called(scores: Scores) -> np.ndarray:
    """Return the class that each row is called, (n,)."""
    if "p_2" in scores.columns:
        classes: np.ndarray = probabilities(scores).argmax(axis=1)
        return classes
    return (scores.columns["p_1"] >= scores.facts.get(THRESHOLD, 0.5)).astype(np.int64)


def classification_metrics(scores: Scores) -> dict[str, Any]:
    """Score the predictions of some rows.

    Returns
    -------
    dict
        Accuracy, balanced accuracy (mean recall of the classes) and AUC (of more than two classes
        the mean of one against the rest); of two classes also sensitivity, specificity, the Brier
        score and, where one was chosen, the accuracy at the site's own threshold; of more each
        class's recall, ``"recall_k"``. Then ``"n"``, the number of rows, and ``"reasons"``, which
        says for each metric that is NaN why it is undefined: a class without rows leaves its
        recall, AUC and balanced accuracy undefined; without rows all are.
    """
    targets, right = scores.columns["target"], called(scores) == scores.columns["target"]
    n_classes = probabilities(scores).shape[1]
    two = n_classes == 2
    names = ("specificity", "sensitivity") if two else [f"recall_{k}" for k in range(n_classes)]
    result: dict[str, Any] = dict.fromkeys((m.name for m in ANY_CLASSES), math.nan)
    result |= dict.fromkeys(names, math.nan)
    if two:
        result = dict.fromkeys((m.name for m in TWO_CLASSES[:-1]), math.nan)
    reasons: dict[str, str] = {}
    if len(targets) == 0:
        reasons = dict.fromkeys(result, "there are no samples")
    else:
        result["accuracy"] = float(np.mean(right))
        for k, name in enumerate(names):
            if (members := targets == k).any():
                result[name] = float(np.mean(right[members]))
            else:
                missing = f"none of the {len(targets)} samples is of class {k}"
                reasons |= dict.fromkeys((name, "auc", "balanced_accuracy"), missing)
        if not reasons:
            result |= _ranking(scores)
    if two:
        result["brier"] = operating_point.brier_score(targets, scores.columns["p_1"])
        if (own := scores.facts.get(OWN_THRESHOLD)) is not None:
            at_own = scores.columns["p_1"] >= own
            result[AT_OWN_THRESHOLD] = float(np.mean(at_own == (targets == 1)))
    return {**result, "n": len(targets), "reasons": reasons}


def _ranking(scores: Scores) -> dict[str, float]:
    from sklearn.metrics import balanced_accuracy_score, roc_auc_score

    targets, predicted = scores.columns["target"], called(scores)
    if "p_2" not in scores.columns:
        auc = roc_auc_score(targets == 1, scores.columns["p_1"])
    else:
        auc = roc_auc_score(targets, probabilities(scores), multi_class="ovr", average="macro")
    return {
        "auc": float(auc),
        "balanced_accuracy": float(balanced_accuracy_score(targets, predicted)),
    }


def _criterion(
    training: TrainingSettings, logits: torch.Tensor, samples: Samples
) -> nn.CrossEntropyLoss:
    """Make the loss, once the first logits tell the number of classes."""
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
        got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ValueError(f"training needs a network that gives logits (n, n_classes), got {got}")
    n_classes = logits.shape[1]
    targets = class_targets(samples)
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= n_classes:
        raise ValueError(
            f"targets are classes {low} to {high}, but the network has {n_classes} outputs: "
            f"classes must be 0 to {n_classes - 1}"
        )
    weights = training.class_weights
    if weights is None:
        return nn.CrossEntropyLoss()
    if weights == "balanced":
        counts = torch.bincount(targets, minlength=n_classes)
        n_present = (counts > 0).sum()
        tensor = len(targets) / (n_present * counts.clamp(min=1))
    else:
        if len(weights) != n_classes:
            raise ValueError(
                f"class_weights has {len(weights)} numbers, but the network has {n_classes} outputs"
            )
        tensor = torch.tensor(weights)
    return nn.CrossEntropyLoss(weight=tensor.to(logits.device, logits.dtype))


def class_targets(samples: Samples) -> torch.Tensor:
    """Return the class of each sample, int64 (n,); samples that know them need not be read."""
    known: torch.Tensor | None = getattr(samples, "targets", None)
    if known is None:
        known = torch.cat([batch.targets for batch in samples.batches(_BATCH)])
    if known.is_floating_point() or known.is_complex() or known.ndim != 1:
        raise ValueError(
            f"targets are {known.dtype} of shape {tuple(known.shape)}; classes are integers, one "
            "a sample"
        )
    return known
