"""The complete model that one site has kept after a run, and what is known about it.

The learner leaves it on the site's disk. Where that file is missing, the shared weights, the site's
local entries and its standardisation are joined once more. The shared weights alone are refused:
without a site's batch norm they cannot predict.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_prep.site_store import SiteStore, StoreError, read_site_store, signature_differences
from fedbn.core import control_variates
from fedbn.core.networks import build_network
from fedbn.core.normalization import load_entries
from fedbn.federation.experiment import EXPERIMENT_FILE, Experiment, read_experiment
from fedbn.federation.results import FINETUNED, FORMAT, without_nan
from fedbn.federation.site import Preparation, prepare, split_fitted
from fedbn.federation.site_state import (
    COMPLETE_MODEL,
    LOCAL_ENTRIES,
    PREPARATION,
    SHARED_WEIGHTS,
    SiteState,
    load_checkpoint,
    network_fingerprint,
)
from fedbn.models.site_network import SiteNetwork, probabilities_and_distances, quartiles
from fedbn.tasks.classification import make_scores, unit_means
from fedbn.tasks.connectome.task import ConnectomeTask, mean_and_std, rows_of
from fedbn.tasks.operating_point import choose_threshold

SHARED_FILE = "FL_global_model.pt"
"""Name of the server's file with the shared weights."""


class BundleError(ValueError):
    """A bundle that cannot be made or used; the message says why and what to do."""


@dataclass(frozen=True)
class KeptModel:
    """The complete model of one site, as the run left it on the site's disk.

    Attributes
    ----------
    site, job
        Whose it is.
    network
        ``{"name": …, "args": …}``, as :func:`fedbn.core.networks.build_network` takes them.
    model
        The network with its weights behind the site's standardisation, in eval mode.
    policy, local_entries
        Which entries are the site's own.
    classes
        Names of the two classes.
    signature
        Of the store: atlas, ROIs and how connectomes are made.
    finetuned
        Whether it was trained further at the site after the last round.
    origin
        What it was put together from, in words.
    folder
        Where the site keeps its state.
    """

    site: str
    job: str
    network: dict[str, Any]
    model: SiteNetwork
    policy: str
    local_entries: tuple[str, ...]
    classes: tuple[str, ...]
    signature: dict[str, Any]
    finetuned: bool
    origin: str
    folder: Path


def find_kept_model(
    run: Path, site: str, *, finetuned: bool = False, store: SiteStore | None = None
) -> KeptModel:
    """Find and read the complete model of one site below a run's folder.

    Parameters
    ----------
    run
        A FLARE workspace, a client's workspace, the folder that a site keeps for a job, or a
        ``model.pt``.
    site
        The site's name in the experiment.
    finetuned
        Take the model after fine-tuning at the site.
    store
        Needed only where ``model.pt`` is missing and the model is joined from the shared weights
        and the site's local entries: it knows what a connectome is.

    Raises
    ------
    fedbn.federation.site_state.SiteStateError
        If a file is damaged, or holds the shared weights alone, which cannot predict.
    BundleError
        If there is no such model, or more than one.
    """
    if not run.exists():
        raise BundleError(f"--run {run} does not exist; name the workspace of a finished run")
    name = "model_finetuned.pt" if finetuned else "model.pt"
    if run.is_file():
        return _complete(run, site, finetuned)
    folder = _state_folder(run, site)
    path = folder / name
    if path.is_file():
        return _complete(path, site, finetuned)
    if finetuned:
        raise BundleError(
            f"site {site!r} has no fine-tuned model in {folder}; export without --finetuned, or "
            "run a job with a finetune setting"
        )
    return _joined(run, folder, site, store)


