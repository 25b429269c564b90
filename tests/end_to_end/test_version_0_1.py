"""What version 0.1.0 wrote (tests/data/v0_1) is read by this one, or refused in one sentence.

All goes through commands, and through the paths that stored jobs and bundles name.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
import shutil
from pathlib import Path

import monai
import pytest
from typer.testing import CliRunner

from fedbn.__main__ import app

STORED = Path(__file__).parents[1] / "data" / "v0_1"
WRITTEN = 1_700_000_000  # when each connectomes.npy was, as 0.1.0's fingerprint of a store knows


@pytest.fixture
def stored(tmp_path):
    """A copy that may be changed."""
    folder = tmp_path / "v0_1"
    shutil.copytree(STORED, folder)
    for array in folder.glob("data/*/connectomes.npy"):
        os.utime(array, (WRITTEN, WRITTEN))
    return folder


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def succeeded(*words):
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    return done


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def is_one_sentence(done):
    return done.exit_code == 1 and re.fullmatch("fedbn: [^\n]+\n", done.stderr) and not done.stdout


def any_version_may_run(job):
    """Leave out the versions of fedbn that a job asks for."""
    file = job / "app" / "config" / "experiment.json"
    content = json.loads(file.read_text())
    del content["fedbn_version"]
    file.write_text(json.dumps(content))


def same_bits(found, expected):
    """Whether two runs end with the same weights; other packages may round otherwise."""
    found, expected = (json.loads(Path(file).read_text()) for file in (found, expected))
    decide = [
        {name: run["versions"][name] for name in ("torch", "numpy")} for run in (found, expected)
    ]
    digests = [run["shared_weights_sha256"] for run in (found, expected)]
    return decide[0] != decide[1] or digests[0] == digests[1]


def numbers(table):
    """Return the numbers of a table, row by row, each under its column's name."""
    rows = list(csv.DictReader(table.read_text().splitlines(), delimiter="\t"))
    return [
        {name: float(text) for name, text in row.items() if re.fullmatch(r"-?\d+(\.\d+)?", text)}
        for row in rows
    ]


def predicts_the_same(stored, out):
    for name in ("predictions.tsv", "windows.tsv", "connections.tsv"):
        expected, found = numbers(stored / "predictions" / name), numbers(out / name)
        assert len(found) == len(expected) > 1
        for row, now in zip(expected, found, strict=True):
            assert {column: now[column] for column in row} == pytest.approx(row, abs=2e-5), name


def test_a_bundle_predicts_the_same(stored, tmp_path):
    series = sorted(stored.glob("series/*.1D"))
    arguments = ("--model", stored / "bundle", "--pictures", 0, "--out", tmp_path / "out")
    succeeded("predict", *arguments, "--input", *series)
    predicts_the_same(stored, tmp_path / "out")


def test_monai_runs_a_bundle(stored, tmp_path, monkeypatch):
    monkeypatch.chdir(stored / "bundle")
    monai.bundle.run(
        meta_file="configs/metadata.json",
        config_file="configs/inference.json",
        inputs=[str(stored / "series" / f"{name}.1D") for name in ("one", "two")],
        output_dir=str(tmp_path / "out"),
    )
    predicts_the_same(stored, tmp_path / "out")


@pytest.mark.parametrize("whole", [True, False], ids=["model.pt", "joined from its parts"])
def test_a_sites_state_is_exported_and_predicts_the_same(stored, tmp_path, whole):
    state = stored / "simulator" / "site-1" / "fedbn_sites" / "simulate_job" / "NYU"
    if not whole:
        (state / "model.pt").unlink()
    where = ("--run", stored / "simulator", "--site", "NYU", "--data", stored / "data")
    done = succeeded("export", *where, "--out", tmp_path / "bundle")
    assert "held-out subjects: 4, accuracy 75.0 %" in done.output
    inputs = ("--input", *sorted(stored.glob("series/*.1D")), "--pictures", 0)
    succeeded("predict", "--model", tmp_path / "bundle", *inputs, "--out", tmp_path / "out")
    predicts_the_same(stored, tmp_path / "out")


