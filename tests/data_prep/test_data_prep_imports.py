import ast
from pathlib import Path

from data_prep import site_store

ROOMS = sorted(Path(site_store.__file__).parent.rglob("*.py"))


def imported_at_module_level(file):
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]


def test_data_prep_knows_nothing_of_training_or_of_nvflare():
    names = {name for file in ROOMS for name in imported_at_module_level(file)}
    assert "numpy" in names
    assert not names & {"fedbn", "nvflare", "torch", "monai"}


def test_nilearn_and_scikit_learn_are_imported_where_they_are_used():
    names = {name for file in ROOMS for name in imported_at_module_level(file)}
    assert not names & {"nilearn", "sklearn", "pandas", "scipy", "nibabel", "PIL", "pydicom"}
