"""``python -m data_prep images``: from files to a store; each kind of bad input is one sentence."""

import json
import shutil

import nibabel
import numpy as np
import pytest
from PIL import Image

from data_prep.images.store import read_image_store


def test_a_store_says_what_is_in_the_images(prepare, laboratory):
    output, store = prepare()
    assert store.site == "LAB"
    assert (store.dim, store.channels, store.synthetic) == (2, 3, False)
    assert store.labels == {0: "background", 1: "cytoplasm", 2: "nucleus"}
    assert store.root == laboratory.root
    first = store.images[0]
    assert (first.name, first.label, first.shape) == ("image/001.png", "label/001.png", (12, 10))
    pixels = np.asarray(Image.open(laboratory.root / "image/001.png"), dtype=float)
    assert first.facts["intensity"]["mean"] == pytest.approx(pixels.mean(), rel=1e-5)
    assert first.facts["intensity"]["std"] == pytest.approx(pixels.std(), rel=1e-5)
    assert first.facts["label_voxels"] == {"0": 84, "1": 32, "2": 4}
    assert first.facts["spacing"] is None
    summary = store.description["summary"]
    assert summary["labels"]["1"] == {"fraction": 32 / 120, "images": 4}
    assert summary["shape"]["max"] == [12, 10]
    all_pixels = [np.asarray(Image.open(f)) for f in sorted((laboratory.root / "image").iterdir())]
    for channel, histogram in enumerate(summary["histograms"]):
        counts = np.bincount(np.stack(all_pixels)[..., channel].ravel())
        assert histogram["width"] == 1
        np.testing.assert_array_equal(histogram["counts"], counts[int(histogram["first"]) :])
    assert store.description["channel_names"] == ["R", "G", "B"]
    assert store.description["left_out"] == []
    assert "each image counts as a patient of its own" in output
    assert "4 patient(s) only" in output


def test_the_list_of_a_store_is_read_by_monai(prepare, laboratory):
    from monai.data import load_decathlon_datalist

    _, store = prepare()
    found = load_decathlon_datalist(store.path / "dataset.json", base_dir=store.root)
    assert [item["image"] for item in found] == [r["image"] for r in store.records()]
    assert [item["label"] for item in found] == [r["label"] for r in store.records()]


def test_a_copy_needs_the_first_folder_no_more(prepare, laboratory):
    _, store = prepare("--copy")
    shutil.rmtree(laboratory.root)
    moved = store.path.rename(store.path.parent / "moved")
    again = read_image_store(moved, verify=True)
    assert again.fingerprint() == store.fingerprint()
    assert all((moved / "images") in again.root.parents or again.root == moved / "images"
               for _ in again.images)  # fmt: skip
    assert sorted(p.name for p in again.root.rglob("*.png")) == sorted(
        [f"{k:03d}.png" for k in range(1, 5)] * 2
    )


def test_a_second_run_with_the_same_files_says_so(prepare, laboratory):
    _, store = prepare()
    before = (store.path / "dataset.json").stat().st_mtime_ns
    output, _ = prepare()
    assert "Unchanged" in output
    assert (store.path / "dataset.json").stat().st_mtime_ns == before
    for change in (["--force"], ["--label-names", "background,a,b"], ["--copy"]):
        output, store = prepare(*change)
        assert "Unchanged" not in output
    laboratory.picture("image/001.png", np.ones((10, 12, 3)))
    output, store = prepare("--copy")
    assert "Unchanged" not in output


def test_a_copy_of_the_files_counts_as_the_same(prepare, laboratory):
    _, store = prepare()
    for file in laboratory.root.rglob("*.png"):
        file.write_bytes(file.read_bytes())  # other times
    again = read_image_store(store.path, verify=True)
    assert again.fingerprint() == store.fingerprint()
    assert "Unchanged" in prepare()[0]


# --------------------------------------------------------------- files that are left out, and why


