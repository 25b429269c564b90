from pathlib import Path

import pytest

from data_prep.errors import SourceError
from data_prep.nifti import find_fmriprep_scans, find_scans, sidecars
from data_prep.participants import join_participants, parse_diagnosis_words, read_participants
from data_prep.roi_files import (
    describe_series,
    holds_series,
    read_roi_file,
    refuse_foreign_series,
    write_roi_file,
)
from data_prep.scans import Scan
from data_prep.timeseries import open_scan

ANY = {"ses": None, "task": None, "run": None}


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


# ------------------------------------------------------------------------------------------ scans


def test_scans_are_found_by_pattern_and_sorted(tmp_path, monkeypatch):
    touch(tmp_path, "sub-02/func/sub-02_bold.nii.gz", "sub-01/func/sub-01_task-rest_bold.nii.gz")
    touch(tmp_path, "sub-03/func/bold.nii.gz", "sub-01/anat/sub-01_T1w.nii.gz")
    expected = ["sub-01", "sub-02", "sub-03"]
    for pattern in (f"{tmp_path}/sub-*/func/*bold.nii.gz", f"{tmp_path}/**/*bold.nii.gz"):
        assert [scan.participant_id for scan in find_scans(pattern, ANY)] == expected
    touch(tmp_path, "visit [1]/sub-04/func/sub-04_bold.nii.gz")
    (scan,) = find_scans(f"{tmp_path}/visit [1]/sub-*/func/*bold.nii.gz", ANY)
    assert scan.participant_id == "sub-04"
    monkeypatch.chdir(tmp_path)
    scans = find_scans("sub-*/func/*bold.nii.gz", ANY)
    assert [scan.participant_id for scan in scans] == expected
    assert [scan.key for scan in scans] == [
        "sub-01_task-rest_bold.nii.gz",
        "sub-02_bold.nii.gz",
        "sub-03/bold.nii.gz",
    ]


def test_patterns_that_find_nothing_usable_are_explained(tmp_path):
    touch(tmp_path, "scans/anna_bold.nii.gz")
    with pytest.raises(SourceError, match=r"scans is a folder; give a pattern in quotation marks"):
        find_scans(str(tmp_path / "scans"), ANY)
    with pytest.raises(SourceError, match=r"no file fits --images '.*/sub-\*/\*.nii'"):
        find_scans(f"{tmp_path}/sub-*/*.nii", ANY)
    with pytest.raises(SourceError, match=r"anna_bold.nii.gz has no participant in its name"):
        find_scans(f"{tmp_path}/scans/*", ANY)


def test_a_link_to_a_file_that_was_not_fetched_is_named(tmp_path):
    (tmp_path / "sub-01_bold.nii.gz").symlink_to(tmp_path / ".git" / "annex" / "key.nii.gz")
    (scan,) = find_scans(f"{tmp_path}/sub-*_bold.nii.gz", ANY)
    with pytest.raises(SourceError, match="is a link to a file that is not here; get that file f"):
        open_scan(scan.file)


def test_two_scans_of_one_participant_are_refused_by_name(tmp_path):
    names = [f"sub-01/ses-{s}/func/sub-01_ses-{s}_run-{r}_bold.nii.gz" for s in "ab" for r in "12"]
    touch(tmp_path, *names, "sub-02/ses-a/func/sub-02_ses-a_run-1_bold.nii.gz")
    pattern = f"{tmp_path}/sub-*/ses-*/func/*_bold.nii.gz"
    with pytest.raises(
        SourceError,
        match=r"1 participant\(s\) have more than one scan \(sub-01\), such as "
        r"sub-01_ses-a_run-1_bold.nii.gz, .* and 1 more; choose one a participant with --run and "
        "--session",
    ):
        find_scans(pattern, ANY)
    with pytest.raises(SourceError, match=r"one a participant with --run$"):
        find_scans(pattern, ANY | {"ses": "a"})
    chosen = find_scans(pattern, ANY | {"ses": "ses-a", "run": "1"})
    assert [scan.file.name[:17] for scan in chosen] == ["sub-01_ses-a_run-", "sub-02_ses-a_run-"]
    with pytest.raises(SourceError, match="no scan has ses-c; found are ses-a, ses-b"):
        find_scans(pattern, ANY | {"ses": "c"})
    with pytest.raises(SourceError, match="no scan has task-rest; found are none with task-"):
        find_scans(pattern, ANY | {"task": "rest"})


