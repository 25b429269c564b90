"""What a FLARE run leaves at a site becomes a bundle that predicts as the results say."""

from __future__ import annotations

import pytest

from data_prep.site_store import read_site_store
from fedbn.models.bundle import export_bundle, read_bundle
from fedbn.models.prediction import held_out_accuracy, predict_files
from fedbn.models.site_model import find_kept_model, site_facts

pytestmark = pytest.mark.slow


def test_each_sites_bundle_has_the_accuracy_of_the_results(fedbn_run, tmp_path):
    probabilities = []
    for site in ("NYU", "UM"):
        kept = find_kept_model(fedbn_run.workspace, site)
        facts = site_facts(kept, fedbn_run.workspace, read_site_store(fedbn_run.data / site))
        export_bundle(kept, facts, tmp_path / site)
        bundle = read_bundle(tmp_path / site)
        right, n = held_out_accuracy(bundle, predict_files(bundle, [fedbn_run.data / site]), 0.5)
        scores = fedbn_run.results["sites"][site]["federated"]["subject"]
        assert (n, right / n) == (scores["n"], scores["accuracy"])
        of_nyu = predict_files(bundle, [fedbn_run.data / "NYU"])
        probabilities.append([prediction.probability[1] for prediction in of_nyu])
    own, other = probabilities
    assert max(abs(a - b) for a, b in zip(own, other, strict=True)) > 1e-3


def test_the_parts_of_a_run_join_to_its_model(fedbn_run):
    """The server's file and what the site keeps between rounds, without its ``model.pt``."""
    kept = find_kept_model(fedbn_run.workspace, "NYU").model.state_dict()
    model = fedbn_run.state("NYU") / "model.pt"
    aside = model.rename(model.with_suffix(".aside"))
    try:
        joined = find_kept_model(fedbn_run.workspace, "NYU", data=fedbn_run.data).model.state_dict()
    finally:
        aside.rename(model)
    assert all((joined[name] == tensor).all() for name, tensor in kept.items())
