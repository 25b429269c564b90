"""How a federation does at a hospital that it has not seen: leave one hospital out.

For each hospital and seed the federation is trained on all others. Whatever a new hospital could
start from is then scored on it: models as they are, and with gamma, beta and running statistics
from elsewhere (:data:`fedbn.models.new_site.STARTS`). The left-out hospital's subjects are divided
into folds; what needs scans of its own (standardisation, running statistics, a few labelled
subjects) gets them from the other folds, so that every subject is scored once a seed and has had
no part in its own model.

Each hospital and seed is one unit of work and one file under ``runs/``, written atomically; a
stopped evaluation is continued. Everything else is computed from these files.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedbn.core.batches import TensorSamples
from fedbn.core.networks import NoHeadError, head_entries
from fedbn.core.normalization import affine_names, entries, load_entries, statistics_names
from fedbn.core.training import derive_seed, train_epochs
from fedbn.federation.experiment import Experiment, validated
from fedbn.federation.results import without_nan
from fedbn.federation.simulation import Federation, federate, read_sites
from fedbn.federation.site import Site, make_network
from fedbn.federation.site_state import atomic_write, write_json
from fedbn.models.new_site import (
    STARTS,
    FinishedRun,
    buildable,
    default_start,
    load_start,
    mean_over_sites,
)
from fedbn.study import cache, paired
from fedbn.study.methods import method, table
from fedbn.tasks.classification import classification_metrics, two_class_scores
from fedbn.tasks.data import SiteData

FORMAT = "fedbn-unseen-1"
IDENTITY_FILE = "leave_one_out.json"
SUMMARY_FILE = "unseen.json"

REFERENCE = "fedavg_statistics"
"""The start to beat: FedAvg's model with its statistics recomputed at the new hospital."""

OTHER_SITE = "site:"
OTHER_MEAN, OTHER_BEST = "other_site_mean", "other_site_best"
SAME_AS = {"silobn_statistics": "fedavg_statistics"}
"""Running statistics take no part in training, and what SiloBN keeps at a site is them alone: it
ends with FedAvg's weights, to the bit, and with statistics recomputed with FedAvg's network."""

LABELLED_SUBJECTS = (4, 8)
FINETUNED_STARTS = {"fedavg_statistics": "FedAvg", "fedbn_affine": "FedBN mean,"}
FINETUNED_ENTRIES = ("all", "head")
FINETUNE_EPOCHS, FINETUNE_BATCH = 20, 16
"""Set before any score was looked at, for all entries; the head was added after those had failed
on one hospital in one seed."""

MACRO = "macro"
METRICS = ("accuracy", "balanced_accuracy", "auc")
_METHODS = {"none": "fedavg", "fedbn": "fedbn"}
_DECIDE_NUMBERS = ("fedbn", "python", "torch", "numpy")


