"""Which inputs a federation's networks look at, at each site and over all, and how steadily.

A trained network always has inputs that weigh most. Whether another training, on a little other
data and from other initial weights, would find the same ones is a second question, and without its
answer the first says nothing. So the experiment is run once for each fold, each time from initial
weights of its own, and the same again with the labels of each site's units permuted: any two folds
share most of their training units, so that weights agree even where nothing is to be found.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_prep.files import write_json, write_text
from fedbn.core.batches import TensorSamples
from fedbn.core.training import derive_seed
from fedbn.federation.experiment import Experiment
from fedbn.federation.results import versions
from fedbn.federation.simulation import federate
from fedbn.federation.site import Site, prepare
from fedbn.tasks.attribution import POSITIVE, integrated_gradients
from fedbn.tasks.base import Features
from fedbn.tasks.data import SiteData

FORMAT = "fedbn-explanation-1"
SUMMARY_FILE = "explanation.json"
SHARED = "shared"
"""Scope of the mean over sites, each counting the same."""

N_TOP = 50
_ROWS = 256  # samples whose attributions are in memory at a time


class ExplanationError(ValueError):
    """What cannot be explained input by input; one sentence."""


@dataclass(frozen=True)
class FeatureWeights:
    """What the inputs weigh in one trained network at one site, each array (n_features,).

    Attributes
    ----------
    weight
        Mean absolute attribution over the site's units, in log odds of the positive class, with
        the sign of the direction: plus where a larger value speaks for it.
    separation
        Mean attribution of the held-out units of the positive class less that of the others, in
        log odds. Over all inputs it adds up to the difference of their mean log odds: above zero
        where the input helps to tell them apart. NaN without held-out units of both classes.
    """

    weight: np.ndarray
    separation: np.ndarray


def number_of_top(n_features: int, asked: int | None = None) -> int:
    """Return how many inputs count as the strongest: :data:`N_TOP`, at most a fifth of all.

    Raises
    ------
    ExplanationError
        If as many are asked for as there are: then all folds agree.
    """
    if asked is not None and asked >= n_features:
        raise ExplanationError(
            f"top is {asked}, but there are {n_features} inputs; give a smaller number"
        )
    return asked or max(1, min(N_TOP, n_features // 5))


def features_of(site: Site) -> Features:
    """Name the inputs of a site's network.

    Raises
    ------
    ExplanationError
        If they have no names, are others than the network's, or there are more than two classes.
    """
    task = site.task
    features = task.feature_names(site.data)
    if features is None or not isinstance(site.test, TensorSamples):
        raise ExplanationError(
            f"task {task.name!r} has no inputs that an explanation can name one by one"
        )
    names = getattr(task, "class_names", ())
    if len(names) != 2:
        raise ExplanationError(f"an explanation needs two classes, task {task.name!r} has others")
    if site.test.inputs.shape[1:] != (len(features.names),):
        raise ExplanationError(
            f"network {site.experiment.network.name}: its inputs are not the "
            f"{len(features.names)} {features.noun}s in order, so that nothing can be said of one"
        )
    return features


def feature_weights(site: Site) -> FeatureWeights:
    """Attribute the log odds of all of a site's units to the inputs, with its network as it is.

    A unit is the mean over its samples. The baseline is zero: with standardised features, the mean
    training unit of the site.

    Raises
    ------
    ExplanationError
        As :func:`features_of`.
    """
    features_of(site)
    train, test = site.train_samples, site.test
    assert isinstance(train, TensorSamples)
    assert isinstance(test, TensorSamples)
    inputs = torch.cat([train.inputs, test.inputs])
    owners = np.concatenate([train.owners, test.owners])
    units, first, place, counts = np.unique(
        owners, return_index=True, return_inverse=True, return_counts=True
    )
    attributions = np.zeros((len(units), inputs.shape[1]))
    values = np.zeros_like(attributions)
    for start in range(0, len(inputs), _ROWS):
        part = inputs[start : start + _ROWS]
        found = integrated_gradients(site.network, part).values
        np.add.at(attributions, place[start : start + _ROWS], found)
        np.add.at(values, place[start : start + _ROWS], part.double().cpu().numpy())
    attributions /= counts[:, None]
    values /= counts[:, None]
    direction = np.sign(np.einsum("ij,ij->j", attributions, values))
    weight = direction * np.abs(attributions).mean(axis=0)
    held_out = np.isin(units, test.owners)
    positive = torch.cat([train.targets, test.targets]).cpu().numpy()[first] == POSITIVE
    groups = [attributions[held_out & members] for members in (positive, ~positive)]
    separation = np.full(inputs.shape[1], np.nan)
    if all(len(group) for group in groups):
        separation = groups[0].mean(axis=0) - groups[1].mean(axis=0)
    return FeatureWeights(weight, separation)


@dataclass(frozen=True)
class Explanation:
    """Weights of one experiment's inputs over all folds.

    Attributes
    ----------
    experiment
        What was run.
    features
        Names of the inputs.
    weights, separations
        Scope (a site, or ``"shared"``) to (n_folds, n_features).
    permuted
        For each label permutation, scope to weights (n_folds, n_features).
    synthetic
        Whether the units are made up.
    """

    experiment: Experiment
    features: Features
    weights: dict[str, np.ndarray]
    separations: dict[str, np.ndarray]
    permuted: tuple[dict[str, np.ndarray], ...]
    synthetic: bool

    @property
    def scopes(self) -> tuple[str, ...]:
        """All sites in the experiment's order, and last what they have in common."""
        return (*self.experiment.sites, SHARED)


