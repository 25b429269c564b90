import json
import os
import subprocess
import sys

import numpy as np
import pytest

from data_prep.abide import DEFAULT_SITES
from data_prep.connectome import correlation_connectomes
from data_prep.site_store import assign_folds, check_compatible, find_site_stores, read_site_store


@pytest.fixture
def prepare(call, small_abide, tmp_path):
    """Run ``abide`` on the small folder; return the result and the folder of stores."""

    def run(*arguments, code=0):
        out = tmp_path / "out"
        common = ("abide", "--source", small_abide.root, "--out", out)
        return call(*common, *arguments, code=code), out

    return run


def test_abide_makes_a_valid_store_a_site(prepare, small_abide):
    result, out = prepare("--stride", 4)
    stores = [read_site_store(path, verify=True) for path in find_site_stores(out)]
    assert sorted(store.site for store in stores) == sorted(DEFAULT_SITES)
    check_compatible(stores)
    store = read_site_store(out / "UM")
    assert store.n_edges == 6105
    assert [p.participant_id for p in store.participants] == [
        f"sub-{50012 + i:07d}" for i in range(1, 7)
    ]
    assert {p.site for p in store.participants} == {"UM"}
    assert store.participants[0].n_timepoints == 40
    assert store.window_start[:3].tolist() == [0, 4, 8]
    series = np.loadtxt(small_abide.scan(50014, "UM_1"))
    np.testing.assert_array_equal(
        store.connectomes[store.sample_participant == 1],
        correlation_connectomes(series, window=32, stride=4),
    )
    description = store.description
    assert description["connectome"]["estimator"] == "ledoit-wolf"
    assert description["connectome"]["negative"] == "keep"
    assert description["source"]["SITE_ID"] == "UM_1"
    assert description["counts"] == {"found": 6, "excluded": 0, "kept": 6}
    assert len(description["inputs"]["UM_1_0050013_rois_ho.1D"]) == 64
    assert str(small_abide.root) not in json.dumps(description)
    assert "UCLA" in result.output


def test_one_site_alone_and_its_signature_is_the_same(prepare):
    prepare("--sites", "USM", "--stride", 4)
    _, out = prepare("--sites", "UCLA, UM", "--stride", 4)
    stores = [read_site_store(path) for path in find_site_stores(out)]
    assert [store.site for store in stores] == ["UCLA", "UM", "USM"]
    check_compatible(stores)


def test_a_second_run_with_the_same_inputs_says_so(prepare, small_abide):
    _, out = prepare("--sites", "NYU,UM")
    before = (out / "NYU" / "connectomes.npy").stat().st_mtime_ns
    result, _ = prepare("--sites", "NYU,UM")
    assert "Unchanged, same inputs and settings: NYU, UM" in result.output
    assert (out / "NYU" / "connectomes.npy").stat().st_mtime_ns == before
    result, _ = prepare("--sites", "NYU,UM", "--force")
    assert "Unchanged" not in result.output
    assert (out / "NYU" / "connectomes.npy").stat().st_mtime_ns > before
    scan = small_abide.scan(50001, "NYU")
    scan.write_text(scan.read_text().replace("\t1", "\t2", 1))
    result, _ = prepare("--sites", "NYU,UM")
    assert "Unchanged, same inputs and settings: UM" in result.output


@pytest.mark.parametrize(
    "changed",
    [
        ("--window", 20),
        ("--stride", 2),
        ("--whole-scan",),
        ("--estimator", "pearson"),
        ("--negative", "zero"),
        ("--silent-rois", "keep-zero"),
        ("--min-timepoints", 34),
        ("--same-length",),
        ("--folds", 3),
    ],
)
def test_a_changed_setting_makes_the_store_again_and_is_stated(prepare, changed):
    _, out = prepare("--sites", "NYU")
    first = read_site_store(out / "NYU").description
    result, _ = prepare("--sites", "NYU", *changed)
    assert "Unchanged" not in result.output
    second = read_site_store(out / "NYU").description
    parts = ("connectome", "quality_rule", "folds")
    assert any(first[part] != second[part] for part in parts)


def test_a_damaged_store_is_made_again(prepare):
    _, out = prepare("--sites", "NYU")
    (out / "NYU" / "connectomes.npy").write_bytes(b"cut")
    result, _ = prepare("--sites", "NYU")
    assert "Unchanged" not in result.output
    read_site_store(out / "NYU", verify=True)


