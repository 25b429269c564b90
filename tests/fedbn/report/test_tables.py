"""The tables of a run and of a comparison: what they say, and that they fit a terminal."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest

from fedbn.federation.simulation import read_sites, run_federation
from fedbn.report import figures
from fedbn.report.comparison_tables import (
    after_training_table,
    comparison_tables,
    convergence_table,
    width,
)
from fedbn.report.tables import WIDTH, finetuned_table, groups_table, render, run_tables

CLUSTERED = {"name": "clustered", "split_mean_norm": 1e6, "split_site_norm": 0.0}


def lines_of(*tables):
    return [line.rstrip() for line in render(tables).splitlines()]


def row_of(lines, first):
    return next(line.split() for line in lines if line.split()[:1] == [first])


@pytest.fixture(scope="module")
def run_of(settings, stores_root):
    def make(**changes):
        experiment = settings.changed(**changes)
        return run_federation(experiment, read_sites(stores_root, experiment)).report

    return make


# ------------------------------------------------------------------------------------- of one run


def test_scores_after_fine_tuning_are_shown_beside_the_federated_ones(run_of):
    report = run_of(finetune={"epochs": 3, "entries": "head"}, training={"learning_rate": 0.05})
    lines = lines_of(*run_tables(report))
    text = " ".join(lines)
    assert "what fine-tuning at the site changes (3 local epochs, head alone)" in text
    lines = lines_of(finetuned_table(report))
    for site, found in report["sites"].items():
        before, after = (found[kind]["subject"] for kind in ("federated", "finetuned"))
        assert row_of(lines, site) == [
            site,
            str(found["n_test_subjects"]),
            f"{100 * before['accuracy']:.1f}",
            f"{100 * after['accuracy']:.1f}",
            f"{100 * (after['accuracy'] - before['accuracy']):+.1f}",
            f"{before['auc']:.3f}",
            f"{after['auc']:.3f}",
        ]
    macro = report["across_sites"]["finetuned"]["subject"]["macro"]
    assert row_of(lines, "macro")[2] == f"{100 * macro['accuracy']:.1f}"
    assert row_of(lines, "macro")[-1] == f"{macro['auc']:.3f}"


def test_groups_of_a_run_are_shown(run_of):
    report = run_of(policy="none", algorithm=CLUSTERED, rounds=3)
    assert report["rounds"][-1]["groups"] == [["NYU"], ["UM"]]
    lines = lines_of(*run_tables(report))
    assert "which sites were averaged together" in lines
    first, one, _ = (report["rounds"][k]["updates"] for k in range(3))
    row = row_of(lines_of(groups_table(report)), "NYU+UM")
    norms = [f"{first[0][name]:.2f}" for name in ("mean_norm", "largest_site_norm")]
    assert row == ["NYU+UM", "0", *norms, "cut", "in", "NYU", "and", "UM"]
    row = row_of(lines_of(groups_table(report)), "NYU")
    assert row[:3] == ["NYU", "1-2", f"{one[0]['mean_norm']:.2f}"]
    assert row[-1] == "kept"


def test_a_group_that_was_cut_in_the_last_round_was_averaged_and_its_parts_were_not():
    cut = {"sites": ["A", "B", "C"], "mean_norm": 0.5, "largest_site_norm": 2.0}
    results = {
        "sites": dict.fromkeys("CAB"),
        "rounds": [
            {"round": 0, "groups": [["A", "B", "C"]], "updates": [{**cut, "mean_norm": 1.25}]},
            {"round": 1, "groups": [["A", "B", "C"]], "updates": []},  # a site was absent
            {
                "round": 2,
                "groups": [["A", "C"], ["B"]],
                "updates": [{**cut, "cut": [["A", "C"], ["B"]]}],
            },
        ],
    }
    lines = lines_of(groups_table(results))
    assert " ".join(row_of(lines, "A+B+C")) == (
        "A+B+C 0-2 1.25 > 0.50 2.00 > 2.00 cut in A+C and B"
    )
    assert row_of(lines, "A+C") == ["A+C", "-", "-", "-", "kept"]


def test_a_run_without_either_shows_neither(run_of):
    text = " ".join(lines_of(*run_tables(run_of())))
    assert "fine-tun" not in text
    assert "averaged together" not in text


# --------------------------------------------------------------------------------- of a comparison


def test_tables_and_captions_fit_eighty_columns_and_are_wrapped_once(summary):
    many = copy.deepcopy(summary)
    for new in ("USM", "UCLA"):
        many["sites"].append(new)
        for part in ("n_subjects", "n_windows"):
            many[part][new] = many[part]["UM"]
        for part in ("scores", "differences", "after_training"):
            for scopes in many[part].values():
                scopes[new] = scopes["UM"]
    assert width(many) == WIDTH
    for tables in (comparison_tables(summary), comparison_tables(many)):
        for table in tables:
            lines = lines_of(table)
            assert max(map(len, lines)) <= WIDTH
            rule = max(k for k, line in enumerate(lines) if set(line.strip()) == {"─"})
            start = max(k for k, line in enumerate(lines) if not line or k == rule)
            words = [line.split() for line in lines[start + 1 :] if line]
            room = len(lines[rule])
            for line, following in itertools.pairwise(words):
                if following[0] != "*":
                    joined = len(" ".join([*line, following[0]]))
                    assert joined > room - 2, f"broken early: {' '.join(line)}"


def test_the_table_of_rounds_says_what_the_summary_says(summary):
    found = summary["convergence"]
    assert list(found["methods"]) == ["fedavg", "fedbn"]
    assert found["of"] == "fedavg"
    lines = lines_of(convergence_table(summary))
    assert "FedAvg's at its last round" in " ".join(lines)
    one = found["methods"]["fedavg"]
    assert one["reached"] == one["runs"] == 4
    row = row_of(lines, "FedAvg")
    assert row[:8] == [
        "FedAvg", f"{one['median']:g}", f"{one['low']:g}", "to", f"{one['high']:g}", "4", "of", "4",
    ]  # fmt: skip
    assert row[-2] == f"{one['last_loss']['mean']:.3f}"
    never = copy.deepcopy(summary)
    never["convergence"]["of"], never["convergence"]["target"] = None, 0.01
    never["convergence"]["methods"]["fedbn"] |= {
        "reached": 0, "median": None, "low": None, "high": None, "difference": None,
    }  # fmt: skip
    lines = lines_of(convergence_table(never))
    assert "at most 0.01, of 2" in " ".join(lines)
    assert row_of(lines, "FedBN")[:7] == ["FedBN", "never", "-", "0", "of", "4", "-"]


def test_the_last_round_before_and_after_training(summary):
    lines = lines_of(after_training_table(summary))
    before = summary["scores"]["fedbn"]["macro"]["subject"]
    after = summary["after_training"]["fedbn"]["macro"]["subject"]
    row = row_of(lines, "FedBN")
    assert row[1::2] == [
        *(f"{100 * end['accuracy']['mean']:.1f}" for end in (before, after)),
        *(f"{end['auc']['mean']:.3f}" for end in (before, after)),
    ]
    assert not any(line.startswith(" SingleSet") for line in lines)


def test_a_comparison_of_an_earlier_version_has_no_such_tables(summary):
    earlier = {k: v for k, v in summary.items() if k not in ("after_training", "convergence")}
    assert len(comparison_tables(earlier)) == len(comparison_tables(summary)) - 2


@pytest.mark.parametrize(("n_seeds", "until"), [(1, math.nan), (3, 1.5)])
def test_the_picture_of_the_training_loss_has_a_band_and_a_mark_where_there_is_one(
    n_seeds, until, monkeypatch
):
    drawn = []
    monkeypatch.setattr(figures, "figure_png", lambda figure: drawn.append(figure) or b"")
    by_seed = np.linspace(0.7, 0.4, 4) + np.arange(n_seeds)[:, None] / 10
    figures.training_loss([figures.Losses("FedBN", by_seed, until)], 0.5, "target", synthetic=False)
    (axes,) = drawn[0].axes
    assert len(axes.collections) == (n_seeds > 1)
    target, line, *marks = axes.lines
    assert set(target.get_ydata()) == {0.5}
    assert line.get_ydata() == pytest.approx(by_seed.mean(axis=0))
    assert list(line.get_xdata()) == [1, 2, 3, 4]
    assert [mark.get_xdata()[0] for mark in marks] == ([] if math.isnan(until) else [1.5])
    if n_seeds > 1:
        vertices = axes.collections[0].get_paths()[0].vertices
        assert vertices[:, 1].min() == pytest.approx(by_seed.min())
        assert vertices[:, 1].max() == pytest.approx(by_seed.max())
