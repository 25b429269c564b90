from __future__ import annotations

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedbn.federation.experiment import ExperimentError
from fedbn.federation.site import make_network
from fedbn.flare.filters import BatchNormFilter
from fedbn.flare.job import REPORT, to_arrays

LAYER = "hidden.0.norm"
GAMMA_BETA = {f"{LAYER}.weight", f"{LAYER}.bias"}
STATISTICS = {f"{LAYER}.running_mean", f"{LAYER}.running_var"}
COUNTER = {f"{LAYER}.num_batches_tracked"}


@pytest.fixture
def context(make_context, experiment):
    return make_context(experiment(), name="site-1")


@pytest.fixture
def state(experiment):
    return to_arrays(make_network(experiment())[0].state_dict())


def shareable(data, kind=DataKind.WEIGHTS, meta=None):
    return DXO(kind, data, meta).to_shareable()


def left(result):
    return set(from_shareable(result).data)


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
@pytest.mark.parametrize(
    ("policy", "kept"),
    [("fedbn", GAMMA_BETA | STATISTICS | COUNTER), ("silobn", STATISTICS | COUNTER)],
)
def test_a_sites_policy_decides_what_leaves(context, state, kind, policy, kept):
    result = BatchNormFilter(policy).process(shareable(state, kind), context)
    assert left(result) == set(state) - kept
    assert from_shareable(result).data_kind == kind


@pytest.mark.parametrize("of_job", ["none", "silobn", "fedbn"])
def test_what_the_job_says_does_not_matter(make_context, experiment, state, of_job, caplog):
    context = make_context(experiment(policy=of_job), name="site-1")
    with caplog.at_level("INFO"):
        result = BatchNormFilter().process(shareable(state), context)
    assert left(result) == set(state) - GAMMA_BETA - STATISTICS - COUNTER
    assert "5 of 9 entries kept at this site by its own policy 'fedbn'" in caplog.text


def test_unknown_names_do_not_leave(context, state):
    state |= {"extra": np.ones(3), f"{LAYER}.copy_of_mean": np.ones(8), 7: np.ones(1)}
    assert left(BatchNormFilter().process(shareable(state), context)) == {
        "hidden.0.linear.weight",
        "hidden.0.linear.bias",
        "classifier.weight",
        "classifier.bias",
    }


def test_weights_in_a_collection_are_filtered_too(context, state):
    inner = DXO(DataKind.WEIGHTS, dict(state))
    deeper = DXO(DataKind.COLLECTION, {"b": DXO(DataKind.WEIGHT_DIFF, dict(state))})
    result = BatchNormFilter().process(
        shareable({"a": inner, "deep": deeper}, DataKind.COLLECTION), context
    )
    parts = from_shareable(result).data
    assert not (set(parts["a"].data) | set(parts["deep"].data["b"].data)) & STATISTICS


def test_the_learners_own_answers_pass(context, state, experiment):
    _, partition = make_network(experiment())
    shared = {name: state[name] for name in partition.shared}
    report = {"site": "NYU", "training_loss": [0.5], "before_training": {"subject_accuracy": 1.0}}
    trained = FLModel(
        params_type=ParamsType.FULL, params=shared, metrics={"a": 0.5}, meta={REPORT: report}
    )
    result = BatchNormFilter().process(FLModelUtils.to_shareable(trained), context)
    back = FLModelUtils.from_shareable(result)
    assert set(back.params) == set(shared)
    assert back.meta[REPORT] == report
    preflight = FLModel(metrics={}, meta={REPORT: {"signature": {"rois": [["1", "a"]]}}})
    result = BatchNormFilter().process(FLModelUtils.to_shareable(preflight), context)
    assert FLModelUtils.from_shareable(result).meta[REPORT]["signature"]["rois"] == [["1", "a"]]


def test_replies_without_content_pass(context):
    for code in (ReturnCode.OK, ReturnCode.EXECUTION_EXCEPTION):
        assert BatchNormFilter().process(make_reply(code), context).get_return_code() == code


def error_reply(data):
    reply = shareable(data)
    reply.set_return_code(ReturnCode.EXECUTION_EXCEPTION)
    return reply


def bare(data):
    reply = Shareable()
    reply["weights"] = data
    return reply


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (bare, "a result that is no DXO cannot be checked"),
        (error_reply, "an error reply with content cannot be checked"),
        (lambda data: shareable({"params": data}, DataKind.FL_MODEL), "FL_MODEL cannot be checked"),
        (lambda data: shareable(data, DataKind.APP_DEFINED), "APP_DEFINED cannot be checked"),
        (lambda data: shareable(data, DataKind.METRICS), "METRICS holds an array"),
        (
            lambda data: shareable({"deep": [{"x": torch.ones(3)}]}, DataKind.METRICS),
            "METRICS holds an array",
        ),
        (
            lambda data: shareable({"a": DXO(DataKind.STATISTICS, data)}, DataKind.COLLECTION),
            "STATISTICS cannot be checked",
        ),
        (
            lambda data: shareable({}, DataKind.WEIGHTS, {"also": {"mean": np.ones(8)}}),
            "meta data hold an array",
        ),
        (lambda data: shareable({"a": b"bytes"}, DataKind.METRICS), "holds an array"),
    ],
)
def test_what_cannot_be_looked_into_does_not_leave(context, state, make, reason):
    with pytest.raises(ValueError, match=reason):
        BatchNormFilter().process(make(state), context)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no experiment file"),
        ("{", "cannot read experiment file"),
        ('{"network": {"name": "NoSuchNetwork"}}', "unknown network 'NoSuchNetwork'"),
    ],
)
def test_nothing_passes_where_the_network_is_not_known(
    make_context, experiment, state, tmp_path, content, reason
):
    context = make_context(experiment(), name="site-1")
    (file,) = (tmp_path / "workspaces" / "site-1").rglob("experiment.json")
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises((ExperimentError, ValueError), match=reason):
        BatchNormFilter().process(shareable(state), context)


def test_each_job_has_its_own_network(make_context, experiment, state, monkeypatch):
    """One filter can serve several jobs: in the second, another layer is batch norm."""
    monkeypatch.setenv("FEDBN_ALLOW_NETWORKS", "torch.nn.Linear")
    site_filter = BatchNormFilter()
    site_filter.process(shareable(state), make_context(experiment(), name="site-1", job="a"))
    linear = {"name": "torch.nn.Linear", "args": {"in_features": 66, "out_features": 2}}
    second = make_context(experiment(network=linear, policy="none"), name="site-1", job="b")
    weights = {"weight": np.ones((2, 66)), "classifier.weight": np.ones(3)}
    assert left(site_filter.process(shareable(weights), second)) == {"weight"}


def test_the_site_can_name_the_network_itself(make_context, experiment, state, tmp_path):
    context = make_context(experiment(), name="site-1")
    (file,) = (tmp_path / "workspaces" / "site-1").rglob("experiment.json")
    file.unlink()
    network = {"name": "ConnectomeMLP", "args": {"in_features": 66, "hidden": [8]}}
    result = BatchNormFilter(network=network).process(shareable(state), context)
    assert not left(result) & (GAMMA_BETA | STATISTICS | COUNTER)
    assert "classifier.weight" in left(result)


@pytest.mark.parametrize("policy", ["none", "FedBN", None])
def test_a_policy_that_keeps_nothing_is_refused(policy):
    with pytest.raises(ValueError, match="policy must be 'fedbn' or 'silobn', got"):
        BatchNormFilter(policy)
