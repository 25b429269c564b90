"""Which edges the networks look at: what the numbers are, and when they are called steady."""

from __future__ import annotations

import csv
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from data_prep.harvard_oxford import ROIS
from data_prep.site_store import read_site_store
from fedbn.__main__ import app
from fedbn.federation.simulation import federate, read_sites
from fedbn.report import explanation_tables
from fedbn.report.html import Picture
from fedbn.report.panels import connectome
from fedbn.study import explanation
from fedbn.study.explanation import (
    SHARED,
    ExplanationError,
    chance_overlap,
    explain,
    feature_weights,
    features_csv,
    in_every_fold,
    number_of_top,
    overlap,
    rank_correlation,
    stability,
    stability_sentences,
    strongest_in,
    write_explanation,
)

PLANTED = (3, 40)


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def settings(experiment):
    return experiment(
        rounds=3, n_folds=4, training={"batch_size": 16, "local_epochs": 4, "learning_rate": 0.01}
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory, write_store):
    """Stores in which two edges tell patients from controls, one up and one down."""
    folder = tmp_path_factory.mktemp("data")

    def plant(values, participants):
        owner = np.repeat([p.diagnosis == "autism" for p in participants], 3)
        values[:, PLANTED[0]] += 3 * owner
        values[:, PLANTED[1]] -= 3 * owner

    for site in ("NYU", "UM"):
        write_store(folder / site, site, n_subjects=24, edit=plant)
    return folder


@pytest.fixture(scope="module")
def found(settings, root):
    return explain(settings, read_sites(root, settings), n_permutations=2)


# ------------------------------------------------------------------------------------- one network


@pytest.fixture
def site(settings, root):
    stores = read_sites(root, settings)
    return federate(settings, stores, score_rounds=False).load("UM")


def test_separation_adds_up_to_what_the_held_out_groups_differ_by(site):
    found = feature_weights(site)
    network = site.network.eval()
    with torch.no_grad():
        logits = network(site.test.inputs)
    log_odds = (logits[:, 1] - logits[:, 0]).numpy()
    owners = site.test.owners
    of_subject = {owner: log_odds[owners == owner].mean() for owner in np.unique(owners)}
    patients = [value for owner, value in of_subject.items() if site.data.labels[owner] == 1]
    controls = [value for owner, value in of_subject.items() if site.data.labels[owner] == 0]
    expected = np.mean(patients) - np.mean(controls)
    assert found.separation.sum() == pytest.approx(expected, abs=0.01)


def test_a_weight_is_the_mean_attribution_without_its_sign_and_the_sign_a_direction(site):
    """Where the network is linear, an attribution is the input times its gradient."""
    with torch.no_grad():
        for block in site.network.hidden:
            block.activation = torch.nn.Identity()
    found = feature_weights(site)
    sample = torch.zeros(1, 66, requires_grad=True)
    logits = site.network.eval()(sample)
    (logits[0, 1] - logits[0, 0]).backward()
    gradient = sample.grad[0].numpy()
    inputs = torch.cat([site.train_samples.inputs, site.test.inputs]).numpy()
    owners = np.concatenate([site.train_samples.owners, site.test.owners])
    values = np.stack([inputs[owners == owner].mean(axis=0) for owner in np.unique(owners)])
    expected = gradient * np.abs(values).mean(axis=0)
    assert found.weight == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_a_site_without_both_diagnoses_among_its_held_out_has_no_separation(site):
    site.test.targets.zero_()
    site.train_samples.targets.zero_()
    assert np.isnan(feature_weights(site).separation).all()
    assert np.isfinite(feature_weights(site).weight).all()


def test_a_network_whose_inputs_are_no_edges_is_refused(site):
    site.data = replace(site.data, rois=site.data.rois[:11])
    with pytest.raises(ExplanationError, match="inputs are not the 55 edges in order"):
        feature_weights(site)


# --------------------------------------------------------------------------------------- all folds


def test_planted_edges_come_first_with_their_direction_and_in_every_fold(found):
    for scope in ("NYU", "UM", SHARED):
        mean = found.weights[scope].mean(axis=0)
        assert set(np.argsort(-np.abs(mean))[:2]) == set(PLANTED)
        assert mean[PLANTED[0]] > 0 > mean[PLANTED[1]]
        assert strongest_in(found.weights[scope], 2)[list(PLANTED)].tolist() == [4, 4]
        assert all(found.separations[scope].mean(axis=0)[list(PLANTED)] > 0)


