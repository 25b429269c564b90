"""The pages as a whole: what they hold, what they leave out, and what they refuse."""

from __future__ import annotations

import copy
import html
import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from fedbn.__main__ import app
from fedbn.federation.simulation import read_sites, run_federation
from fedbn.report import comparison_page, figures
from fedbn.report.comparison_page import drawn
from fedbn.report.panels import connectome
from fedbn.report.panels.registry import panels_of
from fedbn.report.tables import SYNTHETIC
from fedbn.report.writing import write_report
from fedbn.study import comparison, paired
from fedbn.study.comparison import read_comparison
from fedbn.study.plan import ComparisonError
from fedbn.tasks.connectome.task import ConnectomeTask

pytestmark = pytest.mark.slow  # every test draws the pictures of a whole page

SITES = ("NYU", "UM")
OF_EACH_SITE = ("roc", "confusion", "calibration", "convergence")
LABEL = SYNTHETIC.strip()


def check_self_contained(page, read_page):
    """No request can leave the page: nothing is loaded but what is written in it."""
    reader = read_page(page)
    assert reader.all("script") == []
    assert {name for name, _ in reader.tags}.isdisjoint({"iframe", "object", "embed", "form"})
    for name, attributes in reader.tags:
        for attribute in ("src", "href", "srcset", "action", "data", "poster", "background"):
            value = attributes.get(attribute, "data:")
            inner = name == "a" and value.startswith("#")
            assert value.startswith("data:") or inner, (name, value[:80])
        assert not any(attribute.startswith("on") for attribute in attributes), attributes
    text = page.read_text()
    assert "url(" not in text
    assert "@import" not in text
    (policy,) = [a for a in reader.all("meta") if "http-equiv" in a]
    assert policy["content"].startswith("default-src 'none'")
    files = {path.stem for path in page.parent.glob("*.png")}
    assert len(files) == len(reader.all("img"))
    return reader, files


def check_no_subject(page):
    assert re.search(r"sub-\w+", page.read_text()) is None


def test_the_page_of_a_comparison(compared_page, read_page):
    reader, files = check_self_contained(compared_page, read_page)
    check_no_subject(compared_page)
    expected = {f"{name}_{site}" for name in OF_EACH_SITE for site in SITES}
    expected |= {f"differences_{scope}" for scope in ("macro", *SITES)}
    expected |= {"decision_singleset", "decision_fedbn", "shares_called", "training_loss"}
    expected |= {f"embedding_{k}" for k in (1, 2, 3)}
    expected |= {"distance_statistics_1", "distance_gamma_and_beta_1"}
    assert files == expected
    assert len(reader.all("table")) == 9
    assert "whose coordinates this package has" in " ".join(reader.text)
    assert LABEL not in compared_page.read_text()


def test_without_data_the_page_says_what_it_leaves_out(page_of, compared, read_page):
    page = page_of(compared)
    reader, files = check_self_contained(page, read_page)
    assert {name for name in files if name.startswith(("conv", "emb", "dist"))} == set()
    text = " ".join(reader.text)
    assert text.count("give the folder of the site stores with --data to see it") == 4
    assert "training_loss" in files, "it is in the files of the runs"


def test_the_page_of_a_flare_run(run_page, read_page):
    reader, files = check_self_contained(run_page, read_page)
    check_no_subject(run_page)
    assert {f"convergence_{site}" for site in SITES} < files
    assert {f"roc_{site}" for site in SITES} < files
    assert {"distance_statistics_1", "embedding_1"} < files
    assert "the same as a table" in reader.text


def test_the_page_of_a_flare_run_without_data(page_of, workspace, read_page):
    reader, files = check_self_contained(page_of(workspace), read_page)
    assert "distance_statistics_1" in files
    assert "embedding_1" not in files
    text = " ".join(reader.text)
    assert "Pictures of single subjects' scores need their data" in text


def test_results_alone_are_run_once_more_where_the_data_are(
    tmp_path, results, stores_root, read_page
):
    file = tmp_path / "results.json"
    file.write_text(json.dumps(results.report))
    without = read_page(write_report(file, tmp_path / "without"))
    assert "No site's model is below this folder" in " ".join(without.text)
    page = write_report(file, data_root=stores_root)
    assert page == tmp_path / "report" / "report.html"
    _, files = check_self_contained(page, read_page)
    assert {"distance_statistics_1", "embedding_1", "roc_NYU"} < files


