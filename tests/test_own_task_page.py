"""What docs/own_task.md builds works, and nobody imports it who has not allowed it."""

from __future__ import annotations

import importlib
import json
import re

import pytest
from own_task import PLACE, REFUSED, WAYS, allow, block, fresh, imported, install, write_signals
from typer.testing import CliRunner

from fedbn.__main__ import app
from fedbn.federation.experiment import ExperimentError, read_experiment, validated
from fedbn.federation.site_settings import read_site_settings
from fedbn.tasks.registry import TASKS, TaskError, make_task


@pytest.fixture
def site_packages(tmp_path, monkeypatch):
    with fresh(tmp_path / "site-packages", monkeypatch):
        yield tmp_path / "site-packages"


@pytest.fixture
def job(tmp_path, site_packages):
    install(site_packages)
    folder = tmp_path / "job" / "app" / "config"
    folder.mkdir(parents=True)
    (folder / "experiment.json").write_text(block("json"))
    return tmp_path / "job"


def command(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_package_names_the_class_that_the_page_shows():
    tomllib = pytest.importorskip("tomllib")
    stated = tomllib.loads(block("toml"))["project"]
    assert stated["entry-points"] == {"fedbn.tasks": {"signals": PLACE}}
    assert stated["name"] == PLACE.partition(".")[0]


def test_a_run_of_it(job, tmp_path):
    data = write_signals(tmp_path / "data")
    command("run", job, "--data", data, "--out", tmp_path / "results.json")
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["experiment"]["task"]["classes"] == ["healthy", "ill"]
    north = results["sites"]["North"]
    assert north["federated"]["subject"]["n"] == north["n_test_subjects"] == 6
    assert north["ill_share_train"] == 0.5


@pytest.mark.slow
def test_a_comparison_of_it(job, tmp_path):
    data, out = write_signals(tmp_path / "data"), tmp_path / "compared"
    command(
        "compare", job, "--data", data, "--methods", "singleset,fedbn,pooled", "--seeds", 1,
        "--rounds", 2, "--jobs", 1, "--out", out,
    )  # fmt: skip
    scores = json.loads((out / "summary.json").read_text())["scores"]
    assert list(scores) == ["singleset", "fedbn", "pooled"]
    for of_method in scores.values():
        assert 0 <= of_method["macro"]["subject"]["accuracy"]["mean"] <= 1


def test_settings_of_it_are_checked_like_any_other_s(job):
    content = json.loads(block("json"))
    content["task"]["clases"] = content["task"].pop("classes")
    with pytest.raises(ExperimentError, match=r"task.classes: it is missing"):
        validated(content, "the job")
    content["task"]["classes"] = ["healthy", "ill"]
    with pytest.raises(ExperimentError, match=r"task.clases: .*; did you mean 'classes'"):
        validated(content, "the job")
    content["task"] = {"name": "signal"}
    with pytest.raises(ExperimentError, match="no task 'signal'; did you mean 'signals'"):
        validated(content, "the job")


@pytest.mark.parametrize("way", WAYS)
def test_whoever_reads_a_job_looks_before_it_imports(job, tmp_path, monkeypatch, way):
    is_allowed = allow(way, tmp_path, monkeypatch)
    settings = read_site_settings(tmp_path / "local" / "fedbn_site.yml")
    if is_allowed:
        assert read_experiment(job, settings.tasks).task.name == "signals"
    else:
        with pytest.raises(ExperimentError, match=re.escape(REFUSED)):
            read_experiment(job, settings.tasks)
    assert imported() == is_allowed


def test_a_name_that_two_packages_bring_is_nobody_s(site_packages):
    install(site_packages)
    install(site_packages, "others", "others.signals:SignalTask")
    with pytest.raises(TaskError, match=r"brought by others.* and our_tasks.*; remove one"):
        make_task({"name": "signals", "classes": ["a", "b"]})
    assert not imported()


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("import not_installed_anywhere", "cannot be loaded: No module named 'not_installed"),
        ("x = 1", "cannot be loaded: module .* has no attribute 'SignalTask'"),
        ("SignalTask = dict", "is no subclass of fedbn.tasks.base.Task"),
        ("def SignalTask(): pass", "is no subclass of fedbn.tasks.base.Task"),
    ],
)
def test_a_class_that_is_no_task_is_one_sentence(site_packages, code, sentence):
    install(site_packages, code=code)
    with pytest.raises(TaskError, match=rf"task 'signals' \({PLACE}\) {sentence}"):
        make_task({"name": "signals"})


def test_a_package_cannot_take_the_name_of_a_task_of_fedbn(site_packages):
    install(site_packages)
    entry_points = site_packages / "our_tasks-0.1.dist-info" / "entry_points.txt"
    entry_points.write_text(f"[fedbn.tasks]\nconnectome = {PLACE}\n")
    assert type(make_task({"name": "connectome"})).__name__ == "ConnectomeTask"
    assert not imported()
    for name, place in TASKS.items():
        module, _, attribute = place.partition(":")
        task = getattr(importlib.import_module(module), attribute)
        assert task.model_fields["name"].default == name


@pytest.mark.parametrize("settings", ["connectome", None, [], {}, {"name": 3}])
def test_what_names_no_task_is_one_sentence(settings):
    content = json.loads(block("json")) | {"task": settings}
    with pytest.raises(ExperimentError, match="the job: task: give an object with the task's \"n"):
        validated(content, "the job")