def explain(
    experiment: Experiment,
    data: Mapping[str, SiteData],
    *,
    n_permutations: int,
    on_run: Callable[[int, int], None] | None = None,
) -> Explanation:
    """Train the experiment once a fold, and the same with permuted labels, and weigh the inputs.

    The folds are those of the experiment's seed. The initial weights and the order of batches of
    fold `k` are those of ``seed + k``: from the same weights two networks look at the same inputs
    for no other reason.

    Parameters
    ----------
    experiment
        Its fold is replaced.
    data
        Site name to data, for every site of the experiment.
    n_permutations
        How often the labels are permuted, at least once.
    on_run
        Called with the number of finished trainings and that of all: once before the first one
        starts, and then after each.

    Raises
    ------
    ExplanationError
        If there is no permutation, or as :func:`features_of`.
    """
    if n_permutations < 1:
        raise ExplanationError(
            f"permutations is {n_permutations}; at least 1 is needed: without it one cannot tell "
            "how steady the weights would be by chance"
        )
    any_site = experiment.sites[0]
    features = features_of(Site(any_site, data[any_site], experiment))
    total = experiment.n_folds * (1 + n_permutations)
    done = itertools.count()

    def told() -> None:
        number = next(done)
        if on_run is not None:
            on_run(number, total)

    told()
    found, *permuted = (
        _over_folds(experiment, _permuted(data, experiment, permutation), told)
        for permutation in (None, *range(n_permutations))
    )
    return Explanation(
        experiment=experiment,
        features=features,
        weights=_stacked(found, "weight"),
        separations=_stacked(found, "separation"),
        permuted=tuple(_stacked(of_folds, "weight") for of_folds in permuted),
        synthetic=any(one.synthetic for one in data.values()),
    )


def _over_folds(
    experiment: Experiment, data: Mapping[str, SiteData], told: Callable[[], None]
) -> list[dict[str, FeatureWeights]]:
    of_folds = []
    for fold in range(experiment.n_folds):
        of_fold = experiment.changed(fold=fold)
        prepared = {name: prepare(name, data[name], of_fold) for name in experiment.sites}
        changed = of_fold.changed(seed=experiment.seed + fold)
        federation = federate(changed, data, score_rounds=False, preparations=prepared)
        weights = {name: feature_weights(federation.load(name)) for name in federation.sites}
        of_folds.append(weights)
        told()
    return of_folds


