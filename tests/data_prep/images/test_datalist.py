import json

import pytest

from data_prep.errors import StoreError
from data_prep.images.datalist import find_images, read_datalist, read_table_column


def write_list(folder, **content):
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "dataset.json"
    file.write_text(json.dumps(content))
    return file


def pair(name, **extra):
    return {"image": f"image/{name}.png", "label": f"label/{name}.png", **extra}


def test_a_decathlon_list_is_read_as_monai_reads_it(tmp_path):
    from monai.data import load_decathlon_datalist

    content = {
        "labels": {"0": "background", "1": "nucleus"},
        "modality": {"0": "MRI"},
        "training": [pair("a", fold=0), {"image": "./image/b.png", "label": "label/b.png"}],
        "validation": [pair("c", participant_id=7)],
        "test": ["image/d.png"],
    }
    file = write_list(tmp_path, **content)
    datalist = read_datalist(file)
    for section in ("training", "validation"):
        expected = [
            (item["image"], item["label"])
            for item in load_decathlon_datalist(file, data_list_key=section)
        ]
        found = [
            (str(tmp_path / e.name), str(tmp_path / e.label))
            for e in datalist.entries
            if e.section == section
        ]
        assert [(i.replace("/./", "/"), label) for i, label in expected] == found
    assert datalist.label_names == {0: "background", 1: "nucleus"}
    assert datalist.channel_names == ("MRI",)
    assert [e.fold for e in datalist.entries] == [0, None, None]
    assert datalist.entries[2].participant_id == "7"
    assert datalist.not_read == 1


def test_nnu_net_s_labels_and_several_files_an_image_are_read(tmp_path):
    entry = {"image": ["t1.nii.gz", "t2.nii.gz"], "label": "seg.nii.gz"}
    file = write_list(
        tmp_path,
        labels={"background": 0, "tumour": 1},
        channel_names={"0": "T1", "1": "T2"},
        training=[entry],
    )
    datalist = read_datalist(file)
    assert datalist.entries[0].files == ("t1.nii.gz", "t2.nii.gz")
    assert datalist.label_names == {0: "background", 1: "tumour"}
    assert datalist.channel_names == ("T1", "T2")


def test_a_label_that_is_a_number_is_a_class(tmp_path):
    file = write_list(
        tmp_path,
        labels={"0": "benign", "1": "malignant"},
        training=[{"image": "a.png", "label": 1}, {"image": "b.png", "label": 0}],
    )
    assert [e.class_name for e in read_datalist(file).entries] == ["malignant", "benign"]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([pair("a"), {"image": "/data/b.png", "label": "label/b.png"}], "absolute path.*--root"),
        ([{"image": "../b.png", "label": "label/b.png"}], r"entry 1: \.\./b.png leads out of"),
        ([pair("a"), {"image": "image/b.png", "label": "x/../../b.png"}], "entry 2.*leads out of"),
        ([pair("a"), pair("b"), pair("a")], "image/a.png more than once"),
        ([pair("a"), {"image": "./image/a.png", "label": "label/b.png"}], "more than once"),
        ([pair("a"), {"image": "label/a.png", "label": "b.png"}], "as an image and as a label"),
        ([{"label": "label/a.png"}], "entry 1 has no image"),
        ([{"image": ""}], "is no path"),
        ([pair("a", fold="first")], "fold is 'first'"),
        ([], "no list under training"),
    ],
)
@pytest.mark.parametrize("section", ["training", "test"])
def test_a_bad_entry_is_one_sentence_that_names_it(tmp_path, entries, words, section):
    with pytest.raises(StoreError, match=words):
        read_datalist(write_list(tmp_path, **{section: entries}))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"training": 3}', '{"training": {"image": "a"}}'])
def test_a_file_that_is_no_data_list_is_said(tmp_path, text):
    file = tmp_path / "dataset.json"
    file.write_text(text)
    with pytest.raises(StoreError, match="data list"):
        read_datalist(file)


@pytest.mark.parametrize("labels", [{"a": "b"}, ["background"], {"0": "x", "one": "y"}])
def test_labels_that_are_no_ids_are_said(tmp_path, labels):
    with pytest.raises(StoreError, match="labels is"):
        read_datalist(write_list(tmp_path, labels=labels, training=[pair("a")]))


def test_with_a_root_absolute_paths_below_it_are_read(tmp_path):
    entry = {"image": str(tmp_path / "data" / "a.png"), "label": "labels/../b.png"}
    file = write_list(tmp_path / "lists", training=[entry])
    datalist = read_datalist(file, tmp_path / "data")
    assert (datalist.entries[0].name, datalist.entries[0].label) == ("a.png", "b.png")
    with pytest.raises(StoreError, match="leads out of"):
        read_datalist(file, tmp_path / "lists")


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def pairs(datalist):
    return [(e.name, e.label) for e in datalist.entries]