def mask(laboratory, name, array):
    laboratory.picture(f"label/{name}.png", array)


def bad_size(laboratory):
    mask(laboratory, "002", np.ones((10, 11)))


def strange_id(laboratory):
    mask(laboratory, "002", np.pad(np.full((2, 2), 9), ((0, 8), (0, 10))))


def coloured_mask(laboratory):
    mask(laboratory, "002", np.ones((10, 12, 3)))


def rgba(laboratory):
    laboratory.picture("image/002.png", np.ones((10, 12, 4)))


def grey(laboratory):
    laboratory.picture("image/002.png", np.ones((10, 12)))


def sixteen_bits(laboratory):
    array = np.arange(120, dtype=np.uint16).reshape(10, 12)
    Image.fromarray(array).save(laboratory.root / "image/002.png")


def truncated(laboratory):
    file = laboratory.root / "image/002.png"
    file.write_bytes(file.read_bytes()[:150])


def truncated_mask(laboratory):
    file = laboratory.root / "label/002.png"
    file.write_bytes(file.read_bytes()[:60])


def twin(laboratory):
    shutil.copy(laboratory.root / "image/001.png", laboratory.root / "image/002.png")


@pytest.mark.parametrize(
    ("spoil", "reason", "words"),
    [
        (bad_size, "mask of another size", "is 12x10, its mask 11x10"),
        (strange_id, "label id", "has a mask with 9, which is no label"),
        (coloured_mask, "mask cannot be used", "label/002.png has 3 channels"),
        (rgba, "another kind", "is 2D with 4 channels of uint8, where most images here are 2D"),
        (grey, "another kind", "is 2D with 1 channel of uint8"),
        (sixteen_bits, "another kind", "is 2D with 1 channel of uint16"),
        (truncated, "image cannot be used", "damaged or cut off"),
        (truncated_mask, "mask cannot be used", "damaged or cut off"),
        (twin, "duplicate", "has the same pixels as image/001.png"),
    ],
)
def test_a_file_that_does_not_fit_is_left_out_and_named(
    prepare, laboratory, reasons, spoil, reason, words
):
    spoil(laboratory)
    output, store = prepare()
    assert reasons(store) == {"image/002.png": reason}
    assert words in " ".join(output.split())
    assert [image.name for image in store.images] == [f"image/00{k}.png" for k in (1, 3, 4)]
    assert store.description["counts"] == {"found": 4, "left_out": 1, "kept": 3, "patients": 3}


def test_sixteen_bits_among_eight_are_another_kind(call, another_laboratory, tmp_path, reasons):
    laboratory = another_laboratory("grey", n_images=0)
    for k in range(4):
        array = laboratory.rng.integers(0, 250, (10, 12))
        file = laboratory.picture(f"image/{k}.png", array)
        laboratory.picture(f"label/{k}.png", array > 99)
    Image.fromarray((array * 200).astype(np.uint16)).save(file)
    call("images", "--images", f"{laboratory.root}/image/*.png", "--labels",
         f"{laboratory.root}/label/*.png", "--site", "GREY", "--out", tmp_path)  # fmt: skip
    assert reasons(read_image_store(tmp_path / "GREY")) == {"image/3.png": "another kind"}


def test_half_of_a_kind_and_half_of_another_is_refused(prepare, laboratory):
    for k in (1, 2):
        laboratory.picture(f"image/00{k}.png", np.full((10, 12), k))
    output, _ = prepare(code=1)
    assert "2 of 2D with 1 channel of uint8, 2 of 2D with 3 channels" in output