def silence(small_abide, number, site, column):
    file = small_abide.scan(number, site)
    series = np.loadtxt(file)
    series[:, column] = 0
    header = file.read_text().splitlines()[0]
    np.savetxt(file, series, header=header, comments="", delimiter="\t")


def test_left_out_subjects_are_listed_in_the_store_and_on_screen(prepare, small_abide):
    silence(small_abide, 50003, "NYU", 82)
    result, out = prepare("--sites", "NYU")
    store = read_site_store(out / "NYU")
    assert store.description["excluded"] == [
        {
            "participant_id": "sub-0050003",
            "reason": "ROI without signal",
            "detail": "no signal in 3455 (label 3455)",
        }
    ]
    assert store.description["quality_rule"]["silent_rois"] == "exclude"
    assert len(store.participants) == 5
    assert "sub-0050003" in result.output
    assert "no signal in 3455" in result.output
    row = next(line for line in result.output.splitlines() if "│ NYU" in line and "/" in line)
    assert [cell.strip() for cell in row.split("│")[2:6]] == ["6", "6", "1", "5"]


def test_keep_zero_keeps_the_subject(prepare, small_abide):
    silence(small_abide, 50003, "NYU", 82)
    _, out = prepare("--sites", "NYU", "--silent-rois", "keep-zero", "--whole-scan")
    store = read_site_store(out / "NYU", verify=True)
    assert len(store.participants) == 6
    rows, columns = np.triu_indices(111, k=1)
    edges = (rows == 82) | (columns == 82)
    assert (store.connectomes[2, edges] == 0).all()
    assert (store.connectomes[2, ~edges] != 0).all()


def test_too_short_for_everybody_is_refused(prepare):
    result, out = prepare("--sites", "NYU", "--window", 41, code=1)
    assert "error: site 'NYU': no subject is left of 6 (too few time points)" in result.stderr
    assert not (out / "NYU").exists()


def test_mismatch_is_an_error_and_drop_lists_it(prepare, small_abide):
    small_abide.scan(50002, "NYU").unlink()
    small_abide.scan(59999, "NYU").write_text("anything")
    result, out = prepare("--sites", "NYU", code=1)
    assert len(result.stderr.strip().splitlines()) == 1
    assert "1 participant(s) without a scan (sub-0050002)" in result.stderr
    assert "1 scan(s) without a row in the table (NYU_0059999_rois_ho.1D)" in result.stderr
    assert not out.exists()
    result, out = prepare("--sites", "NYU", "--mismatch", "drop")
    assert "participant without scan" in result.output
    assert "scan without participant" in result.output
    join = read_site_store(out / "NYU").description["join"]
    assert join["without_scan"] == ["sub-0050002"]
    assert join["without_row"] == ["NYU_0059999_rois_ho.1D"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("#3455\t", "", "misses the ROI columns #3455"),
        ("#3455\t", "#77\t", "foreign ROI columns #77"),
        ("\r\n", "\r\nnan\t", "has 112 of 111 values"),
        (None, "", "is empty"),
        (None, "#10\t#11", "is cut off"),
    ],
)
def test_a_bad_scan_is_one_sentence_and_leaves_the_old_store(
    prepare, small_abide, old, new, message
):
    _, out = prepare("--sites", "NYU")
    scan = small_abide.scan(50001, "NYU")
    text = scan.read_bytes().decode()
    scan.write_bytes((text.replace(old, new, 1) if old else new).encode())
    result, _ = prepare("--sites", "NYU", code=1)
    assert len(result.stderr.strip().splitlines()) == 1
    assert message in result.stderr
    assert "site 'NYU', sub-0050001: NYU_0050001_rois_ho.1D" in result.stderr
    assert len(read_site_store(out / "NYU", verify=True).participants) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sites", "NYC"), "no site 'NYC'; choose from NYU, USM, UM, UCLA"),
        (("--sites", ","), "no site named; choose from NYU"),
        (("--estimator", "spearman"), "allowed are ledoit-wolf, pearson"),
        (("--window", 2), "window is 2"),
        (("--kind", "tangent"), "kind 'tangent' is for whole scans only"),
        (("--kind", "tangent", "--whole-scan"), "tangent connectomes need --folds and --fold"),
        (("--folds", 5, "--fold", 0), "--fold is for --kind tangent only"),
        (("--fold", 0), "--fold needs --folds"),
        (("--folds", 3, "--seed", -1), "seed is -1; it must not be negative"),
        (
            ("--kind", "tangent", "--whole-scan", "--folds", 3, "--fold", 3),
            "fold is 3; with 3 folds it is 0 to 2",
        ),
        (("--silent-rois", "drop"), "allowed are exclude, keep-zero"),
        (("--mismatch", "ignore"), "allowed are error, drop"),
    ],
)
def test_a_wrong_option_is_a_usage_error(prepare, arguments, message):
    result, out = prepare(*arguments, code=2)
    assert message in result.stderr
    assert not out.exists()


