"""How well a network does: per window, per subject, per site, and across sites.

A sample is one window of one subject's scan. A subject's score is the mean of the probabilities of
its windows. Class 1 is the positive class; a score of at least the threshold predicts it.

scikit-learn is imported inside of the functions that need it: a FLARE client that only follows the
training (:func:`quick_accuracy`) does not pay for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

BEFORE_TRAINING = "before_training"
"""Scores of the received shared weights with the site's own batch norm, before local epochs."""

AFTER_TRAINING = "after_training"
"""Scores of the same site's network after its local epochs of the round."""

METRICS = ("accuracy", "balanced_accuracy", "auc", "sensitivity", "specificity")
"""Names of the metrics of :func:`binary_metrics`, each in [0, 1] or NaN if it is undefined."""


def predict(model: nn.Module, inputs: torch.Tensor, batch_size: int = 512) -> np.ndarray:
    """Return the class probabilities of each sample.

    Parameters
    ----------
    model : torch.nn.Module
        Gives logits (n, n_classes). It is put into eval mode and then back: each of its modules is
        left in the mode in which it was.
    inputs : torch.Tensor
        Shape (n, ...), ``n >= 1``; moved batch by batch to the model's device.
    batch_size : int
        Samples at a time. It decides speed and memory, and the result up to rounding only.

    Returns
    -------
    numpy.ndarray
        float64, shape (n, n_classes); rows sum to one.

    Raises
    ------
    ValueError
        If there is no sample, `batch_size` is not positive, or the output is not (n, n_classes).
    FloatingPointError
        If a logit is not finite.
    """
    if len(inputs) == 0:
        raise ValueError("there is no sample to predict")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    first = next(model.parameters(), None)
    device = inputs.device if first is None else first.device
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            outputs = [model(batch.to(device)) for batch in inputs.split(batch_size)]
    finally:
        for module in training:
            module.training = True
    if not isinstance(outputs[0], torch.Tensor) or outputs[0].ndim != 2:
        raise ValueError("prediction needs a network that gives logits (n, n_classes)")
    logits = torch.cat(outputs).cpu().double()
    if not bool(torch.isfinite(logits).all()):
        n_bad = int((~torch.isfinite(logits).all(dim=1)).sum())
        raise FloatingPointError(f"the network gives no finite score for {n_bad} samples")
    probability: np.ndarray = logits.softmax(dim=1).numpy()
    return probability


