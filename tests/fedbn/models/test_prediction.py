"""A bundle scores a scan as the run did, says what spoke for it, and refuses what does not fit."""

from __future__ import annotations

import csv
import dataclasses
import shutil

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from data_prep.atlas import read_atlas
from data_prep.site_store import StoreError, read_site_store, write_site_store
from data_prep.timeseries import ExtractionSettings, extract_time_series
from fedbn.__main__ import app
from fedbn.models.bundle import export_bundle, read_bundle
from fedbn.models.prediction import (
    PredictionError,
    _trained,
    held_out_accuracy,
    predict,
    predict_files,
    verdict,
)
from fedbn.models.site_model import NOTICE, SiteFacts, find_kept_model
from fedbn.report import prediction_picture as picture_module
from fedbn.report.prediction_files import write_predictions
from fedbn.report.prediction_picture import prediction_picture
from fedbn.tasks.classification import probabilities
from fedbn.tasks.connectome.prediction import N_CONNECTIONS, scan_of_series


@pytest.fixture
def folder(bundles):
    return bundles["NYU"]


@pytest.fixture
def bundle(folder):
    return read_bundle(folder)


@pytest.fixture
def changed(bundle):
    """Return the bundle with other facts."""

    def change(**changes):
        facts = {**bundle.facts, **{k: v for k, v in changes.items() if k != "connectome"}}
        facts["connectome"] = {**bundle.facts["connectome"], **changes.get("connectome", {})}
        return dataclasses.replace(bundle, facts=facts)

    return change


def of_files(bundle, *paths, only=slice(None)):
    return [predict(bundle, case) for case in list(cases_of(bundle, *paths))[only]]


def cases_of(bundle, *paths, options=None):
    return bundle.side.cases(
        bundle.trained_on, paths, options or {}, lambda data: _trained(bundle, data)
    )


def of_windows(prediction):
    return probabilities(prediction.scores.parts)[:, 1]


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


# ---------------------------------------------------------------------------------- predictions


def test_a_store_is_scored_as_in_the_results(finished_run, bundle):
    predictions = predict_files(bundle, [finished_run.data / "NYU"])
    right, n = held_out_accuracy(bundle, predictions, 0.5)
    scores = finished_run.results["sites"]["NYU"]["federated"]["subject"]
    assert (n, right / n) == (scores["n"], scores["accuracy"])
    assert sum(p.case.in_training for p in predictions) == len(predictions) - n


@pytest.mark.parametrize("ending", ["1D", "tsv", "csv"])
def test_a_file_of_time_series_gives_what_the_store_gives(finished_run, bundle, tmp_path, ending):
    separator = {"1D": " ", "tsv": "\t", "csv": ","}[ending]
    path = finished_run.write_series(tmp_path / f"a.{ending}", "sub-NY04", separator=separator)
    (found,) = of_files(bundle, path)
    (of_store,) = of_files(bundle, finished_run.data / "NYU", only=slice(4, 5))
    assert of_store.case.name == "sub-NY04"
    assert of_windows(found) == pytest.approx(of_windows(of_store), abs=1e-6)
    assert found.case.name == "a"


def test_columns_in_another_order_are_matched_by_id(finished_run, bundle, tmp_path, rng):
    order = rng.permutation(8)
    straight = finished_run.write_series(tmp_path / "a.1D", "sub-NY04")
    shuffled = finished_run.write_series(tmp_path / "b.csv", "sub-NY04", order=order, separator=",")
    one, other = of_files(bundle, straight, shuffled)
    assert torch.equal(one.case.samples.inputs, other.case.samples.inputs)


def test_the_attributions_add_up_to_the_log_odds(finished_run, bundle):
    for found in of_files(bundle, finished_run.data / "UM", only=slice(5)):
        log_odds = np.log(of_windows(found) / (1 - of_windows(found)))
        assert found.explanation.log_odds == pytest.approx(log_odds.mean(), abs=1e-4)
        difference = found.explanation.log_odds - found.explanation.baseline_log_odds
        assert found.explanation.values.sum() == pytest.approx(difference, abs=5e-3)
        assert abs(found.explanation.values).sum() > 0.01
    at_the_mean = torch.zeros(1, 28)
    logits = bundle.model.network(at_the_mean).detach().double()
    assert found.explanation.baseline_log_odds == pytest.approx(float(logits.diff()), abs=1e-5)


