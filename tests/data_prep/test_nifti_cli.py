import json

import numpy as np
import pytest
from typer.testing import CliRunner

from data_prep import __main__ as cli
from data_prep.atlas import read_atlas
from data_prep.connectome import correlation_connectomes
from data_prep.roi_files import read_roi_file
from data_prep.site_store import read_site_store
from data_prep.timeseries import ExtractionSettings, extract_time_series


@pytest.fixture
def prepare(monkeypatch, hospital, tmp_path):
    """Run ``nifti`` on the small hospital; return the result and the place of its store."""
    monkeypatch.setattr(cli.screen, "width", 200)

    def run(*arguments, code=0, base=None):
        common = ("nifti", *(base or hospital.arguments()), "--out", tmp_path / "out")
        result = CliRunner().invoke(cli.app, [str(a) for a in (*common, *arguments)])
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        if code == 1:
            assert len(result.stderr.strip().splitlines()) == 1
            assert result.stderr.startswith("error: ")
        return result, tmp_path / "out" / "HOSP"

    return run


def series_of(hospital, label, settings=None):
    atlas = read_atlas(hospital.atlas, hospital.table)
    settings = settings or ExtractionSettings()
    return extract_time_series(hospital.scan(label), atlas, settings, tr=2.0).values


def test_scans_become_a_store_that_says_how(prepare, hospital):
    result, folder = prepare("--stride", 4)
    store = read_site_store(folder, verify=True)
    assert store.site == "HOSP"
    assert store.rois == tuple((str(i), f"region {i}") for i in range(1, 10))
    assert [p.participant_id for p in store.participants] == [f"sub-{k:02d}" for k in range(1, 5)]
    assert store.participants[0].age == 12.5
    assert store.participants[0].n_timepoints == 50
    np.testing.assert_array_equal(
        store.connectomes[store.sample_participant == 2],
        correlation_connectomes(series_of(hospital, "03"), window=32, stride=4),
    )
    stated = store.description
    assert stated["atlas"].startswith("blocks (9 ROIs, labels ")
    assert stated["atlas_files"]["image"]["file"] == "blocks.nii.gz"
    assert stated["atlas_files"]["labels"]["sha256"] == stated["inputs"]["blocks.tsv"]
    assert stated["repetition_time_s"] == 2.0
    assert stated["extraction"]["low_pass_hz"] == 0.1
    assert stated["extraction"]["standardize"] == "zscore"
    assert {"nilearn", "nibabel"} <= set(stated["versions"])
    assert len(stated["inputs"]["sub-03_task-rest_bold.nii.gz"]) == 64
    assert len(stated["inputs"]["participants.tsv"]) == 64
    assert stated["preprocessing"].startswith("NiftiLabelsMasker mean, band-pass 0.01 to 0.1 Hz")
    assert str(hospital.root) not in json.dumps(stated)
    row = next(line for line in result.output.splitlines() if "│ HOSP" in line)
    assert [cell.strip() for cell in row.split("│")[2:7]] == ["4", "4", "0", "4", "2 / 2"]


def test_a_vanished_label_is_marked_and_its_subject_left_out(prepare, hospital, write_scan):
    write_scan(hospital.scan("02"), hospital.data()[2:], origin=(6, 0, 0))
    result, folder = prepare()
    store = read_site_store(folder)
    (excluded,) = store.description["excluded"]
    assert excluded == {
        "participant_id": "sub-02",
        "reason": "ROI without signal",
        "detail": "absent from the scan: 1 (region 1), 2 (region 2), 3 (region 3)",
    }
    assert store.description["absent_rois"] == {"sub-02": ["1", "2", "3"]}
    assert store.n_rois == 9
    assert "absent from the scan: 1 (region 1)" in result.output
    _, folder = prepare("--silent-rois", "keep-zero", "--whole-scan")
    store = read_site_store(folder, verify=True)
    assert store.description["absent_rois"] == {"sub-02": ["1", "2", "3"]}
    rows, columns = np.triu_indices(9, k=1)
    touched = (rows < 3) | (columns < 3)
    assert (store.connectomes[1, touched] == 0).all()
    assert (store.connectomes[1, ~touched] != 0).all()


