"""A job by FLARE's Recipe API: the same components as the job folders, put together in Python.

.. code-block:: python

    from nvflare.recipe import SimEnv

    from fedbn.flare.recipe import FedBNRecipe

    recipe = FedBNRecipe("jobs/abide_fedbn", rounds=6)
    run = recipe.run(SimEnv(clients=list(recipe.experiment.sites)))
    print(run.get_result())

``PocEnv`` and ``ProdEnv`` take the same recipe to a local deployment and to real hospitals, and
``recipe.export("jobs")`` writes the job folder.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NoReturn

from nvflare.app_common.executors.model_learner_executor import ModelLearnerExecutor
from nvflare.app_common.widgets.convert_to_fed_event import ConvertToFedEvent
from nvflare.app_opt.tracking.tb.tb_receiver import TBAnalyticsReceiver
from nvflare.app_opt.tracking.tb.tb_writer import TBWriter
from nvflare.job_config.api import FedJob
from nvflare.recipe.spec import Recipe

from data_prep.files import write_json
from fedbn.federation.experiment import (
    EXPERIMENT_FILE,
    Experiment,
    read_experiment,
)
from fedbn.federation.job_folder import check_job_name
from fedbn.flare.aggregator import FedBNAggregator
from fedbn.flare.learner import FedBNLearner
from fedbn.flare.persistor import SharedModelPersistor
from fedbn.flare.workflow import FedBNWorkflow

TASKS = ["train", "validate", "submit_model"]
TENSORBOARD = "tensorboard"
"""Id of the server's component that writes curves."""

_PACKAGE = '"""Nothing but a name: what this job runs is the installed package ``fedbn``."""\n'


class FedBNRecipe(Recipe):
    """An experiment as a FLARE job.

    Everything that decides a number is in the experiment; what is given beside it decides how long
    the server waits. What a site sets for itself (its data, its device, what may leave it) has no
    place here: no job can override it.

    Parameters
    ----------
    experiment
        The experiment, or where it is written: a job folder or its ``experiment.json``.
    name
        Of the job; by default the experiment's.
    min_sites, round_seconds, preflight_seconds, grace_seconds
        Of :class:`fedbn.flare.workflow.FedBNWorkflow`. With a quorum (``min_sites`` above 0) the
        environment must run all sites at the same time: ``SimEnv`` does unless it is given fewer
        threads than clients.
    data_root, torch_threads, device
        Of :class:`fedbn.flare.learner.FedBNLearner`, for sites that set nothing themselves.
    changes
        Fields of the experiment to change, such as ``rounds=6``.

    Raises
    ------
    fedbn.federation.experiment.ExperimentError
        If the experiment cannot be used, or the name cannot name a job.

    Attributes
    ----------
    experiment
        What the job runs, validated.
    """

    def __init__(
        self,
        experiment: Experiment | Path | str,
        *,
        name: str | None = None,
        min_sites: int = 0,
        round_seconds: int = 1800,
        preflight_seconds: int = 600,
        grace_seconds: int = 60,
        data_root: str | None = None,
        torch_threads: int | None = 1,
        device: str = "auto",
        **changes: Any,
    ):
        if not isinstance(experiment, Experiment):
            experiment = read_experiment(Path(experiment))
        self.experiment = experiment.changed(**changes) if changes else experiment
        name = name or self.experiment.name
        check_job_name(name)
        job = FedJob(name=name, min_clients=min_sites or len(self.experiment.sites))
        # Without this FLARE copies the installed package into the job.
        job.set_app_packages(["fedbn", "data_prep"])
        job.to_server(
            FedBNWorkflow(
                min_sites=min_sites,
                round_seconds=round_seconds,
                preflight_seconds=preflight_seconds,
                grace_seconds=grace_seconds,
            ),
            id="fedbn_workflow",
        )
        job.to_server(SharedModelPersistor(), id="persistor")
        job.to_server(FedBNAggregator(), id="aggregator")
        job.to_server({"server": {"task_request_interval": 0.2}})
        job.to_clients(ModelLearnerExecutor(learner_id="learner"), tasks=TASKS)
        learner = FedBNLearner(data_root=data_root, torch_threads=torch_threads, device=device)
        job.to_clients(learner, id="learner")
        job.to_clients(TBWriter(), id="log_writer")
        job.to_clients(
            ConvertToFedEvent(events_to_convert=["analytix_log_stats"]), id="event_to_fed"
        )
        self._files = tempfile.TemporaryDirectory(prefix="fedbn-recipe-")
        self._add_files(job, name)
        super().__init__(job)

    def finalize(self) -> None:
        """Write the curves for TensorBoard once: here, or by a receiver that was added for it."""
        components = self._job._deploy_map["server"].app_config.components
        own = components.pop(TENSORBOARD, None)
        if not any(isinstance(one, TBAnalyticsReceiver) for one in components.values()):
            own = own or TBAnalyticsReceiver(events=["fed.analytix_log_stats"])
            components[TENSORBOARD] = own

    def _add_files(self, job: FedJob, name: str) -> None:
        """Bring the experiment, and the file without which FLARE builds its own classes alone."""
        folder = Path(self._files.name)
        write_json(folder / EXPERIMENT_FILE, self.experiment.model_dump(mode="json"))
        package = folder / f"{name}_job"
        package.mkdir()
        (package / "__init__.py").write_text(_PACKAGE, encoding="utf-8")
        for add in (job.add_file_to_server, job.add_file_to_clients):
            add(str(folder / EXPERIMENT_FILE), app_folder_type="config")
            add(str(package), dest_dir=package.name, app_folder_type="custom")

    def _apply_per_site_config(self, config: dict[str, dict[str, Any]]) -> NoReturn:
        """Refuse: a site's own settings stand at the site.

        Raises
        ------
        ValueError
            Always.
        """
        raise ValueError(
            f"a job sets nothing for {', '.join(sorted(config))} alone: data, device and what may "
            "leave a site stand in its own local/fedbn_site.yml"
        )