def test_a_scan_like_the_training_is_not_warned_of_and_noise_is(
    finished_run, bundle, tmp_path, rng
):
    own = of_files(bundle, finished_run.data / "NYU")
    assert sum(bool(p.far) for p in own) <= 2
    noise = scan_of_series(bundle.trained_on, "noise", rng.standard_normal((60, 8)).cumsum(axis=0))
    (sentence,) = predict(bundle, noise).case.warnings[:1]
    assert sentence.startswith("unlike the scans that the model was trained on: ")
    assert "beyond" in sentence


def test_without_a_reference_nothing_is_judged(changed, finished_run):
    (found,) = of_files(changed(distances=None), finished_run.data / "NYU", only=slice(1))
    assert found.far is None
    assert found.distances["features"] > 0


def test_another_length_is_told(finished_run, bundle, tmp_path):
    path = finished_run.write_series(tmp_path / "a.1D", "sub-NY04", keep=45)
    (found,) = of_files(bundle, path)
    assert found.case.warnings[0] == "45 time points; the site's training scans had 60"
    assert len(of_windows(found)) == 2


def test_on_whom_another_site_has_trained_is_not_known(finished_run, bundle, tmp_path,
                                                       make_series_store, rng):  # fmt: skip
    assert {s.in_training for s in cases_of(bundle, finished_run.data / "UM")} == {None}
    make_series_store(tmp_path / "NEW", "NEW", rng, n_subjects=4)
    assert {s.in_training for s in cases_of(bundle, tmp_path / "NEW")} == {False}
    make_series_store(tmp_path / "NYU", "NYU", rng)  # the same site, other subjects
    assert {s.in_training for s in cases_of(bundle, tmp_path / "NYU")} == {None}


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("rois", "sentence"),
    [
        ([str(10 + k) for k in range(7)], r"misses the ROI columns #17 \(region 7\)"),
        ([str(20 + k) for k in range(8)], r"has the foreign ROI columns #20, .* not made with"),
        (["10", *(str(10 + k) for k in range(7))], "has the ROI columns #10 more than once"),
    ],
    ids=["too few", "another atlas", "twice"],
)
def test_other_regions_are_refused(finished_run, bundle, tmp_path, rois, sentence):
    path = finished_run.write_series(tmp_path / "a.tsv", "sub-NY04", rois=rois, separator="\t")
    with pytest.raises(
        PredictionError, match=r"takes the 8 regions of 'eight regions'.*" + sentence
    ):
        of_files(bundle, path)


HEADER = ",".join(str(10 + k) for k in range(8))
NUMBERS = [f"{k}.5,2,3,4,5,6,7,{k * k}" for k in range(40)]


@pytest.mark.parametrize(
    ("header", "line", "sentence"),
    [
        (HEADER, ",2,3,4,5,6,7,8", "line 22: the column '10' is empty"),
        (HEADER, "1,2,3,,5,6,7,8", "line 22: the column '13' is empty"),
        (HEADER, '1,2,3,"",5,6,7,8', "line 22: the column '13' is empty"),
        (HEADER, "1,2,3, ,5,6,7,8", "line 22: the column '13' is empty"),
        (HEADER, "1,2,3,n/a,5,6,7,8", "line 22: the column '13' holds 'n/a', no number"),
        (HEADER, "1,2,3,NA,5,6,7,8", "line 22: the column '13' holds 'NA', no number"),
        (HEADER, "1,2,3,5,6,7,8", "line 22 has 7 of 8 values"),
        (HEADER, "20,1,2,3,,5,6,7,8", "line 22 has 9 of 8 values"),
        (f",{HEADER}", "20,1,2,3,4,5,6,7,8", "column 1 has no name"),
    ],
    ids=["first", "a gap", "quoted", "a blank", "n/a", "NA", "too few", "a row name", "header"],
)
def test_a_table_with_a_gap_is_refused_by_row_and_column(folder, tmp_path, header, line, sentence):
    """As R writes it (row names, ``na = ""``), and what else leaves a gap: nothing shifts."""
    for name, mark in (("a.csv", ","), ("a.tsv", "\t")):
        lines = [header, *NUMBERS[:20], line, *NUMBERS[20:]]
        (tmp_path / name).write_text("\n".join(lines).replace(",", mark) + "\n")
        done = run("predict", "--model", folder, "--input", tmp_path / name)
        assert done.exit_code == 1
        assert sentence in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_scan_shorter_than_the_window_is_refused(finished_run, bundle, tmp_path):
    path = finished_run.write_series(tmp_path / "a.1D", "sub-NY04", keep=19)
    with pytest.raises(
        PredictionError,
        match="a has 19 time points, too few for the model of site 'NYU': its windows are 20 long",
    ):
        of_files(bundle, path)


