"""A store whose images are rows of one array is read as one of the same pictures in files."""

import numpy as np
import pytest
from PIL import Image

from data_prep.errors import StoreError
from data_prep.images.comparing import check_folds
from data_prep.images.datalist import DataList, Entry
from data_prep.images.preparation import ImageSettings, prepare_images
from data_prep.images.reading import ImageError, read_image
from data_prep.images.stack import Picture, made_from, unchanged_stack, write_stack
from data_prep.images.store import read_image_store, signature_differences

PICTURES = [
    Picture("one", "b", "training"),
    Picture("two", "a", "training"),
    Picture("two", "b", "training"),
    Picture("one", "c", "test"),
]


@pytest.fixture
def arrays():
    return np.random.default_rng(0).integers(20, 256, (4, 5, 7, 3), dtype=np.uint8)  # 7 wide


@pytest.fixture
def stacked(tmp_path, arrays):
    return write_stack(
        tmp_path / "S",
        site="S",
        images=iter(arrays),
        pictures=PICTURES,
        classes=("one", "two", "three"),
        source={"name": "made up"},
        digest=made_from("x"),
    )


@pytest.fixture
def in_files(tmp_path, arrays):
    entries = []
    for k, (array, picture) in enumerate(zip(arrays, PICTURES, strict=True)):
        Image.fromarray(array).save(tmp_path / f"{k}.png")
        entries.append(
            Entry((f"{k}.png",), None, picture.class_name, picture.participant_id, picture.section)
        )
    datalist = DataList(tmp_path, tuple(entries), None, ("R", "G", "B"), {})
    settings = ImageSettings(None, ("one", "two", "three"))
    return prepare_images(
        tmp_path / "F", site="S", datalist=datalist, settings=settings, source={}
    )[0]


def test_rows_are_read_as_the_files_are(stacked, in_files, arrays):
    rows = {(i.participant_id, i.row): i for i in stacked.images}
    assert list(rows) == [("a", 1), ("b", 0), ("b", 2), ("c", 3)]
    for k, picture in enumerate(PICTURES):
        there = read_image(in_files.root / f"{k}.png").array
        row = rows[picture.participant_id, k]
        here = read_image(stacked.root / row.name, channel_axis="last", row=k)
        np.testing.assert_array_equal(here.array, there)
        np.testing.assert_array_equal(stacked.stack()[k], np.moveaxis(there, 0, -1))
        assert row.shape == (7, 5) == next(i for i in in_files.images if i.name == f"{k}.png").shape
    with pytest.raises(ImageError, match="has 4 images, and none in row 4"):
        read_image(stacked.root / "stack.npy", channel_axis="last", row=4)


def test_both_say_the_same_of_the_site(stacked, in_files):
    assert in_files.stack() is None
    assert stacked.units == in_files.units
    assert stacked.sections == in_files.sections == ("training", "training", "test")
    assert stacked.signature() == in_files.signature()
    assert signature_differences(stacked.signature(), in_files.signature()) == []
    here, there = (store.description["summary"] for store in (stacked, in_files))
    assert set(here) == set(there)
    assert here["histograms"] == there["histograms"]
    assert {k: v for k, v in here.items() if k in ("shape", "spacing", "stored_as", "classes")} == {
        k: v for k, v in there.items() if k in ("shape", "spacing", "stored_as", "classes")
    }
    assert set(stacked.description) >= set(in_files.description) - {
        "patients",
        "inputs",
        "versions",
    }


def test_records_name_the_row(stacked):
    assert stacked.records([0]) == [
        {"image": str(stacked.root / "stack.npy"), "class": 1, "row": 1, "unit": 0}
    ]
    part = stacked.subset([1])
    assert [record["row"] for record in part.records()] == [0, 2]
    assert (
        part.fingerprint() != stacked.fingerprint() == read_image_store(stacked.path).fingerprint()
    )
    assert {"a", "stack", "stack.npy"} <= set(stacked.private_names())


def test_a_stack_that_was_changed_is_refused(stacked):
    array = np.load(stacked.root / "stack.npy")
    array[0, 0, 0, 0] ^= 1
    np.save(stacked.root / "stack.npy", array)
    read_image_store(stacked.path)
    with pytest.raises(StoreError, match=r"stack\.npy of .* was changed after"):
        read_image_store(stacked.path, verify=True)
    (stacked.root / "stack.npy").unlink()
    with pytest.raises(StoreError, match=r"stack\.npy of .* is missing"):
        read_image_store(stacked.path)


def test_a_store_of_the_same_content_is_found_again(stacked):
    assert unchanged_stack(stacked.path, made_from("x")).images == stacked.images
    assert unchanged_stack(stacked.path, made_from("y")) is None
    assert unchanged_stack(stacked.path.parent / "none", made_from("x")) is None


def test_a_given_split_is_not_divided(stacked, in_files):
    check_folds(stacked, 5)
    without = in_files.subset([0, 1])
    with pytest.raises(StoreError):
        check_folds(without, 5)
