"""Leave-one-hospital-out: what it scores, that it can be continued, and what it recommends."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

import fedbn.study.leave_one_site_out
from data_prep.site_store import read_site_store
from fedbn.__main__ import app
from fedbn.core.normalization import entries
from fedbn.federation.run_folder import SAVED_FILE
from fedbn.federation.simulation import federate, read_sites
from fedbn.federation.site import Site, make_network
from fedbn.federation.site_state import SHARED_WEIGHTS, save_checkpoint
from fedbn.models.new_site import STARTS, FinishedRun
from fedbn.report.tables import render
from fedbn.report.unseen_tables import unseen_tables, width
from fedbn.study import paired
from fedbn.study.evidence import (
    LABELLED_SUBJECTS,
    MACRO,
    OTHER_BEST,
    OTHER_MEAN,
    REFERENCE,
    ROWS,
    UnseenError,
    read_evidence,
    recommend,
    subject_interval,
)
from fedbn.study.leave_one_site_out import (
    _finetune,
    _tuned,
    labelled_subjects,
    leave_one_out,
    score_hospital,
)
from fedbn.study.records import read_scores

SITES = ("NYU", "UM", "USM")


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module", autouse=True)
def one_epoch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedbn.study.leave_one_site_out, "FINETUNE_EPOCHS", 1)
        yield


@pytest.fixture(scope="module")
def settings(experiment):
    return experiment(
        sites=SITES, rounds=2, n_folds=2, training={"batch_size": 16, "learning_rate": 0.01}
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory, write_store):
    folder = tmp_path_factory.mktemp("data")
    for site, n in zip(SITES, (20, 16, 18), strict=True):
        write_store(folder / site, site, n_subjects=n)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory, settings, root):
    out = tmp_path_factory.mktemp("unseen") / "out"
    return out, leave_one_out(settings, root, out, n_seeds=2)


# ------------------------------------------------------------------------------- what is scored


def test_the_left_out_hospital_has_no_part_in_training(settings, root, write_store, tmp_path):
    """Other scans there change its scores and nothing that was trained."""
    stores = read_sites(root, settings)
    before = score_hospital(settings, stores, "USM", 0)

    def turned_around(values, _):
        values *= -1

    write_store(tmp_path / "USM", "USM", n_subjects=18, edit=turned_around)
    stores["USM"] = read_site_store(tmp_path / "USM")
    after = score_hospital(settings, stores, "USM", 0)
    found = [read_scores(of["scores"]["fedavg"]).columns for of in (before, after)]
    assert np.array_equal(found[0]["target"], found[1]["target"])
    assert not np.array_equal(found[0]["p_1"], found[1]["p_1"])
    trained = federate(settings.changed(sites=SITES[:2], seed=0, fold=0, policy="none"), stores)
    site = Site("USM", stores["USM"], settings.changed(seed=0, fold=0, policy="none"))
    site.load(trained.shared, site.initial_local())
    scores = site.score()
    assert np.array_equal(found[1]["p_1"][scores.units], scores.columns["p_1"])


def test_every_subject_is_scored_once_by_every_start(finished, root):
    out, summary = finished
    assert {path.name for path in (out / "runs").iterdir()} == {
        f"{site}_seed{seed}.json" for site in SITES for seed in (0, 1)
    }
    for path in (out / "runs").iterdir():
        record = json.loads(path.read_text())
        store = read_site_store(root / record["hospital"])
        others = {f"site:{site}" for site in SITES if site != record["hospital"]}
        rows = {row.name for row in ROWS} - {OTHER_MEAN, OTHER_BEST}
        assert set(record["scores"]) == rows | others
        for kept in record["scores"].values():
            scores = read_scores(kept)
            assert scores.columns["target"].tolist() == store.labels.tolist()
            assert np.all((scores.columns["p_1"] >= 0) & (scores.columns["p_1"] <= 1))
            assert scores.parts is None
        text = path.read_text()
        assert not any(p.participant_id in text for p in store.participants)
    assert summary["n_subjects"] == {"NYU": 20, "UM": 16, "USM": 18}


def test_starts_differ_where_they_should(finished):
    out, _ = finished
    record = json.loads((out / "runs" / "UM_seed0.json").read_text())
    scores = {name: tuple(kept["columns"]["p_1"]) for name, kept in record["scores"].items()}
    assert len(set(scores.values())) == len(scores)


def test_training_on_few_labels_leaves_the_statistics_of_all_scans(settings, root):
    site = Site("USM", read_sites(root, settings)["USM"], settings)
    before = entries(site.network, tuple(site.network.state_dict()))
    (name, names), _ = _tuned(site.network)
    _finetune(site.network, site, site.train_samples, 4, 0, names)
    after = site.network.state_dict()
    moved = {entry for entry in before if not torch.equal(before[entry], after[entry])}
    assert name == "all"
    assert moved == {entry for entry in before if entry.endswith(("weight", "bias"))}


def test_labels_to_train_on_are_of_the_other_folds_balanced_and_nested():
    owners = np.repeat(np.arange(20), 3)
    targets = np.repeat(np.arange(20) % 2, 3)
    drawn = {n: labelled_subjects(owners, targets, n, 0, "UM", 1) for n in LABELLED_SUBJECTS}
    for n, chosen in drawn.items():
        assert len(chosen) == len(set(chosen)) == n
        assert sum(owner % 2 for owner in chosen) == n // 2
    assert set(drawn[4]) < set(drawn[8])
    assert labelled_subjects(owners, targets, 4, 0, "UM", 2) != drawn[4]


# -------------------------------------------------------------------------------------- numbers


def test_the_summary_is_that_of_the_scores(finished):
    out, summary = finished
    accuracy = {}
    for path in (out / "runs").iterdir():
        record = json.loads(path.read_text())
        for name, kept in record["scores"].items():
            columns = read_scores(kept).columns
            right = (columns["p_1"] >= 0.5) == (columns["target"] == 1)
            accuracy[record["hospital"], record["seed"], name] = right.mean()
    for name in (REFERENCE, "fedbn_affine", "fedavg_statistics+4_head"):
        cells = summary["scores"][name]
        for site in SITES:
            values = [accuracy[site, seed, name] for seed in (0, 1)]
            assert cells[site]["accuracy"]["mean"] == pytest.approx(np.mean(values))
            assert cells[site]["accuracy"]["sd"] == pytest.approx(np.std(values, ddof=1))
        of_seeds = [np.mean([accuracy[site, seed, name] for site in SITES]) for seed in (0, 1)]
        assert cells[MACRO]["accuracy"]["sd"] == pytest.approx(np.std(of_seeds, ddof=1))
    others = [[accuracy["UM", seed, f"site:{site}"] for site in ("NYU", "USM")] for seed in (0, 1)]
    best = summary["scores"][OTHER_BEST]["UM"]["accuracy"]["mean"]
    assert best == pytest.approx(np.max(others, axis=1).mean())
    mean = summary["scores"][OTHER_MEAN]["UM"]["accuracy"]["mean"]
    assert mean == pytest.approx(np.mean(others))


def test_the_interval_for_another_hospital_is_over_hospitals_and_corrected(finished):
    _, summary = finished
    found = summary["differences"]["fedbn_affine"]["fedbn_default"]["accuracy"]
    values = np.array(list(found["of_hospital"].values()))
    error = math.sqrt((1 / 3 + 1 / 2) * values.var(ddof=1))
    half = stats.t.ppf(0.975, 2) * error
    assert found["mean"] == pytest.approx(values.mean())
    assert found["hospitals"]["low"] == pytest.approx(values.mean() - half)
    assert found["hospitals"]["high"] == pytest.approx(values.mean() + half)


def test_the_interval_for_further_subjects_narrows_with_their_number():
    rng = np.random.default_rng(0)
    few = [rng.integers(-1, 2, 30).astype(float) for _ in range(4)]
    many = [np.tile(values, 16) for values in few]
    (low, high), (lower, higher) = subject_interval(few), subject_interval(many)
    mean = np.mean([values.mean() for values in few])
    assert (low + high) / 2 == pytest.approx(mean)
    assert (high - low) / (higher - lower) == pytest.approx(4, rel=0.05)
    error = math.sqrt(sum(values.var(ddof=1) / 30 for values in few)) / 4
    assert high - mean == pytest.approx(1.959964 * error, rel=1e-5)


# ------------------------------------------------------------------------------------- resuming


class StopHereError(Exception):
    pass


@pytest.mark.slow
def test_a_stopped_evaluation_is_continued_and_ends_with_the_same_bytes(
    finished, settings, root, tmp_path
):
    out, _ = finished
    again = tmp_path / "out"

    def stop(done, _):
        if done == 2:
            raise StopHereError

    with pytest.raises(StopHereError):
        leave_one_out(settings, root, again, n_seeds=2, on_run=stop)
    kept = sorted((again / "runs").iterdir())
    assert len(kept) == 2
    assert not (again / "unseen.json").exists()
    kept[0].write_text(kept[0].read_text()[:-9])
    told = []
    leave_one_out(settings, root, again, n_seeds=2, on_run=lambda *n: told.append(n))
    assert told[0] == (1, 6)
    assert (again / "unseen.json").read_bytes() == (out / "unseen.json").read_bytes()


def test_other_settings_or_data_do_not_go_into_the_same_folder(finished, settings, root, tmp_path):
    out, _ = finished
    sentence = r"holds another evaluation: rounds is \d+ there and 3 here; give another --out"
    with pytest.raises(UnseenError, match=sentence):
        leave_one_out(settings.changed(rounds=3), root, out, n_seeds=2)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UnseenError, match="is not empty and holds no evaluation"):
        leave_one_out(settings, root, tmp_path, n_seeds=1)
    with pytest.raises(UnseenError, match="needs at least 3, so that two are left"):
        leave_one_out(settings.changed(sites=SITES[:2]), root, tmp_path / "out", n_seeds=1)
    with pytest.raises(UnseenError, match="seeds is 0"):
        leave_one_out(settings, root, tmp_path / "out", n_seeds=0)
    assert not (tmp_path / "out").exists()


def test_the_command_prints_the_table(finished, settings, root, write_experiment):
    out, summary = finished
    job = out.parent / "job"
    write_experiment(job, settings.changed(policy="silobn", seed=3))
    done = invoke("unseen", job / "experiment.json", "--data", root, "--seeds", 2, "--out", out)
    assert done.exit_code == 0, done.output
    table = render(unseen_tables(summary), width(summary))
    assert table in done.stdout
    assert (out / "tables.txt").read_text() == table
    scores, differences = table.split("difference to")
    for row in summary["rows"]:
        cell = summary["scores"][row["name"]][MACRO]["accuracy"]
        (line,) = [x for x in scores.splitlines() if x.strip().startswith(row["title"] + " ")]
        assert f" {100 * cell['mean']:.1f} ({100 * cell['sd']:.1f}) " in line
        assert (row["title"] in differences) or row["name"] == REFERENCE
    assert "++ chosen by its score here: no hospital can." in table


# --------------------------------------------------------------------------- what is recommended


@pytest.fixture
def evidence(finished):
    """Evidence in which the starts are as good as we say."""

    def make(**accuracy):
        summary = copy.deepcopy(finished[1])
        starts = set(STARTS) & set(summary["scores"])
        for name in starts:
            summary["scores"][name][MACRO]["accuracy"]["mean"] = accuracy.get(name, 0.5)
        for name, others in summary["differences"].items():
            for other, found in others.items():
                if {name, other} <= starts:
                    mean = accuracy.get(name, 0.5) - accuracy.get(other, 0.5)
                    over = {"low": mean - 0.03, "high": mean + 0.03}
                    difference = paired.Difference(mean, *over.values(), 0.5, 0.01, 3)
                    found["accuracy"] = {
                        "mean": mean,
                        "hospitals": {**over, "verdict": paired.verdict(difference)},
                        "subjects": {"low": mean - 0.02, "high": mean + 0.02},
                    }
        return summary

    return make


@pytest.fixture
def run_of(settings):
    def make(policy="fedbn", *, affine=True):
        return FinishedRun(
            experiment=settings.changed(policy=policy),
            job="a-job",
            shared={},
            affine={} if affine and policy == "fedbn" else None,
            willing=(),
            no_affine="1 of 3 sites share gamma and beta",
            signature=None,
        )

    return make


def test_what_won_is_built_where_it_can_be(evidence, run_of):
    found = recommend(run_of(), evidence(fedbn_statistics=0.7, fedbn_affine=0.65))
    assert found.start == "fedbn_statistics"
    text = " ".join(found.sentences)
    assert "'FedBN, statistics recomputed' has the highest accuracy by subject" in text
    assert "70.0 %" in text
    assert "+5.0 points to 'FedBN, mean gamma and beta, statistics recomputed'" in text
    assert "95 % interval +2.0 to +8.0 for yet another hospital: higher" in text
    close = recommend(run_of(), evidence(fedbn_statistics=0.7, fedbn_affine=0.69))
    assert "no difference shown" in " ".join(close.sentences)


def test_a_better_run_is_named_and_the_best_of_this_one_is_built(evidence, run_of):
    found = recommend(run_of(), evidence(fedavg_statistics=0.72, fedbn_affine=0.7))
    assert found.start == "fedbn_affine"
    text = " ".join(found.sentences)
    assert "'FedAvg, statistics recomputed' has the highest" in text
    assert 'it needs a run with "policy": "none"; of what this run ("fedbn") allows' in text
    here = recommend(run_of("none"), evidence(fedavg_statistics=0.72, fedbn_affine=0.7))
    assert here.start == "fedavg_statistics"


def test_without_willing_sites_the_next_best_is_built_and_the_reason_told(evidence, run_of):
    numbers = evidence(fedbn_affine=0.72, fedbn_statistics=0.6)
    found = recommend(run_of(affine=False), numbers)
    assert found.start == "fedbn_statistics"
    assert "it cannot be built: 1 of 3 sites share gamma and beta" in " ".join(found.sentences)


def test_what_no_run_leaves_is_never_recommended(evidence, run_of):
    assert recommend(run_of(), evidence(fedbn_mean=0.9)).start != "fedbn_mean"


def test_a_run_of_silobn_is_judged_as_fedavgs_which_has_the_same_weights(
    evidence, run_of, settings, root
):
    assert recommend(run_of("silobn"), evidence(fedavg_statistics=0.7)).start == "silobn_statistics"
    stores = read_sites(root, settings)
    ends = [
        federate(settings.changed(policy=policy, rounds=2), stores, score_rounds=False).shared
        for policy in ("none", "silobn")
    ]
    assert set(ends[1]) < set(ends[0])
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])


def test_without_evidence_the_start_goes_by_its_name_and_says_so(run_of):
    found = recommend(run_of(), None)
    assert found.start == "fedbn_affine"
    assert "not what was found best" in found.sentences[0]


def test_adapt_builds_what_the_evidence_says(finished, settings, root, tmp_path):
    out, summary = finished
    experiment = settings.changed(sites=SITES[:2])
    network, partition = make_network(experiment)
    facts = {"job": "a-job", "experiment": experiment.model_dump(mode="json"), "round": 1}
    shared = entries(network, partition.shared)
    save_checkpoint(tmp_path / "run" / SAVED_FILE, SHARED_WEIGHTS, shared, facts)
    arguments = ["--run", tmp_path / "run", "--data", root / "USM", "--out", tmp_path / "new"]
    done = invoke("adapt", *arguments, "--evidence", out)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "new" / "adaptation.json").read_text())
    can = {
        name: summary["scores"][name][MACRO]["accuracy"]["mean"]
        for name in ("fedbn_default", "fedbn_statistics")
    }
    assert can[report["start"]] == max(can.values())
    assert "on 3 hospitals left out one at a time, 2 seeds" in report["why"]
    assert report["why"].split(". ")[0] in " ".join(done.stdout.splitlines())


def test_evidence_of_other_settings_is_taken_and_the_difference_told(evidence, run_of, settings):
    assert not any("mind that" in s for s in recommend(run_of(), evidence()).sentences)
    longer = dataclasses.replace(run_of(), experiment=settings.changed(rounds=9, sites=("UM", "A")))
    told = recommend(longer, evidence()).sentences[-1]
    assert told == "mind that the evidence was made with other sites and rounds"


def test_evidence_of_another_network_says_nothing(evidence, run_of, tmp_path, finished):
    numbers = evidence()
    numbers["experiment"]["network"]["args"]["hidden"] = [99]
    with pytest.raises(UnseenError, match="evidence is of another network"):
        recommend(run_of(), numbers)
    made_up = {**evidence(), "synthetic": True}
    real = dataclasses.replace(run_of(), signature={"synthetic": False})
    with pytest.raises(UnseenError, match="of a synthetic cohort and the run's sites are real"):
        recommend(real, made_up)
    assert recommend(run_of(), made_up)
    assert read_evidence(finished[0]) == finished[1]
    (tmp_path / "unseen.json").write_text("{}")
    with pytest.raises(UnseenError, match="no summary of `fedbn unseen`"):
        read_evidence(tmp_path / "unseen.json")


def test_evidence_of_version_0_1_is_that_of_connectomes(evidence, run_of):
    numbers = evidence()
    task = numbers["experiment"].pop("task")
    numbers["experiment"]["standardization"] = task["standardization"]
    assert recommend(run_of(), numbers) == recommend(run_of(), evidence())
    numbers["experiment"]["standardization"] = "none"
    with pytest.raises(UnseenError, match="evidence is of another task"):
        recommend(run_of(), numbers)
