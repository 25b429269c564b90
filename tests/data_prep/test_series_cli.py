import json
import os
import subprocess
import sys

import numpy as np
import pytest

from data_prep.connectome import correlation_connectomes
from data_prep.site_store import check_compatible, read_site_store

N_ROIS = 5


class Series:
    """A hospital's ROI time series, a file a participant, and its table of participants."""

    def __init__(self, root, rng, names=("sub-{}_rois.csv",), n=6):
        self.root = root
        (root / "series").mkdir(parents=True)
        self.rows = []
        self.values = {}
        for k in range(1, n + 1):
            label = f"{k:02d}"
            self.values[label] = rng.standard_normal((40, N_ROIS)).round(4)
            self.write(names[k % len(names)].format(label), self.values[label])
            self.rows.append([label, ("autism", "control")[k % 2], "30", "F"])
        self.write_rows()

    def write(self, name, values, ids=tuple(f"area{i}" for i in range(N_ROIS))):
        file = self.root / "series" / name
        if file.suffix == ".npy":
            np.save(file, values)
            return
        mark = {".csv": ",", ".tsv": "\t", ".1D": " "}[file.suffix]
        lines = [mark.join(ids), *(mark.join(map(repr, row)) for row in values.tolist())]
        file.write_text("".join(f"{line}\n" for line in lines))

    def write_rows(self, header=("participant_id", "diagnosis", "age", "sex"), name="people.tsv"):
        self.people = self.root / name
        mark = "\t" if name.endswith("tsv") else ","
        text = "\n".join(mark.join(row) for row in (header, *self.rows))
        self.people.write_text(text + "\n", encoding="utf-8")

    def arguments(self, pattern="*"):
        return (
            *("--input", f"{self.root}/series/{pattern}", "--participants", self.people),
            *("--site", "HOSP", "--stride", 4),
        )


@pytest.fixture
def hospital(tmp_path, rng):
    return Series(tmp_path / "hospital", rng)


@pytest.fixture
def prepare(call, hospital, tmp_path):
    def run(*arguments, code=0, pattern="*", of=None):
        common = ("series", *(of or hospital).arguments(pattern), "--out", tmp_path / "out")
        return call(*common, *arguments, code=code), tmp_path / "out" / "HOSP"

    return run


def test_series_of_any_atlas_become_a_store_that_says_how(prepare, hospital):
    result, folder = prepare("--atlas", "made-up", "--preprocessing", "fMRIPrep 24, 24P", "--tr", 2)
    store = read_site_store(folder, verify=True)
    assert [p.participant_id for p in store.participants] == [f"sub-{k:02d}" for k in range(1, 7)]
    assert store.rois == tuple((f"area{i}", f"area{i}") for i in range(N_ROIS))
    np.testing.assert_array_equal(
        store.connectomes[store.sample_participant == 1],
        correlation_connectomes(hospital.values["02"], window=32, stride=4),
    )
    stated = store.description
    assert stated["atlas"] == "made-up (5 ROIs)"
    assert stated["preprocessing"] == "fMRIPrep 24, 24P"
    assert stated["repetition_time_s"] == 2.0
    assert stated["subjects_by_n_timepoints"] == {"40": 6}
    assert str(hospital.root) not in json.dumps(stated)
    assert "warning" not in result.stderr
    assert (
        "Unchanged"
        in prepare(*("--atlas", "made-up", "--preprocessing", "fMRIPrep 24, 24P", "--tr", 2))[
            0
        ].output
    )
    assert "Unchanged" not in prepare("--atlas", "another")[0].output


@pytest.mark.parametrize("form", ["{}.npy", "HOSP_000{}_rois.tsv", "ts-{}-rest.1D", "{}_run1.csv"])
def test_ids_are_found_in_any_name(call, tmp_path, rng, form):
    other = Series(tmp_path / "other", rng, names=(form,))
    if form.endswith(".1D"):
        for label, values in other.values.items():
            other.write(form.format(label), values, [f"#area{i}" for i in range(N_ROIS)])
    table = tmp_path / "rois.csv"
    table.write_text("index,name\n" + "".join(f"{7 + i},area{i}\n" for i in range(N_ROIS)))
    call("series", *other.arguments(), "--rois", table, "--out", tmp_path)
    store = read_site_store(tmp_path / "HOSP", verify=True)
    assert store.rois[1] == ("8", "area1")
    people = {p.participant_id[-2:]: k for k, p in enumerate(store.participants)}
    assert sorted(people) == sorted(other.values)
    np.testing.assert_array_equal(
        store.connectomes[store.sample_participant == people["03"]],
        correlation_connectomes(other.values["03"], window=32, stride=4),
    )


def test_a_name_that_two_ids_fit_is_refused(prepare, hospital):
    hospital.write("01_and_02.csv", hospital.values["01"])
    result, _ = prepare(code=1)
    assert "01_and_02.csv may be of sub-01 or sub-02; name it sub-<label>" in result.stderr


def test_files_and_participants_that_do_not_match_are_named(prepare, hospital):
    hospital.write("visitor.csv", hospital.values["01"])
    hospital.rows.append(["77", "autism", "", ""])
    hospital.write_rows()
    result, _ = prepare(code=1)
    assert "1 participant(s) without a scan (sub-77) and 1 scan(s) without a row" in result.stderr
    assert "visitor.csv" in result.stderr
    _, folder = prepare("--mismatch", "drop")
    assert len(read_site_store(folder).participants) == 6
    hospital.write("sub-01_again.csv", hospital.values["01"])
    result, _ = prepare("--mismatch", "drop", code=1)
    assert "more than one scan (sub-01), such as" in result.stderr
    assert "choose one a participant with a narrower --input" in result.stderr


