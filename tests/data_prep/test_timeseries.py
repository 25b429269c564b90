import json
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest

from data_prep.atlas import read_atlas
from data_prep.errors import SourceError
from data_prep.timeseries import (
    CONFOUND_PRESETS,
    ExtractionSettings,
    TooFewTimepointsError,
    extract_time_series,
    open_scan,
    parse_confounds,
    read_confounds,
    repetition_time,
)


@pytest.fixture
def atlas(hospital):
    return read_atlas(hospital.atlas, hospital.table)


def by_nilearn(file, label_map, *, tr, confounds=None, sample_mask=None, **settings):
    """Return nilearn's own series: a column a label that is left, in ascending order."""
    from nilearn.maskers import NiftiLabelsMasker

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        masker = NiftiLabelsMasker(str(label_map), t_r=tr, reports=False, **settings)
        return masker.fit_transform(str(file), confounds=confounds, sample_mask=sample_mask)


def labels_in(file, label_map):
    """Return the labels at the scan's voxels, looked up in world space without nilearn."""
    import nibabel

    image, labels = nibabel.load(file), nibabel.load(label_map)
    voxels = np.indices(image.shape[:3]).reshape(3, -1)
    to_labels = np.linalg.inv(labels.affine) @ image.affine
    at = np.rint(to_labels[:3, :3] @ voxels + to_labels[:3, 3:]).astype(int)
    inside = ((at >= 0) & (at < np.array(labels.shape[:3])[:, np.newaxis])).all(axis=0)
    found = np.unique(np.asanyarray(labels.dataobj)[tuple(at[:, inside])])
    return [int(i) for i in found if i != 0]


DEFAULT = {"detrend": True, "standardize": "zscore_sample", "high_pass": 0.01, "low_pass": 0.1}


# ------------------------------------------------------------------------------------- extraction


@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        (ExtractionSettings(), DEFAULT),
        (ExtractionSettings(None, None, False, "none"), {"standardize": None}),
        (ExtractionSettings(None, 0.1, True, "psc"), {"detrend": True, "low_pass": 0.1}),
    ],
)
def test_series_equal_nilearns_masker(hospital, atlas, settings, theirs):
    file = hospital.scan("01")
    found = extract_time_series(file, atlas, settings, tr=2.0)
    theirs = {"standardize": "psc"} | theirs
    expected = by_nilearn(file, hospital.atlas, tr=2.0, **theirs)
    np.testing.assert_array_equal(found.values, expected)
    assert (found.absent, found.n_volumes, found.n_confounds) == ((), 50, 0)


