"""The paper's splits: its counts, and that no image is on two sides."""

from __future__ import annotations

import numpy as np
import pytest

from data_prep.paper.splits import Rule, SplitError, split_pool, take_sides


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_a_pool_is_cut_as_the_authors_cut_it(rng):
    """80 to 20, stratified: the counts of the paper's pools follow from their sizes."""
    for n, n_test in ((9298, 1860), (70000, 14000), (99289, 19858), (488953, 97791)):
        labels = rng.integers(10, size=n)
        train, test = split_pool(labels, test_share=0.2, seed=0)
        assert (len(train), len(test)) == (n - n_test, n_test)
    shares = np.bincount(labels[test]) / np.bincount(labels)
    np.testing.assert_allclose(shares, 0.2, atol=1e-4)
    assert len(np.unique(np.concatenate([train, test]))) == n
    assert np.bincount(labels[train[:2000]]).min() > 120  # the front is a sample of all classes


def test_the_seed_decides_the_split(rng):
    labels = rng.integers(3, size=60)
    for groups in (None, np.arange(60) // 2):
        splits = [split_pool(labels, test_share=0.2, seed=s, groups=groups) for s in (0, 0, 1)]
        np.testing.assert_array_equal(splits[0][0], splits[1][0])
        assert set(splits[0][1]) != set(splits[2][1])


def test_rows_of_a_group_stay_on_one_side(rng):
    labels, groups = rng.integers(4, size=300), np.arange(300) // 3
    train, test = split_pool(labels, test_share=0.2, seed=0, groups=groups)
    assert not set(groups[train]) & set(groups[test])
    assert sorted([*train, *test]) == list(range(300))
    assert 45 <= len(test) <= 75
    pieces = groups[train][np.r_[True, np.diff(groups[train]) != 0]]
    assert len(pieces) == len(set(pieces))  # each group in one piece
    assert (np.diff(pieces) < 0).any()  # in random order
    loose = split_pool(labels, test_share=0.2, seed=0)
    assert set(groups[loose[0]]) & set(groups[loose[1]])  # without groups they would not


def test_a_class_with_one_image_is_one_sentence():
    with pytest.raises(SplitError, match="11 images cannot be split by class"):
        split_pool(np.array([0] * 10 + [1]), test_share=0.2, seed=0)


def parts(**n_train):
    return {s: (np.arange(n)[::-1], np.arange(n, n + 7)) for s, n in n_train.items()}


@pytest.mark.parametrize(
    ("share", "part", "first", "last"),
    [
        (0.1, 0, 0, 743),
        (0.1, 1, 743, 1487),
        (0.1, 9, 6694, 7438),
        (1.0, 0, 0, 7438),
        (0.01, 0, 0, 74),
    ],
)
def test_digits_take_743_images_a_slice(share, part, first, last):
    sites = parts(USPS=7438, MNIST=56000)
    sides = take_sides(sites, Rule(share, part=part))
    for site, (train, test) in sites.items():
        np.testing.assert_array_equal(sides[site].train, train[first:last])
        np.testing.assert_array_equal(sides[site].test, test)
        assert len(sides[site].validation) == 0


def test_office_takes_62_and_50_images():
    sides = take_sides(parts(amazon=766, dslr=125), Rule(0.5, validation=0.4))
    assert [len(side) for side in sides["amazon"]] == [62, 50, 7]
    assert [len(side) for side in sides["dslr"]] == [62, 50, 7]
    np.testing.assert_array_equal(sides["amazon"].train, np.arange(766)[::-1][:62])
    np.testing.assert_array_equal(sides["amazon"].validation, np.arange(766)[::-1][-50:])


def test_no_row_is_on_two_sides():
    for rule in (Rule(0.5, 0.4), Rule(0.6, 0.4, test_rest=True), Rule(0.3, 0.2, part=1)):
        for sides in take_sides(parts(A=90, B=50), rule).values():
            rows = np.concatenate(sides)
            assert len(np.unique(rows)) == len(rows)


def test_the_smallest_site_can_be_one_that_is_not_at_hand():
    sides = take_sides(parts(SVHN=906, MNIST=16000), Rule(0.1, smallest=7438))
    assert {len(side.train) for side in sides.values()} == {743}


def test_a_site_with_too_few_images_is_named_or_takes_what_it_has():
    sites = parts(SVHN=906, MNIST=16000)
    with pytest.raises(SplitError, match="site 'SVHN' has 906 training images, and rows 0 to 1487"):
        take_sides(sites, Rule(0.2, smallest=7438))
    sides = take_sides(sites, Rule(0.2, smallest=7438, fewer=True))
    assert (len(sides["SVHN"].train), len(sides["MNIST"].train)) == (906, 1487)
    with pytest.raises(SplitError, match="site 'SVHN' has no image left for part 2"):
        take_sides(sites, Rule(0.1, smallest=7438, fewer=True, part=2))


def test_validation_is_counted_with_training():
    with pytest.raises(SplitError, match="rows 0 to 70 and 60 for validation are asked for"):
        take_sides(parts(A=100), Rule(0.7, 0.6))
    sides = take_sides(parts(A=100), Rule(0.7, 0.6, fewer=True))["A"]
    assert (len(sides.train), len(sides.validation)) == (40, 60)


def test_what_is_left_over_can_be_tested_but_for_rows_of_a_used_group():
    rows, test = np.arange(10), np.array([10, 11])
    groups = np.array([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 9, 9])
    rule = Rule(0.3, 0.1, test_rest=True)
    sides = take_sides({"A": (rows, test)}, rule, {"A": groups})["A"]
    assert sides.train.tolist() == [0, 1, 2]
    assert sides.validation.tolist() == [9]
    assert sides.test.tolist() == [10, 11, 4, 5, 6, 7]  # 3 is of a trained, 8 of a validated group
    without = take_sides({"A": (rows, test)}, rule)["A"]
    assert without.test.tolist() == [10, 11, 3, 4, 5, 6, 7, 8]


def test_validation_shares_no_group_with_training():
    groups = np.array([0, 1, 2, 0, 3])
    sides = take_sides({"A": (np.arange(5), np.array([], int))}, Rule(0.4, 0.4), {"A": groups})["A"]
    assert (sides.train.tolist(), sides.validation.tolist()) == ([0, 1], [4])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"share": 0}, "share is 0 and validation 0"),
        ({"share": 1.5}, "share is 1.5"),
        ({"share": 0.1, "validation": -0.1}, "validation -0.1"),
        ({"share": 0.1, "smallest": 0}, "smallest is 0"),
        ({"share": 0.1, "part": -1}, "part is -1"),
    ],
)
def test_a_rule_that_means_nothing_is_refused(settings, says):
    with pytest.raises(SplitError, match=says):
        Rule(**settings)
