import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from data_prep.errors import StoreError
from data_prep.images.store import (
    StoredImage,
    is_image_store,
    read_image_store,
    signature_differences,
    write_image_store,
)
from data_prep.site_store import read_site_store
from data_prep.units import Unit


@pytest.fixture
def store(prepare, laboratory):
    for k, entry in enumerate(laboratory.training):
        entry |= {"participant_id": f"sub-{k // 2}", "fold": k // 2, "class": "xyxx"[k]}
    return prepare()[1]


def test_units_are_patients_with_all_of_their_images(store):
    assert store.units == (Unit("sub-0", "x", 2, 0), Unit("sub-1", "x", 2, 1))
    assert store.image_unit.tolist() == [0, 0, 1, 1]
    table = (store.path / "participants.tsv").read_text().splitlines()
    assert table[0].split("\t")[:1] == ["participant_id"]
    assert table[1].split("\t") == ["sub-0", "LAB", "training", "x", "2", "0"]


def test_records_are_what_monai_s_loader_takes(store, laboratory):
    record = store.records([1])[1]
    assert record == {
        "image": str(laboratory.root / "image/004.png"),
        "label": str(laboratory.root / "label/004.png"),
        "class": 0,
        "unit": 1,
    }
    assert len(store.records()) == 4


def test_a_subset_has_these_units_alone(store):
    part = store.subset([1])
    assert [u.id for u in part.units] == ["sub-1"]
    assert [r["unit"] for r in part.records()] == [0, 0]
    assert part.signature() == store.signature()
    assert part.fingerprint() != store.fingerprint()
    assert len(store.units) == 2


def test_what_must_not_leave_the_site_is_named(store, laboratory):
    names = store.private_names()
    assert {"sub-0", "001", "001.png", "image/001.png", str(laboratory.root)} <= set(names)
    told = json.dumps(store.signature())
    assert not [name for name in names if name in told]


def test_the_fingerprint_is_that_of_the_content(prepare, laboratory, store):
    before = store.fingerprint()
    assert read_image_store(store.path).fingerprint() == before
    for change in ("fold", "class", "participant_id"):
        entry = laboratory.training[0]
        old = entry[change]
        others = {"fold": 2, "class": "y", "participant_id": "sub-9"}
        if change == "fold":
            laboratory.training[1][change] = 2
        entry[change] = others[change]
        assert prepare()[1].fingerprint() != before
        entry[change] = laboratory.training[1][change] = old
        laboratory.training[1]["class"] = "y"
    laboratory.picture("label/001.png", np.eye(10, 12))
    assert prepare()[1].fingerprint() != before


@pytest.mark.parametrize("which", ["image/002.png", "label/002.png"])
def test_a_missing_or_another_file_is_named(store, laboratory, which):
    file = laboratory.root / which
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"\0")
    read_image_store(store.path)  # the size is that of before
    with pytest.raises(StoreError, match=f"{which} of .* was changed"):
        read_image_store(store.path, verify=True)
    file.write_bytes(content + b"\0")
    with pytest.raises(StoreError, match=f"{which} of .* was changed"):
        read_image_store(store.path)
    file.unlink()
    with pytest.raises(StoreError, match=f"{which} of .* is missing"):
        read_image_store(store.path)


def test_images_that_were_moved_are_found_at_another_root(store, laboratory, tmp_path):
    laboratory.root.rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=r"folder .* is not there"):
        read_image_store(store.path)
    again = read_image_store(store.path, verify=True, root=tmp_path / "elsewhere")
    assert again.fingerprint() == store.fingerprint()


@pytest.mark.parametrize("table", ["dataset.json", "participants.tsv"])
def test_a_table_that_was_changed_is_refused(store, table):
    file = store.path / table
    file.write_text(file.read_text().replace("sub-0", "sub-8"))
    with pytest.raises(StoreError, match=f"{table} was changed"):
        read_image_store(store.path)


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("format_version", 9, "format 9, this version reads 1"),
        ("dim", "two", "dim is 'two'"),
        ("images", [], "images is"),
        ("images", {}, "says nothing about image/001.png"),
        ("labels", "none", "labels is 'none'"),
        ("store", "other", "not an image store"),
    ],
)
def test_a_damaged_description_is_one_sentence(store, part, value, words):
    file = store.path / "dataset_description.json"
    description = json.loads(file.read_text())
    file.write_text(json.dumps(description | {part: value}))
    with pytest.raises(StoreError, match=words):
        read_image_store(store.path)