@pytest.mark.parametrize(
    ("image", "table", "offset", "n_present"),
    [
        pytest.param("AAL3_1mm", "AAL3.txt", 0, 49, marks=pytest.mark.slow),
        ("atlas_aal", "labels_aal.csv", 0, 24),
        pytest.param(
            *("derived_ho_maxprob25_1mm", "labels_harvard_oxford.csv", 1, 24),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_real_scan_and_real_atlases(atlas_folder, scan_folder, image, table, offset, n_present):
    """A scan of three slices: most regions are absent and none is shifted."""
    file, label_map = scan_folder / "functional.nii", atlas_folder / f"{image}.nii.gz"
    atlas = read_atlas(label_map, atlas_folder / table, label_offset=offset)
    tr = repetition_time(open_scan(file), file)
    settings = ExtractionSettings(high_pass=None)
    found = extract_time_series(file, atlas, settings, tr=tr)
    expected = by_nilearn(file, label_map, tr=2.0, **{**DEFAULT, "high_pass": None})
    assert found.values.shape == (20, len(atlas.rois))
    column = {int(roi_id): place for place, (roi_id, _) in enumerate(atlas.rois)}
    present = [column[i] for i in labels_in(file, label_map)]
    assert len(present) == n_present
    np.testing.assert_array_equal(found.values[:, present], expected)
    assert set(found.absent) == set(range(len(atlas.rois))) - set(present)
    assert not found.values[:, found.absent].any()


@pytest.mark.parametrize("name", ["fmri1.nii.gz", "fmri2.nii.gz"])
def test_real_scans_with_an_atlas_on_their_own_slanted_grid(hospital, scan_folder, tmp_path, name):
    import nibabel

    file = scan_folder / name
    image = open_scan(file)
    labels = np.kron(hospital.labels(), np.ones((2, 2, 9), np.int16))[1:11, 1:11]
    nibabel.save(nibabel.Nifti1Image(labels, image.affine), tmp_path / "own.nii")
    atlas = read_atlas(tmp_path / "own.nii", hospital.table)
    assert repetition_time(image, file) == 1.35
    found = extract_time_series(file, atlas, ExtractionSettings(), tr=1.35)
    expected = by_nilearn(file, tmp_path / "own.nii", tr=1.35, **DEFAULT)
    assert found.values.shape == (40, 9)
    np.testing.assert_array_equal(found.values, expected)


def test_a_label_outside_the_scan_keeps_its_column(hospital, atlas, write_scan):
    data = hospital.data()[2:]
    file = write_scan(hospital.scan("77"), data, origin=(6, 0, 0))
    found = extract_time_series(file, atlas, ExtractionSettings(), tr=2.0)
    expected = by_nilearn(file, hospital.atlas, tr=2.0, **DEFAULT)
    assert found.absent == (0, 1, 2)
    assert not found.values[:, :3].any()
    np.testing.assert_array_equal(found.values[:, 3:], expected)


def test_a_label_lost_in_resampling_keeps_its_column(hospital, tmp_path, write_scan):
    labels = hospital.labels()
    labels[labels == 5] = 4
    labels[2, 2, 0] = 5  # one voxel, which a coarser scan has no place for
    label_map = write_scan(tmp_path / "fine.nii", labels)
    atlas = read_atlas(label_map, hospital.table)
    file = write_scan(hospital.scan("77"), hospital.data()[:3, :3, :1], voxel=6, origin=(3, 3, 0))
    found = extract_time_series(file, atlas, ExtractionSettings(), tr=2.0)
    assert found.absent == (4,)
    expected = by_nilearn(file, label_map, tr=2.0, **DEFAULT)
    np.testing.assert_array_equal(np.delete(found.values, 4, axis=1), expected)


@pytest.mark.parametrize("value", [0.0, 7.1, np.nan])
def test_a_region_without_signal_is_exactly_zero(hospital, atlas, write_scan, value):
    data = hospital.data()
    data[2:4, 2:4] = value
    file = write_scan(hospital.scan("77"), data)
    found = extract_time_series(file, atlas, ExtractionSettings(), tr=2.0)
    assert found.absent == ()
    assert np.flatnonzero(~found.values.any(axis=0)).tolist() == [4]


def test_a_volume_that_is_not_finite_is_refused(hospital, atlas, write_scan):
    data = hospital.data()
    data[..., 17] = np.nan
    file = write_scan(hospital.scan("77"), data)
    with pytest.raises(SourceError, match="72 voxels of volume 17 are not finite, 0 in others"):
        extract_time_series(file, atlas, ExtractionSettings(), tr=2.0)


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_a_cut_off_scan_is_one_sentence(hospital, atlas, write_scan, suffix):
    file = write_scan(hospital.root / f"cut{suffix}", hospital.data())
    file.write_bytes(file.read_bytes()[:-3000])
    with pytest.raises(SourceError, match=rf"cut{suffix} is cut off or damaged \(.*\); get the f"):
        extract_time_series(file, atlas, ExtractionSettings(), tr=2.0)


def test_a_scan_in_another_space_is_refused(hospital, atlas, write_scan):
    file = write_scan(hospital.scan("77"), hospital.data(), origin=(500, 0, 0))
    with pytest.raises(SourceError, match="no region of the atlas blocks lies inside sub-77"):
        extract_time_series(file, atlas, ExtractionSettings(), tr=2.0)


@pytest.mark.parametrize(
    ("settings", "n_volumes", "message"),
    [
        (ExtractionSettings(), 33, "33 time points, 34 needed by the filter"),
        (ExtractionSettings(high_pass=None), 18, "18 time points, 19 needed by the filter"),
    ],
)
def test_a_scan_too_short_for_the_filter(hospital, atlas, write_scan, settings, n_volumes, message):
    file = write_scan(hospital.scan("77"), hospital.data(n_volumes))
    with pytest.raises(TooFewTimepointsError, match=message):
        extract_time_series(file, atlas, settings, tr=2.0)
    file = write_scan(hospital.scan("77"), hospital.data(n_volumes + 1))
    extract_time_series(file, atlas, settings, tr=2.0)


def test_a_cutoff_beyond_half_the_sampling_rate_is_refused(hospital, atlas):
    with pytest.raises(SourceError, match=r"0.1 Hz is not possible .* 5 s: it must be below 0.1 H"):
        extract_time_series(hospital.scan("01"), atlas, ExtractionSettings(), tr=5.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"high_pass": 0.2}, "high_pass is 0.2 Hz and low_pass 0.1 Hz; the first must be lower"),
        ({"low_pass": -1}, "low_pass is -1; it must be a frequency in Hz"),
        ({"standardize": "yes"}, "standardize is 'yes'; allowed are zscore, psc, none"),
    ],
)
def test_settings_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ExtractionSettings(**arguments)