def test_columns_have_other_names(prepare, hospital):
    hospital.rows = [
        [label, {"autism": "1", "control": "2"}[d], *r] for label, d, *r in hospital.rows
    ]
    hospital.write_rows(("SUB_ID", "DX_GROUP", "age", "sex"), name="people.csv")
    result, _ = prepare(code=1)
    assert (
        "has no column 'participant_id', only SUB_ID, DX_GROUP, age, sex; name it" in result.stderr
    )
    words = ("--diagnosis-word", "1=autism", "--diagnosis-word", "2=control")
    columns = ("--id-column", "SUB_ID", "--diagnosis-column", "DX_GROUP")
    _, folder = prepare(*columns, *words)
    assert read_site_store(folder).labels.sum() == 3


def test_a_file_of_another_atlas_is_named_with_its_subject(prepare, hospital):
    hospital.write("sub-03_rois.csv", hospital.values["03"], [f"area{i}" for i in range(1, 6)])
    result, _ = prepare(code=1)
    assert (
        "error: site 'HOSP', sub-03: sub-03_rois.csv misses the ROI columns #area0 (area0) and has "
        "the foreign ROI columns #area5" in result.stderr
    )


def test_one_diagnosis_is_warned_of_at_once(prepare, hospital):
    hospital.rows = [[label, "autism", *rest] for label, _, *rest in hospital.rows]
    hospital.write_rows()
    result, _ = prepare()
    assert "warning: site 'HOSP' has one diagnosis only (6 of autism)" in result.stderr


def test_one_open_mark_in_a_note_is_named_and_loses_nobody(prepare, hospital):
    hospital.rows = [[*row, '"calm' if row[0] == "03" else "calm"] for row in hospital.rows]
    hospital.write_rows(("participant_id", "diagnosis", "age", "sex", "note"))
    for more in ((), ("--mismatch", "drop")):
        result, folder = prepare(*more, code=1)
        assert 'participants table people.tsv, line 4: a quotation mark (")' in result.stderr
        assert not folder.exists()


@pytest.mark.parametrize("site", ["St.Olav", "a" * 64, "-x", "a b", "a/b", "é", ""])
def test_a_name_that_no_site_can_have_is_a_usage_error(prepare, site):
    result, _ = prepare("--site", site, code=2)
    assert f"site is {site!r}; use letters, digits, '-' and '_'" in " ".join(result.stderr.split())


def test_the_longest_name_of_a_site_is_good(call, hospital, tmp_path):
    call("series", *hospital.arguments(), "--site", "a" * 63, "--out", tmp_path)
    assert read_site_store(tmp_path / ("a" * 63)).site == "a" * 63


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tr", 2000), "tr is 2000 s, which no functional scan has"),
        (("--window-seconds", 60), "--window-seconds needs --tr"),
        (("--window-seconds", 60, "--tr", 2, "--window", 30), "goes with neither --window nor"),
        (("--mismatch", "ignore"), "allowed are error, drop"),
        (("extra.csv",), "'extra.csv' is no option; put the pattern of --input in quotation marks"),
    ],
)
def test_a_wrong_option_is_a_usage_error(prepare, arguments, message):
    result, folder = prepare(*arguments, code=2)
    assert message in " ".join(result.stderr.split())
    assert not folder.exists()


def test_windows_of_equal_seconds_fit_together(call, tmp_path, rng):
    stores = []
    for site, tr, window in (("A", 2, 15), ("B", 3, 10)):
        place = Series(tmp_path / site, rng)
        options = ("--site", site, "--tr", tr, "--out", tmp_path / "out")
        call("series", *place.arguments(), *options, "--window-seconds", 30)
        stores.append(read_site_store(tmp_path / "out" / site))
        assert stores[-1].description["connectome"]["window"] == window
    check_compatible(stores)
    result = call("check", "--folds", 3, tmp_path / "out")
    assert "warning" not in result.stderr
    assert "Atlas: atlas without a name (5 ROIs)" in result.output
    call("series", *place.arguments(), *options, "--window-seconds", 40)
    result = call("check", "--folds", 3, tmp_path / "out", code=1)
    assert "cannot train together: window in seconds: 30.0 and 40.0" in " ".join(
        result.stderr.split()
    )


def test_check_says_that_windows_are_other_times(call, tmp_path, rng):
    for site, tr in (("A", 2), ("B", 3)):
        place = Series(tmp_path / site, rng)
        if site == "B":
            place.write("sub-01_rois.csv", rng.standard_normal((50, N_ROIS)))
        call("series", *place.arguments(), "--site", site, "--tr", tr, "--out", tmp_path / "out")
    stderr = call("check", "--folds", 3, tmp_path / "out").stderr
    assert "windows of 32 volumes are 64 s at A; 96 s at B (--window-seconds)" in stderr
    assert "site 'B' mixes lengths (5 of 40 volumes, 1 of 50 volumes)" in stderr


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_a_screen_that_cannot_show_a_character_shows_another(hospital, tmp_path, encoding):
    hospital.rows.append(["Łódź", "autism", "", ""])
    hospital.write_rows()
    command = [sys.executable, "-m", "data_prep", "series", *map(str, hospital.arguments())]
    command += ["--out", str(tmp_path / "out"), "--mismatch", "drop"]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert b"participant without scan" in done.stdout