def test_made_up_subjects_are_labelled_in_every_picture_table_and_title(
    made_up, page_of, read_page, monkeypatch
):
    data, compared = made_up
    labels = []

    def noted(figure):
        labels.append(figure.get_suptitle())
        return save(figure)

    save = figures.figure_png
    monkeypatch.setattr(figures, "figure_png", noted)
    monkeypatch.setattr(connectome, "figure_png", noted)
    page = page_of(compared, data)
    reader, files = check_self_contained(page, read_page)
    assert f"<title>{html.escape(LABEL)}: " in page.read_text()
    assert len(labels) == len(files) > 15
    assert set(labels) == {LABEL}
    assert reader.captions
    assert all(caption.startswith(LABEL) for caption in reader.captions)
    assert all(image["alt"].startswith(LABEL) for image in reader.all("img"))


def test_what_a_run_of_clusters_with_fine_tuning_adds_to_its_page(
    settings, stores_root, tmp_path, read_page
):
    experiment = settings.changed(
        policy="none",
        algorithm={"name": "clustered", "split_mean_norm": 1e6, "split_site_norm": 0.0},
        finetune={"epochs": 1},
    )
    report = run_federation(experiment, read_sites(stores_root, experiment)).report
    file = tmp_path / "results.json"
    file.write_text(json.dumps(report))
    text = " ".join(read_page(write_report(file, tmp_path / "out")).text)
    assert "what fine-tuning at the site changes (1 local epoch)" in text
    assert "cut in NYU and UM" in text


def test_a_comparison_of_an_earlier_version_can_still_be_reported(compared, tmp_path, read_page):
    copied = shutil.copytree(compared, tmp_path / "comparison")
    summary = json.loads((copied / "summary.json").read_text())
    earlier = {k: v for k, v in summary.items() if k not in ("after_training", "convergence")}
    earlier["format"] = "fedbn-comparison-1"
    del earlier["experiment"]["training_share"]
    (copied / "summary.json").write_text(json.dumps(earlier))
    reader = read_page(write_report(copied, tmp_path / "out"))
    assert "whose comparison has kept its training loss" in " ".join(reader.text)


def test_data_cannot_be_told_from_others_in_a_comparison_of_version_0_1(compared, tmp_path):
    copied = shutil.copytree(compared, tmp_path / "comparison")
    summary = json.loads((copied / "summary.json").read_text())
    (copied / "summary.json").write_text(json.dumps({**summary, "format": "fedbn-comparison-2"}))
    with pytest.raises(ComparisonError, match=r"made by version 0\.1, .*; leave --data out"):
        write_report(copied, tmp_path / "out", tmp_path)


def test_a_comparison_of_an_earlier_definition_of_a_method_can_still_be_read(
    compared, tmp_path, monkeypatch
):
    copied = shutil.copytree(compared, tmp_path / "comparison")
    expected = read_comparison(copied)
    monkeypatch.setattr(comparison, "_key", lambda *_: "0" * 16)
    assert read_comparison(copied) == expected


# ------------------------------------------------------------------- what is said of differences


def difference(mean, low=None, high=None):
    if low is None:
        return {"mean": mean, "low": None, "high": None, "verdict": paired.SAME}
    found = paired.Difference(mean, low, high, 0.5, 0.01, 25)
    return {"mean": mean, "low": low, "high": high, "verdict": paired.verdict(found)}


def with_differences(summary, accuracy, auc, own):
    changed = copy.deepcopy(summary)
    of_fedbn = changed["differences"]["fedbn"]["macro"]["subject"]
    of_fedbn["accuracy"], of_fedbn["auc"] = accuracy, auc
    of_fedbn["accuracy_own_threshold"] = own
    return changed


NOT_SHOWN = difference(0.005, -0.03, 0.04)


