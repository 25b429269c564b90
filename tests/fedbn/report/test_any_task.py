"""Pages of a table with three classes: what is shown, and what is left out with a sentence."""

from __future__ import annotations

import json

import pytest

from data_prep.table_store import write_table_store
from fedbn.federation.simulation import read_sites, run_federation
from fedbn.report.tables import gain_table, metrics_table, render, run_tables
from fedbn.report.writing import write_report
from tests.support.tables import table_experiment, write_tables

from .conftest import make_comparison

TWO_ONLY = ("roc", "calibration", "shares_called", "decision")


@pytest.fixture(scope="module", params=[2, 3])
def table(request, tmp_path_factory):
    """Number of classes, experiment, data."""
    root = tmp_path_factory.mktemp("table")
    write_tables(root, n_classes=request.param, n=90)
    return request.param, table_experiment(request.param, rounds=2), root


@pytest.mark.slow
def test_a_comparison_of_any_number_of_classes_has_its_page(table, tmp_path, read_page):
    n_classes, settings, root = table
    out = make_comparison(tmp_path / "out", settings, root, ["fedavg", "fedbn"])
    page = write_report(out, tmp_path / "page", root)
    files = {path.stem for path in page.parent.glob("*.png")}
    assert {"differences_macro", "confusion_North", "convergence_North", "embedding_1"} < files
    assert any(name.startswith(TWO_ONLY) for name in files) == (n_classes == 2)
    text = " ".join(read_page(page).text)
    assert ("are drawn for two classes only" in text) == (n_classes == 3)
    assert ("stage=a" in text) == (n_classes == 2)
    assert ("Not here: an explanation needs two classes" in text) == (n_classes == 3)
    assert "window" not in text


@pytest.mark.slow
def test_a_run_of_any_number_of_classes_has_its_page(table, tmp_path, read_page):
    n_classes, settings, root = table
    results = run_federation(settings, read_sites(root, settings)).report
    (tmp_path / "results.json").write_text(json.dumps(results))
    page = write_report(tmp_path / "results.json", tmp_path / "page", root)
    files = {path.stem for path in page.parent.glob("*.png")}
    assert {"confusion_North", "convergence_North", "embedding_1"} < files
    assert any(name.startswith(TWO_ONLY) for name in files) == (n_classes == 2)
    shown = "recall of worse" if n_classes == 3 else "sens."
    assert shown in " ".join(render([metrics_table(results)], 200).split())


def test_names_are_shown_whole_and_what_a_site_lacks_is_said(tmp_path):
    sites = ("Switzerland", "Cleveland")
    write_tables(tmp_path, sites, n=30)
    rows = [[k % 9, "abc"[k % 3], k % 2] for k in range(30)]
    write_table_store(tmp_path / "Cleveland", ("age", "stage", "outcome"), rows)
    settings = table_experiment(2, sites=sites, rounds=1)
    results = run_federation(settings, read_sites(tmp_path, settings)).report
    text = render([gain_table(results)])
    assert " Switzerland " in text
    assert "…" not in text
    said = " ".join(text.split())
    assert "Cleveland: columns without values: pressure." in said
    assert "Switzerland: columns" not in said


def test_a_site_without_a_class_is_named_below_the_means(tmp_path):
    root = write_tables(tmp_path, ("North",), n_classes=3)
    write_tables(root, ("South",), n_classes=2)
    settings = table_experiment(3, rounds=1)
    results = run_federation(settings, read_sites(root, settings)).report
    text = " ".join(render([gain_table(results)], 400).split())
    assert "The means of AUC are over 1 of 2 sites: it is undefined at South." in text
    assert "are over" not in render(run_tables({**results, "sites": {}, "across_sites": {}}))


def test_rounds_that_validation_units_judge_are_shown(tmp_path):
    root = write_tables(tmp_path, n=60)
    settings = table_experiment(rounds=2, test_curve=False, validation={"share": 0.3})
    results = run_federation(settings, read_sites(root, settings)).report
    text = " ".join(render(run_tables(results), 200).split())
    assert "accuracy in % by validation subject, round by round" in text
