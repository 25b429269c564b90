from __future__ import annotations

import json
import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.site_store import read_site_store
from fedbn.federation.results import (
    AFTER_TRAINING,
    BEFORE_TRAINING,
    FORMAT,
    across_sites,
    run_report,
    site_report,
    versions,
    weights_digest,
    without_nan,
)
from fedbn.federation.site import Site
from fedbn.tasks.classification import make_scores

NAN = math.nan


@pytest.fixture
def site(data_root, experiment):
    return Site("NYU", read_site_store(data_root / "NYU"), experiment())


def probabilities(site, share_right):
    """Predict the first share of test samples right, with some confidence, and the rest wrong."""
    targets, owners = site.test.targets.numpy(), site.test.owners
    n = len(targets)
    right = np.arange(n) < share_right * n
    of_autism = np.where(right == (targets == 1), 0.8, 0.2)
    return make_scores(np.stack([1 - of_autism, of_autism], axis=1), targets, owners, parts=True)


def reported(site, final=1.0, alone=None, rounds=()):
    return site_report(
        site,
        probabilities(site, final),
        None if alone is None else probabilities(site, alone),
        {
            number: {
                BEFORE_TRAINING: {"test": probabilities(site, before)},
                AFTER_TRAINING: {"test": probabilities(site, after)},
            }
            for number, before, after in rounds
        },
    )


def test_a_site_report_has_counts_scores_and_the_curve(site):
    report = reported(site, 1.0, 0.0, [(1, 0.5, 1.0), (0, 0.0, 0.5)])
    assert report["n_test_subjects"] == 5
    assert report["federated"]["subject"]["accuracy"] == 1.0
    assert report["federated"]["window"]["accuracy"] == 1.0
    assert report["alone"]["subject"]["accuracy"] == 0.0
    assert report["gain"] == {"corrected": 5, "lost": 0, "n": 5}
    assert [point["round"] for point in report["curve"]] == [0, 1]
    assert report["curve"][0][BEFORE_TRAINING]["window"]["accuracy"] == 0.0
    assert report["curve"][1][AFTER_TRAINING]["window"]["accuracy"] == 1.0


def test_without_a_comparison_there_is_no_gain(site):
    report = reported(site)
    assert "alone" not in report
    assert "gain" not in report


def test_a_report_names_no_subject_store_or_path(site):
    text = json.dumps(reported(site, 0.5, 0.5, [(0, 0.5, 0.5)]), allow_nan=False)
    assert "sub-" not in text
    assert str(site.data.path) not in text
    assert site.preparation.facts["store"] not in text


def test_a_run_report_is_plain_json_with_both_means(site, experiment):
    reports = {"NYU": reported(site, 1.0, 0.0), "UM": {**reported(site, 0.0, 1.0)}}
    shared = {"w": torch.ones(3)}
    report = run_report(experiment(), reports, [{"round": 0}], shared, transport="paper planes")
    again = json.loads(json.dumps(report, allow_nan=False))
    assert again == report
    assert report["format"] == FORMAT
    assert report["transport"] == "paper planes"
    assert report["shared_weights_sha256"] == weights_digest(shared)
    assert report["experiment"]["sites"] == ["NYU", "UM"]
    for name in ("federated", "alone"):
        for kind in ("macro", "sample_weighted"):
            assert report["across_sites"][name]["subject"][kind]["accuracy"] == 0.5


def test_a_synthetic_site_makes_the_run_synthetic(site, experiment):
    reports = {"NYU": reported(site), "UM": {**reported(site), "synthetic": True}}
    assert run_report(experiment(), reports, [], {})["synthetic"] is True
    assert run_report(experiment(), {"NYU": reports["NYU"]}, [], {})["synthetic"] is False


def test_undefined_scores_are_null_and_left_out_of_means(site, experiment):
    full = reported(site, 1.0)
    one_class = json.loads(json.dumps(full))
    one_class["federated"]["subject"] |= {"auc": None, "reasons": {"auc": "one class"}}
    report = run_report(experiment(), {"NYU": full, "UM": one_class}, [], {})
    assert report["across_sites"]["federated"]["subject"]["macro"]["auc"] == 1.0
    assert report["sites"]["UM"]["federated"]["subject"]["reasons"] == {"auc": "one class"}
    for metrics in (full, one_class):
        metrics["federated"]["subject"]["auc"] = None
    report = run_report(experiment(), {"NYU": full, "UM": one_class}, [], {})
    assert report["across_sites"]["federated"]["subject"]["macro"]["auc"] is None


