"""Small made-up sites, for every test that needs data to train on."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from data_prep.site_store import Participant, write_site_store
from fedbn.federation.experiment import EXPERIMENT_FILE, Experiment

SHELL = (
    "COLUMNS",
    "FEDBN_DATA",
    "FORCE_COLOR",
    "NO_COLOR",
    "PYTHONIOENCODING",
    "PYTHONUTF8",
    "XDG_",
)
N_ROIS = 12
N_EDGES = N_ROIS * (N_ROIS - 1) // 2
SIGNAL = np.random.default_rng(3).standard_normal(N_EDGES)


def write_small_store(
    folder,
    site,
    *,
    n_subjects=20,
    n_windows=3,
    diagnoses=("autism", "control"),
    folds=None,
    n_rois=N_ROIS,
    changes=None,
    edit=None,
    **description,
):
    """Write a store whose classes differ, with a gain and an offset that are the site's own."""
    rng = np.random.default_rng(zlib.crc32(site.encode()))
    participants = [
        Participant(
            participant_id=f"sub-{site}{k:02d}",
            diagnosis=diagnoses[k % len(diagnoses)],
            age=10.0 + k,
            sex="FM"[k % 2],
            site=site,
            n_timepoints=60,
            n_windows=n_windows,
            fold=None if folds is None else k // len(diagnoses) % folds,
        )
        for k in range(n_subjects)
    ]
    n_edges = n_rois * (n_rois - 1) // 2
    is_autism = np.repeat([p.diagnosis == "autism" for p in participants], n_windows)
    signal = SIGNAL[:n_edges] if n_edges <= N_EDGES else np.resize(SIGNAL, n_edges)
    values = rng.standard_normal((n_subjects * n_windows, n_edges))
    values += 0.12 * np.where(is_autism, 1, -1)[:, None] * signal
    values = values * rng.uniform(0.5, 2) + rng.standard_normal(n_edges)
    if edit is not None:
        edit(values, participants)
    settings = {
        "kind": "correlation",
        "estimator": "pearson",
        "window": 20,
        "stride": 20,
        "negative": "keep",
    }
    return write_site_store(
        folder,
        site=site,
        participants=participants,
        rois=[(str(10 + k), f"region {k}") for k in range(n_rois)],
        window_starts=[[20 * w for w in range(n_windows)]] * n_subjects,
        connectomes=values.astype(np.float32),
        description={
            "atlas": "twelve regions",
            "synthetic": False,
            "connectome": settings | (changes or {}),
        }
        | description,
    )


def small_experiment(**changes):
    """Describe a quick experiment on the stores above."""
    settings = {
        "name": "small",
        "sites": ("NYU", "UM"),
        "network": {"args": {"in_features": N_EDGES, "hidden": [8]}},
        "rounds": 2,
        "training": {"batch_size": 16, "local_epochs": 2, "learning_rate": 0.01},
        "n_folds": 4,
        "seed": 5,
        "compare_with_alone": False,
    }
    return Experiment(**{**settings, **changes})


@pytest.fixture(scope="session")
def experiment():
    return small_experiment


@pytest.fixture(scope="session")
def write_store():
    return write_small_store


@pytest.fixture
def data_root(tmp_path):
    """A data root with a small store for NYU and one, of another size, for UM."""
    root = tmp_path / "data"
    write_small_store(root / "NYU", "NYU")
    write_small_store(root / "UM", "UM", n_subjects=16)
    return root


@pytest.fixture(scope="session")
def write_experiment():
    def write(folder, experiment):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / EXPERIMENT_FILE).write_text(json.dumps(experiment.model_dump(mode="json")))

    return write


def pytest_configure(config):
    """Let no test depend on the shell that starts it, nor leave anything in the user's home.

    The shell's proxies, encoding, locale, time zone, width, mask for new files, and whether the
    environment is activated or the processes run in the background, where Ctrl-C is ignored.
    """
    home = tempfile.TemporaryDirectory(prefix="fedbn-home-")
    config.add_cleanup(home.cleanup)
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith(("LC_", *SHELL)):
            del os.environ[name]
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    os.environ |= {"HOME": home.name, "LANG": "C.UTF-8", "PATH": os.pathsep.join(path), "TZ": "UTC"}
    time.tzset()
    os.umask(0o022)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def together(nodeid):
    """Name the tests that one process has to run one after another: a file's, or several files'.

    Those of a group share processes that take long to start.
    """
    file = nodeid.partition("::")[0]
    name = file.rpartition("/")[2].removeprefix("test_").removesuffix(".py")
    if "end_to_end/" not in file:
        return file
    if name.startswith("deployment"):
        return "deployment"
    return "simulator" if name in ("parity", "messages", "bundles", "models") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Hand tests to several processes by what they share; xdist's own groups need older pytest."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return together(nodeid)

    config.option.loadscopereorder = False
    return Together(config, log)


def pytest_collection_modifyitems(items):
    """In several processes the longest tests begin first, so that none is left over at the end."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        first = ("simulator", "deployment")
        items.sort(
            key=lambda item: (
                first.index(group) if (group := together(item.nodeid)) in first else len(first),
                "end_to_end/" not in item.nodeid,
            )
        )
