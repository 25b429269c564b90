"""Differences over sites: against other routes, simulated truth, and a comparison's own numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from fedbn.study import paired
from fedbn.study.over_sites import (
    fitted_line,
    gains,
    hierarchical_bootstrap,
    over_sites,
    rank_correlation,
    references,
    signed_rank_p,
    training_units,
)
from fedbn.tasks.base import Scores, Task
from fedbn.tasks.classification import OWN_THRESHOLD, two_class_scores
from fedbn.tasks.connectome.task import ConnectomeTask


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def of_sites(values):
    """Return differences of sites (n, 1, 1)."""
    return np.array(values, dtype=np.float64)[:, None, None]


def test_with_one_run_it_is_the_plain_t_test_over_sites(rng):
    values = rng.normal(0.4, 1, 12)
    found = over_sites(of_sites(values), 0.25)
    plain = stats.ttest_1samp(values, 0)
    assert found.p == pytest.approx(plain.pvalue, rel=1e-9)
    assert (found.low, found.high) == pytest.approx(tuple(plain.confidence_interval()), rel=1e-9)
    assert found.wilcoxon_p == pytest.approx(stats.wilcoxon(values).pvalue, rel=1e-12)
    assert (found.n_higher, found.n_lower) == ((values > 0).sum(), (values < 0).sum())


def test_signed_ranks_are_exact_also_with_ties(rng):
    for n in (3, 7, 12):
        values = rng.normal(0.3, 1, n)
        assert signed_rank_p(values) == pytest.approx(stats.wilcoxon(values, method="exact").pvalue)
    tied = np.array([1.0, -1.0, 2.0, 2.0, 2.0, -3.0, 4.0])
    ranks = stats.rankdata(np.abs(tied))
    sums = [ranks[np.array(s) > 0].sum() for s in itertools.product((-1, 1), repeat=7)]
    seen = ranks[tied > 0].sum()
    tails = (np.mean(np.array(sums) >= seen), np.mean(np.array(sums) <= seen))
    assert signed_rank_p(tied) == pytest.approx(2 * min(tails))


def test_it_is_never_surer_of_other_sites_than_of_these(rng):
    own = rng.normal(0, 1, (9, 2, 5))
    together = rng.normal(0, 3, (1, 2, 5))
    runs = own + together - together.mean()  # the sites' means, and so the plain test, are the same
    plain, found = (over_sites(runs, 0.25, models_vary=vary) for vary in (False, True))
    assert plain.low == pytest.approx(over_sites(own, 0.25, models_vary=False).low)
    of_these = paired.compare(runs.mean(axis=0).ravel(), 0.25)
    assert found.high - found.mean == pytest.approx(stats.t.ppf(0.975, 8) * of_these.standard_error)
    assert found.high > plain.high


def test_where_sites_differ_most_it_is_the_plain_t_test(rng):
    runs = rng.normal(0, 5, (9, 1, 1)) + rng.normal(0, 0.1, (9, 2, 5))
    assert over_sites(runs, 0.25) == over_sites(runs, 0.25, models_vary=False)


def test_coverage_where_all_sites_share_the_models(rng):
    """The plain test is wrong far more often than it says, and this one is not."""
    wrong = {True: 0, False: 0}
    n_draws, ratio = 800, 0.25
    for _ in range(n_draws):
        # Any two runs share what training subjects they share: a correlation of 1 / (1 + 4).
        moved = rng.normal() * math.sqrt(0.2) + rng.normal(0, math.sqrt(0.8), (1, 5, 5))
        runs = rng.normal(0, 1, (12, 1, 1)) + moved
        for vary in wrong:
            found = over_sites(runs, ratio, models_vary=vary)
            wrong[vary] += not found.low <= 0 <= found.high
    assert wrong[True] / n_draws < 0.08
    assert wrong[False] / n_draws > 0.15, "the test would pass without any correction"


@pytest.mark.parametrize(
    ("values", "higher", "lower", "has_interval"),
    [
        ([0.1, 0.2], 2, 0, False),
        ([0.2, 0.2, 0.2], 3, 0, False),  # they do not vary
        ([0.0, 0.0, 0.0], 0, 0, False),
        ([0.1 + 0.2 - 0.3, 0.0, 0.1], 1, 0, True),  # equal but for rounding is no difference
        ([0.1, -0.2, math.nan, 0.3], 2, 1, True),
        ([], 0, 0, False),
    ],
)
def test_nothing_is_said_that_the_sites_cannot_tell(values, higher, lower, has_interval):
    found = over_sites(of_sites(values), 0.25)
    assert (found.n_higher, found.n_lower) == (higher, lower)
    assert found.n == sum(not math.isnan(value) for value in values)
    assert math.isfinite(found.low) == has_interval


def test_an_undefined_run_is_left_out_of_its_sites_mean():
    runs = np.array([[[1.0, math.nan]], [[3.0, 5.0]], [[2.0, 2.0]]])
    assert over_sites(runs, 0.25).mean == pytest.approx((1 + 4 + 2) / 3)


def test_the_bootstrap_weights_by_units_and_is_seeded(rng):
    differences = [rng.normal(k, 1, (2, n)) for k, n in enumerate((5, 20, 60))]
    mean, low, high = hierarchical_bootstrap(differences)
    assert mean == pytest.approx(np.concatenate([d.mean(axis=0) for d in differences]).mean())
    assert low < mean < high
    assert hierarchical_bootstrap(differences) == (mean, low, high)
    assert hierarchical_bootstrap(differences, seed=1) != (mean, low, high)


def test_the_bootstrap_draws_sites_and_not_only_units():
    """Units that agree within a site leave nothing to draw but sites."""
    apart = [np.full((1, 30), value) for value in (-1.0, 0.0, 0.0, 1.0)]
    _, low, high = hierarchical_bootstrap(apart)
    assert (low, high) == (-0.75, 0.75)
    rng = np.random.default_rng(0)
    alike = [rng.choice([-1.0, 1.0], (1, 30)) for _ in range(4)]
    _, low, high = hierarchical_bootstrap(alike)
    assert -0.6 < low < high < 0.6


def test_rank_correlation(rng):
    x = np.arange(12.0)
    y = x + rng.normal(0, 4, 12)
    r, low, high = rank_correlation(x, y)
    assert r == pytest.approx(stats.spearmanr(x, y).statistic)
    half = 1.959964 * math.sqrt((1 + r**2 / 2) / 9)
    assert (math.atanh(low), math.atanh(high)) == pytest.approx(
        (math.atanh(r) - half, math.atanh(r) + half), rel=1e-6
    )
    assert rank_correlation(x, x)[2] == pytest.approx(1)
    assert np.isnan(rank_correlation(x, np.ones(12))).all()


def test_a_line_over_doublings_of_the_training_units(rng):
    n_train = np.array([10, 20, 40, 80, 160])
    gains = 0.2 - 0.03 * np.log2(n_train)
    line = fitted_line(n_train, gains)
    assert line.slope == pytest.approx(-0.03)
    assert (line.y[0], line.y[-1]) == pytest.approx((gains[0], gains[-1]))
    noisy = gains + rng.normal(0, 0.05, 5)
    line = fitted_line(n_train, noisy)
    expected = stats.linregress(np.log2(n_train), noisy)
    assert line.slope_high - line.slope == pytest.approx(stats.t.ppf(0.975, 3) * expected.stderr)
    at_mean = np.argmin(line.high - line.low)
    assert 20 < line.x[at_mean] < 80, "a line is surest in the middle"
    assert fitted_line([10, 10, 10], np.ones(3)) is None
    assert fitted_line([10, 20], np.ones(2)) is None


def test_unit_values_are_what_the_metrics_are_means_of(rng):
    targets = np.array([0, 1, 1, 0, 1])
    scores = two_class_scores(targets, rng.random(5))
    scores = Scores(scores.units, scores.columns, scores, {"threshold": 0.4, OWN_THRESHOLD: 0.7})
    measured = ConnectomeTask().measure(scores)["subject"]
    values = ConnectomeTask().unit_values(scores)
    assert set(values) == {"accuracy", "brier", "accuracy_own_threshold"}
    for name, of_units in values.items():
        assert of_units.shape == (5,)
        assert of_units.mean() == pytest.approx(measured[name])


def test_by_default_a_column_that_is_a_metric_is_a_units_value():
    scores = Scores(np.arange(2), {"accuracy": np.array([0.25, 0.5]), "other": np.ones(2)})
    found = Task.unit_values(ConnectomeTask(), scores)
    assert {name: values.tolist() for name, values in found.items()} == {"accuracy": [0.25, 0.5]}


def test_training_alone_is_a_second_reference_only_where_it_is_compared():
    assert references(["singleset", "fedavg", "fedbn"], "fedavg") == ["fedavg", "singleset"]
    assert references(["singleset", "fedbn"], "singleset") == ["singleset"]
    assert references(["fedavg", "fedbn"], "fedavg") == ["fedavg"]


def test_gains_and_training_units_of_a_summary():
    def of(value):
        return {"subject": {"accuracy": {"mean": value}}}

    summary = {
        "sites": ["A", "B"],
        "n_folds": 5,
        "n_subjects": {"A": 100, "B": 20},
        "test_to_train": {"A": 0.25, "B": 1.0},  # B trains on a quarter of its own
        "scores": {
            "singleset": {"A": of(0.6), "B": of(0.5)},
            "fedbn": {"A": of(0.65), "B": of(None)},
        },
    }
    (name,), (values,) = gains(summary, "accuracy").keys(), gains(summary, "accuracy").values()
    assert name == "fedbn"
    assert values[0] == pytest.approx(0.05)
    assert math.isnan(values[1])
    assert training_units(summary).tolist() == [80, 4]
    del summary["scores"]["singleset"]
    assert gains(summary, "accuracy") == {}
