"""What a hospital enforces itself, whatever a job says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.app_common.app_constant import AppConstants

from fedbn.core.control_variates import PREFIX
from fedbn.core.networks import build_network
from fedbn.core.normalization import Policy, affine_names, split
from fedbn.flare.job import job_experiment, site_settings
from fedbn.flare.new_sites import PREFIX as AFFINE

_WEIGHTS = (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF)
_NUMBERS = (DataKind.METRICS, DataKind.ANALYTIC)


class BatchNormFilter(DXOFilter):
    """Let only entries leave a site that are known not to be its batch norm.

    It belongs into a site's own ``local/privacy.json``, as a ``task_result_filters`` entry. It is a
    list of what may pass, not of what may not: the network is built from the job's experiment file,
    split by module type, and every entry that is not shared under ``policy`` is removed. SCAFFOLD's
    control variate of an entry passes or stays as the entry does. Gamma and beta for new hospitals
    (:mod:`fedbn.flare.new_sites`) pass with a site's final answer if the site's own settings say
    ``share_affine: true``; running statistics never do. Beside weights only metrics without arrays
    pass. Where the network cannot be known (a job of another kind), or a result is
    of a form that cannot be looked into, nothing passes: the filter raises, and FLARE sends an
    error in place of the result.

    It cannot see through a job's own code that hides batch norm under the names of other entries or
    sends it past FLARE's results; see the privacy page for the policy that forbids such code.

    Parameters
    ----------
    policy
        ``"fedbn"`` (gamma, beta and statistics stay) or ``"silobn"`` (statistics stay).
    network
        ``{"name": …, "args": {…}}`` of the network, for jobs that carry no experiment file.
    """

    def __init__(self, policy: Policy = "fedbn", network: dict[str, Any] | None = None):
        super().__init__(supported_data_kinds=[*_WEIGHTS], data_kinds_to_filter=[*_WEIGHTS])
        if policy not in ("fedbn", "silobn"):
            raise ValueError(f"policy must be 'fedbn' or 'silobn', got {policy!r}")
        self.policy: Policy = policy
        self.network = network
        self._known: dict[str, tuple[frozenset[str], frozenset[str]]] = {}

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Refuse what cannot be looked into, then remove what may not leave.

        Raises
        ------
        ValueError
            If the result holds anything but weights and metrics.
        """
        _refuse_what_is_not_known(shareable)
        return super().process(shareable, fl_ctx)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO | None:
        """Remove every entry that may not leave; ``None`` (not filtered) if there is none."""
        shared, affine = self._names(fl_ctx)[0], self._affine_names(dxo, fl_ctx)
        passing = {
            name: value
            for name, value in dxo.data.items()
            if _entry_of(name) in shared or name in affine
        }
        removed = len(dxo.data) - len(passing)
        if not removed:
            return None
        self.log_info(
            fl_ctx,
            f"{removed} of {len(dxo.data)} entries kept at this site by its own policy "
            f"{self.policy!r}",
            fire_event=False,
        )
        dxo.data = passing
        return dxo

    def _affine_names(self, dxo: DXO, fl_ctx: FLContext) -> frozenset[str]:
        """Return the names under which gamma and beta may leave with this very answer."""
        asked = any(isinstance(name, str) and name.startswith(AFFINE) for name in dxo.data)
        of_task = fl_ctx.get_prop(FLContextKey.TASK_NAME) == AppConstants.TASK_VALIDATION
        whole = dxo.data_kind == DataKind.WEIGHTS
        if not (asked and of_task and whole and site_settings(fl_ctx).share_affine):
            return frozenset()
        return self._names(fl_ctx)[1]

    def _names(self, fl_ctx: FLContext) -> tuple[frozenset[str], frozenset[str]]:
        """Return what may leave, and gamma and beta under the names in which they may.

        Each job of a site's process has its own network.
        """
        job = str(fl_ctx.get_job_id())
        if job not in self._known:
            types: tuple[str, ...] = ()
            if self.network is not None:
                name, args = self.network["name"], self.network.get("args", {})
            else:
                experiment = job_experiment(fl_ctx)
                name, args = experiment.network.name, experiment.network.args
                types = experiment.batch_norm_types
            network = build_network(name, args)
            partition = split(network, self.policy, types=types)
            affine = (AFFINE + entry for entry in affine_names(network, partition))
            self._known[job] = frozenset(partition.shared), frozenset(affine)
        return self._known[job]


def _entry_of(name: Any) -> Any:
    """Return the network's entry that a name in a message belongs to."""
    return name.removeprefix(PREFIX) if isinstance(name, str) else name


def _refuse_what_is_not_known(shareable: Shareable) -> None:
    """Let FLARE's own filter, which passes on what it does not know, only see what is known."""
    holds_content = bool(set(shareable) - {ReservedHeaderKey.HEADERS})
    if not holds_content:
        return
    if shareable.get_return_code() != ReturnCode.OK:
        raise ValueError("an error reply with content cannot be checked for batch norm")
    try:
        dxo = from_shareable(shareable)
    except ValueError as error:
        raise ValueError("a result that is no DXO cannot be checked for batch norm") from error
    _check_kind(dxo)


def _check_kind(dxo: DXO) -> None:
    if _holds_array(dxo.meta):
        raise ValueError("the result's meta data hold an array: it cannot be checked")
    if dxo.data_kind == DataKind.COLLECTION:
        for part in dxo.data.values() if isinstance(dxo.data, dict) else dxo.data:
            _check_kind(part)
    elif dxo.data_kind in _NUMBERS:
        if _holds_array(dxo.data):
            raise ValueError(f"a result of kind {dxo.data_kind} holds an array, expected numbers")
    elif dxo.data_kind not in _WEIGHTS:
        raise ValueError(f"a result of kind {dxo.data_kind} cannot be checked for batch norm")


def _holds_array(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_array(item) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(_holds_array(item) for item in value)
    return isinstance(value, (np.ndarray, torch.Tensor, bytes, bytearray, memoryview))
