import json
import subprocess
import sys

import numpy as np
import pytest
from sklearn.model_selection import StratifiedKFold

from data_prep import site_store, store_folder
from data_prep.files import FileError, file_checksum
from data_prep.site_store import (
    StoreError,
    assign_folds,
    check_compatible,
    read_site_store,
    signature_differences,
    write_site_store,
)


def test_what_is_written_is_read_back(make_store):
    store = read_site_store(make_store(), verify=True)
    assert store.site == "NYU"
    assert [p.participant_id for p in store.participants] == [f"sub-NYU{i}" for i in range(6)]
    assert store.participants[1].age == 11.5
    assert store.participants[1].fold is None
    assert store.labels.tolist() == [1, 0, 1, 0, 1, 0]
    assert store.labels.dtype == np.int64
    assert store.sample_participant.tolist() == [0, 1, 1, 2, 3, 3, 4, 5, 5]
    assert store.window_start.tolist() == [0, 0, 4, 0, 0, 4, 0, 0, 4]
    np.testing.assert_array_equal(store.connectomes, np.arange(54).reshape(9, 6))
    assert store.connectomes.dtype == np.float32
    assert (store.n_rois, store.n_edges, store.synthetic) == (4, 6, False)


def test_connectomes_are_mapped_and_cannot_be_changed(make_store):
    store = read_site_store(make_store())
    assert isinstance(store.connectomes, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        store.connectomes[0, 0] = 1.0


def test_reading_a_store_imports_neither_pandas_nor_sklearn_nor_nilearn(make_store):
    folder = make_store()
    code = (
        "import sys\n"
        "from data_prep.site_store import read_site_store, assign_folds\n"
        f"s = read_site_store({str(folder)!r}, verify=True)\n"
        "assign_folds([p.participant_id for p in s.participants], s.labels, 3, 0)\n"
        "heavy = {'pandas', 'sklearn', 'scipy', 'nilearn', 'torch', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def cut(name, keep):
    def change(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * keep)])

    return change


def replace(name, old, new):
    def change(folder):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


def array(value):
    return lambda folder: np.save(folder / "connectomes.npy", value, allow_pickle=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut("dataset_description.json", 0.5), "dataset_description.json is not readable JSON"),
        (cut("connectomes.npy", 0.7), "connectomes.npy is cut off"),
        (cut("connectomes.npy", 0.01), "connectomes.npy is cut off or not a NumPy array"),
        (cut("rois.tsv", 0.0), "rois.tsv starts with the columns"),
        (lambda f: (f / "samples.tsv").unlink(), r"site 'NYU': .*samples.tsv is missing"),
        (lambda f: (f / "connectomes.npy").unlink(), r"connectomes.npy is missing"),
        (array(np.array([{}, {}], dtype=object)), "connectomes.npy is cut off or not"),
        (array(np.zeros((9, 6))), "holds float64 of shape"),
        (array(np.zeros((9, 5), np.float32)), "has 5 edges, but the 4 ROIs of rois.tsv have 6"),
        (array(np.zeros((8, 6), np.float32)), "samples.tsv has 9 rows and connectomes.npy has 8"),
        (replace("participants.tsv", "autism", "patient"), "sub-NYU0 has the diagnosis 'patient'"),
        (replace("participants.tsv", "sub-NYU1", "sub-NYU0"), "sub-NYU0 appears twice"),
        (replace("participants.tsv", "\tNYU\t", "\tUM\t"), "sub-NYU0 belongs to site 'UM'"),
        (replace("participants.tsv", "\t16\t", "\tmany\t"), "line 2 of participants.tsv is not"),
        (replace("participants.tsv", "\tM\t", "\t"), "line 2 of participants.tsv has 6 fields"),
        (replace("samples.tsv", "sub-NYU3", "sub-X"), "names 'sub-X', who is not in"),
        (replace("samples.tsv", "sub-NYU3", "sub-NYU0"), "sub-NYU0 has 2 rows in samples.tsv"),
        (replace("samples.tsv", "\t4", "\tfour"), "window_start that is not a number"),
        (replace("rois.tsv", "20\t", "10\t"), "names an ROI id twice"),
        (
            replace("dataset_description.json", '"format_version": 1', '"format_version": 99'),
            "has store format 99, this version reads 1",
        ),
        (
            replace("dataset_description.json", '"site": "NYU"', '"site": "St.Olav"'),
            "site is 'St.Olav'; use letters, digits, '-' and '_', .*; make the store again with",
        ),
        (
            replace("dataset_description.json", '"estimator"', '"guess"'),
            "does not state connectome.estimator",
        ),
    ],
)
def test_a_damaged_store_is_refused_with_its_file_named(make_store, change, message):
    folder = make_store()
    change(folder)
    with pytest.raises(StoreError, match=message):
        read_site_store(folder)