@pytest.mark.parametrize(
    ("files", "images", "labels"),
    [
        (
            {"img/a.png": "seg/a.png", "img/b.png": "seg/b.png"},
            "img/*.png",
            "seg/*.png",
        ),
        (
            {"p1/t1.nii.gz": "p1/seg.nii.gz", "p2/t1.nii.gz": "p2/seg.nii.gz"},
            "*/t1.nii.gz",
            "*/seg.nii.gz",
        ),
        (
            {"a_0000.png": "l/a.png", "b_0000.png": "l/b.png"},
            "*_0000.png",
            "l/*.png",
        ),
        (
            {"x/y/c1.png": "s/x/y/m1.png", "c2.png": "s/m2.png"},
            "**/c[0-9].png",
            "s/**/m[0-9].png",
        ),
        ({"a[1]/i1.png": "m/m1.png"}, "a[1]/i?.png", "m/m?.png"),
    ],
)
def test_masks_belong_to_images_by_what_the_wildcards_stand_for(tmp_path, files, images, labels):
    touch(tmp_path, *files, *files.values())
    datalist, without_mask, without_image = find_images(
        str(tmp_path / images), str(tmp_path / labels)
    )
    assert dict(pairs(datalist)) == files
    assert (without_mask, without_image) == ([], [])


def test_what_has_no_partner_is_said_and_hidden_files_are_passed_over(tmp_path):
    touch(tmp_path, "i/a.png", "i/b.png", "i/._a.png", "m/b.png", "m/c.png")
    datalist, without_mask, without_image = find_images(f"{tmp_path}/i/*.png", None)
    assert pairs(datalist) == [("a.png", None), ("b.png", None)]
    assert (without_mask, without_image) == ([], [])
    datalist, without_mask, without_image = find_images(
        f"{tmp_path}/i/*.png", f"{tmp_path}/m/*.png"
    )
    assert pairs(datalist) == [("i/a.png", None), ("i/b.png", "m/b.png")]
    assert (without_mask, without_image) == (["i/a.png"], ["m/c.png"])


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        ("i/*.jpg", None, "finds no file"),
        ("i/*.png", "m/*.tif", "finds no file"),
        ("i/*.png", "o/m?.png", "no mask belongs to an image"),
    ],
)
def test_patterns_that_do_not_fit_are_said(tmp_path, images, labels, words):
    touch(tmp_path, "i/a.png", "i/b.png", "o/m1.png")
    with pytest.raises(StoreError, match=words):
        find_images(f"{tmp_path}/{images}", labels and f"{tmp_path}/{labels}")


def write_table(folder, text, name="classes.csv"):
    file = folder / name
    file.write_text(text)
    return file


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_a_table_is_read_whatever_stands_between_its_columns(tmp_path, mark):
    rows = [("Image", "lab", "CLASS"), ("001", "A", "x"), ("002", "A", ""), ("001", "B", "y")]
    file = write_table(tmp_path, "\n".join(mark.join(row) for row in rows))
    assert read_table_column(file, "class", "lab=A") == {"001": "x"}
    assert read_table_column(file, "class", "lab=B") == {"001": "y"}


@pytest.mark.parametrize(
    ("text", "rows", "words"),
    [
        ("image,type\na,x\n", None, "no column 'class'"),
        ("name,class\na,x\n", None, "no column 'image'"),
        ("image,class\na,x\na,y\n", None, "'a' stands in it twice"),
        ("image,class\na,x,y\n", None, r"line 2: 3 field\(s\), the header names 2"),
        ("image,class\na,x\n", "lab=A", "no column 'lab'"),
        ("image,class,lab\na,x,B\n", "lab=A", "no row to use with lab=A"),
    ],
)
def test_a_table_that_cannot_be_used_is_said(tmp_path, text, rows, words):
    with pytest.raises(ValueError, match=words):
        read_table_column(write_table(tmp_path, text), "class", rows)


def test_rows_are_matched_by_path_name_stem_or_number(tmp_path):
    file = write_table(tmp_path, "image,class\n")
    images = ["i/001.png", "i/b.nii.gz", "i/c.png", "d.png", "e.png"]
    datalist = read_datalist(write_list(tmp_path, training=[{"image": i} for i in images]))
    values = {"1": "number", "b": "stem", "c.png": "name", "d.png": "path", "z": "none"}
    changed, without_row, without_image = datalist.with_column("class_name", file, values)
    classes = [e.class_name for e in changed.entries]
    assert classes == ["number", "stem", "name", "path", None]
    assert (without_row, without_image) == (["e.png"], ["z"])
    assert set(changed.inputs) == {"dataset.json", "classes.csv"}


def test_a_row_that_may_mean_two_images_is_refused(tmp_path):
    file = write_table(tmp_path, "image,class\n")
    entries = [{"image": "i/1.png"}, {"image": "j/1.png"}]
    datalist = read_datalist(write_list(tmp_path, training=entries))
    with pytest.raises(StoreError, match=r"'1' may mean i/1.png or j/1.png"):
        datalist.with_column("class_name", file, {"1": "x"})
