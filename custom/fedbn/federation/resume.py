"""Going on with a run that has ended early: a new job, from what the server and the sites kept.

The server saves what it holds after every round, with the job and the round in it. Each site keeps
its own entries of its last two rounds. A new job that starts from the first, with every site going
on from its own entries after exactly that round, has the bits of a run that was never interrupted.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.files import write_json
from fedbn.federation.experiment import (
    ContinuesSettings,
    Experiment,
    read_experiment,
    validated,
)
from fedbn.federation.job_folder import new_job_folder, write_experiment
from fedbn.federation.run_folder import SAVED_FILE, only_file
from fedbn.federation.site import Preparation
from fedbn.federation.site_state import SHARED_WEIGHTS, SiteState, SiteStateError, load_checkpoint
from fedbn.tasks.data import SiteData

INITIAL_WEIGHTS = "initial_weights.pt"
"""The same in the app folder of the job that goes on from it."""

CONTINUED_FROM = "continued_from"
"""Key of a site's facts: the job and round that its batch norm is from, or ``None`` (anew)."""

_MAY_CHANGE = (
    "name",
    "rounds",
    "continues",
    "compare_with_alone",
    "finetune",
    "fedbn_version",
)
SIMULATOR_JOB = "simulate_job"
"""Id of every job of FLARE's simulator."""

_PERSISTOR = "SharedModelPersistor"
_SERVER_APP, _APP = "app_server", "app"


class ResumeError(ValueError):
    """A run that cannot be continued; the message says why, and what to do."""


def find_saved_file(folder: Path) -> Path:
    """Find what the server of a run has saved.

    Parameters
    ----------
    folder
        The server's folder of the job, a downloaded result, a simulator workspace, or the file.

    Raises
    ------
    ResumeError
        If there is none, or more than one.
    """
    return only_file(
        folder,
        SAVED_FILE,
        "give the server's folder of one job, its downloaded result, or a simulator workspace (a "
        "run that ended before its first round has nothing to go on from: submit it anew)",
        ResumeError,
    )


def check_continues(facts: Mapping[str, Any], experiment: Experiment, name: str) -> None:
    """See that saved weights are those that an experiment says it goes on from.

    Parameters
    ----------
    facts
        Of the saved file.
    experiment
        With its `continues`.
    name
        Of the file, for the message.

    Raises
    ------
    ResumeError
        If they are of another job, round or experiment, with the first difference.
    """
    continues = experiment.continues
    if continues is None:
        raise ResumeError(f"the experiment does not say which run {name} continues")
    for key, expected in (("job", continues.job), ("round", continues.after_round)):
        if facts.get(key) != expected:
            raise ResumeError(
                f"{name} is of {key} {facts.get(key)!r}, but the experiment continues {key} "
                f"{expected!r}; make the job anew with `fedbn resume`"
            )
    check_same(facts, experiment, name)


def check_same(facts: Mapping[str, Any], experiment: Experiment, name: str) -> None:
    """See that what is to be continued is the same experiment.

    Raises
    ------
    ResumeError
        Naming the first field that differs and may not.
    """
    if not isinstance(facts.get("experiment"), dict):
        raise ResumeError(
            f"{name} does not say which experiment and round it is of: it can start a new run as "
            "initial_weights, but not continue one"
        )
    before = validated(facts["experiment"], name).model_dump(mode="json")
    for key, value in experiment.model_dump(mode="json").items():
        if key not in _MAY_CHANGE and before[key] != value:
            raise ResumeError(
                f"{key} is {json.dumps(value)}, but in the run to continue it was "
                f"{json.dumps(before[key])}: the rounds would not belong together; only "
                f"{', '.join(_MAY_CHANGE)} may change"
            )


def continue_job(
    run: Path,
    job: Path,
    out: Path,
    *,
    rounds: int | None = None,
    min_sites: int | None = None,
) -> Experiment:
    """Make the job folder that goes on from the last round that a run's server has saved.

    Parameters
    ----------
    run
        See :func:`find_saved_file`.
    job
        The job folder that was submitted; it stays as it is.
    out
        The new job folder; it must not be there.
    rounds
        All rounds of the run, those before included, in place of the job's.
    min_sites
        Quorum of the new job, in place of the job's: also FLARE's ``min_clients``.

    Returns
    -------
    Experiment
        The new job's; its `continues` says what it goes on from.

    Raises
    ------
    ResumeError, ExperimentError, SiteStateError
        In one sentence; then nothing has been written.
    """
    saved = find_saved_file(run)
    _, facts = load_checkpoint(saved, SHARED_WEIGHTS)
    before = read_experiment(job)
    check_same(facts, before, saved.name)
    if facts.get("round") is None:
        raise ResumeError(f"{saved} was saved before the first round; submit the job anew")
    experiment = before.changed(
        rounds=before.rounds if rounds is None else rounds,
        continues=_continues(saved, facts).model_dump(),
    )
    with new_job_folder(job, out) as folder:
        server_app = _server_app(folder, experiment)
        shutil.copy(saved, folder / server_app / INITIAL_WEIGHTS)
        write_experiment(folder, experiment)
        _set_server(folder / server_app / "config" / "config_fed_server.json", min_sites)
        if min_sites is not None:
            meta = json.loads((folder / "meta.json").read_bytes())
            write_json(folder / "meta.json", {**meta, "min_clients": min_sites})
    return experiment


