"""A run that is interrupted and continued in a new job has the bits of one that never was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from data_prep.site_store import read_site_store
from fedbn.federation.results import weights_digest
from fedbn.federation.simulation import run_federation
from fedbn.federation.site_state import (
    LOCAL_ENTRIES,
    SHARED_WEIGHTS,
    load_checkpoint,
    save_checkpoint,
)
from fedbn.flare.job import ERROR, REPORT
from fedbn.flare.persistor import SharedModelPersistor

SITES = ("NYU", "UM", "USM")
ROUNDS = 4
COUNTER = "hidden.0.norm.num_batches_tracked"
ALGORITHMS = {
    "fedbn": {},
    "fedavg": {"policy": "none"},
    "alone": {"algorithm": {"name": "alone"}},
    "scaffold": {
        "policy": "none",
        "algorithm": {"name": "scaffold"},
        "training": {"optimizer": "sgd", "learning_rate": 0.05, "batch_size": 16},
    },
    "clustered": {
        "algorithm": {"name": "clustered", "split_mean_norm": 100.0, "split_site_norm": 0.001}
    },
}


class Killed(BaseException):
    """The server's process ends here."""


@pytest.fixture
def interrupted(make_workflow):
    """Run a job whose server is killed in a round that its first two sites have trained."""

    def run(in_round, *, absent=(), arguments=None, **changes):
        workflow = make_workflow(arguments, rounds=ROUNDS, **changes)

        def until(client, name):
            def answer(purpose, data):
                if (name, data.current_round) in absent or (name, purpose) in absent:
                    return None
                if purpose == "train" and data.current_round == in_round and name == "USM":
                    raise Killed
                return client(purpose, data)

            return answer

        workflow.clients = {name: until(c, name) for name, c in workflow.clients.items()}
        with pytest.raises(Killed):
            workflow.run()
        return workflow.persistor.path(workflow.fl_ctx)

    return run


@pytest.fixture
def continued(make_workflow, tmp_path):
    """Run the job that goes on from a saved file, every client's learner new."""

    def run(saved, after_round, *, job="job-2", arguments=None, continues=None, **changes):
        app = tmp_path / "workspaces" / "server" / job / "app"
        app.mkdir(parents=True)
        shutil.copy(saved, app / "initial_weights.pt")
        continues = {"job": "job-1", "after_round": after_round} | (continues or {})
        workflow = make_workflow(
            arguments,
            job=job,
            initial_weights="initial_weights.pt",
            rounds=ROUNDS,
            continues=continues,
            **changes,
        )
        workflow.run()
        return workflow

    return run


def results(workflow):
    return json.loads((Path(workflow.get_run_dir()) / "results.json").read_text())


def states(tmp_path, job):
    return {
        site: tmp_path / "workspaces" / site / "fedbn_sites" / job / site / "local_entries.pt"
        for site in SITES
    }


def never_interrupted(experiment, data_root, **changes):
    stores = {site: read_site_store(data_root / site) for site in SITES}
    return run_federation(experiment(sites=SITES, rounds=ROUNDS, **changes), stores)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "fedbn" else pytest.mark.slow) for name in ALGORITHMS],
)
def test_a_continued_run_has_the_bits_of_one_that_was_never_interrupted(
    interrupted, continued, experiment, data_root, tmp_path, name
):
    """Two sites have trained the round in flight, the third has not."""
    changes = ALGORITHMS[name]
    saved = interrupted(2, **changes)
    _, facts = load_checkpoint(saved, SHARED_WEIGHTS)
    assert (facts["job"], facts["round"]) == ("job-1", 1)
    assert facts["last accepted"] == dict.fromkeys(SITES, 1)
    rounds_kept = {
        site: load_checkpoint(path, LOCAL_ENTRIES)[1]["round"]
        for site, path in states(tmp_path, "job-1").items()
    }
    assert rounds_kept == {"NYU": 2, "UM": 2, "USM": 1}

    workflow = continued(saved, 1, **changes)
    assert workflow.engine.panics == []
    found, expected = results(workflow), never_interrupted(experiment, data_root, **changes)
    assert found["shared_weights_sha256"] == expected.report["shared_weights_sha256"]
    assert found["across_sites"] == expected.report["across_sites"]
    for site, path in states(tmp_path, "job-2").items():
        local, meta = load_checkpoint(path, LOCAL_ENTRIES)
        assert (meta["job"], meta["round"]) == ("job-2", ROUNDS - 1)
        assert weights_digest(local) == weights_digest(expected.local[site])
        report = found["sites"][site]
        assert report["continued_from"] == {"job": "job-1", "round": 1}
        assert report["curve"] == expected.report["sites"][site]["curve"], "earlier rounds too"
    assert [record["round"] for record in found["rounds"]] == [2, 3]
    assert found["experiment"]["continues"]["after_round"] == 1
    assert found["status"] == "completed"


