import socket

import numpy as np
import pytest

from data_prep.abide import (
    ABIDE_SITES,
    DEFAULT_SITES,
    PHENOTYPIC,
    Abide,
    fetch_abide,
    find_abide,
    repetition_times,
)
from data_prep.errors import SourceError
from data_prep.participants import JoinedSite
from data_prep.roi_files import read_subjects
from data_prep.scans import Scan


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def abide_of(*small, write=True):
    for one in small:
        if write:
            one.write_rows()
    return Abide(tuple(one.folder for one in small))


def test_an_error_in_a_scan_names_site_and_subject(small_abide):
    scan = small_abide.scan(50013, "UM_1")
    scan.write_text(scan.read_text().replace("#3455", "#3456"))
    join = abide_of(small_abide).join("UM")
    with pytest.raises(SourceError, match="site 'UM', sub-0050013: UM_1_0050013_rois_ho"):
        list(read_subjects(join))


@pytest.mark.parametrize("place", [".", "ABIDE_pcp", ".."])
def test_the_folder_may_be_given_directly_or_as_its_parent(small_abide, place):
    found = find_abide(small_abide.root / place)
    assert found.resolve() == small_abide.folder.resolve()


def test_a_folder_without_abide_is_refused(tmp_path):
    with pytest.raises(SourceError, match="holds no ABIDE_pcp/Phenotypic"):
        find_abide(tmp_path)
    with pytest.raises(SourceError, match="is not a folder"):
        find_abide(tmp_path / "nowhere")


@pytest.mark.parametrize("site", DEFAULT_SITES)
def test_rows_and_scans_are_joined(small_abide, site):
    join = abide_of(small_abide, write=False).join(site)
    assert len(join.joined) == join.expected == 6
    assert (join.left_out, join.without_scan, join.without_row) == ((), (), ())
    subject = next(read_subjects(join))
    assert subject.diagnosis == "autism"
    assert (subject.age, subject.sex) == (12.5, "F")
    assert subject.series.shape == (40, 111)
    assert subject.site == site


def test_ids_are_matched_whether_they_are_numbers_or_padded_text(small_abide):
    for row in small_abide.rows:
        row["SUB_ID"] = f"{row['SUB_ID']}.0"
    join = abide_of(small_abide).join("NYU")
    assert [person.participant_id for person, _ in join.joined][:2] == [
        "sub-0050001",
        "sub-0050002",
    ]


