import copy
import csv
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_prep.abide import ABIDE_SITES, DEFAULT_SITES, PHENOTYPIC, PHENOTYPIC_COLUMNS, SUFFIX
from data_prep.harvard_oxford import ROIS
from data_prep.site_store import Participant, write_site_store

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


def shared_folder(variable, name, marker):
    """Return a folder of real files, or skip the test that asks for it."""
    named = os.environ.get(variable)
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "data" / name
    if not (folder / marker).is_file():
        pytest.skip(f"no {marker} in {folder}; set {variable} to a folder that has it")
    return folder


@pytest.fixture(scope="session")
def atlas_folder():
    return shared_folder("FEDBN_TEST_ATLASES", "atlases", "AAL3_1mm.nii.gz")


@pytest.fixture(scope="session")
def heart_source():
    return shared_folder("FEDBN_TEST_HEART", "heart_disease", "processed.cleveland.data")


@pytest.fixture(scope="session")
def scan_folder():
    return shared_folder("FEDBN_TEST_NIFTI", "fmri_nifti_tests", "functional.nii")


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
    line = "\t".join(["%.6f"] * len(ids))
    lines += [line % tuple(row) for row in series.tolist()]
    return "".join(line + "\r\n" for line in lines)


class SmallAbide:
    """A folder as nilearn leaves it, with a few made-up subjects at each of the four sites."""

    def __init__(self, root, rng, n_subjects=6, n_timepoints=40, sites=DEFAULT_SITES, first=50000):
        self.root = root
        self.folder = root / "ABIDE_pcp"
        self.scans = self.folder / "cpac" / "filt_noglobal"
        self.scans.mkdir(parents=True)
        self.rows = []
        number = first
        for site in map(ABIDE_SITES.get, sites):
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

    def copy(self, root):
        """Return the same folder at another place, for a test to change."""
        shutil.copytree(self.root, root)
        other = copy.copy(self)
        other.rows = [dict(row) for row in self.rows]
        other.root, other.folder = root, root / "ABIDE_pcp"
        other.scans = other.folder / "cpac" / "filt_noglobal"
        return other


@pytest.fixture
def small_abide_class():
    return SmallAbide


@pytest.fixture(scope="session")
def written_abide(tmp_path_factory):
    return SmallAbide(tmp_path_factory.mktemp("abide") / "source", np.random.default_rng(20))


@pytest.fixture
def small_abide(written_abide, tmp_path):
    return written_abide.copy(tmp_path / "source")


def save_scan(file, data, *, tr=2.0, unit="sec", voxel=3.0, origin=(0.0, 0.0, 0.0), code=1):
    """Write a small NIfTI image; three-dimensional data have no repetition time."""
    import nibabel

    affine = np.diag([voxel, voxel, voxel, 1.0])
    affine[:3, 3] = origin
    image = nibabel.Nifti1Image(data, affine)
    if data.ndim == 4:
        image.header["pixdim"][4] = tr
    image.header.set_xyzt_units("mm", unit)
    image.set_sform(affine, code)
    image.set_qform(affine, code)
    file.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(image, file)
    return file


@pytest.fixture(scope="session")
def write_scan():
    return save_scan


class SmallHospital:
    """A BIDS folder of tiny scans on a grid of 6 x 6 x 2 voxels, with an atlas of nine blocks."""

    n_rois = 9

    def __init__(self, root, rng, n_subjects=4, n_volumes=50):
        self.root = root
        self.rng = rng
        self.n_volumes = n_volumes
        self.atlas = save_scan(root / "atlas" / "blocks.nii.gz", self.labels())
        self.names = {i: f"region {i}" for i in range(1, self.n_rois + 1)}
        self.table = root / "atlas" / "blocks.tsv"
        self.write_table()
        self.rows = []
        for k in range(1, n_subjects + 1):
            self.add(f"{k:02d}")
        self.write_rows()

    @staticmethod
    def labels():
        blocks = np.arange(1, 10, dtype=np.int16).reshape(3, 3)
        return np.repeat(blocks.repeat(2, 0).repeat(2, 1)[..., np.newaxis], 2, axis=2)

    def write_table(self):
        lines = [f"{i}\t{name}" for i, name in self.names.items()]
        self.table.write_text("\n".join(["index\tname", *lines]) + "\n")

    def data(self, n_volumes=None):
        shape = (6, 6, 2, n_volumes or self.n_volumes)
        return (1000 + 10 * self.rng.standard_normal(shape)).astype(np.float32)

    def scan(self, label, extra="task-rest"):
        name = f"sub-{label}_{extra}_bold.nii.gz"
        return self.root / "bids" / f"sub-{label}" / "func" / name

    def add(self, label, *, row=True, **changes):
        save_scan(self.scan(label), self.data(), **changes)
        if row:
            diagnosis = ("autism", "control")[len(self.rows) % 2]
            self.rows.append([f"sub-{label}", diagnosis, "12.5", "F"])

    def write_rows(self, header=("participant_id", "diagnosis", "age", "sex")):
        self.participants = self.root / "bids" / "participants.tsv"
        lines = ["\t".join(row) for row in (header, *self.rows)]
        self.participants.write_text("\n".join(lines) + "\n")

    def arguments(self):
        return (
            *("--images", f"{self.root}/bids/sub-*/func/*_bold.nii.gz", "--atlas", self.atlas),
            *("--labels", self.table, "--participants", self.participants, "--site", "HOSP"),
        )


@pytest.fixture
def hospital(tmp_path, rng):
    return SmallHospital(tmp_path / "hospital", rng)


@pytest.fixture
def call(monkeypatch):
    """Run a command; the tables are wide enough not to break a line."""
    from typer.testing import CliRunner

    from data_prep import __main__ as cli

    monkeypatch.setattr(cli.screen, "width", 200)

    def run(*arguments, code=0):
        result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        return result

    return run