def test_verify_finds_what_the_fast_check_cannot(make_store):
    folder = make_store()
    changed = np.load(folder / "connectomes.npy")
    changed[3, 2] += 1
    np.save(folder / "connectomes.npy", changed)
    read_site_store(folder)
    with pytest.raises(StoreError, match=r"'NYU': connectomes.npy was changed after"):
        read_site_store(folder, verify=True)


def test_verify_finds_a_value_that_is_not_finite(make_store):
    folder = make_store()
    changed = np.load(folder / "connectomes.npy")
    changed[3, 2] = np.nan
    np.save(folder / "connectomes.npy", changed)
    file = folder / "dataset_description.json"
    description = json.loads(file.read_text())
    description["checksums"]["connectomes.npy"] = file_checksum(folder / "connectomes.npy")
    file.write_text(json.dumps(description))
    with pytest.raises(StoreError, match=r"not finite \(row 3, edge 2\)"):
        read_site_store(folder, verify=True)


def test_no_store_says_how_to_make_one(tmp_path, make_store):
    with pytest.raises(StoreError, match=r"no site store at .*/NYU \(no such folder\): make one"):
        read_site_store(tmp_path / "NYU")
    folder = make_store("UM")
    with pytest.raises(StoreError, match=r"it holds the stores UM: name one"):
        read_site_store(folder.parent)
    with pytest.raises(StoreError, match=r"/MU \(no such folder, only UM\): make one"):
        read_site_store(folder.parent / "MU")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"/file \(it is a file\): make one"):
        read_site_store(tmp_path / "file")
    with pytest.raises(StoreError, match=r"/file is a file; name the folder that holds the stores"):
        read_site_store(tmp_path / "file" / "UM")


@pytest.mark.parametrize(
    ("part", "value", "sentence"),
    [
        ("checksums", 3, "checksums is 3"),
        ("counts", {"found": "many"}, "counts is {'found': 'many'}"),
        ("excluded", [3], r"excluded is \[3\]"),
        ("synthetic", "no", "synthetic is 'no'"),
        ("connectome", {"window": "x"}, "connectome.window is 'x'"),
        ("connectome", {"stride": -1}, "connectome.stride is -1"),
        ("connectome", {"kind": None}, "connectome.kind is None"),
    ],
)
def test_a_description_with_other_values_than_are_written_is_refused(
    make_store, part, value, sentence
):
    folder = make_store()
    file = folder / "dataset_description.json"
    description = json.loads(file.read_text())
    value = {**description[part], **value} if part == "connectome" else value
    file.write_text(json.dumps({**description, part: value}))
    with pytest.raises(StoreError, match=f"json is damaged: {sentence}; make the store again"):
        read_site_store(folder)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("participants.tsv", "autism", "control"),
        ("samples.tsv", "\t4", "\t5"),
        ("rois.tsv", "region 10", "region 11"),
    ],
)
def test_an_edited_table_is_refused_without_verify_too(make_store, name, old, new):
    folder = make_store()
    replace(name, old, new)(folder)
    with pytest.raises(StoreError, match=rf"'NYU': {name} was changed after .* make the store ag"):
        read_site_store(folder)


def test_a_store_that_another_run_is_writing_is_left_to_it(make_store, tmp_path):
    def second_run(index, block):
        with pytest.raises(FileError, match=r"another run is writing .*/NYU now; wait until it"):
            make_store()
        block[...] = 7

    folder = make_store(values=second_run)
    assert (read_site_store(folder, verify=True).connectomes == 7).all()
    assert [f.name for f in folder.parent.iterdir()] == ["NYU"]


