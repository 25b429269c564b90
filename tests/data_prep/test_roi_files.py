import numpy as np
import pytest

from data_prep.errors import SourceError
from data_prep.harvard_oxford import ROIS
from data_prep.roi_files import read_roi_file, rois_of

IDS = tuple(i for i, _ in ROIS)
SMALL = (("10", "Left Thalamus"), ("3455", "label 3455"), ("4802", "Left Occipital Pole"))
GOOD = "#10\t#3455\t#4802\r\n1.5\t-2\t3e1\r\n4\t5\t6.25\r\n"


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
        (GOOD.replace("6.25", "six"), "a.1D, line 3: the column '4802' holds 'six', no number"),
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
    with pytest.raises(SourceError, match="is not UTF-8 text"):
        read_roi_file(tmp_path / "a.1D", SMALL)


# ----------------------------------------------------------------------------- csv, tsv and arrays

NAMED = "Left Thalamus,label 3455,Left Occipital Pole\n1.5,-2,3e1\n4,5,6.25\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "10,3455,4802\n1.5,-2,3e1\n4,5,6.25\n"),
        ("a.csv", '"10";"3455";"4802"\r\n"1.5";-2;3e1\r\n4;5;6.25'),
        ("a.csv", NAMED),
        ("a.tsv", NAMED.replace(",", "\t")),
        ("a.tsv", "4802\t#10\t3455\n30\t1.5\t-2\n6.25\t4\t5\n"),
        ("a.txt", "10 3455 4802\n1.5 -2 30\n4  5 6.25\n"),
    ],
)
def test_other_tables_are_read_by_their_header(tmp_path, name, text):
    (tmp_path / name).write_bytes(text.encode())
    series = read_roi_file(tmp_path / name, SMALL)
    np.testing.assert_array_equal(series, [[1.5, -2, 30], [4, 5, 6.25]])


@pytest.mark.parametrize("gap", ["", " ", '""', "n/a", "NA", '"n/a"', ".", "1_0", "1,5"])
@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_a_gap_is_named_with_its_row_and_column(tmp_path, gap, delimiter):
    text = f"10;3455;4802\n1.5;-2;30\n4;{gap};6.25\n".replace(";", delimiter)
    (tmp_path / "a.csv").write_text(text)
    held = gap.strip('" ')
    what = f"holds '{held}', no number" if held else "is empty"
    with pytest.raises(SourceError, match=f"a.csv, line 3: the column '3455' {what}"):
        read_roi_file(tmp_path / "a.csv", SMALL)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "10,3455,4802\n1,1.5,-2,30\n2,4,5,6.25\n", r"line 2 has 4 of 3 .*row.names = FA"),
        ("a.csv", ",10,3455,4802\n1,1.5,-2,30\n", r"column 1 has no name in the header; .*index=F"),
        ("a.csv", "10,,4802\n1,1.5,-2\n", r"column 2 has no name in the header"),
        ("a.csv", "10,3455,4802\n1.5,-2,30\n\n4,5,6.25\n", "line 3 has 0 of 3 values"),
        ("a.csv", "10,3455,4802\n1.5,-2\n", "line 2 has 2 of 3 values"),
        ("a.txt", "10 3455 4802\n1.5  30\n", "line 2 has 2 of 3 values"),
        ("a.csv", "10,3455,10\n1,2,3\n", "has the ROI columns #10 more than once"),
        (
            "a.csv",
            "1.5,-2,30\n4,5,6.25\n",
            r"misses the ROI columns #10 .* foreign ROI columns #1.5",
        ),
        ("a.csv", "10,3455\n1.5,-2\n", r"misses the ROI columns #4802 \(Left Occipital Pole\)"),
        ("a.csv", "10,3455,4802\n1,2,nan\n", r"column #4802 .* is nan at time point 0"),
        ("a.csv", '10,3455,4802\n1,2,"3\n4,5,6\n', "line 2: a quotation mark"),
        ("a.csv", "10,3455,4802\n", "has a header and no time point"),
    ],
)
def test_another_table_with_a_fault_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(SourceError, match=message):
        read_roi_file(tmp_path / name, SMALL)


@pytest.mark.parametrize("step", [1, 0.72])
def test_a_column_that_counts_is_no_roi(tmp_path, rng, step):
    rows = np.column_stack([step * np.arange(9), rng.standard_normal((9, 2))])
    np.savetxt(tmp_path / "a.csv", rows, delimiter=",", header="time,10,20", comments="")
    with pytest.raises(SourceError, match="the column 'time' counts the time points and is no ROI"):
        read_roi_file(tmp_path / "a.csv", rois_of(tmp_path / "a.csv"))


def test_an_array_has_the_columns_of_the_table(tmp_path, rng):
    series = rng.standard_normal((9, 3)).astype(np.float32)
    np.save(tmp_path / "a.npy", series)
    np.testing.assert_array_equal(read_roi_file(tmp_path / "a.npy", SMALL), series)
    with pytest.raises(SourceError, match=r"a.npy names no ROIs; give their table with --rois"):
        rois_of(tmp_path / "a.npy")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 9)), r"has the shape \(3, 9\), expected \(n_timepoints, 3\); turn it round"),
        (np.zeros((9, 4)), r"has the shape \(9, 4\), expected \(n_timepoints, 3\)$"),
        (np.zeros(9), r"has the shape \(9,\)"),
        (np.zeros((9, 3), np.complex64), "holds complex64; series are real numbers"),
        (np.array([[{}] * 3]), "is cut off or no NumPy array"),
        (np.full((9, 3), np.inf), "is inf at time point 0"),
        (np.zeros((0, 3)), "no time point"),
    ],
)
def test_another_array_is_refused(tmp_path, array, message):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(SourceError, match=message):
        read_roi_file(tmp_path / "a.npy", SMALL)


def test_a_header_gives_the_rois(tmp_path):
    (tmp_path / "a.1D").write_text(GOOD)
    assert rois_of(tmp_path / "a.1D") == [("10", "10"), ("3455", "3455"), ("4802", "4802")]
    (tmp_path / "b.csv").write_text("only\n1\n")
    with pytest.raises(SourceError, match=r"b.csv has 1 column; a connectome needs 2 ROIs or more"):
        rois_of(tmp_path / "b.csv")
