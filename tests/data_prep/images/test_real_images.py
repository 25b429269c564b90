"""Real images, where they are: FEDBN_TEST_IMAGES names their folder."""

import pytest

from data_prep.images.store import read_image_store

CELLS = {"ALL-IDB2": (260, 1), "BCCD": (367, 0), "CellaVision": (100, 0), "JTSC": (300, 1)}
"""Images of each laboratory, and those that stand in it twice."""


@pytest.mark.slow
def test_four_laboratories_fit_together_and_are_far_apart(call, image_folder, tmp_path):
    for site, (found, left_out) in CELLS.items():
        folder = image_folder("wbc_labs", f"{site}/dataset.json")
        call("images", "--datalist", folder / site / "dataset.json", "--site", site,
             "--out", tmp_path)  # fmt: skip
        store = read_image_store(tmp_path / site)
        assert (store.dim, store.channels) == (2, 3)
        counts = store.description["counts"]
        assert (counts["found"], counts["left_out"]) == (found, left_out)
        assert {e["reason"] for e in store.description["left_out"]} <= {"duplicate"}
        assert set(store.labels.values()) == {"background", "cytoplasm", "nucleus"}
    output = call("check", tmp_path)
    assert "are far apart" in output
    assert "4 stores are valid and fit together." in output


@pytest.mark.slow
def test_cell_types_come_from_one_hospital_s_rows_of_a_table(call, image_folder, tmp_path):
    folder = image_folder("wbc_labs", "classes_jtsc_cellavision.csv")
    for site, counts in (("JTSC", [176, 52, 48, 22]), ("CellaVision", [33, 37, 15, 12])):
        call("images", "--datalist", folder / site / "dataset.json", "--site", site, "--out",
             tmp_path, "--classes", folder / "classes_jtsc_cellavision.csv", "--rows",
             f"lab={site}", "--class-names", "neutrophil,lymphocyte,monocyte,eosinophil",
             )  # fmt: skip
        found = read_image_store(tmp_path / site).description["summary"]["classes"]
        assert list(found.values()) == counts


@pytest.mark.slow
def test_volumes_of_two_types_are_one_site(call, image_folder, tmp_path):
    folder = image_folder("msd_hippocampus", "dataset.json")
    output = call("images", "--datalist", folder / "dataset.json", "--site", "MSD",
                  "--out", tmp_path)  # fmt: skip
    store = read_image_store(tmp_path / "MSD")
    assert (store.dim, store.channels, len(store.images)) == (3, 1, 260)
    assert store.description["summary"]["spacing"]["median"] == [1, 1, 1]
    assert "values are stored in different types (205 float32, 55 uint8)" in output


def test_dicom_series_are_volumes(call, image_folder, tmp_path):
    pytest.importorskip("pydicom")
    folder = image_folder("dicom_hippocrop", "Study1")
    output = call("images", "--images", f"{folder}/*/*_HCropVolume", "--site", "DCM",
                  "--out", tmp_path, "--copy")  # fmt: skip
    store = read_image_store(tmp_path / "DCM", verify=True)
    assert sorted(image.shape[2] for image in store.images) == [32, 35, 40]
    assert store.description["formats"] == ["dicom"]
    assert "can be predicted, not trained on" in output


def test_vessels_in_two_folders_are_paired_by_their_names(call, image_folder, tmp_path):
    folder = image_folder("retina_vessels", "DRIVE") / "DRIVE"
    call("images", "--images", f"{folder}/*/image/*.jpg", "--labels", f"{folder}/*/vessel/*.png",
         "--label-names", "background,vessel", "--site", "DRIVE", "--out", tmp_path)  # fmt: skip
    store = read_image_store(tmp_path / "DRIVE")
    assert len(store.images) == 40
    assert store.description["summary"]["labels"]["1"]["fraction"] == pytest.approx(0.087, abs=1e-3)