def test_regions_that_nobody_has_are_named(prepare, hospital, write_scan):
    for k in range(1, 5):
        write_scan(hospital.scan(f"{k:02d}"), hospital.data()[2:], origin=(6, 0, 0))
    result, _ = prepare(code=1)
    assert (
        "no subject is left of 4 (ROI without signal); nobody has a signal in ROI 1 (region 1), "
        "2 (region 2), 3 (region 3): take the row(s) out of the labels table and add "
        "--unlisted-labels drop" in result.stderr
    )
    lines = hospital.table.read_text().splitlines()
    hospital.table.write_text("\n".join([lines[0], *lines[4:]]))
    _, folder = prepare("--unlisted-labels", "drop")
    store = read_site_store(folder)
    assert [roi_id for roi_id, _ in store.rois] == list("456789")
    assert store.description["atlas_files"]["unlisted"] == [1, 2, 3]


def test_silent_and_absent_regions_are_told_apart(prepare, hospital, write_scan):
    data = hospital.data()[2:]
    data[0:2, 0:2] = 0
    write_scan(hospital.scan("02"), data, origin=(6, 0, 0))
    _, folder = prepare()
    (excluded,) = read_site_store(folder).description["excluded"]
    assert excluded["detail"] == (
        "absent from the scan: 1 (region 1), 2 (region 2), 3 (region 3); no signal in 4 (region 4)"
    )


def test_time_series_are_written_for_others_to_use(prepare, hospital, tmp_path):
    out = tmp_path / "series"
    prepare("--timeseries-out", out)
    names = sorted(p.name for p in out.iterdir())
    subjects = [f"sub-{k:02d}_rois.1D" for k in range(1, 5)]
    assert names == ["dataset_description.json", "rois.tsv", *subjects]
    rois = tuple((str(i), f"region {i}") for i in range(1, 10))
    series = read_roi_file(out / "sub-04_rois.1D", rois)
    np.testing.assert_array_equal(series, series_of(hospital, "04"))
    stated = json.loads((out / "dataset_description.json").read_text())
    assert stated["repetition_time_s"] == 2.0
    assert stated["extraction"]["detrend"] is True
    result, _ = prepare("--timeseries-out", out)
    assert "Unchanged, same inputs and settings: HOSP" in result.output
    (out / "sub-04_rois.1D").unlink()
    result, _ = prepare("--timeseries-out", out)
    assert "Unchanged" not in result.output
    assert (out / "sub-04_rois.1D").exists()


def test_a_scan_that_fails_leaves_the_older_time_series(prepare, hospital, write_scan, tmp_path):
    out = tmp_path / "series"
    prepare("--timeseries-out", out)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    data = hospital.data()
    data[0, 0, 0, 7] = np.nan
    write_scan(hospital.scan("04"), data)
    prepare("--timeseries-out", out, code=1)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_a_changed_setting_makes_the_store_again(prepare):
    _, folder = prepare("--whole-scan")
    first = read_site_store(folder).description
    result, _ = prepare("--whole-scan")
    assert "Unchanged, same inputs and settings: HOSP" in result.output
    settings = ("--low-pass", 0.08, "--high-pass", 0, "--no-detrend", "--standardize", "none")
    result, _ = prepare("--whole-scan", *settings)
    assert "Unchanged" not in result.output
    second = read_site_store(folder).description
    differ = {k for k, v in first["extraction"].items() if second["extraction"][k] != v}
    assert differ == {"low_pass_hz", "high_pass_hz", "detrend", "standardize"}
    result, _ = prepare("--whole-scan", *settings, "--tr", 2.5)
    assert "Unchanged" not in result.output
    assert read_site_store(folder).description["repetition_time_s"] == 2.5


def test_a_changed_scan_makes_the_store_again(prepare, hospital, write_scan):
    prepare("--whole-scan")
    write_scan(hospital.scan("04"), hospital.data())
    result, _ = prepare("--whole-scan")
    assert "Unchanged" not in result.output
    result, _ = prepare("--whole-scan")
    assert "Unchanged" in result.output


