"""Made-up folders of the form in which the paper's image sets are passed round."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest
from PIL import Image

from data_prep.paper import sources


@pytest.fixture
def digits(tmp_path):
    """All five domains, of the sizes and forms in which they are passed round."""
    rng = np.random.default_rng(0)

    def pixels(*shape):
        return rng.integers(256, size=shape, dtype=np.uint8)

    def save(name, **arrays):
        np.savez(tmp_path / f"{name}.npz", **arrays)

    y = np.arange(60, dtype=np.uint8) % 10
    for name, size in (("mnist", 28), ("usps", 16)):
        train, test = pixels(40, size, size), pixels(20, size, size)
        save(name, x_train=train, y_train=y[:40], x_test=test, y_test=y[:20])
    extra = {"x_extra": pixels(10, 32, 32, 3), "y_extra": y[:10]}
    save("svhn", x=pixels(60, 32, 32, 3), y=y, house=np.arange(60) // 2 + 1, **extra)
    for name in ("mnist_m", "synth_standin"):
        save(name, x=pixels(60, 32, 32, 3), y=y)
    return tmp_path


def write_picture(place, value, mode="RGB", size=(20, 12)):
    place.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(place)


@pytest.fixture(scope="session")
def picture():
    return write_picture


@pytest.fixture
def office(tmp_path):
    """Two domains in folders, two in zip files, as collections pass them round."""
    names = [n.replace("_", "").removesuffix("computer") for n in sources.OFFICE_CLASSES]
    for domain in ("amazon", "caltech10", "dslr", "webcam"):
        for k, name in enumerate(names if domain != "webcam" else sources.OFFICE_CLASSES):
            for n in range(6):
                write_picture(tmp_path / domain / name / f"frame_{n}.png", (10 * k, n, 0))
        (tmp_path / domain / "projector" / "notes.txt").write_text("no picture")
    write_picture(tmp_path / "dslr" / "bookcase" / "frame_0.png", (1, 2, 3))  # of Office-31
    for domain in ("caltech10", "dslr"):
        with zipfile.ZipFile(tmp_path / f"images_{domain}.zip", "w") as archive:
            for file in sorted((tmp_path / domain).rglob("*.*")):
                archive.write(file, file.relative_to(tmp_path))
                file.unlink()
            for folder in sorted((tmp_path / domain).iterdir()):
                folder.rmdir()
            (tmp_path / domain).rmdir()
    return tmp_path


@pytest.fixture
def domainnet(tmp_path):
    """Four training and one test picture a class, in lists that are sorted by class."""
    for domain in sources.DOMAINNET_DOMAINS:
        lists = {"train": [], "test": []}
        for k, name in enumerate(("aircraft_carrier", *sources.DOMAINNET_CLASSES, "zigzag")):
            for n in range(5):
                path = f"{domain}/{name}/{domain}_{k:03} {n}.jpg"  # a blank in a name
                write_picture(tmp_path / path, (20 * k, 50 * n, 0))
                lists["train" if n < 4 else "test"].append(f"{path} {k}")
        for part, lines in lists.items():
            (tmp_path / f"{domain}_{part}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path
