"""What a hospital decides for itself, in one file of its FLARE kit that no job can override.

``local/fedbn_site.yml`` belongs to the site: provisioning does not sign it, and no job is given it.
Every field is optional, and without the file a site does what the job says.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedbn.federation.experiment import ClassPath, SiteName
from fedbn.federation.settings_file import RepeatedFieldError, fault, parse_yaml
from fedbn.tasks.loading import Amp, Cache

SITE_SETTINGS_FILE = "fedbn_site.yml"
"""Name of the file, in the folder ``local`` of a site's FLARE kit."""

NETWORKS_VARIABLE = "FEDBN_ALLOW_NETWORKS"
"""Environment variable with further network classes, with commas, for FLARE's simulator."""

TASKS_VARIABLE = "FEDBN_ALLOW_TASKS"
"""The same for the classes of tasks."""


T = TypeVar("T")

_WHAT_TO_DO = {
    "site": "give the site's name in letters, digits, '_' and '-', in quotes if YAML reads it as "
    "something else (NO, 007)",
    "data": "give the folder of this site's own store, absolute or from '~/'",
    "device": "give auto, cpu, cuda or cuda:N (such as cuda:1)",
    "cpu_threads": "give a whole number of at least 1, or null for PyTorch's own choice",
    "cache": "give memory, disk or none",
    "workers": "give a whole number of at least 0",
    "amp": "give off or bf16",
    "share_affine": "give true or false",
    "allow_networks": "give a list of classes, each as package.module.Class",
    "allow_tasks": "give a list of classes, each as package.module.Class",
}


class SiteSettingsError(ValueError):
    """A site's settings file that cannot be used; the message names the file and the field."""


class SiteSettings(BaseModel):
    """A site's own settings.

    Attributes
    ----------
    site
        Name of the site, to find a kit that was installed at the wrong place; it must be the name
        of the FLARE client or of the site that the client stands for.
    data
        Folder of this site's own store (not of all stores). It replaces the job's data root and the
        environment's.
    device
        ``"auto"`` (the first CUDA device that this process sees, else the CPU), ``"cpu"``,
        ``"cuda"`` (the first one, and no CPU in its place) or ``"cuda:N"``, N counted from 0 among
        the devices that ``CUDA_VISIBLE_DEVICES`` leaves.
    cpu_threads
        CPU threads for PyTorch; ``None`` leaves PyTorch's own choice.
    cache
        Where images are kept after preprocessing: ``"memory"``, ``"disk"`` (below the client's
        workspace) or ``"none"``.
    workers
        Processes that augment images ahead of the training. No number depends on them.
    amp
        ``"bf16"``: networks on images compute in bfloat16 where PyTorch holds that safe.
    share_affine
        Whether this site's gamma and beta may be shared to start new hospitals from. Its running
        statistics never are.
    allow_networks
        Classes of installed packages that a job's network may be, as ``package.module.Class``,
        besides MONAI's and fedbn's own.
    allow_tasks
        Classes of installed packages that a job's task may be, in the same form, besides fedbn's
        own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    site: SiteName | None = None
    data: str | None = Field(default=None, min_length=1)
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:(0|[1-9][0-9]*))?)$")
    cpu_threads: int | None = Field(default=None, ge=1)
    cache: Cache = "disk"
    workers: int = Field(default=0, ge=0)
    amp: Amp = "off"
    share_affine: bool = False
    allow_networks: list[ClassPath] = []
    allow_tasks: list[ClassPath] = []

    @field_validator("amp", mode="before")
    @classmethod
    def _off_without_quotes(cls, amp: Any) -> Any:
        return "off" if amp is False else amp  # YAML 1.1 reads a bare off as false

    @field_validator("data")
    @classmethod
    def _one_place(cls, data: str | None) -> str | None:
        if data is not None and not _expanded(data).is_absolute():
            raise ValueError("a relative folder means another place in each of FLARE's processes")
        return data

    @property
    def store(self) -> Path | None:
        """Folder of the site's store; ``None`` if the file names none."""
        return None if self.data is None else _expanded(self.data)

    def stated(self, field: str, otherwise: T) -> T:
        """Return what the file says for a field, and what the job says where the file is silent."""
        value: T = getattr(self, field) if field in self.model_fields_set else otherwise
        return value

    @property
    def networks(self) -> list[str]:
        """Classes that a job's network may be here: the file's, and the environment's."""
        return [*self.allow_networks, *_listed(NETWORKS_VARIABLE)]

    @property
    def tasks(self) -> list[str]:
        """Classes that a job's task may be here: the file's, and the environment's."""
        return [*self.allow_tasks, *_listed(TASKS_VARIABLE)]

    def check_site(self, client: str, site: str) -> None:
        """Refuse to work for another site than the file was written for.

        Parameters
        ----------
        client
            Name of the FLARE client.
        site
            Site of the experiment that the client stands for.

        Raises
        ------
        SiteSettingsError
            If the file names a site that is neither.
        """
        if self.site is not None and self.site not in (client, site):
            raise SiteSettingsError(
                f"local/{SITE_SETTINGS_FILE}: site: it says {self.site!r}, but this client is "
                f"{client!r} and stands for site {site!r}; correct the file, or install the "
                "startup kit of the right site"
            )


def read_site_settings(path: Path) -> SiteSettings:
    """Read and validate a site's settings; no file means no settings.

    Messages name the last two parts of the path, and quote nothing that the file says but names of
    fields and sites, because they travel to the server.

    Raises
    ------
    SiteSettingsError
        One sentence: a file that cannot be read, is not YAML, or the first field that is wrong.
    """
    import yaml

    where = "/".join(path.parts[-2:])
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return SiteSettings()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise SiteSettingsError(
            f"{where}: it cannot be read ({reason}); make it readable for the user who starts FLARE"
        ) from error
    try:
        content = parse_yaml(text)
    except RepeatedFieldError as error:
        raise SiteSettingsError(f"{where}: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f" (line {mark.line + 1})"
        raise SiteSettingsError(
            f"{where}: it is not valid YAML{line}; write one 'field: value' a line, without tabs"
        ) from error
    return _validated({} if content is None else content, where)


def _validated(content: Any, where: str) -> SiteSettings:
    if not isinstance(content, dict):
        raise SiteSettingsError(f"{where}: it holds no fields; write one 'field: value' a line")
    for field, value in content.items():
        if value is None and field != "cpu_threads" and field in SiteSettings.model_fields:
            raise SiteSettingsError(
                f"{where}: {field}: it has no value; {_WHAT_TO_DO[field]}, or leave the line out"
            )
    try:
        return SiteSettings.model_validate(content)
    except ValidationError as error:
        sentence = fault(error, content, SiteSettings, _WHAT_TO_DO)
        raise SiteSettingsError(f"{where}: {sentence}") from error


def _listed(variable: str) -> list[str]:
    return list(filter(None, map(str.strip, os.environ.get(variable, "").split(","))))


def _expanded(folder: str) -> Path:
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:  # "~nobody": no such user, or no home for this one
        raise ValueError("its '~' stands for no home folder here") from error
