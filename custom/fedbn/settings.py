"""One description of an experiment, read by every part of it.

A job folder holds one ``app/config/experiment.json``. The learner, the persistor and the aggregator
read it there, and so does the in-process federation: there is no second place for a network, a
seed or a learning rate.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedbn.normalization import Policy
from fedbn.training import TrainingSettings

EXPERIMENT_FILE = "experiment.json"


SiteName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=63)]
"""Names a folder and a FLARE client: letters, digits, ``_`` and ``-``."""


class ExperimentError(ValueError):
    """An experiment file that cannot be used; the message names the field."""


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class NetworkSettings(_Settings):
    """A network by name and arguments, as :func:`fedbn.networks.build_network` takes them."""

    name: str = "ConnectomeMLP"
    args: dict[str, Any] = Field(default_factory=dict)


class Experiment(_Settings):
    """Everything that decides the numbers of one run.

    Attributes
    ----------
    sites
        Names of the sites, in the order in which the simulator's ``site-1``, ``site-2``, … stand
        for them.
    network
        The network, described here and nowhere else.
    policy
        Which entries stay at the site: ``"fedbn"``, ``"silobn"`` or ``"none"`` (FedAvg).
    rounds
        Communication rounds.
    training
        Local training in each round.
    aggregation_weights
        ``"equal"``: every site counts the same (the FedBN paper's choice). ``"samples"``: by the
        number of training samples.
    standardization
        ``"site"``: each feature is z-scored with the mean and standard deviation of the site's own
        training samples. ``"none"``: features are used as they are stored.
    n_folds, fold
        Stratified folds by subject, within each site; ``fold`` is the one that is held out.
    seed
        Of the initial weights, the folds, the order of batches and the dropout masks.
    compare_with_alone
        Whether each site also trains the same network alone, on its own data only, with the same
        number of updates, to say what the federation gained it.
    """

    name: str = "experiment"
    sites: tuple[SiteName, ...] = ("NYU", "USM", "UM", "UCLA")
    network: NetworkSettings = NetworkSettings()
    policy: Policy = "fedbn"
    rounds: int = Field(default=50, ge=1, strict=True)
    training: TrainingSettings = TrainingSettings()
    aggregation_weights: Literal["equal", "samples"] = "equal"
    standardization: Literal["site", "none"] = "site"
    n_folds: int = Field(default=5, ge=2, strict=True)
    fold: int = Field(default=0, ge=0, strict=True)
    seed: int = Field(default=0, ge=0, lt=2**31, strict=True)
    compare_with_alone: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> Experiment:
        if self.fold >= self.n_folds:
            raise ValueError(
                f"fold is {self.fold}, but with n_folds {self.n_folds} it must be less"
            )
        if not self.sites or len(set(self.sites)) != len(self.sites):
            raise ValueError(f"sites must be distinct names, got {list(self.sites)}")
        return self

    def site_of(self, client: str) -> str:
        """Return the site that a FLARE client stands for.

        A client that is named as a site is that site; the simulator's ``site-K`` is the K-th.

        Raises
        ------
        ExperimentError
            If neither fits, with the names that do.
        """
        if client in self.sites:
            return client
        numbered = re.fullmatch(r"site-([1-9][0-9]*)", client)
        if numbered and int(numbered[1]) <= len(self.sites):
            return self.sites[int(numbered[1]) - 1]
        raise ExperimentError(
            f"client {client!r} is not a site of this job: name it one of {', '.join(self.sites)}, "
            f"or site-1 to site-{len(self.sites)} for them in this order"
        )

    def changed(self, **changes: Any) -> Experiment:
        """Return a copy with some fields changed, validated like the original."""
        return _validated({**self.model_dump(), **changes}, "the experiment")


def read_experiment(path: Path) -> Experiment:
    """Read and validate an experiment file; a job folder is accepted for its experiment.

    Raises
    ------
    ExperimentError
        One sentence: file not found, not JSON, or the first field that is wrong and why.
    """
    if path.is_dir():
        path = path / "app" / "config" / EXPERIMENT_FILE
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ExperimentError(
            f"no experiment file {path}; give a job folder or its {EXPERIMENT_FILE}"
        ) from error
    except (OSError, ValueError) as error:
        raise ExperimentError(f"cannot read experiment file {path}: {error}") from error
    return _validated(content, str(path))


def _validated(content: Any, where: str) -> Experiment:
    try:
        return Experiment.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ExperimentError(f"{where}: {field}: {first['msg']}") from error
