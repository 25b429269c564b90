"""Splits of groups against numbers computed by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedbn.core import clusters


def vectors(**updates):
    return {name: np.array(update, dtype=float) for name, update in updates.items()}


def test_norm_and_cosine_by_hand():
    left, right = np.array([3.0, 4.0]), np.array([4.0, 3.0])
    assert clusters.norm(left) == 5.0
    assert clusters.cosine_similarity(left, right) == 0.96
    assert clusters.cosine_similarity(left, -left) == -1.0
    assert clusters.cosine_similarity(left, np.zeros(2)) == 0.0


@pytest.mark.parametrize(
    ("mean_norm", "site_norm", "expected"),
    [(1.01, 4.99, True), (1.0, 4.99, False), (1.01, 5.0, False), (0.5, 9.0, False)],
)
def test_a_group_is_cut_where_the_mean_is_small_and_a_site_is_large(mean_norm, site_norm, expected):
    updates = vectors(A=[3, 4], B=[-3, -2])  # norms 5 and 3.6; their mean (0, 1) has norm 1
    found = clusters.should_split(
        np.array([0.0, 1.0]), updates, mean_norm=mean_norm, site_norm=site_norm
    )
    assert found is expected


def test_one_site_is_never_cut():
    updates = vectors(A=[3, 4])
    assert not clusters.should_split(np.zeros(2), updates, mean_norm=1, site_norm=1)
    with pytest.raises(ValueError, match="a group of 1 sites cannot be cut in two"):
        clusters.bipartition(updates)


def test_a_split_by_hand():
    """Two pairs, each 0.96 alike; across the cut the most alike are A and D: 0.28."""
    updates = vectors(A=[3, 4], B=[4, 3], C=[-4, 3], D=[-3, 4])
    assert clusters.cosine_similarity(updates["A"], updates["D"]) == 0.28
    cut = clusters.bipartition(updates)
    assert cut.parts == (("A", "B"), ("C", "D"))
    assert cut.similarity == 0.28


def test_a_single_site_can_be_cut_off():
    cut = clusters.bipartition(vectors(UM=[1, 0.1], NYU=[1, 0], USM=[-1, 1]))
    assert cut.parts == (("NYU", "UM"), ("USM",))


@pytest.mark.parametrize("seed", range(5))
def test_no_other_bipartition_has_a_smaller_similarity_across(seed):
    rng = np.random.default_rng(seed)
    updates = {name: rng.standard_normal(3) for name in "ABCDEF"}

    def across(part):
        return max(
            clusters.cosine_similarity(updates[a], updates[b])
            for a in part
            for b in set(updates) - set(part)
        )

    found = clusters.bipartition(updates)
    best = min(
        across(part) for size in range(1, 6) for part in itertools.combinations(updates, size)
    )
    assert found.similarity == pytest.approx(best)
    assert across(found.parts[0]) == pytest.approx(best)


def test_neither_order_nor_length_matters():
    updates = vectors(A=[1, 0], B=[1, 0], C=[0, 1], D=[0, 1])  # ties on both sides
    expected = clusters.bipartition(updates)
    assert expected.parts == (("A", "B"), ("C", "D"))
    for order in itertools.permutations(updates):
        longer = {name: updates[name] * (k + 1) for k, name in enumerate(order)}
        assert clusters.bipartition(longer).parts == expected.parts
