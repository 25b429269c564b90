import nibabel
import numpy as np
import pytest

from data_prep.images.comparing import far_apart
from data_prep.images.store import read_image_store


@pytest.fixture
def two_sites(call, another_laboratory, tmp_path):
    """Make two stores of laboratories that a test has changed; return the output of check."""

    def make(change_a=None, change_b=None, *, code=0, options=("--folds", 0)):
        for name, change in (("A", change_a), ("B", change_b)):
            laboratory = another_laboratory(name)
            if change:
                change(laboratory)
            call("images", "--datalist", laboratory.write(), "--site", name, "--out",
                 tmp_path / "out")  # fmt: skip
        return call("check", tmp_path / "out", *options, code=code)

    return make


def test_sites_that_fit_say_so(two_sites):
    output = two_sites()
    assert "2 stores are valid and fit together." in output
    assert "far apart" not in output
    assert "A, B: 0 background 70.0%, 1 cytoplasm 26.7%, 2 nucleus 3.3%" in output


def grey(laboratory):
    for file in sorted((laboratory.root / "image").iterdir()):
        laboratory.picture(f"image/{file.name}", laboratory.rng.integers(0, 256, (10, 12)))


def without_nucleus(laboratory):
    for file in sorted((laboratory.root / "label").iterdir()):
        laboratory.picture(f"label/{file.name}", np.eye(10, 12))


def other_labels(laboratory):
    laboratory.content["labels"] = {"0": "background", "1": "nucleus", "2": "cytoplasm"}


def unnamed_without_nucleus(laboratory):
    without_nucleus(laboratory)
    del laboratory.content["labels"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (grey, "sites 'A' and 'B' cannot train together: number of channels: 3 and 1"),
        (other_labels, "name of label 1: cytoplasm and nucleus"),
        (unnamed_without_nucleus, "label ids: 0, 1, 2 and 0, 1 (name all of them with"),
    ],
)
def test_sites_that_cannot_train_together_are_refused(two_sites, change, words):
    assert words in two_sites(None, change, code=1)


def dark(laboratory):
    for file in sorted((laboratory.root / "image").iterdir()):
        laboratory.picture(f"image/{file.name}", laboratory.rng.integers(0, 40, (10, 12, 3)))


def other_channels(laboratory):
    laboratory.content["modality"] = {"0": "B", "1": "G", "2": "R"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_nucleus, "label 2 (nucleus) is in no mask of B"),
        (dark, "intensities of A and B are far apart: a distance of 0.8"),
        (dark, "intensities have other ranges"),
        (other_channels, "channels are R, G, B at A and B, G, R at B"),
    ],
)
def test_what_is_far_apart_is_said(two_sites, change, words):
    output = two_sites(None, change)
    assert words in output
    assert "2 stores are valid and fit together." in output


def test_a_class_without_an_image_is_said_and_folds_are_counted(two_sites):
    def classes(names):
        def change(laboratory):
            for entry, name in zip(laboratory.training, names, strict=True):
                entry["class"] = name

        return change

    output = two_sites(classes("xyxy"), classes("xxxy"), options=("--folds", 2), code=1)
    assert "site 'B' has 4 subjects (3 of x, 1 of y), too few for 2 folds" in output


@pytest.fixture
def volume_store(call, tmp_path):
    def make(site, spacing):
        folder = tmp_path / site
        folder.mkdir()
        rng = np.random.default_rng(0)
        for k in range(2):
            image = rng.normal(size=(5, 6, 4)).astype(np.float32)
            nibabel.save(nibabel.Nifti1Image(image, np.diag([*spacing, 1])), folder / f"i{k}.nii")
            mask = nibabel.Nifti1Image((image > 0).astype(np.uint8), np.diag([*spacing, 1]))
            nibabel.save(mask, folder / f"m{k}.nii")
        call("images", "--images", f"{folder}/i*.nii", "--labels", f"{folder}/m*.nii",
             "--site", site, "--out", tmp_path / "out")  # fmt: skip
        return read_image_store(tmp_path / "out" / site)

    return make


def test_voxels_of_other_sizes_are_said_of_the_two_that_are_farthest_apart(volume_store):
    stores = [volume_store("A", (1, 1, 1)), volume_store("B", (1, 1, 1.2))]
    assert far_apart(stores) == []
    stores.append(volume_store("C", (1, 1, 3.0)))
    (sentence,) = far_apart(stores)
    assert "1x1x1 mm at A and 1x1x3 mm at C: resample all sites" in sentence
