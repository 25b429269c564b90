"""The simulation behind the intervals over hospitals: what it fits, and what it calls the truth."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "hospital_intervals.py"


@pytest.fixture(scope="module")
def simulation():
    return runpy.run_path(str(BENCHMARK))


def test_held_out_subjects_are_judged_by_a_model_that_has_not_seen_them(simulation):
    rng = np.random.default_rng(0)
    hospital, sizes = simulation["HOSPITAL"], np.array(simulation["SIZES"])
    y, (x, _) = simulation["draw_study"](rng, 0.0, 4)
    fold = np.arange(len(y)) % simulation["FOLDS"]
    found = simulation["right"](x, y, fold)
    root = 1 / np.sqrt(sizes[hospital])[:, None]
    train = fold != 2
    design = np.concatenate([(x * root)[train], np.eye(4)])
    target = np.concatenate([y[train] * root[train, 0], np.zeros(4)])
    weights = np.linalg.lstsq(design, target, rcond=None)[0]
    assert (found[~train] == ((x[~train] @ weights > 0) == (y[~train] > 0))).all()


def test_scenarios_differ_in_the_second_methods_signal_alone(simulation):
    gains = {}
    for share in (0.0, 1.0):
        rng = np.random.default_rng(1)
        studies = [simulation["study"](rng, share, 10) for _ in range(30)]
        gains[share] = np.mean([one["t over hospitals, plain"][0] for one in studies])
        for one in studies:
            plain, wider = one["t over hospitals, plain"], one["t over hospitals"]
            assert plain[0] == wider[0]
            assert wider[1] <= plain[1] <= plain[0] <= plain[2] <= wider[2]
    assert abs(gains[0.0]) < 0.04
    assert gains[1.0] > 0.05


def test_a_row_says_how_often_zero_and_the_truth_are_left_out(simulation):
    intervals = np.array([[1.0, 0.5, 1.5], [2.0, 1.6, 2.4], [0.0, -1.0, 1.0], [1.0, -1.0, 3.0]])
    line = simulation["row"]("m", "s", "i", intervals / 100, 1.0)
    assert line == "| m | s | i | +1.0 | 25.0 | 50.0 |"  # the truth is 1 point
    assert simulation["row"]("m", "s", "i", np.array([[0.04], [0.5]]), 0.0).endswith(
        "| 50.0 | 50.0 |"
    )
