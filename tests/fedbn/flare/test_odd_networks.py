"""Entries that most networks do not have: the same bits in FLARE and in one process."""

from __future__ import annotations

import json
from pathlib import Path

import odd_networks
import pytest
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from typer.testing import CliRunner

from fedbn.__main__ import app
from fedbn.federation.results import weights_digest
from fedbn.federation.simulation import read_sites, run_federation
from fedbn.federation.site_state import (
    COMPLETE_MODEL,
    LOCAL_ENTRIES,
    SHARED_WEIGHTS,
    load_checkpoint,
)
from fedbn.flare.doctor import FAILED, WARNING, examine
from fedbn.flare.filters import BatchNormFilter
from fedbn.flare.job import to_arrays

SITES = ("NYU", "UM", "USM")
SGD = {"optimizer": "sgd", "learning_rate": 0.05, "batch_size": 16, "local_epochs": 1}
METHODS = {
    "fedbn": {},
    "fedprox": {"training": SGD | {"proximal_mu": 0.1}, "policy": "silobn"},
    "scaffold": {"training": SGD, "algorithm": {"name": "scaffold"}},
    "clustered": {
        "training": SGD,
        "algorithm": {"name": "clustered", "split_mean_norm": 100, "split_site_norm": 0.001},
        "policy": "none",
    },
}


def kept(root, name, kind):
    (path,) = root.rglob(f"{name}.pt")
    return load_checkpoint(path, kind)[0]


NETWORKS = (
    "EmptyBuffer",
    "EmptyParameter",
    "BFloat16",
    "BFloat16Norm",
    "Float16",
    "Float64",
    "Complex64",
    "Complex128",
    "WeightNorm",
    "SpectralNorm",
    "ParametrizedNorms",
    "OwnBesideStock",
)
CASES = [(network, "fedbn") for network in NETWORKS]
CASES += [(n, method) for n in ("BFloat16", "Complex64") for method in METHODS if method != "fedbn"]


@pytest.mark.slow
@pytest.mark.parametrize(("network", "method"), CASES)
def test_any_floating_entry_has_the_bits_of_the_in_process_run(
    make_workflow, experiment, data_root, tmp_path, monkeypatch, network, method
):
    monkeypatch.setenv("FEDBN_ALLOW_NETWORKS", f"odd_networks.{network}")
    changes = {"network": {"name": f"odd_networks.{network}"}, **METHODS[method]}
    if network == "OwnBesideStock":
        changes["batch_norm_types"] = ("odd_networks.OwnNorm",)
    workflow = make_workflow(**changes)
    workflow.run()
    assert workflow.engine.panics == []
    found = json.loads((Path(workflow.get_run_dir()) / "results.json").read_text())

    settings = experiment(sites=SITES, **changes)
    expected = run_federation(settings, read_sites(data_root, settings))
    assert found["shared_weights_sha256"] == expected.report["shared_weights_sha256"]
    if network == "OwnBesideStock":
        assert "own.mean" in expected.local["NYU"]
        assert "own.mean" not in expected.shared
    saved = load_checkpoint(workflow.persistor.path(workflow.fl_ctx), SHARED_WEIGHTS)[0]
    shared = {name: saved[name] for name in expected.shared}
    assert weights_digest(shared) == weights_digest(expected.shared)
    state = getattr(odd_networks, network)().state_dict()
    for site in SITES:
        root = tmp_path / "workspaces" / site
        local = kept(root, "local_entries", LOCAL_ENTRIES)
        assert weights_digest(local) == weights_digest(expected.local[site])
        model = kept(root, "model", COMPLETE_MODEL)
        assert {n: (model[n].dtype, model[n].shape) for n in state} == {
            n: (t.dtype, t.shape) for n, t in state.items()
        }


