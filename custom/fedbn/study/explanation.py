"""Which connections a federation's networks look at, at each site and over all, and how steadily.

A trained network always has edges that weigh most. Whether another training, on a little other
data and from other initial weights, would find the same ones is a second question, and without its
answer the first says nothing. So the experiment is run once for each fold, each time from initial
weights of its own, and the same again with the diagnoses of each site's subjects permuted: any two
folds share most of their training subjects, so that edges agree even where nothing is to be found.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_prep.site_store import SiteStore, assign_folds
from fedbn.core.training import derive_seed
from fedbn.federation.experiment import Experiment
from fedbn.federation.results import versions
from fedbn.federation.simulation import federate
from fedbn.federation.site import Site
from fedbn.federation.site_state import atomic_write, write_json
from fedbn.study.methods import tensors
from fedbn.tasks.connectome.attribution import integrated_gradients
from fedbn.tasks.data import SiteData

FORMAT = "fedbn-explanation-1"
EDGES_FILE = "edges.csv"
SUMMARY_FILE = "explanation.json"
SHARED = "shared"
"""Scope of the mean over sites, each counting the same."""

N_TOP = 50
_ROWS = 256  # samples whose attributions are in memory at a time


class ExplanationError(ValueError):
    """What cannot be explained edge by edge; one sentence."""


@dataclass(frozen=True)
class EdgeWeights:
    """What the edges weigh in one trained network at one site, each array (n_edges,).

    Attributes
    ----------
    weight
        Mean absolute attribution over the site's subjects, in log odds of autism, with the sign of
        the direction: plus where a stronger edge speaks for autism.
    separation
        Mean attribution of the held-out patients less that of the held-out controls, in log odds.
        Over all edges it adds up to the difference of their mean log odds: above zero where the
        edge helps to tell them apart. NaN without subjects of both diagnoses.
    """

    weight: np.ndarray
    separation: np.ndarray


def edge_weights(site: Site) -> EdgeWeights:
    """Attribute the log odds of all of a site's subjects to the edges, with its network as it is.

    A subject is the mean over its windows. The baseline is zero: with standardised features, the
    mean training subject of the site.

    Raises
    ------
    ExplanationError
        If the network's inputs are not the edges.
    """
    train, test = tensors(site.train_samples), tensors(site.test)
    store = site.data
    assert isinstance(store, SiteStore)
    inputs = torch.cat([train.inputs, test.inputs])
    if inputs.ndim != 2 or inputs.shape[1] != store.n_edges:
        raise ExplanationError(
            f"network {site.experiment.network.name}: its inputs are not the "
            f"{store.n_edges} edges in order, so that nothing can be said edge by edge"
        )
    owners = np.concatenate([train.owners, test.owners])
    subjects, place, counts = np.unique(owners, return_inverse=True, return_counts=True)
    attributions = np.zeros((len(subjects), inputs.shape[1]))
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
    held_out = np.isin(subjects, test.owners)
    patients = store.labels[subjects] == 1
    groups = [attributions[held_out & members] for members in (patients, ~patients)]
    separation = np.full(inputs.shape[1], np.nan)
    if all(len(group) for group in groups):
        separation = groups[0].mean(axis=0) - groups[1].mean(axis=0)
    return EdgeWeights(weight, separation)


@dataclass(frozen=True)
class Explanation:
    """Edge weights of one experiment over all folds.

    Attributes
    ----------
    experiment
        What was run.
    rois
        ROI id and name of each node.
    weights, separations
        Scope (a site, or ``"shared"``) to (n_folds, n_edges).
    permuted
        For each permutation of the diagnoses, scope to weights (n_folds, n_edges).
    synthetic
        Whether the subjects are made up.
    """

    experiment: Experiment
    rois: tuple[tuple[str, str], ...]
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
    """Train the experiment once a fold, and the same with permuted diagnoses, and weigh the edges.

    The folds are those of the experiment's seed. The initial weights and the order of batches of
    fold `k` are those of ``seed + k``: from the same weights two networks look at the same edges
    for no other reason.

    Parameters
    ----------
    experiment
        Its fold is replaced.
    data
        Site name to data, for every site of the experiment.
    n_permutations
        How often the diagnoses are permuted, at least once.
    on_run
        Called with the number of finished trainings and that of all: once before the first one
        starts, and then after each.

    Raises
    ------
    ExplanationError
        If there is no permutation, or the network's inputs are not the edges.
    """
    stores = {name: one for name, one in data.items() if isinstance(one, SiteStore)}
    if len(stores) < len(data):
        raise ExplanationError(
            f"task {experiment.task.name!r} has no inputs that an explanation can name one by one"
        )
    if n_permutations < 1:
        raise ExplanationError(
            f"permutations is {n_permutations}; at least 1 is needed: without it one cannot tell "
            "how steady the edges would be by chance"
        )
    total = experiment.n_folds * (1 + n_permutations)
    done = itertools.count()

    def told() -> None:
        number = next(done)
        if on_run is not None:
            on_run(number, total)

    told()
    found, *permuted = (
        _over_folds(experiment, _permuted(stores, experiment.seed, permutation), told)
        for permutation in (None, *range(n_permutations))
    )
    return Explanation(
        experiment=experiment,
        rois=next(iter(stores.values())).rois,
        weights=_stacked(found, "weight"),
        separations=_stacked(found, "separation"),
        permuted=tuple(_stacked(of_folds, "weight") for of_folds in permuted),
        synthetic=any(store.synthetic for store in stores.values()),
    )


def _over_folds(
    experiment: Experiment, stores: Mapping[str, SiteStore], told: Callable[[], None]
) -> list[dict[str, EdgeWeights]]:
    of_folds = []
    stores = {name: _with_folds(store, experiment) for name, store in stores.items()}
    for fold in range(experiment.n_folds):
        changed = experiment.changed(fold=fold, seed=experiment.seed + fold)
        federation = federate(changed, stores, score_rounds=False)
        of_folds.append({name: edge_weights(federation.load(name)) for name in federation.sites})
        told()
    return of_folds


def _with_folds(store: SiteStore, experiment: Experiment) -> SiteStore:
    """Fix the folds of the experiment's seed, where the store has not fixed its own."""
    if any(participant.fold is not None for participant in store.participants):
        return store
    folds = assign_folds(
        [participant.participant_id for participant in store.participants],
        [participant.diagnosis for participant in store.participants],
        experiment.n_folds,
        experiment.seed,
        site=store.site,
    )
    participants = zip(store.participants, folds.tolist(), strict=True)
    return replace(
        store,
        participants=tuple(replace(participant, fold=fold) for participant, fold in participants),
    )


