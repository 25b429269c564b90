import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from data_prep import __main__ as cli

REPOSITORY = Path(__file__).parents[3]


class Laboratory:
    """A folder of small RGB pictures with masks of three labels, and its Decathlon list."""

    def __init__(self, root, n_images=4, size=(12, 10)):
        self.root = root
        self.rng = np.random.default_rng(7)
        self.size = size
        self.content = {
            "name": "small",
            "labels": {"0": "background", "1": "cytoplasm", "2": "nucleus"},
            "modality": {"0": "R", "1": "G", "2": "B"},
            "training": [],
        }
        for k in range(1, n_images + 1):
            self.add(f"{k:03d}")
        self.write()

    def add(self, name, *, section="training", label=True, **extra):
        """Add an image (width, height, RGB) and its mask to files and list."""
        width, height = self.size
        self.picture(f"image/{name}.png", self.rng.integers(0, 256, (height, width, 3)))
        entry = {"image": f"image/{name}.png"}
        if label:
            mask = np.zeros((height, width))
            mask[2:8, 2:8], mask[4:6, 4:6] = 1, 2
            self.picture(f"label/{name}.png", mask)
            entry["label"] = f"label/{name}.png"
        self.content.setdefault(section, []).append(entry | extra)
        return self.content[section][-1]

    def picture(self, name, array):
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(array).astype(np.uint8)).save(file)
        return file

    def write(self):
        self.root.mkdir(parents=True, exist_ok=True)
        self.list = self.root / "dataset.json"
        self.list.write_text(json.dumps(self.content))
        return self.list

    @property
    def training(self):
        return self.content["training"]


@pytest.fixture
def laboratory(tmp_path):
    return Laboratory(tmp_path / "lab")


@pytest.fixture
def another_laboratory(tmp_path):
    def make(name, **options):
        return Laboratory(tmp_path / name, **options)

    return make


@pytest.fixture
def call(monkeypatch):
    """Run a command; the tables are wide enough not to break a line."""
    monkeypatch.setattr(cli.screen, "width", 250)

    def run(*arguments, code=0):
        result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        return result.output

    return run


@pytest.fixture
def prepare(call, laboratory, tmp_path):
    """Run ``images`` on the laboratory's list as it is then; return the output and the store."""
    from data_prep.images.store import read_image_store

    def run(*arguments, code=0, site="LAB"):
        laboratory.write()
        out = tmp_path / "out"
        output = call(
            "images", "--datalist", laboratory.list, "--site", site, "--out", out, *arguments,
            code=code,
        )  # fmt: skip
        return output, read_image_store(out / site, verify=True) if code == 0 else None

    return run


def left_out(store):
    return {entry["image"]: entry["reason"] for entry in store.description["left_out"]}


@pytest.fixture(scope="session")
def reasons():
    return left_out


@pytest.fixture(scope="session")
def image_folder():
    """Return a folder of real images, or skip the test that asks for it."""

    def find(name, marker):
        variable = "FEDBN_TEST_IMAGES"
        named = os.environ.get(variable)
        folder = Path(named) if named else REPOSITORY.parent / "shared" / "data"
        if not (folder / name / marker).exists():
            pytest.skip(f"no {name}/{marker} in {folder}; set {variable} to a folder that has it")
        return folder / name

    return find
