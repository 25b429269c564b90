"""What is installed on this machine, and whether it is what a job needs.

Everything here reads metadata alone: nothing that is looked for is imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

NOT_INSTALLED = "not installed"

AT_A_SITE = {"sklearn": "scikit-learn", "scipy": "scipy", "monai": "monai"}
"""Modules that a site imports only in the course of a job: module to package."""


class InstallationError(RuntimeError):
    """A package that is missing or of a version that a job does not take."""


@dataclass(frozen=True)
class Package:
    """A package that fedbn depends on.

    Attributes
    ----------
    name
        As in the package registry.
    required
        The versions that fedbn takes (PEP 440), ``""`` for any.
    installed
        The version that is there, or ``None``.
    """

    name: str
    required: str
    installed: str | None

    @property
    def fits(self) -> bool:
        """Whether it is there, in a version that fedbn takes."""
        return self.installed is not None and satisfies(self.installed, self.required)


def installed_version(package: str = "fedbn") -> str | None:
    """Return the version of a package that is installed here, ``None`` without one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_specifier(text: str) -> bool:
    """Return whether a text is a PEP 440 specifier set such as ``">=0.1,<0.2"``."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        return False
    return True


def satisfies(version: str, required: str) -> bool:
    """Return whether a version is in a PEP 440 specifier set; a pre-release counts as itself."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(required).contains(version, prereleases=True)


def check_version(required: str | None) -> None:
    """Refuse a job that needs another fedbn than the installed one.

    Parameters
    ----------
    required
        PEP 440 specifier set such as ``">=0.1,<0.2"``; ``None`` takes any version.

    Raises
    ------
    InstallationError
        With both versions.
    """
    installed = installed_version()
    if required is None or (installed is not None and satisfies(installed, required)):
        return
    there = f"fedbn {installed} is installed here"
    if installed is None:
        there = "fedbn is not installed as a package here, so its version is not known"
    raise InstallationError(
        f"the job needs fedbn {required}, but {there}; install a version that fits "
        f'(pip install "fedbn{required}") or ask the lead for a job of this version'
    )


def check_packages(modules: Mapping[str, str] = AT_A_SITE) -> None:
    """Find out before round 0, not after the last, that a package is missing; none is imported.

    Raises
    ------
    InstallationError
        Naming every package that is missing.
    """
    missing = [package for module, package in modules.items() if not _is_there(module)]
    if missing:
        raise InstallationError(
            f"missing in this site's Python: {', '.join(missing)}; install it where FLARE runs "
            f"(pip install {' '.join(missing)})"
        )


def missing_package(error: ModuleNotFoundError) -> str:
    """Return the sentence for a module that a task wanted to import and did not find."""
    package = AT_A_SITE.get((error.name or "").partition(".")[0], error.name)
    return (
        f"missing in this site's Python: {package}; install it where FLARE runs "
        f"(pip install {package})"
    )


def required_packages(package: str = "fedbn") -> list[Package]:
    """Return what an installed package says that it needs, apart from its extras.

    Raises
    ------
    InstallationError
        If the package itself is not installed.
    """
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise InstallationError(
            f"{package} is not installed as a package; install it with pip"
        ) from error
    needed = [Requirement(line) for line in lines]
    return [
        Package(each.name, str(each.specifier), installed_version(each.name))
        for each in needed
        if each.marker is None or each.marker.evaluate({"extra": ""})
    ]


def different_versions(
    here: Mapping[str, str], there: Mapping[str, str], names: Iterable[str] | None = None
) -> list[str]:
    """Return in words where two machines differ: ``"torch 2.6.0 (here 2.7.1)"``."""
    return [
        f"{name} {there[name]} (here {here[name]})"
        for name in (here if names is None else names)
        if name in here and name in there and here[name] != there[name]
    ]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent is missing, or a broken stand-in is loaded
        return False
