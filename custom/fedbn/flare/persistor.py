"""The server's model: the network without what belongs to a site."""

from __future__ import annotations

from pathlib import Path

import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.model import (
    ModelLearnable,
    ModelLearnableKey,
    make_model_learnable,
)
from nvflare.app_common.abstract.model_persistor import ModelPersistor
from nvflare.app_common.app_constant import AppConstants, DefaultCheckpointFileName
from torch import nn

from fedbn.core.normalization import Partition, check_entries, entries
from fedbn.federation.experiment import Experiment, ExperimentError
from fedbn.federation.resume import check_continues
from fedbn.federation.server import Server, make_server, warm_start
from fedbn.federation.site import make_network
from fedbn.federation.site_state import SHARED_WEIGHTS, load_checkpoint, save_checkpoint
from fedbn.flare.job import ACCEPTED, job_experiment, to_arrays, to_tensors


class SharedModelPersistor(ModelPersistor):
    """Hold, load and save what the job's server holds: the shared entries, nothing of a site.

    Its schema is the network without its local entries, so that what is broadcast, what comes back
    and what is saved have the same names. With FLARE's own persistor round 0 would broadcast the
    initial batch norm, and the saved file would hold it as if it meant something.

    Parameters
    ----------
    initial_weights
        File of shared weights from an earlier run to start from; a relative path is looked up in
        the job's app folder. Without it the weights are the network's own, from the job's seed.
        A job that continues a run (see :mod:`fedbn.federation.resume`) goes on with all that its
        server held.
        Any other job takes the shared entries alone, as a warm start: what stays at a site, and
        control variates, begin as in a job without such a file.
    file_name
        Name of the saved file, in the server's app folder.
    """

    def __init__(
        self,
        initial_weights: str | None = None,
        file_name: str = DefaultCheckpointFileName.GLOBAL_MODEL,
    ):
        super().__init__()
        self.initial_weights = initial_weights
        self.file_name = file_name
        self._experiment: Experiment | None = None
        self._shared: dict[str, torch.Tensor] = {}
        self._parts: tuple[nn.Module, Partition] | None = None
        self._accepted: dict[str, int] = {}
        self._server: Server | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Build the network at the start of a run; a network that cannot be used ends the job."""
        if event_type == EventType.START_RUN:
            try:
                self._build(fl_ctx)
            except Exception as error:
                self.system_panic(str(error), fl_ctx)

    def experiment(self, fl_ctx: FLContext) -> Experiment:
        """Return the job's experiment."""
        self._build(fl_ctx)
        assert self._experiment is not None
        return self._experiment

    def shared_entries(self, fl_ctx: FLContext) -> dict[str, torch.Tensor]:
        """Return the initial shared entries of the network."""
        self._build(fl_ctx)
        return self._shared

    def server(self, fl_ctx: FLContext) -> Server:
        """Return the server of the job's algorithm: one for the whole run."""
        self._build(fl_ctx)
        assert self._server is not None
        return self._server

    def last_accepted(self, fl_ctx: FLContext) -> dict[str, int]:
        """Return the last round of each site that entered the mean in the run that is continued."""
        self._build(fl_ctx)
        return dict(self._accepted)

    def local_names(self, fl_ctx: FLContext) -> tuple[str, ...]:
        """Return the names of the entries that must not arrive here."""
        self._build(fl_ctx)
        assert self._parts is not None
        return self._parts[1].local

    def load_model(self, fl_ctx: FLContext) -> ModelLearnable:
        """Return what the server holds before the first round of this job."""
        return make_model_learnable(to_arrays(self.server(fl_ctx).state()), {})

    def save_model(self, model: ModelLearnable, fl_ctx: FLContext) -> None:
        """Write what the server holds, marked as what it is: not a complete model.

        The facts say of which job and after which round it is (none before the first), and all
        that another job needs to go on from there.
        """
        path = self.path(fl_ctx)
        experiment = self.experiment(fl_ctx)
        remembered, server_facts = self.server(fl_ctx).saved()
        weights = to_tensors(model[ModelLearnableKey.WEIGHTS], remembered)
        facts = {
            "job": fl_ctx.get_job_id(),
            "round": fl_ctx.get_prop(AppConstants.CURRENT_ROUND),
            ACCEPTED: fl_ctx.get_prop(ACCEPTED, {}),
            "server": server_facts,
            "experiment": experiment.model_dump(mode="json"),
            "network": experiment.network.model_dump(),
            "policy": experiment.policy,
            "algorithm": experiment.algorithm.name,
            "kept at the sites": list(self.local_names(fl_ctx)),
        }
        save_checkpoint(path, SHARED_WEIGHTS, {**remembered, **weights}, facts)

    def path(self, fl_ctx: FLContext) -> Path:
        """Return where the shared entries are saved."""
        return Path(fl_ctx.get_prop(FLContextKey.APP_ROOT)) / self.file_name

    def _build(self, fl_ctx: FLContext) -> None:
        if self._experiment is not None:
            return
        experiment = job_experiment(fl_ctx)
        network, partition = make_network(experiment)
        shared = entries(network, partition.shared)
        server = make_server(experiment, network, partition, shared)
        if self.initial_weights:
            path = Path(fl_ctx.get_prop(FLContextKey.APP_ROOT)) / self.initial_weights
            loaded, facts = load_checkpoint(path, SHARED_WEIGHTS)
            if experiment.continues is not None:
                check_continues(facts, experiment, path.name)
                server.restore(loaded, facts["server"])
                self._accepted = {str(site): int(n) for site, n in facts[ACCEPTED].items()}
            else:
                loaded = warm_start(loaded)
                check_entries(loaded, shared, f"the entries of {path.name}")
                shared = loaded
                server = make_server(experiment, network, partition, shared)
        elif experiment.continues is not None:
            raise ExperimentError(
                f"the experiment continues job {experiment.continues.job!r}, but the persistor has "
                "no initial_weights to go on from; make the job with `fedbn resume`"
            )
        self._server = server
        self._shared, self._parts = shared, (network, partition)
        self._experiment = experiment
        self.log_info(fl_ctx, partition.describe(), fire_event=False)