def test_folds_are_fixed_in_the_store(prepare):
    _, out = prepare("--sites", "NYU", "--folds", 3, "--seed", 5)
    people = read_site_store(out / "NYU").participants
    expected = assign_folds([p.participant_id for p in people], [p.diagnosis for p in people], 3, 5)
    assert [p.fold for p in people] == expected.tolist()


def test_folds_that_a_site_cannot_have_are_refused(prepare, small_abide):
    for row in small_abide.rows:
        row["DX_GROUP"] = "1"
    small_abide.write_rows()
    result, _ = prepare("--sites", "NYU", "--folds", 3, code=1)
    assert "site 'NYU' has one diagnosis only (6 of autism)" in result.stderr


@pytest.fixture
def large_and_small(tmp_path, small_abide_class, rng):
    """KKI has ten subjects, YALE two, and of UM's the most have an ROI without signal."""
    for place, sites, n, first in (("a", ("KKI", "UM"), 10, 50000), ("b", ("YALE",), 2, 51000)):
        small = small_abide_class(tmp_path / place, rng, n_subjects=n, sites=sites, first=first)
        for number in range(50011, 50020) if place == "a" else ():
            silence(small, number, "UM_1", 82)
    return ("--source", tmp_path / "a", "--source", tmp_path / "b", "--whole-scan")


def test_all_sites_of_several_folders(call, large_and_small, tmp_path):
    out = tmp_path / "out"
    result = call("abide", *large_and_small, "--sites", "all", "--out", out)
    assert [path.name for path in find_site_stores(out)] == ["KKI"]
    text = " ".join(result.output.split())
    assert "site 'UM': 0 autism and 1 control left of 10, too few to train on in 5 folds" in text
    assert "site 'YALE': 1 autism and 1 control left of 2, too few to train on" in text
    result = call("abide", *large_and_small, "--sites", "all", "--keep-small", "--out", out)
    assert [path.name for path in find_site_stores(out)] == ["KKI", "UM", "YALE"]
    assert "warning: site 'UM' has one diagnosis only (1 of control)" in result.stderr
    assert read_site_store(out / "KKI").description["repetition_time_s"] == 2.5
    assert "repetition times differ" not in call("check", "--folds", 0, out).stderr


def test_a_site_may_be_named_as_abide_does(call, large_and_small, tmp_path):
    call("abide", *large_and_small, "--sites", "UM_1,KKI", "--out", tmp_path / "out")
    assert [path.name for path in find_site_stores(tmp_path / "out")] == ["KKI", "UM"]


def test_windows_in_seconds_follow_each_site_s_repetition_time(
    call, tmp_path, small_abide_class, rng
):
    small = small_abide_class(tmp_path / "a", rng, sites=("NYU", "UCLA", "CMU"))
    for row in small.rows[12:]:  # CMU's two protocols
        old = small.scans / f"{row['FILE_ID']}_rois_ho.1D"
        row["FILE_ID"] = f"CMU_{'ab'[int(row['DX_GROUP']) - 1]}_{int(row['SUB_ID']):07d}"
        old.rename(small.scans / f"{row['FILE_ID']}_rois_ho.1D")
    small.write_rows()
    out = tmp_path / "out"
    common = ("abide", "--source", tmp_path / "a", "--out", out)
    call(*common, "--sites", "NYU,UCLA", "--window-seconds", 60)
    windows = {
        path.name: read_site_store(path).description["connectome"]["window"]
        for path in find_site_stores(out)
    }
    assert windows == {"NYU": 30, "UCLA": 20}
    assert "fit together" in call("check", "--folds", 3, out).output
    result = call(*common, "--sites", "CMU", "--window-seconds", 60, code=1)
    assert "site 'CMU': its scans have the repetition times 1.5, 2 s" in result.stderr
    call(*common, "--sites", "NYU,CMU")
    assert read_site_store(out / "CMU").description["repetition_times_s"] == [1.5, 2.0]
    stderr = call("check", "--folds", 3, out / "NYU", out / "CMU").stderr
    assert "windows of 32 volumes are 48 s at CMU; 64 s at NYU, CMU" in stderr