def test_a_row_without_scan_and_a_scan_without_row_are_named(small_abide):
    small_abide.scan(50002, "NYU").unlink()
    small_abide.scan(59999, "NYU").write_text("anything")
    join = abide_of(small_abide).join("NYU")
    assert join.without_scan == ("sub-0050002",)
    assert join.without_row == ("NYU_0059999_rois_ho.1D",)
    assert (len(join.joined), join.expected) == (5, 6)
    with pytest.raises(
        SourceError,
        match=r"'NYU': 1 participant\(s\) without a scan \(sub-0050002\) and 1 scan\(s\) "
        r"without a row in the table \(NYU_0059999_rois_ho.1D\)",
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
    join = abide_of(small_abide).join("NYU")
    assert join.left_out == ((("sub-0050001", reason),) if reason else ())
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
        abide_of(small_abide).join("NYU")


def test_an_unknown_age_is_none(small_abide):
    small_abide.rows[0]["AGE_AT_SCAN"] = "-9999"
    small_abide.rows[1]["AGE_AT_SCAN"] = ""
    join = abide_of(small_abide).join("NYU")
    assert [person.age for person, _ in join.joined[:3]] == [None, None, 12.5]


def test_a_phenotypic_table_must_have_its_columns_and_each_subject_once(small_abide):
    small_abide.rows.append(dict(small_abide.rows[0]))
    small_abide.write_rows()
    with pytest.raises(SourceError, match="two rows with SUB_ID 50001"):
        _ = abide_of(small_abide).rows
    table = next(small_abide.folder.glob("*.csv"))
    table.write_text(table.read_text().replace("DX_GROUP", "DIAGNOSIS"))
    with pytest.raises(SourceError, match="has no column 'DX_GROUP'"):
        _ = abide_of(small_abide, write=False).rows


def test_other_sites_are_known_by_the_names_in_the_table(tmp_path, small_abide_class, rng):
    """The files of MAX_MUN begin with MaxMun_a, those of CALTECH with Caltech."""
    small = small_abide_class(tmp_path, rng, sites=("MAX_MUN", "CALTECH"))
    for row in small.rows:
        old = small.scans / f"{row['FILE_ID']}_rois_ho.1D"
        begin = {"MAX_MUN": "MaxMun_a", "CALTECH": "Caltech"}[row["SITE_ID"]]
        row["FILE_ID"] = f"{begin}_{int(row['SUB_ID']):07d}"
        old.rename(small.scans / f"{row['FILE_ID']}_rois_ho.1D")
    data = abide_of(small)
    assert data.sites() == ["CALTECH", "MAX_MUN"]
    assert len(data.join("MAX_MUN").joined) == 6
    (small.scans / "MaxMun_a_0059999_rois_ho.1D").write_text("anything")
    assert abide_of(small).join("MAX_MUN").without_row == ("MaxMun_a_0059999_rois_ho.1D",)
    assert abide_of(small).join("CALTECH").without_row == ()


def test_several_folders_are_one(tmp_path, small_abide_class, rng):
    first = small_abide_class(tmp_path / "a", rng, sites=("NYU", "UM"))
    second = small_abide_class(tmp_path / "b", rng, sites=("KKI",), first=51000)
    for one in (first, second):  # each table describes everyone, as ABIDE's does
        one.all_rows = [*first.rows, *second.rows]
    first.rows = second.rows = first.all_rows
    data = abide_of(first, second)
    assert data.sites() == ["NYU", "UM", "KKI"]
    assert len(data.rows) == 18
    assert [len(data.join(site).joined) for site in data.sites()] == [6, 6, 6]
    assert len(data.inputs()) == 1
    scan = first.scan(50001, "NYU")
    (second.scans / scan.name).write_bytes(scan.read_bytes())  # the same twice is one
    assert len(abide_of(first, second).scans) == 18
    (second.scans / scan.name).write_text("another")
    with pytest.raises(SourceError, match=r"NYU_0050001_rois_ho.1D is another scan than "):
        _ = abide_of(first, second).scans
    second.rows = [dict(row) for row in second.rows]
    second.rows[0]["DX_GROUP"] = "2"
    with pytest.raises(SourceError, match="SUB_ID 50001 has other values in"):
        _ = abide_of(first, second).rows


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("NYU", 2.0), ("UCLA_2", 3.0), ("MaxMun_d", 3.0), ("CMU_a", 2.0), ("CMU_b", 1.5)],
)
def test_repetition_times_go_by_the_file(tmp_path, name, seconds):
    scan = Scan("sub-1", tmp_path / f"{name}_0050001_rois_ho.1D")
    assert repetition_times(JoinedSite("X", (("person", scan),))) == [seconds]


def test_the_20_sites_have_one_name_each():
    assert len(ABIDE_SITES) == len(set(ABIDE_SITES.values())) == 20


def test_a_note_in_the_table_takes_nobody_away(small_abide):
    table = small_abide.folder / PHENOTYPIC
    header, *rows = table.read_text().splitlines()
    for note in ("calm\u2028then tired", "\x0b", '"calm, then tired"'):
        text = "\n".join([f"{header},NOTE", f"{rows[0]},{note}", *(f"{row}," for row in rows[1:])])
        table.write_text(text, encoding="utf-8")
        assert len(abide_of(small_abide, write=False).join("NYU").joined) == 6
    table.write_text(text.replace('tired"', "tired"), encoding="utf-8")
    with pytest.raises(
        SourceError, match=r'preprocessed1.csv, line 2: a quotation mark \("\) is op'
    ):
        _ = abide_of(small_abide, write=False).rows


# ------------------------------------------------------------------------------------- real ABIDE


def test_real_abide_has_the_known_counts(abide_source):
    data = Abide((find_abide(abide_source),))
    assert data.sites() == list(DEFAULT_SITES)
    found = {}
    for site in DEFAULT_SITES:
        join = data.join(site)
        join.refuse_mismatch()
        autism = sum(person.diagnosis == "autism" for person, _ in join.joined)
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
    join = Abide((find_abide(abide_source),)).join("UCLA")
    ours = {subject.participant_id: subject for subject in read_subjects(join)}
    for (_, row), series in zip(theirs.phenotypic.iterrows(), theirs.rois_ho, strict=True):
        subject = ours[f"sub-{row['SUB_ID']:07d}"]
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