def test_mismatch_is_an_error_and_drop_lists_it(prepare, hospital):
    hospital.add("09", row=False)
    hospital.rows.append(["sub-10", "autism", "9", "M"])
    hospital.write_rows()
    result, folder = prepare(code=1)
    assert "1 participant(s) without a scan (sub-10) and 1 scan(s) without a row" in result.stderr
    assert not folder.exists()
    result, folder = prepare("--mismatch", "drop", "--whole-scan")
    assert "participant without scan" in result.output
    assert "scan without participant" in result.output
    stated = read_site_store(folder).description
    assert stated["join"]["expected"] == 5
    assert stated["join"]["without_scan"] == ["sub-10"]
    assert stated["join"]["without_row"] == ["sub-09_task-rest_bold.nii.gz"]


def test_brackets_in_an_id_are_shown_as_they_are(prepare, hospital):
    hospital.rows.append(["sub-[/x]", "control", "n/a", "F"])
    hospital.write_rows()
    result, _ = prepare("--mismatch", "drop", "--whole-scan")
    assert "sub-[/x]" in result.output


def test_a_short_scan_is_left_out_with_its_numbers(prepare, hospital, write_scan):
    write_scan(hospital.scan("02"), hospital.data(31))
    write_scan(hospital.scan("03"), hospital.data(33))
    _, folder = prepare()
    stated = read_site_store(folder).description
    assert [(e["participant_id"], e["reason"], e["detail"]) for e in stated["excluded"]] == [
        ("sub-02", "too few time points", "31 time points, 32 needed"),
        ("sub-03", "too few time points", "33 time points, 34 needed by the filter"),
    ]
    assert stated["counts"] == {"found": 4, "excluded": 2, "kept": 2}


def test_a_bad_scan_is_named_and_leaves_the_old_store(prepare, hospital, write_scan):
    _, folder = prepare("--whole-scan")
    write_scan(hospital.scan("02"), hospital.data(), tr=3.0)
    result, _ = prepare("--whole-scan", code=1)
    assert (
        "site 'HOSP': the scans have different repetition times (3 with 2 s, 1 with 3 s; sub-02 "
        "differ)" in result.stderr
    )
    write_scan(hospital.scan("02"), hospital.data()[..., 0])
    result, _ = prepare("--whole-scan", code=1)
    assert "site 'HOSP', sub-02: sub-02_task-rest_bold.nii.gz is 3D (6, 6, 2)" in result.stderr
    hospital.scan("02").write_bytes(hospital.scan("01").read_bytes()[:-4000])
    result, _ = prepare("--whole-scan", code=1)
    assert "sub-02: sub-02_task-rest_bold.nii.gz is cut off or damaged" in result.stderr
    assert len(read_site_store(folder, verify=True).participants) == 4


@pytest.mark.parametrize("kind", [np.complex64, np.complex128, [(c, "u1") for c in "RGB"]])
def test_a_scan_of_no_real_numbers_is_named_with_its_subject_and_type(
    prepare, hospital, write_scan, kind
):
    write_scan(hospital.scan("03"), np.zeros((6, 6, 2, 50), kind))
    result, folder = prepare(code=1)
    named = "RGB" if isinstance(kind, list) else np.dtype(kind).name
    assert (
        f"error: site 'HOSP', sub-03: sub-03_task-rest_bold.nii.gz has voxels of the type {named},"
        in (result.stderr)
    )
    assert not folder.exists()


def test_the_sidecar_that_contradicts_is_named(prepare, hospital):
    (hospital.root / "bids" / "task-rest_bold.json").write_text('{"RepetitionTime": 2.5}')
    result, _ = prepare(code=1)
    assert "states a repetition time of 2 s and task-rest_bold.json one of 2.5 s" in result.stderr
    prepare("--tr", 2.5, "--whole-scan")


