"""Job folders hold wiring, the same in all of them, and the one experiment in which they differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedbn.federation.experiment import read_experiment
from fedbn.federation.installation import installed_version, satisfies
from fedbn.study.methods import METHODS

JOBS = Path(__file__).parents[1] / "jobs"
MAIN = JOBS / "abide_fedbn"
IN_FLARE = [name for name, method in METHODS.items() if method.in_flare]
OTHERS = [name for name in IN_FLARE if name != "fedbn"]
WIRING = ("app/config/config_fed_client.json", "app/config/config_fed_server.json")
OF_THE_METHOD = {"name", "policy", "training", "algorithm", "finetune", "compare_with_alone"}


def files(job):
    found = (path for path in job.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(job)).replace(job.name, "JOB"): path for path in found}


def test_flare_has_a_job_for_each_method_that_it_can_run():
    assert {path.name for path in JOBS.glob("abide_*")} == {f"abide_{name}" for name in IN_FLARE}


@pytest.mark.parametrize("name", OTHERS)
def test_a_job_is_wired_as_the_main_job(name):
    job = JOBS / f"abide_{name}"
    found, expected = files(job), files(MAIN)
    assert set(found) == set(expected)
    for relative in (*WIRING, "app/custom/JOB_job/__init__.py"):
        assert found[relative].read_bytes() == expected[relative].read_bytes(), relative
    meta = json.loads(found["meta.json"].read_text())
    assert meta == json.loads(expected["meta.json"].read_text()) | {"name": job.name}


@pytest.mark.parametrize("name", OTHERS)
def test_an_experiment_is_the_main_job_s_changed_into_the_method_s(name):
    job = JOBS / f"abide_{name}"
    found, main = read_experiment(job), read_experiment(MAIN)
    alone_again = {"compare_with_alone": name != "singleset", "name": job.name}
    assert found == METHODS[name].experiment(main).changed(**alone_again)
    contents = [
        json.loads(files(folder)["app/config/experiment.json"].read_text())
        for folder in (job, MAIN)
    ]
    differing = {
        key
        for key in contents[0].keys() | contents[1]
        if contents[0].get(key) != contents[1].get(key)
    }
    assert differing <= OF_THE_METHOD


def test_the_main_job_takes_this_version_and_not_the_next():
    required = read_experiment(MAIN).fedbn_version
    major, minor = installed_version().split(".")[:2]
    assert satisfies(f"{major}.{minor}.99", required)
    assert not satisfies(f"{major}.{int(minor) + 1}.0", required)


@pytest.mark.parametrize("name", IN_FLARE)
def test_a_card_names_its_job_and_its_command(name):
    text = (JOBS / f"abide_{name}" / "README.md").read_text()
    assert text.startswith(f"# abide_{name}: ")
    assert f"nvflare simulator jobs/abide_{name} -n 4\n" in text
