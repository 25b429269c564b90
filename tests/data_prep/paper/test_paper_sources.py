"""Readers of the paper's image sets, on made-up folders of the same form."""

from __future__ import annotations

import numpy as np
import pytest

from data_prep.errors import SourceError
from data_prep.paper import sources
from data_prep.paper.splits import Rule, split_pool, take_sides


def test_digits_by_domain(digits):
    domains = {domain.site: domain for domain in sources.read_digits(digits)}
    assert list(domains) == ["MNIST", "SVHN", "USPS", "SynthStandIn", "MNIST-M"]
    assert [len(d.labels) for d in domains.values()] == [60, 70, 60, 60, 60]
    assert domains["MNIST"].labels.tolist() == 6 * list(range(10))
    with np.load(digits / "mnist.npz") as there:
        expected = np.repeat(there["x_test"][3][..., None], 3, axis=2)
    (image,) = domains["MNIST"].images(np.array([43]), 28)  # the training images come first
    np.testing.assert_array_equal(image, expected)
    for domain in domains.values():
        (image,) = domain.images(np.array([5]), 28)
        assert (image.shape, image.dtype) == ((28, 28, 3), np.uint8)


def test_digits_of_one_house_number_stay_on_one_side(digits):
    svhn = sources.read_digits(digits)[1]
    assert svhn.groups[:60].tolist() == [k // 2 + 1 for k in range(60)]
    assert len(set(svhn.groups[60:].tolist())) == 10
    assert set(svhn.groups[60:].tolist()).isdisjoint(svhn.groups[:60].tolist())
    parts = {"SVHN": split_pool(svhn.labels, test_share=0.2, seed=0, groups=svhn.groups)}
    sides = take_sides(parts, Rule(0.5, 0.3), {"SVHN": svhn.groups})["SVHN"]
    houses = [set(svhn.groups[side].tolist()) for side in sides]
    assert houses[0].isdisjoint(houses[1] | houses[2])
    assert houses[1].isdisjoint(houses[2])


def test_the_real_synthdigits_is_taken_where_it_is_there(digits):
    (digits / "synth_standin.npz").rename(digits / "synth_digits.npz")
    assert [d.site for d in sources.read_digits(digits)][3] == "SynthDigits"


def damaged(file, **changes):
    with np.load(file) as archive:
        arrays = dict(archive)
    for name, change in changes.items():
        if change is None:
            del arrays[name]
        else:
            arrays[name] = change(arrays[name])
    np.savez(file, **arrays)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"y_train": None}, "has images x_train but no classes y_train"),
        ({"x_test": lambda x: x / 255}, r"x_test is float64 \(20, 28, 28\); images are uint8"),
        ({"x_test": lambda x: x[..., None]}, r"x_test is uint8 \(20, 28, 28, 1\)"),
        ({"y_test": lambda y: y[:-1]}, "y_test holds no digit 0 to 9 for each of 20 images"),
        ({"y_test": lambda y: y + 1}, "y_test holds no digit 0 to 9"),
        ({"x_train": None, "x_test": None}, "has no images x"),
    ],
)
def test_arrays_that_do_not_belong_together(digits, changes, says):
    damaged(digits / "mnist.npz", **changes)
    with pytest.raises(SourceError, match=says):
        sources.read_digits(digits)


def test_a_missing_domain_is_named(digits):
    (digits / "usps.npz").unlink()
    with pytest.raises(SourceError, match=r"has no usps\.npz; write one \.npz a domain"):
        sources.read_digits(digits)


def test_an_image_that_stands_twice_is_taken_once(digits):
    with np.load(digits / "svhn.npz") as archive:
        copies = archive["x"][40:43]
    damaged(digits / "svhn.npz", x_extra=lambda x: np.concatenate([x[:7], copies]))
    svhn = sources.read_digits(digits)[1]
    assert (len(svhn.labels), len(svhn.groups)) == (67, 67)
    assert svhn.copies[0] == ("row 67 of svhn.npz", "row 40 of svhn.npz")
    assert len(svhn.copies) == 3
    images = np.stack(list(svhn.images(np.arange(67), 32)))
    assert len(np.unique(images.reshape(67, -1), axis=0)) == 67
    assert not any(domain.copies for domain in sources.read_digits(digits)[2:])


