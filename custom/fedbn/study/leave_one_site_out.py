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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from data_prep.files import write_json, write_text
from fedbn.core.batches import TensorSamples
from fedbn.core.networks import NoHeadError, head_entries
from fedbn.core.normalization import affine_names, entries, load_entries, statistics_names
from fedbn.core.training import derive_seed, train_epochs
from fedbn.federation.experiment import Experiment
from fedbn.federation.simulation import Federation, federate, read_sites
from fedbn.federation.site import Site, make_network
from fedbn.models.new_site import STARTS, load_start, mean_over_sites
from fedbn.study import cache
from fedbn.study.evidence import (
    FINETUNE_BATCH,
    FINETUNE_EPOCHS,
    FINETUNED_ENTRIES,
    FINETUNED_STARTS,
    FORMAT,
    LABELLED_SUBJECTS,
    OTHER_SITE,
    SAME_AS,
    SUMMARY_FILE,
    UnseenError,
    summarise,
)
from fedbn.study.methods import method
from fedbn.study.records import scores_record
from fedbn.study.runners import table
from fedbn.tasks.base import Scores
from fedbn.tasks.data import SiteData

IDENTITY_FILE = "leave_one_out.json"

_METHODS = {"none": "fedavg", "fedbn": "fedbn"}
_DECIDE_NUMBERS = ("fedbn", "python", "torch", "numpy")


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
        JSON-able: ``"scores"``, for each start and each other site's model those of all units of
        the hospital, in the data's order.
    """
    others = tuple(sorted(site for site in experiment.sites if site != hospital))
    common = experiment.changed(
        sites=others, seed=seed, fold=seed % experiment.n_folds, training_share=1.0
    )
    federations = {
        policy: federate(method(name).experiment(common), stores, score_rounds=False)
        for policy, name in _METHODS.items()
    }
    folds: dict[str, list[Scores]] = {}
    for fold in range(experiment.n_folds):
        settings = method("fedavg").experiment(common.changed(fold=fold))
        site = Site(hospital, stores[hospital], settings)
        for name, network in _networks(site, federations, fold):
            folds.setdefault(name, []).append(site.task.score(network, site.test))
    return {"scores": {name: scores_record(_whole(found)) for name, found in folds.items()}}


def _whole(folds: Sequence[Scores]) -> Scores:
    """Join the units of all folds in the order of the data; their parts are left out."""
    order = np.argsort(np.concatenate([one.units for one in folds]))
    columns = {
        name: np.concatenate([one.columns[name] for one in folds])[order]
        for name in folds[0].columns
    }
    return Scores(np.arange(len(order)), columns)


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
    """Return what is trained on with labels: all weights, and the head where there is one."""
    tuned = [(FINETUNED_ENTRIES[0], tuple(name for name, _ in network.named_parameters()))]
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
    """Train on from a start with the labels of a few subjects, as many of each class.

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
    """Draw `n` subjects to label, as many of each class; fewer are a part of more."""
    of_subject = dict(zip(owners.tolist(), targets.tolist(), strict=True))
    rng = np.random.default_rng(derive_seed(seed, hospital, fold, "labelled"))
    classes = sorted(set(of_subject.values()))
    chosen: list[int] = []
    for k, of_class in enumerate(classes):
        members = sorted(owner for owner, target in of_subject.items() if target == of_class)
        n_drawn = n // len(classes) + (k < n % len(classes))
        chosen += [int(owner) for owner in rng.permutation(members)[:n_drawn]]
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
        write_text(paths[seed, site], json.dumps(record, allow_nan=False), private=True)
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
