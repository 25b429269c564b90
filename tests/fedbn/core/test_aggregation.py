from __future__ import annotations

import itertools
import math
import random
import struct
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbn.core.aggregation import LARGEST_ADDEND, ContributionError, WeightedMean
from fedbn.core.normalization import AVERAGED

FLOAT32_MAX = float(torch.finfo(torch.float32).max)
SUBNORMAL = 2.0**-149


def as_float32(value):
    return float(np.float32(value))


def mean_of(contributions, expected, order=None):
    mean = WeightedMean(expected)
    for index in order if order is not None else range(len(contributions)):
        tensors, weight = contributions[index]
        mean.add(f"site {index}", tensors, weight)
    return mean.result()


def bits(tensor):
    return bytes(tensor.reshape(-1).clone().view(torch.uint8).tolist()) if tensor.numel() else b""


def double_to_bits(value):
    return struct.unpack("<q", struct.pack("<d", value))[0]


def reference(values, weights):
    """Mean by exact fractions: products rounded to float64, then one sum, one total, one ratio."""
    exact = sum((Fraction(v * w) for v, w in zip(values, weights, strict=True)), Fraction(0))
    total = float(sum((Fraction(w) for w in weights), Fraction(0)))
    # float(Fraction) rounds correctly; a negative sum that rounds to nothing has a sign of its own.
    return np.float32(np.float64(float(exact)) / np.float64(total))


# ----------------------------------------------------------------------------------------- the mean


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([1.0, 4.0], [1, 2], 3.0),
        ([1.0, 2.0, 6.0], [1, 1, 1], 3.0),
        ([10.0, -2.0, 0.5, 3.0], [172, 61, 110, 69], (1720 - 122 + 55 + 207) / 412),
        ([7.25], [5], 7.25),
        ([1.0, 3.0], [0.25, 0.75], 2.5),
        ([1e30, 1.0, -1e30], [1, 1, 1], 1 / 3),
        ([FLOAT32_MAX, FLOAT32_MAX], [10**9, 3], FLOAT32_MAX),
        ([SUBNORMAL, SUBNORMAL, SUBNORMAL], [1, 1, 1], SUBNORMAL),
        ([-0.0, -0.0], [1, 1], 0.0),
    ],
)
def test_mean_is_the_hand_computed_one(values, weights, expected):
    like = {"w": torch.zeros(())}
    result = mean_of(
        [({"w": torch.tensor(v)}, w) for v, w in zip(values, weights, strict=True)], like
    )
    assert result["w"].dtype == torch.float32
    assert result["w"].item() == float(np.float32(expected))


def test_equal_weights_of_any_size_give_the_same_bits():
    generator = torch.Generator().manual_seed(0)
    sites = [{"w": torch.randn(50, generator=generator)} for _ in range(5)]
    like = {"w": torch.zeros(50)}
    plain = mean_of([(tensors, 1) for tensors in sites], like)["w"]
    assert torch.equal(mean_of([(tensors, 64) for tensors in sites], like)["w"], plain)
    torch.testing.assert_close(plain, torch.stack([t["w"] for t in sites]).mean(0))


def test_one_site_gets_its_own_bits_back():
    values = torch.tensor([1.0, -3.5, 1e-45, FLOAT32_MAX, 1e-38, 0.1])
    for weight in (1, 3, 172, 0.1, 1e-9, 12345.678):
        assert torch.equal(mean_of([({"w": values}, weight)], {"w": values})["w"], values)


@pytest.mark.parametrize("dtype", AVERAGED)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)])
def test_every_float_dtype_and_shape_comes_back_as_it_went(dtype, shape):
    generator = torch.Generator().manual_seed(1)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    sites = [torch.randn(shape, generator=generator, dtype=wide).to(dtype) for _ in range(3)]
    weights = [3, 1, 7]
    contributions = [({"w": t}, w) for t, w in zip(sites, weights, strict=True)]
    results = [
        mean_of(contributions, {"w": sites[0]}, order)["w"]
        for order in itertools.permutations(range(3))
    ]
    assert results[0].shape == shape
    assert results[0].dtype == dtype
    assert len({bits(result) for result in results}) == 1
    exact = sum(t.to(wide) * w for t, w in zip(sites, weights, strict=True)) / 11
    tolerance = torch.finfo(dtype).eps * (1 + dtype.is_complex)
    torch.testing.assert_close(results[0].to(wide), exact, rtol=tolerance, atol=0)


