"""One job folder a task; `fedbn job` writes every other one, wired the same."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from data_prep.__main__ import app as data_prep
from fedbn.__main__ import app
from fedbn.federation.experiment import read_experiment
from fedbn.federation.installation import installed_version, satisfies
from fedbn.study.methods import METHODS

JOBS = Path(__file__).parents[1] / "jobs"
MAIN = JOBS / "abide_fedbn"
PAGE = (JOBS.parent / "docs" / "researcher.md").read_text()
IN_FLARE = [name for name, method in METHODS.items() if method.in_flare]
WIRING = ("config_fed_client.json", "config_fed_server.json")


@pytest.fixture
def source(tmp_path):
    return shutil.copytree(
        MAIN, tmp_path / "abide_fedbn", ignore=shutil.ignore_patterns("__pycache__")
    )


def invoke(*arguments):
    return CliRunner().invoke(app, ["job", *map(str, arguments)])


def change(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("job", JOBS.iterdir(), ids=lambda job: job.name)
def test_a_job_takes_this_version_and_not_the_next_and_has_a_card(job):
    required = read_experiment(job).fedbn_version
    major, minor = installed_version().split(".")[:2]
    assert satisfies(f"{major}.{minor}.99", required)
    assert not satisfies(f"{major}.{int(minor) + 1}.0", required)
    text = (job / "README.md").read_text()
    assert text.startswith(f"# {job.name}: ")
    assert f"nvflare simulator jobs/{job.name} -n " in text


@pytest.mark.parametrize("name", IN_FLARE)
def test_a_method_s_job_is_the_main_one_s_with_the_method_s_experiment(tmp_path, name):
    out = tmp_path / "jobs" / f"abide_{name}"
    done = invoke(MAIN, "--method", name, "--out", out)
    assert done.exit_code == 0, done.output
    main, found = read_experiment(MAIN), read_experiment(out)
    alone_again = {"compare_with_alone": name != "singleset", "name": out.name}
    assert found == METHODS[name].experiment(main).changed(**alone_again)
    for file in WIRING:
        assert (out / "app/config" / file).read_bytes() == (MAIN / "app/config" / file).read_bytes()
    (package,) = (out / "app" / "custom").iterdir()
    assert package.name == f"{out.name}_job"
    (old,) = (MAIN / "app" / "custom").glob("*_job")
    assert (package / "__init__.py").read_bytes() == (old / "__init__.py").read_bytes()
    meta = json.loads((out / "meta.json").read_text())
    assert meta == json.loads((MAIN / "meta.json").read_text()) | {"name": out.name}
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "app", "meta.json"]


def test_other_sites_settings_and_name(source, tmp_path):
    change(source / "meta.json", resource_spec={"NYU": {"num_of_gpus": 1}, "UM": {}})
    protocol = tmp_path / "protocol.json"
    protocol.write_text('{"rounds": 300, "training": {"batch_size": 32}, "seed": 4}')
    changes = ["--set-file", protocol, "--set", "training.learning_rate=0.01", "--seed", "5"]
    out = tmp_path / "Oslo-Bergen 2"
    done = invoke(source, "--sites", "Oslo,Bergen,UM", *changes, "--out", out)
    assert done.exit_code == 0, done.output
    found = read_experiment(out)
    assert (found.name, found.sites) == ("Oslo_Bergen_2", ("Oslo", "Bergen", "UM"))
    assert (found.rounds, found.seed, found.training.batch_size) == (300, 5, 32)
    assert found.training.learning_rate == 0.01
    meta = json.loads((out / "meta.json").read_text())
    assert (meta["name"], meta["min_clients"]) == ("Oslo_Bergen_2", 3)
    assert meta["resource_spec"] == {"UM": {}}
    line = "training.learning_rate: 0.001 -> 0.01"
    assert line in done.stdout.splitlines()
    assert line in (out / "README.md").read_text().splitlines()
    again = invoke(out, "--name", "third", "--rounds", "2", "--out", tmp_path / "x")
    assert again.exit_code == 0, again.output
    assert read_experiment(tmp_path / "x") == found.changed(name="third", rounds=2)
    assert [p.name for p in (tmp_path / "x" / "app" / "custom").iterdir()] == ["third_job"]


def test_the_page_s_federation_of_other_hospitals(tmp_path, monkeypatch):
    (block,) = re.findall(r"hospitals that do not exist:\n\n```\n(.*?)```", PAGE, re.DOTALL)
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    make, job, run = commands[:3]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDBN_DATA", str(tmp_path / "data"))
    (tmp_path / "jobs").symlink_to(JOBS)
    done = CliRunner().invoke(data_prep, [*make[3:], "--subjects", "20"])
    assert done.exit_code == 0, done.output
    assert CliRunner().invoke(app, job[1:]).exit_code == 0
    done = CliRunner().invoke(app, [*run[1:], "--rounds", "1", "--local-epochs", "1"])
    assert done.exit_code == 0, done.output
    for site in ("Oslo", "Bergen", "Trondheim"):
        assert f" {site} " in done.stdout
    assert commands[3][:5] == ["nvflare", "simulator", "norway", "-n", "3"]


def test_code_that_a_job_brings_keeps_the_name_that_its_wiring_uses(source, tmp_path):
    (source / "app" / "custom" / "abide_fedbn_job" / "learner.py").write_text("")
    assert invoke(source, "--out", tmp_path / "copy").exit_code == 0
    found = (tmp_path / "copy" / "app" / "custom").rglob("*.py")
    assert {path.parent.name for path in found} == {"abide_fedbn_job"}


def test_a_job_that_brings_no_code_still_brings_none(source, tmp_path):
    shutil.rmtree(source / "app" / "custom")
    assert invoke(source, "--out", tmp_path / "copy").exit_code == 0
    assert not (tmp_path / "copy" / "app" / "custom").exists()


def test_a_network_that_sites_must_allow_is_told(source, tmp_path):
    done = invoke(source, "--network", "nets.Small", "--out", tmp_path / "new")
    assert done.exit_code == 0
    assert "network 'nets.Small' is a class that is not allowed here" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--method", "scafold"], "unknown method 'scafold'; choose from singleset"),
        (["--method", "pooled"], "method 'pooled' runs in one process alone (`fedbn compare`); FL"),
        (["--method", "scaffold", "--set", "training.momentum=0.9"], "algorithm 'scaffold' needs"),
        (["--set", "training.lr=1"], "training.lr: there is no such field; the fields are opti"),
        (["--set", "continues.job=x"], "continues.job: this command decides it"),
        (["--name", "my-job"], "'my-job' cannot name a job and its package: give a name of lett"),
        (["--sites", "A,A"], "sites must be distinct names"),
        (
            ["--sites", "A,B", "--set", "meta=2"],
            "meta: there is no such field; the fields are name",
        ),
        (["--out", "THERE"], "is there already; give a new folder with --out"),
        (["--out", "INSIDE"], "is inside of"),
    ],
)
def test_what_cannot_be_made_is_one_sentence_and_nothing_is_written(
    source, tmp_path, arguments, sentence
):
    before = sorted(tmp_path.rglob("*"))
    named = {"THERE": source / "app", "INSIDE": source / "app" / "new"}
    given = [named.get(argument, argument) for argument in arguments]
    done = invoke(source, *([] if "--out" in given else ["--out", tmp_path / "new"]), *given)
    assert done.exit_code == 1
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def quorum(source):
    change(source / "meta.json", min_clients=3)


def named_sites(source):
    change(source / "meta.json", deploy_map={"app": ["NYU", "USM", "UM", "UCLA", "server"]})


def continued(source):
    file = source / "app" / "config" / "experiment.json"
    change(file, continues={"job": "spring", "after_round": 3})


def no_meta(source):
    (source / "meta.json").unlink()


def broken_meta(source):
    (source / "meta.json").write_text('{"name": 1, "name": 2}')


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (quorum, "meta.json asks for 3 clients, but there are 2 sites"),
        (named_sites, "meta.json names sites in its deploy_map; write '@ALL' there"),
        (continued, "continues job spring and belongs to its run; give the job that it was made"),
        (no_meta, "abide_fedbn is no FLARE job folder: it has no meta.json"),
        (broken_meta, "meta.json: name: it stands there twice; keep one"),
    ],
)
def test_a_job_that_cannot_be_changed_so_is_named(source, tmp_path, damage, sentence):
    damage(source)
    before = sorted(tmp_path.rglob("*"))
    done = invoke(source, "--sites", "A,B", "--out", tmp_path / "new")
    assert done.exit_code == 1
    assert sentence in done.stderr
    assert sorted(tmp_path.rglob("*")) == before
