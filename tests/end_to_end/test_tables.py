"""Tables of three classes through the heart job's wiring: the bits of the in-process run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tables import SITES, table_experiment, write_tables
from typer.testing import CliRunner

from fedbn.__main__ import app
from fedbn.federation.experiment import read_experiment
from fedbn.federation.job_folder import write_job
from fedbn.federation.results import weights_digest
from fedbn.federation.site_state import LOCAL_ENTRIES, load_checkpoint

pytestmark = pytest.mark.slow

HEART = Path(__file__).parents[2] / "jobs" / "heart_fedbn"
CLASSES = ("well", "ill", "worse")


@pytest.fixture(scope="module")
def run(tmp_path_factory, simulation_of):
    """The bare command: each task is a new process."""
    folder = tmp_path_factory.mktemp("tables")
    experiment = table_experiment(3, name="tables", rounds=2, compare_with_alone=True)
    write_job(HEART, folder / "job", experiment)
    stores = write_tables(folder / "data", n_classes=3)
    return simulation_of(folder, stores).run("-n", "2").succeeded()


def assert_same(run, expected):
    found = run.results
    for key in ("experiment", "shared_weights_sha256", "across_sites"):
        assert found[key] == expected.report[key], key
    for site in SITES:
        of_site = expected.report["sites"][site]
        assert {key: found["sites"][site][key] for key in of_site} == of_site
        local, _ = load_checkpoint(run.state(site) / "local_entries.pt", LOCAL_ENTRIES)
        assert weights_digest(local) == weights_digest(expected.local[site])


def command(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_bare_simulator_has_the_bits_of_the_in_process_run(run, in_process):
    assert_same(run, in_process(run))
    metrics = run.results["sites"]["North"]["federated"]["subject"]
    assert {f"recall_{k}" for k in range(3)} < set(metrics)
    assert "North" in command("results", run.workspace)


def test_the_recipe_has_them_too(run, in_process, tmp_path):
    (tmp_path / "job").symlink_to(run.job)
    other = dataclasses.replace(run, folder=tmp_path)
    other.run_recipe(*SITES).succeeded()
    assert_same(other, in_process(run))


def test_a_run_of_tables_goes_on_in_a_new_job(run, in_process, tmp_path):
    command(
        "resume", "--run", run.workspace, "--job", run.job, "--out", tmp_path / "job",
        "--rounds", 4,
    )  # fmt: skip
    again = dataclasses.replace(
        run, folder=tmp_path, experiment=read_experiment(tmp_path / "job"), code=None, output=""
    )
    again.run("-n", "2", "-t", "2").succeeded()
    expected, found = in_process(run, rounds=4), again.results
    assert found["experiment"]["task"] == expected.report["experiment"]["task"]
    for key in ("shared_weights_sha256", "across_sites"):
        assert found[key] == expected.report[key]


def test_a_site_keeps_a_model_that_is_asked_about_new_patients(run, tmp_path):
    scores = run.results["sites"]["South"]["federated"]["subject"]
    command(
        "export", "--run", run.workspace, "--site", "South", "--data", run.data,
        "--out", tmp_path / "model",
    )  # fmt: skip
    said = command("predict", "--model", tmp_path / "model", "--input", run.data / "South")
    accuracy = f"held-out subjects: {scores['n']}, accuracy {100 * scores['accuracy']:.1f} %"
    assert accuracy in said
    (tmp_path / "new.csv").write_text("stage,pressure,age\nb,120,61\n,,\nc,?,40\n")
    said = command(
        "predict", "--model", tmp_path / "model", "--input", tmp_path / "new.csv",
        "--out", tmp_path / "out",
    )  # fmt: skip
    header, *rows = (tmp_path / "out" / "predictions.tsv").read_text().splitlines()
    assert len(rows) == 2
    assert all(f"probability_{name}" in header for name in CLASSES)
