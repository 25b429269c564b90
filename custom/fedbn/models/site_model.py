"""The complete model that one site has kept after a run, and what is known about it.

The learner leaves it on the site's disk, and ``fedbn adapt`` makes one for a site that took no
part. Where that file is missing, the shared weights, the site's local entries and what was fitted
there are joined once more. The shared weights alone are refused: without a site's batch norm they
cannot predict.
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
from torch import nn

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
from fedbn.models.distances import distances, quartiles
from fedbn.models.new_site import REPORT_FILE
from fedbn.tasks.base import Task
from fedbn.tasks.bundling import bundling_of
from fedbn.tasks.classification import OWN_THRESHOLD, unit_means
from fedbn.tasks.data import DataError, Index, SiteData
from fedbn.tasks.registry import TASK_0_1, make_task

SHARED_FILE = "FL_global_model.pt"
"""Name of the server's file with the shared weights."""

NOTICE = "Research software, not a medical device: no diagnosis or treatment may rest on it."


class BundleError(ValueError):
    """A bundle that cannot be made or used; the message says why and what to do."""


@dataclass(frozen=True)
class KeptModel:
    """The complete model of one site, as the run left it on the site's disk.

    Attributes
    ----------
    site, job
        Whose it is.
    task
        What it has learned.
    network
        ``{"name": …, "args": …}``, as :func:`fedbn.core.networks.build_network` takes them.
    model
        The network with its weights behind what was fitted at the site, in eval mode.
    fitted
        What was fitted.
    policy, local_entries
        Which entries are the site's own.
    signature
        Of the data.
    shape
        Of one sample.
    finetuned
        Whether it was trained further at the site after the last round.
    adaptation
        How it was made for a site that took no part (:func:`fedbn.models.new_site.adapt`); nobody
        there was trained on. ``None`` for the model of a site that did.
    origin
        What it was put together from, in words.
    folder
        Where the site keeps its state.
    """

    site: str
    job: str
    task: Task
    network: dict[str, Any]
    model: nn.Module
    fitted: dict[str, torch.Tensor]
    policy: str
    local_entries: tuple[str, ...]
    signature: dict[str, Any]
    shape: tuple[int, ...]
    finetuned: bool
    adaptation: dict[str, Any] | None
    origin: str
    folder: Path