def test_what_is_there_is_steadier_than_permuted_diagnoses(found):
    steady = stability(found, n_top=2)
    for scope in ("NYU", "UM", SHARED):
        assert steady[scope]["overlap"]["found"] == 1
        assert steady[scope]["overlap"]["above"]
        assert steady[scope]["in_every_fold"]["found"] == 2
    assert all("above permuted" in s for s in stability_sentences(steady, 2, "edge"))


def test_folds_agree_even_where_there_is_nothing(found):
    """Why a null is needed: any two folds have two thirds of the training subjects in common."""
    permuted = stability(found, n_top=10)[SHARED]["overlap"]["permuted"]
    assert min(permuted) > 2 * chance_overlap(66, 10)


def test_shared_is_the_mean_over_sites(found):
    for values in (found.weights, found.separations, *found.permuted):
        assert np.array_equal(values[SHARED], (values["NYU"] + values["UM"]) / 2)
    assert found.weights[SHARED].shape == (4, 66)


def test_each_fold_holds_out_other_subjects_and_starts_from_other_weights(
    root, settings, monkeypatch
):
    quick = settings.changed(rounds=1, training={"batch_size": 16, "local_epochs": 1})
    held_out, starts = [], []

    def spy(experiment, stores, **arguments):
        federation = federate(experiment, stores, **arguments)
        held_out.append(set(federation.sites["UM"].preparation.split.test.tolist()))
        starts.append(federation.sites["UM"].initial_shared()["classifier.weight"])
        return federation

    monkeypatch.setattr(explanation, "federate", spy)
    explain(quick, read_sites(root, quick), n_permutations=1)
    assert sorted(k for fold in held_out[:4] for k in fold) == list(range(24))
    for k in range(4):
        assert torch.equal(starts[k], starts[k + 4]), "permuted trainings have the same starts"
        assert not torch.equal(starts[k], starts[(k + 1) % 4])


def test_permuting_deals_out_each_sites_own_diagnoses_and_touches_nothing_else(root, settings):
    stores = read_sites(root, settings)
    before = {name: store.labels.copy() for name, store in stores.items()}
    first, second = (explanation._permuted(stores, settings, k) for k in (0, 1))
    for name, store in stores.items():
        assert np.array_equal(store.labels, before[name])
        assert first[name].labels.sum() == store.labels.sum()
        assert not np.array_equal(first[name].labels, store.labels)
        assert not np.array_equal(first[name].labels, second[name].labels)
        assert first[name].connectomes is store.connectomes
        ids = [[p.participant_id for p in s.participants] for s in (first[name], store)]
        assert ids[0] == ids[1]
    assert not np.array_equal(first["NYU"].labels, first["UM"].labels)


def test_progress_is_told_and_no_permutation_is_refused(root, settings):
    quick = settings.changed(rounds=1, n_folds=2)
    told = []
    explain(quick, read_sites(root, quick), n_permutations=1, on_run=lambda *n: told.append(n))
    assert told == [(k, 4) for k in range(5)]
    with pytest.raises(ExplanationError, match="permutations is 0; at least 1 is needed"):
        explain(settings, read_sites(root, settings), n_permutations=0)


# --------------------------------------------------------------------------------------- stability


def test_agreement_of_folds_by_hand():
    weights = np.array([[3.0, -2, 1, 0.1], [6, -4, 2, 0.2], [-1, 3, 0.5, 2]])
    from scipy.stats import spearmanr

    pairs = [spearmanr(weights[a], weights[b])[0] for a, b in ((0, 1), (0, 2), (1, 2))]
    assert pairs[0] == 1
    assert rank_correlation(weights) == pytest.approx(np.mean(pairs))
    assert overlap(weights, 2) == pytest.approx((1 + 1 / 3 + 1 / 3) / 3)
    assert overlap(weights[:2], 3) == 1
    assert strongest_in(weights, 2).tolist() == [2, 3, 0, 1]
    assert [in_every_fold(weights, n) for n in (1, 2, 4)] == [0, 1, 4]


def test_the_chance_overlap_is_that_of_random_sets():
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((60, 400))
    assert overlap(weights, 40) == pytest.approx(chance_overlap(400, 40), rel=0.1)


@pytest.mark.parametrize(
    ("n_features", "asked", "expected"),
    [(6105, None, 50), (6105, 80, 80), (25, None, 5), (25, 24, 24), (3, None, 1), (3, 2, 2)],
)
def test_the_strongest_are_a_small_part_of_all(n_features, asked, expected):
    assert number_of_top(n_features, asked) == expected
    assert chance_overlap(n_features, expected) < 1