class UnseenError(ValueError):
    """A leave-one-hospital-out that cannot be run or used; one sentence."""


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes
    ----------
    name, title
        As in the results, and as a table says it.
    needs
        ``""`` for a start without a label; ``"labels"``; ``"site models"``, which never leave a
        site; or ``"hindsight"``, which no one has.
    """

    name: str
    title: str
    needs: str = ""


ROWS: tuple[Row, ...] = (
    *(
        Row(start.name, start.title, "" if start.can_be_built else "site statistics")
        for start in STARTS.values()
        if start.name not in SAME_AS
    ),
    Row(OTHER_MEAN, "another site's FedBN model, mean over sites", "site models"),
    Row(OTHER_BEST, "another site's FedBN model, the best", "hindsight"),
    *(
        Row(
            f"{start}+{n}_{tuned}",
            f"{title} recomputed, {tuned} trained on {n} labelled",
            "labels",
        )
        for start, title in FINETUNED_STARTS.items()
        for tuned in FINETUNED_ENTRIES
        for n in LABELLED_SUBJECTS
    ),
)


# ------------------------------------------------------------------------------- one unit of work


def score_hospital(
    experiment: Experiment, stores: Mapping[str, SiteData], hospital: str, seed: int
) -> dict[str, Any]:
    """Train on all hospitals but one, and score every start on that one.

    Parameters
    ----------
    experiment
        Network, training and folds; its policy, seed and fold are replaced. The hospitals that
        train hold out fold ``seed % n_folds`` of their own subjects, as in any run.
    stores
        Site name to store, for every site of the experiment.
    hospital
        The site to leave out.
    seed
        Of everything.

    Returns
    -------
    dict
        JSON-able: ``"targets"``, the diagnosis of each subject of the hospital, and ``"scores"``,
        for each start and each other site's model the subjects' probabilities in the same order.
    """
    others = tuple(sorted(site for site in experiment.sites if site != hospital))
    common = experiment.changed(
        sites=others, seed=seed, fold=seed % experiment.n_folds, training_share=1.0
    )
    federations = {
        policy: federate(method(name).experiment(common), stores, score_rounds=False)
        for policy, name in _METHODS.items()
    }
    store = stores[hospital]
    scores: dict[str, np.ndarray] = {}
    targets = np.full(len(store.units), -1)
    for fold in range(experiment.n_folds):
        site = Site(hospital, store, method("fedavg").experiment(common.changed(fold=fold)))
        for name, network in _networks(site, federations, fold):
            found = site.task.score(network, site.test)
            targets[found.units] = found.columns["target"]
            values = scores.setdefault(name, np.full(len(store.units), np.nan))
            values[found.units] = found.columns["p_1"]
    return {
        "targets": targets.tolist(),
        "scores": {name: values.tolist() for name, values in scores.items()},
    }


def _networks(
    site: Site, federations: Mapping[str, Federation], fold: int
) -> Iterable[tuple[str, nn.Module]]:
    """Build all that is scored at a new site, one after the other."""
    samples = table(site, "a start for a new hospital")
    for start in [start for start in STARTS.values() if start.name not in SAME_AS]:
        federation = federations[start.policy]
        network, partition = make_network(_experiment_of(federation))
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for kind, names in (("affine", affine_names), ("statistics", statistics_names)):
            if getattr(start, kind) == "mean":
                expected = entries(network, names(network, partition))
                parts[kind] = mean_over_sites(federation.local, expected)
        load_start(network, partition, start, federation.shared, samples.inputs, **parts)
        yield start.name, network
        if start.name in FINETUNED_STARTS:
            kept = entries(network, network.state_dict())
            for (tuned, only), n in itertools.product(_tuned(network), LABELLED_SUBJECTS):
                load_entries(network, kept)
                _finetune(network, site, samples, n, fold, only)
                yield f"{start.name}+{n}_{tuned}", network
    federation = federations["fedbn"]
    for name in federation.sites:
        yield f"{OTHER_SITE}{name}", federation.load(name).network


def _experiment_of(federation: Federation) -> Experiment:
    return next(iter(federation.sites.values())).experiment


def _tuned(network: nn.Module) -> list[tuple[str, tuple[str, ...]]]:
    """Return what is trained on with labels: all entries, and the head where there is one."""
    tuned = [(FINETUNED_ENTRIES[0], tuple(network.state_dict()))]
    with contextlib.suppress(NoHeadError):
        tuned.append((FINETUNED_ENTRIES[1], head_entries(network)))
    return tuned


def _finetune(
    network: nn.Module,
    site: Site,
    samples: TensorSamples,
    n_labelled: int,
    fold: int,
    only: Sequence[str],
) -> None:
    """Train on from a start with the labels of a few subjects, half of them patients.

    Batch norm normalises with the statistics of all unlabelled scans, which stand still.
    """
    owners = samples.owners
    chosen = labelled_subjects(
        owners, samples.targets.cpu().numpy(), n_labelled, site.experiment.seed, site.name, fold
    )
    rows = torch.from_numpy(np.flatnonzero(np.isin(owners, chosen)))
    settings = site.experiment.training.model_copy(
        update={"local_epochs": FINETUNE_EPOCHS, "batch_size": FINETUNE_BATCH, "proximal_mu": 0.0}
    )
    few = TensorSamples(samples.inputs[rows], samples.targets[rows], owners[rows.numpy()])
    train_epochs(
        network,
        few,
        settings,
        loss=site.task.criterion(settings, few),
        forward=site.task.forward,
        seed=derive_seed(site.experiment.seed, site.name, fold, "few labels"),
        only=only,
    )


def labelled_subjects(
    owners: np.ndarray, targets: np.ndarray, n: int, seed: int, hospital: str, fold: int
) -> list[int]:
    """Draw `n` subjects to label, half of each diagnosis; fewer are a part of more."""
    of_subject = dict(zip(owners.tolist(), targets.tolist(), strict=True))
    rng = np.random.default_rng(derive_seed(seed, hospital, fold, "labelled"))
    chosen: list[int] = []
    for diagnosis in (0, 1):
        members = sorted(owner for owner, target in of_subject.items() if target == diagnosis)
        drawn = rng.permutation(members)[: n // 2]
        chosen += [int(owner) for owner in drawn]
    return chosen


# --------------------------------------------------------------------------------- all of the work


def leave_one_out(
    experiment: Experiment,
    data_root: Path,
    out: Path,
    *,
    n_seeds: int,
    on_run: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Score what is missing, and write the summary.

    Parameters
    ----------
    experiment
        Of at least three sites.
    data_root
        Folder with one store a site.
    out
        Gets ``leave_one_out.json``, ``runs/`` and ``unseen.json``. A folder of the same settings
        and data is continued, also with more seeds.
    n_seeds
        Seeds 0 to ``n_seeds - 1``.
    on_run
        Called with the number of units that are there and that of all: once before the first one
        starts, and then after each.

    Returns
    -------
    dict
        The content of ``unseen.json``, the evidence for ``fedbn adapt``.

    Raises
    ------
    UnseenError
        If there are too few sites, or `out` holds something else.
    fedbn.tasks.data.DataError
        If a store is missing, damaged, or made in another way than the others.
    """
    if len(experiment.sites) < 3:
        raise UnseenError(
            f"the experiment has {len(experiment.sites)} sites; leaving one out needs at least 3, "
            "so that two are left to train"
        )
    if n_seeds < 1:
        raise UnseenError(f"seeds is {n_seeds}; it must be at least 1")
    stores = read_sites(data_root, experiment, verify=True)
    identity = _identity(experiment, stores)
    cache.claim(out / IDENTITY_FILE, identity, "evaluation", UnseenError)
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    units = [(seed, site) for seed in range(n_seeds) for site in sorted(experiment.sites)]
    paths = {unit: out / cache.RUNS_FOLDER / f"{unit[1]}_seed{unit[0]}.json" for unit in units}
    records = {}
    for unit, path in paths.items():
        record = cache.read_unit(path, key, "scores")
        if record is not None:
            records[unit] = record
    if on_run is not None:
        on_run(len(records), len(units))
    for seed, site in [unit for unit in units if unit not in records]:
        record = {"format": FORMAT, "key": key, "hospital": site, "seed": seed}
        record |= score_hospital(experiment, stores, site, seed)
        with atomic_write(paths[seed, site]) as file:
            file.write(json.dumps(record, allow_nan=False).encode())
        records[seed, site] = record
        if on_run is not None:
            on_run(len(records), len(units))
    synthetic = any(store.synthetic for store in stores.values())
    summary = summarise([records[unit] for unit in units], identity, synthetic=synthetic)
    write_json(out / SUMMARY_FILE, summary)
    return summary


