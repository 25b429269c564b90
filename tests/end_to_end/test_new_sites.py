"""A hospital that takes no part gets its model from a run whose sites were willing."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from fedbn.__main__ import app
from fedbn.federation.site_state import COMPLETE_MODEL, LOCAL_ENTRIES, load_checkpoint
from fedbn.models.new_site import AFFINE, AFFINE_FILE

pytestmark = pytest.mark.slow

NORM = "hidden.0.norm"
FILTER = {"path": "fedbn.flare.filters.BatchNormFilter", "args": {"policy": "fedbn"}}


def test_willing_sites_gamma_and_beta_travel_once_past_their_own_filter_and_nothing_else(
    simulation, tmp_path
):
    run = simulation()
    local = run.workspace / "local"
    local.mkdir(parents=True)
    (local / "fedbn_site.yml").write_text("share_affine: true\n")
    scope = {"name": "hospital", "task_result_filters": [FILTER]}
    (local / "privacy.json").write_text(
        json.dumps({"scopes": [scope], "default_scope": "hospital"})
    )
    run.run("-n", "2", "-t", "2", record=True).succeeded()
    frames = run.frames()
    kept, _ = load_checkpoint(run.shared_file.parent / AFFINE_FILE, AFFINE)
    of_sites = [
        load_checkpoint(run.state(site) / "local_entries.pt", LOCAL_ENTRIES)[0]
        for site in ("NYU", "UM")
    ]
    for name, tensor in kept.items():
        mean = torch.stack([own[name] for own in of_sites]).double().mean(dim=0).float()
        assert torch.equal(tensor, mean)
    for own in of_sites:
        for name, tensor in own.items():
            senders = [pid for pid, sent in frames.items() if tensor.numpy().tobytes() in sent]
            if name in kept:
                assert len(senders) == 1, f"{name}: one client sends it"
            elif tensor.is_floating_point():
                assert senders == [], f"{name} was sent"
    assert set(kept) == {f"{NORM}.weight", f"{NORM}.bias"}

    new = tmp_path / "new" / "USM"
    shutil.copytree(run.data / "USM", new)
    arguments = ["adapt", "--run", run.workspace, "--data", new, "--out", tmp_path / "out"]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    assert "gamma and beta: mean over NYU, UM" in done.output
    model, meta = load_checkpoint(tmp_path / "out" / "model.pt", COMPLETE_MODEL)
    assert meta["site"] == "USM"
    assert all(torch.equal(model[name], kept[name]) for name in kept)
    shared = run.results["shared_weights_sha256"]
    report = json.loads((tmp_path / "out" / "adaptation.json").read_text())
    assert report["used"]["shared weights"] == f"sha256 {shared}"
    assert report["stores compared"]