def test_fmriprep_scans_are_those_of_one_space(tmp_path):
    own, mni = "sub-{}_task-rest_desc-preproc_bold.nii.gz", "space-MNI152NLin2009cAsym"
    for sub in ("01", "02"):
        touch(tmp_path / f"sub-{sub}" / "func", own.format(sub), own.format(f"{sub}_{mni}"))
        touch(tmp_path / f"sub-{sub}" / "func", f"sub-{sub}_{mni}_desc-brain_mask.nii.gz")
        touch(tmp_path / f"sub-{sub}" / "func", f"sub-{sub}_{mni}_boldref.nii.gz")
    touch(tmp_path, f"sub-03/ses-1/func/sub-03_ses-1_{mni}_desc-preproc_bold.nii.gz")
    scans = find_fmriprep_scans(tmp_path, ANY)
    assert [scan.participant_id for scan in scans] == ["sub-01", "sub-02", "sub-03"]
    assert {scan.entities["space"] for scan in scans} == {"MNI152NLin2009cAsym"}
    narrow = find_fmriprep_scans(tmp_path, ANY, pattern="sub-02/func/*_bold.nii.gz")
    assert [scan.participant_id for scan in narrow] == ["sub-02"]
    with pytest.raises(
        SourceError, match=r"no scan in the space T1w, only MNI152.*, none \(the scanner's own\)"
    ):
        find_fmriprep_scans(tmp_path, ANY, space="T1w")
    with pytest.raises(SourceError, match=r"no scan named .*desc-smoothAROMAnonaggr_bold"):
        find_fmriprep_scans(tmp_path, ANY, smoothed_by_aroma=True)
    with pytest.raises(SourceError, match="must be relative"):
        find_fmriprep_scans(tmp_path, ANY, pattern="/data/*.nii.gz")
    with pytest.raises(SourceError, match="nowhere is not a folder"):
        find_fmriprep_scans(tmp_path / "nowhere", ANY)


def test_sidecars_are_inherited_as_in_bids(tmp_path):
    touch(tmp_path, "dataset_description.json", "task-rest_bold.json", "task-nback_bold.json")
    touch(tmp_path, "sub-01/func/sub-01_task-rest_bold.nii.gz", "sub-01/sub-01_bold.json")
    touch(tmp_path, "sub-01/func/sub-01_task-rest_bold.json", "sub-01/func/sub-01_task-rest_x.json")
    (scan,) = find_scans(f"{tmp_path}/sub-*/func/*_bold.nii.gz", ANY)
    assert [str(file.relative_to(tmp_path)) for file in sidecars(scan)] == [
        "sub-01/func/sub-01_task-rest_bold.json",
        "sub-01/sub-01_bold.json",
        "task-rest_bold.json",
    ]


# ----------------------------------------------------------------------------------- participants


def read(tmp_path, text, words=(), column="diagnosis"):
    file = tmp_path / "participants.tsv"
    file.write_text(text, encoding="utf-8")
    words = parse_diagnosis_words(words)
    return read_participants(file, words, diagnosis_column=column)


@pytest.mark.parametrize(
    "text",
    [
        "participant_id\tdiagnosis\tage\tsex\nsub-01\tautism\t12.5\tF\nsub-02\tcontrol\tn/a\tM\n",
        "participant_id,age,diagnosis,Gender\n01,12.5,Autism,female\n02,,CONTROL,male\n",
        "\ufeffparticipant_id;diagnosis;sex;age\nsub-01;autism;f;12.5\nsub-02;control;m;\n",
    ],
)
def test_tables_of_participants(tmp_path, text):
    rows, left_out = read(tmp_path, text)
    assert [(r.participant_id, r.diagnosis, r.age, r.sex) for r in rows] == [
        ("sub-01", "autism", 12.5, "F"),
        ("sub-02", "control", None, "M"),
    ]
    assert left_out == []


def test_other_words_for_the_diagnosis(tmp_path):
    text = (
        "participant_id\tgroup\tage\n1\tASD\t89+\n2\tTypically Developing\t9\n3\tADHD\t9\n4\t\t9\n"
    )
    with pytest.raises(
        SourceError,
        match=r"the column 'group' has the word\(s\) 'ASD' \(1\), 'Typically Developing' \(1\), "
        r"'ADHD' \(1\), '\(empty\)' \(1\), and only autism and control are known; say what each "
        "means with --diagnosis-word 'ASD=MEANING', MEANING one of .*, leave-out",
    ):
        read(tmp_path, text, column="group")
    words = ["asd=autism", "typically developing=control", "ADHD=leave-out", "=leave-out"]
    rows, left_out = read(tmp_path, text, words, "group")
    assert [(row.participant_id, row.diagnosis) for row in rows] == [
        ("sub-1", "autism"),
        ("sub-2", "control"),
    ]
    assert rows[0].age == 89
    assert rows[0].sex == "n/a"
    assert left_out == [("sub-3", "group ADHD"), ("sub-4", "group empty")]