@pytest.fixture
def commands(make_workflow, experiment, write_experiment, data_root, tmp_path, monkeypatch):
    """Return a function that gives what `fedbn run`, FLARE and the doctor say of a network."""

    def say(network, **changes):
        changes["network"] = {"name": f"odd_networks.{network}"}
        monkeypatch.setenv("FEDBN_ALLOW_NETWORKS", f"odd_networks.{network}")
        settings = experiment(sites=SITES, **changes)
        write_experiment(tmp_path / "job" / "app" / "config", settings)
        workflow = make_workflow(job=f"job-{len(changes)}", **changes)
        workflow.run()
        ran = CliRunner().invoke(app, ["run", f"{tmp_path / 'job'}", "--data", f"{data_root}"])
        own = tmp_path / "fedbn_site.yml"
        own.write_text(f"site: NYU\ndata: {data_root / 'NYU'}\n")
        found = [(f.status, f.sentence) for f in examine(None, own, tmp_path / "job")]
        return workflow.engine.panics, ran, found

    return say


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        ("NoStatistics", "batch-norm layer 'norm' of network NoStatistics keeps no running stat"),
        ("NoEntries", "batch-norm layer 'norm' of network NoEntries keeps no running statistics"),
        ("Lazy", "entry 'norm.weight' of Lazy has no shape yet; give its layer the sizes where"),
    ],
)
def test_a_network_that_cannot_be_federated_is_refused_before_round_0(commands, network, reason):
    panics, ran, found = commands(network)
    assert panics
    assert {panic.startswith(reason) for panic in panics} == {True}
    assert ran.exit_code == 1
    assert ran.output.startswith(f"fedbn: {reason}")
    (sentence,) = [sentence for status, sentence in found if status == FAILED]
    assert sentence.startswith(reason)


def test_shared_entries_that_look_like_statistics_are_told_of(commands, caplog):
    doubt = "2 shared entries look like running statistics of a layer that is no batch norm"
    panics, ran, found = commands("OwnBesideStock")
    assert panics == []
    assert ran.exit_code == 0, ran.output
    assert f"fedbn: {doubt}" in ran.output
    assert f"site 'NYU': {doubt}" in caplog.text
    assert [s for status, s in found if status == WARNING and s.startswith(doubt)]
    assert FAILED not in dict(found)
    caplog.clear()
    panics, ran, found = commands("OwnBesideStock", batch_norm_types=("odd_networks.OwnNorm",))
    assert panics == []
    assert ran.exit_code == 0, ran.output
    assert doubt not in ran.output + caplog.text + str(found)


def test_statistics_that_cannot_be_recomputed_are_told_before_round_0(commands):
    own = {"batch_norm_types": ("odd_networks.OwnNorm",), "statistics": "recomputed"}
    panics, ran, found = commands("OwnBesideStock", **own)
    for said in (panics[0], ran.output, dict(found)[FAILED]):
        assert "layer 'own' is a OwnNorm, which is none of PyTorch's batch norms" in said


def test_a_job_that_names_a_class_which_no_module_has_is_refused(commands):
    panics, ran, found = commands("OwnBesideStock", batch_norm_types=("odd_networks.Net2",))
    for said in (panics[0], ran.output, dict(found)[FAILED]):
        assert "batch_norm_types names 'odd_networks.Net2', and no module of the network is" in said


def test_the_site_s_own_filter_keeps_what_the_job_says_is_batch_norm(
    make_context, experiment, monkeypatch
):
    monkeypatch.setenv("FEDBN_ALLOW_NETWORKS", "odd_networks.OwnBesideStock")
    settings = experiment(
        network={"name": "odd_networks.OwnBesideStock"}, batch_norm_types=("odd_networks.OwnNorm",)
    )
    state = to_arrays(odd_networks.OwnBesideStock().state_dict())
    result = DXO(DataKind.WEIGHTS, state).to_shareable()
    passed = from_shareable(BatchNormFilter().process(result, make_context(settings, name="NYU")))
    left = {"hidden.weight", "hidden.bias", "classifier.weight", "classifier.bias"}
    assert set(passed.data) == left