def test_the_digest_is_another_for_other_images_or_classes(digits):
    found = [domain.digest for domain in sources.read_digits(digits)]
    assert found == [domain.digest for domain in sources.read_digits(digits)]
    damaged(digits / "usps.npz", y_test=lambda y: y[::-1])
    damaged(digits / "mnist.npz", x_test=lambda x: x[::-1])
    again = [domain.digest for domain in sources.read_digits(digits)]
    assert [a == b for a, b in zip(found, again, strict=True)] == [False, True, False, True, True]


def test_office_by_domain(office):
    domains = sources.read_office(office)
    assert [d.site for d in domains] == ["amazon", "caltech", "dslr", "webcam"]
    for domain in domains:
        assert domain.labels.tolist() == [k for k in range(10) for _ in range(6)]
        for row, image in enumerate(domain.images(np.arange(60), 16)):
            assert image.shape == (16, 16, 3)
            assert image[0, 0].tolist() == [10 * (row // 6), row % 6, 0]


def test_a_missing_class_or_domain_of_office_is_named(office, picture):
    for file in (office / "amazon" / "mug").iterdir():
        file.unlink()
    (office / "amazon" / "mug").rmdir()
    with pytest.raises(SourceError, match="amazon has no folder for mug"):
        sources.read_office(office)
    (office / "images_dslr.zip").unlink()
    picture(office / "amazon" / "mug" / "a.png", (0, 0, 0))
    with pytest.raises(SourceError, match="no folder and no zip file of the domain 'dslr'"):
        sources.read_office(office)


def test_a_grey_picture_gets_three_channels_and_a_damaged_one_is_named(office, picture):
    picture(office / "amazon" / "mug" / "frame_0.png", 7, mode="L")
    (office / "amazon" / "mug" / "frame_1.png").write_bytes(b"\x89PNG no more")
    amazon = sources.read_office(office)[0]
    rows = np.flatnonzero(amazon.labels == sources.OFFICE_CLASSES.index("mug"))
    assert next(amazon.images(rows[:1], 8))[0, 0].tolist() == [7, 7, 7]
    with pytest.raises(SourceError, match=r"frame_1\.png cannot be read as a picture"):
        list(amazon.images(rows, 8))


def test_domainnet_has_ten_classes_and_the_given_split(domainnet):
    domains = sources.read_domainnet(domainnet)
    assert [d.site for d in domains] == [
        "clipart", "infograph", "painting", "quickdraw", "real", "sketch"
    ]  # fmt: skip
    for domain in domains:
        assert domain.n_train == 40
        assert domain.labels.tolist() == [k for k in range(10) for _ in range(4)] + list(range(10))
        assert next(domain.images(np.array([41]), 4)).shape == (4, 4, 3)


def test_a_copy_in_the_test_list_is_left_out(domainnet):
    picture = (domainnet / "real/bird/real_001 0.jpg").read_bytes()
    (domainnet / "real/bird/real_001 4.jpg").write_bytes(picture)
    (domainnet / "real/bird/real_001 1.jpg").write_bytes(picture)
    real = sources.read_domainnet(domainnet)[4]
    assert (real.n_train, len(real.labels)) == (39, 48)
    assert real.copies == (
        ("real/bird/real_001 1.jpg", "real/bird/real_001 0.jpg"),
        ("real/bird/real_001 4.jpg", "real/bird/real_001 0.jpg"),
    )
    assert real.labels[39:].tolist() == list(range(1, 10))


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda f: (f / "real_test.txt").unlink(), r"real_test\.txt is missing"),
        (
            lambda f: (f / "real_train.txt").write_text("real/bird/a.jpg\n"),
            r"real_train\.txt, line 1: 'real/bird/a\.jpg' is not <domain>/<class>/<file> <number>",
        ),
        (
            lambda f: (f / "real_train.txt").write_text("real/bird/../../a.jpg 3\n"),
            "line 1",
        ),
        (
            lambda f: (f / "real_train.txt").write_text((f / "real_test.txt").read_text()),
            "is in the training and in the test list",
        ),
        (
            lambda f: next((f / "real" / "tiger").iterdir()).unlink(),
            r"lacks real/tiger/.*\(1 such pictures\)",
        ),
        (
            lambda f: (f / "real_train.txt").write_text(
                (f / "real_train.txt").read_text().replace("/whale/", "/wale/")
            ),
            r"real_train\.txt names no picture of 'whale'",
        ),
    ],
)
def test_lists_that_are_not_domainnets(domainnet, edit, says):
    edit(domainnet)
    with pytest.raises(SourceError, match=says):
        sources.read_domainnet(domainnet)
