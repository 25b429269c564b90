"""The files that a run leaves at the server and at each site."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data_prep.site_store import read_site_store
from fedbn.core.networks import build_network
from fedbn.federation.site import prepare
from fedbn.federation.site_state import (
    COMPLETE_MODEL,
    SHARED_WEIGHTS,
    SiteStateError,
    load_checkpoint,
)
from fedbn.tasks.evaluation import predict, quick_accuracy

pytestmark = pytest.mark.slow


@pytest.fixture(params=["NYU", "UM"])
def site(request):
    return request.param


def complete_model(run, site):
    """Return a network, with the site's standardisation, made from its model.pt alone."""
    tensors, meta = load_checkpoint(run.state(site) / "model.pt", COMPLETE_MODEL)
    description = meta["facts"]["network"]
    network = build_network(description["name"], description["args"])
    mean, std = tensors.pop("standardization.mean"), tensors.pop("standardization.std")
    network.load_state_dict(tensors, strict=True)
    return network, mean, std


def test_samples(run, site):
    store = read_site_store(run.data / site)
    rows = prepare(site, store, run.experiment).test_rows.numpy()
    owners = store.sample_participant[rows]
    return torch.from_numpy(np.array(store.connectomes[rows])), store.labels[owners], owners


test_samples.__test__ = False


def test_the_servers_file_is_loadable_and_says_that_it_is_not_complete(fedbn_run):
    content = torch.load(fedbn_run.shared_file, weights_only=True)
    assert content["complete_model"] is False
    assert content["kind"] == SHARED_WEIGHTS
    assert not [name for name in content["model"] if "norm" in name]
    with pytest.raises(SiteStateError, match="without any site's batch norm and cannot predict"):
        load_checkpoint(fedbn_run.shared_file, COMPLETE_MODEL)


def test_a_sites_model_predicts_the_accuracy_of_the_results(fedbn_run, site):
    assert torch.load(fedbn_run.state(site) / "model.pt", weights_only=True)["complete_model"]
    network, mean, std = complete_model(fedbn_run, site)
    inputs, targets, owners = test_samples(fedbn_run, site)
    probability = predict(network, (inputs - mean) / std)
    found = quick_accuracy(targets, probability, owners)
    scores = fedbn_run.results["sites"][site]["federated"]
    assert found["window_accuracy"] == scores["window"]["accuracy"]
    assert found["subject_accuracy"] == scores["subject"]["accuracy"]
    kept = np.load(fedbn_run.state(site) / "predictions" / "final.npz")["federated"]
    assert np.allclose(probability, kept, atol=1e-6)


def test_with_another_sites_batch_norm_the_outputs_differ(fedbn_run, site):
    other = {"NYU": "UM", "UM": "NYU"}[site]
    network, mean, std = complete_model(fedbn_run, site)
    foreign, *_ = complete_model(fedbn_run, other)
    for name, tensor in network.state_dict().items():
        same = torch.equal(tensor, foreign.state_dict()[name])
        assert same == ("norm" not in name or name.endswith("num_batches_tracked")), name
    inputs, *_ = test_samples(fedbn_run, site)
    inputs = (inputs - mean) / std
    assert np.abs(predict(network, inputs) - predict(foreign, inputs)).max() > 1e-3


def test_the_results_hold_counts_and_scores_and_nothing_of_a_subject(fedbn_run):
    text = (fedbn_run.run_folder / "results.json").read_text()
    assert "sub-" not in text
    assert str(fedbn_run.data) not in text
    assert fedbn_run.results["not_scored"] == {}
    assert "what each site gained" in fedbn_run.output
    assert (fedbn_run.run_folder / "results.txt").read_text() in fedbn_run.output