@pytest.mark.parametrize(
    ("accuracy", "auc", "own", "said", "not_said"),
    [
        (
            difference(0.041, 0.01, 0.07),
            NOT_SHOWN,
            NOT_SHOWN,
            "So what FedBN gains is mostly its operating point",
            "is not shown either",
        ),
        (
            difference(0.041, -0.02, 0.10),
            NOT_SHOWN,
            NOT_SHOWN,
            "That there is a gain is not shown either",
            "FedBN gains",
        ),
        (
            difference(0.041, 0.01, 0.07),
            difference(0.05, 0.02, 0.08),
            NOT_SHOWN,
            "the operating point alone does not account for it",
            "mostly",
        ),
        (
            difference(0.041, 0.01, 0.07),
            NOT_SHOWN,
            difference(0.035, 0.01, 0.06),
            "the operating point alone does not account for it",
            "mostly",
        ),
        (difference(-0.02, -0.05, 0.01), NOT_SHOWN, NOT_SHOWN, "accuracy -2.0", "mostly"),
    ],
)
def test_the_operating_point_is_told_from_ranking(summary, accuracy, auc, own, said, not_said):
    text = " ".join(
        panels_of(ConnectomeTask()).findings(with_differences(summary, accuracy, auc, own))
    )
    assert said in text
    assert not_said not in text


def test_a_difference_whose_interval_holds_zero_is_hollow_and_grey(compared, summary, monkeypatch):
    bars = []
    monkeypatch.setattr(figures, "forest", lambda *args, **_: bars.extend(args[1]) or b"\0" * 24)
    page = comparison_page.Page("A", synthetic=False)
    comparison_page._differences(page, summary, read_comparison(compared)[1])
    assert len(bars) == 6
    for bar in bars:
        assert bar.shown == (bar.low > 0 or bar.high < 0)


def test_nothing_is_said_of_fedbn_where_it_is_not_compared(summary):
    changed = {**summary, "differences": {"singleset": summary["differences"]["singleset"]}}
    assert panels_of(ConnectomeTask()).findings(changed) == []


def test_pictures_have_room_for_six_methods_the_reference_and_fedbn_among_them():
    names = ["ridge", "silobn", "fedprox", "scaffold", "logistic", "clustered", "fedbn", "pooled"]
    chosen = drawn({"methods": dict.fromkeys(names), "reference": "clustered"})
    assert len(chosen) == 6
    assert {"clustered", "fedbn", "pooled"} < set(chosen)
    assert chosen == [name for name in names if name in chosen]


# ------------------------------------------------------------------------------------- refusals


def test_the_command_writes_the_page_beside_the_results(compared, tmp_path):
    copied = shutil.copytree(compared, tmp_path / "comparison")
    done = CliRunner().invoke(app, ["report", str(copied)])
    assert done.exit_code == 0, done.output
    assert (copied / "report" / "report.html").is_file()
    assert read_comparison(copied)


@pytest.fixture
def unfinished(compared, tmp_path):
    copied = shutil.copytree(compared, tmp_path / "unfinished")
    (copied / "summary.json").unlink()
    return copied


@pytest.fixture
def without_a_run(compared, tmp_path):
    copied = shutil.copytree(compared, tmp_path / "without_a_run")
    next((copied / "runs").glob("fedbn_seed1_fold0_*")).unlink()
    return copied


@pytest.fixture
def other_results(results, tmp_path):
    file = tmp_path / "other" / "results.json"
    file.parent.mkdir()
    file.write_text(json.dumps({**results.report, "shared_weights_sha256": "0" * 64}))
    return file


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no/such/folder"], "no/such/folder does not exist"),
        (["EMPTY"], "no results.json in"),
        (["UNFINISHED"], "holds a comparison that is not finished"),
        (["WITHOUT_A_RUN"], "method fedbn, seed 1, fold 0: its file under"),
        (["COMPARED", "--data", "EMPTY"], "NYU"),
        (["COMPARED", "--data", "OTHER_DATA"], "are not those of the comparison"),
        (["COMPARED", "--out", "FILE"], "is not a folder"),
        (["OTHER_RESULTS", "--data", "DATA"], "gives other weights than this run had"),
    ],
)
def test_what_cannot_be_reported_is_one_sentence(
    arguments,
    sentence,
    tmp_path,
    compared,
    unfinished,
    without_a_run,
    other_results,
    stores_root,
    made_up,
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    named = {
        "EMPTY": tmp_path / "empty",
        "FILE": tmp_path / "file",
        "UNFINISHED": unfinished,
        "WITHOUT_A_RUN": without_a_run,
        "COMPARED": compared,
        "DATA": stores_root,
        "OTHER_DATA": made_up[0],
        "OTHER_RESULTS": other_results,
    }
    given = [str(named.get(argument, argument)) for argument in arguments]
    if "--out" not in given:
        given += ["--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["report", *given])
    assert done.exit_code == 1
    assert sentence in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("fedbn:")]) == 1
    assert not (tmp_path / "out").exists()
