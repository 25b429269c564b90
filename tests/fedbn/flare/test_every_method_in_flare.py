"""Every method's job gives the bits of the in-process run: FLARE's components, no processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_prep.site_store import read_site_store
from fedbn.federation.experiment import read_experiment
from fedbn.federation.results import weights_digest
from fedbn.federation.simulation import run_federation
from fedbn.federation.site_state import LOCAL_ENTRIES, load_checkpoint
from fedbn.study.methods import METHODS, flare_experiment

JOBS = Path(__file__).parents[3] / "jobs"
SITES = ("NYU", "UM", "USM")
OF_THE_METHOD = ("policy", "algorithm", "finetune")
IN_FLARE = [name for name, method in METHODS.items() if method.in_flare]


def changes_of(name):
    """What the method's own job says, at a size at which it takes a moment."""
    job = flare_experiment(name, read_experiment(JOBS / "abide_fedbn")).model_dump()
    changes = {field: job[field] for field in OF_THE_METHOD}
    changes["training"] = job["training"] | {"batch_size": 16, "local_epochs": 1}
    if name == "clustered":
        changes["algorithm"] |= {"split_mean_norm": 100.0, "split_site_norm": 0.001}
    return changes


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_FLARE)
def test_a_method_s_job_has_the_bits_of_the_in_process_run(
    make_workflow, experiment, data_root, tmp_path, name
):
    changes = changes_of(name)
    workflow = make_workflow(**changes)
    workflow.run()
    assert workflow.engine.panics == []
    found = json.loads((Path(workflow.get_run_dir()) / "results.json").read_text())

    stores = {site: read_site_store(data_root / site) for site in SITES}
    expected = run_federation(experiment(sites=SITES, **changes), stores)
    assert found["shared_weights_sha256"] == expected.report["shared_weights_sha256"]
    assert found["across_sites"] == expected.report["across_sites"]
    assert ("finetuned" in found["across_sites"]) == ("finetune" in name)
    for site in SITES:
        (path,) = tmp_path.glob(f"workspaces/{site}/fedbn_sites/*/{site}/local_entries.pt")
        local, _ = load_checkpoint(path, LOCAL_ENTRIES)
        assert weights_digest(local) == weights_digest(expected.local[site])
    if name == "clustered":
        assert len(found["rounds"][-1]["groups"]) > 1
