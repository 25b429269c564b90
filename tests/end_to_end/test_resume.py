"""A simulator run is killed and continued in a new job: the bits of a run that never was killed."""

from __future__ import annotations

import dataclasses

import pytest
from typer.testing import CliRunner

from fedbn.__main__ import app
from fedbn.core.control_variates import PREFIX
from fedbn.federation.experiment import read_experiment
from fedbn.federation.results import weights_digest
from fedbn.federation.site_state import LOCAL_ENTRIES, SHARED_WEIGHTS, load_checkpoint

pytestmark = pytest.mark.slow


def test_a_killed_run_goes_on_bit_for_bit_with_batch_norm_and_control_variates(
    simulation, in_process, tmp_path
):
    run = simulation(
        rounds=500,
        algorithm={"name": "scaffold"},
        training={"optimizer": "sgd", "learning_rate": 0.05, "batch_size": 16, "local_epochs": 1},
    )
    clients = ("-c", "NYU,UM", "-t", "2")
    with run.start(*clients) as running:
        running.wait_until(lambda: list(run.workspace.glob("*/fedbn_sites/**/round_000003.npz")))
        running.kill()
    saved, facts = load_checkpoint(run.shared_file, SHARED_WEIGHTS)
    assert (facts["job"], facts["round"] >= 2) == ("simulate_job", True)
    assert any(name.startswith(f"{PREFIX}site UM:") for name in saved)
    after_round = facts["round"]

    rounds = after_round + 3
    arguments = ["resume", "--run", run.workspace, "--job", run.job, "--out", tmp_path / "job"]
    done = CliRunner().invoke(app, [str(word) for word in [*arguments, "--rounds", rounds]])
    assert done.exit_code == 0, done.output
    assert f"after round {after_round} (counted from 0): 2 of {rounds} rounds" in done.output
    again = dataclasses.replace(
        run, folder=tmp_path, experiment=read_experiment(tmp_path / "job"), code=None, output=""
    )
    again.run(*clients).succeeded()

    expected, found = in_process(run, rounds=rounds), again.results
    for key in ("shared_weights_sha256", "across_sites"):
        assert found[key] == expected.report[key]
    assert [record["round"] for record in found["rounds"]] == [after_round + 1, after_round + 2]
    assert found["experiment"]["continues"]["after_round"] == after_round
    for site in ("NYU", "UM"):
        local, _ = load_checkpoint(again.state(site) / "local_entries.pt", LOCAL_ENTRIES)
        assert weights_digest(local) == weights_digest(expected.local[site])
        assert found["sites"][site]["continued_from"]["round"] == after_round
        assert found["sites"][site]["curve"] == expected.report["sites"][site]["curve"]