def _identity(experiment: Experiment, stores: Mapping[str, SiteData]) -> dict[str, Any]:
    """Return what all units of one folder have in common."""
    experiment = method("fedavg").experiment(experiment.changed(fold=0, seed=0))
    common = cache.in_common(
        experiment, stores, packages=_DECIDE_NUMBERS, without=("training_share",)
    )
    few_labels = {"epochs": FINETUNE_EPOCHS, "batch_size": FINETUNE_BATCH}
    return {"format": FORMAT, "few labels": few_labels, **common}


# ---------------------------------------------------------------------------------------- numbers


@dataclass(frozen=True)
class _Scored:
    """One line of the table at one hospital and seed: metrics, and what each subject got."""

    metrics: dict[str, float]
    right: np.ndarray


def summarise(
    records: Sequence[Mapping[str, Any]], identity: Mapping[str, Any], *, synthetic: bool
) -> dict[str, Any]:
    """Condense all units: means and spread over seeds, and differences with two intervals.

    Returns
    -------
    dict
        JSON-able. ``"scores"``: row, then hospital or ``"macro"`` (every hospital counts the same),
        to mean and standard deviation over seeds of each metric by subject. ``"differences"``: for
        each pair of rows, first minus second, in the macro mean, with ``"hospitals"``, the interval
        for yet another hospital (:func:`fedbn.study.paired.compare` over the hospitals, whose
        training sets overlap), and for accuracy ``"subjects"``, that for further subjects of
        these ones.
    """
    hospitals = sorted({str(record["hospital"]) for record in records})
    seeds = sorted({int(record["seed"]) for record in records})
    table = {
        (str(record["hospital"]), int(record["seed"])): _score_record(record) for record in records
    }
    rows = [row for row in ROWS if all(row.name in scored for scored in table.values())]
    names = [row.name for row in rows]
    scores = {
        name: {
            **{site: _spread([[table[site, seed][name]] for seed in seeds]) for site in hospitals},
            MACRO: _spread([[table[site, seed][name] for site in hospitals] for seed in seeds]),
        }
        for name in names
    }
    differences = {
        name: {
            other: _difference(table, hospitals, seeds, name, other)
            for other in names
            if other != name
        }
        for name in names
    }
    return without_nan(
        {
            **identity,
            "synthetic": synthetic,
            "hospitals": hospitals,
            "n_subjects": {str(record["hospital"]): len(record["targets"]) for record in records},
            "n_seeds": len(seeds),
            "reference": REFERENCE,
            "confidence": paired.CONFIDENCE,
            "rows": [asdict(row) for row in rows],
            "scores": scores,
            "differences": differences,
        }
    )