class Volumes:
    """Small NIfTI volumes with masks, as a data list."""

    def __init__(self, root, n=3):
        self.root, self.entries = root, []
        self.rng = np.random.default_rng(1)
        for k in range(n):
            name = f"{k}.nii.gz"
            self.save(f"i{name}", self.rng.normal(size=(6, 7, 5)).astype(np.float32))
            labels = np.zeros((6, 7, 5), np.uint8)
            labels[2:4, 2:4, 2:4] = 1
            self.save(f"m{name}", labels)
            self.entries.append({"image": f"i{name}", "label": f"m{name}"})

    def save(self, name, array, affine=None):
        self.root.mkdir(exist_ok=True)
        affine = np.diag([1.0, 1.0, 2.0, 1.0]) if affine is None else affine
        nibabel.save(nibabel.Nifti1Image(array, affine), self.root / name)

    def arguments(self, **content):
        file = self.root / "dataset.json"
        file.write_text(json.dumps({"training": self.entries, **content}))
        return "images", "--datalist", file, "--site", "VOL", "--out", self.root.parent / "out"


@pytest.fixture
def volumes(tmp_path):
    return Volumes(tmp_path / "volumes")


def shifted(volumes, by):
    affine = np.diag([1.0, 1.0, 2.0, 1.0])
    affine[0, 3] = by
    volumes.save("m1.nii.gz", nibabel.load(volumes.root / "m1.nii.gz").get_fdata(), affine)


def flipped(volumes):
    volumes.save("m1.nii.gz", np.ones((6, 7, 5)), np.diag([-1.0, 1.0, 2.0, 1.0]))


def not_finite(volumes):
    array = np.zeros((6, 7, 5), np.float32)
    array[1, 2, 3], array[0, 0, 0] = np.nan, np.inf
    volumes.save("i1.nii.gz", array)


def cut_off(volumes):
    file = volumes.root / "i1.nii.gz"
    file.write_bytes(file.read_bytes()[:-200])


@pytest.mark.parametrize(
    ("spoil", "reason", "words"),
    [
        (lambda v: shifted(v, 0.6), "mask of another affine", "up to 0.6 voxels apart"),
        (flipped, "mask of another affine", "lies elsewhere than its mask"),
        (not_finite, "not finite", "has 2 value(s) that are not finite"),
        (cut_off, "image cannot be used", "damaged or cut off"),
    ],
)
def test_a_volume_that_does_not_fit_is_left_out(call, volumes, reasons, spoil, reason, words):
    spoil(volumes)
    output = call(*volumes.arguments())
    store = read_image_store(volumes.root.parent / "out" / "VOL")
    assert reasons(store) == {"i1.nii.gz": reason}
    assert words in " ".join(output.split())
    assert store.description["summary"]["spacing"]["median"] == [1, 1, 2]


def test_an_affine_that_is_rounded_is_the_same(call, volumes, reasons):
    shifted(volumes, 0.05)
    call(*volumes.arguments())
    assert reasons(read_image_store(volumes.root.parent / "out" / "VOL")) == {}


def test_types_and_spacings_that_differ_are_said(call, volumes):
    volumes.save("i1.nii.gz", np.arange(210, dtype=np.int16).reshape(6, 7, 5), np.diag([3] * 4))
    volumes.save("m1.nii.gz", np.ones((6, 7, 5), np.uint8), np.diag([3] * 4))
    output = call(*volumes.arguments())
    assert "values are stored in different types (2 float32, 1 int16)" in output
    assert "spacings differ, from [1.0, 1.0, 2.0] to [3.0, 3.0, 3.0] mm" in output


# -------------------------------------------------------------------- what refuses the whole list


def test_ids_0_and_255_without_names_are_refused_and_a_map_helps(
    call, another_laboratory, tmp_path
):
    laboratory = another_laboratory("vessels", n_images=0)
    for k in range(3):
        laboratory.add(f"{k}")
        mask(laboratory, f"{k}", np.eye(10, 12) * 255)
    del laboratory.content["labels"]
    common = ("images", "--datalist", laboratory.write(), "--site", "EYE", "--out", tmp_path)
    output = call(*common, code=1)
    assert "the masks hold 0, 255" in output
    assert "--label-map 255=1" in output
    assert not (tmp_path / "EYE").exists()
    call(*common, "--label-map", "255=1", "--label-names", "background,vessel")
    store = read_image_store(tmp_path / "EYE")
    assert store.labels == {0: "background", 1: "vessel"}
    assert store.label_map == {255: 1}
    assert store.images[0].facts["label_voxels"] == {"0": 110, "1": 10}


