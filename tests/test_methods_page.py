"""The table of docs/methods.md says of each method what its experiment does."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedbn.federation.experiment import Experiment
from fedbn.federation.site import make_network
from fedbn.study.methods import METHODS

PAGE = (Path(__file__).parents[1] / "docs" / "methods.md").read_text()
COLUMNS = {
    1: ("hidden.0.norm.weight", "hidden.0.norm.bias"),
    2: ("hidden.0.norm.running_mean", "hidden.0.norm.running_var"),
    3: ("hidden.0.norm.num_batches_tracked",),
    4: ("hidden.0.linear.weight", "classifier.bias"),
}
LINES = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines()]
ROWS = {cells[0].strip("`"): cells for cells in LINES if len(cells) == 6}
FEDERATED = [name for name, found in METHODS.items() if found.has_network and name != "pooled"]


def test_every_method_is_named():
    assert [name for name in METHODS if f"`{name}`" not in PAGE] == []


@pytest.mark.parametrize("name", FEDERATED)
def test_a_row_says_what_stays_and_what_is_averaged(name):
    network = {"args": {"in_features": 6, "hidden": [4]}}
    experiment = METHODS[name].experiment(Experiment(network=network))
    _, partition = make_network(experiment)
    for column, entries in COLUMNS.items():
        for entry in entries:
            assert entry in partition.local + partition.shared
            stays = entry in partition.local
            assert ROWS[name][column].startswith("stays" if stays else "mean"), (name, entry)
    assert ("control variates" in ROWS[name][5]) == (experiment.algorithm.name == "scaffold")
