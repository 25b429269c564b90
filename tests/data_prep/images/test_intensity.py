import itertools

import numpy as np
import pytest

from data_prep.images.intensity import STORED_BINS, Histogram, distance, label_counts


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def test_whole_numbers_are_counted_one_by_one(rng):
    values = rng.integers(0, 256, (3, 40, 50)).astype(np.uint8)
    histogram = Histogram.of(values).to_store()
    assert histogram.width == 1
    expected = np.bincount(values.ravel())[histogram.first :]
    np.testing.assert_array_equal(histogram.counts, expected)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e7])
def test_a_quantile_is_right_to_the_width_of_a_bin(rng, share, scale):
    values = (rng.normal(size=5000) * scale).astype(np.float32)
    histogram = Histogram.of(values)
    exact = float(np.quantile(values, share, method="inverted_cdf"))
    assert 0 <= exact - histogram.quantile(share) < histogram.width
    assert histogram.width < 1e-3 * scale


def test_the_sum_of_images_does_not_depend_on_their_order(rng):
    images = [rng.normal(size=500) * scale for scale in (1, 100, 0.01)]
    images += [np.zeros(7), np.full(5, -3e4)]
    parts = [Histogram.of(image).to_store() for image in images]
    sums = [Histogram.sum(p).to_store().describe() for p in itertools.permutations(parts)]
    assert all(one == sums[0] for one in sums)
    assert sum(sums[0]["counts"]) == sum(map(len, images))
    assert len(sums[0]["counts"]) <= STORED_BINS


def test_a_histogram_comes_back_from_its_description(rng):
    histogram = Histogram.of(rng.normal(size=300) - 5).to_store()
    back = Histogram.from_description(histogram.describe())
    assert (back.exponent, back.first) == (histogram.exponent, histogram.first)
    np.testing.assert_array_equal(back.counts, histogram.counts)


def test_distance_is_that_of_kolmogorov_and_smirnov(rng):
    from scipy.stats import ks_2samp

    a, b = rng.integers(0, 200, 3000).astype(np.uint8), rng.integers(40, 256, 2000)
    found = distance(Histogram.of(a), Histogram.of(b))
    assert found == pytest.approx(ks_2samp(a, b).statistic, abs=1e-12)
    assert distance(Histogram.of(a), Histogram.of(a)) == 0
    assert distance(Histogram.of(a), Histogram.of(a.astype(float) + 1e4)) == 1


def test_label_ids_are_counted():
    mask = np.zeros((30, 40), np.uint16)
    mask[:2], mask[5, 5] = 3, 65535
    assert label_counts(mask) == {0: 30 * 40 - 81, 3: 80, 65535: 1}