def test_a_list_that_names_255_is_refused_too(prepare, laboratory):
    laboratory.content["labels"] = {"0": "background", "255": "nucleus"}
    output, _ = prepare(code=1)
    assert "the labels' ids are 0, 255" in output


def test_empty_masks_are_counted_and_all_empty_is_refused(prepare, laboratory):
    mask(laboratory, "001", np.zeros((10, 12)))
    output, store = prepare()
    assert "1 of 4 masks are empty" in output
    assert len(store.images) == 4
    for k in (2, 3, 4):
        mask(laboratory, f"00{k}", np.zeros((10, 12)))
    output, _ = prepare(code=1)
    assert "all 4 masks are empty" in output
    assert (store.path / "dataset.json").is_file()  # the old store stays
    del laboratory.content["labels"]
    assert "all 4 masks are empty" in prepare(code=1)[0]


def test_a_label_that_no_mask_has_is_said(prepare, laboratory):
    laboratory.content["labels"]["3"] = "platelet"
    output, store = prepare()
    assert "label 3 (platelet) is in no mask" in output
    assert store.description["summary"]["labels"]["3"] == {"fraction": 0, "images": 0}


def missing_file(laboratory):
    (laboratory.root / "image/002.png").unlink()


def missing_mask(laboratory):
    del laboratory.training[1]["label"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(missing_file, "1 file missing (image/002.png)"), (missing_mask, "1 without a mask (image/")],
)
def test_what_is_missing_is_refused_or_dropped(prepare, laboratory, reasons, spoil, words):
    spoil(laboratory)
    output, _ = prepare(code=1)
    assert words in output
    assert "--mismatch drop" in output
    output, store = prepare("--mismatch", "drop")
    assert set(reasons(store)) == {"image/002.png"}
    assert store.description["counts"]["found"] == 4


def one_image_twice(laboratory):
    laboratory.training.append(dict(laboratory.training[0]))


def absolute_path(laboratory):
    laboratory.training[0]["image"] = str(laboratory.root / "image/001.png")


def out_of_the_folder(laboratory):
    laboratory.training[0]["image"] = "../lab/image/001.png/../../../x.png"


def patient_in_two_sections(laboratory):
    for k, entry in enumerate(laboratory.training):
        entry["participant_id"] = f"p{k}"
    laboratory.add("005", section="test", participant_id="p0")


def patient_in_two_folds(laboratory):
    for k, entry in enumerate(laboratory.training):
        entry |= {"participant_id": f"p{k // 2}", "fold": k}


def some_patients(laboratory):
    laboratory.training[0]["participant_id"] = "p0"


def some_folds(laboratory):
    laboratory.training[0]["fold"] = 1


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (one_image_twice, "names the image image/001.png more than once"),
        (absolute_path, "is an absolute path"),
        (out_of_the_folder, "leads out of"),
        (patient_in_two_sections, "patient 'p0' is in the sections test, training"),
        (patient_in_two_folds, "patient 'p0' is in the folds 0, 1 of the data list (2 such"),
        (some_patients, "3 of 4 images have no participant_id"),
        (some_folds, "3 of 4 images have no fold"),
    ],
)
def test_a_list_that_contradicts_itself_is_refused(prepare, laboratory, tmp_path, spoil, words):
    spoil(laboratory)
    output, _ = prepare(code=1)
    assert words in output
    assert output.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_site_with_two_images_is_written_and_warned(prepare, laboratory, call):
    del laboratory.training[2:]
    output, store = prepare()
    assert "2 patient(s) only: they can hardly be divided" in output
    output = call("check", store.path, code=1)
    assert "has 2 patient(s), too few for 5 folds" in output
    assert "Valid." in call("check", store.path, "--folds", 0)