def _score_record(record: Mapping[str, Any]) -> dict[str, _Scored]:
    targets = np.array(record["targets"])
    scored = {name: _scored(targets, np.array(values)) for name, values in record["scores"].items()}
    others = [found for name, found in scored.items() if name.startswith(OTHER_SITE)]
    scored[OTHER_MEAN] = _Scored(
        {metric: statistics.fmean(found.metrics[metric] for found in others) for metric in METRICS},
        np.mean([found.right for found in others], axis=0),
    )
    scored[OTHER_BEST] = max(others, key=lambda found: found.metrics["accuracy"])
    return scored


def _scored(targets: np.ndarray, scores: np.ndarray) -> _Scored:
    found = classification_metrics(two_class_scores(targets, scores))
    right = ((scores >= 0.5) == (targets == 1)).astype(np.float64)
    return _Scored({metric: found[metric] for metric in METRICS}, right)


def _spread(of_seeds: Sequence[Sequence[_Scored]]) -> dict[str, dict[str, float]]:
    """Mean over hospitals in each seed, then mean and standard deviation over seeds."""
    cells = {}
    for metric in METRICS:
        values = [statistics.fmean(one.metrics[metric] for one in of_seed) for of_seed in of_seeds]
        cells[metric] = {
            "mean": statistics.fmean(values),
            "sd": statistics.stdev(values) if len(values) > 1 else math.nan,
        }
    return cells


def _difference(
    table: Mapping[tuple[str, int], Mapping[str, _Scored]],
    hospitals: Sequence[str],
    seeds: Sequence[int],
    name: str,
    other: str,
) -> dict[str, Any]:
    """Subtract one row from another, in the macro mean, with intervals."""
    found: dict[str, Any] = {}
    for metric in METRICS:
        of_hospital = [
            statistics.fmean(
                table[site, seed][name].metrics[metric] - table[site, seed][other].metrics[metric]
                for seed in seeds
            )
            for site in hospitals
        ]
        over = paired.compare(of_hospital, 1 / (len(hospitals) - 1))
        found[metric] = {
            "mean": over.mean,
            "of_hospital": dict(zip(hospitals, of_hospital, strict=True)),
            "hospitals": {
                "low": over.low,
                "high": over.high,
                "p": over.p,
                "verdict": paired.verdict(over),
            },
        }
    by_subject = [
        np.mean(
            [table[site, seed][name].right - table[site, seed][other].right for seed in seeds], 0
        )
        for site in hospitals
    ]
    low, high = subject_interval(by_subject)
    found["accuracy"]["subjects"] = {"low": low, "high": high}
    return found


