"""Imports point one way, and heavy ones stay where they are used."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FEDBN = ROOT / "custom" / "fedbn"
FILES = sorted([*FEDBN.rglob("*.py"), *(ROOT / "data_prep").rglob("*.py")])

ROOMS = {
    "core": set(),
    "tasks": {"core"},
    "federation": {"core", "tasks"},
    "models": {"core", "tasks", "federation"},
    "study": {"core", "tasks", "federation", "models"},
    "report": {"core", "tasks", "federation", "models", "study"},
    "flare": {"core", "tasks", "federation", "models", "report"},
    "cli": {"core", "tasks", "federation", "models", "study", "report", "flare"},
}
"""Room to the rooms that it may import beside itself."""

OF_PREPARATION = {"tasks": ("data_prep",), "cli": ("data_prep.files", "data_prep.terminal")}
"""Room to what it may import of data preparation; every other room its files alone."""

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


def room_of(module):
    parts = module.split(".")
    return parts[1] if parts[0] == "fedbn" and len(parts) > 1 else ""


def wrong_imports(path):
    """Name what a file of a room imports although its room may not."""
    room, names = room_of(module_name(path)), imported(path)
    allowed = {"", room, *ROOMS[room]}
    rooms = {name for name in names if room_of(name) in ROOMS and room_of(name) not in allowed}
    prepared = OF_PREPARATION.get(room, ("data_prep.files",))
    for name in takes(names, "data_prep"):
        if not any(takes([name], package) for package in prepared):
            rooms.add(name)
    return sorted(rooms | (set(takes(names, "nvflare")) if room != "flare" else set()))


@pytest.mark.parametrize("path", FILES, ids=named)
def test_imports_point_downwards(path):
    if path.is_relative_to(ROOT / "data_prep"):
        names = imported(path)
        assert [n for package in ("fedbn", "nvflare", "torch") for n in takes(names, package)] == []
    elif room_of(module_name(path)) in ROOMS:
        assert wrong_imports(path) == []
    else:
        assert path.parent == FEDBN, f"{named(path)} is in no room of the table"


def test_an_import_that_points_upwards_is_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "FEDBN", tmp_path / "fedbn")
    file = tmp_path / "fedbn" / "core" / "training.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "from data_prep.files import lock\nimport data_prep.site_store\n"
        "def late():\n    from ..federation import site\n    import nvflare.apis\n"
    )
    rooms = ["fedbn.federation", "fedbn.federation.site", "nvflare.apis"]
    assert wrong_imports(file) == ["data_prep.site_store", *rooms]


def test_no_module_imports_itself_round_a_circle():
    modules = {module_name(path): path for path in FILES}
    needs = {
        name: {n for n in imported(path) if n in modules and n != name}
        for name, path in modules.items()
    }
    while leaves := [name for name, wanted in needs.items() if not wanted & needs.keys()]:
        for name in leaves:
            del needs[name]
    assert sorted(needs) == []


OF_ONE_TASK = re.compile(r"autism|connectome|\bedges?\b|\broi|\bwindow", re.IGNORECASE)
NAMED = {
    "core/networks.py": '"ConnectomeMLP": ',  # the table of short names
    "federation/experiment.py": "_NETWORK_0_1 = ",  # what version 0.1 took for granted
    "study/records.py": "window_",  # names in a file that version 0.1 wrote
}


@pytest.mark.parametrize("room", ["core", "federation", "models", "study", "flare"])
def test_generic_rooms_know_no_word_of_one_task(room):
    found = []
    for path in sorted((FEDBN / room).rglob("*.py")):
        allowed = NAMED.get(path.relative_to(FEDBN).as_posix())
        for line in path.read_text(encoding="utf-8").splitlines():
            if OF_ONE_TASK.search(line) and not (allowed and allowed in line):
                found.append(f"{named(path)}: {line.strip()}")
    assert found == []


def defined_in(path):
    """Return the names that a module has at its top level, and those of a package's modules."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    if path.name == "__init__.py":
        names |= {one.stem for one in path.parent.iterdir()}
    return names


@pytest.mark.parametrize("path", [*FILES, *sorted((ROOT / "benchmarks").glob("*.py"))], ids=named)
def test_what_is_imported_is_there(path):
    """An import inside of a function would otherwise fail only when somebody gets there."""
    modules = {module_name(file): file for file in FILES}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in (
            "fedbn",
            "data_prep",
        ):
            assert node.module in modules
            missing = {alias.name for alias in node.names} - defined_in(modules[node.module])
            assert missing == set(), node.module


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
from fedbn.core.batches import TensorSamples
from fedbn.core.training import TrainingSettings, train_epochs
from fedbn.tasks.connectome.network import ConnectomeMLP
from fedbn.tasks.connectome.task import ConnectomeTask
model = ConnectomeMLP(in_features=6)
samples = TensorSamples(torch.randn(8, 6), torch.arange(8) % 2)
for name in ("sgd", "adam", "adamw"):
    settings = TrainingSettings(optimizer=name)
    loss = ConnectomeTask().criterion(settings, samples)
    train_epochs(model, samples, settings, seed=0, loss=loss)
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