def test_a_data_set_in_the_place_of_the_store_is_safe(prepare, hospital, tmp_path):
    raw = tmp_path / "out" / "HOSP"
    (raw / "sub-01").mkdir(parents=True)
    (raw / "dataset_description.json").write_text('{"Name": "our scans"}')
    result, _ = prepare(code=1)
    assert "holds something that is not a site store" in result.stderr
    assert (raw / "sub-01").is_dir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--confounds", "simple"), "--confounds needs --fmriprep"),
        (("--tr", 2000), "tr is 2000 s, which no functional scan has"),
        (("--high-pass", 0.2), "high_pass is 0.2 Hz and low_pass 0.1 Hz"),
        (("--standardize", "yes"), "allowed are zscore, psc, none"),
        (("--unlisted-labels", "keep"), "allowed are error, drop"),
        (("--mismatch", "ignore"), "allowed are error, drop"),
        (("--diagnosis-word", "ASD"), "write WORD=autism"),
        (("--site", "our/site"), "site is 'our/site'; use letters"),
        (("--kind", "tangent"), "kind 'tangent' is for whole scans only"),
    ],
)
def test_a_wrong_option_is_a_usage_error(prepare, arguments, message):
    result, folder = prepare(*arguments, code=2)
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert not folder.exists()


def test_a_pattern_that_the_shell_took_apart_is_explained(prepare):
    result, _ = prepare("sub-02_bold.nii.gz", code=2)
    assert "'sub-02_bold.nii.gz' is no option; put the pattern of --images in quotation marks" in (
        " ".join(result.stderr.split())
    )


def test_scans_must_be_named(prepare, hospital):
    result, _ = prepare(base=hospital.arguments()[2:], code=2)
    assert "name the scans with --images, or fMRIPrep's folder" in result.stderr


# --------------------------------------------------------------------------------------- fMRIPrep


@pytest.fixture
def fmriprep(hospital, write_scan):
    """The same scans as fMRIPrep leaves them, with confounds; return the command's arguments."""
    root = hospital.root / "fmriprep"
    rng = np.random.default_rng(5)
    axes = [f"{kind}_{axis}" for kind in ("trans", "rot") for axis in "xyz"]
    endings = ("", "_derivative1", "_power2", "_derivative1_power2")
    header = [*(axis + end for axis in axes for end in endings), "csf", "white_matter"]
    for k in range(1, 5):
        stem = root / f"sub-{k:02d}" / "func" / f"sub-{k:02d}_task-rest"
        space = "space-MNI152NLin2009cAsym_desc-preproc"
        file = write_scan(stem.with_name(f"{stem.name}_{space}_bold.nii.gz"), hospital.data())
        file.with_name(f"{stem.name}_{space}_bold.json").write_text('{"RepetitionTime": 2.0}')
        rows = rng.standard_normal((hospital.n_volumes, len(header))).astype(str)
        rows[0, ["derivative1" in name for name in header]] = "n/a"
        lines = ["\t".join(row) for row in (header, *rows)]
        table = stem.with_name(f"{stem.name}_desc-confounds_timeseries.tsv")
        table.write_text("\n".join(lines) + "\n")
    (root / "dataset_description.json").write_text(
        '{"GeneratedBy": [{"Name": "fMRIPrep", "Version": "23.2.1", "CodeURL": "x"}]}'
    )
    return ("--fmriprep", root, *hospital.arguments()[2:])


def test_fmriprep_s_folder_with_its_confounds(prepare, fmriprep, hospital):
    from data_prep.timeseries import parse_confounds, read_confounds

    _, folder = prepare("--whole-scan", base=fmriprep)
    store = read_site_store(folder, verify=True)
    stated = store.description
    assert stated["extraction"]["confounds"] == {
        "strategy": ["motion", "wm_csf"],
        "motion": "full",
        "wm_csf": "basic",
    }
    assert stated["source"]["generated_by"] == [{"Name": "fMRIPrep", "Version": "23.2.1"}]
    assert stated["preprocessing"].endswith(
        "confounds motion=full wm_csf=basic (fMRIPrep derivatives, MNI152NLin2009cAsym)"
    )
    name = "sub-01_task-rest_space-MNI152NLin2009cAsym_desc-preproc_bold.nii.gz"
    assert {f"{name}: sub-01_task-rest_desc-confounds_timeseries.tsv", name} <= set(
        stated["inputs"]
    )
    settings = ExtractionSettings(confounds=parse_confounds("motion,wm_csf"))
    file = fmriprep[1] / "sub-01" / "func" / name
    confounds, _ = read_confounds(file, settings.confounds, 50)
    series = extract_time_series(
        file,
        read_atlas(hospital.atlas, hospital.table),
        settings,
        tr=2.0,
        confounds=confounds,
    )
    np.testing.assert_array_equal(store.connectomes[0], correlation_connectomes(series.values)[0])


