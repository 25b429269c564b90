"""Processes that are killed or hang while a deployed job runs: the rest goes on, nothing is lost.

One chain of jobs on the running deployment. In the first a hospital's client and another one's job
process are killed, and a third one hangs for a while; it is aborted. The second goes on from its
downloaded result until the server is killed, the third from what lies in the server's folder then.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import dataclass, field

import pytest
from deployment import SERVER, SITES

from fedbn.federation.resume import continue_job
from fedbn.federation.site_state import LOCAL_ENTRIES, SHARED_WEIGHTS, load_checkpoint

pytestmark = pytest.mark.slow

COUNTER = "hidden.0.norm.num_batches_tracked"
QUORUM = 2


@dataclass
class Run:
    """One job of the chain, and what was noted while it ran."""

    deployment: object
    id: str
    notes: dict = field(default_factory=dict)

    def trained(self, site):
        """Return the rounds that a site has trained, in this job and those before."""
        folder = self.deployment.state(site, self.id) / "predictions"
        return sorted(int(path.stem.removeprefix("round_")) for path in folder.glob("round_*.npz"))

    def wait_for(self, site, number):
        """Wait until a site has trained this round or a later one, and return its latest."""
        self.deployment.wait_until(
            lambda: self.trained(site)[-1:] >= [number], what=f"no round {number} at {site}"
        )
        return self.trained(site)[-1]

    def local(self, site):
        return load_checkpoint(
            self.deployment.state(site, self.id) / "local_entries.pt", LOCAL_ENTRIES
        )

    def signal(self, site, number):
        pids = self.deployment.pids(site, self.id)
        assert pids
        for pid in pids:
            os.kill(pid, number)


@pytest.fixture(scope="module")
def job(simulation, deployment):
    """The main job with a quorum and many rounds, in a copy that every hospital takes."""
    deployment.wait_for_clients()
    folder = simulation(
        stores=deployment.data,
        sites=list(SITES),
        rounds=500,
        workflow={"min_sites": QUORUM, "grace_seconds": 2, "round_seconds": 60},
    ).job
    shutil.rmtree(folder / "app" / "custom")
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"min_clients": QUORUM}))
    return folder


@pytest.fixture(scope="module")
def faulty(deployment, job):
    """The first job: three faults, one after another, then it is aborted."""
    run = Run(deployment, deployment.submit(job))
    run.wait_for("UM", 1)
    deployment.kill("USM")
    run.notes["USM"] = run.trained("USM")[-1]
    run.signal("UM", signal.SIGKILL)
    run.notes["UM"] = run.trained("UM")[-1]
    deployment.restart("USM")
    run.wait_for("UM", run.notes["UM"] + 2)

    run.signal("UCLA", signal.SIGSTOP)
    run.notes["UCLA"] = run.trained("UCLA")[-1]
    run.wait_for("NYU", run.trained("NYU")[-1] + 3)
    run.signal("UCLA", signal.SIGCONT)
    run.wait_for("UCLA", run.trained("NYU")[-1])

    run.notes["status before"] = deployment.status(run.id)
    deployment.abort(run.id)
    run.notes["status"] = deployment.wait(run.id)
    run.notes["folder"] = deployment.download(run.id)
    return run


@pytest.fixture(scope="module")
def results(faulty):
    return json.loads((faulty.notes["folder"] / "workspace" / "results.json").read_text())


def absent(results, site):
    return [record["round"] for record in results["rounds"] if site in record["missing"]]


def accepted(results, site):
    return [record["round"] for record in results["rounds"] if site in record["accepted"]]


def test_the_others_go_on_and_the_absences_are_in_the_results(faulty, results):
    assert faulty.notes["status before"] == "RUNNING"
    for record in results["rounds"]:
        assert len(record["accepted"]) >= QUORUM
        assert record["refused"] == {}
        assert sorted(record["accepted"] + record["missing"]) == sorted(SITES)
    assert absent(results, "NYU") == []
    assert len(absent(results, "UCLA")) >= 2


def test_a_killed_job_process_is_started_again_and_takes_part_with_its_own_batch_norm(
    faulty, results
):
    back = [number for number in accepted(results, "UM") if number > faulty.notes["UM"]]
    assert len(back) >= 2
    log = faulty.deployment.log("UM")
    assert "the job's process was killed (signal 9); it is started again" in log


@pytest.mark.parametrize("site", SITES)
def test_each_site_s_counter_is_that_of_all_rounds_that_it_has_trained(faulty, results, site):
    """A fresh batch norm would have counted from zero."""
    entries, meta = faulty.local(site)
    steps = next(r["sites"][site]["n_steps"] for r in results["rounds"] if site in r["sites"])
    trained = faulty.trained(site)
    assert int(entries[COUNTER]) == steps * len(trained)
    assert meta["round"] == trained[-1]


def test_a_site_that_hung_for_some_rounds_takes_part_again(faulty, results):
    gone = absent(results, "UCLA")
    assert gone[0] > faulty.notes["UCLA"]
    assert [number for number in accepted(results, "UCLA") if number > gone[-1]]


def test_a_restarted_client_is_out_of_the_running_job(faulty, results):
    """FLARE gives it a new token, which the job does not know; its state waits for the next job."""
    assert max(accepted(results, "USM")) <= faulty.notes["USM"]
    assert faulty.trained("USM")[-1] == faulty.notes["USM"]


def test_an_aborted_job_says_so_in_its_results(faulty, results):
    assert faulty.notes["status"] == "FINISHED:ABORTED"
    assert results["status"] == "aborted"
    assert results["reason"].startswith("the job was aborted")


@pytest.fixture(scope="module")
def second(deployment, job, faulty, tmp_path_factory):
    """The job that goes on from the downloaded result, until the server is killed."""
    folder = tmp_path_factory.mktemp("second") / "job"
    experiment = continue_job(faulty.notes["folder"], job, folder)
    run = Run(deployment, deployment.submit(folder))
    run.notes["continues"] = experiment.continues
    first = experiment.continues.after_round + 1
    for site in SITES:
        run.wait_for(site, first + 1)  # the server has saved the round before
    deployment.kill(SERVER)
    run.notes["saved"] = shutil.copytree(
        deployment.kit(SERVER) / run.id, tmp_path_factory.mktemp("server") / run.id
    )
    deployment.restart(SERVER)
    return run


@pytest.fixture(scope="module")
def third(deployment, job, second, tmp_path_factory):
    folder = tmp_path_factory.mktemp("third") / "job"
    _, facts = load_checkpoint(
        second.notes["saved"] / "app_server" / "FL_global_model.pt", SHARED_WEIGHTS
    )
    rounds = facts["round"] + 3
    experiment = continue_job(deployment.kit(SERVER) / second.id, job, folder, rounds=rounds)
    run = Run(deployment, deployment.submit(folder))
    run.notes |= {"continues": experiment.continues, "status": deployment.wait(run.id)}
    return run


def test_a_client_that_was_away_goes_on_from_its_own_batch_norm_in_the_next_job(faulty, second):
    assert second.notes["continues"].job == faulty.id
    new = [number for number in second.trained("USM") if number not in faulty.trained("USM")]
    assert new[0] == second.notes["continues"].after_round + 1
    entries, _ = second.local("USM")
    before, _ = faulty.local("USM")
    steps = int(before[COUNTER]) // len(faulty.trained("USM"))
    assert int(entries[COUNTER]) == int(before[COUNTER]) + steps * len(new)


def test_after_a_killed_server_flare_leaves_the_job_running_and_a_new_one_goes_on(
    deployment, faulty, second, third
):
    deployment.wait_until(lambda: not deployment.pids(job=second.id), 60, "it lives on at a site")
    assert deployment.status(second.id) == "RUNNING", "FLARE never looks at it again"
    assert third.notes["status"] == "FINISHED:COMPLETED"
    continues = third.notes["continues"]
    assert (continues.job, continues.earlier_jobs) == (second.id, (faulty.id,))
    results = deployment.results(third.id)
    assert results["status"] == "completed"
    assert results["not_scored"] == {}
    assert [r["round"] for r in results["rounds"]] == [
        continues.after_round + 1,
        continues.after_round + 2,
    ]
    for site in SITES:
        assert results["sites"][site]["continued_from"] == {
            "job": second.id,
            "round": continues.after_round,
        }
        curve = [point["round"] for point in results["sites"][site]["curve"]]
        assert curve == third.trained(site), "with the rounds of all three jobs"
        entries, _ = third.local(site)
        steps = results["rounds"][0]["sites"][site]["n_steps"]
        assert int(entries[COUNTER]) == steps * len(curve)