def tangent(prepare, fold=0):
    options = ("--kind", "tangent", "--whole-scan", "--folds", 3, "--fold", fold, "--seed", 0)
    _, out = prepare("--sites", "NYU", *options)
    return read_site_store(out / "NYU", verify=True)


@pytest.mark.slow
def test_tangent_stores_its_folds_and_its_reference_never_sees_the_held_out(prepare, small_abide):
    first = tangent(prepare, fold=1)
    assert first.description["reference_split"] == {"n_folds": 3, "fold": 1, "seed": 0}
    assert first.signature()["reference"] == {"n_folds": 3, "fold": 1, "seed": 0}
    before = np.array(first.connectomes)
    held_out = np.array([p.fold == 1 for p in first.participants])
    assert held_out.sum() == 2
    for p, out in zip(first.participants, held_out, strict=True):
        if out:
            file = small_abide.scan(int(p.participant_id[4:]), "NYU")
            header, *lines = file.read_text().splitlines()
            file.write_text("\n".join([header, *reversed(lines[:35])]) + "\n")
    after = np.array(tangent(prepare, fold=1).connectomes)
    np.testing.assert_array_equal(after[~held_out], before[~held_out])
    assert (np.abs(after[held_out] - before[held_out]).max(axis=1) > 0.01).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["partial correlation", "covariance"])
def test_other_kinds_are_made_and_named(prepare, kind):
    _, out = prepare("--sites", "NYU", "--kind", kind, "--whole-scan")
    store = read_site_store(out / "NYU", verify=True)
    assert store.connectomes.shape == (6, 6105)
    assert store.signature()["kind"] == kind
    assert store.signature()["transform"] == ("none" if kind == "covariance" else "fisher z")


# ------------------------------------------------------------------------------ synthetic and check


def test_synthetic_stores_are_labelled_and_fit_together(call, tmp_path):
    out = tmp_path / "data"
    result = call("synthetic", "--out", out, "--subjects", 10)
    assert "SYNTHETIC" in result.output
    stores = [read_site_store(out / site) for site in ("NYU", "USM", "UM", "UCLA")]
    for store in stores:
        assert store.synthetic
        assert "no subject of this store exists" in store.description["synthetic_note"]
        assert store.labels.sum() == 5
        assert store.n_edges == 6105
    assert [len(s.connectomes) for s in stores] == [60, 50, 60, 40]
    result = call("check", out)
    assert "4 stores are valid and fit together" in result.output
    assert result.output.count("SYNTHETIC") == 4
    assert "Unchanged" in call("synthetic", "--out", out, "--subjects", 10).output
    other = ("--sites", "UM", "--no-shift")
    assert "Unchanged" not in call("synthetic", "--out", out, "--subjects", 10, *other).output


def test_synthetic_never_replaces_real_data(call, prepare):
    _, out = prepare("--sites", "NYU")
    result = call("synthetic", "--out", out, "--subjects", 10, code=1)
    assert "holds real data of site 'NYU'; synthetic data do not replace it" in result.stderr
    assert not read_site_store(out / "NYU").synthetic


def test_check_refuses_sites_that_do_not_fit(call, prepare):
    prepare("--sites", "NYU")
    _, out = prepare("--sites", "UM", "--stride", 2)
    result = call("check", out, code=1)
    assert "sites 'NYU' and 'UM' cannot train together: stride: 1 and 2" in result.stderr
    call("check", "--folds", 3, out / "NYU")
    result = call("check", out / "NYU", out / "UM", code=1)
    assert "cannot train together" in result.stderr


def test_check_finds_damage_unless_quick(call, prepare):
    _, out = prepare("--sites", "NYU")
    file = out / "NYU" / "connectomes.npy"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    assert "was changed after the store" in call("check", out, code=1).stderr
    call("check", "--quick", "--folds", 3, out)


def test_check_refuses_what_cannot_be_trained_on(call, prepare):
    _, out = prepare("--sites", "NYU")
    result = call("check", out, code=1)
    assert "site 'NYU' has 6 subjects (3 of autism, 3 of control), too few for 5 f" in result.stderr
    call("check", "--folds", 0, out)
    assert "folds is -1; at least 2 are needed" in call("check", "--folds", -1, out, code=2).stderr


def test_check_without_a_store_says_how_to_make_one(call, tmp_path):
    result = call("check", tmp_path / "nothing", code=1)
    assert "no site store at" in result.stderr
    assert "python -m data_prep" in result.stderr


