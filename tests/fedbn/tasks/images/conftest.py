"""Made-up images of two scanners, in 2D and 3D, made once."""

from __future__ import annotations

import copy

import pytest
from images import EXPERIMENT
from typer.testing import CliRunner

from data_prep.__main__ import app
from fedbn.federation.experiment import Experiment
from fedbn.federation.simulation import read_sites


@pytest.fixture(scope="session")
def stores(tmp_path_factory):
    """Return the folder of made-up stores of a number of axes."""

    def make(dim):
        folder = tmp_path_factory.getbasetemp() / f"images_{dim}d"
        if not folder.exists():
            options = ["--subjects", "10", "--dim", dim, "--sites", "NORTH,EAST", "--out", folder]
            done = CliRunner().invoke(app, ["synthetic", "--images", *map(str, options)])
            assert done.exit_code == 0, done.output
        return folder

    return make


@pytest.fixture
def experiment():
    """Return an experiment with changes to its task."""

    def make(dim=2, **task):
        content = copy.deepcopy(EXPERIMENT)
        content["task"] |= task
        content["network"]["args"]["spatial_dims"] = dim
        return Experiment.model_validate(content)

    return make


@pytest.fixture
def sites(stores, experiment):
    """Return an experiment and the sites' data."""

    def make(dim=2, **task):
        found = experiment(dim, **task)
        return found, read_sites(stores(dim), found)

    return make