def test_one_scan_is_in_memory_and_is_let_go(hospital, atlas, write_scan):
    shape = (24, 24, 8, 40)  # 0.7 MB of float32
    data = 1000 + hospital.rng.standard_normal(shape, dtype=np.float32)
    files = [write_scan(hospital.root / f"big{k}.nii", data) for k in range(4)]
    size = data.nbytes
    del data
    extract_time_series(files[0], atlas, ExtractionSettings(), tr=2.0)
    tracemalloc.start()
    try:
        kept = [extract_time_series(f, atlas, ExtractionSettings(), tr=2.0) for f in files]
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept) == 4
    assert peak < 2.2 * size
    assert now < 0.5 * size


# ---------------------------------------------------------------------------------- header, sidecar


def scan_with(hospital, write_scan, tr, unit, sidecar):
    file = write_scan(hospital.scan("77"), hospital.data(3), tr=tr, unit=unit)
    beside = []
    if sidecar is not None:
        beside = [file.with_name("sub-77_task-rest_bold.json")]
        beside[0].write_text(sidecar)
    return open_scan(file), file, beside


@pytest.mark.parametrize(
    ("tr", "unit", "sidecar", "expected"),
    [
        (2.0, "sec", None, 2.0),
        (1.35, "sec", None, 1.35),
        (1350, "msec", '{"RepetitionTime": 1.35}', 1.35),
        (2.0, "sec", '{"EchoTime": 0.03}', 2.0),
        (0.0, "sec", '{"RepetitionTime": 0.72}', 0.72),
        (1.0, "unknown", '{"RepetitionTime": 3}', 3.0),  # 1 is what a header holds by itself
        (0.72, "sec", '{"RepetitionTime": 0.7200001}', 0.7200001),
    ],
)
def test_repetition_time(hospital, write_scan, tr, unit, sidecar, expected):
    assert repetition_time(*scan_with(hospital, write_scan, tr, unit, sidecar)) == expected


@pytest.mark.parametrize(
    ("tr", "unit", "sidecar", "message"),
    [
        (0.0, "sec", None, "its header says 0, and it has no sidecar; add it .* with --tr"),
        (1.0, "unknown", None, "its header has 1 without a unit of time, and it has no sidecar"),
        (0.0, "sec", "{}", "header says 0, and sub-77_task-rest_bold.json has no RepetitionTime"),
        (
            2.0,
            "sec",
            '{"RepetitionTime": 2.5}',
            "header of sub-77_task-rest_bold.nii.gz states a repetition time of 2 s and "
            "sub-77_task-rest_bold.json one of 2.5 s; find out which is right and set it with --tr",
        ),
        (2000.0, "sec", None, r"time of 2000 s, which no functional scan has \(are these millis"),
        (0.0, "sec", '{"RepetitionTime": 2000}', "bold.json states a repetition time of 2000 s"),
        (0.0, "sec", '{"RepetitionTime": "2"}', "has the RepetitionTime '2'; it must be seconds"),
        (2.0, "sec", "{", "sidecar sub-77_task-rest_bold.json is not readable JSON"),
    ],
)
def test_a_repetition_time_that_is_not_sure_is_refused(
    hospital, write_scan, tr, unit, sidecar, message
):
    scan = scan_with(hospital, write_scan, tr, unit, sidecar)
    with pytest.raises(SourceError, match=message):
        repetition_time(*scan)
    assert repetition_time(*scan, tr=2.2) == 2.2


