import csv
import os
from pathlib import Path

import numpy as np
import pytest

from data_prep.harvard_oxford import ROIS
from data_prep.site_store import Participant, write_site_store
from data_prep.sources import ABIDE_SITES, PHENOTYPIC, PHENOTYPIC_COLUMNS, SUFFIX

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def rng():
    return np.random.default_rng(20)


@pytest.fixture(scope="session")
def abide_source():
    named = os.environ.get("FEDBN_TEST_ABIDE")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "data" / "abide"
    if not (folder / "ABIDE_pcp" / PHENOTYPIC).is_file():
        pytest.skip(f"no ABIDE at {folder}; set FEDBN_TEST_ABIDE to a nilearn data folder")
    return folder


SMALL_ROIS = tuple((str(i), f"region {i}") for i in (10, 20, 30, 40))
SMALL_SETTINGS = {
    "kind": "correlation",
    "estimator": "pearson",
    "window": 8,
    "stride": 4,
    "negative": "keep",
}


@pytest.fixture
def make_store(tmp_path):
    """Write a store of a few made-up rows; keyword arguments change single parts."""

    def make(site="NYU", *, folder=None, n=6, rois=SMALL_ROIS, values=None, **changes):
        participants = [
            Participant(
                f"sub-{site}{i}", ("autism", "control")[i % 2], 10.5 + i, "M", site, 16, 1 + i % 2
            )
            for i in range(n)
        ]
        starts = [[0, 4][: p.n_windows] for p in participants]
        n_samples, n_edges = sum(map(len, starts)), len(rois) * (len(rois) - 1) // 2
        if values is None:
            values = np.arange(n_samples * n_edges, dtype=np.float32).reshape(n_samples, n_edges)
        description = {
            "atlas": "small",
            "synthetic": False,
            "connectome": SMALL_SETTINGS | changes.pop("connectome", {}),
        } | changes
        return write_site_store(
            folder or tmp_path / "stores" / site,
            site=site,
            participants=participants,
            rois=rois,
            window_starts=starts,
            connectomes=values,
            description=description,
        )

    return make


def scan_text(series, ids=tuple(i for i, _ in ROIS)):
    lines = ["\t".join(f"#{i}" for i in ids)]
    lines += ["\t".join(f"{value:.6f}" for value in row) for row in series]
    return "".join(line + "\r\n" for line in lines)


class SmallAbide:
    """A folder as nilearn leaves it, with a few made-up subjects at each of the four sites."""

    def __init__(self, root, rng, n_subjects=6, n_timepoints=40):
        self.root = root
        self.folder = root / "ABIDE_pcp"
        self.scans = self.folder / "cpac" / "filt_noglobal"
        self.scans.mkdir(parents=True)
        self.rows = []
        number = 50000
        for site in ABIDE_SITES.values():
            for k in range(n_subjects):
                number += 1
                self.rows.append(self.row(number, site, DX_GROUP=str(1 + k % 2)))
                series = rng.standard_normal((n_timepoints, len(ROIS))) * 10
                self.scan(number, site).write_text(scan_text(series))
        self.write_rows()

    def row(self, number, site, **changes):
        row = dict.fromkeys(PHENOTYPIC_COLUMNS, "OK")
        row |= {
            "SUB_ID": str(number),
            "SITE_ID": site,
            "FILE_ID": f"{site}_{number:07d}",
            "DX_GROUP": "1",
            "AGE_AT_SCAN": "12.5",
            "SEX": "2",
        }
        return row | changes

    def scan(self, number, site):
        return self.scans / f"{site}_{number:07d}{SUFFIX}"

    def write_rows(self):
        with (self.folder / PHENOTYPIC).open("w", newline="") as stream:
            writer = csv.DictWriter(stream, PHENOTYPIC_COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)


@pytest.fixture
def small_abide(tmp_path, rng):
    return SmallAbide(tmp_path / "source", rng)
