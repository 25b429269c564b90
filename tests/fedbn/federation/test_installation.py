from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest

from fedbn.federation import installation
from fedbn.federation.experiment import (
    EXPERIMENT_FILE,
    Experiment,
    ExperimentError,
    read_experiment,
)
from fedbn.federation.installation import (
    AT_A_SITE,
    InstallationError,
    check_packages,
    check_version,
    different_versions,
    required_packages,
    satisfies,
)


@pytest.fixture
def installed(monkeypatch):
    def set_version(version):
        monkeypatch.setattr(installation, "installed_version", lambda package="fedbn": version)

    return set_version


@pytest.mark.parametrize(
    ("version", "required", "fits"),
    [
        ("0.1.0", "", True),
        ("0.1.0", ">=0.1,<0.2", True),
        ("0.1.0", ">=0.2", False),
        ("0.2.0.dev1", ">=0.1", True),
        ("0.2.0rc1", ">=0.2", False),
        ("2.13.0+cpu", ">=2.6", True),
        ("1!1.0", "<2", False),
    ],
)
def test_versions_are_compared_as_pep_440_says(version, required, fits):
    assert satisfies(version, required) is fits


@pytest.mark.parametrize("required", [None, "", ">=0.1", "==0.1.*"])
def test_a_version_that_fits_passes(installed, required):
    installed("0.1.7")
    check_version(required)


def test_a_version_that_does_not_fit_is_refused_with_both(installed):
    installed("0.1.7")
    with pytest.raises(InstallationError) as caught:
        check_version(">=0.2,<0.3")
    assert str(caught.value).startswith(
        "the job needs fedbn >=0.2,<0.3, but fedbn 0.1.7 is installed here; "
    )
    assert 'pip install "fedbn>=0.2,<0.3"' in str(caught.value)


def test_a_fedbn_of_no_known_version_is_refused_where_one_is_needed(installed):
    installed(None)
    check_version(None)
    with pytest.raises(InstallationError, match="fedbn is not installed as a package here"):
        check_version(">=0.1")


def test_an_experiment_states_the_version_that_it_needs(tmp_path, installed):
    installed("0.1.7")
    path = tmp_path / EXPERIMENT_FILE
    path.write_text(json.dumps({"fedbn_version": ">=0.1,<0.2"}))
    assert read_experiment(path).fedbn_version == ">=0.1,<0.2"
    assert Experiment().fedbn_version is None
    path.write_text(json.dumps({"fedbn_version": ">=0.2", "a_field_of_0.2": 1}))
    with pytest.raises(InstallationError, match=r"needs fedbn >=0\.2, but fedbn 0\.1\.7"):
        read_experiment(path)


@pytest.mark.parametrize("value", ["0.1", "newest", ">=", 1])
def test_what_is_no_specifier_is_refused(tmp_path, value):
    path = tmp_path / EXPERIMENT_FILE
    path.write_text(json.dumps({"fedbn_version": value}))
    with pytest.raises(ExperimentError, match=r"experiment\.json: fedbn_version: "):
        read_experiment(path)


def test_packages_are_looked_for_and_not_imported(monkeypatch):
    check_packages()
    monkeypatch.delitem(sys.modules, "wsgiref", raising=False)
    check_packages({"wsgiref": "wsgiref"})
    assert "wsgiref" not in sys.modules


def test_missing_packages_are_named_together():
    with pytest.raises(InstallationError) as caught:
        check_packages({"numpy": "numpy", "no_such_module": "no-such", "no.such.child": "child"})
    assert str(caught.value) == (
        "missing in this site's Python: no-such, child; install it where FLARE runs "
        "(pip install no-such child)"
    )


def test_what_fedbn_needs_is_in_its_own_metadata():
    found = {package.name: package for package in required_packages()}
    assert {"torch", "nvflare", "pydantic"} <= set(found)
    assert "pytest" not in found, "an extra is no need"
    assert found["torch"].installed == importlib.metadata.version("torch")
    assert all(package.fits for package in found.values())


@pytest.mark.parametrize("package", AT_A_SITE.values())
def test_what_is_looked_for_at_a_site_is_what_is_installed_with_fedbn(package):
    declared = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert f'"{package}>=' in declared


def test_a_package_that_is_too_old_or_missing_does_not_fit(monkeypatch):
    lines = ["torch>=99", "no-such-package>=1", "numpy>=1", 'tomli; python_version < "3"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    fits = {package.name: package.fits for package in required_packages()}
    assert fits == {"torch": False, "no-such-package": False, "numpy": True}


def test_differences_between_two_machines_are_words():
    here = {"python": "3.11.2", "torch": "2.7.1", "numpy": "2.1"}
    assert different_versions(here, dict(here)) == []
    assert different_versions(here, {"torch": "2.6.0", "python": "3.11.2", "x": "1"}) == [
        "torch 2.6.0 (here 2.7.1)"
    ]