@pytest.mark.parametrize("run", ["results.json", "simulator"])
def test_a_runs_results_are_shown(stored, tmp_path, run):
    table = succeeded("results", stored / run).output
    assert "SYNTHETIC" in table
    assert re.search(r"NYU +4 ", table)
    succeeded("report", stored / run, "--data", stored / "data", "--out", tmp_path / "page")
    assert "SYNTHETIC" in (tmp_path / "page" / "report.html").read_text()


def test_a_comparison_is_reported(stored, tmp_path):
    succeeded("report", stored / "comparison", "--out", tmp_path / "page")
    page = (tmp_path / "page" / "report.html").read_text()
    assert "FedBN" in page
    assert "87.5" in page


def test_a_comparison_goes_on_or_is_refused_untouched(stored):
    """Refused where a version that decides numbers is another one."""
    any_version_may_run(stored / "job")
    out = stored / "comparison"
    whole = files(out)
    (stopped_in,) = out.glob("runs/fedbn_seed0_fold2_*.json")
    stopped_in.unlink()
    before = files(out)
    words = ("--methods", "fedavg,fedbn", "--seeds", 1, "--rounds", 2, "--jobs", 1, "--out", out)
    done = invoke("compare", stored / "job", "--data", stored / "data", *words)
    after = files(out)
    if done.exit_code:
        assert is_one_sentence(done), done.output
        assert "another comparison" in done.stderr
        assert after == before
    else:
        assert set(after) == set(whole)
        assert all(after[path] == whole[path] for path in whole if path.name != "tables.txt")


def test_a_job_with_its_versions_runs_or_is_refused(stored):
    done = invoke("run", stored / "job", "--data", stored / "data")
    assert done.exit_code == 0 or (is_one_sentence(done) and ">=0.1,<0.2" in done.stderr)


@pytest.mark.parametrize(
    ("rounds", "expected"), [(2, "results.json"), (4, "results_4_rounds.json")]
)
def test_a_job_gives_the_same_weights_in_one_process(stored, tmp_path, rounds, expected):
    any_version_may_run(stored / "job")
    out = tmp_path / "results.json"
    succeeded("run", stored / "job", "--data", stored / "data", "--rounds", rounds, "--out", out)
    assert same_bits(out, stored / expected)


@pytest.mark.slow
def test_a_job_gives_the_same_weights_in_the_simulator(stored, simulation_of):
    any_version_may_run(stored / "job")
    run = simulation_of(stored, stored / "data").run("-n", "2", "-t", "2").succeeded()
    assert same_bits(run.run_folder / "results.json", stored / "results.json")


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_weights(stored, simulation_of, tmp_path):
    """Two rounds of 0.1.0 and two of this version are four of 0.1.0."""
    any_version_may_run(stored / "job")
    words = ("--run", stored / "simulator", "--job", stored / "job", "--rounds", 4)
    succeeded("resume", *words, "--out", tmp_path / "job")
    run = simulation_of(tmp_path, stored / "data").run("-n", "2", "-t", "2").succeeded()
    assert same_bits(run.run_folder / "results.json", stored / "results_4_rounds.json")
    assert [record["round"] for record in run.results["rounds"]] == [2, 3]
    assert run.results["sites"]["UM"]["continued_from"]["round"] == 1


def test_every_path_that_a_job_a_kit_or_a_bundle_names_is_there():
    texts = [file.read_text() for file in (STORED / "job").rglob("config_fed_*.json")]
    texts.append((STORED / "bundle" / "configs" / "inference.json").read_text())
    named = set(re.findall(r'"(fedbn\.[\w.]+\.\w+)"', "\n".join(texts)))
    named |= {
        "fedbn.flare.filters.BatchNormFilter",
        "fedbn.flare.launcher.RestartingJobLauncher",
        "fedbn.flare.provisioning.SignedStartupBuilder",
        "fedbn.flare.recipe.FedBNRecipe",
        "fedbn.prediction.run_bundle",
    }
    assert len(named) == 11
    for path in named:
        module, _, name = path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name)), path