def _state_folder(run: Path, site: str) -> Path:
    """Return the one folder below a run in which a site has kept its state."""
    files = [path for name in ("model.pt", "local_entries.pt") for path in run.rglob(name)]
    folders = {path.parent for path in files}
    if run in folders:
        return run
    found = sorted(folder for folder in folders if folder.name == site)
    if len(found) == 1:
        return found[0]
    if found:
        jobs = ", ".join(folder.parent.name for folder in found)
        raise BundleError(
            f"{run} holds models of site {site!r} from {len(found)} jobs ({jobs}); name the folder "
            "of one of them"
        )
    sentence = f"{run} holds no site's model"
    if folders:
        others = ", ".join(sorted({folder.name for folder in folders}))
        sentence = f"{run} holds no model of site {site!r}, only of {others}"
    elif any(run.rglob(SHARED_FILE)):
        sentence += (
            f"; its {SHARED_FILE} holds the shared weights without any site's batch norm and "
            "cannot predict: export at the site, from the site's own workspace"
        )
    else:
        sentence += (
            "; give the workspace of the site's FLARE client or of a simulator, a job's folder "
            "there, or a model.pt"
        )
    raise BundleError(sentence)


def _complete(path: Path, site: str, finetuned: bool) -> KeptModel:
    """Read a complete model, as the learner wrote it."""
    tensors, meta = load_checkpoint(path, COMPLETE_MODEL)
    if meta.get("site") != site:
        raise BundleError(
            f"{path} is the model of site {meta.get('site')!r}, not of {site!r}: every site "
            "exports its own"
        )
    facts = meta["facts"]
    own, fitted = split_fitted(tensors)
    return KeptModel(
        site=site,
        job=str(meta.get("job")),
        network=dict(facts["network"]),
        model=_site_network(facts["network"], own, fitted["mean"], fitted["std"]),
        policy=str(facts["policy"]),
        local_entries=tuple(facts["local entries"]),
        classes=tuple(facts.get("classes") or ConnectomeTask().class_names),
        signature=dict(facts["signature"]),
        finetuned=finetuned,
        origin=f"{path.name}, the complete model that the site kept",
        folder=path.parent,
    )


def _joined(run: Path, folder: Path, site: str, store: SiteStore | None) -> KeptModel:
    """Join the shared weights, the site's local entries and its preparation."""
    shared_files = sorted(run.rglob(SHARED_FILE))
    if len(shared_files) != 1:
        raise BundleError(
            f"site {site!r} has no model.pt in {folder}, and {run} holds {len(shared_files)} files "
            f"{SHARED_FILE} to join its local entries with; give a folder that holds one"
        )
    if store is None:
        raise BundleError(
            f"site {site!r} has no model.pt in {folder}: to join its local entries with "
            f"{SHARED_FILE}, its store is needed too; name its folder with --data"
        )
    shared, meta = load_checkpoint(shared_files[0], SHARED_WEIGHTS)
    network = dict(meta["network"])
    fresh = build_network(network["name"], network["args"], 0)
    fingerprint = network_fingerprint(network["name"], fresh.state_dict())
    _, local_meta = load_checkpoint(folder / "local_entries.pt", LOCAL_ENTRIES)
    state = SiteState(folder, job=str(local_meta["job"]), site=site, network=fingerprint)
    local, _ = state.load_local()
    preparation = Preparation.from_tensors(*state.load_preparation(), store)
    fitted = preparation.fitted
    if meta.get("job", state.job) != state.job:
        raise BundleError(
            f"{shared_files[0]} belongs to job {meta['job']!r} and {folder} to {state.job!r}; "
            "join what comes from one run"
        )
    _check_store(site, store, preparation.facts)
    local, shared = (control_variates.separate(tensors)[0] for tensors in (local, shared))
    return KeptModel(
        site=site,
        job=state.job,
        network=network,
        model=_site_network(network, {**shared, **local}, fitted["mean"], fitted["std"]),
        policy=str(meta["policy"]),
        local_entries=tuple(local),
        classes=("control", "autism"),
        signature=store.signature(),
        finetuned=False,
        origin="the shared weights, and the local entries and standardisation that the site kept",
        folder=folder,
    )


def _site_network(
    network: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    mean: torch.Tensor,
    std: torch.Tensor,
) -> SiteNetwork:
    inner = build_network(network["name"], network["args"], 0)
    load_entries(inner, tensors)
    model = SiteNetwork(inner, len(mean)).eval()
    with torch.no_grad():
        model.mean.copy_(mean)
        model.std.copy_(std)
    return model


def _check_store(site: str, store: SiteStore, facts: Mapping[str, Any]) -> None:
    if facts["store"] != store.fingerprint():
        raise StoreError(
            f"site {site!r}: the store at {store.path} has changed since the run; give the store "
            "that it was trained on"
        )


