"""Units into training, validation and test: every one once, strata kept, the same each time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fedbn.tasks.data import DataError, Split, Unit
from fedbn.tasks.splits import MIN_TRAINING_UNITS, check_disjoint, split_units


@dataclass(frozen=True)
class Settings:
    n_folds: int = 4
    fold: int = 0
    seed: int = 0
    validation_share: float = 0.0
    training_share: dict[str, float] = field(default_factory=dict)

    def training_share_of(self, site):
        return self.training_share.get(site, 1.0)


@dataclass(frozen=True)
class Data:
    units: tuple[Unit, ...]
    site: str = "North"
    held_out_fold: int | None = None


def people(n, strata=("ill", "well"), folds=None, site="North"):
    """`strata` in turn; ids whose order is not that of the rows."""
    return Data(
        tuple(
            Unit(f"p{(7 * k) % 1000:04d}", strata[k % len(strata)], 1, folds and k % folds)
            for k in range(n)
        ),
        site,
    )


def strata_of(data, units):
    names, counts = np.unique([data.units[k].stratum for k in units], return_counts=True)
    return dict(zip(names.tolist(), counts.tolist(), strict=True))


@given(
    n=st.integers(24, 80),
    strata=st.sampled_from([("ill", "well"), ("a", "b", "c"), ("ill", "well", "well"), (None,)]),
    seed=st.integers(0, 2**31 - 1),
    share=st.sampled_from([0.5, 0.75, 1.0]),
    validation=st.sampled_from([0.0, 0.2, 0.4]),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_every_unit_is_on_one_side_at_most_and_held_out_once(n, strata, seed, share, validation):
    data = people(n, strata)
    held_out = []
    for fold in range(4):
        split = split_units(data, Settings(4, fold, seed, validation, {"North": share}))
        for part in split:
            assert part.tolist() == sorted(set(part.tolist()))
        everyone = np.concatenate(split)
        assert len(np.unique(everyone)) == len(everyone)
        assert len(everyone) == n or share < 1
        assert bool(len(split.validation)) == bool(validation)
        held_out += split.test.tolist()
    assert sorted(held_out) == list(range(n))


@pytest.mark.parametrize("strata", [("ill", "well"), ("ill", "well", "well"), ("a", "b", "c")])
def test_each_part_has_the_strata_in_the_site_s_own_proportion(strata):
    data = people(120, strata)
    split = split_units(data, Settings(5, 1, 3, 0.25, {"North": 0.5}))
    for part, share in zip(split, (0.8 * 0.5 * 0.75, 0.8 * 0.5 * 0.25, 0.2), strict=True):
        for name, n in strata_of(data, part).items():
            assert n == pytest.approx(share * 120 * strata.count(name) / len(strata), abs=1)


def test_units_without_strata_are_divided_all_the_same():
    data = people(22, (None,))
    sizes = [len(split_units(data, Settings(4, fold)).test) for fold in range(4)]
    assert sorted(sizes) == [5, 5, 6, 6]
    split = split_units(data, Settings(4, 0, validation_share=0.25))
    assert len(split.validation) == 4
    other = split_units(data, Settings(4, 0, seed=1)).test
    assert split.test.tolist() != other.tolist()


@pytest.mark.parametrize("strata", [("ill", "well"), (None,)])
def test_who_is_where_depends_on_ids_and_not_on_rows(strata):
    data = people(40, strata)
    back = Data(data.units[::-1])
    settings = Settings(4, 2, 5, 0.2, {"North": 0.7})
    there, here = split_units(data, settings), split_units(back, settings)
    for one, other in zip(there, here, strict=True):
        assert {data.units[k].id for k in one} == {back.units[k].id for k in other}


@pytest.mark.parametrize("kind", ["training", "validation"])
def test_a_smaller_share_is_a_part_of_a_larger_one(kind):
    data, before = people(80), None
    for share in (0.15, 0.3, 0.45, 0.6, 0.9):
        if kind == "training":
            split = split_units(data, Settings(training_share={"North": share}))
            taken = split.train
        else:
            split = split_units(data, Settings(validation_share=share))
            taken = split.validation
        assert before is None or set(before) < set(taken)
        before = taken
    assert split.test.tolist() == split_units(data, Settings()).test.tolist()


def test_validation_units_come_out_of_the_training_share():
    data = people(80)
    share = Settings(training_share={"North": 0.5})
    trained = split_units(data, share).train
    split = split_units(data, Settings(validation_share=0.25, training_share={"North": 0.5}))
    assert set(split.train) | set(split.validation) == set(trained)
    assert split.test.tolist() == split_units(data, share).test.tolist()


def test_two_sites_with_the_same_ids_draw_apart():
    settings = Settings(training_share={"North": 0.5, "South": 0.5})
    north, south = (split_units(people(40, site=s), settings) for s in ("North", "South"))
    assert north.test.tolist() == south.test.tolist()
    assert north.train.tolist() != south.train.tolist()


def test_folds_of_the_data_win_over_the_seed():
    data = people(40, folds=4)
    for seed in (0, 1):
        assert split_units(data, Settings(4, 3, seed)).test.tolist() == list(range(3, 40, 4))


@pytest.mark.parametrize(
    ("data", "changes", "sentence"),
    [
        (people(40, folds=5), {}, "made for 5 folds, but the experiment asks for fold 0 of 4"),
        (
            Data(people(40, folds=4).units, held_out_fold=1),
            {"fold": 2},
            "made for fold 1 of 4, but the experiment asks for fold 2 of 4",
        ),
        (
            Data((*people(8, folds=4).units, Unit("p", "ill", 1, None))),
            {},
            "made for 4 folds and 1 subjects in none",
        ),
        (
            people(16),
            {"training_share": {"North": 0.05}},
            r"training_share 0.05 leaves none of its 6 training subjects of 'well'",
        ),
        (
            people(16),
            {"validation_share": 0.05},
            r"validation 0.05 leaves none of its 6 training subjects of 'well'",
        ),
        (people(8), {"validation_share": 0.7}, "2 training subjects of 8 are too few"),
        (people(5, (None,)), {"n_folds": 2}, "2 training subjects of 5 are too few"),
    ],
)
def test_what_cannot_be_divided_is_named(data, changes, sentence):
    with pytest.raises(DataError, match=f"site 'North': .*{sentence}"):
        split_units(data, Settings(**changes))


def test_as_few_as_can_be_trained_on():
    data = people(MIN_TRAINING_UNITS + 4)
    assert len(split_units(data, Settings(2)).train) == MIN_TRAINING_UNITS


def test_a_unit_on_two_sides_is_refused_without_its_name():
    check_disjoint(Split(np.array([1, 2]), np.array([3]), np.array([0])))
    twice = Split(np.array([1, 2]), np.array([2]), np.array([1, 0]))
    with pytest.raises(ValueError, match="subjects on two sides of the split: 2; split by subject"):
        check_disjoint(twice)
