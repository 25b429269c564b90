"""A workspace in which no process could start, or that another run is using."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from nvflare.recipe.sim_env import SimEnv

from data_prep.files import BusyError, lock
from fedbn.federation.resume import SIMULATOR_JOB
from fedbn.flare.doctor import FAILED, examine
from fedbn.flare.recipe import FedBNRecipe
from fedbn.flare.simulator import WorkspaceError, check_path, keeping

SPLIT = ["a folder", "a\tb", "Bob's", 'a"b', "a\\b", "a#b", "a'b c'd"]
JOB = Path(__file__).parents[3] / "jobs" / "abide_fedbn"


@pytest.mark.parametrize("name", SPLIT)
def test_what_flare_would_split_is_refused(name):
    with pytest.raises(WorkspaceError, match=r"the path of the kit, .*FLARE splits the commands"):
        check_path(Path("/srv") / name / "kits", "the kit")


@pytest.mark.parametrize("name", ["kits", "a-b_c.d", "größe", "a,b;c&d$e(f)", "~x"])
def test_what_flare_takes_is_taken(name):
    check_path(Path("/srv") / name, "the kit")


@pytest.fixture
def simulated(make_workflow, tmp_path):
    """Return a function that makes a workflow of the simulator in a workspace."""

    def make(name="workspace", job=SIMULATOR_JOB):
        workflow = make_workflow(job=job, rounds=1)
        root = tmp_path / name
        workflow.engine.workspace.get_root_dir = lambda: str(root / "server")
        return workflow, root

    return make


@pytest.mark.parametrize("place", ["workspace", "Python"])
def test_a_job_ends_at_once_where_no_client_could_start(simulated, monkeypatch, place):
    workflow, root = simulated("a folder" if place == "workspace" else "folder")
    if place == "Python":
        monkeypatch.setattr(sys, "executable", "/a venv/bin/python")
    workflow.run()
    (panic,) = workflow.engine.panics
    path = root if place == "workspace" else "/a venv/bin/python"
    assert f"{place}, '{path}', has a blank" in panic
    assert workflow.asked == []


def test_a_second_run_is_told_that_another_holds_the_workspace(simulated):
    workflow, root = simulated()
    with lock(root, "using"):
        workflow.run()
    expected = f"another run is using {root} now; wait until it has ended, or name another"
    assert workflow.engine.panics[0].startswith(expected)
    assert workflow.asked == []


def test_a_run_holds_its_workspace_until_it_has_ended(simulated):
    workflow, root = simulated()
    inner, busy = workflow.clients["NYU"], []

    def look(purpose, data):
        with pytest.raises(BusyError), keeping(root):
            pass
        busy.append(purpose)
        return inner(purpose, data)

    workflow.clients["NYU"] = look
    workflow.run()
    assert workflow.engine.panics == []
    assert busy == ["preflight", "train", "final"]
    with keeping(root):
        assert not root.exists(), "a workspace that is looked at is not made"
    assert list(root.parent.glob(".workspace*")) == []


def test_a_deployed_server_asks_for_no_workspace(simulated):
    workflow, root = simulated("a folder", job="job-1")
    with lock(root, "using"):
        workflow.run()
    assert workflow.engine.panics == []


def test_a_lost_state_says_what_flare_does_to_a_simulator_s_workspace(make_client, experiment):
    for job, said in ((SIMULATOR_JOB, True), ("job-1", False)):
        client = make_client(experiment(), job=job)
        report, _ = client.ask("train", {}, 1, prepared=["NYU"])
        assert "its batch norm of this job is missing" in report["error"]
        assert ("deletes a simulator's workspace when another one" in report["error"]) == said


@pytest.mark.parametrize("fault", ["blank", "busy"])
def test_a_recipe_is_refused_before_flare_deletes_anything(tmp_path, monkeypatch, fault):
    root = tmp_path / ("a folder" if fault == "blank" else "folder")
    kept = root / "abide_fedbn" / "server" / "results.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("of the other run")
    monkeypatch.setattr(SimEnv, "deploy", lambda *_: pytest.fail("FLARE has begun"))
    environment = SimEnv(num_clients=4, workspace_root=str(root))
    recipe = FedBNRecipe(JOB)
    error = WorkspaceError if fault == "blank" else BusyError
    with lock(root / "abide_fedbn", "using"), pytest.raises(error):
        recipe.run(environment)
    assert kept.read_text() == "of the other run"


@pytest.mark.parametrize("name", ["my kits", "kits"])
def test_doctor_says_that_a_kit_cannot_start_where_it_lies(make_kit, monkeypatch, tmp_path, name):
    make_kit(f"{name}/NYU")
    monkeypatch.chdir(tmp_path)
    found = [f for f in examine(Path(name) / "NYU") if f.subject == "startup kit"]
    assert (found[0].status == FAILED) == (" " in name)
    assert " " not in name or f"the kit, '{tmp_path}/my kits/NYU', has a blank" in found[0].sentence
