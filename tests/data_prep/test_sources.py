import socket

import numpy as np
import pytest

from data_prep.harvard_oxford import ROIS
from data_prep.sources import (
    ABIDE_SITES,
    SourceError,
    fetch_abide,
    find_abide,
    join_abide_site,
    read_abide_subject,
    read_phenotypic,
    read_roi_file,
)

IDS = tuple(i for i, _ in ROIS)
SMALL = (("10", "Left Thalamus"), ("3455", "label 3455"), ("4802", "Left Occipital Pole"))
GOOD = "#10\t#3455\t#4802\r\n1.5\t-2\t3e1\r\n4\t5\t6.25\r\n"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_the_atlas_has_111_regions_with_unique_names_in_id_order():
    assert len(ROIS) == 111
    assert [int(i) for i in IDS] == sorted({int(i) for i in IDS})
    assert len({name for _, name in ROIS}) == 111
    names = dict(ROIS)
    assert names["10"] == "Left Thalamus"
    assert names["101"] == "Right Frontal Pole"
    assert names["4802"] == "Left Occipital Pole"


@pytest.mark.parametrize("text", [GOOD, GOOD.replace("\r\n", "\n"), GOOD.replace("\t", "  ")])
def test_a_good_file_is_read(tmp_path, text):
    (tmp_path / "a.1D").write_bytes(text.encode())
    series = read_roi_file(tmp_path / "a.1D", SMALL)
    np.testing.assert_array_equal(series, [[1.5, -2, 30], [4, 5, 6.25]])


