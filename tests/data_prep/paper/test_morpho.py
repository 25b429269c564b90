"""Morpho-MNIST's transformations on drawn digits, whose measures are known."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from scipy import ndimage

pytest.importorskip("skimage", reason="scikit-image is not installed (the extra paper)")

from data_prep.errors import SourceError
from data_prep.paper import morpho


@pytest.fixture(scope="module")
def one():
    """A bar, 4 pixels wide and 20 high."""
    image = np.zeros((28, 28), np.uint8)
    image[4:24, 12:16] = 255
    return image


@pytest.fixture(scope="module")
def zero():
    """A ring, 4 pixels wide."""
    y, x = np.mgrid[:28, :28]
    r = np.hypot(y - 13.5, x - 13.5)
    return np.where((r > 6) & (r < 10), 255, 0).astype(np.uint8)


@pytest.fixture(scope="module")
def tee():
    """Two bars that meet in a fork."""
    image = np.zeros((28, 28), np.uint8)
    image[4:8, 4:24] = 255
    image[8:24, 12:16] = 255
    return image


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("digit", ["one", "zero"])
def test_a_shape_has_the_thickness_that_was_drawn(digit, request):
    shape = morpho.Shape(request.getfixturevalue(digit))
    assert shape.mask.shape == (112, 112)
    assert 3.2 < shape.thickness < 4.3
    assert (shape.skeleton <= shape.mask).all()


@pytest.mark.parametrize(
    ("change", "expected", "compare"),
    [(morpho.thin, 1 - 0.7, np.less_equal), (morpho.thicken, 1 + 1.0, np.greater_equal)],
)
def test_thinner_and_thicker_by_the_amount(zero, change, expected, compare):
    shape = morpho.Shape(zero)
    mask = change(shape, rng())
    assert compare(mask, shape.mask).all()
    # The area of a ring goes with its width.
    assert mask.sum() / shape.mask.sum() == pytest.approx(expected, abs=0.15)
    half = change(shape, rng(), 0.35)
    assert abs(int(half.sum()) - int(shape.mask.sum())) < abs(
        int(mask.sum()) - int(shape.mask.sum())
    )


def test_a_swelling_is_local_and_grows(one):
    shape = morpho.Shape(one)
    mask = morpho.swell(shape, rng(3))
    row, column = morpho._points(shape.skeleton, rng(3), 1)[0]
    y, x = np.mgrid[:112, :112]
    inside = np.hypot(y - row, x - column) < 7 * np.sqrt(shape.thickness) / 2 * morpho.SCALE
    np.testing.assert_array_equal(mask[~inside], shape.mask[~inside])
    assert mask[inside].sum() > 1.2 * shape.mask[inside].sum()
    np.testing.assert_array_equal(morpho.swell(shape, rng(3), strength=1.0), shape.mask)


@pytest.mark.parametrize("digit", ["one", "zero", "tee"])
@pytest.mark.parametrize("seed", range(4))
def test_fractures_cut_strokes_through(digit, seed, request):
    shape = morpho.Shape(request.getfixturevalue(digit))
    mask = morpho.fracture(shape, rng(seed), n_fractures=1)
    assert (mask <= shape.mask).all()
    pieces = ndimage.label(mask, np.ones((3, 3)))[1]
    assert pieces == (1 if digit == "zero" else 2)  # a ring that is cut once is still one piece
    lost = (shape.mask.sum() - mask.sum()) / morpho.SCALE**2
    assert lost == pytest.approx(1.5 * shape.thickness, rel=0.5)


def test_fractures_keep_away_from_tips_and_forks(tee):
    shape = morpho.Shape(tee)
    inner = morpho._away_from_tips_and_forks(shape.skeleton, 2 * morpho.SCALE)
    assert 0 < inner.sum() < shape.skeleton.sum()
    rows, columns = np.nonzero(inner)
    fork = np.hypot(rows - 5.5 * morpho.SCALE, columns - 13.5 * morpho.SCALE)
    assert fork.min() > morpho.SCALE
    dot = np.zeros((28, 28), np.uint8)
    dot[13:16, 13:16] = 255  # nothing is left of its skeleton
    assert not morpho.fracture(morpho.Shape(dot), rng()).all()


def test_digits_are_transformed_one_by_one(one, zero, tee):
    images = np.stack([one, zero, tee, one, zero, tee])
    kinds = morpho.MIXTURES["local"]
    found, chosen = morpho.transform(images, kinds, seed=5)
    assert (found.dtype, found.shape) == (np.uint8, images.shape)
    assert set(chosen) <= {0, 1, 2}
    again, _ = morpho.transform(images[:2], kinds, seed=5)
    np.testing.assert_array_equal(again, found[:2])
    assert (morpho.transform(images, kinds, seed=6)[0] != found).any()
    many = [np.random.default_rng([5, row]).integers(3) for row in range(6)]
    assert chosen.tolist() == many


def test_plain_digits_stay_nearly_as_they_are(one, zero, tee):
    images = np.stack([one, zero, tee])
    found, _ = morpho.transform(images, ["plain"], seed=0)
    assert abs(found.astype(int) - images).mean() < 6
    for kind in ("thin", "thick", "swollen", "fractured"):
        changed, _ = morpho.transform(images, [kind], seed=0)
        assert abs(changed.astype(int) - found).mean() > 2, kind


def test_a_grey_image_has_no_shape():
    with pytest.raises(SourceError, match="one grey value"):
        morpho.Shape(np.full((28, 28), 9, np.uint8))


def test_without_scikit_image_the_extra_is_named(one, monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage.transform", None)
    with pytest.raises(SourceError, match=r"pip install 'fedbn\[paper\]'"):
        morpho.Shape(one)
