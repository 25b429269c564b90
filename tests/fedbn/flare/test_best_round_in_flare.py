"""The best round in FLARE's components: the bits of the in-process run, and what a site keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedbn.federation.simulation import read_sites, run_federation
from fedbn.federation.site_state import COMPLETE_MODEL, load_checkpoint

SITES = ("NYU", "UM", "USM")
CHANGES = {
    "validation": {"share": 0.3},
    "rounds": 5,
    "training": {"batch_size": 8, "local_epochs": 1, "learning_rate": 0.3},
    "finetune": {"epochs": 1},
    "compare_with_alone": True,
}


@pytest.fixture
def run(make_workflow, experiment, data_root):
    """Run a job with FLARE's components, and the same experiment in this process."""

    def both(**changes):
        workflow = make_workflow(**CHANGES | changes)
        workflow.run()
        assert workflow.engine.panics == []
        settings = experiment(sites=SITES, **CHANGES | changes)
        expected = run_federation(settings, read_sites(data_root, settings))
        return (
            workflow,
            json.loads((Path(workflow.get_run_dir()) / "results.json").read_text()),
            (expected),
        )

    return both


@pytest.mark.parametrize("mode", ["validation", "site_validation"])
def test_the_chosen_round_has_the_bits_of_the_in_process_run(run, tmp_path, mode):
    workflow, found, expected = run(best_round=mode)
    for name in ("shared_weights_sha256", "across_sites", "best_round"):
        assert found[name] == json.loads(json.dumps(expected.report[name])), name
    for site in SITES:
        (path,) = tmp_path.glob(f"workspaces/{site}/fedbn_sites/*/{site}/model.pt")
        model, _ = load_checkpoint(path, COMPLETE_MODEL)
        for name, tensor in expected.local[site].items():
            assert model[name].equal(tensor), (site, name)
    if mode == "validation":
        saved, _facts = load_checkpoint(workflow.persistor.path(workflow.fl_ctx), "shared weights")
        assert saved.keys() == expected.shared.keys()
        assert all(saved[name].equal(tensor) for name, tensor in expected.shared.items())


def test_patience_ends_the_job_where_it_ends_the_in_process_run(run):
    _, found, expected = run(rounds=30, patience=1)
    assert len(found["rounds"]) == len(expected.report["rounds"]) < 30
    assert found["best_round"] == expected.report["best_round"]


def test_a_site_that_missed_the_best_round_takes_its_latest_before_it(make_client, experiment):
    settings = experiment(validation={"share": 0.3}, best_round="validation", rounds=9)
    client = make_client(settings)
    client.ask("preflight")
    shared = client.learner._load_site().initial_shared()
    arrays = {name: tensor.numpy() for name, tensor in shared.items()}
    client.ask("train", arrays, 0, prepared=["NYU"])
    kept, number = client.learner._load_state().load_local()
    assert number == 0
    client.restart()  # absent in round 1, which is the best
    client.ask("train", arrays, 2, prepared=["NYU"], best=1)
    client.restart()
    _, local, best, _ = client.learner._load_state().load_best()
    assert best == 1
    assert all(local[name].equal(tensor) for name, tensor in kept.items())
