"""A screen that lacks characters: commands show what they can, and end well.

What is shown has characters of two kinds that an encoding may lack: the frames of tables, and
letters in names of folders and of subjects.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from data_prep.__main__ import app as data_prep
from fedbn.__main__ import app as fedbn

STORED = Path(__file__).parent / "data" / "v0_1"
LETTERS = "Łódź \udcff"  # one that Latin-1 lacks, and a byte of a file's name that is no text
ENCODINGS = ("ascii", "cp1252", "latin-1", "utf-8")


@pytest.fixture
def folder(tmp_path):
    """A folder whose name has letters that the screen lacks."""
    folder = tmp_path / LETTERS
    folder.mkdir()
    return folder


def shown(app, encoding, *words):
    """Return what a command prints; the screen takes nothing that its encoding lacks."""
    done = CliRunner(charset=encoding).invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output or done.exception
    return done.stdout


def is_framed(text, encoding):
    """Whether a table has its lines; on a screen of ASCII alone click writes UTF-8."""
    return encoding == "ascii" or {"utf-8": "─"}.get(encoding, "-") * 20 in text


@pytest.fixture
def job(tmp_path, write_experiment, experiment):
    write_experiment(tmp_path / "job" / "app" / "config", experiment(rounds=1))
    return tmp_path / "job"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_methods_are_compared(job, data_root, folder, encoding):
    words = ("--methods", "fedavg,singleset", "--seeds", 1, "--jobs", 1, "--out", folder / "out")
    assert is_framed(shown(fedbn, encoding, "compare", job, "--data", data_root, *words), encoding)
    assert "─" in (folder / "out" / "tables.txt").read_text(encoding="utf-8")
    page = shown(fedbn, encoding, "report", folder / "out")
    assert "pictures beside it" in page
    assert (folder / "out" / "report" / "report.html").is_file()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("command", ["unseen", "explain"])
def test_sites_are_left_out_and_edges_explained(
    job, data_root, write_store, write_experiment, experiment, folder, encoding, command
):
    write_store(data_root / "USM", "USM")
    settings = experiment(rounds=1, sites=("NYU", "UM", "USM"))
    write_experiment(job / "app" / "config", settings)
    words = ("--seeds", 1) if command == "unseen" else ("--permutations", 1, "--no-draw")
    out = folder / "out"
    words = ("--data", data_root, "--out", out, "--local-epochs", 1, *words)
    assert is_framed(shown(fedbn, encoding, command, job, *words), encoding)
    assert "─" in (out / "tables.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_scans_are_predicted(folder, encoding):
    scan = folder / "Łucja.1D"
    shutil.copy(STORED / "series" / "one.1D", scan)
    words = ("--model", STORED / "bundle", "--input", scan, "--pictures", 0, "--out")
    table = shown(fedbn, encoding, "predict", *words, folder / "out")
    assert ("Łucja" if encoding == "utf-8" else "?ucja") in table
    assert "Łucja" in (folder / "out" / "predictions.tsv").read_text(encoding="utf-8")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_stores_are_made_and_checked(folder, encoding):
    made = shown(
        data_prep, encoding, "synthetic", "--out", folder, "--subjects", 4, "--sites", "UM"
    )
    assert "UM" in made
    assert "SYNTHETIC" in shown(data_prep, encoding, "check", folder / "UM", "--folds", 0)


@pytest.mark.parametrize("command", ["results", "predict"])
def test_what_is_wrong_is_said(folder, command):
    words = {"results": (folder / "none",), "predict": ("--model", folder, "--input", folder)}
    done = CliRunner(charset="ascii").invoke(fedbn, [str(w) for w in (command, *words[command])])
    assert done.exit_code == 1
    assert done.stderr.startswith("fedbn: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "cp1252"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},  # for files, too
    ],
    ids=["cp1252", "C"],
)
def test_processes_of_both_commands(tmp_path, environment):
    out, results = tmp_path / "out", tmp_path / "results.json"
    results.write_bytes(
        (STORED / "results.json").read_bytes().replace(b"in process", "Łódź".encode())
    )
    for words in (
        ("data_prep", "synthetic", "--out", out, "--subjects", "4", "--sites", "UM"),
        ("fedbn", "results", results),
        ("fedbn", "report", STORED / "comparison", "--out", out / "Łódź"),
    ):
        command = [os.fsencode(word) for word in (sys.executable, "-m", *words)]
        environment = {**os.environ, **environment}
        done = subprocess.run(command, capture_output=True, env=environment, check=False)
        assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
    assert (out / "Łódź" / "report.html").is_file()


def test_results_are_there_when_the_screen_is_gone(job, data_root, tmp_path, monkeypatch):
    """As when a table is piped into a program that ends early."""

    def closed(*_, **__):
        raise BrokenPipeError

    drawn = SimpleNamespace(name="brain", png=b"a picture")
    monkeypatch.setattr("fedbn.report.explanation_tables.pictures", lambda _: [drawn])
    monkeypatch.setattr("fedbn.cli.common.screen.print", closed)
    monkeypatch.setattr("typer.echo", closed)
    data = ("--data", data_root)
    model = ("--model", STORED / "bundle", "--input", STORED / "series" / "one.1D")
    for words, result in (
        (("run", job, *data, "--out", tmp_path / "results.json"), "results.json"),
        (("explain", job, *data, "--permutations", 1, "--out", tmp_path / "e"), "e/brain.png"),
        (("predict", *model, "--pictures", 0, "--out", tmp_path / "p"), "p/predictions.tsv"),
    ):
        CliRunner().invoke(fedbn, [str(word) for word in words])
        assert (tmp_path / result).is_file(), result
