"""Entries that most networks do not have: the same bits in FLARE and in one process."""

from __future__ import annotations

import json
from pathlib import Path

import odd_networks
import pytest

from fedbn.federation.results import weights_digest
from fedbn.federation.simulation import read_sites, run_federation
from fedbn.federation.site_state import (
    COMPLETE_MODEL,
    LOCAL_ENTRIES,
    SHARED_WEIGHTS,
    load_checkpoint,
)

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
    workflow = make_workflow(**changes)
    workflow.run()
    assert workflow.engine.panics == []
    found = json.loads((Path(workflow.get_run_dir()) / "results.json").read_text())

    settings = experiment(sites=SITES, **changes)
    expected = run_federation(settings, read_sites(data_root, settings))
    assert found["shared_weights_sha256"] == expected.report["shared_weights_sha256"]
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
