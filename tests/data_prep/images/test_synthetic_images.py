import numpy as np
import pytest

from data_prep.images.comparing import far_apart
from data_prep.images.reading import read_image, read_mask
from data_prep.images.store import read_image_store
from data_prep.images.synthetic import SCANNERS, Cohort, write_synthetic_images


@pytest.fixture
def make(call, tmp_path):
    def run(*options, code=0):
        output = call("synthetic", "--images", "--out", tmp_path / "out", *options, code=code)
        folders = sorted((tmp_path / "out").iterdir()) if code == 0 else []
        return output, [read_image_store(f, verify=True) for f in folders if f.name[0] != "."]

    return run


@pytest.mark.parametrize("dim", [2, 3])
def test_four_sites_are_made_and_labelled_synthetic(make, call, tmp_path, dim):
    output, stores = make("--dim", dim, "--subjects", 6)
    assert [store.site for store in stores] == sorted(SCANNERS)
    for store in stores:
        assert store.synthetic
        assert store.dim == dim
        assert set(store.images[0].shape) == {64 if dim == 2 else 32}
        assert store.labels == {0: "background", 1: "organ", 2: "core"}
        assert store.classes == ("round", "lobed")
        assert [u.n_samples for u in store.units] == [1, 1, 2, 1, 1, 2]
        assert all(set(i.facts["label_voxels"]) == {"0", "1", "2"} for i in store.images)
        assert store.root == store.path / "images"
    assert "SYNTHETIC" in output
    assert "no patient of this store exists" in output
    assert "fit together" in call("check", tmp_path / "out", "--folds", 3)


def test_sites_have_a_strong_shift_and_none_without(make):
    _, stores = make("--subjects", 4)
    assert any("far apart" in sentence for sentence in far_apart(stores))
    _, stores = make("--subjects", 4, "--no-shift")
    assert far_apart(stores) == []


def arrays(folder, site, cohort):
    datalist = write_synthetic_images(folder, site, cohort)
    return [
        (e.participant_id, read_image(folder / e.name).array, read_mask(folder / e.label).array)
        for e in datalist.entries
    ]


def test_a_patient_does_not_depend_on_how_many_there_are(tmp_path):
    few = arrays(tmp_path / "few", "EAST", Cohort(n_patients=2))
    many = arrays(tmp_path / "many", "EAST", Cohort(n_patients=4))
    for one, other in zip(few, many, strict=False):
        assert one[0] == other[0]
        np.testing.assert_array_equal(one[1], other[1])
    other_seed = arrays(tmp_path / "seed", "EAST", Cohort(n_patients=2, seed=1))
    assert not np.array_equal(few[0][1], other_seed[0][1])


def test_the_core_is_bright_at_one_site_and_dark_at_another(tmp_path):
    contrast = {}
    for site in SCANNERS:
        _, image, mask = arrays(tmp_path / site, site, Cohort(n_patients=1))[0]
        contrast[site] = float(image[mask == 2].mean()) - float(image[mask == 1].mean())
    assert contrast["EAST"] < -10
    assert min(contrast["NORTH"], contrast["SOUTH"], contrast["WEST"]) > 5


def test_a_second_run_is_unchanged_and_real_data_stay(make, laboratory, call, tmp_path):
    make("--subjects", 2, "--sites", "WEST")
    assert "Unchanged" in make("--subjects", 2, "--sites", "WEST")[0]
    call("images", "--datalist", laboratory.list, "--site", "EAST", "--out", tmp_path / "out")
    assert "holds real data of site 'EAST'" in make("--sites", "EAST", code=1)[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--window", 20), "--window is for connectomes"),
        (("--whole-scan",), "--whole-scan is for connectomes"),
        (("--dim", 4), "dim is 4; allowed are 2, 3"),
        (("--sites", "NYU"), "no site 'NYU'; choose from NORTH"),
    ],
)
def test_a_wrong_option_is_said(make, options, words):
    assert words in " ".join(make(*options, code=2)[0].split())