# ------------------------------------------------------------------------- what the store adds


@dataclass(frozen=True)
class SiteFacts:
    """What is known beside the model; every part may be ``None``, and nothing is of one subject.

    Attributes
    ----------
    experiment
        What was run.
    training
        Numbers of subjects and samples, and shares of autism.
    scores
        Subject and window metrics of the held-out subjects.
    site_threshold
        Of the best accuracy on the site's training subjects.
    distances
        Quartiles of the training subjects' distances, see :mod:`fedbn.models.site_network`.
    scan
        What the site's scans were: lengths, and how they were prepared.
    """

    experiment: Experiment | None = None
    training: dict[str, Any] | None = None
    scores: dict[str, Any] | None = None
    site_threshold: float | None = None
    distances: dict[str, list[float]] | None = None
    scan: dict[str, Any] | None = None


def site_facts(kept: KeptModel, run: Path, store: SiteStore | None) -> SiteFacts:
    """Collect the facts of a kept model from the run's folder and the site's store.

    With the store, the held-out subjects are scored once more with the model that is exported: a
    ``results.json`` in the run's folder must say the same.

    Raises
    ------
    data_prep.site_store.StoreError
        If the store is not the one that the model was trained on.
    BundleError
        If ``results.json`` has other scores.
    """
    experiment, reported = _from_run(kept, run)
    preparation = _preparation(kept, store, experiment)
    training = _kept_facts(kept) if preparation is None else preparation.facts
    if training is not None:
        training = {name: value for name, value in training.items() if name != "store"}
    elif reported is not None:
        training = {k: v for k, v in reported.items() if k.startswith(("n_t", "autism_share"))}
    scores = (
        None if reported is None else reported.get(FINETUNED if kept.finetuned else "federated")
    )
    if store is not None and preparation is None and experiment is None:
        return _adapted(kept, store)
    if store is None or preparation is None:
        return SiteFacts(experiment, training, scores)
    found = _scored(kept.model, store, preparation)
    if scores is not None:
        _check_scores(kept, scores, found["scores"])
    return SiteFacts(experiment=experiment, training=training, **found)


def _from_run(kept: KeptModel, run: Path) -> tuple[Experiment | None, dict[str, Any] | None]:
    """Return the experiment and the site's results, where the run's folder has them."""
    folder = run if run.is_dir() else run.parent
    for path in sorted(folder.rglob("results.json")):
        with contextlib.suppress(ValueError):
            results = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(results, dict):
                continue
            if results.get("format") == FORMAT and results.get("job") == kept.job:
                experiment = Experiment.model_validate(results["experiment"])
                return experiment, results["sites"].get(kept.site)
    for path in sorted(folder.rglob(EXPERIMENT_FILE)):
        with contextlib.suppress(ValueError):
            experiment = read_experiment(path)
            of_job = kept.job in path.parts
            if of_job and kept.site in experiment.sites:
                return experiment, None
    return None, None


def _kept_facts(kept: KeptModel) -> dict[str, Any] | None:
    """Return what the site has kept of the numbers of its subjects, if it has."""
    path = kept.folder / "preparation.pt"
    if not path.is_file():
        return None
    facts: dict[str, Any] = load_checkpoint(path, PREPARATION)[1]["facts"]
    return facts


def _preparation(
    kept: KeptModel, store: SiteStore | None, experiment: Experiment | None
) -> Preparation | None:
    """Return the site's split and standardisation, kept or made once more, if it can be had."""
    if store is None:
        return None
    differences = signature_differences(kept.signature, store.signature())
    if differences:
        raise StoreError(
            f"site {kept.site!r}: the store at {store.path} is not what its model was trained on: "
            + "; ".join(differences)
        )
    if store.site != kept.site:
        raise StoreError(f"site {kept.site!r}: {store.path} is the store of site {store.site!r}")
    path = kept.folder / "preparation.pt"
    if path.is_file():
        tensors, meta = load_checkpoint(path, PREPARATION)
        found = Preparation.from_tensors(tensors, meta["facts"], store)
        _check_store(kept.site, store, found.facts)
        return found
    if experiment is None or kept.site not in experiment.sites:
        return None
    made = prepare(kept.site, store, experiment)
    check_same_data(kept.site, store, made, kept.model)
    return made