def seed_state(
    state: SiteState,
    root: Path,
    continues: ContinuesSettings,
    data: SiteData,
    prepared: Preparation,
    accepted: int | None,
) -> Preparation | None:
    """Let a site's new state begin with what the site kept of the run that is continued.

    Copies the preparation, the local entries after exactly the saved round (or, of a site that was
    absent then, the latest before it), and the scores of the rounds up to it.

    Parameters
    ----------
    state
        Of the new job, empty.
    root
        Folder with the site's states of all jobs.
    continues
        What is continued.
    data
        The site's.
    prepared
        What a new preparation of the site's data gives today.
    accepted
        The last round in which the server accepted this site's contribution; ``None``: in none.

    Returns
    -------
    Preparation or None
        What the site goes on with; ``None`` for a site that was never part of the run.

    Raises
    ------
    SiteStateError
        If the site was part of it and its state is missing, damaged or older than what the server
        accepted: a fresh or stale batch norm is never used silently.
    """
    if continues.workspace is not None:  # <workspace>/<client>/<folder of states>
        root = Path(continues.workspace) / root.parent.name / root.name
    jobs = (continues.job, *continues.earlier_jobs)
    kept = (
        SiteState.under(root, job=job, site=state.site, network=state.network)
        for job in jobs
        if continues.workspace is not None or job != state.job
    )
    old = next((old for old in kept if old.exists), None)
    if old is None:
        if accepted is None:
            return None
        raise SiteStateError(
            f"site {state.site!r}: its batch norm of job {continues.job!r} is missing in {root}, "
            f"but the server accepted its contribution of round {accepted}; restore the folder, or "
            "start a new run from the saved weights (a new batch norm is not used silently)"
        )
    local, number = old.load_local(at_most=continues.after_round)
    check_not_stale(state.site, number, accepted)
    found = Preparation.from_tensors(*old.load_preparation(), data)
    _check_same_data(state.site, found, prepared)
    found.facts[CONTINUED_FROM] = {"job": old.job, "round": number}
    state.save_preparation(found.tensors(), found.facts)
    for name, scores in old.load_scores().items():
        if name.startswith("round_") and int(name.removeprefix("round_")) <= continues.after_round:
            state.save_scores(name, scores)
    state.save_local(local, number)  # last: it is what tells that there is a state
    return found


def check_not_stale(site: str, kept: int, accepted: int | None) -> None:
    """Refuse a site's state that is older than what the server has accepted from the site.

    Raises
    ------
    SiteStateError
        A backup that was put back would otherwise go on from an old batch norm, silently.
    """
    if accepted is not None and kept < accepted:
        raise SiteStateError(
            f"site {site!r}: its batch norm is that after round {kept}, but the server accepted "
            f"its contribution of round {accepted}: the state is an older one, as from a backup; "
            "put the latest one back, or start a new run from the saved weights"
        )


def _check_same_data(site: str, kept: Preparation, prepared: Preparation) -> None:
    """See that the site trains on the same subjects as before: else a test subject might be seen.

    Raises
    ------
    SiteStateError
        If the store has changed, or is split in another way.
    """
    if kept.facts["store"] != prepared.facts["store"]:
        raise SiteStateError(
            f"site {site!r}: the store has changed since the run that is continued; restore it, or "
            "start a new run from the saved weights"
        )
    for there, here in zip(kept.split, prepared.split, strict=True):
        if not np.array_equal(there, here):
            raise SiteStateError(
                f"site {site!r}: its subjects are split in another way than in the run that is "
                "continued (fold, seed or training_share differ); start a new run"
            )


def _continues(saved: Path, facts: Mapping[str, Any]) -> ContinuesSettings:
    earlier = (facts["experiment"] or {}).get("continues") or {}
    workspace = None
    if facts["job"] == SIMULATOR_JOB:  # <workspace>/server/simulate_job/app_server/<file>
        workspace = str(saved.resolve().parents[3])
        earlier = {}
    return ContinuesSettings(
        job=facts["job"],
        after_round=facts["round"],
        earlier_jobs=(earlier["job"], *earlier["earlier_jobs"]) if earlier else (),
        workspace=workspace,
    )


def _server_app(folder: Path, experiment: Experiment) -> str:
    """Return the app that the server gets, made of its own where its file is not for the sites.

    FLARE sends an app to all that run it. What a plain mean has saved goes to every site anyway;
    SCAFFOLD's file holds each site's own control variate, and a clustered one all groups' models.
    """
    if (folder / _SERVER_APP).is_dir():
        return _SERVER_APP
    if experiment.algorithm.name not in ("scaffold", "clustered"):
        return _APP
    shutil.copytree(folder / _APP, folder / _SERVER_APP)
    meta = json.loads((folder / "meta.json").read_bytes())
    meta["deploy_map"] = {_SERVER_APP: ["server"], _APP: list(experiment.sites)}
    write_json(folder / "meta.json", meta)
    return _SERVER_APP


def _set_server(path: Path, min_sites: int | None) -> None:
    """Have the persistor start from the saved weights, and the workflow take another quorum."""
    try:
        content = json.loads(path.read_bytes())
        components = [*content["components"], *content["workflows"]]
        (persistor,) = (c for c in components if c["path"].endswith(f".{_PERSISTOR}"))
        persistor.setdefault("args", {})["initial_weights"] = INITIAL_WEIGHTS
        if min_sites is not None:
            (workflow,) = content["workflows"]
            workflow.setdefault("args", {})["min_sites"] = min_sites
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResumeError(
            f"{path.name} of the job is not as fedbn's jobs have it, with one {_PERSISTOR} and one "
            f"workflow ({type(error).__name__})"
        ) from error
    write_json(path, content)
