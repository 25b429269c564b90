"""The server's sum over sites, as a FLARE aggregator."""

from __future__ import annotations

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLMetaKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedbn.aggregation import ContributionError, WeightedMean
from fedbn.flare.job import ERROR, REPORT, redacted, to_arrays, to_tensors
from fedbn.flare.persistor import SharedModelPersistor


class FedBNAggregator(ModelAggregator):
    """Average shared entries; refuse what does not fit, before any of it is accumulated.

    Works in fedbn's own workflow and in FLARE's ``FedAvg`` and ``ScatterAndGather``. Entries that
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
        self._mean: WeightedMean | None = None
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
        if self._mean is not None:
            self._mean.reset()

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

    def refuse(self, client: str, reason: str) -> None:
        """Note that a client's contribution is not part of this round, and why."""
        # A client's text may end here by way of its entries' names.
        self.refused[client] = redacted(reason)
        self.warning(f"contribution of {client} refused: {self.refused[client]}")

    def aggregate_model(self) -> FLModel:
        """Return the weighted mean of the accepted contributions, and forget them.

        Raises
        ------
        fedbn.aggregation.ContributionError
            If none was accepted.
        """
        if self._mean is None:
            raise ContributionError("no contribution was accepted")
        params = to_arrays(self._mean.result())
        meta = {"nr_aggregated": len(self.accepted)}
        self.reset_stats()
        return FLModel(params_type=ParamsType.FULL, params=params, meta=meta)

    def _accept(self, client: str, model: FLModel) -> None:
        report = (model.meta or {}).get(REPORT) or {}
        if isinstance(report, dict) and report.get(ERROR):
            raise ContributionError(str(report[ERROR]))
        if self._persistor is None:
            raise RuntimeError("FedBNAggregator was used before the start of a run")
        if model.params_type != ParamsType.FULL or not isinstance(model.params, dict):
            raise ContributionError(f"it holds no full weights but {model.params_type}")
        local = set(self._persistor.local_names(self.fl_ctx))
        arrived = {name: value for name, value in model.params.items() if name not in local}
        if len(arrived) < len(model.params):
            self.dropped[client] = len(model.params) - len(arrived)
            self.warning(
                f"{client} sent {self.dropped[client]} entries that belong to its batch norm or "
                "are no floats; they were dropped (its own filter should have kept them)"
            )
        if self._mean is None:
            self._mean = WeightedMean(self._persistor.shared_entries(self.fl_ctx))
        self._mean.add(client, to_tensors(arrived), self._weight(model))

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
