"""The commands of docs/data_prep.md, tried word by word."""

import re
import shlex
from pathlib import Path

import numpy as np

from data_prep.site_store import read_site_store

PAGE = Path(__file__).parents[2] / "docs" / "data_prep.md"


def commands(name):
    """Return the commands of the page that are told with all their options."""
    blocks = re.findall(r"^```\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    begin = f"python -m data_prep {name} "
    return [
        shlex.split(line.removeprefix("python -m data_prep "))
        for line in lines
        if line.startswith(begin) and "..." not in line and "#" not in line
    ]


def test_series_as_the_page_says(call, tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    Path("series").mkdir()
    names = ",".join(f"area {k}" for k in range(20))
    for k in range(8):
        series = rng.standard_normal((60, 20))
        np.savetxt(f"series/sub-{k}_rois.csv", series, delimiter=",", header=names, comments="")
    rows = "".join(f"sub-{k}\t{('autism', 'control')[k % 2]}\n" for k in range(8))
    Path("participants.tsv").write_text(f"participant_id\tdiagnosis\n{rows}")
    table = "".join(f"{k + 1}\tarea {k}\n" for k in range(20))
    Path("rois.tsv").write_text(f"index\tname\n{table}")
    (command,) = commands("series")
    call(*command)
    store = read_site_store("DIR/HOSPITAL", verify=True)
    assert (len(store.participants), store.n_edges) == (8, 190)
    assert store.rois[3] == ("4", "area 3")


def test_every_option_of_the_page_is_one(call):
    page = PAGE.read_text(encoding="utf-8")
    known = {"--repeats", "--sample"}  # of benchmarks/connectome.py
    for command in ("abide", "nifti", "series", "synthetic", "check"):
        known |= set(re.findall(r"--[a-z-]+", call(command, "--help").output))
    assert set(re.findall(r"`(--[a-z-]+)", page)) <= known
