"""The experiment on the convergence theorem, small: what it computes, says and draws."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fedbn.__main__ import app
from fedbn.report.tables import render
from fedbn.report.theory import TABLE_WIDTH, pictures, theory_tables
from fedbn.study import theory
from fedbn.tasks.connectome.task import kinds_of_rows

SMALL = theory.Settings(
    n_features=6, n_samples=4, width=120, n_steps=60, n_seeds=2, n_clients=3, clients=(2, 3),
    spreads=(0.0, 1.0), n_draws=5_000, n_problems=20, n_rows=12,
)  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for name in ("mnist", "svhn", "usps", "mnist_m", "synth_standin"):
        x = rng.integers(256, size=(30, 16, 16), dtype=np.uint8)
        np.savez(root / f"{name}.npz", x=x, y=np.arange(30) % 10)
    return theory.study(SMALL, root)


def test_the_formulas_hold(found):
    assert found["closed_form"]["largest_in_standard_errors"] < 5
    assert found["closed_form"]["relative_error"] < 0.1
    assert found["interlacing"]["n_violated"] == 0
    assert 1 < found["interlacing"]["smallest_ratio"] < found["interlacing"]["median_ratio"]


def test_each_cell_says_what_its_runs_are(found):
    assert [cell["n_clients"] for cell in found["clients"]] == [2, 3]
    assert [cell["spread"] for cell in found["spreads"]] == [0.0, 1.0]
    assert found["clients"][1] is found["spreads"][1]
    cell = found["clients"][1]
    losses = {m: np.array([run[m]["loss"] for run in cell["runs"]]) for m in theory.METHODS}
    assert losses["fedbn"].shape == (2, 61)
    np.testing.assert_array_equal(losses["fedavg"][:, 0], 1)
    assert cell["fedbn_below"]["60"] == (losses["fedbn"] < losses["fedavg"])[:, 60].sum()
    for k, first in enumerate(cell["below_for_good"]):
        below = losses["fedbn"][k] < losses["fedavg"][k]
        assert below[first:].all()
        assert not below[first - 1]
    assert cell["bound_holds"] == {"fedavg": 2, "fedbn": 2}
    assert cell["ratio_paper"] > 1
    assert cell["ratio"] > 1


def test_steps_until_a_hundredth():
    assert theory._steps(np.array([1, 0.1, 0.009, 0.02])) == 2
    assert theory._steps(np.array([1, 0.1])) is None
    assert theory._for_good(np.array([False, True, False, True])) == 3
    assert theory._for_good(np.array([True, True])) == 0
    assert theory._for_good(np.array([True, False])) is None


def test_real_data_are_described_against_the_assumptions(found):
    toy, pixels, standardised = found["data"]
    assert (pixels["n_clients"], pixels["n_samples"], pixels["n_features"]) == (5, 60, 28 * 28 * 3)
    assert standardised["mean_share"] < 1e-12 < toy["mean_share"]
    assert pixels["ratio"] >= 1


def test_parallel_samples_and_a_mean_are_found():
    rng = np.random.default_rng(0)
    samples = rng.standard_normal((20, 5))
    samples[3], samples[15] = -2 * samples[1], 3 * samples[0]
    client = np.repeat([0, 1], 10)
    facts = theory.describe(
        "made up", np.concatenate([samples, np.zeros((1, 5))]), np.append(client, 1)
    )
    assert (facts["n_parallel"], facts["n_zero"], facts["n_samples"]) == (2, 1, 20)
    assert facts["smallest_angle_within"] < 1e-5
    assert facts["smallest_angle_between"] < 1e-5
    assert facts["ratio"] is None  # 0 and 15 point the same way: G is singular
    shifted = theory.describe("shifted", rng.standard_normal((20, 5)) + 100, client)
    assert shifted["mean_share"] > 0.99
    assert shifted["n_parallel"] == 0


def test_the_width_grows_with_samples_and_with_a_smaller_eigenvalue():
    assert theory._log10_width(100, 0.1) == pytest.approx(np.log10(np.log(2000) * 100**4 / 0.1**4))
    assert theory._log10_width(2, 10.0) == pytest.approx(np.log10(np.log(40) * 4 / 100))


def test_tables_and_pictures(found):
    text = render(theory_tables(found), width=TABLE_WIDTH)
    assert "violated in 0 of 20 random problems" in text
    assert "digits, pixels in [-1" in text
    assert {name: png[:4] for name, png in pictures(found).items()} == dict.fromkeys(
        ("theory_loss.png", "theory_sweeps.png", "theory_data.png"), b"\x89PNG"
    )


def test_connectomes_are_described_by_subject_and_by_window(data_root):
    kinds = kinds_of_rows(data_root, SMALL.n_rows)
    whole, standardised, windows = theory.described(kinds, SMALL)
    assert (whole["n_clients"], whole["n_samples"]) == (2, 24)
    assert standardised["mean_share"] < 1e-12
    assert windows["name"].endswith("windows")


@pytest.mark.slow
def test_the_command_writes_numbers_tables_and_pictures(tmp_path, data_root):
    out = tmp_path / "theory"
    arguments = [
        "theory",
        "--out",
        str(out),
        "--data",
        str(data_root),
        "--seeds",
        "1",
        "--steps",
        "10",
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert sorted(f.name for f in out.iterdir()) == [
        "tables.txt", "theory.json", "theory_data.png", "theory_loss.png", "theory_sweeps.png"
    ]  # fmt: skip
    assert len(json.loads((out / "theory.json").read_text())["data"]) == 4
    assert (out / "tables.txt").read_text() in done.stdout


def test_a_folder_without_digits_is_one_sentence(tmp_path):
    done = CliRunner().invoke(
        app, ["theory", "--out", str(tmp_path / "o"), "--digits", str(tmp_path)]
    )
    assert done.exit_code == 1
    assert "has no mnist.npz" in done.stderr
    assert not (tmp_path / "o").exists()
