"""One description of an experiment, read by every part of it.

A job folder holds one ``app/config/experiment.json``. The learner, the persistor and the aggregator
read it there, and so does the in-process federation: there is no second place for a network, a
seed or a learning rate.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from fedbn.core.normalization import Policy
from fedbn.core.training import TrainingSettings
from fedbn.federation.installation import check_version, is_specifier
from fedbn.federation.settings_file import fault, read_json
from fedbn.tasks.base import Task
from fedbn.tasks.registry import TASK_0_1, make_task

EXPERIMENT_FILE = "experiment.json"


SiteName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=63)]
"""Names a folder and a FLARE client: letters, digits, ``_`` and ``-``."""


ClassPath = Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.\w+)*[.:]\w+$")]
"""Names a class: ``package.module.Class`` or ``package.module:Class``."""


JobName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=127)]
"""An id that FLARE gives to a job; it names a folder."""


_NETWORK_0_1 = {"name": "ConnectomeMLP"}
_TRAINING_0_1 = {"weight_decay": 0.05, "batch_size": 100}
_VERSION_0_1: dict[str, Any] = {
    "sites": ("NYU", "USM", "UM", "UCLA"),
    "network": {},
    "training": {},
    "test_curve": True,
}
"""What version 0.1 took for granted, which knew one task."""


class ExperimentError(ValueError):
    """An experiment file that cannot be used; the message names the field."""


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class NetworkSettings(_Settings):
    """A network by name and arguments, as :func:`fedbn.core.networks.build_network` takes them."""

    name: str
    args: dict[str, Any] = Field(default_factory=dict)


class ValidationSettings(_Settings):
    """Units that judge the rounds: neither trained on nor held out.

    Attributes
    ----------
    share
        Of each site's training units, in (0, 1), stratified.
    """

    share: float = Field(gt=0, lt=1, allow_inf_nan=False)


class AlgorithmSettings(_Settings):
    """What the server makes of the sites' weights, and what it has the sites do for that.

    Attributes
    ----------
    name
        ``"average"``: their mean goes to all sites. ``"alone"``: nothing is shared, each site
        trains for itself (SingleSet). ``"scaffold"``: the mean, and control variates that correct
        each local step (Karimireddy et al., ICML 2020). ``"clustered"``: a mean for each group of
        sites, which are cut apart where their updates disagree (Sattler et al., 2019).
    split_mean_norm, split_site_norm
        For ``"clustered"``: a group is cut in two when the norm of its mean update is below the
        first and that of some site's update above the second. Both depend on the network and the
        learning rate; each round's norms are in the results.
    """

    name: Literal["average", "alone", "scaffold", "clustered"] = "average"
    split_mean_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    split_site_norm: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _thresholds_for_clusters(self) -> AlgorithmSettings:
        given = [self.split_mean_norm is not None, self.split_site_norm is not None]
        if self.name == "clustered" and not all(given):
            raise ValueError(
                "algorithm 'clustered' needs split_mean_norm and split_site_norm: run it once with "
                "a split_site_norm that is never reached, and choose them from the norms in its "
                "results"
            )
        if self.name != "clustered" and any(given):
            raise ValueError(
                "split_mean_norm and split_site_norm are for algorithm 'clustered', "
                f"not for {self.name!r}"
            )
        return self


class FinetuneSettings(_Settings):
    """Further local epochs at each site, from the final model, with nothing sent.

    Attributes
    ----------
    epochs
        Passes over the site's training samples, with the optimiser of the experiment's training.
    entries
        ``"all"``: the whole network. ``"head"``: its last linear layer alone; everything else,
        batch norm's statistics too, stays as it is.
    """

    epochs: int = Field(default=8, ge=1, strict=True)
    entries: Literal["all", "head"] = "all"


class ContinuesSettings(_Settings):
    """Which run an experiment goes on from; ``fedbn resume`` writes it.

    Attributes
    ----------
    job
        Id of the earlier job, under which each site has kept its own batch norm.
    after_round
        The last round that the server has saved; the first one here is the next.
    earlier_jobs
        The jobs that `job` went on from, the latest first.
    workspace
        For a job of FLARE's simulator, whose jobs all have one id: its workspace folder.
    """

    job: JobName
    after_round: int = Field(ge=0, strict=True)
    earlier_jobs: tuple[JobName, ...] = ()
    workspace: str | None = None


def _task(value: Any, info: ValidationInfo) -> Task:
    return make_task(value, (info.context or {}).get("allow_tasks"))


class Experiment(_Settings):
    """Everything that decides the numbers of one run.

    Attributes
    ----------
    task
        What is learned from what, with the task's own settings.
    sites
        Names of the sites, in the order in which the simulator's ``site-1``, ``site-2``, … stand
        for them.
    network
        The network, described here and nowhere else.
    policy
        Which entries stay at the site: ``"fedbn"``, ``"silobn"`` or ``"none"`` (FedAvg).
    batch_norm_types
        Classes of the network's modules that are batch norm although none of PyTorch's, as
        ``package.module.Class``: networks with a batch norm of their own, or instance norm with
        running statistics. Everything inside such a module belongs to it.
    rounds
        Communication rounds.
    training
        Local training in each round.
    algorithm
        How the server and the sites work together; by default by averaging.
    finetune
        Further local epochs after the last round, scored beside the federated model; none if
        ``None``.
    statistics
        Batch norm's mean and variance in the model that is scored and kept at the end:
        ``"running"``, the averages of the last training, or ``"recomputed"`` by one pass over the
        site's own training samples (PreciseBN; Wu and Johnson, 2021).
    aggregation_weights
        ``"equal"``: every site counts the same (the FedBN paper's choice). ``"samples"``: by the
        number of training samples.
    training_share
        How much of each fold's training subjects a site trains on, in (0, 1]: one number, or one
        for each site that has less than all (``{"NYU": 0.1}``). Drawn by subject, stratified by
        diagnosis; a smaller share is a part of a larger one; held-out subjects stay the same.
    n_folds, fold
        Stratified folds by subject, within each site; ``fold`` is the one that is held out.
    seed
        Of the initial weights, the folds, the order of batches and the dropout masks.
    validation
        Units that judge the rounds; without it there are none.
    best_round
        Which round's model is the result: the ``"last"``, or the one with the best mean over sites
        of the task's headline metric on validation units (``"validation"``), or each site's own
        best (``"site_validation"``).
    patience
        End after so many rounds without a better one, judged as for `best_round`.
    test_curve
        Whether held-out units are scored in every round, for a curve; otherwise at the end alone.
    fedbn_version
        Versions of fedbn that may run it, as PEP 440 writes them (``">=0.1,<0.2"``); any if
        ``None``. The server and each site look before round 0.
    compare_with_alone
        Whether each site also trains the same network alone, on its own data only, with the same
        number of updates, to say what the federation gained it.
    continues
        The earlier run that this one goes on from; ``None`` for a new one.
    """

    name: str = "experiment"
    task: Annotated[SerializeAsAny[Task], BeforeValidator(_task)]
    sites: tuple[SiteName, ...]
    network: NetworkSettings
    policy: Policy = "fedbn"
    batch_norm_types: tuple[ClassPath, ...] = ()
    rounds: int = Field(default=50, ge=1, strict=True)
    training: TrainingSettings = TrainingSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    finetune: FinetuneSettings | None = None
    statistics: Literal["running", "recomputed"] = "running"
    aggregation_weights: Literal["equal", "samples"] = "equal"
    training_share: float | dict[SiteName, float] = 1.0
    n_folds: int = Field(default=5, ge=2, strict=True)
    fold: int = Field(default=0, ge=0, strict=True)
    seed: int = Field(default=0, ge=0, lt=2**31, strict=True)
    validation: ValidationSettings | None = None
    best_round: Literal["last", "validation", "site_validation"] = "last"
    patience: int | None = Field(default=None, ge=1, strict=True)
    test_curve: bool = False
    compare_with_alone: bool = True
    fedbn_version: str | None = None
    continues: ContinuesSettings | None = None

    @field_validator("fedbn_version")
    @classmethod
    def _specifier(cls, required: str | None) -> str | None:
        if required is not None and not is_specifier(required):
            raise ValueError(f"give versions as in '>=0.1,<0.2', got {required!r}")
        return required

    @field_validator("training_share", mode="before")
    @classmethod
    def _shares(cls, value: Any) -> Any:
        for share in value.values() if isinstance(value, dict) else [value]:
            is_number = isinstance(share, int | float) and not isinstance(share, bool)
            if not is_number or not 0 < share <= 1:
                raise ValueError(
                    f"give a number above 0 and at most 1, or one for each site, got {share!r}"
                )
        return value

    @model_validator(mode="before")
    @classmethod
    def _as_version_0_1_wrote_it(cls, content: Any) -> Any:
        """Fill in what an experiment without a task means, and move what has become a task's."""
        if not isinstance(content, dict):
            return content
        content = dict(content)
        if "task" not in content:
            content = _VERSION_0_1 | content | {"task": dict(TASK_0_1)}
            for field, defaults in (("network", _NETWORK_0_1), ("training", _TRAINING_0_1)):
                if isinstance(content[field], dict):
                    content[field] = defaults | content[field]
        if "standardization" in content:
            task = content["task"]
            task = task.model_dump() if isinstance(task, Task) else dict(task)
            content["task"] = task | {"standardization": content.pop("standardization")}
        return content

    @model_validator(mode="after")
    def _judged_by_validation(self) -> Experiment:
        if self.validation is None and (self.best_round != "last" or self.patience is not None):
            asked = "best_round" if self.best_round != "last" else "patience"
            raise ValueError(
                f"{asked} is {getattr(self, asked)!r}, which is judged on validation units; give "
                'validation, such as {"share": 0.2}'
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Experiment:
        if self.fold >= self.n_folds:
            raise ValueError(
                f"fold is {self.fold}, but with n_folds {self.n_folds} it must be less"
            )
        if self.continues is not None and self.continues.after_round >= self.rounds:
            raise ValueError(
                f"continues is after round {self.continues.after_round}, counted from 0, but "
                f"there are {self.rounds} rounds; raise rounds"
            )
        if not self.sites or len(set(self.sites)) != len(self.sites):
            raise ValueError(f"sites must be distinct names, got {list(self.sites)}")
        if isinstance(self.training_share, dict):
            unknown = [name for name in self.training_share if name not in self.sites]
            if unknown:
                raise ValueError(
                    f"training_share names {unknown[0]!r}, which is no site of this experiment "
                    f"({', '.join(self.sites)})"
                )
        training = self.training
        if self.algorithm.name == "alone" and training.proximal_mu:
            raise ValueError(
                f"training has proximal_mu {training.proximal_mu:g}, but under algorithm 'alone' "
                "there are no received weights to hold on to; set it to 0"
            )
        if self.algorithm.name == "scaffold" and (
            training.optimizer != "sgd" or training.momentum or training.proximal_mu
        ):
            raise ValueError(
                "algorithm 'scaffold' needs training with optimizer 'sgd', momentum 0 and "
                f"proximal_mu 0, got {training.optimizer!r}, {training.momentum:g} and "
                f"{training.proximal_mu:g}: its control variates are the mean gradients of plain "
                "SGD"
            )
        return self

    @property
    def validation_share(self) -> float:
        """Share of the training units that judge the rounds; 0 without any."""
        return self.validation.share if self.validation else 0.0

    def training_share_of(self, site: str) -> float:
        """Return the share of its training subjects that a site trains on."""
        if isinstance(self.training_share, dict):
            return self.training_share.get(site, 1.0)
        return self.training_share

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

    @property
    def judges_rounds(self) -> bool:
        """Whether rounds are judged on validation units, to choose or to end."""
        return self.best_round != "last" or self.patience is not None

    def changed(self, **changes: Any) -> Experiment:
        """Return a copy with some fields changed, validated like the original."""
        return validated({**self.model_dump(), **changes}, "the experiment")


def read_experiment(path: Path, allow_tasks: Collection[str] | None = None) -> Experiment:
    """Read and validate an experiment file; a job folder is accepted for its experiment.

    Parameters
    ----------
    path
        The file, or the folder.
    allow_tasks
        As in :func:`fedbn.tasks.registry.make_task`.

    Raises
    ------
    ExperimentError
        One sentence: file not found, not JSON, or the first field that is wrong and why.
    fedbn.federation.installation.InstallationError
        If it needs another version of fedbn than the installed one.
    """
    if path.is_dir():
        path = path / "app" / "config" / EXPERIMENT_FILE
    try:
        content = read_json(path)
    except FileNotFoundError as error:
        raise ExperimentError(
            f"no experiment file {path}; give a job folder or its {EXPERIMENT_FILE}"
        ) from error
    except (OSError, ValueError) as error:
        raise ExperimentError(f"cannot read experiment file {path}: {error}") from error
    required = content.get("fedbn_version") if isinstance(content, dict) else None
    if isinstance(required, str) and is_specifier(required):
        check_version(required)  # before the fields: another version has others
    return validated(content, str(path), allow_tasks)


def validated(content: Any, where: str, allow_tasks: Collection[str] | None = None) -> Experiment:
    """Validate the content of an experiment file, or what a run has kept of it.

    Raises
    ------
    ExperimentError
        `where`, and the first field that is wrong and why.
    """
    try:
        return Experiment.model_validate(content, context={"allow_tasks": allow_tasks})
    except ValidationError as error:
        raise ExperimentError(f"{where}: {fault(error, content, Experiment)}") from error
