"""The server's sum over sites, as a FLARE aggregator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLMetaKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedbn.core.aggregation import ContributionError
from fedbn.core.normalization import AVERAGED
from fedbn.federation.experiment import ExperimentError
from fedbn.federation.server import Server
from fedbn.flare.job import ERROR, REPORT, redacted, to_arrays, to_tensors
from fedbn.flare.persistor import SharedModelPersistor

Message = tuple[list[str], dict[str, np.ndarray] | None]
"""Clients, and the arrays that all of them receive."""


class FedBNAggregator(ModelAggregator):
    """Average shared entries; refuse what does not fit, before any of it is accumulated.

    Works in fedbn's own workflow and in FLARE's ``FedAvg`` and ``ScatterAndGather``, with weights
    and with their differences to what the site received (FLARE's ``ConvertWeights``). Entries that
    belong to a site are dropped if a client sends them anyway, and the log says so. The result has
    the same bits whatever the order of arrival, and memory does not grow with the number of sites.

    Parameters
    ----------
    persistor_id
        Component that knows the job's network.

    Attributes
    ----------
    accepted
        Names of the clients whose contribution entered this round's mean.
    refused
        Client name to reason, for this round.
    dropped
        Client name to number of local entries that it sent and that were dropped, for this round.
    """

    def __init__(self, persistor_id: str = AppConstants.DEFAULT_PERSISTOR_ID):
        super().__init__()
        self.persistor_id = persistor_id
        self._persistor: SharedModelPersistor | None = None
        self._server: Server | None = None
        self.reset_stats()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Find the persistor, and with it the network, at the start of a run."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.START_RUN:
            persistor = fl_ctx.get_engine().get_component(self.persistor_id)
            if not isinstance(persistor, SharedModelPersistor):
                self.system_panic(
                    f"component {self.persistor_id!r} must be a SharedModelPersistor, "
                    f"got {type(persistor).__name__}",
                    fl_ctx,
                )
                return
            self._persistor = persistor

    def reset_stats(self) -> None:
        """Forget the round's contributions."""
        self.accepted: list[str] = []
        self.refused: dict[str, str] = {}
        self.dropped: dict[str, int] = {}
        if self._server is not None:
            self._server.reset()

    def accept(self, shareable: Shareable, fl_ctx: FLContext) -> bool:
        """Take a contribution from ``ScatterAndGather``, which names the client beside it.

        FLARE's own method leaves the name out and answers "accepted" whatever happened.
        """
        self.fl_ctx = fl_ctx
        client = shareable.get_peer_prop(ReservedKey.IDENTITY_NAME, AppConstants.CLIENT_UNKNOWN)
        try:
            model = FLModelUtils.from_shareable(shareable)
        except ValueError as error:
            self.refuse(client, f"it cannot be read: {error}")
            return False
        model.meta["client_name"] = client
        return self.accept_model(model)

    def accept_model(self, model: FLModel) -> bool:
        """Take one client's contribution, or refuse it with a reason in the log.

        Returns
        -------
        bool
            Whether the contribution entered the mean.
        """
        client = str((model.meta or {}).get("client_name", AppConstants.CLIENT_UNKNOWN))
        try:
            self._accept(client, model)
        except (ValueError, TypeError, OverflowError) as error:
            self.refuse(client, str(error))
            return False
        self.accepted.append(client)
        return True

    def messages(self, clients: Sequence[str]) -> list[Message]:
        """Return what goes out in this round: clients, and the arrays that they all receive."""
        server = self._find_server()
        client_of = {self._site_of(client): client for client in clients}
        return [
            ([client_of[site] for site in sites], to_arrays(server.message(sites[0])))
            for sites in server.addressees(list(client_of))
        ]

    def facts(self) -> dict[str, Any]:
        """Return what the job's algorithm has to tell of the last round, for its record."""
        return self._find_server().facts()

    def refuse(self, client: str, reason: str) -> None:
        """Note that a client's contribution is not part of this round, and why."""
        # A client's text may end here by way of its entries' names.
        self.refused[client] = redacted(reason)
        self.warning(f"contribution of {client} refused: {self.refused[client]}")

    def aggregate_model(self) -> FLModel:
        """Return what the server makes of the accepted contributions, and forget them.

        By default, their weighted mean.

        Raises
        ------
        fedbn.core.aggregation.ContributionError
            If none was accepted.
        """
        if self._server is None:
            raise ContributionError("no contribution was accepted")
        self._server.update()
        params = to_arrays(self._server.state())
        meta = {"nr_aggregated": len(self.accepted)}
        self.reset_stats()
        return FLModel(params_type=ParamsType.FULL, params=params, meta=meta)

    def _accept(self, client: str, model: FLModel) -> None:
        report = (model.meta or {}).get(REPORT) or {}
        if isinstance(report, dict) and report.get(ERROR):
            raise ContributionError(str(report[ERROR]))
        if self._persistor is None:
            raise RuntimeError("FedBNAggregator was used before the start of a run")
        if model.params_type not in (ParamsType.FULL, ParamsType.DIFF) or not isinstance(
            model.params, dict
        ):
            raise ContributionError(f"it holds no weights but {model.params_type}")
        local = set(self._persistor.local_names(self.fl_ctx))
        arrived = {name: value for name, value in model.params.items() if name not in local}
        if len(arrived) < len(model.params):
            self.dropped[client] = len(model.params) - len(arrived)
            self.warning(
                f"{client} sent {self.dropped[client]} entries that belong to its batch norm or "
                "are no floats; they were dropped (its own filter should have kept them)"
            )
        server, site = self._find_server(), self._site_of(client)
        known = server.message(site)
        if model.params_type == ParamsType.DIFF:
            tensors = _added(to_tensors(arrived), known)
        else:
            tensors = to_tensors(arrived, known)
        server.add(site, tensors, self._weight(model))

    def _find_server(self) -> Server:
        if self._server is None:
            assert self._persistor is not None
            self._server = self._persistor.server(self.fl_ctx)
        return self._server

    def _site_of(self, client: str) -> str:
        """Return the site that a client stands for; in a foreign workflow, its own name."""
        assert self._persistor is not None
        try:
            return self._persistor.experiment(self.fl_ctx).site_of(client)
        except ExperimentError:
            return client

    def _weight(self, model: FLModel) -> float:
        assert self._persistor is not None
        if self._persistor.experiment(self.fl_ctx).aggregation_weights == "equal":
            return 1.0
        n_samples = (model.meta or {}).get(FLMetaKey.NUM_STEPS_CURRENT_ROUND)
        if isinstance(n_samples, bool) or not isinstance(n_samples, int) or n_samples < 1:
            raise ContributionError(
                f"its number of training samples is {n_samples!r}, expected a whole number above 0"
            )
        return float(n_samples)


def _added(
    differences: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the weights that differ so from what the site received.

    A site's own filters may have turned its weights into differences, to clip them or to add noise
    (in float64). Names that are unknown, and shapes that NumPy would broadcast, stay as they are:
    the server refuses them.
    """
    weights = {}
    for name, difference in differences.items():
        known = base.get(name)
        if (
            known is None
            or known.shape != difference.shape
            or known.is_complex() != difference.is_complex()
            or difference.dtype not in AVERAGED
        ):
            weights[name] = difference
        else:
            weights[name] = (known + difference).to(known.dtype)
    return weights