# --------------------------------------------------------------------------- patients and classes


def test_patients_come_from_a_table_and_hold_their_images_together(prepare, laboratory, tmp_path):
    table = tmp_path / "who.tsv"
    table.write_text("image\tparticipant_id\n1\tp2\n2\tp1\n3\tp2\n4\tp1\n9\tp9\n")
    output, store = prepare("--participants", table)
    assert [(u.id, u.n_samples) for u in store.units] == [("p1", 2), ("p2", 2)]
    assert store.image_unit.tolist() == [0, 0, 1, 1]
    assert [i.name[-5] for i in store.images] == ["2", "4", "1", "3"]
    assert "1 row(s) of who.tsv name no image here" in output
    assert "each image counts" not in output


def test_a_table_with_a_gap_is_refused_or_dropped(prepare, laboratory, tmp_path):
    table = tmp_path / "who.tsv"
    table.write_text("image\tparticipant_id\n1\tp2\n2\tp1\n3\tp2\n")
    output, _ = prepare("--participants", table, code=1)
    assert "1 without a row in who.tsv (image/004.png)" in output
    _, store = prepare("--participants", table, "--mismatch", "drop")
    assert len(store.images) == 3


CLASSES = (
    "image,lab,Category\n001,A,LYMPHOCYTE\n002,A,neutrophil\n003,A,basophil\n004,A,neutrophil\n"
)


def test_classes_are_those_that_are_wanted_in_their_order(prepare, tmp_path, reasons):
    table = tmp_path / "cells.csv"
    table.write_text(CLASSES + "001,B,monocyte\n")
    options = ("--classes", table, "--class-column", "category", "--rows", "lab=A")
    _, store = prepare(*options)
    assert store.classes == ("LYMPHOCYTE", "basophil", "neutrophil")
    output, store = prepare(*options, "--class-names", "neutrophil,lymphocyte,monocyte")
    assert store.classes == ("neutrophil", "lymphocyte", "monocyte")
    assert reasons(store) == {"image/003.png": "class"}
    assert [i.class_name for i in store.images] == ["lymphocyte", "neutrophil", "neutrophil"]
    assert [r["class"] for r in store.records()] == [1, 0, 0]
    assert [u.stratum for u in store.units] == ["lymphocyte", "neutrophil", "neutrophil"]
    assert store.description["summary"]["classes"]["monocyte"] == 0
    assert "class 'monocyte' has no image" in output


def test_images_with_a_class_need_no_mask(call, laboratory, tmp_path):
    table = tmp_path / "cells.csv"
    table.write_text(CLASSES)
    call("images", "--images", f"{laboratory.root}/image/*.png", "--classes", table,
         "--class-column", "Category", "--site", "LAB", "--out", tmp_path)  # fmt: skip
    store = read_image_store(tmp_path / "LAB")
    assert store.labels is None
    assert store.classes == ("LYMPHOCYTE", "basophil", "neutrophil")


def test_images_alone_make_a_store_for_prediction(call, laboratory, tmp_path):
    output = call("images", "--images", f"{laboratory.root}/image/*.png", "--site", "LAB",
                  "--out", tmp_path)  # fmt: skip
    assert "can be predicted, not trained on" in output


def test_sections_and_folds_of_the_list_are_kept(prepare, laboratory):
    for k, entry in enumerate(laboratory.training):
        entry |= {"participant_id": f"p{k}", "fold": k % 2}
    laboratory.add("005", section="test", participant_id="p9")
    laboratory.add("006", section="test", participant_id="p8", label=False)
    output, store = prepare()
    assert store.sections == ("training",) * 4 + ("test",)
    assert [u.fold for u in store.units] == [0, 1, 0, 1, None]
    assert "1 image(s) of the list's validation or test have no label: not read" in output
    assert len((store.path / "participants.tsv").read_text().splitlines()) == 6


