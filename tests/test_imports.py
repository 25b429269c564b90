"""Imports point one way, and heavy ones stay where they are used."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FEDBN = ROOT / "custom" / "fedbn"
FILES = sorted([*FEDBN.rglob("*.py"), *(ROOT / "data_prep").rglob("*.py")])

PLAIN = (
    "normalization",
    "training",
    "aggregation",
    "evaluation",
    "control_variates",
    "clusters",
)
CALLERS = (
    "site",
    "experiment",
    "settings",
    "flare",
    "report",
    "results",
    "networks",
    "site_state",
    "site_settings",
    "devices",
    "doctor",
)
SCAN_TO_CONNECTOME = ("atlas", "connectome", "quality", "sources", "timeseries")
HEAVY = (
    "nilearn",
    "matplotlib",
    "pandas",
    "monai",
    "sklearn",
    "scipy",
    "tensorboard",
    "rich",
)


def module_name(path):
    base = FEDBN.parent if path.is_relative_to(FEDBN.parent) else ROOT
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path):
    """Return the absolute names of all that a file imports, wherever in the file it does."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            name = node.args[0]
            if called in {"import_module", "__import__"} and isinstance(name, ast.Constant):
                found.add(str(name.value))
    return found


def takes(names, package):
    return sorted(name for name in names if name == package or name.startswith(f"{package}."))


def named(path):
    return str(path.relative_to(ROOT))


def test_the_reader_of_imports_sees_every_form(tmp_path, monkeypatch):
    folder = tmp_path / "custom" / "fedbn" / "flare"
    folder.mkdir(parents=True)
    monkeypatch.setitem(globals(), "FEDBN", tmp_path / "custom" / "fedbn")
    file = folder / "learner.py"
    file.write_text(
        "import a.b as c\nfrom d import e\nfrom ..site import f\nfrom . import g\n"
        "def late():\n    import h\n    importlib.import_module('i.j')\n"
    )
    expected = {"a.b", "d.e", "fedbn.site.f", "fedbn.flare.g", "h", "i.j"}
    assert expected <= imported(file)


def test_there_is_something_to_look_at():
    found = {named(path) for path in FILES}
    assert {f"custom/fedbn/{name}.py" for name in PLAIN} <= found
    assert "data_prep/site_store.py" in found


@pytest.mark.parametrize("path", FILES, ids=named)
def test_imports_point_one_way(path):
    names = imported(path)
    if path.is_relative_to(FEDBN):
        if not path.is_relative_to(FEDBN / "flare"):
            assert takes(names, "nvflare") == [], "only custom/fedbn/flare imports nvflare"
        of_data_prep = set(takes(names, "data_prep")) - {"data_prep"}
        # A model that is asked about a scan makes the connectome as the site has made its own.
        others = () if path != FEDBN / "prediction.py" else SCAN_TO_CONNECTOME
        allowed = {
            n for room in ("site_store", *others) for n in takes(of_data_prep, f"data_prep.{room}")
        }
        assert of_data_prep == allowed, (
            "fedbn reads the folder format through data_prep.site_store and nothing else"
        )
        if takes(names, "data_prep"):
            assert of_data_prep
    else:
        for package in ("fedbn", "nvflare", "torch"):
            assert takes(names, package) == [], f"data_prep knows nothing of {package}"


@pytest.mark.parametrize("name", PLAIN)
def test_the_method_imports_none_of_its_callers(name):
    names = imported(FEDBN / f"{name}.py")
    found = [taken for caller in CALLERS for taken in takes(names, f"fedbn.{caller}")]
    assert found == []


@pytest.mark.parametrize(
    ("name", "may_import"),
    [
        ("normalization", set()),
        ("aggregation", {"normalization"}),
        ("training", {"normalization"}),
        ("evaluation", {"normalization"}),
        ("control_variates", set()),
        ("clusters", set()),
    ],
)
def test_the_method_builds_on_normalization_alone(name, may_import):
    names = takes(imported(FEDBN / f"{name}.py"), "fedbn")
    modules = {taken.split(".")[1] for taken in names if "." in taken}
    assert modules <= may_import


@pytest.mark.parametrize(
    ("name", "callers"),
    [
        ("adaptation", ("unseen", "explanation", "experiment", "methods", "report", "flare")),
        ("unseen", ("report", "flare")),
        ("explanation", ("report", "flare")),
        ("attribution", ("site", "experiment", "explanation", "report", "flare")),
    ],
)
def test_what_is_built_on_a_run_imports_none_of_its_callers(name, callers):
    names = imported(FEDBN / f"{name}.py")
    assert [taken for caller in callers for taken in takes(names, f"fedbn.{caller}")] == []


def loaded_by(statement):
    code = f"import sys\n{statement}\nprint(*sorted({{n.partition('.')[0] for n in sys.modules}}))"
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return set(process.stdout.splitlines()[-1].split())


@pytest.mark.slow
def test_the_learner_starts_without_heavy_packages():
    """A FLARE client process pays for every import at each start."""
    loaded = loaded_by("import fedbn.flare.learner")
    assert {"torch", "nvflare"} <= loaded
    assert loaded.isdisjoint(HEAVY), sorted(loaded & set(HEAVY))


@pytest.mark.slow
def test_training_in_a_fresh_process_does_not_import_the_compiler():
    """The first optimiser object of PyTorch imports it, which costs 1.5 s in each FLARE task."""
    code = """
import sys, torch
from fedbn.networks import ConnectomeMLP
from fedbn.training import TrainingSettings, train_epochs
model = ConnectomeMLP(in_features=6)
for name in ("sgd", "adam", "adamw"):
    settings = TrainingSettings(optimizer=name)
    train_epochs(model, torch.randn(8, 6), torch.arange(8) % 2, settings, seed=0)
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