def subject_interval(by_subject: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the normal interval of a mean over hospitals of means over subjects.

    Parameters
    ----------
    by_subject
        For each hospital the subjects' differences, (n_subjects,), mean over seeds.
    """
    from scipy import stats

    mean = statistics.fmean(float(values.mean()) for values in by_subject)
    variance = sum(float(values.var(ddof=1)) / len(values) for values in by_subject)
    error = math.sqrt(variance) / len(by_subject)
    half = float(stats.norm.ppf((1 + paired.CONFIDENCE) / 2)) * error
    return mean - half, mean + half


# ------------------------------------------------------------------------------- what to start from


@dataclass(frozen=True)
class Recommendation:
    """Which start to build from a run, and why.

    Attributes
    ----------
    start
        Its name.
    sentences
        Why, for people.
    """

    start: str
    sentences: tuple[str, ...]


def read_evidence(path: Path) -> dict[str, Any]:
    """Read the summary of a leave-one-hospital-out.

    Raises
    ------
    UnseenError
        If there is none, or it is of something else.
    """
    path = path / SUMMARY_FILE if path.is_dir() else path
    content: Any = None
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_bytes())
    if not isinstance(content, dict) or content.get("format") != FORMAT or "scores" not in content:
        raise UnseenError(f"{path} is no summary of `fedbn unseen` ({FORMAT})")
    return content


def recommend(run: FinishedRun, evidence: Mapping[str, Any] | None) -> Recommendation:
    """Choose the start that did best on the federation's own hospitals, not the one by its name.

    Parameters
    ----------
    run
        The run that a new hospital starts from.
    evidence
        From :func:`read_evidence`, or ``None``.

    Raises
    ------
    UnseenError
        If the evidence is of another network or task, or of made-up subjects.
    """
    if evidence is None:
        name = default_start(run)
        said = [
            f"there is no evidence: {STARTS[name].title!r} is what the run's policy "
            f"{run.experiment.policy!r} suggests, not what was found best; `fedbn unseen` measures "
            "it on the federation's own hospitals, and --evidence takes its result"
        ]
        if run.experiment.policy == "fedbn" and run.affine is None:
            said.append(f"gamma is 1 and beta 0 at the start: {run.no_affine}")
        return Recommendation(name, tuple(said))
    reservations = _check_evidence(run, evidence)
    accuracy = {
        name: evidence["scores"][name][MACRO]["accuracy"]["mean"]
        for name, start in STARTS.items()
        if start.can_be_built and name in evidence["scores"]
    }
    best = max(accuracy, key=accuracy.__getitem__)
    judged = {name: SAME_AS.get(name, name) for name in buildable(run)}
    built = max(judged, key=lambda name: float(accuracy[judged[name]]))
    chosen = judged[built]
    said = [
        f"on {len(evidence['hospitals'])} hospitals left out one at a time, {evidence['n_seeds']} "
        f"seeds, {STARTS[best].title!r} has the highest subject accuracy without labels: "
        f"{100 * accuracy[best]:.1f} %"
    ]
    if chosen == best:
        second = max((name for name in accuracy if name != best), key=accuracy.__getitem__)
        said.append(_told(evidence, best, second))
    else:
        said.append(_told(evidence, best, chosen))
        start = STARTS[best]
        if start.policy != run.experiment.policy:
            said.append(
                f'it needs a run with "policy": "{start.policy}"; of what this run '
                f'("{run.experiment.policy}") allows, {STARTS[chosen].title!r} is the best and '
                "was built"
            )
        else:
            said.append(f"it cannot be built: {run.no_affine}; {STARTS[chosen].title!r} was built")
    return Recommendation(built, (*said, *reservations))


def _told(evidence: Mapping[str, Any], name: str, other: str) -> str:
    found = evidence["differences"][name][other]["accuracy"]
    over, of_subjects = found["hospitals"], found["subjects"]
    interval = "no interval"
    if over["low"] is not None:
        interval = f"95 % interval {100 * over['low']:+.1f} to {100 * over['high']:+.1f}"
    return (
        f"that is {100 * found['mean']:+.1f} points to {STARTS[other].title!r} ({interval} for yet "
        f"another hospital: {over['verdict']}; {100 * of_subjects['low']:+.1f} to "
        f"{100 * of_subjects['high']:+.1f} for further subjects of these)"
    )


def _check_evidence(run: FinishedRun, evidence: Mapping[str, Any]) -> list[str]:
    """Refuse evidence that says nothing of the run; say in what else it is another."""
    experiment = validated(evidence["experiment"], "the evidence")
    there, here = (one.model_dump(mode="json") for one in (experiment, run.experiment))
    for name in ("network", "task"):
        if there[name] != here[name]:
            raise UnseenError(
                f"the evidence is of another {name} ({there[name]}) than the run's "
                f"({here[name]}); run `fedbn unseen` with the run's own experiment"
            )
    if evidence.get("synthetic") and run.signature and not run.signature.get("synthetic"):
        raise UnseenError(
            "the evidence is of a synthetic cohort and the run's sites are real; run "
            "`fedbn unseen` on scans of patients"
        )
    here["sites"] = sorted(here["sites"])
    here["training"] = {**here["training"], "proximal_mu": 0.0}  # as the evidence has it
    names = ("sites", "rounds", "training", "aggregation_weights")
    other = [name for name in names if there[name] != here[name]]
    return [f"mind that the evidence was made with other {' and '.join(other)}"] if other else []