def test_all_inputs_cannot_be_the_strongest():
    with pytest.raises(ExplanationError, match="top is 25, but there are 25 inputs; give a small"):
        number_of_top(25, 25)


def test_a_sentence_says_not_above_where_it_is_not():
    one = {"found": 0.5, "permuted": [0.4, 0.6], "above": False}
    other = {"found": 0.7, "permuted": [0.61, 0.61], "above": True}
    count = {"found": 7, "permuted": [0, 7], "above": False}
    (sentence,) = stability_sentences(
        {"UM": {"rank_correlation": one, "overlap": other, "in_every_fold": count}}, 50, "edge"
    )
    assert "rank correlation of all edges 0.50, NOT above permuted labels' 0.40 to" in sentence
    assert "overlap of the 50 strongest 0.70, above permuted labels' 0.61;" in sentence
    assert sentence.endswith("edges among them in every fold 7, NOT above permuted labels' 0 to 7.")


# ------------------------------------------------------------------------------------------- files


def test_the_files_name_every_edge_the_strongest_first(found, tmp_path):
    content = write_explanation(found, tmp_path, n_top=5)
    rows = list(csv.DictReader((tmp_path / "edges.csv").read_text().splitlines()))
    assert len(rows) == 66
    strength = [abs(float(row["shared_weight"])) for row in rows]
    assert strength == sorted(strength, reverse=True)
    first, second = np.triu_indices(12, k=1)
    k = PLANTED[0]
    row = next(
        r for r in rows if (r["roi_a"], r["roi_b"]) == (str(10 + first[k]), str(10 + second[k]))
    )
    assert row["name_a"] == f"region {first[k]}"
    assert float(row["UM_weight"]) == pytest.approx(found.weights["UM"][:, k].mean(), rel=1e-5)
    sd = found.weights[SHARED][:, k].std(ddof=1)
    assert float(row["shared_weight_sd"]) == pytest.approx(sd, rel=1e-4)
    assert row["shared_folds_in_top_5"] == "4"
    assert json.loads((tmp_path / "explanation.json").read_text()) == json.loads(
        json.dumps(content)
    )
    assert content["n_permutations"] == 2
    marked = features_csv(type(found)(**{**vars(found), "synthetic": True}))
    assert marked.startswith("# SYNTHETIC COHORT")


def test_the_command_prints_the_edges_and_how_steady_they_are(
    root, settings, tmp_path, write_experiment
):
    write_experiment(tmp_path / "job", settings.changed(rounds=1, n_folds=2))
    job, out = tmp_path / "job" / "experiment.json", tmp_path / "out"
    arguments = ["explain", job, "--data", root, "--out", out, "--permutations", 1, "--top", 3]
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    assert "region 0" in done.stdout
    assert "shared: between folds, rank correlation" in done.stdout
    assert sorted(path.name for path in out.iterdir()) == [
        "edges.csv",
        "explanation.json",
        "tables.txt",
    ], "these regions have no coordinates"
    ids = [p.participant_id for p in read_site_store(root / "UM").participants]
    for path in out.iterdir():
        assert not any(name in path.read_text() for name in ids)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    done = invoke("explain", job, "--data", root, "--out", tmp_path / "mine")
    assert done.exit_code == 1
    assert "is not empty and holds no explanation" in done.stderr
    done = invoke("explain", job, "--data", tmp_path / "mine", "--out", tmp_path / "new")
    assert done.exit_code == 1
    assert "no site store at" in done.stderr
    assert not (tmp_path / "new").exists()


def test_edges_of_known_regions_are_drawn_for_each_scope(found, monkeypatch):
    drawn = []

    def on_a_brain(shown, *, synthetic):
        drawn.append((len(shown), synthetic))
        return [Picture(name="edges_above", png=b"png", alt="", caption="")]

    monkeypatch.setattr(connectome, "on_a_brain", on_a_brain)
    pairs = itertools.combinations(ROIS[:12], 2)
    features = found.features._replace(names=tuple((*a, *b) for a, b in pairs))
    known = replace(found, features=features)
    names = [picture.name for picture in explanation_tables.pictures(known, 20)]
    assert names == ["NYU_edges_above", "UM_edges_above", "shared_edges_above"]
    assert drawn == [(20, False)] * 3
    assert list(explanation_tables.pictures(found)) == []