def test_a_region_without_signal_follows_the_sites_rule(changed, bundle, rng):
    series = rng.standard_normal((60, 8))
    series[:, 3] = 0
    with pytest.raises(PredictionError, match=r"has no signal in 13 \(region 3\); site 'NYU' has"):
        scan_of_series(bundle.trained_on, "a", series)
    scan = {**bundle.facts["scan"], "quality_rule": {"silent_rois": "keep-zero"}}
    lenient = changed(scan=scan).trained_on
    assert "no signal in 13" in scan_of_series(lenient, "a", series).warnings[0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"atlas": "other regions"}, "atlas: eight regions and other regions"),
        ({"connectome": {"window": 30}}, "window: 20 and 30"),
        ({"connectome": {"estimator": "pearson"}}, "estimator: ledoit-wolf and pearson"),
    ],
)
def test_another_kind_of_store_is_refused(finished_run, bundle, tmp_path, change, sentence):
    write_other_store(finished_run.data / "NYU", tmp_path / "NYU", change)
    with pytest.raises(PredictionError, match="do not fit the model of site 'NYU': .*" + sentence):
        of_files(bundle, tmp_path / "NYU")


def test_a_store_whose_values_were_changed_is_refused(finished_run, bundle, tmp_path):
    shutil.copytree(finished_run.data / "NYU", tmp_path / "NYU")
    np.load(tmp_path / "NYU" / "connectomes.npy", mmap_mode="r+")[0, 0] = np.nan
    with pytest.raises(StoreError, match=r"'NYU': connectomes\.npy was changed after the store"):
        of_files(bundle, tmp_path / "NYU")


def test_a_store_with_the_regions_in_another_order_is_refused(finished_run, bundle, tmp_path):
    rois = read_site_store(finished_run.data / "NYU").rois
    write_other_store(finished_run.data / "NYU", tmp_path / "NYU", {}, rois=rois[::-1])
    with pytest.raises(PredictionError, match="order of the ROIs: position 0 is 10 and 17"):
        of_files(bundle, tmp_path / "NYU")


def write_other_store(source, folder, change, rois=None):
    store = read_site_store(source)
    kept = ("atlas", "synthetic", "connectome")
    description = {key: store.description[key] for key in kept}
    description |= {k: v for k, v in change.items() if k != "connectome"}
    description["connectome"] = description["connectome"] | change.get("connectome", {})
    write_site_store(
        folder,
        site=store.site,
        participants=store.participants,
        rois=rois or store.rois,
        window_starts=[[0, 20, 40]] * len(store.participants),
        connectomes=np.array(store.connectomes),
        description=description,
    )


@pytest.mark.parametrize("cell", ["", " ", "NA", '""', "n/a"])
def test_a_gap_in_a_table_moves_no_column(finished_run, bundle, tmp_path, cell):
    path = finished_run.write_series(tmp_path / "a.csv", "sub-NY04", separator=",")
    header, first, *rest = path.read_text().splitlines()
    fields = first.split(",")
    gap = ",".join([*fields[:2], cell, *fields[3:]])
    path.write_text("\n".join([header, gap, *rest]) + "\n")
    with pytest.raises(PredictionError, match=r"a.csv, line 2: the column '12' (is empty|holds)"):
        of_files(bundle, path)
    # As R writes it, with names of the rows and a header that is one field short.
    rows = [f'"{number}",{line}' for number, line in enumerate([gap, *rest], start=1)]
    path.write_text("\n".join([header, *rows]) + "\n")
    with pytest.raises(PredictionError, match=r"line 2 has 9 of 8 values; .* row.names = FALSE"):
        of_files(bundle, path)