def test_a_missing_confound_is_named_with_its_subject(prepare, fmriprep):
    result, _ = prepare("--confounds", "global_signal", base=fmriprep, code=1)
    assert "site 'HOSP', sub-01: the confounds of sub-01_task-rest_space-MNI" in result.stderr
    assert "global_signal" in result.stderr
    _, folder = prepare("--confounds", "none", "--whole-scan", base=fmriprep)
    assert read_site_store(folder).description["extraction"]["confounds"] is None


def test_censored_volumes_are_counted(prepare, fmriprep):
    for k, table in enumerate(sorted(fmriprep[1].rglob("*_timeseries.tsv"))):
        header, *lines = table.read_text().splitlines()
        flags = [f"{int(k == 2 and t == 0)}" for t in range(len(lines))]
        lines = [f"{line}\t{flag}" for line, flag in zip(lines, flags, strict=True)]
        table.write_text("\n".join([f"{header}\tnon_steady_state_outlier00", *lines]) + "\n")
    result, folder = prepare("--whole-scan", base=fmriprep)
    store = read_site_store(folder)
    assert store.description["censored_volumes"] == {"sub-03": 1}
    assert [p.n_timepoints for p in store.participants] == [50, 50, 49, 50]
    assert "Censored by the confounds: 1 volume(s) of 1 scan(s)" in result.output


# -------------------------------------------------------------------------------------- real files


@pytest.mark.parametrize(
    ("image", "labels", "n_rois", "n_present", "unused_rows"),
    [
        ("atlas_aal", "labels_aal.csv", 120, 24, None),
        pytest.param(
            *("AAL3_1mm", "AAL3.txt", 166, 49, "4 row(s) of AAL3.txt label no voxel of the atlas"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_real_scan_through_the_command_equals_nilearns_masker(
    prepare, atlas_folder, scan_folder, tmp_path, image, labels, n_rois, n_present, unused_rows
):
    """The series that the command writes are those of nilearn's masker with the same settings."""
    import warnings

    from nilearn.maskers import NiftiLabelsMasker

    func = tmp_path / "bids" / "sub-01" / "func"
    func.mkdir(parents=True)
    scan = func / "sub-01_task-rest_bold.nii"
    scan.write_bytes((scan_folder / "functional.nii").read_bytes())
    table = tmp_path / "participants.tsv"
    table.write_text("participant_id\tdiagnosis\nsub-01\tcontrol\n")
    label_map = atlas_folder / f"{image}.nii.gz"
    result, folder = prepare(
        *("--whole-scan", "--high-pass", 0, "--silent-rois", "keep-zero"),
        *("--timeseries-out", tmp_path / "series"),
        base=(
            *("--images", f"{tmp_path}/bids/sub-*/func/*_bold.nii", "--atlas", label_map),
            *("--labels", atlas_folder / labels, "--participants", table, "--site", "HOSP"),
        ),
    )
    store = read_site_store(folder, verify=True)
    assert store.n_rois == n_rois
    assert (unused_rows or "In ") in result.output
    assert ("label no voxel" in result.output) == (unused_rows is not None)
    series = read_roi_file(tmp_path / "series" / "sub-01_rois.1D", store.rois)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        masker = NiftiLabelsMasker(
            str(label_map), low_pass=0.1, t_r=2.0, detrend=True, standardize="zscore_sample"
        )
        expected = masker.fit_transform(str(scan))
    absent = store.description["absent_rois"]["sub-01"]
    place = [k for k, (roi_id, _) in enumerate(store.rois) if roi_id not in absent]
    assert len(place) == n_present
    np.testing.assert_array_equal(series[:, place], expected)
    assert not np.delete(series, place, axis=1).any()