@pytest.mark.slow
def test_a_run_is_continued_a_second_time_and_a_site_that_missed_the_second_job_goes_on(
    interrupted, continued, experiment, data_root, tmp_path, make_workflow
):
    quorum = {"min_sites": 2, "preflight_seconds": 1, "round_seconds": 1}
    saved = interrupted(1, arguments=quorum)
    app = tmp_path / "workspaces" / "server" / "job-2" / "app"
    app.mkdir(parents=True)
    shutil.copy(saved, app / "initial_weights.pt")
    second = make_workflow(
        quorum,
        connected=("NYU", "UM"),
        job="job-2",
        initial_weights="initial_weights.pt",
        rounds=3,
        continues={"job": "job-1", "after_round": 0},
    )
    second.run()
    assert second.engine.panics == []
    saved = second.persistor.path(second.fl_ctx)
    _, facts = load_checkpoint(saved, SHARED_WEIGHTS)
    assert facts["last accepted"] == {"NYU": 2, "UM": 2, "USM": 0}
    third = continued(saved, 2, job="job-3", continues={"job": "job-2", "earlier_jobs": ["job-1"]})
    assert third.engine.panics == []
    found = results(third)["sites"]
    assert found["NYU"]["continued_from"] == {"job": "job-2", "round": 2}
    assert found["USM"]["continued_from"] == {"job": "job-1", "round": 0}
    assert [point["round"] for point in found["USM"]["curve"]] == [0, 3]
    local, _ = load_checkpoint(states(tmp_path, "job-3")["USM"], LOCAL_ENTRIES)
    steps = [numbers["sites"]["USM"]["n_steps"] for numbers in third.rounds]
    assert int(local[COUNTER]) == 2 * steps[0], "trained in rounds 0 and 3"


@pytest.mark.slow
def test_a_site_that_was_absent_goes_on_from_its_latest_round_and_it_is_said(
    interrupted, continued, tmp_path
):
    quorum = {"min_sites": 2, "round_seconds": 1}
    saved = interrupted(3, arguments=quorum, absent={("UM", 1), ("UM", 2), ("UM", 3)})
    assert load_checkpoint(saved, SHARED_WEIGHTS)[1]["last accepted"]["UM"] == 0
    workflow = continued(saved, 2, arguments=quorum)
    assert workflow.engine.panics == []
    found = results(workflow)["sites"]
    assert found["NYU"]["continued_from"] == {"job": "job-1", "round": 2}
    assert found["UM"]["continued_from"] == {"job": "job-1", "round": 0}


def test_a_site_that_never_took_part_starts_anew_and_it_is_said(interrupted, continued, caplog):
    quorum = {"min_sites": 2, "preflight_seconds": 1, "round_seconds": 1}
    never = {("UM", "preflight"), ("UM", 0), ("UM", 1), ("UM", 2)}
    workflow = continued(interrupted(2, arguments=quorum, absent=never), 1)
    assert workflow.engine.panics == []
    found = results(workflow)["sites"]
    assert found["UM"]["continued_from"] is None
    assert [point["round"] for point in found["UM"]["curve"]] == [2, 3]
    assert "site 'UM' was no part of job 'job-1': it starts anew" in caplog.text


def lose(path):
    path.unlink()


def damage(path):
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (
            lose,
            "site 'UM': its batch norm of job 'job-1' is missing in <path>, but the server "
            "accepted its contribution of round 1",
        ),
        (damage, "local entries file <path> is damaged"),
    ],
)
def test_a_site_whose_state_is_lost_ends_the_continued_job_before_its_first_round(
    interrupted, continued, tmp_path, spoil, reason
):
    saved = interrupted(2)
    spoil(states(tmp_path, "job-1")["UM"])
    workflow = continued(saved, 1)
    (panic,) = workflow.engine.panics
    assert reason in panic
    assert workflow.rounds == []
    assert not states(tmp_path, "job-2")["UM"].exists()


def test_a_backup_from_before_what_the_server_accepted_is_refused(interrupted, continued, tmp_path):
    saved = interrupted(2)
    path = states(tmp_path, "job-1")["UM"]
    tensors, meta = load_checkpoint(path, LOCAL_ENTRIES)
    save_checkpoint(path, LOCAL_ENTRIES, tensors, meta | {"round": 0})
    (panic,) = continued(saved, 1).engine.panics
    assert "site 'UM': its batch norm is that after round 0, but the server accepted its" in panic
    assert "the state is an older one, as from a backup" in panic


def test_a_store_that_has_changed_ends_the_continued_job(
    interrupted, continued, write_store, data_root
):
    saved = interrupted(1)
    write_store(data_root / "UM", "UM", n_subjects=18)
    (panic,) = continued(saved, 0).engine.panics
    assert "site 'UM': the store has changed since the run that is continued" in panic