def test_an_array_is_asked_about_in_the_order_of_the_model(finished_run, bundle, tmp_path):
    path = finished_run.write_series(tmp_path / "a.1D", "sub-NY04")
    np.save(tmp_path / "b.npy", np.loadtxt(path))
    table, array = of_files(bundle, path, tmp_path / "b.npy")
    assert np.array_equal(array.probability, table.probability)


def test_other_refusals(finished_run, bundle, changed, tmp_path):
    path = finished_run.write_series(tmp_path / "a.1D", "sub-NY04")
    shutil.copy(path, tmp_path / "a.mat")
    (tmp_path / "names.csv").write_text("Left Thalamus,Left Caudate\n1,2\n")
    (tmp_path / "semicolons.csv").write_text("10;11;12\n1;2;3\n")
    (tmp_path / "zeros.csv").write_text("10,11,12,13,14,15,16,17\n" + 30 * "0,0,0,0,0,0,0,0\n")
    tangent = changed(
        connectome={"kind": "tangent", "transform": "none", "window": None, "stride": None}
    )
    newer = changed(connectome={"transform": "rank"})
    for model, inputs, sentence in (
        (bundle, [tmp_path / "b.1D"], "there is no scan"),
        (bundle, [tmp_path / "a.mat"], "a.mat is none of the inputs that are known"),
        (bundle, [tmp_path / "names.csv"], r"misses the ROI columns #10 .* foreign .* #Left Tha"),
        (bundle, [tmp_path / "semicolons.csv"], "semicolons.csv misses the ROI columns #13"),
        (bundle, [tmp_path / "zeros.csv"], r"no signal in 10 .*, 14 \(region 4\) and 3 more; si"),
        (tangent, [path], "tangent connectomes, which need the site's training subjects"),
        (newer, [path], "connectomes with transform 'rank', this version makes 'fisher z'"),
    ):
        with pytest.raises(PredictionError, match=sentence):
            of_files(model, *inputs)
    for inputs, sentence in (([], "there is no scan to ask about"), ([path] * 2, "two scans are ")):
        with pytest.raises(PredictionError, match=sentence):
            predict_files(bundle, inputs)


# ------------------------------------------------------------------------------ functional scans


@pytest.fixture
def small_scan(tmp_path, rng):
    """A scan of eight blocks with their atlas, in files."""
    import nibabel

    labels = np.repeat(np.arange(1, 9, dtype=np.int16).reshape(2, 2, 2), 2, axis=2)
    nibabel.save(nibabel.Nifti1Image(labels, np.eye(4)), tmp_path / "blocks.nii.gz")
    lines = "\n".join(f"{k}\tregion {k}" for k in range(1, 9))
    (tmp_path / "blocks.tsv").write_text(f"index\tname\n{lines}\n")
    image = nibabel.Nifti1Image(
        (1000 + 10 * rng.standard_normal((2, 2, 4, 60))).astype(np.float32), np.eye(4)
    )
    image.header["pixdim"][4] = 2.0
    image.header.set_xyzt_units("mm", "sec")
    nibabel.save(image, tmp_path / "sub-1_bold.nii.gz")
    files = {"atlas": tmp_path / "blocks.nii.gz", "labels": tmp_path / "blocks.tsv"}
    return tmp_path / "sub-1_bold.nii.gz", files


def test_a_functional_scan_is_taken_as_the_site_has_taken_its_own(bundle, changed, small_scan):
    path, files = small_scan
    atlas = read_atlas(files["atlas"], files["labels"])
    settings = ExtractionSettings(high_pass=None, low_pass=0.2)
    scan = {
        **bundle.facts["scan"],
        "extraction": settings.describe(),
        "repetition_time_s": 3.0,
        "atlas_files": atlas.describe(),
    }
    connectome = {"atlas": atlas.title, "rois": [list(roi) for roi in atlas.rois]}
    model = changed(scan=scan, connectome=connectome)
    (found,) = cases_of(model, path, options=files)
    series = extract_time_series(path, atlas, settings, tr=2.0)
    expected = scan_of_series(model.trained_on, "a", series.values)
    assert torch.equal(found.samples.inputs, expected.samples.inputs)
    assert found.name == "sub-1_bold"
    assert found.warnings == ("repetition time 2 s; the site's training scans had 3 s",)
    for other, given, sentence in (
        (model, {**files, "tr": -3}, "--tr is -3 s, which no functional scan has"),
        (bundle, files, "its bundle does not say how they were made of scans"),
        (model, {}, "name the label map and its table with --atlas and --labels"),
        (changed(scan=scan), files, "was trained with the atlas 'eight regions', and blocks"),
    ):
        with pytest.raises(PredictionError, match=sentence):
            list(cases_of(other, path, options=given))


