"""Studies of a table, of two classes and of three: nothing in them knows what is learned."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedbn.__main__ import app
from fedbn.federation.simulation import read_sites
from fedbn.report.comparison_tables import comparison_tables, metrics_table, width
from fedbn.report.explanation_tables import feature_table
from fedbn.report.tables import render
from fedbn.report.unseen_tables import unseen_tables
from fedbn.study import baselines, comparison, evidence, execution
from fedbn.study.baselines import SiteSamples, fit_classes
from fedbn.study.comparison import compare, read_comparison
from fedbn.study.explanation import ExplanationError, explain, write_explanation
from fedbn.study.leave_one_site_out import labelled_subjects, leave_one_out
from fedbn.study.plan import ComparisonError, plan_comparison
from tests.support.tables import table_experiment, write_tables

METHODS = ("singleset", "fedavg", "fedbn", "ridge_federated", "ridge", "logistic", "pooled")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    def execute(groups, _processes):
        for group in groups:
            execution.do(group)
            yield from (unit.run for unit in group.units)

    execution._read.cache_clear()
    monkeypatch.setattr(comparison, "execute", execute)


def experiment_of(n_classes, **changes):
    return table_experiment(n_classes, **{"rounds": 2, "test_curve": False, **changes})


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    root = tmp_path_factory.mktemp("tables")
    return {n: write_tables(root / str(n), n_classes=n) for n in (2, 3)}


@pytest.mark.parametrize("n_classes", [2, 3])
def test_methods_are_compared_by_the_metrics_of_the_task(tables, tmp_path, n_classes):
    plan = plan_comparison(experiment_of(n_classes), METHODS, 1)
    summary = json.loads(json.dumps(compare(plan, tables[n_classes], tmp_path / "out")))
    with (tmp_path / "out" / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    own = "subject_recall_2" if n_classes == 3 else "subject_sensitivity"
    assert {own, "subject_auc", "n_test_subjects"} <= set(rows[0])
    assert "n_test_windows" not in rows[0]
    for name in METHODS:
        found = summary["scores"][name]["macro"]["subject"]
        assert found["accuracy"]["mean"] > 1 / n_classes, name
        assert found["auc"] == {**found["auc"], "n_sites": 2}
    text = render(comparison_tables(summary), width(summary))
    assert ("recall of" in text) == (n_classes == 3)
    assert ("slope" in text) == (n_classes == 2)
    assert "by window" not in text
    _, again, records = read_comparison(tmp_path / "out")
    assert again.task == plan.task
    assert set(records) == set(plan.runs)


@pytest.mark.parametrize("name", ["fedavg_threshold", "fedavg_threshold_cv", "nested"])
def test_what_decides_between_two_classes_is_refused_for_three(name):
    with pytest.raises(ComparisonError, match=f"method {name} needs two classes, .* 3 classes"):
        plan_comparison(experiment_of(3), ["fedavg", name], 1)


def test_a_mean_over_fewer_sites_says_so(tables, tmp_path):
    """At South nobody is worse: that recall, and what is a mean of recalls, is undefined."""
    root = write_tables(tmp_path / "data", ("North",), n_classes=3)
    write_tables(root, ("South",), n_classes=2)
    summary = compare(plan_comparison(experiment_of(3), ["fedavg"], 1), root, tmp_path / "out")
    cells = summary["scores"]["fedavg"]["macro"]["subject"]
    assert (cells["auc"]["n_sites"], cells["accuracy"]["n_sites"]) == (1, 2)
    assert summary["scores"]["fedavg"]["South"]["subject"]["auc"]["mean"] is None
    text = " ".join(render([metrics_table(summary)], 400).split())
    said = "Balanced accuracy, AUC, recall of worse: over as few as 1 of 2 sites in a fold"
    assert said in text
    whole = compare(plan_comparison(experiment_of(3), ["fedavg"], 1), tables[3], tmp_path / "all")
    assert "over as few as" not in render([metrics_table(whole)], 400)


# --------------------------------------------------------------------------------------- baselines


@pytest.fixture
def three():
    rng = np.random.default_rng(0)
    targets = np.arange(60) % 3
    inputs = torch.from_numpy(rng.normal(size=(60, 5)) + 2 * np.eye(5)[targets])
    return [SiteSamples("UM", inputs.float(), targets, np.arange(60))]


@pytest.mark.parametrize(
    "fit", [baselines.fit_ridge, baselines.fit_logistic, baselines.fit_federated_ridge]
)
def test_of_three_classes_each_is_told_from_the_rest(three, fit):
    found = fit_classes(fit, three, 3, 0)(three[0].inputs)
    assert found.sum(axis=1) == pytest.approx(np.ones(60))
    assert np.mean(found.argmax(axis=1) == three[0].targets) > 0.8
    with_a_fourth = fit_classes(fit, three, 4, 0)(three[0].inputs)
    assert np.all(with_a_fourth[:, 3] == 0)
    assert with_a_fourth[:, :3] == pytest.approx(found)
    two = [replace(three[0], targets=(three[0].targets == 1).astype(np.int64))]
    alone = fit(two, 0)(three[0].inputs)
    assert np.array_equal(fit_classes(fit, two, 2, 0)(three[0].inputs), alone)


# ------------------------------------------------------------------------------------- explanation


def test_a_tables_columns_are_explained(tables, tmp_path):
    settings = experiment_of(2, n_folds=2)
    found = explain(settings, read_sites(tables[2], settings), n_permutations=1)
    content = write_explanation(found, tmp_path, n_top=2)
    assert content["n_features"] == 5
    rows = list(csv.DictReader((tmp_path / "features.csv").read_text().splitlines()))
    assert {row["feature"] for row in rows} == {"age", "pressure", "stage=a", "stage=b", "stage=c"}
    age = next(row for row in rows if row["feature"] == "age")
    assert float(age["shared_weight"]) > 0, "the ill are older"
    text = render([feature_table(found, n=3)], 150)
    assert "the 3 features that weigh most" in text
    assert "log odds of ill" in text


def test_the_command_explains_a_table_of_few_columns(tables, tmp_path, write_experiment):
    write_experiment(tmp_path / "job" / "app" / "config", experiment_of(2, rounds=1))
    job, out = str(tmp_path / "job"), str(tmp_path / "out")
    arguments = ["explain", job, "--data", str(tables[2]), "--out", out, "--permutations", "1"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "out" / "explanation.json").read_text())["n_top"] == 1
    done = CliRunner().invoke(app, [*arguments, "--top", "5"])
    assert (done.exit_code, done.stderr) == (
        1,
        "fedbn: top is 5, but there are 5 inputs; give a smaller number\n",
    )


def test_labels_of_a_table_are_dealt_out_by_participant(tables):
    settings = experiment_of(3)
    store = read_sites(tables[3], settings)["North"]
    order = np.roll(np.arange(len(store.units)), 1)
    found = settings.task.relabelled(store, order)
    assert np.array_equal(found.labels, store.labels[order])
    assert found.column("age") == store.column("age")
    assert [unit.id for unit in found.units] == [unit.id for unit in store.units]
    twice = replace(store, ids=(*store.ids[:-1], store.ids[2]))  # has rows of one class
    again = settings.task.relabelled(twice, np.arange(len(twice.units))[::-1])
    assert again.labels[2] == again.labels[-1]


def test_more_than_two_classes_are_not_explained(tables):
    settings = experiment_of(3)
    with pytest.raises(ExplanationError, match="needs two classes, task 'tabular' has others"):
        explain(settings, read_sites(tables[3], settings), n_permutations=1)


# ------------------------------------------------------------------------- leaving one hospital out


def test_hospitals_with_tables_are_left_out_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("fedbn.study.leave_one_site_out.FINETUNE_EPOCHS", 1)
    sites = ("North", "South", "West")
    root = write_tables(tmp_path / "data", sites, n_classes=3, n=24)
    summary = leave_one_out(
        experiment_of(3, sites=sites, n_folds=2, rounds=1), root, tmp_path / "out", n_seeds=1
    )
    assert list(summary["scores"]["fedavg"]["macro"]) == ["accuracy", "balanced_accuracy", "auc"]
    difference = summary["differences"]["fedbn_affine"][evidence.REFERENCE]["accuracy"]
    assert {"hospitals", "subjects"} <= set(difference)
    assert "accuracy in % at a hospital that took no part" in render(unseen_tables(summary), 150)


@pytest.mark.parametrize(("n", "expected"), [(4, [2, 1, 1]), (8, [3, 3, 2])])
def test_labelled_subjects_are_of_all_classes(n, expected):
    owners, targets = np.arange(30), np.arange(30) % 3
    chosen = labelled_subjects(owners, targets, n, 0, "UM", 0)
    assert np.bincount(targets[chosen]).tolist() == expected