def _permuted(
    data: Mapping[str, SiteData], experiment: Experiment, permutation: int | None
) -> Mapping[str, SiteData]:
    """Return the data with each site's labels dealt out anew among its own units."""
    if permutation is None:
        return data
    changed = {}
    for name, one in data.items():
        seed = derive_seed(experiment.seed, name, permutation, "permuted diagnoses")
        order = np.random.default_rng(seed).permutation(len(one.units))
        changed[name] = experiment.task.relabelled(one, order)
    return changed


def _stacked(of_folds: Sequence[Mapping[str, FeatureWeights]], what: str) -> dict[str, np.ndarray]:
    by_scope = {
        site: np.stack([getattr(fold[site], what) for fold in of_folds]) for site in of_folds[0]
    }
    return {**by_scope, SHARED: np.mean(list(by_scope.values()), axis=0)}


# --------------------------------------------------------------------------------------- stability


def rank_correlation(weights: np.ndarray) -> float:
    """Return the mean over pairs of folds of the rank correlation (Spearman) of their weights.

    Parameters
    ----------
    weights
        (n_folds, n_features), signed.
    """
    from scipy.stats import rankdata

    pairs = np.corrcoef(rankdata(weights, axis=1))
    return float(pairs[np.triu_indices(len(weights), k=1)].mean())


def overlap(weights: np.ndarray, n_top: int) -> float:
    """Return the mean over pairs of folds of how much their strongest inputs are the same ones.

    Jaccard's index of the two sets of the `n_top` inputs with the largest absolute weight: 1 if
    they are the same, 0 if they have none in common.
    """
    tops = [set(of_fold[:n_top]) for of_fold in strongest_first(weights).tolist()]
    shares = [len(a & b) / len(a | b) for a, b in itertools.combinations(tops, 2)]
    return float(np.mean(shares))


def strongest_in(weights: np.ndarray, n_top: int) -> np.ndarray:
    """Count for each input the folds in which it is among the `n_top` strongest, (n_features,)."""
    counts: np.ndarray = np.bincount(
        strongest_first(weights)[:, :n_top].ravel(), minlength=weights.shape[1]
    )
    return counts


def in_every_fold(weights: np.ndarray, n_top: int) -> int:
    """Count the inputs that are among the `n_top` strongest of every fold."""
    return int((strongest_in(weights, n_top) == len(weights)).sum())


def chance_overlap(n_features: int, n_top: int) -> float:
    """Return about what :func:`overlap` is for two sets that are drawn from all inputs."""
    return n_top / (2 * n_features - n_top)


def strongest_first(weights: np.ndarray) -> np.ndarray:
    """Return the places of the weights, the largest absolute one first, along the last axis."""
    places: np.ndarray = np.argsort(-np.abs(weights), axis=-1, kind="stable")
    return places


def stability(explanation: Explanation, n_top: int = N_TOP) -> dict[str, dict[str, Any]]:
    """Compare how much folds agree with how much they do when labels are permuted.

    Returns
    -------
    dict
        Scope to ``"rank_correlation"``, ``"overlap"`` and ``"in_every_fold"`` (the number of inputs
        among the `n_top` of every fold), each with the value ``"found"``, the values
        ``"permuted"``, one a permutation, and whether the first is ``"above"`` all of these.
    """
    result: dict[str, dict[str, Any]] = {}
    for scope in explanation.scopes:
        weights = explanation.weights[scope]
        result[scope] = {}
        for name, measure in (
            ("rank_correlation", rank_correlation),
            ("overlap", lambda values: overlap(values, n_top)),
            ("in_every_fold", lambda values: in_every_fold(values, n_top)),
        ):
            found = measure(weights)
            permuted = [measure(of_scope[scope]) for of_scope in explanation.permuted]
            result[scope][name] = {
                "found": found,
                "permuted": permuted,
                "above": found > max(permuted),
            }
    return result