def find_kept_model(
    run: Path, site: str, *, finetuned: bool = False, data: Path | None = None
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
    data
        The site's data, or the folder above. Needed only where ``model.pt`` is missing and the
        model is joined from the shared weights and the site's local entries.

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
    return _joined(run, folder, site, data)


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
    """Read a complete model, as the learner or ``fedbn adapt`` wrote it."""
    tensors, meta = load_checkpoint(path, COMPLETE_MODEL)
    if meta.get("site") != site:
        raise BundleError(
            f"{path} is the model of site {meta.get('site')!r}, not of {site!r}: every site "
            "exports its own"
        )
    facts = meta["facts"]
    origin = f"{path.name}, the complete model that the site kept"
    adaptation = _adaptation(path, meta)
    if adaptation is not None:
        origin = (
            f"{path.name}, initialised as {adaptation['start']!r} ({adaptation['title']}) for a "
            f"site that took no part: nobody at {site} was trained on"
        )
    own, fitted = split_fitted(tensors)
    return _kept(
        site=site,
        job=str(meta.get("job")),
        task=make_task(facts.get("task") or TASK_0_1),
        network=dict(facts["network"]),
        tensors=own,
        fitted=fitted,
        policy=str(facts["policy"]),
        local_entries=tuple(facts["local entries"]),
        signature=dict(facts["signature"]),
        recorded=facts.get("sample shape"),
        finetuned=finetuned,
        adaptation=adaptation,
        origin=origin,
        folder=path.parent,
    )


def _adaptation(path: Path, meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how a model was adapted; version 0.1 kept that beside the model alone."""
    found = meta["facts"].get("adaptation")
    with contextlib.suppress(OSError, ValueError):
        found = found or json.loads((path.parent / REPORT_FILE).read_text(encoding="utf-8"))
    if isinstance(found, dict) and (found.get("site"), found.get("job")) == (
        meta["site"],
        meta["job"],
    ):
        return found
    return None


def _joined(run: Path, folder: Path, site: str, place: Path | None) -> KeptModel:
    """Join the shared weights, the site's local entries and its preparation."""
    shared_files = sorted(run.rglob(SHARED_FILE))
    if len(shared_files) != 1:
        raise BundleError(
            f"site {site!r} has no model.pt in {folder}, and {run} holds {len(shared_files)} files "
            f"{SHARED_FILE} to join its local entries with; give a folder that holds one"
        )
    if place is None:
        raise BundleError(
            f"site {site!r} has no model.pt in {folder}: to join its local entries with "
            f"{SHARED_FILE}, its store is needed too; name its folder with --data"
        )
    shared, meta = load_checkpoint(shared_files[0], SHARED_WEIGHTS)
    network = dict(meta["network"])
    task = make_task((meta.get("experiment") or {}).get("task") or TASK_0_1)
    data = task.read(task.find(place, site), site, verify=True)
    fresh = build_network(network["name"], network["args"], 0)
    fingerprint = network_fingerprint(network["name"], fresh.state_dict())
    _, local_meta = load_checkpoint(folder / "local_entries.pt", LOCAL_ENTRIES)
    state = SiteState(folder, job=str(local_meta["job"]), site=site, network=fingerprint)
    local, _ = state.load_local()
    preparation = Preparation.from_tensors(*state.load_preparation(), data)
    if meta.get("job", state.job) != state.job:
        raise BundleError(
            f"{shared_files[0]} belongs to job {meta['job']!r} and {folder} to {state.job!r}; "
            "join what comes from one run"
        )
    _check_unchanged(site, data, preparation.facts)
    local, shared = (control_variates.separate(tensors)[0] for tensors in (local, shared))
    return _kept(
        site=site,
        job=state.job,
        task=task,
        network=network,
        tensors={**shared, **local},
        fitted=preparation.fitted,
        policy=str(meta["policy"]),
        local_entries=tuple(local),
        signature=data.signature(),
        recorded=None,
        finetuned=False,
        adaptation=None,
        origin="the shared weights, and the local entries and what was fitted that the site kept",
        folder=folder,
    )


def _kept(
    *,
    tensors: Mapping[str, torch.Tensor],
    recorded: list[int] | None,
    **parts: Any,
) -> KeptModel:
    """Build the network behind what was fitted."""
    side, network = bundling_of(parts["task"]), parts["network"]
    inner = build_network(network["name"], network["args"], 0)
    load_entries(inner, tensors)
    model = side.wrap(inner, parts["fitted"]).eval()
    return KeptModel(model=model, shape=side.shape(model, recorded), **parts)


def _check_unchanged(site: str, data: SiteData, facts: Mapping[str, Any]) -> None:
    if facts["store"] != data.fingerprint():
        raise DataError(
            f"site {site!r}: the store at {data.place} has changed since the run; give the store "
            "that it was trained on"
        )


# -------------------------------------------------------------------------- what the data add


@dataclass(frozen=True)
class SiteFacts:
    """What is known beside the model; every part may be ``None``, and nothing is of one unit.

    Attributes
    ----------
    experiment
        What was run.
    training
        Numbers of units and samples, and shares of the classes.
    scores
        Metrics of each level of the held-out units.
    site_threshold
        Of the best accuracy on the site's training units.
    distances
        Quartiles of the training units' distances, see :mod:`fedbn.models.distances`.
    reference
        What the site's data were (:meth:`fedbn.tasks.bundling.Bundling.reference`).
    fingerprint
        Of the data.
    """

    experiment: Experiment | None = None
    training: dict[str, Any] | None = None
    scores: dict[str, Any] | None = None
    site_threshold: float | None = None
    distances: dict[str, list[float]] | None = None
    reference: dict[str, Any] | None = None
    fingerprint: str | None = None


def read_own_data(kept: KeptModel, given: Path, *, required: bool) -> SiteData | None:
    """Read a site's own data, named themselves or by the folder above.

    ``None`` if they are not there nor required.
    """
    place = kept.task.find(given, kept.site)
    if not required and not kept.task.has_data(place):
        return None
    return kept.task.read(place, kept.site, verify=True)


def site_facts(kept: KeptModel, run: Path, data: SiteData | None) -> SiteFacts:
    """Collect the facts of a kept model from the run's folder and the site's data.

    With the data, the held-out units are scored once more with the model that is exported: a
    ``results.json`` in the run's folder must say the same.

    Raises
    ------
    fedbn.tasks.data.DataError
        If the data are not those that the model was trained on.
    BundleError
        If ``results.json`` has other scores.
    """
    if data is not None:
        _check_data(kept, data)
    if kept.adaptation is not None:
        return _of_adapted(kept, data)
    experiment, reported = _from_run(kept, run)
    preparation = None if data is None else _preparation(kept, data, experiment)
    training = _kept_facts(kept) if preparation is None else preparation.facts
    if training is not None:
        training = {name: value for name, value in training.items() if name != "store"}
    elif reported is not None:
        training = {k: v for k, v in reported.items() if k.startswith("n_t") or "_share_" in k}
    scores = (
        None if reported is None else reported.get(FINETUNED if kept.finetuned else "federated")
    )
    if data is None or preparation is None:
        return SiteFacts(experiment, training, scores)
    found = _scored(kept, data, preparation)
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
    """Return what the site has kept of the numbers of its units, if it has."""
    path = kept.folder / "preparation.pt"
    if not path.is_file():
        return None
    facts: dict[str, Any] = load_checkpoint(path, PREPARATION)[1]["facts"]
    return facts


def _check_data(kept: KeptModel, data: SiteData) -> None:
    signature = json.loads(json.dumps(data.signature()))
    if differences := kept.task.differences(kept.signature, signature):
        raise DataError(
            f"site {kept.site!r}: the store at {data.place} is not what its model was trained on: "
            + "; ".join(differences)
        )
    if data.site != kept.site:
        raise DataError(f"site {kept.site!r}: {data.place} is the store of site {data.site!r}")


def _preparation(
    kept: KeptModel, data: SiteData, experiment: Experiment | None
) -> Preparation | None:
    """Return the site's split and what was fitted, kept or made once more, if it can be had."""
    path = kept.folder / "preparation.pt"
    if path.is_file():
        tensors, meta = load_checkpoint(path, PREPARATION)
        found = Preparation.from_tensors(tensors, meta["facts"], data)
        _check_unchanged(kept.site, data, found.facts)
        return found
    if experiment is None or kept.site not in experiment.sites:
        return None
    made = prepare(kept.site, data, experiment)
    if not same_data(kept.task, data, made.split.train, kept.fitted):
        raise DataError(
            f"site {kept.site!r}: the store at {data.place} is not the one that its model was "
            "trained on"
        )
    return made


def same_data(
    task: Task,
    data: SiteData,
    units: Index,
    fitted: Mapping[str, torch.Tensor],
    fingerprint: str | None = None,
) -> bool:
    """Whether a model was trained on these data: by their fingerprint, else by what was fitted."""
    if fingerprint is not None:
        return fingerprint == data.fingerprint()
    again = task.fit(data, units)
    return bool(fitted) and all(
        name in again
        and again[name].shape == value.shape
        and torch.allclose(again[name], value, 1e-4, 1e-5)
        for name, value in fitted.items()
    )


def _scored(kept: KeptModel, data: SiteData, preparation: Preparation) -> dict[str, Any]:
    """Score the model on the site's held-out units, and on its training ones in aggregate."""
    task, split, cpu = kept.task, preparation.split, torch.device("cpu")
    scores = task.score(kept.model, task.samples(data, split.test, {}, cpu))
    of_training = task.score(kept.model, task.samples(data, split.train, {}, cpu))
    return {
        "scores": without_nan(task.measure(scores)),
        "site_threshold": task.decisions(of_training).get(OWN_THRESHOLD),
        **_reference(kept, data, split.train),
    }


def _reference(kept: KeptModel, data: SiteData, units: Index) -> dict[str, Any]:
    """Return what is kept of the units that a model was fitted on."""
    samples = kept.task.samples(data, units, {}, torch.device("cpu"))
    found = distances(kept.task, kept.model, samples)
    return {
        "distances": {n: quartiles(unit_means(v, samples.owners)[0]) for n, v in found.items()},
        "reference": bundling_of(kept.task).reference(data, units),
        "fingerprint": data.fingerprint(),
    }


def _of_adapted(kept: KeptModel, data: SiteData | None) -> SiteFacts:
    """Return the facts of a model that was fitted to all of a new site's units, without a label."""
    assert kept.adaptation is not None
    experiment = None
    with contextlib.suppress(ValueError, KeyError):  # of another version of fedbn
        experiment = Experiment.model_validate(kept.adaptation["experiment"])
    training = {"n_adaptation_subjects": kept.adaptation.get("n_subjects")}
    if data is None:
        return SiteFacts(experiment, training)
    everyone = np.arange(len(data.units))
    known = kept.adaptation.get("fingerprint")
    if not same_data(kept.task, data, everyone, kept.fitted, known):
        raise DataError(
            f"site {kept.site!r}: the store at {data.place} is not the one that its model was "
            "adapted to"
        )
    return SiteFacts(experiment, training, **_reference(kept, data, everyone))


def _check_scores(kept: KeptModel, reported: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    headline = kept.task.metrics[0]
    for level in kept.task.levels:
        said, here = reported[level][headline.name], found[level][headline.name]
        if said is not None and here is not None and abs(said - here) > 1e-9:
            raise BundleError(
                f"site {kept.site!r}: results.json says a {level} {headline.title} of "
                f"{100 * said:.2f} %, but its model reaches {100 * here:.2f} % on the same "
                "held-out subjects: they are not of one run; nothing was exported"
            )