def test_writing_refuses_a_value_that_is_not_finite_and_leaves_nothing(make_store, tmp_path):
    values = np.zeros((9, 6), np.float32)
    values[4, 0] = np.inf
    with pytest.raises(StoreError, match="sub-NYU3 has a connectome value that is not finite"):
        make_store(values=values)
    assert list((tmp_path / "stores").iterdir()) == []


def test_a_data_set_with_a_description_of_its_own_is_never_replaced(make_store, tmp_path):
    raw = tmp_path / "NYU"
    (raw / "sub-01").mkdir(parents=True)
    (raw / "dataset_description.json").write_text('{"Name": "our scans", "BIDSVersion": "1.9.0"}')
    (raw / "participants.tsv").write_text("participant_id\n")
    with pytest.raises(StoreError, match="holds something that is not a site store"):
        make_store(folder=raw)
    assert sorted(p.name for p in raw.iterdir()) == [
        "dataset_description.json",
        "participants.tsv",
        "sub-01",
    ]


def test_a_foreign_folder_is_never_replaced(make_store, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(StoreError, match="holds something that is not a site store"):
        make_store(folder=tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("place", "broken"),
    [
        (site_store, "_write_tables"),
        (site_store, "_write_connectomes"),
        (store_folder, "file_checksum"),
    ],
)
def test_an_interrupted_run_leaves_the_old_store(make_store, monkeypatch, place, broken):
    folder = make_store()
    before = {f.name: f.read_bytes() for f in folder.iterdir()}

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(place, broken, interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_store(n=4)
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before
    assert [f.name for f in folder.parent.iterdir()] == ["NYU"]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_a_name_with_a_strange_line_end_is_read_back(make_store, mark):
    rois = (("10", "a"), ("20", "b"), ("30", "c"), ("40", f"area{mark}V4"))
    assert read_site_store(make_store(rois=rois), verify=True).rois == rois


@pytest.mark.parametrize("mark", ["\t", "\n", "\r"])
def test_a_name_that_a_table_cannot_hold_is_refused(make_store, mark):
    with pytest.raises(StoreError, match="holds a tab or a line break"):
        make_store(rois=(("10", "a"), ("20", "b"), ("30", "c"), ("40", f"area{mark}V4")))


def test_writing_streams_one_subject_at_a_time(make_store, tmp_path):
    seen = []

    def fill(index, block):
        seen.append((index, block.shape))
        block[...] = index

    people = [
        site_store.Participant(f"sub-{i}", "control", None, "n/a", "UM", 9, n)
        for i, n in enumerate((2, 3))
    ]
    description = {
        "atlas": "x",
        "synthetic": True,
        "connectome": {
            "kind": "correlation",
            "estimator": "pearson",
            "window": 5,
            "stride": 1,
            "negative": "keep",
        },
    }
    folder = write_site_store(
        tmp_path / "UM",
        site="UM",
        participants=people,
        rois=[("1", "a"), ("2", "b"), ("3", "c")],
        window_starts=[[0, 1], [0, 1, 2]],
        connectomes=fill,
        description=description,
    )
    assert seen == [(0, (2, 3)), (1, (3, 3))]
    assert read_site_store(folder).connectomes[:, 0].tolist() == [0, 0, 1, 1, 1]


# ------------------------------------------------------------------------------------- signatures


def test_signature_survives_json_and_holds_nothing_of_a_subject_or_path(make_store):
    store = read_site_store(make_store())
    text = json.dumps(store.signature())
    assert json.loads(text) == store.signature()
    assert "sub-" not in text
    assert str(store.path) not in text
    assert "NYU" not in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"atlas": "AAL"}, "atlas: small and AAL"),
        ({"connectome": {"window": 16}}, "window: 8 and 16"),
        ({"connectome": {"window": None, "stride": None}}, "window: 8 and none"),
        ({"connectome": {"stride": 1}}, "stride: 4 and 1"),
        ({"connectome": {"estimator": "ledoit-wolf"}}, "estimator: pearson and ledoit-wolf"),
        ({"connectome": {"kind": "covariance"}}, "kind of connectome: correlation and covariance"),
        ({"connectome": {"negative": "zero"}}, "rule for negative values: keep and zero"),
        ({"connectome": {"edge_order": "lower"}}, "edge order: upper .* and lower"),
        ({"preprocessing": "other"}, "preprocessing: none and other"),
        ({"synthetic": True}, "synthetic: False and True"),
        ({"reference_split": {"n_folds": 5}}, "reference split: none and "),
        (
            {"rois": (("10", "a"), ("20", "b"), ("31", "c"), ("40", "d"))},
            "ROI ids: 30 only in one and 31 in the other",
        ),
        ({"rois": (*[(str(i), f"region {i}") for i in (10, 20, 30)],)}, "number of ROIs: 4 and 3"),
        (
            {"rois": (*[(str(i), f"region {i}") for i in (10, 30, 20, 40)],)},
            "order of the ROIs: position 1 is 20 and 30",
        ),
        (
            {"rois": (("10", "Left"), *[(str(i), f"region {i}") for i in (20, 30, 40)])},
            "name of ROI 10: region 10 and Left",
        ),
    ],
)
def test_sites_that_differ_are_refused_with_both_values(make_store, changes, message):
    first, second = read_site_store(make_store("NYU")), read_site_store(make_store("UM", **changes))
    assert any(signature_differences(first.signature(), second.signature()))
    with pytest.raises(
        StoreError, match=f"sites 'NYU' and 'UM' cannot train together: .*{message}"
    ):
        check_compatible([first, second])


