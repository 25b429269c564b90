"""A comparison at four sites: what its summary, tables and page say with the site as the unit."""

from __future__ import annotations

import copy
import csv
import json
import statistics

import pytest
from scipy import stats

from fedbn.report.comparison_tables import comparison_tables, over_sites_tables, width
from fedbn.report.tables import SYNTHETIC, render

SITES = ("NYU", "UM", "USM", "UCLA")


@pytest.fixture(scope="module")
def four_sites(tmp_path_factory, settings, write_store, compare_methods):
    folder = tmp_path_factory.mktemp("four")
    for site, n in zip(SITES, (12, 16, 24, 32), strict=True):
        write_store(folder / "data" / site, site, n_subjects=n, synthetic=True)
    experiment = settings.changed(sites=SITES, rounds=1)
    return compare_methods(
        folder / "out", experiment, folder / "data", ["singleset", "fedavg", "fedbn"]
    )


@pytest.fixture
def summary(four_sites):
    return json.loads((four_sites / "summary.json").read_text())


def test_it_is_computed_from_the_rows(summary, four_sites):
    with (four_sites / "results.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["when"] != "after_training"]

    def mean(name, site, column):
        own = [r[column] for r in rows if (r["method"], r["site"]) == (name, site) and r[column]]
        return statistics.fmean(map(float, own))

    assert list(summary["over_sites"]) == ["fedavg", "singleset"]
    for reference, name in (("fedavg", "fedbn"), ("singleset", "fedbn"), ("fedavg", "singleset")):
        for metric in ("accuracy", "brier"):
            column = f"subject_{metric}"
            of_sites = [mean(name, s, column) - mean(reference, s, column) for s in SITES]
            found = summary["over_sites"][reference][name]["subject"][metric]
            assert found["mean"] == pytest.approx(statistics.fmean(of_sites), abs=1e-12)
            assert found["n_higher"] == sum(value > 1e-12 for value in of_sites)
            plain = stats.ttest_1samp(of_sites, 0).confidence_interval()
            assert found["high"] - found["low"] >= (plain.high - plain.low) - 1e-9
            counts = [summary["n_subjects"][site] for site in SITES]
            # Folds of a site are of equal size here, so that units and folds weigh the same.
            weighted = sum(n * v for n, v in zip(counts, of_sites, strict=True)) / sum(counts)
            assert found["weighted"]["mean"] == pytest.approx(weighted, abs=1e-9)
            assert found["weighted"]["low"] <= found["weighted"]["high"]
    assert "weighted" not in summary["over_sites"]["fedavg"]["fedbn"]["subject"]["auc"]


def test_the_tables_are_labelled_whole_and_in_the_command(summary):
    tables = over_sites_tables(summary)
    text = render(tables, width(summary))
    assert text.count(SYNTHETIC.strip()) == 2
    assert "…" not in text
    assert [t.title for t in comparison_tables(summary)].count(tables[0].title) == 1
    found = summary["over_sites"]["fedavg"]["fedbn"]["subject"]["accuracy"]
    against_fedavg = render(tables[:1], width(summary)).splitlines()
    line = next(line for line in against_fedavg if line.split()[:1] == ["FedBN"])
    assert f"{100 * found['mean']:+.1f}" in line
    assert f"{found['n_higher']} / {found['n_lower']}" in line


def test_two_sites_and_older_summaries_have_none(summary):
    older = copy.deepcopy(summary)
    del older["over_sites"]
    assert over_sites_tables(older) == []
    two = copy.deepcopy(summary)
    two["sites"] = two["sites"][:2]
    assert over_sites_tables(two) == []


@pytest.mark.slow
def test_the_page_draws_gains_by_size(page_of, four_sites, read_page):
    page = page_of(four_sites)
    assert (page.parent / "gain_by_size.png").is_file()
    text = " ".join(read_page(page).text)
    assert "with the 4 sites as the unit" in " ".join(text.split())


@pytest.mark.slow
def test_without_training_alone_the_page_says_what_is_missing(page_of, made_up, read_page):
    _, two_sites = made_up
    page = page_of(two_sites)
    assert not (page.parent / "gain_by_size.png").exists()
    assert "An interval over sites needs 3 sites" in " ".join(read_page(page).text)
