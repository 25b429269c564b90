"""Images through FLARE: the bits of one process, with a cache on disk and one in memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from images import EXPERIMENT
from typer.testing import CliRunner

from data_prep.__main__ import app
from fedbn.federation.changes import with_changes
from fedbn.federation.experiment import read_experiment
from fedbn.federation.job_folder import write_job
from fedbn.federation.results import weights_digest
from fedbn.federation.site_state import (
    LOCAL_ENTRIES,
    SHARED_WEIGHTS,
    load_checkpoint,
)

pytestmark = pytest.mark.slow
JOB = Path(__file__).parents[2] / "jobs" / "cells_fedbn"


@pytest.mark.parametrize("threads", [1, 2])
def test_a_simulator_run_equals_one_process(tmp_path, simulation_of, in_process, threads):
    data = tmp_path / "data"
    options = ["--subjects", "10", "--sites", "NORTH,EAST", "--out", str(data)]
    assert CliRunner().invoke(app, ["synthetic", "--images", *options]).exit_code == 0
    changes = EXPERIMENT | {"compare_with_alone": threads == 2}
    write_job(JOB, tmp_path / "job", with_changes(read_experiment(JOB), changes))
    run = simulation_of(tmp_path, data).run("-n", "2", "-t", str(threads)).succeeded()
    expected = in_process(run)
    shared, _ = load_checkpoint(run.shared_file, SHARED_WEIGHTS)
    assert weights_digest(shared) == expected.report["shared_weights_sha256"]
    for site, kept in expected.local.items():
        local, _ = load_checkpoint(run.state(site) / "local_entries.pt", LOCAL_ENTRIES)
        assert all(torch.equal(local[name], tensor) for name, tensor in kept.items())
        found, own = run.results["sites"][site], expected.report["sites"][site]
        assert {key: found[key] for key in own} == own
        (cache,) = run.workspace.glob(f"*/fedbn_images/{site}")
        assert list(cache.rglob("*.pt"))
        shutil.rmtree(cache)