@pytest.mark.parametrize("entry", ["ASD", "ASD=patient", "ASD=autism,TD=no"])
def test_a_diagnosis_word_of_another_form_is_refused(entry):
    with pytest.raises(ValueError, match=r"write WORD=autism, WORD=control or WORD=leave-out"):
        parse_diagnosis_words([entry])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "participants.tsv is empty"),
        (
            "participant_id diagnosis\n",
            "only participant_id diagnosis; separate its columns by tabs",
        ),
        ("subject\tdiagnosis\n1\tautism\n", "has no column 'participant_id', only subject, diagn"),
        (
            "participant_id\tDX\n1\tautism\n",
            "'diagnosis', only participant_id, DX; name it with --diag",
        ),
        ("participant_id\tdiagnosis\n1\tautism\nsub-1\tautism\n", "has two rows of sub-1"),
        ("participant_id\tdiagnosis\n\tautism\n", "line 2: no participant_id"),
        ("participant_id\tdiagnosis\tage\n1\tautism\t12,5\n", "line 2: age '12,5' is no number"),
        ("participant_id\tdiagnosis\n", "has no row to use"),
        (
            "participant_id\tdiagnosis\tage\n1\tautism\n",
            r"line 2: 2 field\(s\), the header names 3; a",
        ),
        (
            "participant_id\tdiagnosis\n1\t7\tautism\n2\t8\tcontrol\n",
            r"line 2: 3 field\(s\), the header names 2; the rows have names .* row.names = FALSE",
        ),
        ("participant_id\tdiagnosis\tdiagnosis\n1\tautism\tcontrol\n", "'diagnosis' twice"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(tmp_path, text, message):
    with pytest.raises(SourceError, match=message):
        read(tmp_path, text)


# ------------------------------------------------------------------------------------------- join


def scan_of(label):
    return Scan(f"sub-{label}", Path(f"sub-{label}_bold.nii.gz"), {"sub": label})


def joined(tmp_path, ids, labels, **changes):
    text = "".join(f"{i}\tautism\n" for i in ids)
    rows, _ = read(tmp_path, f"participant_id\tdiagnosis\n{text}")
    return join_participants("HOSP", rows, changes.get("left_out", []), [*map(scan_of, labels)])


def test_participants_and_scans_are_matched_and_the_rest_is_named(tmp_path):
    join = joined(
        tmp_path,
        ["sub-02", "sub-01", "sub-03"],
        ["01", "02", "04", "05"],
        left_out=[("sub-05", "group ADHD")],
    )
    assert [scan.participant_id for _, scan in join.joined] == ["sub-01", "sub-02"]
    assert join.expected == 3
    assert join.dropped == [
        ("sub-05", "left out by diagnosis", "group ADHD"),
        ("sub-03", "participant without scan", "dropped"),
        ("sub-04_bold.nii.gz", "scan without participant", "dropped"),
    ]
    with pytest.raises(
        SourceError,
        match=r"'HOSP': 1 participant\(s\) without a scan \(sub-03\) and 1 scan\(s\) without a row "
        r"in the table \(sub-04_bold.nii.gz\); complete .* --mismatch drop",
    ):
        join.refuse_mismatch()


def test_zeros_that_a_spreadsheet_took_are_put_back(tmp_path):
    join = joined(tmp_path, ["50952", "50954.0", "7"], ["0050952", "0050954", "7", "07"])
    assert [(row.participant_id, scan.participant_id) for row, scan in join.joined] == [
        ("sub-50952", "sub-0050952"),
        ("sub-50954.0", "sub-0050954"),
        ("sub-7", "sub-7"),
    ]
    assert join.without_row == ("sub-07_bold.nii.gz",)
    join = joined(tmp_path, ["1", "2"], ["01", "001", "2"])  # two could be meant
    assert join.without_scan == ("sub-1",)


def test_nothing_that_matches_is_refused(tmp_path):
    with pytest.raises(SourceError, match="the table has sub-A1, the scans are of sub-01, sub-02"):
        joined(tmp_path, ["A1"], ["01", "02"])


# ------------------------------------------------------------------------------ time series files

ROIS = (("12", "left"), ("7", "right"))


def test_written_series_are_read_back_to_the_last_bit(tmp_path, rng):
    series = rng.standard_normal((9, 2)) * 1e-3
    series[3] = 0
    write_roi_file(tmp_path, "sub-01", series, ROIS)
    file = tmp_path / "sub-01_rois.1D"
    assert file.read_text().startswith("#12\t#7\n")
    assert (read_roi_file(file, ROIS) == series).all()


def test_a_folder_of_series_is_complete_only_with_its_description(tmp_path, rng):
    write_roi_file(tmp_path, "sub-02", rng.standard_normal((9, 2)), ROIS)
    assert not holds_series(tmp_path, "f")
    describe_series(tmp_path, ROIS, {"fingerprint": "f"})
    assert holds_series(tmp_path, "f")
    assert not holds_series(tmp_path, "g")
    (tmp_path / "sub-02_rois.1D").write_text("edited")
    assert not holds_series(tmp_path, "f")


def test_a_folder_with_something_else_is_not_replaced(tmp_path):
    touch(tmp_path, "sub-01/anat.nii", "dataset_description.json")
    with pytest.raises(SourceError, match=r"holds something else \(sub-01\); name another folder"):
        refuse_foreign_series(tmp_path)
    with pytest.raises(SourceError, match="is a file; name a folder"):
        refuse_foreign_series(tmp_path / "dataset_description.json")