@pytest.mark.parametrize(
    ("shape", "message"),
    [((6, 6, 2), r"is 3D \(6, 6, 2\), one volume without time"), ((6, 6, 2, 4, 3), "functional")],
)
def test_a_scan_that_is_not_4d_is_refused(hospital, write_scan, shape, message):
    file = write_scan(hospital.scan("77"), np.ones(shape, np.float32))
    with pytest.raises(SourceError, match=message):
        open_scan(file)


def test_real_scans_are_checked(scan_folder):
    with pytest.raises(SourceError, match=r"anatomical.nii is 3D \(33, 41, 25\)"):
        open_scan(scan_folder / "anatomical.nii")
    file = scan_folder / "example4d.nii.gz"
    with pytest.raises(SourceError, match="time of 2000 s"):
        repetition_time(open_scan(file), file)


# --------------------------------------------------------------------------------------- confounds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("motion=basic, wm_csf", {"motion": "basic", "wm_csf": "basic"}),
        ("global_signal", {"global_signal": "basic"}),
        ("simple,wm_csf=full", {"motion": "full", "wm_csf": "full"}),
        ("wm_csf=basic,scrubbing", {"wm_csf": "basic", "motion": "full", "scrub": 5}),
        ("scrubbing,fd_threshold=0.2", {"fd_threshold": 0.2, "wm_csf": "full"}),
        ("compcor,n_compcor=6", {"compcor": "anat_combined", "n_compcor": 6}),
        ("motion,high_pass,compcor=temporal", {"compcor": "temporal", "n_compcor": "all"}),
    ],
)
def test_confound_strategies(text, expected):
    parameters = parse_confounds(text)
    assert {key: parameters[key] for key in expected} == expected
    assert json.loads(json.dumps(ExtractionSettings(confounds=parameters).describe()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "name a strategy"),
        ("aroma", "unknown entry 'aroma'; known are the strategies simple, scrubbing, compcor"),
        ("motion,compcor", "compcor needs high_pass"),
        ("motion,fd_threshold=0.2", "sets fd_threshold without the component"),
        ("scrubbing,fd_threshold=much", "it must be a number, 0 or more"),
    ],
)
def test_a_strategy_that_cannot_be_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_confounds(text)


def test_the_presets_are_nilearns():
    from nilearn.interfaces.fmriprep.load_confounds_strategy import preset_strategies

    for name in CONFOUND_PRESETS:
        ours, theirs = parse_confounds(name), preset_strategies[name]
        assert set(ours["strategy"]) == set(theirs["strategy"])
        assert {k: v for k, v in ours.items() if k != "strategy"} == {
            k: v for k, v in theirs.items() if k in ours and k != "strategy"
        }


@pytest.fixture
def fmriprep_scan(hospital, write_scan):
    """A scan with the confounds that nilearn has for its own tests: 30 volumes of real fMRIPrep."""
    import nilearn.interfaces.fmriprep as package

    source = Path(package.__file__).parent / "data"
    name = "sub-01_task-rest_space-MNI152NLin2009cAsym_desc-preproc_bold.nii.gz"
    file = write_scan(hospital.root / "func" / name, hospital.data(30))
    for suffix in ("tsv", "json"):
        text = (source / f"test-v21_desc-confounds_timeseries.{suffix}").read_text()
        (file.parent / f"sub-01_task-rest_desc-confounds_timeseries.{suffix}").write_text(text)
    return file