def test_sites_that_agree_fit_together(make_store):
    stores = [read_site_store(make_store(site)) for site in ("NYU", "UM", "USM")]
    check_compatible(stores)
    assert signature_differences(stores[0].signature(), stores[1].signature()) == []


def test_one_site_given_twice_is_refused(make_store, tmp_path):
    stores = [read_site_store(make_store(folder=tmp_path / name)) for name in ("a", "b")]
    with pytest.raises(StoreError, match=r"both hold site 'NYU'"):
        check_compatible(stores)


# ------------------------------------------------------------------------------------------ folds


@pytest.mark.parametrize("n_folds", [2, 3, 5])
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_folds_are_those_of_scikit_learn(rng, n_folds, seed):
    ids = sorted(f"sub-{i:07d}" for i in rng.choice(10**6, 47, replace=False))
    diagnosis = np.where(rng.random(47) < 0.35, "autism", "control")
    splitter = StratifiedKFold(n_folds, shuffle=True, random_state=seed)
    expected = np.empty(47, dtype=np.int64)
    for fold, (_, test) in enumerate(splitter.split(ids, diagnosis)):
        expected[test] = fold
    np.testing.assert_array_equal(assign_folds(ids, diagnosis, n_folds, seed), expected)


def test_folds_do_not_depend_on_the_order_of_rows(rng):
    ids = np.array([f"sub-{i}" for i in range(30)])
    diagnosis = rng.integers(2, size=30)
    shuffled = rng.permutation(30)
    folds = assign_folds(ids, diagnosis, 5, 3)
    np.testing.assert_array_equal(
        assign_folds(ids[shuffled], diagnosis[shuffled], 5, 3), folds[shuffled]
    )


@pytest.mark.parametrize(
    ("n_autism", "n_control", "n_folds", "message"),
    [
        (9, 0, 5, r"site 'UM' has one diagnosis only \(9 of autism\)"),
        (2, 1, 5, r"site 'UM' has 3 subjects \(2 of autism, 1 of control\), too few for 5 folds"),
        (20, 4, 5, r"4 of control\), too few for 5 folds"),
        (20, 20, 1, "n_folds is 1; at least 2"),
    ],
)
def test_folds_that_cannot_be_are_refused(n_autism, n_control, n_folds, message):
    diagnosis = ["autism"] * n_autism + ["control"] * n_control
    ids = [f"sub-{i}" for i in range(len(diagnosis))]
    with pytest.raises(StoreError, match=message):
        assign_folds(ids, diagnosis, n_folds, 0, site="UM")


def test_a_subject_given_twice_gets_no_folds():
    with pytest.raises(StoreError, match="each subject once"):
        assign_folds(["sub-1", "sub-1"], [0, 1], 2, 0)