def subject_scores(
    window_probability: np.ndarray, subject_index: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Average the probabilities of each subject's windows.

    Parameters
    ----------
    window_probability : numpy.ndarray
        Shape (n_windows,) or (n_windows, n_classes).
    subject_index : numpy.ndarray
        Subject of each window, numbers or names, shape (n_windows,).

    Returns
    -------
    scores : numpy.ndarray
        float64, shape (n_subjects,) or (n_subjects, n_classes).
    subjects : numpy.ndarray
        The distinct subjects, sorted, in the order of `scores`.
    """
    values = np.asarray(window_probability, dtype=np.float64)
    owner = np.asarray(subject_index)
    if owner.ndim != 1 or values.ndim not in (1, 2) or len(owner) != len(values):
        raise ValueError(
            f"probabilities have shape {values.shape} and subjects {owner.shape}: "
            "give one subject for each window"
        )
    subjects, position = np.unique(owner, return_inverse=True)
    counts = np.bincount(position, minlength=len(subjects))
    columns = values[:, None] if values.ndim == 1 else values
    scores = np.empty((len(subjects), columns.shape[1]))
    for k, column in enumerate(columns.T):
        scores[:, k] = np.bincount(position, weights=column, minlength=len(subjects)) / counts
    return (scores[:, 0] if values.ndim == 1 else scores), subjects


def binary_metrics(
    targets: np.ndarray, scores: np.ndarray, threshold: float = 0.5
) -> dict[str, Any]:
    """Score the predictions of one set of samples.

    Parameters
    ----------
    targets : numpy.ndarray
        0 or 1 for each sample, shape (n,).
    scores : numpy.ndarray
        Score of class 1, usually its probability, finite, shape (n,).
    threshold : float
        A score of at least this much predicts class 1.

    Returns
    -------
    dict
        The :data:`METRICS`; ``"n"``, the number of samples; and ``"reasons"``, which says for each
        metric that is NaN why it is undefined. Without samples of class 1 (or 0) that is
        sensitivity (or specificity), AUC and balanced accuracy; without samples, all.

    Raises
    ------
    ValueError
        If shapes differ, a target is neither 0 nor 1, or a score is not finite.
    """
    targets, scores = _checked_pair(targets, scores)
    positive = targets == 1
    result: dict[str, Any] = dict.fromkeys(METRICS, math.nan)
    reasons: dict[str, str] = {}
    if len(targets) == 0:
        reasons = dict.fromkeys(METRICS, "there are no samples")
    else:
        predicted = scores >= threshold
        result["accuracy"] = float(np.mean(predicted == positive))
        for name, members, label in (
            ("sensitivity", positive, 1),
            ("specificity", ~positive, 0),
        ):
            if members.any():
                result[name] = float(np.mean(predicted[members] == positive[members]))
            else:
                missing = f"none of the {len(targets)} samples is of class {label}"
                reasons |= dict.fromkeys((name, "auc", "balanced_accuracy"), missing)
        if not reasons:
            from sklearn.metrics import balanced_accuracy_score, roc_auc_score

            result["auc"] = float(roc_auc_score(positive, scores))
            result["balanced_accuracy"] = float(balanced_accuracy_score(positive, predicted))
    return {**result, "n": len(targets), "reasons": reasons}


def evaluate_site(
    targets: np.ndarray,
    probability: np.ndarray,
    subject_index: np.ndarray,
    threshold: float = 0.5,
) -> dict[str, dict[str, Any]]:
    """Score one site's test windows, per window and per subject.

    Parameters
    ----------
    targets : numpy.ndarray
        0 or 1 for each window, the same for all windows of a subject, shape (n_windows,).
    probability : numpy.ndarray
        From :func:`predict`, shape (n_windows, 2); or of class 1 alone, shape (n_windows,).
    subject_index : numpy.ndarray
        Subject of each window, shape (n_windows,).
    threshold : float
        As in :func:`binary_metrics`.

    Returns
    -------
    dict
        ``{"window": metrics, "subject": metrics}``, each as from :func:`binary_metrics`.
    """
    scores = _positive_score(probability)
    of_subject, _ = subject_scores(scores, subject_index)
    return {
        "window": binary_metrics(targets, scores, threshold),
        "subject": binary_metrics(_subject_targets(targets, subject_index), of_subject, threshold),
    }


def quick_accuracy(
    targets: np.ndarray,
    probability: np.ndarray,
    subject_index: np.ndarray,
    threshold: float = 0.5,
) -> dict[str, float]:
    """Follow a training: what :func:`evaluate_site` says of accuracy, without scikit-learn.

    Parameters are those of :func:`evaluate_site`.

    Returns
    -------
    dict
        ``"window_accuracy"``, ``"subject_accuracy"`` and ``"cross_entropy"``, the mean over windows
        in nats. All NaN if there is no window.
    """
    targets, scores = _checked_pair(targets, _positive_score(probability))
    if len(targets) == 0:
        return dict.fromkeys(("window_accuracy", "subject_accuracy", "cross_entropy"), math.nan)
    of_subject, _ = subject_scores(scores, subject_index)
    subject_targets = _subject_targets(targets, subject_index)
    of_target = np.where(targets == 1, scores, 1 - scores)
    smallest = np.finfo(np.float64).tiny  # a probability that underflowed to 0 costs 708 nats
    return {
        "window_accuracy": float(np.mean((scores >= threshold) == targets)),
        "subject_accuracy": float(np.mean((of_subject >= threshold) == subject_targets)),
        "cross_entropy": float(-np.mean(np.log(np.clip(of_target, smallest, None)))),
    }


def across_sites(per_site: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Average metrics over sites, in both of the usual ways, each under its name.

    Parameters
    ----------
    per_site : mapping from str to mapping
        For each site, what :func:`binary_metrics` returned: of its subjects or of its windows.
        Each site must have been scored with its own batch norm.

    Returns
    -------
    dict
        ``"macro"``: the mean of each metric in which every site counts the same.
        ``"sample_weighted"``: weighted by each site's ``"n"``.
        ``"n_sites"``: for each metric, the number of sites in these means; a site where the metric
        is undefined (NaN) is left out of both.
        ``"weights"``: each site's ``"n"``.
        The same bits in whichever order the sites are given.

    Raises
    ------
    ValueError
        If there is no site, or the sites do not have the same metrics.
    """
    if not per_site:
        raise ValueError("there is no site to average over")
    sites = sorted(per_site)
    names = [name for name in per_site[sites[0]] if name not in ("n", "reasons")]
    for site in sites:
        difference = {*names, "n"} ^ (set(per_site[site]) - {"reasons"})
        if difference:
            raise ValueError(
                f"sites {sites[0]!r} and {site!r} differ in their metrics: "
                + ", ".join(sorted(difference))
            )
    weights = {site: int(per_site[site]["n"]) for site in sites}
    macro: dict[str, float] = {}
    sample_weighted: dict[str, float] = {}
    n_sites: dict[str, int] = {}
    for name in names:
        defined = [site for site in sites if not math.isnan(per_site[site][name])]
        values = [float(per_site[site][name]) for site in defined]
        n_sites[name] = len(defined)
        macro[name] = _mean(values, [1] * len(values))
        sample_weighted[name] = _mean(values, [weights[site] for site in defined])
    return {
        "macro": macro,
        "sample_weighted": sample_weighted,
        "n_sites": n_sites,
        "weights": weights,
    }


def assert_disjoint_subjects(
    train_subjects: Collection[Any], test_subjects: Collection[Any]
) -> None:
    """Refuse a split in which a subject is on both sides: its windows look alike.

    Raises
    ------
    ValueError
        With the number of such subjects, and not their ids, which stay out of logs.
    """
    both = set(np.asarray(train_subjects).tolist()) & set(np.asarray(test_subjects).tolist())
    if both:
        raise ValueError(
            f"subjects in both the training and the test samples: {len(both)}; "
            "split by subject, never by window"
        )


def _mean(values: list[float], weights: list[int]) -> float:
    total = sum(weights)
    if total == 0:
        return math.nan
    products = (value * weight for value, weight in zip(values, weights, strict=True))
    return math.fsum(products) / total


def _positive_score(probability: np.ndarray) -> np.ndarray:
    """Return the probability of class 1."""
    values = np.asarray(probability, dtype=np.float64)
    if values.ndim == 2 and values.shape[1] == 2:
        return values[:, 1]
    if values.ndim == 1:
        return values
    raise ValueError(f"probabilities have shape {values.shape}; they must be (n, 2) or (n,)")


def _checked_pair(targets: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    targets = np.asarray(targets)
    scores = np.asarray(scores, dtype=np.float64)
    if targets.ndim != 1 or targets.shape != scores.shape:
        raise ValueError(f"targets have shape {targets.shape}, but scores {scores.shape}")
    if not np.isin(targets, (0, 1)).all():
        other = np.unique(targets[~np.isin(targets, (0, 1))])
        raise ValueError(f"targets must be 0 or 1, got {other[0]!r}")
    n_bad = int((~np.isfinite(scores)).sum())
    if n_bad:
        raise ValueError(f"{n_bad} of {len(scores)} scores are not finite")
    return targets, scores


def _subject_targets(targets: np.ndarray, subject_index: np.ndarray) -> np.ndarray:
    """Return each subject's class, in the order of :func:`subject_scores`."""
    shares, subjects = subject_scores(np.asarray(targets), subject_index)
    n_mixed = int(((shares > 0) & (shares < 1)).sum())
    if n_mixed:
        raise ValueError(f"{n_mixed} of {len(subjects)} subjects have windows of both classes")
    return shares.astype(np.int64)
