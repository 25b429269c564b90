"""The files that a run leaves at the server and at each site."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data_prep.site_store import read_site_store
from fedbn.core.networks import build_network
from fedbn.federation.results import without_nan
from fedbn.federation.site import split_fitted
from fedbn.federation.site_state import (
    COMPLETE_MODEL,
    SHARED_WEIGHTS,
    SiteStateError,
    load_checkpoint,
    read_scores_file,
)
from fedbn.tasks.classification import predict

pytestmark = pytest.mark.slow


@pytest.fixture(params=["NYU", "UM"])
def site(request):
    return request.param


def complete_model(run, site):
    """Return a site's network, and what its task fitted, made from its model.pt alone."""
    tensors, meta = load_checkpoint(run.state(site) / "model.pt", COMPLETE_MODEL)
    description = meta["facts"]["network"]
    network = build_network(description["name"], description["args"])
    own, fitted = split_fitted(tensors)
    network.load_state_dict(own, strict=True)
    return network, fitted


def held_out(run, site, fitted):
    task, data = run.experiment.task, read_site_store(run.data / site)
    return task.samples(data, task.split(data, run.experiment).test, fitted, torch.device("cpu"))


def test_the_servers_file_is_loadable_and_says_that_it_is_not_complete(fedbn_run):
    content = torch.load(fedbn_run.shared_file, weights_only=True)
    assert content["complete_model"] is False
    assert content["kind"] == SHARED_WEIGHTS
    assert not [name for name in content["model"] if "norm" in name]
    with pytest.raises(SiteStateError, match="without any site's batch norm and cannot predict"):
        load_checkpoint(fedbn_run.shared_file, COMPLETE_MODEL)


def test_a_sites_model_predicts_the_accuracy_of_the_results(fedbn_run, site):
    assert torch.load(fedbn_run.state(site) / "model.pt", weights_only=True)["complete_model"]
    network, fitted = complete_model(fedbn_run, site)
    task = fedbn_run.experiment.task
    found = task.score(network, held_out(fedbn_run, site, fitted))
    assert without_nan(task.measure(found)) == fedbn_run.results["sites"][site]["federated"]
    kept = read_scores_file(next(fedbn_run.state(site).rglob("final.npz")))["federated"]
    assert np.allclose(found.columns["p_1"], kept.columns["p_1"], atol=1e-6)


def test_with_another_sites_batch_norm_the_outputs_differ(fedbn_run, site):
    other = {"NYU": "UM", "UM": "NYU"}[site]
    network, fitted = complete_model(fedbn_run, site)
    foreign, _ = complete_model(fedbn_run, other)
    for name, tensor in network.state_dict().items():
        same = torch.equal(tensor, foreign.state_dict()[name])
        assert same == ("norm" not in name or name.endswith("num_batches_tracked")), name
    samples = held_out(fedbn_run, site, fitted)
    assert np.abs(predict(network, samples)[0] - predict(foreign, samples)[0]).max() > 1e-3


def test_the_results_hold_counts_and_scores_and_nothing_of_a_subject(fedbn_run):
    text = (fedbn_run.run_folder / "results.json").read_text()
    assert "sub-" not in text
    assert str(fedbn_run.data) not in text
    assert fedbn_run.results["not_scored"] == {}
    assert "what each site gained" in fedbn_run.output
    assert (fedbn_run.run_folder / "results.txt").read_text() in fedbn_run.output