# -------------------------------------------------------------------------- tables and pictures


def test_tables_and_pictures_say_what_they_are(finished_run, bundle, tmp_path):
    paths = [finished_run.write_series(tmp_path / f"{n}.1D", f"sub-NY0{n}") for n in (1, 2, 3)]
    predictions = predict_files(bundle, paths)
    out = tmp_path / "out"
    write_predictions(bundle, predictions, out, pictures=1)
    rows = rows_of(out / "predictions.tsv")
    assert [row["scan"] for row in rows] == ["1", "2", "3"]
    for row, prediction in zip(rows, predictions, strict=True):
        probability = pytest.approx(prediction.probability[1], abs=1e-5)
        assert float(row["probability_autism"]) == probability
        assert row["class_at_0.5"] == verdict(bundle, prediction, 0.5)
        assert row["in_training"] == "unknown"
    windows = rows_of(out / "windows.tsv")
    assert [row["window_start"] for row in windows[:3]] == ["0", "20", "40"]
    connections = rows_of(out / "connections.tsv")
    assert len(connections) == 3 * N_CONNECTIONS
    first = np.abs(predictions[0].explanation.values).argmax()
    assert float(connections[0]["log_odds"]) == pytest.approx(
        predictions[0].explanation.values[first], rel=1e-4
    )
    for row in (*rows, *windows, *connections):
        assert row["notice"] == NOTICE
    assert [path.name for path in out.glob("*.png")] == ["1_connections.png"]
    assert (out / "1_connections.png").read_bytes().startswith(b"\x89PNG")


def test_no_name_of_a_scan_leads_out_of_the_folder(finished_run, bundle, tmp_path, monkeypatch):
    (one,) = of_files(bundle, finished_run.data / "NYU", only=slice(1))
    named = dataclasses.replace(one, case=dataclasses.replace(one.case, name="../../x\ty"))
    monkeypatch.setattr(picture_module, "prediction_picture", lambda *_: b"")
    out = tmp_path / "out"
    write_predictions(bundle, [named], out)
    assert [path.name for path in out.glob("*.png")] == [".._.._x_y_connections.png"]
    assert rows_of(out / "predictions.tsv")[0]["scan"] == "../../x y"


@pytest.mark.parametrize("synthetic", [False, True])
def test_the_picture_states_method_baseline_sum_and_notice(
    changed, finished_run, monkeypatch, synthetic
):
    bundle = changed()
    (prediction,) = of_files(bundle, finished_run.data / "NYU", only=slice(1))
    bundle = changed(connectome={"synthetic": synthetic})
    figures = []
    monkeypatch.setattr(picture_module, "figure_png", lambda figure: figures.append(figure) or b"")
    prediction_picture(bundle, prediction)
    (figure,) = figures
    text = " ".join(" ".join(part.get_text().split()) for part in figure.texts)
    assert NOTICE in text
    assert "integrated gradients (Sundararajan et al., 2017)" in text
    assert "against the mean training subject of NYU" in text
    found = prediction.explanation
    assert f"{found.log_odds - found.baseline_log_odds:+.2f}" in text
    assert ("SYNTHETIC" in text) is synthetic
    (axes,) = figure.axes
    assert len(axes.patches) == 15
    assert axes.patches[0].get_width() == pytest.approx(
        prediction.explanation.values[np.abs(prediction.explanation.values).argmax()]
    )


