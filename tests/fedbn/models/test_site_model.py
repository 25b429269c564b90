"""A site's complete model is found or joined; the shared weights alone are refused."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from data_prep.site_store import StoreError, read_site_store
from fedbn.federation.site_state import SiteStateError
from fedbn.models.site_model import BundleError, find_kept_model, site_facts


@pytest.fixture
def copied(finished_run, tmp_path):
    """A workspace that a test may damage."""
    shutil.copytree(finished_run.workspace, tmp_path / "workspace")
    return tmp_path / "workspace"


def store_of(run, site="NYU"):
    return read_site_store(run.data / site)


def test_the_model_is_found_from_any_folder_above_it(finished_run):
    places = [
        finished_run.workspace,
        finished_run.workspace / "site-1",
        finished_run.folder("NYU"),
        finished_run.folder("NYU") / "model.pt",
    ]
    found = [find_kept_model(place, "NYU") for place in places]
    state = found[0].model.state_dict()
    assert found[0].job == "a_job"
    assert all(
        torch.equal(state[k], v) for kept in found for k, v in kept.model.state_dict().items()
    )


def test_the_parts_join_to_the_same_model(finished_run, copied):
    kept = find_kept_model(finished_run.workspace, "NYU")
    (copied / "site-1" / "fedbn_sites" / "a_job" / "NYU" / "model.pt").unlink()
    joined = find_kept_model(copied, "NYU", data=finished_run.data)
    state = joined.model.state_dict()
    assert all(torch.equal(state[k], v) for k, v in kept.model.state_dict().items())
    assert joined.signature == kept.signature
    assert "local entries" in joined.origin


def test_without_its_model_a_site_needs_its_store_and_the_shared_weights(finished_run, copied):
    folder = copied / "site-1" / "fedbn_sites" / "a_job" / "NYU"
    (folder / "model.pt").unlink()
    with pytest.raises(BundleError, match="its store is needed too; name its folder with --data"):
        find_kept_model(copied, "NYU")
    with pytest.raises(BundleError, match=r"holds 0 files FL_global_model\.pt to join"):
        find_kept_model(copied / "site-1", "NYU", data=finished_run.data)


def test_the_shared_weights_alone_are_refused_with_the_reason(finished_run):
    server = finished_run.workspace / "server"
    with pytest.raises(SiteStateError, match=r"without any site's batch norm and cannot predict"):
        find_kept_model(next(server.rglob("FL_global_model.pt")), "NYU")
    with pytest.raises(BundleError, match=r"batch norm and cannot predict: export at the site"):
        find_kept_model(server, "NYU")


def test_other_refusals(finished_run, copied, tmp_path):
    with pytest.raises(BundleError, match=r"holds no model of site 'USM', only of NYU, UM$"):
        find_kept_model(finished_run.workspace, "USM")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        BundleError, match=r"empty holds no site's model; give the workspace of .* or a model\.pt$"
    ):
        find_kept_model(tmp_path / "empty", "NYU")
    with pytest.raises(BundleError, match="does not exist"):
        find_kept_model(tmp_path / "nowhere", "NYU")
    with pytest.raises(BundleError, match=r"no fine-tuned model in .*without --finetuned"):
        find_kept_model(finished_run.workspace, "NYU", finetuned=True)
    with pytest.raises(BundleError, match=r"is the model of site 'UM', not of 'NYU'"):
        find_kept_model(finished_run.folder("UM") / "model.pt", "NYU")
    jobs = copied / "site-1" / "fedbn_sites"
    shutil.copytree(jobs / "a_job", jobs / "b_job")
    with pytest.raises(BundleError, match=r"from 2 jobs \(a_job, b_job\)"):
        find_kept_model(copied, "NYU")


def test_facts_of_the_store_agree_with_the_results(finished_run):
    kept = find_kept_model(finished_run.workspace, "UM")
    facts = site_facts(kept, finished_run.workspace, store_of(finished_run, "UM"))
    reported = finished_run.results["sites"]["UM"]
    assert facts.scores == reported["federated"]
    assert facts.experiment == finished_run.experiment
    assert facts.training["n_train_subjects"] == reported["n_train_subjects"]
    assert 0 <= facts.site_threshold <= 1
    low, median, high = facts.distances["features"]
    assert 0 < low < median < high
    assert 0.2 < median < 1.5, "over all training samples the mean is 1"
    assert facts.reference["n_timepoints"] == [60, 60, 60]


def test_facts_without_the_store(finished_run):
    kept = find_kept_model(finished_run.workspace, "UM")
    facts = site_facts(kept, finished_run.workspace, None)
    assert facts.scores == finished_run.results["sites"]["UM"]["federated"]
    assert facts.distances is None
    at_the_site = site_facts(kept, finished_run.workspace / "site-2", None)
    assert at_the_site.scores is None
    assert at_the_site.training["n_test_subjects"] == 5


def test_a_model_of_the_finetuned_network_is_taken_where_it_is_asked_for(finished_run, copied):
    folder = copied / "site-1" / "fedbn_sites" / "a_job" / "NYU"
    shutil.copy(folder / "model.pt", folder / "model_finetuned.pt")
    kept = find_kept_model(copied, "NYU", finetuned=True)
    assert kept.finetuned
    facts = site_facts(kept, copied, store_of(finished_run))
    assert facts.scores == finished_run.results["sites"]["NYU"]["federated"], "scored here"
    assert site_facts(kept, copied, None).scores is None, "the results have none of it"


def test_results_of_another_run_are_noticed(finished_run, copied):
    results = json.loads((copied / "server" / "a_job" / "results.json").read_text())
    results["sites"]["NYU"]["federated"]["subject"]["accuracy"] += 0.2
    (copied / "server" / "a_job" / "results.json").write_text(json.dumps(results))
    kept = find_kept_model(copied, "NYU")
    with pytest.raises(BundleError, match=r"results.json says a subject accuracy of .* not of one"):
        site_facts(kept, copied, store_of(finished_run))


def test_another_store_is_refused(finished_run, tmp_path, make_series_store):
    kept = find_kept_model(finished_run.workspace, "NYU")
    for name, changes in (("again", {}), ("other", {"atlas": "other regions"})):
        make_series_store(tmp_path / name, "NYU", np.random.default_rng(1), **changes)
    for store, sentence in (
        (read_site_store(tmp_path / "again"), r"the store at .* has changed since the run"),
        (read_site_store(tmp_path / "other"), "atlas: eight regions and other regions"),
        (store_of(finished_run, "UM"), "is the store of site 'UM'"),
    ):
        with pytest.raises(StoreError, match=sentence):
            site_facts(kept, finished_run.workspace, store)
