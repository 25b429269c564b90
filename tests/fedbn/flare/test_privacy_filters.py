"""FLARE's own privacy filters at a site, after fedbn's: on real answers of the learner."""

from __future__ import annotations

import numpy as np
import pytest
from nvflare.apis.dxo import DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.filters.convert_weights import ConvertWeights
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.filters.svt_privacy import SVTPrivacy
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedbn.federation.site import make_network
from fedbn.flare.aggregator import FedBNAggregator
from fedbn.flare.filters import BatchNormFilter
from fedbn.flare.job import to_arrays

DIFFERENCES = [DataKind.WEIGHT_DIFF]
SHARED = {
    "hidden.0.linear.weight",
    "hidden.0.linear.bias",
    "classifier.weight",
    "classifier.bias",
}


@pytest.fixture
def small(experiment):
    return experiment()


@pytest.fixture
def received(small):
    network, partition = make_network(small)
    state = network.state_dict()
    return to_arrays({name: state[name].clone() for name in partition.shared})


@pytest.fixture
def answer(make_client, small, received):
    """Return one site's answer to a training task."""
    client = make_client(small, "NYU")
    client.ask("preflight")
    _, model = client.ask("train", {name: array.copy() for name, array in received.items()})
    assert set(model.params) == SHARED
    return model


@pytest.fixture
def through(make_context, small, received, answer):
    """Send the answer through filters as FLARE does, and read it at the server."""

    def send(*filters):
        context = make_context(small, "NYU")
        task = FLModel(params_type=ParamsType.FULL, params=dict(received), current_round=0)
        context.set_prop(
            FLContextKey.TASK_DATA, FLModelUtils.to_shareable(task), private=True, sticky=False
        )
        result = FLModelUtils.to_shareable(answer)
        for filter_ in filters:
            result = filter_.process(result, context)
        model = FLModelUtils.from_shareable(result)
        model.meta["client_name"] = "NYU"
        return model, from_shareable(result)

    return send


@pytest.fixture
def aggregate(make_persistor, small):
    def mean(model):
        _, context = make_persistor(small)
        aggregator = FedBNAggregator()
        aggregator.handle_event(EventType.START_RUN, context)
        assert aggregator.accept_model(model), aggregator.refused
        return aggregator.aggregate_model().params

    return mean


def test_differences_are_added_to_what_the_site_received(through, aggregate, answer):
    trained = {name: array.copy() for name, array in answer.params.items()}
    model, dxo = through(BatchNormFilter(), ConvertWeights("weights_to_diff"))
    assert dxo.data_kind == DataKind.WEIGHT_DIFF
    mean = aggregate(model)
    for name, array in trained.items():
        np.testing.assert_allclose(mean[name], array, rtol=0, atol=1e-6)


def test_the_sparse_vector_filter_clips_and_sends_a_share_of_the_update(
    through, aggregate, received
):
    gamma = 1e-4
    filters = (
        BatchNormFilter(),
        ConvertWeights("weights_to_diff"),
        SVTPrivacy(fraction=0.5, epsilon=1e6, noise_var=1e6, gamma=gamma, data_kinds=DIFFERENCES),
    )
    model, dxo = through(*filters)
    assert set(dxo.data) == SHARED
    mean = aggregate(model)
    update = np.concatenate([(mean[name] - received[name]).ravel() for name in sorted(SHARED)])
    assert np.isfinite(update).all()
    assert 0 < np.count_nonzero(update) <= np.ceil(0.5 * update.size)
    n_samples = model.meta["NUM_STEPS_CURRENT_ROUND"]
    assert np.abs(update).max() <= gamma * n_samples * 1.01


def test_the_percentile_filter_keeps_the_largest_changes(through, aggregate, received):
    filters = (
        BatchNormFilter(),
        ConvertWeights("weights_to_diff"),
        PercentilePrivacy(percentile=75, gamma=1.0, data_kinds=DIFFERENCES),
    )
    mean = aggregate(through(*filters)[0])
    changed = np.concatenate([(mean[n] != received[n]).ravel() for n in sorted(SHARED)])
    assert changed.mean() == pytest.approx(0.25, abs=0.02)


def test_without_differences_the_filters_would_clip_the_weights_themselves(through, received):
    """What the privacy page warns of: FLARE's default takes full weights for an update."""
    filters = (BatchNormFilter(), PercentilePrivacy(percentile=0, gamma=1e-6))
    model, _ = through(*filters)
    n_samples = model.meta["NUM_STEPS_CURRENT_ROUND"]
    sent, own = model.params["hidden.0.linear.weight"], received["hidden.0.linear.weight"]
    assert np.abs(own).max() > 0.1 > 1e-6 * n_samples >= np.abs(sent).max()


@pytest.mark.parametrize("shape", [(1,), (3, 7)])
def test_a_difference_of_another_shape_is_refused(make_persistor, small, received, shape):
    _, context = make_persistor(small)
    aggregator = FedBNAggregator()
    aggregator.handle_event(EventType.START_RUN, context)
    params = {name: np.zeros_like(array) for name, array in received.items()}
    params["classifier.bias"] = np.zeros(shape, dtype=np.float32)
    model = FLModel(params_type=ParamsType.DIFF, params=params, meta={"client_name": "NYU"})
    assert not aggregator.accept_model(model)
    assert "classifier.bias" in aggregator.refused["NYU"]


def test_a_difference_that_is_not_finite_is_refused(make_persistor, small, received):
    _, context = make_persistor(small)
    aggregator = FedBNAggregator()
    aggregator.handle_event(EventType.START_RUN, context)
    params = {name: np.zeros_like(array) for name, array in received.items()}
    params["classifier.bias"][0] = np.nan
    model = FLModel(params_type=ParamsType.DIFF, params=params, meta={"client_name": "NYU"})
    assert not aggregator.accept_model(model)
    assert "not finite" in aggregator.refused["NYU"]