# -------------------------------------------------------------------------------- command line


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_export_and_predict_from_the_command_line(finished_run, tmp_path):
    done = run("export", "--run", finished_run.workspace, "--site", "NYU", "--out",
               tmp_path / "b", "--data", finished_run.data)  # fmt: skip
    assert done.exit_code == 0, done.stderr
    accuracy = 100 * finished_run.results["sites"]["NYU"]["federated"]["subject"]["accuracy"]
    assert f"held-out subjects: 5, accuracy {accuracy:.1f} %" in done.stdout
    assert "it stays at the site" in done.stdout
    assert NOTICE in done.stdout
    one = finished_run.write_series(tmp_path / "one.1D", "sub-NY04")
    two = finished_run.write_series(tmp_path / "two.csv", "sub-NY05", separator=",")
    done = run("predict", "--model", tmp_path / "b", "--input", one, two, "--out", tmp_path / "p",
               "--pictures", 0)  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert NOTICE in done.stdout
    assert [row["scan"] for row in rows_of(tmp_path / "p" / "predictions.tsv")] == ["one", "two"]


def test_the_shared_file_alone_does_not_predict(finished_run, tmp_path):
    shared = next(finished_run.workspace.rglob("FL_global_model.pt"))
    scan = finished_run.write_series(tmp_path / "a.1D", "sub-NY04")
    for arguments in (
        ("predict", "--model", shared, "--input", scan),
        ("predict", "--model", shared.parent, "--input", scan),
        ("export", "--run", shared, "--site", "NYU", "--out", tmp_path / "b"),
        ("export", "--run", shared.parent, "--site", "NYU", "--out", tmp_path / "b"),
    ):
        done = run(*arguments)
        assert done.exit_code == 1
        assert "without any site's batch norm and cannot predict" in done.stderr
        assert done.stderr.startswith("fedbn: ")
        assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "b").exists()


def test_a_store_that_has_changed_since_costs_the_reference_only(
    finished_run, tmp_path, monkeypatch, make_series_store
):
    """The default data folder may have been prepared anew; a folder that is named must fit."""
    make_series_store(tmp_path / "data" / "NYU", "NYU", np.random.default_rng(1))
    monkeypatch.setenv("FEDBN_DATA", str(tmp_path / "data"))
    arguments = (
        "export",
        "--run",
        finished_run.workspace,
        "--site",
        "NYU",
        "--out",
        tmp_path / "b",
    )
    done = run(*arguments)
    assert done.exit_code == 0, done.stderr
    assert "without the store: site 'NYU': the store at" in done.stderr
    assert "cannot warn of scans unlike those of the training" in done.stdout
    done = run(*arguments, "--data", tmp_path / "data")
    assert done.exit_code == 1
    assert "has changed since the run" in done.stderr


def test_a_place_that_cannot_take_predictions_is_said_first(folder, tmp_path):
    (tmp_path / "file").write_text("")
    for out, sentence in ((tmp_path / "file", "is not a folder"), (folder, "is a bundle; name a")):
        done = run("predict", "--model", folder, "--input", "no.1D", "--out", out)
        assert done.exit_code == 1
        assert done.stderr == f"fedbn: {' '.join(done.stderr.split()[1:])}\n"
        assert sentence in done.stderr


def test_names_with_brackets_are_shown_as_they_are(bundle, finished_run, monkeypatch, tmp_path):
    from io import StringIO

    from rich.console import Console

    from fedbn.report.prediction_tables import prediction_table

    scan = finished_run.write_series(tmp_path / "a[b].1D", "sub-NY04")
    screen = Console(file=StringIO(), width=200)
    screen.print(prediction_table(bundle, of_files(bundle, scan)))
    assert "a[b]" in screen.file.getvalue()


def test_atlas_and_table_are_given_together(folder, tmp_path):
    done = run("predict", "--model", folder, "--input", tmp_path / "a.nii.gz", "--atlas", "a.nii")
    assert done.exit_code == 1
    assert "--atlas and --labels are given together" in done.stderr


def test_a_bare_bundle_predicts_too(finished_run, tmp_path):
    kept = find_kept_model(finished_run.folder("UM"), "UM")
    folder, _ = export_bundle(kept, SiteFacts(), tmp_path / "UM")
    done = run("predict", "--model", folder, "--input", finished_run.data / "UM")
    assert done.exit_code == 0, done.stderr
    assert "cannot say whether a scan is unlike those of the training" in done.stdout
    assert "of 20 subjects it is not known whether the model was trained on them" in done.stdout


@pytest.fixture
def rng():
    return np.random.default_rng(0)
