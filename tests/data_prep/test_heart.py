"""UCI heart disease: the published files become four tables, and nothing is made up."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from data_prep.__main__ import app
from data_prep.errors import SourceError
from data_prep.heart import HEART_COLUMNS, HEART_SITES, prepare_heart
from data_prep.table_store import read_table_store

LINE = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0"


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for name in HEART_SITES.values():
        (folder / name).write_text(f"{LINE}\n{LINE[:-1]}2\n")
    return folder


@pytest.fixture
def job():
    job = Path(__file__).parents[2] / "jobs" / "heart_fedbn"
    return json.loads((job / "app" / "config" / "experiment.json").read_text())


def rows_of(file):
    with file.open(newline="") as text:
        return list(csv.DictReader(text))


def test_cells_stay_as_they_are_published(source, tmp_path):
    assert prepare_heart(source, tmp_path / "out") == dict.fromkeys(HEART_SITES, (2, 0))
    first = rows_of(tmp_path / "out" / "Hungarian" / "table.csv")[0]
    assert list(first.values()) == LINE.split(",")
    assert tuple(first) == HEART_COLUMNS


@pytest.mark.parametrize("zero", ["0", "0.0"])
def test_zero_where_it_is_no_measurement_becomes_missing(source, tmp_path, zero):
    line = LINE.replace("145.0", zero).replace("233.0", zero).replace("150.0", "?")
    (source / "processed.va.data").write_text(f"{line}\n")
    prepare_heart(source, tmp_path / "out")
    (row,) = rows_of(tmp_path / "out" / "LongBeach" / "table.csv")
    assert [row[name] for name in ("trestbps", "chol", "thalach", "exang", "ca")] == [
        "?", "?", "?", "0.0", "0.0"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "site 'Switzerland': .*switzerland.data is not a file"),
        ("1,2,3\n", "site 'Switzerland': line 1 of .*data has 3 columns, expected 14"),
        (f"{LINE}\n\n{LINE}", "site 'Switzerland': line 2 of .*data has 1 columns, expected 14"),
        (b"\xff", "site 'Switzerland': .*switzerland.data is not UTF-8"),
        ("", "site 'Switzerland': .*switzerland.data is empty"),
    ],
)
def test_a_wrong_file_is_named_and_nothing_is_written(source, tmp_path, content, sentence):
    file = source / HEART_SITES["Switzerland"]
    file.unlink()
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SourceError, match=sentence):
        prepare_heart(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_table_is_not_replaced(source, tmp_path):
    table = tmp_path / "out" / "LongBeach" / "table.csv"
    table.parent.mkdir(parents=True)
    table.write_text("age,outcome\n1,2\n")
    with pytest.raises(SourceError, match=r"LongBeach/table.csv is another table; name another"):
        prepare_heart(source, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["LongBeach"]
    table.unlink()
    for _ in range(2):  # a table of its own is
        prepare_heart(source, tmp_path / "out")


def test_the_command(source, tmp_path):
    result = CliRunner().invoke(app, ["heart", "--source", str(source), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "Switzerland" in result.stdout
    assert (tmp_path / "Switzerland" / "table.csv").is_file()
    (source / "processed.va.data").unlink()
    result = CliRunner().invoke(app, ["heart", "--source", str(source), "--out", str(tmp_path)])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "error: site 'LongBeach': " in result.stderr


def test_the_published_files(heart_source, tmp_path, job):
    counts = {
        "Cleveland": (303, 6),
        "Hungarian": (294, 782),
        "Switzerland": (123, 396),
        "LongBeach": (200, 748),
    }
    assert prepare_heart(heart_source, tmp_path) == counts
    ill, chol = {}, {}
    for site in counts:
        store = read_table_store(tmp_path / site, site, "num", job["task"]["classes"])
        ill[site] = int(store.labels.sum())
        chol[site] = store.column("chol").count(None)
    assert ill == {"Cleveland": 139, "Hungarian": 106, "Switzerland": 115, "LongBeach": 149}
    assert chol == {"Cleveland": 0, "Hungarian": 23, "Switzerland": 123, "LongBeach": 56}
