"""The console command, as a person meets it."""

from __future__ import annotations

import json
import operator
import os
import stat

import pytest
from typer.testing import CliRunner

from fedbn.__main__ import app
from fedbn.cli.common import SHORT_NAMES
from fedbn.federation.experiment import NetworkSettings, read_experiment
from fedbn.federation.results import run_report
from fedbn.federation.simulation import read_sites, run_federation
from fedbn.federation.site import Site
from fedbn.report.tables import SYNTHETIC, WIDTH, render, run_tables


@pytest.fixture
def job(tmp_path, write_experiment, experiment):
    folder = tmp_path / "job"
    write_experiment(folder / "app" / "config", experiment(compare_with_alone=True))
    return folder


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_run_prints_the_gain_of_each_site_and_writes_the_results(job, data_root, tmp_path):
    done = invoke("run", job, "--data", data_root, "--out", tmp_path / "results.json")
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "results.json").read_text())
    experiment = read_experiment(job)
    expected = run_federation(experiment, read_sites(data_root, experiment)).report
    assert results == json.loads(json.dumps(expected))
    assert (
        done.stdout.splitlines()[-1] == f"shared weights: sha256 {results['shared_weights_sha256']}"
    )
    again = invoke("results", tmp_path / "results.json")
    assert again.exit_code == 0
    for site, report in results["sites"].items():
        row = next(line for line in again.output.splitlines() if line.split()[:1] == [site])
        assert f"{100 * report['federated']['subject']['accuracy']:.1f}" in row.split()
        assert f"{100 * report['alone']['subject']['accuracy']:.1f}" in row.split()


@pytest.mark.parametrize(
    ("change", "value"), [("--fold", 1), ("--rounds", 1), ("--set", "training.batch_size=8")]
)
def test_run_changes_what_it_is_told_to(job, data_root, tmp_path, change, value):
    digests = set()
    for name, arguments in (("a", ()), ("b", (change, value))):
        out = tmp_path / f"{name}.json"
        assert invoke("run", job, "--data", data_root, "--out", out, *arguments).exit_code == 0
        digests.add(json.loads(out.read_text())["shared_weights_sha256"])
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--rounds", "3"], "rounds", 3),
        (["--rounds=3"], "rounds", 3),
        (["--folds", "9"], "n_folds", 9),
        (["--fold", "1"], "fold", 1),
        (["--seed", "6"], "seed", 6),
        (["--policy", "none"], "policy", "none"),
        (["--aggregation-weights", "samples"], "aggregation_weights", "samples"),
        (["--training-share", "NYU=0.5"], "training_share", {"NYU": 0.5}),
        (["--network", "UNet:{}"], "network", NetworkSettings(name="UNet")),
        (["--local-epochs", "7"], "training.local_epochs", 7),
        (["--batch-size", "7"], "training.batch_size", 7),
        (["--learning-rate", "0.7"], "training.learning_rate", 0.7),
        (["--set", "name=x=--rounds"], "name", "x=--rounds"),
        (["--set-file", "FILE"], "training.batch_size", 5),
        (["--set-file", "FILE", "--batch-size", "7"], "training.batch_size", 7),
    ],
)
def test_a_field_is_set_by_its_path_its_short_name_or_a_file(
    job, tmp_path, monkeypatch, arguments, field, value
):
    found = []
    monkeypatch.setattr(
        "fedbn.federation.simulation.read_sites", lambda _, e, **__: found.append(e)
    )
    (tmp_path / "changes.json").write_text('{"training": {"batch_size": 5}}')
    named = {"FILE": tmp_path / "changes.json"}
    invoke("run", job, *(named.get(argument, argument) for argument in arguments))
    assert operator.attrgetter(field)(found[0]) == value


def test_help_tells_the_short_names():
    text = "".join(invoke("run", "--help").output.split())
    assert all(name in text for name in SHORT_NAMES)


def test_a_workspace_with_one_run_is_enough_to_print_its_results(job, data_root, tmp_path):
    workspace = tmp_path / "workspace"
    folder = workspace / "server" / "simulate_job"
    folder.mkdir(parents=True)
    assert invoke("run", job, "--data", data_root, "--out", folder / "results.json").exit_code == 0
    assert "what each site gained" in invoke("results", workspace).output


@pytest.mark.parametrize(("status", "verb"), [("failed", "has failed"), ("aborted", "was aborted")])
def test_a_run_that_ended_early_tells_why(tmp_path, experiment, status, verb):
    records = [{"round": number, "accepted": ["NYU"], "sites": {}} for number in range(2)]
    report = run_report(experiment(), {}, records, {}, status=status, reason="round 1: too few")
    (tmp_path / "results.json").write_text(json.dumps(report))
    sentence = f"this run {verb} after 2 rounds of this job: round 1: too few"
    done = invoke("results", tmp_path)
    assert (done.exit_code, done.stdout.strip()) == (0, sentence)
    done = invoke("report", tmp_path)
    assert done.exit_code == 1
    assert f"fedbn: {sentence}" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "no/such/job"], "no experiment file"),
        (["run", "JOB", "--data", "no/such/folder"], "NYU"),
        (["run", "JOB", "--data", "DATA", "--policy", "fedbm"], "policy"),
        (["run", "JOB", "--data", "DATA", "--fold", "9"], "fold is 9"),
        (
            ["run", "JOB", "--set", "round=9"],
            "round: there is no such field; did you mean 'rounds'?",
        ),
        (["run", "JOB", "--rounds", "1", "--set", "rounds=2"], "rounds is set twice; keep one"),
        (["run", "JOB", "--rounds"], "rounds: it must be a valid integer"),
        (["run", "JOB", "--set-file", "no/file.json"], "cannot read the changes in no/file.json"),
        (["results", "no/such/folder"], "no results.json"),
        (["results", "EXPERIMENT"], "not a results file"),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(job, data_root, arguments, sentence):
    experiment = job / "app" / "config" / "experiment.json"
    named = {"JOB": job, "DATA": data_root, "EXPERIMENT": experiment}
    done = invoke(*(named.get(argument, argument) for argument in arguments))
    assert done.exit_code == 1
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.output


