"""What a hospital and the server put into their kits fits the jobs, and keeps the promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from fedbn.federation.experiment import Experiment
from fedbn.federation.site_settings import read_site_settings

REPOSITORY = Path(__file__).parents[1]
SITES = REPOSITORY / "sites"
PROJECT = yaml.safe_load((SITES / "project.yml").read_text())
HOSPITALS = [p["name"] for p in PROJECT["participants"] if p["type"] == "client"]
JOBS = sorted(path.parent.name for path in (REPOSITORY / "jobs").glob("*/meta.json"))
AUTHORIZATIONS = ("hospital/authorization.json", "hospital/strict/authorization.json")


def read(name):
    return json.loads((SITES / name).read_text())


def paths_in(config):
    """Return the path of every class that a job's configuration names."""
    if isinstance(config, dict):
        own = [config["path"]] if "path" in config else []
        return own + [path for value in config.values() for path in paths_in(value)]
    return (
        [path for value in config for path in paths_in(value)] if isinstance(config, list) else []
    )


def test_the_project_s_hospitals_are_the_main_job_s_sites():
    assert tuple(HOSPITALS) == Experiment().sites


@pytest.mark.parametrize("site", HOSPITALS)
def test_each_site_s_settings_can_be_read_and_are_its_own(site):
    settings = read_site_settings(SITES / site / "fedbn_site.yml")
    assert settings.site == site
    assert settings.store == Path.home() / "fedbn_data" / site
    assert not settings.share_affine


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(
    ("side", "resources"),
    [("client", "hospital/resources.json"), ("server", "server/resources.json")],
)
def test_a_job_without_code_of_its_own_may_use_all_classes_that_it_names(job, side, resources):
    config = REPOSITORY / "jobs" / job / "app" / "config" / f"config_fed_{side}.json"
    named = set(paths_in(json.loads(config.read_text())))
    assert named
    assert named <= set(read(resources)["class_allow_list"])


def test_no_error_log_is_sent_to_the_server():
    assert PROJECT["allow_log_streaming"] is False
    assert read("hospital/resources.json")["allow_log_streaming"] is False


def test_the_server_s_storage_is_not_in_the_system_s_temporary_folder():
    resources = read("server/resources.json")
    assert resources["storage"] == "{$HOME}/fedbn_server"
    assert "/tmp" not in json.dumps(resources)


@pytest.mark.parametrize("name", AUTHORIZATIONS)
def test_nobody_of_another_organisation_looks_into_a_hospital(name):
    for role, rights in read(name)["permissions"].items():
        for right in ("shell_commands", "operate"):
            assert rights.get(right, "none") in ("none", "o:site"), (role, right)


def test_the_strict_posture_differs_in_custom_code_alone():
    default, strict = (read(name)["permissions"] for name in AUTHORIZATIONS)
    assert default["lead"].pop("byoc") == "any"
    assert strict["lead"].pop("byoc") == "none"
    assert default == strict
    assert all(rights.get("byoc", "none") == "none" for rights in default.values())


def test_a_hospital_s_filter_is_the_strictest():
    policy = read("hospital/privacy.json")
    (scope,) = policy["scopes"]
    assert scope["name"] == policy["default_scope"]
    assert scope["task_result_filters"] == [
        {"path": "fedbn.flare.filters.BatchNormFilter", "args": {"policy": "fedbn"}}
    ]
