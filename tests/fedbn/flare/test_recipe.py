"""The Recipe API builds the job that the job folders are."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path

import pytest
from nvflare.recipe.utils import add_experiment_tracking

from fedbn.federation.experiment import ExperimentError, read_experiment
from fedbn.flare.recipe import FedBNRecipe

JOBS = Path(__file__).parents[3] / "jobs"


def effective(component):
    """Return a component with every argument that it has, given or by default."""
    module, _, name = component["path"].rpartition(".")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    defaults = {
        key: parameter.default
        for key, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    return component | {"args": defaults | component["args"]}


def wiring(job, side):
    content = json.loads((job / "app" / "config" / f"config_fed_{side}.json").read_text())
    for part in ("components", "workflows"):
        content[part] = {c["id"]: effective(c) for c in content.get(part, [])}
    for executor in content.get("executors", []):
        executor["executor"] = effective(executor["executor"])
    return content


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    FedBNRecipe(JOBS / "abide_fedbn").export(str(folder))
    return folder / "abide_fedbn"


@pytest.mark.parametrize("side", ["server", "client"])
def test_an_exported_job_is_wired_as_the_job_folder(exported, side):
    assert wiring(exported, side) == wiring(JOBS / "abide_fedbn", side)


@pytest.mark.parametrize("exported_before", [False, True])
def test_curves_are_written_once_if_tracking_is_added(tmp_path, exported_before):
    recipe = FedBNRecipe(JOBS / "abide_fedbn")
    if exported_before:
        recipe.export(str(tmp_path / "before"))
    add_experiment_tracking(recipe, "tensorboard", {"tb_folder": "mine"})
    for _ in range(2):  # to export and then run is one job
        recipe.export(str(tmp_path))
    components = wiring(tmp_path / "abide_fedbn", "server")["components"]
    receivers = [c for c in components.values() if c["path"].endswith("TBAnalyticsReceiver")]
    assert [one["args"]["tb_folder"] for one in receivers] == ["mine"]


def test_an_exported_job_has_the_experiment_and_the_meta_of_the_job_folder(exported):
    assert read_experiment(exported) == read_experiment(JOBS / "abide_fedbn")
    metas = [
        json.loads((job / "meta.json").read_text()) for job in (exported, JOBS / "abide_fedbn")
    ]
    assert metas[0] == metas[1]


def test_an_exported_job_brings_no_copy_of_the_package(exported):
    custom = [path for path in (exported / "app" / "custom").rglob("*") if path.is_file()]
    assert [path.name for path in custom] == ["__init__.py"]
    assert custom[0].parent.name == "abide_fedbn_job"


def test_settings_reach_the_job(tmp_path, experiment):
    small = experiment()
    recipe = FedBNRecipe(
        small, name="trial", min_sites=2, grace_seconds=7, torch_threads=None, rounds=9
    )
    recipe.export(str(tmp_path))
    job = tmp_path / "trial"
    assert read_experiment(job) == small.changed(rounds=9) == recipe.experiment
    assert json.loads((job / "meta.json").read_text())["min_clients"] == 2
    workflow = wiring(job, "server")["workflows"]["fedbn_workflow"]["args"]
    assert (workflow["min_sites"], workflow["grace_seconds"]) == (2, 7)
    assert wiring(job, "client")["components"]["learner"]["args"]["torch_threads"] is None


def test_what_cannot_be_run_is_refused(experiment, tmp_path):
    with pytest.raises(ExperimentError, match="cannot name a job and its package"):
        FedBNRecipe(experiment(), name="my-job")
    with pytest.raises(ExperimentError, match="no experiment file"):
        FedBNRecipe(tmp_path / "nothing")
    with pytest.raises(ExperimentError, match="did you mean 'rounds'"):
        FedBNRecipe(experiment(), round=3)


def test_a_site_s_own_settings_are_not_the_job_s(experiment):
    with pytest.raises(ValueError, match="sets nothing for NYU alone"):
        FedBNRecipe(experiment(), name="trial").set_per_site_config({"NYU": {"device": "cpu"}})