# ------------------------------------------------------------------------------- options of one's


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--images", "*.png", "--datalist", "LIST"], "one of both"),
        ([], "one of both"),
        (["--datalist", "LIST", "--labels", "*"], "--labels needs --images"),
        (["--images", "*", "--root", "."], "--root needs --datalist"),
        (["--datalist", "LIST", "--mismatch", "no"], "mismatch is 'no'; allowed are error, drop"),
        (["--datalist", "LIST", "--channel-axis", "2"], "channel axis is '2'"),
        (["--datalist", "LIST", "--label-map", "255"], "write ids as 255=1,128=2"),
        (["--datalist", "LIST", "--label-names", "a"], "at least two names"),
        (["--datalist", "LIST", "--class-names", "a,A"], "at least two names"),
        (["--images", "a.png", "b.png"], "'b.png' is no option; put the pattern of --images"),
    ],
)
def test_a_wrong_option_is_said(call, laboratory, tmp_path, options, words):
    options = [str(laboratory.list) if o == "LIST" else o for o in options]
    output = call("images", "--site", "LAB", "--out", tmp_path / "out", *options, code=2)
    assert words in " ".join(output.split())


@pytest.mark.parametrize("name", ["a b", "", "../x", "-x"])
def test_a_site_needs_a_name_that_a_folder_can_have(call, laboratory, tmp_path, name):
    call("images", "--datalist", laboratory.list, "--out", tmp_path, f"--site={name}", code=2)


def test_another_folder_is_never_replaced(call, laboratory, tmp_path):
    (tmp_path / "out" / "LAB").mkdir(parents=True)
    (tmp_path / "out" / "LAB" / "work.txt").write_text("years")
    output = call("images", "--datalist", laboratory.list, "--site", "LAB", "--out",
                  tmp_path / "out", code=1)  # fmt: skip
    assert "holds something that is not a site store" in output


def test_a_data_set_with_files_of_a_store_s_names_is_never_replaced(call, laboratory, tmp_path):
    laboratory.root.rename(tmp_path / "LAB")
    (tmp_path / "LAB" / "image").rename(tmp_path / "LAB" / "images")
    (tmp_path / "LAB" / "label").rename(tmp_path / "LAB" / "images" / "label")
    (tmp_path / "LAB" / "dataset_description.json").write_text('{"Name": "x", "BIDSVersion": "1"}')
    for command in (["images", "--images", f"{tmp_path}/LAB/images/*.png", "--site", "LAB"],
                    ["synthetic", "--images", "--sites", "WEST"]):  # fmt: skip
        if command[0] == "synthetic":
            (tmp_path / "LAB").rename(tmp_path / "WEST")
        output = call(*command, "--out", tmp_path, code=1)
        assert "holds something that is not a site store" in output
    assert len(list((tmp_path / "WEST" / "images").glob("*.png"))) == 4


def test_arrays_of_numpy_are_read_with_their_channels(call, tmp_path):
    rng = np.random.default_rng(0)
    for k in range(3):
        np.save(tmp_path / f"image{k}.npy", rng.normal(size=(2, 6, 7)).astype(np.float32))
        labels = np.zeros((1, 6, 7), np.uint8)
        labels[0, k, k] = 1
        np.save(tmp_path / f"label{k}.npy", labels)
    call("images", "--images", f"{tmp_path}/image*.npy", "--labels", f"{tmp_path}/label*.npy",
         "--channel-axis", "first", "--site", "NPY", "--out", tmp_path / "out")  # fmt: skip
    store = read_image_store(tmp_path / "out" / "NPY")
    assert (store.dim, store.channels) == (2, 2)
    assert store.description["channel_axis"] == "first"