def check_same_data(
    site: str, store: SiteStore, preparation: Preparation, model: SiteNetwork
) -> None:
    """Refuse a store whose training subjects have another mean or standard deviation.

    Raises
    ------
    data_prep.site_store.StoreError
        Naming the store.
    """
    if not _same_statistics(model, preparation.fitted["mean"], preparation.fitted["std"]):
        raise StoreError(
            f"site {site!r}: the store at {store.path} is not the one that its model was trained on"
        )


def _same_statistics(model: SiteNetwork, mean: torch.Tensor, std: torch.Tensor) -> bool:
    pairs = ((mean, model.mean), (std, model.std))
    return all(a.shape == b.shape and torch.allclose(a, b, 1e-4, 1e-5) for a, b in pairs)


def _scored(model: SiteNetwork, store: SiteStore, preparation: Preparation) -> dict[str, Any]:
    """Score the model on the site's held-out subjects, and on its training ones in aggregate."""
    split, task = preparation.split, ConnectomeTask()
    test_rows = rows_of(store, split.test)
    owners = store.sample_participant[test_rows]
    probability, _ = _of_rows(model, store, test_rows)
    train_scores, reference = _reference(model, store, rows_of(store, split.train))
    return {
        "scores": without_nan(
            task.measure(make_scores(probability, store.labels[owners], owners, parts=True))
        ),
        "site_threshold": choose_threshold(store.labels[split.train], train_scores),
        **reference,
    }


def _reference(
    model: SiteNetwork, store: SiteStore, rows: np.ndarray
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the scores of the subjects that a model was fitted on, and what is kept of them."""
    owners = store.sample_participant[rows]
    probability, distances = _of_rows(model, store, rows)
    scores, subjects = unit_means(probability[:, 1], owners)
    lengths = np.array([store.participants[k].n_timepoints for k in subjects.astype(int)])
    stated = ("extraction", "repetition_time_s", "atlas_files", "quality_rule")
    return scores, {
        "distances": {
            name: quartiles(unit_means(values, owners)[0]) for name, values in distances.items()
        },
        "scan": {
            "n_timepoints": [int(lengths.min()), int(np.median(lengths)), int(lengths.max())],
            **{key: store.description[key] for key in stated if key in store.description},
        },
    }


def _adapted(kept: KeptModel, store: SiteStore) -> SiteFacts:
    """Return the facts of a model that was fitted to all of a new site's scans, without a label."""
    rows = np.arange(len(store.connectomes))
    fitted = mean_and_std(store, rows)
    if not _same_statistics(kept.model, *(torch.from_numpy(v.astype(np.float32)) for v in fitted)):
        return SiteFacts()
    _, reference = _reference(kept.model, store, rows)
    return SiteFacts(training={"n_adaptation_subjects": len(store.participants)}, **reference)


def _of_rows(
    model: SiteNetwork, store: SiteStore, rows: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Score rows of a store, some hundreds at a time."""
    probability, distances = [], []
    for start in range(0, len(rows), 512):
        one, other = probabilities_and_distances(
            model, store.connectomes[rows[start : start + 512]]
        )
        probability.append(one)
        distances.append(other)
    return np.concatenate(probability), {
        name: np.concatenate([part[name] for part in distances]) for name in distances[0]
    }


def _check_scores(kept: KeptModel, reported: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for level in ("subject", "window"):
        said, here = reported[level]["accuracy"], found[level]["accuracy"]
        if said is not None and here is not None and abs(said - here) > 1e-9:
            raise BundleError(
                f"site {kept.site!r}: results.json says a {level} accuracy of {100 * said:.2f} %, "
                f"but its model reaches {100 * here:.2f} % on the same held-out subjects: they are "
                "not of one run; nothing was exported"
            )


def read_own_store(root: Path, site: str, *, required: bool) -> SiteStore | None:
    """Read the store of a site below a data root; ``None`` if it is not there nor asked for."""
    folder = root / site
    if not required and not folder.is_dir():
        return None
    return read_site_store(folder, verify=True)
