"""The same numbers, whatever carries the weights; nothing half-written after a kill."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from fedbn.core.normalization import split
from fedbn.federation.results import weights_digest
from fedbn.federation.site import make_network
from fedbn.federation.site_state import LOCAL_ENTRIES, SHARED_WEIGHTS, load_checkpoint

pytestmark = pytest.mark.slow

METHODS_BY_JOB = ("singleset", "fedbn_fedprox", "fedbn_scaffold", "clustered", "fedavg_finetune")
SAME_IN_EVERY_TRANSPORT = ("experiment", "shared_weights_sha256", "across_sites", "synthetic")


def assert_same_bits(left, right):
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name]), name


def assert_equals_in_process(run, result):
    """Compare weights, site states and all scores of a simulator run and an in-process run."""
    saved, facts = load_checkpoint(run.shared_file, SHARED_WEIGHTS)
    shared = {name: tensor for name, tensor in saved.items() if ":site " not in name}
    assert_same_bits(shared, result.shared)
    assert run.results["shared_weights_sha256"] == weights_digest(shared)
    assert facts["policy"] == run.experiment.policy
    for site in run.experiment.sites:
        local, meta = load_checkpoint(run.state(site) / "local_entries.pt", LOCAL_ENTRIES)
        assert_same_bits(local, result.local[site])
        assert meta["round"] == run.experiment.rounds - 1
    found, expected = run.results, result.report
    for key in SAME_IN_EVERY_TRANSPORT:
        assert found[key] == expected[key], key
    for site, scores in expected["sites"].items():
        assert {key: found["sites"][site][key] for key in scores} == scores
    assert [record["accepted"] for record in found["rounds"]] == [
        record["accepted"] for record in expected["rounds"]
    ]


def test_a_thread_for_each_client_equals_the_in_process_run(fedbn_run, in_process):
    result = in_process(fedbn_run)
    assert_equals_in_process(fedbn_run, result)
    locals_ = list(result.local.values())
    assert not torch.equal(*(entries["hidden.0.norm.running_mean"] for entries in locals_))


def test_fedavg_equals_the_in_process_run(fedavg_run, in_process):
    result = in_process(fedavg_run)
    assert_equals_in_process(fedavg_run, result)
    assert "hidden.0.norm.running_mean" in result.shared
    for entries in result.local.values():
        assert list(entries) == ["hidden.0.norm.num_batches_tracked"]


def test_the_recipe_names_in_another_order_and_silobn_equal_the_in_process_run(
    simulation, in_process
):
    run = simulation(policy="silobn", compare_with_alone=True, rounds=1)
    run.run_recipe("UM", "NYU").succeeded()
    result = in_process(run)
    assert_equals_in_process(run, result)
    assert "alone" in run.results["sites"]["NYU"]
    assert "hidden.0.norm.weight" in result.shared
    assert "hidden.0.norm.running_var" in result.local["UM"]
    assert {site: report["client"] for site, report in run.results["sites"].items()} == {
        "NYU": "NYU",
        "UM": "UM",
    }


def test_a_killed_run_leaves_nothing_half_written_and_the_next_one_is_undisturbed(
    simulation, in_process
):
    """The second run is the bare command: one thread, so that each task is a new process."""
    run = simulation(rounds=1)
    with run.start("-n", "2", "-t", "2") as running:
        running.wait_until(lambda: list(run.workspace.glob("*/fedbn_sites/**/round_000000.npz")))
        running.kill()
    files = [path for path in run.workspace.rglob("*") if path.is_file()]
    checkpoints = [path for path in files if path.suffix == ".pt"]
    assert any(path.name == "local_entries.pt" for path in checkpoints)
    for path in checkpoints:
        assert torch.load(path, weights_only=True)["format"]
    for path in (path for path in files if path.suffix == ".npz"):
        with np.load(path) as arrays:
            assert arrays.files
    assert not run.run_folder.joinpath("results.json").exists()

    run.run("-n", "2").succeeded()
    assert not [path for path in run.workspace.rglob("*.partial") if "fedbn_sites" in str(path)]
    assert_equals_in_process(run, in_process(run))


def test_the_network_of_the_runs_has_what_the_tests_look_for(fedbn_run):
    network, partition = make_network(fedbn_run.experiment)
    assert partition == split(network, "fedbn")
    assert len(partition.local) == 5


@pytest.fixture(scope="module")
def method_runs(simulation):
    """Start the simulator for every method, three at a time; a simulator mostly waits."""
    with ThreadPoolExecutor(3) as pool:
        runs = {}
        for method in METHODS_BY_JOB:
            changes = {"training.batch_size": 16, "training.local_epochs": 1}
            if method == "clustered":
                changes["sites"] = ["NYU", "UM", "USM"]
                changes["algorithm.split_mean_norm"] = 100.0
                changes["algorithm.split_site_norm"] = 0.001
            run = simulation(method=method, **changes)
            n_sites = str(len(run.experiment.sites))
            runs[method] = pool.submit(run.run, "-n", n_sites, "-t", n_sites)
        yield runs
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("method", METHODS_BY_JOB)
def test_each_method_s_job_equals_the_in_process_run(method_runs, in_process, method):
    """FedBN, FedAvg and SiloBN are above; the wiring of all jobs is asserted to be the same.

    All methods, these and the rest, run as FLARE's components in `test_every_method_in_flare.py`.
    """
    run = method_runs[method].result().succeeded()
    result = in_process(run)
    assert_equals_in_process(run, result)
    assert ("finetuned" in result.report["across_sites"]) == ("finetune" in method)
    for found, expected in zip(run.results["rounds"], result.report["rounds"], strict=True):
        assert {key: found[key] for key in expected} == expected
    if method == "clustered":
        assert len(run.results["rounds"][-1]["groups"]) == 3
    if method == "singleset":
        assert result.shared == {}
