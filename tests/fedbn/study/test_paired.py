"""Paired differences: against values worked out by hand, other routes, and simulated truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedbn.study.paired import HIGHER, LOWER, NOT_SHOWN, SAME, UNTOLD, compare, holm, verdict


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def test_against_values_worked_out_by_hand():
    # mean 2.5, s^2 = 5/3, J = 4, two folds: (1/4 + 1) * 5/3 = 25/12
    found = compare([1, 2, 3, 4], test_to_train=1.0)
    error = math.sqrt(25 / 12)
    t = 2.5 / error  # sqrt(3)
    assert found.mean == 2.5
    assert found.n == 4
    assert found.standard_error == pytest.approx(error, rel=1e-12)
    # Student's t with 3 degrees of freedom, in closed form.
    x = t / math.sqrt(3)
    cdf = 0.5 + (x / (1 + x**2) + math.atan(x)) / math.pi
    assert found.p == pytest.approx(2 * (1 - cdf), rel=1e-9)
    # 3.182 446 305: the table's 97.5 % point with 3 degrees of freedom.
    assert found.high - found.mean == pytest.approx(3.182446305 * error, rel=1e-8)
    assert found.mean - found.low == pytest.approx(3.182446305 * error, rel=1e-8)
    assert verdict(found) == NOT_SHOWN


@pytest.mark.parametrize(("folds", "repeats"), [(5, 5), (10, 10), (2, 5), (5, 1)])
def test_a_plain_t_test_with_the_published_variance_factor(rng, folds, repeats):
    values = rng.normal(0.3, 1, folds * repeats)
    n = len(values)
    ratio = 1 / (folds - 1)  # with 10 x 10: a factor of 0.01 + 1/9 on s^2 in place of 0.01
    plain = stats.ttest_1samp(values, 0)
    t = plain.statistic * math.sqrt((1 / n) / (1 / n + ratio))
    found = compare(values, ratio)
    assert found.p == pytest.approx(2 * stats.t.sf(abs(t), n - 1), rel=1e-9)
    low, high = stats.t.interval(0.95, n - 1, values.mean(), values.mean() / t)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-9)
    assert found.p > plain.pvalue


def test_coverage_where_runs_share_what_nadeau_and_bengio_assume(rng):
    """Any two runs correlate by n_test / (n_test + n_train): the interval is then exact."""
    folds, repeats, n_draws = 5, 5, 4000
    n, correlation = folds * repeats, 1 / folds
    common = rng.standard_normal((n_draws, 1)) * math.sqrt(correlation)
    draws = 1.7 * (common + rng.standard_normal((n_draws, n)) * math.sqrt(1 - correlation))
    found = [compare(values, 1 / (folds - 1)) for values in draws]
    covered = np.mean([one.low <= 0 <= one.high for one in found])
    assert covered == pytest.approx(0.95, abs=0.012)  # 3.5 standard errors
    naive = np.mean(stats.ttest_1samp(draws, 0, axis=1).pvalue >= 0.05)
    assert naive < 0.6, "the test would pass without any correction"


def test_real_repeated_folds_of_two_equal_methods_are_seldom_called_different(rng):
    """Two regressions on different but equally informative features: no true difference."""
    folds, repeats, n, n_data, width = 5, 3, 60, 300, 5
    plain = shown = 0
    for _ in range(n_data):
        targets = rng.integers(0, 2, n) * 2.0 - 1
        features = [rng.standard_normal((n, width)) + 0.3 * targets[:, None] for _ in range(2)]
        differences = []
        for _ in range(repeats):
            fold = rng.permutation(n) % folds
            for k in range(folds):
                train, test = fold != k, fold == k
                right = []
                for x in features:
                    weights = np.linalg.lstsq(x[train], targets[train], rcond=None)[0]
                    right.append(np.mean((x[test] @ weights > 0) == (targets[test] > 0)))
                differences.append(right[0] - right[1])
        shown += compare(differences, 1 / (folds - 1)).is_shown
        plain += stats.ttest_1samp(differences, 0).pvalue < 0.05
    assert shown / n_data < 0.1
    assert plain / n_data > 0.2, "the test would pass without any correction"


def test_power_is_left(rng):
    values = 0.1 + 0.05 * rng.standard_normal(25)
    assert verdict(compare(values, 0.25)) == HIGHER
    assert verdict(compare(-values, 0.25)) == LOWER


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ([0.0] * 10, SAME),
        ([0.25] * 10, UNTOLD),
        ([0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2], UNTOLD),  # equal but for rounding
        ([0.3], UNTOLD),
        ([0.3, math.nan], UNTOLD),
        ([], UNTOLD),
        ([math.nan], UNTOLD),
        ([1.0, 1.1, 0.9, 1.0], HIGHER),
        ([-1.0, -1.1, -0.9, -1.0], LOWER),
        ([1.0, -1.0, 1.0, 0.5], NOT_SHOWN),
    ],
)
def test_wording_never_goes_beyond_the_interval(values, word):
    found = compare(values, 0.25)
    assert verdict(found) == word
    holds_zero = not (found.low > 0 or found.high < 0)
    assert (verdict(found) in (HIGHER, LOWER)) == (not holds_zero)
    assert found.is_shown == (not holds_zero)


def test_wording_follows_the_interval_wherever_it_lies(rng):
    words = set()
    for _ in range(300):
        found = compare(rng.normal(rng.normal(0, 0.5), 0.5, 10), 0.25)
        words.add(verdict(found))
        if found.low <= 0 <= found.high:
            assert verdict(found) == NOT_SHOWN
            assert found.p >= 0.05
        else:
            assert found.p < 0.05
    assert words == {HIGHER, LOWER, NOT_SHOWN}


def test_undefined_runs_are_left_out():
    with_gaps = compare([1.0, math.nan, 2.0, 4.0, math.nan], 0.25)
    assert with_gaps == compare([1.0, 2.0, 4.0], 0.25)
    assert with_gaps.n == 3


@pytest.mark.parametrize(
    ("p", "adjusted"),
    [
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),
        ([0.5, 0.9], [1.0, 1.0]),
        ([0.02], [0.02]),
        ([], []),
    ],
)
def test_holm_against_values_worked_out_by_hand(p, adjusted):
    assert holm(p) == pytest.approx(adjusted)


def test_holm_leaves_out_what_was_not_tested():
    first, second, third = holm([0.02, math.nan, 0.01])
    assert (first, third) == pytest.approx((0.02, 0.02))
    assert math.isnan(second)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(([1, 2], 0.0), "test_to_train is 0.0"), (([1, 2], 0.25, 1.0), "confidence is 1.0")],
)
def test_settings_that_mean_nothing_are_refused(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        compare(*arguments)