def test_a_run_without_any_scored_site_is_still_a_report(experiment):
    report = run_report(experiment(), {}, [], {}, not_scored={"NYU": "no answer"})
    assert report["across_sites"] == {}
    assert report["sites"] == {}
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (NAN, None),
        ({"a": NAN, "b": [1.0, NAN, ("x", NAN)]}, {"a": None, "b": [1.0, None, ["x", None]]}),
        (0.0, 0.0),
        ("nan", "nan"),
        (None, None),
        (True, True),
        (math.inf, None),
        (-math.inf, None),
        (np.float64("nan"), None),
    ],
)
def test_what_json_does_not_have_becomes_null(value, expected):
    assert without_nan(value) == expected
    json.dumps(without_nan(value), allow_nan=False)


def test_a_digest_sees_every_bit_name_shape_and_dtype():
    base = {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(2, 3)}
    others = [
        {"a": torch.tensor([1.0, 2.0 + 2e-7]), "b": torch.zeros(2, 3)},
        {"a": torch.tensor([2.0, 1.0]), "b": torch.zeros(2, 3)},
        {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(3, 2)},
        {"a": torch.tensor([1.0, 2.0]), "b": -torch.zeros(2, 3)},
        {"a": torch.tensor([1.0, 2.0]).double(), "b": torch.zeros(2, 3)},
        {"a": torch.tensor([1.0, 2.0]), "c": torch.zeros(2, 3)},
        {"a": torch.tensor([1.0, 2.0])},
        {},
    ]
    digests = {weights_digest(tensors) for tensors in (base, *others)}
    assert len(digests) == 1 + len(others)
    turned = {"b": torch.zeros(3, 2).T, "a": torch.tensor([1.0, 0.0, 2.0])[::2]}
    assert weights_digest(turned) == weights_digest(base), "order and memory layout do not matter"
    assert len(weights_digest({"s": torch.tensor(3), "e": torch.zeros(0)})) == 64


def test_versions_name_what_decides_the_numbers():
    found = versions()
    assert set(found) == {"python", "fedbn", "torch", "numpy", "nvflare", "monai", "scikit-learn"}
    assert found["torch"] == torch.__version__.split("+")[0] or found["torch"] == torch.__version__


# ------------------------------------------------------------------------------------ over sites

METRICS = ("accuracy", "balanced_accuracy", "auc")


def site_metrics(n, **changes):
    return {**dict.fromkeys(METRICS, 0.5), **changes, "n": n, "reasons": {}}


class TestAcrossSites:
    def test_both_means_by_hand(self):
        result = across_sites(
            {"UM": site_metrics(30, accuracy=0.5), "NYU": site_metrics(10, accuracy=0.9)}
        )
        assert result["macro"]["accuracy"] == pytest.approx(0.7)
        assert result["sample_weighted"]["accuracy"] == pytest.approx(0.6)
        assert result["weights"] == {"NYU": 10, "UM": 30}
        assert result["n_sites"] == dict.fromkeys(METRICS, 2)

    def test_undefined_stays_out_and_is_counted(self):
        result = across_sites(
            {
                "NYU": site_metrics(10, auc=0.8),
                "UM": site_metrics(30, auc=NAN),
                "USM": site_metrics(20, auc=0.5),
            }
        )
        assert result["macro"]["auc"] == pytest.approx(0.65)
        assert result["sample_weighted"]["auc"] == pytest.approx(0.6)
        assert result["n_sites"]["auc"] == 2
        assert result["n_sites"]["accuracy"] == 3

    def test_undefined_everywhere(self):
        result = across_sites({"NYU": site_metrics(0, **dict.fromkeys(METRICS, NAN))})
        assert math.isnan(result["macro"]["auc"])
        assert math.isnan(result["sample_weighted"]["accuracy"])
        assert result["n_sites"]["auc"] == 0

    @given(
        st.lists(
            st.tuples(st.integers(1, 500), st.floats(0, 1) | st.just(NAN)), min_size=1, max_size=5
        )
    )
    @settings(max_examples=40, deadline=None)
    def test_same_bits_in_any_order(self, sites):
        per_site = {f"site-{k}": site_metrics(n, auc=auc) for k, (n, auc) in enumerate(sites)}
        results = {
            str(across_sites({name: per_site[name] for name in order}))
            for order in permutations(per_site)
        }
        assert len(results) == 1

    @pytest.mark.parametrize(
        ("per_site", "match"),
        [
            ({}, "no site to average"),
            (
                {"NYU": site_metrics(3), "UM": {"accuracy": 0.5, "n": 3, "reasons": {}}},
                "sites 'NYU' and 'UM' differ in their metrics: auc, balanced_accuracy",
            ),
        ],
    )
    def test_refuses(self, per_site, match):
        with pytest.raises(ValueError, match=match):
            across_sites(per_site)


def test_before_and_after_are_named():
    assert (BEFORE_TRAINING, AFTER_TRAINING) == ("before_training", "after_training")