def _permuted(
    stores: Mapping[str, SiteStore], seed: int, permutation: int | None
) -> dict[str, SiteStore]:
    """Return the stores with each site's diagnoses dealt out anew among its own subjects."""
    if permutation is None:
        return dict(stores)
    changed = {}
    for name, store in stores.items():
        rng = np.random.default_rng(derive_seed(seed, name, permutation, "permuted diagnoses"))
        order = rng.permutation(len(store.participants))
        changed[name] = replace(
            store,
            participants=tuple(
                replace(participant, diagnosis=store.participants[k].diagnosis)
                for participant, k in zip(store.participants, order, strict=True)
            ),
        )
    return changed


def _stacked(of_folds: Sequence[Mapping[str, EdgeWeights]], what: str) -> dict[str, np.ndarray]:
    by_scope = {
        site: np.stack([getattr(fold[site], what) for fold in of_folds]) for site in of_folds[0]
    }
    return {**by_scope, SHARED: np.mean(list(by_scope.values()), axis=0)}


# --------------------------------------------------------------------------------------- stability


def rank_correlation(weights: np.ndarray) -> float:
    """Return the mean over pairs of folds of the rank correlation (Spearman) of their edges.

    Parameters
    ----------
    weights
        (n_folds, n_edges), signed.
    """
    from scipy.stats import rankdata

    pairs = np.corrcoef(rankdata(weights, axis=1))
    return float(pairs[np.triu_indices(len(weights), k=1)].mean())