def stability_sentences(found: Mapping[str, Mapping[str, Any]], n_top: int, noun: str) -> list[str]:
    """Say for each scope whether its inputs are steadier than those of permuted labels."""
    sentences = []
    for scope, of_scope in found.items():
        parts = []
        for name, what, digits in (
            ("rank_correlation", f"rank correlation of all {noun}s", 2),
            ("overlap", f"overlap of the {n_top} strongest", 2),
            ("in_every_fold", f"{noun}s among them in every fold", 0),
        ):
            one = of_scope[name]
            low, high = (f"{end(one['permuted']):.{digits}f}" for end in (min, max))
            span = low if low == high else f"{low} to {high}"
            how = "above" if one["above"] else "NOT above"
            parts.append(f"{what} {one['found']:.{digits}f}, {how} permuted labels' {span}")
        sentences.append(f"{scope}: between folds, {'; '.join(parts)}.")
    return sentences


# --------------------------------------------------------------------------------------- the files


def check_out(out: Path) -> None:
    """Find out before the training, not after it, whether the files have a place.

    Raises
    ------
    ExplanationError
        If `out` holds something else than an earlier explanation.
    """
    if out.exists() and not out.is_dir():
        raise ExplanationError(f"{out} is not a folder; give another --out")
    if out.is_dir() and any(out.iterdir()) and not (out / SUMMARY_FILE).is_file():
        raise ExplanationError(f"{out} is not empty and holds no explanation; give another --out")
    out.mkdir(parents=True, exist_ok=True)


def write_explanation(explanation: Explanation, out: Path, n_top: int = N_TOP) -> dict[str, Any]:
    """Write one row an input of the network and ``explanation.json``.

    Returns
    -------
    dict
        The content of ``explanation.json``.
    """
    noun, n_features = explanation.features.noun, explanation.weights[SHARED].shape[1]
    content = {
        "format": FORMAT,
        "synthetic": explanation.synthetic,
        "experiment": explanation.experiment.model_dump(mode="json"),
        f"n_{noun}s": n_features,
        "n_top": n_top,
        "n_permutations": len(explanation.permuted),
        "chance_overlap": chance_overlap(n_features, n_top),
        "stability": stability(explanation, n_top),
        "versions": versions(),
    }
    write_text(features_file(explanation, out), features_csv(explanation, n_top))
    write_json(out / SUMMARY_FILE, content)
    return content


def features_file(explanation: Explanation, out: Path) -> Path:
    """Return the file with one row an input, named by what the inputs are."""
    return out / f"{explanation.features.noun}s.csv"


def features_csv(explanation: Explanation, n_top: int = N_TOP) -> str:
    """Write all inputs as CSV, ordered by the absolute weight that they have over all sites.

    Columns: the input's name; for each scope the mean weight over folds, its standard deviation
    over folds, in how many folds the input is among the `n_top` strongest, and the mean separation.
    """
    columns: dict[str, np.ndarray] = {}
    for scope in explanation.scopes:
        weights = explanation.weights[scope]
        columns[f"{scope}_weight"] = weights.mean(axis=0)
        columns[f"{scope}_weight_sd"] = weights.std(axis=0, ddof=1)
        columns[f"{scope}_folds_in_top_{n_top}"] = strongest_in(weights, n_top)
        columns[f"{scope}_separation"] = explanation.separations[scope].mean(axis=0)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if explanation.synthetic:
        text.write("# SYNTHETIC COHORT, no patient's data\n")
    writer.writerow([*explanation.features.columns, *columns])
    for k in strongest_first(explanation.weights[SHARED].mean(axis=0)).tolist():
        cells = (_cell(values[k]) for values in columns.values())
        writer.writerow([*explanation.features.names[k], *cells])
    return text.getvalue()


def _cell(value: Any) -> str:
    if isinstance(value, np.integer):
        return str(value)
    return "" if np.isnan(value) else f"{value:.6g}"
