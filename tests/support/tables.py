"""Small made-up tables, a csv a site, and an experiment on them."""

from __future__ import annotations

import zlib

import numpy as np

from data_prep.table_store import write_table_store
from fedbn.federation.experiment import Experiment

SITES = ("North", "South")
CLASSES = {"well": ["0"], "ill": ["1"], "worse": ["2"]}
HEADER = ("age", "pressure", "stage", "outcome")


def table_rows(site, n=40, n_classes=2):
    """Return rows as in HEADER, with missing cells; the site's scale of pressure is its own."""
    rng = np.random.default_rng(zlib.crc32(site.encode()))
    offset = rng.normal(100, 20)
    rows = []
    for k in range(n):
        label = k % n_classes
        age = 50 + 8 * label + rng.normal(0, 6)
        pressure = offset + 6 * label + rng.normal(0, 5)
        row = [f"{age:.1f}", f"{pressure:.2f}", "abc"[(label + (rng.random() < 0.4)) % 3], label]
        if k % 7 == 3:
            row[k % 3] = ("", "?", "NA")[k % 3]
        rows.append(row)
    return rows


def write_tables(root, sites=SITES, header=HEADER, **arguments):
    for site in sites:
        write_table_store(root / site, header, table_rows(site, **arguments))
    return root


def table_experiment(n_classes=2, **changes):
    settings = {
        "name": "small_table",
        "task": {
            "name": "tabular",
            "target": "outcome",
            "classes": dict(list(CLASSES.items())[:n_classes]),
            "numbers": ["age", "pressure"],
            "categories": {"stage": ["a", "b", "c"]},
        },
        "sites": SITES,
        "network": {"name": "MLP", "args": {"in_features": 5, "hidden": [6]}},
        "rounds": 3,
        "training": {"batch_size": 8, "learning_rate": 0.02},
        "n_folds": 3,
        "test_curve": True,
    }
    if n_classes > 2:
        settings["network"]["args"]["n_classes"] = n_classes
    return Experiment(**{**settings, **changes})
