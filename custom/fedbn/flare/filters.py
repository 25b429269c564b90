"""What a hospital enforces itself, whatever a job says."""

from __future__ import annotations

from typing import Any

from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from fedbn.flare.job import job_experiment
from fedbn.networks import build_network
from fedbn.normalization import Policy, split


class BatchNormFilter(DXOFilter):
    """Let only entries leave a site that are known not to be its batch norm.

    It belongs into a site's own ``local/privacy.json``, as a ``task_result_filters`` entry. It is a
    list of what may pass, not of what may not: the network is built from the job's experiment file,
    split by module type, and every entry that is not shared under ``policy`` is removed. Where the
    network cannot be known (a job of another kind) nothing passes: the filter raises, and FLARE
    sends an error in place of the result.

    It cannot see through a job's own code that hides batch norm under other names or in other
    fields; see the privacy page for the policy that forbids such code.

    Parameters
    ----------
    policy
        ``"fedbn"`` (gamma, beta and statistics stay) or ``"silobn"`` (statistics stay).
    network
        ``{"name": …, "args": {…}}`` of the network, for jobs that carry no experiment file.
    """

    def __init__(self, policy: Policy = "fedbn", network: dict[str, Any] | None = None):
        kinds = [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF]
        super().__init__(supported_data_kinds=kinds, data_kinds_to_filter=kinds)
        if policy not in ("fedbn", "silobn"):
            raise ValueError(f"policy must be 'fedbn' or 'silobn', got {policy!r}")
        self.policy: Policy = policy
        self.network = network
        self._shared: frozenset[str] | None = None

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO | None:
        """Remove every entry that may not leave; ``None`` (not filtered) if there is none."""
        shared = self._shared_names(fl_ctx)
        removed = [name for name in dxo.data if name not in shared]
        if not removed:
            return None
        self.log_info(
            fl_ctx,
            f"{len(removed)} of {len(dxo.data)} entries kept at this site by its own policy "
            f"{self.policy!r}",
            fire_event=False,
        )
        dxo.data = {name: value for name, value in dxo.data.items() if name in shared}
        return dxo

    def _shared_names(self, fl_ctx: FLContext) -> frozenset[str]:
        if self._shared is None:
            if self.network is not None:
                name, args = self.network["name"], self.network.get("args", {})
            else:
                settings = job_experiment(fl_ctx).network
                name, args = settings.name, settings.args
            self._shared = frozenset(split(build_network(name, args), self.policy).shared)
        return self._shared