def test_the_parts_of_a_complex_number_are_averaged_apart():
    like = {"w": torch.zeros(1, dtype=torch.complex64)}
    sites = [torch.tensor([1 + 1e30j]), torch.tensor([3 + 1j]).conj(), torch.tensor([2 - 1e30j])]
    result = mean_of([({"w": site}, 1) for site in sites], like)["w"]
    assert result[0] == complex(2, np.float32(-1 / 3))


@pytest.mark.parametrize("value", [complex(0, math.nan), complex(math.inf, 0)])
def test_a_complex_number_that_is_not_finite_is_refused(value):
    like = {"w": torch.zeros(1, dtype=torch.complex64)}
    with pytest.raises(
        ContributionError, match="entry 'w' holds 1 values of 1 that are not finite"
    ):
        mean_of([({"w": torch.tensor([value])}, 1)], like)


def test_tensors_that_are_not_contiguous_or_need_gradients_are_averaged_by_index():
    values = torch.arange(12.0).reshape(3, 4)
    parameter = torch.nn.Parameter(values.clone())
    like = {"w": torch.zeros(4, 3)}
    result = mean_of([({"w": values.t()}, 1), ({"w": parameter.t()}, 1)], like)["w"]
    assert torch.equal(result, values.t())
    assert not result.requires_grad


def test_contributions_and_expectation_are_not_changed_and_the_result_is_a_copy():
    given_tensor, like = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    mean = WeightedMean({"w": like})
    mean.add("NYU", {"w": given_tensor}, 3)
    first = mean.result()["w"]
    first.zero_()
    assert given_tensor.tolist() == [1, 1, 1]
    assert like.tolist() == [0, 0, 0]
    assert mean.result()["w"].tolist() == [1, 1, 1]


def test_reset_forgets_every_site():
    mean = WeightedMean({"w": torch.zeros(1)})
    mean.add("NYU", {"w": torch.ones(1)}, 2)
    mean.reset()
    assert mean.contributors == []
    with pytest.raises(ContributionError, match="no contribution was accepted"):
        mean.result()
    mean.add("NYU", {"w": torch.full((1,), 5.0)}, 1)
    assert mean.result()["w"].tolist() == [5]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_integers_are_never_averaged(dtype):
    with pytest.raises(ContributionError, match="entry 'counter' is torch"):
        WeightedMean({"counter": torch.zeros(1, dtype=dtype)})


# --------------------------------------------------------------------------- order of arrival: bits

anything = st.floats(width=32, allow_nan=False, allow_infinity=False)
magnitudes = st.builds(
    lambda sign, mantissa, exponent: as_float32(sign * math.ldexp(mantissa, exponent)),
    st.sampled_from([-1, 1]),
    st.floats(1, 2, exclude_max=True, width=32),
    st.integers(-149, 126),
)
special = st.sampled_from(
    [0.0, -0.0, SUBNORMAL, FLOAT32_MAX, -FLOAT32_MAX, 1e30, -1e30, 1.0, -1.0, 2.0**-24]
).map(as_float32)
whole_weights = st.integers(1, 2**20).map(float)
float_weights = st.floats(1e-6, 1e6, allow_nan=False)


@st.composite
def federations(draw):
    n_sites = draw(st.integers(1, 9))
    n_values = draw(st.integers(1, 4))
    kind = draw(st.sampled_from([anything, magnitudes, special, magnitudes | special]))
    rows = [draw(st.lists(kind, min_size=n_values, max_size=n_values)) for _ in range(n_sites)]
    if draw(st.booleans()):  # cancellation: each site meets its opposite
        rows += [[-value for value in row] for row in rows[: draw(st.integers(1, n_sites))]]
    weight = draw(st.sampled_from([whole_weights, float_weights, st.just(1.0)]))
    weights = [draw(weight) for _ in rows]
    order = draw(st.permutations(range(len(rows))))
    return rows, weights, order


@settings(max_examples=250, deadline=None, derandomize=True)
@given(federations())
def test_bits_do_not_depend_on_the_order_and_equal_exact_arithmetic(federation):
    rows, weights, order = federation
    like = {"w": torch.zeros(len(rows[0]))}
    sites = [({"w": torch.tensor(row)}, w) for row, w in zip(rows, weights, strict=True)]
    arrived, shuffled = mean_of(sites, like)["w"], mean_of(sites, like, order)["w"]
    assert bits(arrived) == bits(shuffled)
    exact = [reference(column, weights) for column in zip(*rows, strict=True)]
    assert arrived.tolist() == [float(value) for value in exact]