def test_columns_are_matched_by_id_not_by_position(tmp_path):
    (tmp_path / "a.1D").write_text("#4802\t#10\t#3455\n30\t1.5\t-2\n")
    np.testing.assert_array_equal(read_roi_file(tmp_path / "a.1D", SMALL), [[1.5, -2, 30]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.1D is empty"),
        ("\r\n", "a.1D is empty"),
        ("#10\t#3455\t#4802\n", "has a header and no time point"),
        (GOOD[:-6], "a.1D is cut off: its last line has no end"),
        (GOOD[:-2], "a.1D is cut off: its last line has no end"),
        (GOOD[:-7] + "\r\n", "a.1D is cut off or damaged: line 3 has 2 of 3 values"),
        (GOOD.replace("-2", "-2\t7"), "line 2 has 4 of 3 values"),
        (GOOD.replace("#3455\t", ""), r"misses the ROI columns #3455 \(label 3455\)"),
        (GOOD.replace("#3455", "#9999"), r"misses .*#3455 .* and has the foreign .* #9999"),
        (GOOD.replace("#4802", "#4802\t#7"), "has the foreign ROI columns #7"),
        (GOOD.replace("#3455", "#10"), "has the ROI columns #10 more than once"),
        (GOOD.replace("-2", "NaN"), r"column #3455 \(label 3455\) is nan at time point 0"),
        (GOOD.replace("6.25", "inf"), r"column #4802 \(Left Occipital Pole\) is inf at time poi"),
        (GOOD.replace("6.25", "six"), "a.1D, line 3: could not convert string to float: 'six'"),
        (GOOD.split("\n", 1)[1], "has no header line of ROI ids"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path, text, message):
    (tmp_path / "a.1D").write_bytes(text.encode())
    with pytest.raises(SourceError, match=message) as caught:
        read_roi_file(tmp_path / "a.1D", SMALL)
    assert "\n" not in str(caught.value)


def test_a_binary_file_is_refused(tmp_path):
    (tmp_path / "a.1D").write_bytes(b"\x1f\x8b\xff\x00")
    with pytest.raises(SourceError, match="is not a text file"):
        read_roi_file(tmp_path / "a.1D", SMALL)


def test_an_error_in_a_scan_names_site_and_subject(small_abide):
    scan = small_abide.scan(50013, "UM_1")
    scan.write_text(scan.read_text().replace("#3455", "#3456"))
    join = join_abide_site(small_abide.folder, "UM", small_abide.rows)
    with pytest.raises(SourceError, match="site 'UM', sub-0050013: UM_1_0050013_rois_ho"):
        read_abide_subject(join.joined[0], "UM")


@pytest.mark.parametrize("place", [".", "ABIDE_pcp", ".."])
def test_the_folder_may_be_given_directly_or_as_its_parent(small_abide, place):
    found = find_abide(small_abide.root / place)
    assert found.resolve() == small_abide.folder.resolve()


def test_a_folder_without_abide_is_refused(tmp_path):
    with pytest.raises(SourceError, match="holds no ABIDE_pcp/Phenotypic"):
        find_abide(tmp_path)
    with pytest.raises(SourceError, match="is not a folder"):
        find_abide(tmp_path / "nowhere")


@pytest.mark.parametrize("site", ABIDE_SITES)
def test_rows_and_scans_are_joined(small_abide, site):
    join = join_abide_site(small_abide.folder, site, read_phenotypic(small_abide.folder))
    assert len(join.joined) == join.expected == 6
    assert (join.not_checked, join.without_scan, join.without_row) == ((), (), ())
    first = join.joined[0]
    assert first.diagnosis == "autism"
    assert (first.age, first.sex) == (12.5, "F")
    subject = read_abide_subject(first, site)
    assert subject.series.shape == (40, 111)
    assert subject.site == site


def test_ids_are_matched_whether_they_are_numbers_or_padded_text(small_abide):
    for row in small_abide.rows:
        row["SUB_ID"] = f"{row['SUB_ID']}.0"
    join = join_abide_site(small_abide.folder, "NYU", small_abide.rows)
    assert [row.participant_id for row in join.joined][:2] == ["sub-0050001", "sub-0050002"]


def test_a_row_without_scan_and_a_scan_without_row_are_named(small_abide):
    small_abide.scan(50002, "NYU").unlink()
    small_abide.scan(59999, "NYU").write_text("anything")
    join = join_abide_site(small_abide.folder, "NYU", small_abide.rows)
    assert join.without_scan == ("sub-0050002",)
    assert join.without_row == ("NYU_0059999_rois_ho.1D",)
    assert (len(join.joined), join.expected) == (5, 6)
    with pytest.raises(
        SourceError,
        match=r"'NYU': 1 phenotypic row\(s\) without a scan \(sub-0050002\) and 1 scan\(s\) "
        r"without a phenotypic row \(NYU_0059999_rois_ho.1D\)",
    ):
        join.refuse_mismatch()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"FILE_ID": "no_filename"}, "no scan in the release"),
        ({"qc_rater_1": "fail"}, "failed ABIDE's quality check: qc_rater_1 fail"),
        ({"qc_anat_rater_2": "fail"}, "failed ABIDE's quality check: qc_anat_rater_2 fail"),
        ({"qc_func_rater_3": "maybe"}, "failed ABIDE's quality check: qc_func_rater_3 maybe"),
        ({"qc_func_rater_2": "maybe"}, None),
    ],
)
def test_the_quality_check_is_nilearns_and_its_reason_is_kept(small_abide, change, reason):
    small_abide.rows[0].update(change)
    if change.get("FILE_ID"):
        small_abide.scan(50001, "NYU").unlink()
    join = join_abide_site(small_abide.folder, "NYU", small_abide.rows)
    assert join.not_checked == ((("sub-0050001", reason),) if reason else ())
    assert len(join.joined) == (5 if reason else 6)
    join.refuse_mismatch()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"DX_GROUP": "3"}, "sub-0050001 has DX_GROUP '3'; allowed are 1"),
        ({"SUB_ID": "NYU-1"}, "has the SUB_ID 'NYU-1', no number"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused(small_abide, change, message):
    small_abide.rows[0].update(change)
    with pytest.raises(SourceError, match=message):
        join_abide_site(small_abide.folder, "NYU", small_abide.rows)


def test_an_unknown_age_is_none(small_abide):
    small_abide.rows[0]["AGE_AT_SCAN"] = "-9999"
    small_abide.rows[1]["AGE_AT_SCAN"] = ""
    join = join_abide_site(small_abide.folder, "NYU", small_abide.rows)
    assert [row.age for row in join.joined[:3]] == [None, None, 12.5]


def test_a_phenotypic_table_must_have_its_columns_and_each_subject_once(small_abide):
    small_abide.rows.append(dict(small_abide.rows[0]))
    small_abide.write_rows()
    with pytest.raises(SourceError, match="two rows with SUB_ID 50001"):
        read_phenotypic(small_abide.folder)
    table = next(small_abide.folder.glob("*.csv"))
    table.write_text(table.read_text().replace("DX_GROUP", "DIAGNOSIS"))
    with pytest.raises(SourceError, match="misses the columns DX_GROUP"):
        read_phenotypic(small_abide.folder)


# ------------------------------------------------------------------------------------- real ABIDE


def test_real_abide_has_the_known_counts(abide_source):
    folder = find_abide(abide_source)
    rows = read_phenotypic(folder)
    found = {}
    for site in ABIDE_SITES:
        join = join_abide_site(folder, site, rows)
        join.refuse_mismatch()
        autism = sum(row.diagnosis == "autism" for row in join.joined)
        found[site] = (autism, len(join.joined) - autism)
    assert found == {"NYU": (74, 98), "USM": (43, 24), "UM": (34, 52), "UCLA": (37, 27)}


def test_real_abide_is_what_nilearn_reads(abide_source):
    from nilearn.datasets import fetch_abide_pcp

    theirs = fetch_abide_pcp(
        data_dir=str(abide_source),
        pipeline="cpac",
        band_pass_filtering=True,
        global_signal_regression=False,
        derivatives=["rois_ho"],
        SITE_ID=["UCLA_1"],
        n_subjects=8,
        verbose=0,
    )
    folder = find_abide(abide_source)
    join = join_abide_site(folder, "UCLA", read_phenotypic(folder))
    ours = {row.participant_id: row for row in join.joined}
    for (_, row), series in zip(theirs.phenotypic.iterrows(), theirs.rois_ho, strict=True):
        subject = read_abide_subject(ours[f"sub-{row['SUB_ID']:07d}"], "UCLA")
        assert subject.diagnosis == {1: "autism", 2: "control"}[row["DX_GROUP"]]
        assert subject.age == row["AGE_AT_SCAN"]
        np.testing.assert_array_equal(subject.series, series)


# ---------------------------------------------------------------------------------------- download


def test_download_asks_nilearn_for_the_paper_s_derivative(small_abide, monkeypatch):
    from nilearn import datasets

    asked = {}
    monkeypatch.setattr(datasets, "fetch_abide_pcp", lambda **kwargs: asked.update(kwargs))
    monkeypatch.setenv("NILEARN_DATA", str(small_abide.root))
    assert fetch_abide(["UM", "UCLA"]) == small_abide.folder
    assert asked["SITE_ID"] == ["UM_1", "UCLA_1"]
    assert asked["derivatives"] == ["rois_ho"]
    assert (asked["pipeline"], asked["band_pass_filtering"]) == ("cpac", True)
    assert asked["global_signal_regression"] is False


def test_a_failed_download_is_one_sentence(monkeypatch, tmp_path):
    from nilearn import datasets

    def fail(**_):
        raise OSError("no route to host\nand a long trace")

    monkeypatch.setattr(datasets, "fetch_abide_pcp", fail)
    with pytest.raises(SourceError, match=r"could not be downloaded \(no route to host\); name a"):
        fetch_abide(["UM"], tmp_path)