def edit_confounds(file, edit):
    import pandas

    table = file.parent / "sub-01_task-rest_desc-confounds_timeseries.tsv"
    frame = edit(pandas.read_csv(table, sep="\t"))
    frame.to_csv(table, sep="\t", index=False, na_rep="n/a")


def test_confounds_are_nilearns_and_the_missing_first_derivative_is_filled(fmriprep_scan):
    from nilearn.interfaces.fmriprep import load_confounds

    table, mask = read_confounds(fmriprep_scan, parse_confounds("motion,wm_csf"), 30)
    expected, expected_mask = load_confounds(
        str(fmriprep_scan), strategy=("motion", "wm_csf"), motion="full", wm_csf="basic"
    )
    assert table.equals(expected)
    np.testing.assert_array_equal(mask, expected_mask)
    assert table.shape[1] == 26
    derivative = table["trans_x_derivative1"].to_numpy()
    assert derivative[0] == derivative[1]


def test_series_without_confounds_and_censored_volumes_equal_nilearns(
    fmriprep_scan, hospital, atlas
):
    strategy = parse_confounds("motion=basic,scrub=0,fd_threshold=2,std_dvars_threshold=99")
    settings = ExtractionSettings(high_pass=None, confounds=strategy)
    confounds, mask = read_confounds(fmriprep_scan, settings.confounds, 30)
    assert len(mask) == 20
    found = extract_time_series(
        fmriprep_scan, atlas, settings, tr=2.0, confounds=confounds, sample_mask=mask
    )
    expected = by_nilearn(
        fmriprep_scan,
        hospital.atlas,
        tr=2.0,
        confounds=confounds,
        sample_mask=mask,
        clean_args={"extrapolate": False},
        **{**DEFAULT, "high_pass": None},
    )
    np.testing.assert_array_equal(found.values, expected)
    assert (len(found.values), found.n_volumes, found.n_confounds) == (len(mask), 30, 6)


def test_more_confounds_than_time_points_is_too_short(fmriprep_scan, atlas):
    settings = ExtractionSettings(None, None, confounds=parse_confounds("motion,wm_csf=full"))
    confounds, mask = read_confounds(fmriprep_scan, settings.confounds, 30)
    with pytest.raises(TooFewTimepointsError, match="more than 34 needed to remove 32 confounds"):
        extract_time_series(
            fmriprep_scan, atlas, settings, tr=2.0, confounds=confounds, sample_mask=mask
        )


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.drop(columns="csf"), r"cannot be read \(.*csf.*\); complete them, or choose"),
        (lambda t: t.assign(csf=np.nan), r"no finite value in the column\(s\) csf \(first in ro"),
        (
            lambda t: t.assign(trans_x=[*t["trans_x"][:4], np.nan, *t["trans_x"][5:]]),
            r"in the column\(s\) trans_x \(first in row 5\); leave the participant out",
        ),
        (lambda t: t.iloc[:-1], "have 29 rows and the scan has 30 volumes"),
    ],
)
def test_confounds_that_cannot_be_used_are_refused(fmriprep_scan, edit, message):
    edit_confounds(fmriprep_scan, edit)
    with pytest.raises(SourceError, match=message):
        read_confounds(fmriprep_scan, parse_confounds("motion=basic,wm_csf"), 30)


def test_a_scan_of_which_every_volume_is_censored_is_too_short(fmriprep_scan):
    with pytest.raises(TooFewTimepointsError, match="0 time points left by censoring"):
        read_confounds(fmriprep_scan, parse_confounds("scrubbing"), 30)


def test_a_scan_without_its_table_of_confounds_is_refused(fmriprep_scan):
    (fmriprep_scan.parent / "sub-01_task-rest_desc-confounds_timeseries.tsv").unlink()
    with pytest.raises(SourceError, match=r"cannot be read \(Could not find associated confound"):
        read_confounds(fmriprep_scan, parse_confounds("simple"), 30)