def test_bits_of_float64_survive_the_worst_known_mixtures():
    """Sums that break a running sum, Kahan's, and a sum of three numbers."""
    tricky = [
        [1.0, 2.0**-60, 2.0**-120, 2.0**-180, 2.0**-240, -1.0],
        [2.0**990, 1.0, 2.0**-1000, -(2.0**990), 2.0**-1050, -1.0],
        [1e30, 1e-30, -1e30, 3e-45, -1e-30, 1e15],
        [1.0, 2.0**-53, 2.0**-106, 2.0**-159, 2.0**-212, 2.0**-265],
        [1.0, 2.0**-53, -(2.0**-106), 2.0**-159, 2.0**-54, 2.0**-54],
    ]
    rows = np.array(tricky).T
    like = {"w": torch.zeros(len(tricky), dtype=torch.float64)}
    sites = [({"w": torch.from_numpy(row.copy())}, 1) for row in rows]
    exact = [float(sum(map(Fraction, column), Fraction(0))) / len(rows) for column in tricky]
    for order in itertools.permutations(range(len(rows))):
        result = mean_of(sites, like, order)["w"].tolist()
        assert [*map(double_to_bits, result)] == [*map(double_to_bits, exact)]


def test_sign_of_zero_does_not_depend_on_the_order():
    like = {"w": torch.zeros(3)}
    sites = [
        ({"w": torch.tensor([-0.0, 0.0, -0.0])}, 1),
        ({"w": torch.tensor([-0.0, -0.0, 1.0])}, 1),
        ({"w": torch.tensor([0.0, -0.0, -1.0])}, 1),
        ({"w": torch.tensor([-0.0, 0.0, 0.0])}, 1),
    ]
    results = {bits(mean_of(sites, like, order)["w"]) for order in itertools.permutations(range(4))}
    assert results == {bytes(12)}


def test_many_sites_of_mixed_magnitude_in_random_orders():
    shuffle = random.Random(3)
    generator = torch.Generator().manual_seed(3)
    exponents = torch.randint(-100, 90, (60, 200), generator=generator)
    values = torch.ldexp(torch.randn(60, 200, generator=generator), exponents)
    like = {"w": torch.zeros(200)}
    sites = [({"w": row}, shuffle.randint(1, 500)) for row in values]
    order = list(range(60))
    first = mean_of(sites, like)["w"]
    for _ in range(5):
        shuffle.shuffle(order)
        assert bits(mean_of(sites, like, order)["w"]) == bits(first)
    weights = [weight for _, weight in sites]
    for column in range(0, 200, 20):
        assert first[column].item() == float(reference(values[:, column].tolist(), weights))


# ---------------------------------------------------------------------------------- what is refused


def fitting():
    return {"a.weight": torch.ones(2, 3), "b.weight": torch.ones(4)}


def changed(**changes):
    tensors = {**fitting(), **{name.replace("__", "."): value for name, value in changes.items()}}
    return {name: value for name, value in tensors.items() if value is not None}