def test_what_is_no_image_store_is_said(tmp_path, store, make_store):
    with pytest.raises(StoreError, match="no image store at"):
        read_image_store(tmp_path / "nothing")
    connectomes = make_store()
    assert not is_image_store(connectomes)
    with pytest.raises(StoreError, match="is not an image store"):
        read_image_store(connectomes)
    assert is_image_store(store.path)
    with pytest.raises(StoreError, match="is a store of images"):
        read_site_store(store.path)


def test_a_full_disk_leaves_the_old_store(store, laboratory, monkeypatch):
    import errno

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = {f.name: f.read_bytes() for f in store.path.iterdir()}
    monkeypatch.setattr("data_prep.images.store.shutil.copyfile", full)
    with pytest.raises(OSError, match=r"[Nn]o space"):
        write_image_store(
            store.path,
            images=store.images,
            description=dict(store.description),
            copy_from=laboratory.root,
        )
    assert {f.name: f.read_bytes() for f in store.path.iterdir()} == before
    assert [f.name for f in store.path.parent.iterdir() if not f.name.startswith(".")] == ["LAB"]


def test_a_dicom_folder_is_one_file_to_the_store(tmp_path):
    series = tmp_path / "data" / "series"
    series.mkdir(parents=True)
    (series / "1.dcm").write_bytes(b"abc")
    (series / "2.dcm").write_bytes(b"de")
    from data_prep.images.store import content_checksum, content_size

    before = content_checksum(series)
    assert content_size(series) == 5
    (series / "2.dcm").write_bytes(b"df")
    assert content_checksum(series) != before


def test_the_reader_needs_no_package_but_numpy(store):
    code = (
        "import sys\nfrom data_prep.images.store import read_image_store\n"
        f"read_image_store({str(store.path)!r})\n"
        "heavy = ('monai', 'torch', 'nibabel', 'PIL', 'pandas', 'scipy', 'rich', 'typer')\n"
        "print([n for n in heavy if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def signature(**changes):
    return {
        "store": "images",
        "format_version": 1,
        "dim": 2,
        "channels": 3,
        "labels": {"0": "background", "1": "nucleus"},
        "classes": ["a", "b"],
        "synthetic": False,
    } | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"channels": 1}, ["number of channels: 3 and 1"]),
        ({"dim": 3}, ["number of spatial axes: 2 and 3"]),
        ({"synthetic": True}, ["synthetic: False and True"]),
        ({"labels": None}, ["masks: only one of them has any"]),
        ({"labels": {"0": None, "1": None}}, []),
        ({"labels": {"0": "background", "1": "cell"}}, ["name of label 1: nucleus and cell"]),
        ({"labels": {"0": None, "1": None, "2": None}}, ["label ids: 0, 1 and 0, 1, 2"]),
        ({"classes": None}, ["classes: only one of them has any"]),
        ({"classes": ["b", "a"]}, ["classes: a, b and b, a"]),
    ],
)
def test_signatures_that_differ_are_told_apart(changes, words):
    found = signature_differences(signature(), json.loads(json.dumps(signature(**changes))))
    assert len(found) == len(words)
    assert all(part in sentence for part, sentence in zip(words, found, strict=True))


def test_names_of_labels_do_not_depend_on_capitals(prepare, laboratory):
    _, first = prepare()
    laboratory.content["labels"] = {"0": "Background", "1": "Cytoplasm", "2": "NUCLEUS"}
    _, second = prepare(site="OTHER")
    assert signature_differences(first.signature(), second.signature()) == []


def test_an_image_of_several_files_is_kept_as_such(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name in ("t1.nii", "t2.nii"):
        (data / name).write_bytes(b"x")
    facts = {"sha256": {}, "bytes": {"t1.nii": 1, "t2.nii": 1}, "shape": [2, 2]}
    image = StoredImage(("t1.nii", "t2.nii"), None, None, "p", "training", None, facts)
    description = {"site": "S", "synthetic": False, "root": str(data), "dim": 2, "channels": 2,
                   "channel_axis": "none", "labels": None, "label_map": {}, "classes": None,
                   "summary": {}}  # fmt: skip
    store = write_image_store(tmp_path / "S", images=[image], description=description)
    assert store.images == (image,)
    assert store.records()[0]["image"] == [str(data / "t1.nii"), str(data / "t2.nii")]
    shutil.rmtree(data)