def overlap(weights: np.ndarray, n_top: int) -> float:
    """Return the mean over pairs of folds of how much their strongest edges are the same ones.

    Jaccard's index of the two sets of the `n_top` edges with the largest absolute weight: 1 if
    they are the same, 0 if they have none in common.
    """
    tops = [set(order[:n_top]) for order in _order(weights).tolist()]
    shares = [len(a & b) / len(a | b) for a, b in itertools.combinations(tops, 2)]
    return float(np.mean(shares))


def strongest_in(weights: np.ndarray, n_top: int) -> np.ndarray:
    """Count for each edge the folds in which it is among the `n_top` strongest, (n_edges,)."""
    counts: np.ndarray = np.bincount(_order(weights)[:, :n_top].ravel(), minlength=weights.shape[1])
    return counts


def in_every_fold(weights: np.ndarray, n_top: int) -> int:
    """Count the edges that are among the `n_top` strongest of every fold."""
    return int((strongest_in(weights, n_top) == len(weights)).sum())


def chance_overlap(n_edges: int, n_top: int) -> float:
    """Return about what :func:`overlap` is for two sets that are drawn from all edges."""
    return n_top / (2 * n_edges - n_top)


def _order(weights: np.ndarray) -> np.ndarray:
    order: np.ndarray = np.argsort(-np.abs(weights), axis=-1, kind="stable")
    return order


def stability(explanation: Explanation, n_top: int = N_TOP) -> dict[str, dict[str, Any]]:
    """Compare how much folds agree with how much they do when diagnoses are permuted.

    Returns
    -------
    dict
        Scope to ``"rank_correlation"``, ``"overlap"`` and ``"in_every_fold"`` (the number of edges
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


def stability_sentences(found: Mapping[str, Mapping[str, Any]], n_top: int) -> list[str]:
    """Say for each scope whether its edges are steadier than those of permuted diagnoses."""
    sentences = []
    for scope, of_scope in found.items():
        parts = []
        for name, what, digits in (
            ("rank_correlation", "rank correlation of all edges", 2),
            ("overlap", f"overlap of the {n_top} strongest", 2),
            ("in_every_fold", "edges among them in every fold", 0),
        ):
            one = of_scope[name]
            low, high = (f"{end(one['permuted']):.{digits}f}" for end in (min, max))
            span = low if low == high else f"{low} to {high}"
            how = "above" if one["above"] else "NOT above"
            parts.append(f"{what} {one['found']:.{digits}f}, {how} permuted diagnoses' {span}")
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
    """Write ``edges.csv``, one row an edge, the strongest first, and ``explanation.json``.

    Returns
    -------
    dict
        The content of ``explanation.json``.
    """
    n_edges = explanation.weights[SHARED].shape[1]
    content = {
        "format": FORMAT,
        "synthetic": explanation.synthetic,
        "experiment": explanation.experiment.model_dump(mode="json"),
        "n_edges": n_edges,
        "n_top": n_top,
        "n_permutations": len(explanation.permuted),
        "chance_overlap": chance_overlap(n_edges, n_top),
        "stability": stability(explanation, n_top),
        "versions": versions(),
    }
    with atomic_write(out / EDGES_FILE) as file:
        file.write(edges_csv(explanation, n_top).encode())
    write_json(out / SUMMARY_FILE, content)
    return content


def edges_csv(explanation: Explanation, n_top: int = N_TOP) -> str:
    """Write all edges as CSV, ordered by the absolute weight that they have over all sites.

    Columns: both regions by id and name; for each scope the mean weight over folds, its standard
    deviation over folds, in how many folds the edge is among the `n_top` strongest, and the mean
    separation.
    """
    first, second = np.triu_indices(len(explanation.rois), k=1)
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
    writer.writerow(["roi_a", "name_a", "roi_b", "name_b", *columns])
    for k in _order(explanation.weights[SHARED].mean(axis=0)).tolist():
        writer.writerow(
            [
                *explanation.rois[first[k]],
                *explanation.rois[second[k]],
                *(_cell(values[k]) for values in columns.values()),
            ]
        )
    return text.getvalue()


def _cell(value: Any) -> str:
    if isinstance(value, np.integer):
        return str(value)
    return "" if np.isnan(value) else f"{value:.6g}"