def test_a_place_that_cannot_be_written_is_one_sentence(call, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    options = ("--sites", "UM", "--subjects", 4, "--whole-scan")
    result = call("synthetic", "--out", tmp_path / "file", *options, code=1)
    assert f"error: {tmp_path / 'file'} is a file; choose another place" in result.stderr


LITTLE_DISK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from data_prep.__main__ import app
app(sys.argv[1:])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on files")
def test_a_full_disk_is_one_sentence_and_leaves_the_old_store(call, tmp_path):
    out = tmp_path / "data"
    options = ("synthetic", "--out", out, "--sites", "UM", "--whole-scan")
    call(*options, "--subjects", 4)
    before = {file.name: file.read_bytes() for file in (out / "UM").iterdir()}
    command = [sys.executable, "-c", LITTLE_DISK, *map(str, options), "--subjects", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: {out / 'UM'} is not written and stays as it was (File too large); free some "
        "space, or name another place\n"
    )
    assert [child.name for child in out.iterdir()] == ["UM"]
    assert {file.name: file.read_bytes() for file in (out / "UM").iterdir()} == before


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX modes and links")
def test_a_store_that_is_a_link_stays_one_and_is_private(call, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "UM").symlink_to(tmp_path / "disk")  # empty at first
    options = ("synthetic", "--out", tmp_path / "data", "--sites", "UM", "--whole-scan")
    before = os.umask(0o002)
    for n_subjects in (4, 5):
        call(*options, "--subjects", n_subjects)
        assert (tmp_path / "data" / "UM").is_symlink()
        assert len(read_site_store(tmp_path / "disk", verify=True).participants) == n_subjects
    os.umask(before)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["data", "disk"]
    assert [child.name for child in (tmp_path / "data").iterdir()] == ["UM"]
    assert (tmp_path / "disk").stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "disk").iterdir()} == {0o600}


@pytest.mark.skipif(sys.platform == "win32", reason="needs links")
def test_a_link_to_a_disk_that_is_not_there_is_one_sentence(call, tmp_path):
    (tmp_path / "data").symlink_to(tmp_path / "not mounted" / "stores")
    options = ("synthetic", "--out", tmp_path / "data", "--sites", "UM", "--subjects", 4)
    result = call(*options, code=1)
    assert f"error: {tmp_path / 'data'} is a symbolic link to " in result.stderr
    assert [child.name for child in tmp_path.iterdir()] == ["data"]


def test_the_default_place_is_the_data_root(call, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDBN_DATA", str(tmp_path / "named"))
    call("synthetic", "--sites", "UM", "--subjects", 1, "--whole-scan")
    assert [p.name for p in find_site_stores(tmp_path / "named")] == ["UM"]
    monkeypatch.delenv("FEDBN_DATA")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    call("synthetic", "--sites", "UM", "--subjects", 1, "--whole-scan")
    assert [p.name for p in find_site_stores(tmp_path / "home" / "fedbn_data")] == ["UM"]


def test_a_real_process_ends_with_one_sentence_and_code_1(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "data_prep", "abide", "--source", str(tmp_path), "--sites", "UM"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"FEDBN_DATA": str(tmp_path / "out")},
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: --source {tmp_path} holds no ABIDE_pcp/")
    assert len(done.stderr.splitlines()) == 1


# -------------------------------------------------------------------------------------- real ABIDE


@pytest.mark.slow
def test_real_abide_leaves_the_known_subjects(call, abide_source, tmp_path):
    """The default rule keeps 341; with equal scan lengths the 340 of the paper's list."""
    common = ("abide", "--source", abide_source, "--whole-scan", "--out", tmp_path)
    call(*common)
    kept = {p.name: len(read_site_store(p).participants) for p in find_site_stores(tmp_path)}
    assert kept == {"NYU": 164, "USM": 50, "UM": 71, "UCLA": 56}
    call(*common, "--same-length")
    kept = {p.name: len(read_site_store(p).participants) for p in find_site_stores(tmp_path)}
    assert kept == {"NYU": 164, "USM": 49, "UM": 71, "UCLA": 56}
    excluded = read_site_store(tmp_path / "USM").description["excluded"]
    assert [e["participant_id"] for e in excluded if e["reason"] == "other scan length"] == [
        "sub-0050526"
    ]
    assert "4 stores are valid and fit together" in call("check", tmp_path).output