@pytest.mark.slow
def test_a_run_that_lost_its_server_at_the_end_is_only_scored(
    make_workflow, continued, experiment, data_root
):
    workflow = make_workflow(rounds=ROUNDS)
    nyu = workflow.clients["NYU"]

    def until_the_end(purpose, data):
        if purpose == "final":
            raise Killed
        return nyu(purpose, data)

    workflow.clients["NYU"] = until_the_end
    with pytest.raises(Killed):
        workflow.run()
    last = continued(workflow.persistor.path(workflow.fl_ctx), ROUNDS - 1)
    assert last.engine.panics == []
    expected = never_interrupted(experiment, data_root).report
    found = results(last)
    assert found["rounds"] == []
    for key in ("shared_weights_sha256", "across_sites"):
        assert found[key] == expected[key]


@pytest.mark.parametrize(
    ("continues", "changes", "reason"),
    [
        ({"after_round": 0}, {}, "is of round 1, but the experiment continues round 0"),
        ({"job": "job-0"}, {}, "is of job 'job-1', but the experiment continues job 'job-0'"),
        ({}, {"seed": 6}, "seed is 6, but in the run to continue it was 5"),
    ],
)
def test_a_file_of_another_run_ends_the_job(interrupted, continued, continues, changes, reason):
    workflow = continued(interrupted(2), 1, continues=continues, **changes)
    assert reason in workflow.engine.panics[0]
    assert workflow.asked == []


def test_a_job_that_continues_without_a_file_ends_with_what_to_do(make_context, experiment):
    persistor = SharedModelPersistor()
    job = experiment(continues={"job": "job-1", "after_round": 0})
    context = make_context(job, persistor=persistor)
    persistor.handle_event("_start_run", context)
    (panic,) = context.get_engine().panics
    assert "no initial_weights to go on from; make the job with `fedbn resume`" in panic


@pytest.mark.slow
def test_a_warm_start_shares_weights_and_begins_everything_else_anew(
    interrupted, make_workflow, tmp_path
):
    saved = interrupted(2)
    app = tmp_path / "workspaces" / "server" / "job-2" / "app"
    app.mkdir(parents=True)
    shutil.copy(saved, app / "earlier.pt")
    workflow = make_workflow(job="job-2", initial_weights="earlier.pt", rounds=1)
    workflow.run()
    assert workflow.engine.panics == []
    _, first = next(pair for pair in workflow.asked if pair[1].params)
    shared, _ = load_checkpoint(saved, SHARED_WEIGHTS)
    assert {name: array.tolist() for name, array in first.params.items()} == {
        name: tensor.tolist() for name, tensor in shared.items()
    }
    assert first.meta[REPORT]["last accepted"] == {}
    local, meta = load_checkpoint(states(tmp_path, "job-2")["NYU"], LOCAL_ENTRIES)
    assert (meta["round"], int(local[COUNTER])) == (
        0,
        workflow.rounds[0]["sites"]["NYU"]["n_steps"],
    )
    assert "continued_from" not in results(workflow)["sites"]["NYU"]


def test_two_jobs_at_once_at_one_site_do_not_mix(make_client, experiment, data_root, tmp_path):
    """Their tasks alternate; each job ends with the bits that it has alone."""
    shared, first, second = {}, {}, {}
    jobs = {"spring": experiment(seed=5), "autumn": experiment(seed=9)}
    for job, settings in jobs.items():
        alone = make_client(settings, job=f"{job}-alone")
        report, _ = alone.ask("preflight")
        assert ERROR not in report
        shared[job] = {k: v.numpy() for k, v in alone.learner._site.initial_shared().items()}
        for number in range(2):
            _, answer = alone.ask("train", shared[job], number)
        first[job] = (
            answer.params,
            load_checkpoint(alone.state_folder / "local_entries.pt", LOCAL_ENTRIES),
        )
    clients = {job: make_client(settings, job=job) for job, settings in jobs.items()}
    for client in clients.values():
        client.ask("preflight")
    for number in range(2):
        for job, client in clients.items():
            client.restart()
            _, answer = client.ask("train", shared[job], number, prepared=["NYU"])
            second[job] = (
                answer.params,
                load_checkpoint(client.state_folder / "local_entries.pt", LOCAL_ENTRIES),
            )
    for job in jobs:
        for name, array in first[job][0].items():
            assert array.tolist() == second[job][0][name].tolist()
        assert weights_digest(first[job][1][0]) == weights_digest(second[job][1][0])
        assert second[job][1][1]["job"] == job
    digests = {weights_digest(second[job][1][0]) for job in jobs}
    assert len(digests) == 2
