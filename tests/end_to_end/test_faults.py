"""What goes wrong at a site or in its data: one sentence, an exit code, and the rest goes on."""

from __future__ import annotations

import re

import pytest
import torch

from fedbn.federation.site_state import SHARED_WEIGHTS, load_checkpoint

pytestmark = pytest.mark.slow

MISBEHAVING = '''
import time
from pathlib import Path

import numpy as np
from fedbn.flare.job import REPORT
from fedbn.flare.learner import FedBNLearner


class Learner(FedBNLearner):
    """At UM, do something else that is wrong in each round."""

    def train(self, model):
        if self.site_name != "site-2":
            return super().train(model)
        number = model.current_round
        if number == 4:
            raise KeyError("sub-UM04 in /home/someone/data")
        if number == 5:
            (path,) = Path(self.workspace_root).glob("fedbn_sites/*/UM/local_entries.pt")
            content = bytearray(path.read_bytes())
            middle = len(content) // 2
            content[middle : middle + 64] = bytes(byte ^ 255 for byte in content[middle:][:64])
            path.write_bytes(content)
        if number == 8:
            (path,) = Path(self.workspace_root).glob("fedbn_sites/*/UM/local_entries.pt")
            path.unlink()
        if number == 6:  # silent until the others have gone on without this site
            saved = Path(self.workspace_root).parent / "server/simulate_job/app_server"
            saved = saved / "FL_global_model.pt"
            before, end = saved.stat().st_mtime_ns, time.monotonic() + 60
            while saved.stat().st_mtime_ns == before and time.monotonic() < end:
                time.sleep(0.05)
        answer = super().train(model)
        name = "classifier.weight"
        if number == 0:
            answer.params[name] = np.full_like(answer.params[name], np.nan)
        if number == 1:
            answer.params[name] = answer.params[name][:1]
        if number == 2:
            answer.params["sub-UM07"] = np.zeros(3, np.float32)
        if number == 3:
            answer.params["hidden.0.norm.running_mean"] = np.full(8, 777, np.float32)
            answer.meta[REPORT] |= {
                "training_loss": ["low", float("inf")],
                "before_training": {"subject_accuracy": float("-inf"), "more": {"x": [1]}},
                "n_steps": {"a": 1},
            }
        return answer
'''

REFUSED = {
    0: r"'classifier.weight' holds 16 values of 16 that are not finite",
    1: r"'classifier.weight' is \(1, 8\) torch.float32, expected \(2, 8\)",
    2: r"1 unknown \(<subject>\)",
    4: r"error code EXECUTION_EXCEPTION",
    5: r"site 'UM': local entries file <path> is (damaged|corrupted)",
    7: r"site 'UM': local entries file <path> is (damaged|corrupted)",
    8: r"site 'UM': its batch norm of this job is missing in <path>",
}


@pytest.fixture(scope="module")
def faulty_run(simulation):
    run = simulation(
        sites=["NYU", "UM", "USM"],
        rounds=9,
        learner=MISBEHAVING,
        workflow={"min_sites": 2, "grace_seconds": 5},
    )
    return run.run("-n", "3", "-t", "3", record=True).succeeded()


def test_a_faulty_site_costs_only_its_own_contribution(faulty_run):
    records = {record["round"]: record for record in faulty_run.results["rounds"]}
    for number, record in records.items():
        if number == 3:
            assert record["accepted"] == ["NYU", "UM", "USM"]
            continue
        assert record["accepted"] == ["NYU", "USM"], number
        if number == 6:
            assert record["missing"] == ["UM"]
            assert record["refused"] == {}
        else:
            assert re.search(REFUSED[number], record["refused"]["UM"]), record["refused"]
            assert record["missing"] == []


def test_batch_norm_that_a_site_sends_is_dropped_and_noted(faulty_run):
    record = faulty_run.results["rounds"][3]
    assert record["dropped_local_entries"] == {"UM": 1}
    assert "site-2 sent 1 entries that belong to its batch norm" in faulty_run.output
    for report in (r for r in faulty_run.results["rounds"] if r["round"] != 3):
        assert report["dropped_local_entries"] == {}


def test_numbers_that_are_none_are_left_out_of_the_report(faulty_run):
    numbers = faulty_run.results["rounds"][3]["sites"]["UM"]
    assert numbers["training_loss"] == [None, None]
    assert numbers["before_training"] == {
        "window_accuracy": None,
        "subject_accuracy": None,
        "cross_entropy": None,
    }
    assert numbers["n_steps"] is None
    assert numbers["n_samples"] == 36


def test_the_shared_weights_stay_finite(faulty_run):
    shared, _ = load_checkpoint(faulty_run.shared_file, SHARED_WEIGHTS)
    assert all(torch.isfinite(tensor).all() for tensor in shared.values())
    assert max(tensor.abs().max() for tensor in shared.values()) < 10


def test_a_site_whose_state_is_gone_is_not_scored_and_named_and_gets_no_new_one(faulty_run):
    results = faulty_run.results
    assert sorted(results["sites"]) == ["NYU", "USM"]
    assert re.search(
        "site 'UM': its batch norm of this job is missing", results["not_scored"]["UM"]
    )
    assert not (faulty_run.state("UM") / "local_entries.pt").exists()
    assert (faulty_run.state("NYU") / "local_entries.pt").exists()


def test_not_even_an_error_tells_of_a_subject_or_a_path(faulty_run):
    frames = faulty_run.frames()
    for needle in (b"sub-UM04", b"/home/someone", str(faulty_run.workspace).encode() + b"/site-2"):
        assert not [pid for pid, sent in frames.items() if needle in sent], needle
    assert "sub-UM" not in (faulty_run.run_folder / "results.json").read_text()


def test_a_store_of_another_window_ends_the_run_with_the_difference(
    simulation, tmp_path, write_store
):
    write_store(tmp_path / "NYU", "NYU")
    write_store(tmp_path / "UM", "UM", changes={"window": 32})
    run = simulation(stores=tmp_path).run("-n", "2", "-t", "2")
    assert run.code not in (0, None)
    assert re.search(
        r"preflight failed: the stores of NYU and UM do not fit together: .*window.*20.*32",
        run.output,
    )
    assert not run.shared_file.exists()