nan = float("nan")
inf = float("inf")
REFUSED = {
    "NaN": (changed(b__weight=torch.tensor([1, nan, nan, 1])), 1, "'b.weight' holds 2 values of 4"),
    "infinite": (changed(b__weight=torch.tensor([1, -inf, 1, 1])), 1, "'b.weight' holds 1 values"),
    "shape": (changed(b__weight=torch.ones(5)), 1, r"'b.weight' is \(5,\).*expected \(4,\)"),
    "shape that would broadcast": (changed(b__weight=torch.ones(1)), 1, r"is \(1,\)"),
    "dtype": (changed(b__weight=torch.ones(4).double()), 1, "float64, expected .* torch.float32"),
    "integers": (changed(b__weight=torch.ones(4).long()), 1, "int64"),
    "missing": (changed(b__weight=None), 1, r"1 missing \(b.weight\)"),
    "unknown": (changed(bn__weight=torch.ones(1)), 1, r"1 unknown \(bn.weight\)"),
    "empty": ({}, 1, "2 missing"),
    "no tensor": (changed(b__weight=3.0), 1, "'b.weight' is a float, expected a tensor"),
    "array": (changed(b__weight=np.ones(4, np.float32)), 1, "is a ndarray, expected a tensor"),
    "sparse": (changed(b__weight=torch.ones(4).to_sparse()), 1, "'b.weight' is not a dense"),
    "meta": (changed(b__weight=torch.ones(4, device="meta")), 1, "'b.weight' is not a dense"),
    "weight 0": (fitting(), 0, "its weight is 0, expected a finite number above 0"),
    "weight NaN": (fitting(), nan, "its weight is nan"),
    "weight infinite": (fitting(), inf, "its weight is inf"),
    "weight negative": (fitting(), -3, "its weight is -3"),
    "weight None": (fitting(), None, "its weight is None"),
    "weight text": (fitting(), "12", "its weight is 12"),
    "weight beyond float64": (fitting(), 10**400, "expected a finite number above 0"),
    "weight enormous": (fitting(), 1e300, "its weight is 1e.300, expected one from"),
    "weight tiny": (fitting(), 1e-300, "its weight is 1e-300, expected one from"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_contribution_leaves_the_sum_untouched(case):
    tensors, weight, reason = REFUSED[case]
    clean, attacked = WeightedMean(fitting()), WeightedMean(fitting())
    attacked_first = WeightedMean(fitting())
    with pytest.raises(ContributionError, match=reason):
        attacked_first.add("UM", tensors, weight)
    assert attacked_first.contributors == []
    for mean in (clean, attacked, attacked_first):
        mean.add("NYU", changed(b__weight=torch.tensor([1.0, 2.0, 3.0, 4.0])), 3)
    with pytest.raises(ContributionError, match=reason):
        attacked.add("UM", tensors, weight)
    for mean in (clean, attacked, attacked_first):
        mean.add("USM", fitting(), 1)
        assert mean.contributors == ["NYU", "USM"]
    assert clean.result()["b.weight"].tolist() == [1.0, 1.75, 2.5, 3.25]
    for mean in (attacked, attacked_first):
        for name, tensor in clean.result().items():
            assert bits(mean.result()[name]) == bits(tensor)


def test_a_site_counts_once_in_a_round():
    mean = WeightedMean({"w": torch.zeros(1)})
    mean.add("NYU", {"w": torch.ones(1)}, 1)
    with pytest.raises(ContributionError, match="contributed to this round already"):
        mean.add("NYU", {"w": torch.full((1,), 9.0)}, 1)
    assert mean.result()["w"].tolist() == [1]


# --------------------------------------------------------------------------------- range and memory


def test_float32_times_the_largest_weight_stays_finite_and_exact():
    like = {"w": torch.zeros(2)}
    edge = torch.tensor([FLOAT32_MAX, SUBNORMAL])
    for weight in (2.0**100, 2.0**-100):
        sites = [({"w": edge}, weight), ({"w": edge}, weight)]
        assert torch.equal(mean_of(sites, like)["w"], edge)


def test_float64_that_would_overflow_the_sum_is_refused_not_infinite():
    like = {"w": torch.zeros(2, dtype=torch.float64)}
    mean = WeightedMean(like)
    mean.add("NYU", {"w": torch.tensor([1.0, LARGEST_ADDEND], dtype=torch.float64)})
    for value, weight in ((1.7e308, 1), (LARGEST_ADDEND, 2), (1e300, 1e10)):
        with pytest.raises(ContributionError, match="too large to be summed"):
            mean.add("UM", {"w": torch.tensor([1.0, value], dtype=torch.float64)}, weight)
    assert torch.isfinite(mean.result()["w"]).all()


def test_many_contributions_of_the_largest_size_do_not_overflow():
    like = {"w": torch.zeros(1, dtype=torch.float64)}
    mean = WeightedMean(like)
    for index in range(200):
        mean.add(f"site {index}", {"w": torch.full((1,), LARGEST_ADDEND, dtype=torch.float64)})
    assert mean.result()["w"].item() == pytest.approx(LARGEST_ADDEND, rel=1e-15)


def test_memory_does_not_grow_with_the_number_of_sites():
    def memory(n_sites):
        generator = torch.Generator().manual_seed(0)
        mean = WeightedMean({"w": torch.zeros(20_000)})
        tracemalloc.start()
        for index in range(n_sites):
            tensors = {"w": torch.randn(20_000, generator=generator)}
            mean.add(f"site {index}", tensors, 17 + index)
        mean.result()
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return kept, peak

    few, many = memory(4), memory(40)
    an_array = 20_000 * 8
    assert many[0] <= few[0] + an_array
    assert many[0] < 4 * an_array
    assert many[1] <= few[1] + 2 * an_array
