"""The package that docs/own_task.md builds, as pip would install it, and data for it."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from pathlib import Path

import numpy as np

PAGE = (Path(__file__).parents[2] / "docs" / "own_task.md").read_text()
PLACE = "our_tasks.signals:SignalTask"
REFUSED = f"task 'signals' is a class that is not allowed here: {PLACE} must be listed"


def block(language):
    """Return the page's only block of a language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return found


def install(site_packages, name="our_tasks", place=PLACE, code=None):
    package, info = site_packages / name, site_packages / f"{name}-0.1.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").touch()
    (package / "signals.py").write_text(code or block("python"))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[fedbn.tasks]\nsignals = {place}\n")
    importlib.invalidate_caches()


def imported():
    return "our_tasks.signals" in sys.modules


@contextlib.contextmanager
def fresh(site_packages, monkeypatch):
    """Look for packages in a folder, none of which is imported yet; forget them afterwards."""

    def forget():
        for name in [name for name in sys.modules if name.partition(".")[0] == "our_tasks"]:
            del sys.modules[name]

    forget()
    site_packages.mkdir()
    monkeypatch.syspath_prepend(site_packages)
    monkeypatch.delenv("FEDBN_ALLOW_TASKS", raising=False)
    yield
    forget()


def allow(way, root, monkeypatch):
    """Allow the class in a workspace, in one of three ways, or not; say whether it is allowed."""
    lines = {
        "file": block("yaml"),
        "colon": f'allow_tasks: ["{PLACE}"]\n',
        "another": "allow_tasks: [our_tasks.signals.OtherTask]\n",
    }
    if way == "environment":
        monkeypatch.setenv("FEDBN_ALLOW_TASKS", f"x.Y, {PLACE.replace(':', '.')}")
    elif way in lines:
        (Path(root) / "local").mkdir(parents=True, exist_ok=True)
        (Path(root) / "local" / "fedbn_site.yml").write_text(lines[way])
    return way not in ("refused", "another")


WAYS = ("refused", "another", "file", "colon", "environment")


def write_signals(root):
    """Two channels of noise, louder in those who are ill; each site has its own gain."""
    rng = np.random.default_rng(0)
    for site, gain in (("North", 1.0), ("South", 3.0)):
        classes = np.array(["healthy", "ill"] * 12)
        noise = rng.standard_normal((24, 2, 32)) * gain
        noise[classes == "ill"] *= 2.5
        folder = root / site
        folder.mkdir(parents=True)
        ids = np.array([f"{site} patient {k}" for k in range(24)])
        np.savez(folder / "signals.npz", ids=ids, classes=classes, signals=noise)
    return root
