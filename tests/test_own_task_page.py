"""What docs/own_task.md builds works, and nobody imports it who has not allowed it."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedbn.__main__ import app
from fedbn.federation.experiment import ExperimentError, read_experiment, validated
from fedbn.federation.site_settings import read_site_settings
from fedbn.tasks.registry import TASKS, TaskError, make_task

PAGE = (Path(__file__).parents[1] / "docs" / "own_task.md").read_text()
PLACE = "our_tasks.signals:SignalTask"
REFUSED = f"task 'signals' is a class that is not allowed here: {PLACE} must be listed"


def block(language):
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return found


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The page's package, as pip would install it, not imported yet."""
    site_packages = tmp_path / "site-packages"

    def install(name="our_tasks", place=PLACE, code=None):
        package = site_packages / name
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "signals.py").write_text(code or block("python"))
        info = site_packages / f"{name}-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
        (info / "entry_points.txt").write_text(f"[fedbn.tasks]\nsignals = {place}\n")
        importlib.invalidate_caches()

    def forget():
        for name in [name for name in sys.modules if name.partition(".")[0] == "our_tasks"]:
            del sys.modules[name]

    forget()
    monkeypatch.syspath_prepend(site_packages)
    monkeypatch.delenv("FEDBN_ALLOW_TASKS", raising=False)
    yield install
    forget()


@pytest.fixture
def job(tmp_path, installed):
    installed()
    folder = tmp_path / "job" / "app" / "config"
    folder.mkdir(parents=True)
    (folder / "experiment.json").write_text(block("json"))
    return tmp_path / "job"


@pytest.fixture
def signals(tmp_path):
    """Two channels of noise, louder in those who are ill; each site has its own gain."""
    rng = np.random.default_rng(0)
    for site, gain in (("North", 1.0), ("South", 3.0)):
        classes = np.array(["healthy", "ill"] * 12)
        noise = rng.standard_normal((24, 2, 32)) * gain
        noise[classes == "ill"] *= 2.5
        folder = tmp_path / "data" / site
        folder.mkdir(parents=True)
        ids = np.array([f"{site} patient {k}" for k in range(24)])
        np.savez(folder / "signals.npz", ids=ids, classes=classes, signals=noise)
    return tmp_path / "data"


def command(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_package_names_the_class_that_the_page_shows():
    tomllib = pytest.importorskip("tomllib")
    stated = tomllib.loads(block("toml"))["project"]
    assert stated["entry-points"] == {"fedbn.tasks": {"signals": PLACE}}
    assert stated["name"] == PLACE.partition(".")[0]


def test_a_run_and_a_comparison_of_it(job, signals, tmp_path):
    command("run", job, "--data", signals, "--out", tmp_path / "results.json")
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["experiment"]["task"]["classes"] == ["healthy", "ill"]
    north = results["sites"]["North"]
    assert north["federated"]["subject"]["n"] == north["n_test_subjects"] == 6
    assert north["ill_share_train"] == 0.5
    compared = tmp_path / "compared"
    command(
        "compare", job, "--data", signals, "--methods", "singleset,fedbn,pooled", "--seeds", 1,
        "--rounds", 2, "--jobs", 1, "--out", compared,
    )  # fmt: skip
    summary = json.loads((compared / "summary.json").read_text())
    for method in ("singleset", "fedbn", "pooled"):
        assert summary["scores"][method]["macro"]["subject"]["accuracy"]["mean"] > 0.5


def test_settings_of_it_are_checked_like_any_other_s(job):
    content = json.loads(block("json"))
    content["task"]["clases"] = content["task"].pop("classes")
    with pytest.raises(ExperimentError, match=r"task.classes: it is missing"):
        validated(content, "the job")
    content["task"] = {"name": "signal"}
    with pytest.raises(ExperimentError, match="no task 'signal'; did you mean 'signals'"):
        validated(content, "the job")


@pytest.fixture(params=["refused", "another", "file", "colon", "environment"])
def allowed(request, monkeypatch):
    """Allow the class in a workspace, in one of three ways, or not."""

    def allow(root):
        lines = {
            "file": block("yaml"),
            "colon": f'allow_tasks: ["{PLACE}"]\n',
            "another": "allow_tasks: [our_tasks.signals.OtherTask]\n",
        }
        if request.param == "environment":
            monkeypatch.setenv("FEDBN_ALLOW_TASKS", f"x.Y, {PLACE.replace(':', '.')}")
        elif request.param in lines:
            (Path(root) / "local").mkdir(parents=True, exist_ok=True)
            (Path(root) / "local" / "fedbn_site.yml").write_text(lines[request.param])
        return request.param not in ("refused", "another")

    return allow


def imported():
    return "our_tasks.signals" in sys.modules


def test_whoever_reads_a_job_looks_before_it_imports(job, allowed, tmp_path):
    is_allowed = allowed(tmp_path)
    settings = read_site_settings(tmp_path / "local" / "fedbn_site.yml")
    if is_allowed:
        assert read_experiment(job, settings.tasks).task.name == "signals"
    else:
        with pytest.raises(ExperimentError, match=re.escape(REFUSED)):
            read_experiment(job, settings.tasks)
    assert imported() == is_allowed


def test_a_name_that_two_packages_bring_is_nobody_s(installed):
    installed()
    installed("others", "others.signals:SignalTask")
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
def test_a_class_that_is_no_task_is_one_sentence(installed, code, sentence):
    installed(code=code)
    with pytest.raises(TaskError, match=rf"task 'signals' \({PLACE}\) {sentence}"):
        make_task({"name": "signals"})


def test_a_package_cannot_take_the_name_of_a_task_of_fedbn(installed):
    installed()
    assert make_task({"name": "connectome"}).name == "connectome"
    for name, place in TASKS.items():
        module, _, attribute = place.partition(":")
        assert getattr(importlib.import_module(module), attribute).model_fields["name"].default == (
            name
        )