@pytest.mark.parametrize("synthetic", [True, False])
def test_tables_say_when_a_cohort_synthetic(data_root, experiment, synthetic):
    small = experiment()
    report = run_federation(small, read_sites(data_root, small)).report
    text = render(run_tables({**report, "synthetic": synthetic}))
    assert text.count(SYNTHETIC.splitlines()[0]) == (2 if synthetic else 0)
    assert max(len(line) for line in text.splitlines()) <= WIDTH


def test_a_site_that_missed_a_round_is_absent_in_the_curve(data_root, experiment):
    small = experiment()
    report = run_federation(small, read_sites(data_root, small)).report
    del report["sites"]["UM"]["curve"][0]
    curve = render(run_tables(report)).splitlines()
    assert any("absent" in line for line in curve)


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_results_follow_the_umask_and_what_holds_subjects_is_the_owner_s(
    job, data_root, tmp_path, umask
):
    before, out = os.umask(umask), tmp_path / "out"
    try:
        common = ("--data", data_root, "--set", "rounds=1", "--set", "n_folds=2")
        words = ("--methods", "fedbn,ridge", "--seeds", 1, "--jobs", 1, "--out", out)
        done = invoke("compare", job, *common, *words)
        assert done.exit_code == 0, done.output
        done = invoke("run", job, *common, "--out", tmp_path / "results.json")
        assert done.exit_code == 0, done.output
        (tmp_path / "results.json").chmod(0o664)
        invoke("run", job, *common, "--out", tmp_path / "results.json")
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*") if path.is_file()}
    of_runs = {mode for path, mode in modes.items() if path.parent.name == "runs"}
    assert of_runs == {0o600}
    assert {mode for path, mode in modes.items() if path.parent == out} == {0o666 & ~umask}
    assert stat.S_IMODE((tmp_path / "results.json").stat().st_mode) == 0o664


@pytest.mark.parametrize("step", ["evaluate", "finetune", "train_alone"])
def test_what_fails_at_a_site_after_the_last_round_is_told_and_loses_nothing_else(
    job, data_root, tmp_path, monkeypatch, step
):
    unharmed = getattr(Site, step)

    def diverges(site, *arguments):
        if site.name == "UM":
            raise FloatingPointError("training failed in local epoch 1 of 2")
        return unharmed(site, *arguments)

    monkeypatch.setattr(Site, step, diverges)
    out, more = tmp_path / "results.json", ("--set", "finetune={}", "--set", "rounds=1")
    done = invoke("run", job, "--data", data_root, "--out", out, *more)
    assert done.exit_code == 1
    assert "UM is not wholly scored: training failed in local epoch 1 of 2" in done.output
    report = json.loads(out.read_text())
    assert report["not_scored"] == {"UM": "training failed in local epoch 1 of 2"}
    assert set(report["sites"]) == ({"NYU"} if step == "evaluate" else {"NYU", "UM"})
    assert {"federated", "finetuned", "alone"} < set(report["sites"]["NYU"])
    assert "what each site gained" in done.output


def test_a_place_for_results_that_cannot_be_written_is_found_before_the_run(
    job, data_root, tmp_path, monkeypatch
):
    def never(*_, **__):
        raise AssertionError

    monkeypatch.setattr("fedbn.federation.simulation.run_federation", never)
    (tmp_path / "file").write_text("")
    for out, sentence in (
        (tmp_path, f"--out {tmp_path} is a folder; name a file, such as"),
        (tmp_path / "file" / "results.json", f"cannot use {tmp_path / 'file'}: File exists"),
    ):
        done = invoke("run", job, "--data", data_root, "--out", out)
        assert done.exit_code == 1
        assert done.output.startswith(f"fedbn: {sentence}")


@pytest.mark.parametrize("name", ["participants.tsv", "connectomes.npy"])
def test_a_store_that_was_edited_is_refused(job, data_root, name):
    file = data_root / "UM" / name
    content = file.read_bytes()
    changed = content.replace(b"autism", b"control", 1) if name.endswith("tsv") else content[:-4]
    file.write_bytes(changed.ljust(len(content), b"\0") if name.endswith("npy") else changed)
    done = invoke("run", job, "--data", data_root)
    assert done.exit_code == 1
    assert f"fedbn: site 'UM': {name} was changed after the store was written" in done.output
