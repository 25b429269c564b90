"""The job that goes on with a run, as a folder; that it goes on rightly is tested in flare/."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedbn.__main__ import app
from fedbn.federation.experiment import ExperimentError, read_experiment
from fedbn.federation.job_folder import write_job
from fedbn.federation.resume import ResumeError, continue_job
from fedbn.federation.site_state import SHARED_WEIGHTS, save_checkpoint
from fedbn.study.methods import flare_experiment

MAIN = Path(__file__).parents[3] / "jobs" / "abide_fedbn"


@pytest.fixture
def job(tmp_path):
    return shutil.copytree(MAIN, tmp_path / "job", ignore=shutil.ignore_patterns("__pycache__"))


def save(folder, job, *, name="4bcb2966-8195-479f-9569-867d1e990264", after_round=5, **facts):
    """Write what a server leaves, as its persistor does."""
    experiment = read_experiment(job).model_dump(mode="json")
    meta = {"job": name, "round": after_round, "experiment": experiment, "last accepted": {}}
    file = folder / name / "app_server" / "FL_global_model.pt"
    save_checkpoint(file, SHARED_WEIGHTS, {"w": torch.ones(2)}, meta | facts)
    return folder / name


def change(job, **fields):
    path = job / "app" / "config" / "experiment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def server_config(job, app="app"):
    return json.loads((job / app / "config" / "config_fed_server.json").read_text())


def test_the_new_job_is_the_old_one_and_what_it_goes_on_from(job, tmp_path):
    run = save(tmp_path / "server", job)
    (job / ".__nvfl_sig.json").write_text("{}")
    before = sorted(path for path in job.rglob("*"))
    experiment = continue_job(run, job, tmp_path / "new")
    new = tmp_path / "new"
    assert read_experiment(new) == experiment
    assert experiment.continues.model_dump() == {
        "job": run.name,
        "after_round": 5,
        "earlier_jobs": (),
        "workspace": None,
    }
    assert experiment == read_experiment(job).changed(continues=experiment.continues.model_dump())
    saved = (run / "app_server" / "FL_global_model.pt").read_bytes()
    assert (new / "app" / "initial_weights.pt").read_bytes() == saved
    config = server_config(job)
    config["components"][0]["args"] = {"initial_weights": "initial_weights.pt"}
    assert server_config(new) == config
    assert json.loads((new / "meta.json").read_text()) == json.loads(
        (job / "meta.json").read_text()
    )
    files = {str(path.relative_to(new)) for path in new.rglob("*") if path.is_file()}
    assert files - {"app/initial_weights.pt"} == {
        str(path.relative_to(job)) for path in before if path.is_file()
    } - {".__nvfl_sig.json"}
    assert sorted(path for path in job.rglob("*")) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "new", "server"]


def test_more_rounds_and_a_smaller_quorum(job, tmp_path):
    run = save(tmp_path / "server", job, after_round=11)
    experiment = continue_job(run, job, tmp_path / "a" / "new", rounds=20, min_sites=3)
    assert (experiment.rounds, experiment.continues.after_round) == (20, 11)
    new = tmp_path / "a" / "new"
    assert json.loads((new / "meta.json").read_text())["min_clients"] == 3
    assert server_config(new)["workflows"][0]["args"]["min_sites"] == 3


def test_a_continued_run_is_continued_again(job, tmp_path):
    continue_job(save(tmp_path / "server", job, name="spring"), job, tmp_path / "second")
    run = save(tmp_path / "server", tmp_path / "second", name="summer", after_round=7)
    for start in (job, tmp_path / "second"):
        out = tmp_path / f"third from {start.name}"
        continues = continue_job(run, start, out).continues
        assert (continues.job, continues.after_round) == ("summer", 7)
        assert continues.earlier_jobs == ("spring",)
    again = save(tmp_path / "server", tmp_path / "third from job", name="autumn", after_round=8)
    assert continue_job(again, job, tmp_path / "fourth").continues.earlier_jobs == (
        "summer",
        "spring",
    )


def test_a_simulators_workspace_is_named_for_all_its_jobs_have_one_id(job, tmp_path):
    save(tmp_path / "work space" / "server", job, name="simulate_job")
    continues = continue_job(tmp_path / "work space", job, tmp_path / "new").continues
    assert (continues.job, continues.workspace) == ("simulate_job", str(tmp_path / "work space"))


@pytest.mark.parametrize("method", ["scaffold", "clustered"])
def test_what_holds_more_than_all_sites_receive_goes_to_the_server_alone(method, tmp_path):
    job = tmp_path / "job"
    write_job(MAIN, job, flare_experiment(method, read_experiment(MAIN)))
    run = save(tmp_path / "server", job, name="spring")
    for start, out in ((job, tmp_path / "new"), (tmp_path / "new", tmp_path / "newer")):
        continue_job(run, start, out, min_sites=3)
        assert not (out / "app" / "initial_weights.pt").exists()
        assert (out / "app_server" / "initial_weights.pt").exists()
        assert json.loads((out / "meta.json").read_text())["deploy_map"] == {
            "app_server": ["server"],
            "app": ["NYU", "USM", "UM", "UCLA"],
        }
        found = [
            json.loads((out / part / "config" / "experiment.json").read_text())
            for part in ("app", "app_server")
        ]
        assert found[0] == found[1]
        assert found[0]["continues"]["job"] == "spring"
        assert server_config(out, "app_server")["workflows"][0]["args"]["min_sites"] == 3


def another_seed(job, run):
    change(job, seed=7)


def fewer_rounds(job, run):
    change(job, rounds=5)


def of_an_older_version(job, run):
    file = run / "app_server" / "FL_global_model.pt"
    save_checkpoint(file, SHARED_WEIGHTS, {"w": torch.ones(2)}, {"job": run.name})


def before_round_0(job, run):
    save(run.parent, job, name=run.name, after_round=None)


def damaged(job, run):
    file = run / "app_server" / "FL_global_model.pt"
    file.write_bytes(file.read_bytes()[:-20])


def two_runs(job, run):
    save(run / "other", job, name="other")


def another_persistor(job, run):
    path = job / "app" / "config" / "config_fed_server.json"
    path.write_text(path.read_text().replace("SharedModelPersistor", "PTFileModelPersistor"))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (another_seed, "seed is 7, but in the run to continue it was 0: the rounds would not bel"),
        (fewer_rounds, "continues is after round 5, counted from 0, but there are 5 rounds"),
        (of_an_older_version, "does not say which experiment and round it is of"),
        (before_round_0, "was saved before the first round; submit the job anew"),
        (damaged, "FL_global_model.pt is damaged"),
        (two_runs, "2 files FL_global_model.pt in "),
        (lambda job, run: shutil.rmtree(run), "no FL_global_model.pt in "),
        (lambda job, run: (job.parent / "new").mkdir(), "new is there already; give a new folder"),
        (lambda job, run: shutil.rmtree(job), "no experiment file "),
        (another_persistor, "config_fed_server.json of the job is not as fedbn's jobs have it"),
    ],
)
def test_what_cannot_be_continued_is_told_in_one_sentence_and_nothing_is_written(
    job, tmp_path, spoil, reason
):
    run = save(tmp_path / "server", job)
    spoil(job, run)
    there = sorted(tmp_path.iterdir())
    done = CliRunner().invoke(
        app, ["resume", "--run", str(run), "--job", str(job), "--out", str(tmp_path / "new")]
    )
    assert done.exit_code == 1
    assert reason in done.output
    assert len(done.output.splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == there


def test_the_command_says_what_is_left_to_do(job, tmp_path):
    run = save(tmp_path / "server", job)
    arguments = ["resume", "--run", run, "--job", job, "--out", tmp_path / "new", "--min-sites", 3]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    assert (
        f"continues job {run.name} after round 5 (counted from 0): 6 of 12 rounds are left"
        in done.output
    )
    assert (tmp_path / "new" / "app" / "initial_weights.pt").is_file()


def test_a_job_that_continues_is_not_run_in_this_process_as_if_it_were_new(
    job, tmp_path, data_root
):
    continue_job(save(tmp_path / "server", job), job, tmp_path / "new")
    done = CliRunner().invoke(app, ["run", str(tmp_path / "new"), "--data", str(data_root)])
    assert done.exit_code == 1
    assert "continues job" in done.output


@pytest.mark.parametrize(
    "continues",
    [
        {"job": "../x", "after_round": 0},
        {"job": "x", "after_round": -1},
        {"job": "x", "after_round": 1.5},
        {"job": "x"},
        {"job": "x", "after_round": 0, "round": 3},
        {"job": "x", "after_round": 0, "earlier_jobs": ["a/b"]},
        {"job": "x", "after_round": 2},
    ],
)
def test_the_field_is_validated(experiment, continues):
    with pytest.raises(ExperimentError, match="continues"):
        experiment().changed(continues=continues)


def test_an_error_is_a_value_error():
    assert issubclass(ResumeError, ValueError)
