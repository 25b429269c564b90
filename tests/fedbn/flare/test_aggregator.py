from __future__ import annotations

import itertools
import re
import warnings

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLMetaKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.decomposers import common_decomposers
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.fuel.utils import fobs

from fedbn.core.aggregation import ContributionError
from fedbn.core.control_variates import PREFIX
from fedbn.core.normalization import AVERAGED
from fedbn.federation.site import make_network
from fedbn.flare.aggregator import FedBNAggregator
from fedbn.flare.job import REPORT, to_arrays, to_tensors

NAME = "classifier.weight"


@pytest.fixture
def make_aggregator(make_persistor, experiment):
    def make(**changes):
        _, context = make_persistor(experiment(**changes))
        aggregator = FedBNAggregator()
        aggregator.handle_event(EventType.START_RUN, context)
        assert context.get_engine().panics == []
        return aggregator

    return make


@pytest.fixture
def aggregator(make_aggregator):
    return make_aggregator()


@pytest.fixture
def shared(experiment):
    """Return a function that gives shared entries, each value times a factor."""
    network, partition = make_network(experiment())

    def make(factor=1.0):
        state = network.state_dict()
        return to_arrays({name: state[name] * factor for name in partition.shared})

    return make


def contribution(params, client="NYU", n_samples=10):
    meta = {"client_name": client, FLMetaKey.NUM_STEPS_CURRENT_ROUND: n_samples}
    return FLModel(params_type=ParamsType.FULL, params=params, meta=meta)


def bits(model):
    return {name: array.tobytes() for name, array in model.params.items()}


def test_equal_weights_do_not_look_at_the_number_of_samples(aggregator, shared):
    assert aggregator.accept_model(contribution(shared(1), "NYU", 10))
    assert aggregator.accept_model(contribution(shared(2), "UM", 1_000_000))
    assert aggregator.accepted == ["NYU", "UM"]
    mean = aggregator.aggregate_model()
    assert mean.params_type == ParamsType.FULL
    assert mean.meta == {"nr_aggregated": 2}
    assert np.allclose(mean.params[NAME], 1.5 * shared()[NAME], rtol=1e-6)


def test_entries_of_every_dtype_travel_as_flare_sends_them():
    """FLARE's own bytes of a message; NumPy knows no bfloat16."""
    common_decomposers.register()
    tensors = {
        str(dtype): torch.tensor([[0.1, -3.0], [1e-3, 7.0]]).to(dtype).t() for dtype in AVERAGED
    }
    tensors |= {"none": torch.zeros(0), "rows": torch.zeros(0, 3).t(), "one": torch.tensor(0.1)}
    tensors[f"{PREFIX}none"] = torch.zeros(1, dtype=torch.bfloat16)
    like = {**tensors, "none": torch.zeros(0, dtype=torch.bfloat16)}
    del like[f"{PREFIX}none"]
    arrived = to_tensors(fobs.loads(fobs.dumps(to_arrays(tensors))), like)
    tensors["none"] = tensors["none"].bfloat16()
    assert list(arrived) == list(tensors)
    for name, tensor in tensors.items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor), name


@pytest.mark.parametrize("sent", [np.float32, np.float64])
@pytest.mark.parametrize("network", ["BFloat16", "Complex64", "Float16"])
def test_differences_of_every_dtype_are_added_to_the_bit(
    make_aggregator, monkeypatch, network, sent
):
    """A site's filter makes the differences of what it has received and what it would send."""
    monkeypatch.setenv("FEDBN_ALLOW_NETWORKS", f"odd_networks.{network}")
    aggregator = make_aggregator(network={"name": f"odd_networks.{network}"})
    ((_, received),) = aggregator.messages(["NYU"])
    wide = {name: array.astype(np.result_type(array, sent)) for name, array in received.items()}
    trained = to_tensors(
        {name: array * 1.25 for name, array in received.items()}, known(aggregator)
    )
    differences = {name: array - wide[name] for name, array in to_arrays(trained).items()}
    model = FLModel(params_type=ParamsType.DIFF, params=differences, meta={"client_name": "NYU"})
    assert aggregator.accept_model(model), aggregator.refused
    mean = to_tensors(aggregator.aggregate_model().params, known(aggregator))
    for name, tensor in trained.items():
        torch.testing.assert_close(mean[name], tensor, rtol=torch.finfo(tensor.dtype).eps, atol=0)
        assert tensor.dtype != torch.bfloat16 or torch.equal(mean[name], tensor)


def known(aggregator):
    return aggregator._find_server().message("NYU")


@pytest.mark.parametrize("network", ["Complex64", "BFloat16"])
def test_an_entry_of_another_dtype_is_refused(make_aggregator, monkeypatch, network):
    monkeypatch.setenv("FEDBN_ALLOW_NETWORKS", f"odd_networks.{network}")
    aggregator = make_aggregator(network={"name": f"odd_networks.{network}"})
    ((_, params),) = aggregator.messages(["NYU"])
    for kind in (ParamsType.FULL, ParamsType.DIFF):
        for name in [name for name in params if name.startswith("inner")]:
            for wrong in (np.complex128, np.int32) if network == "BFloat16" else (np.float32,):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
                    changed = {**params, name: params[name].astype(wrong)}
                model = FLModel(params_type=kind, params=changed, meta={"client_name": "NYU"})
                assert not aggregator.accept_model(model)
                assert f"entry '{name}' is" in aggregator.refused["NYU"]


def test_weights_by_samples(make_aggregator, shared):
    aggregator = make_aggregator(aggregation_weights="samples")
    aggregator.accept_model(contribution(shared(1), "NYU", 30))
    aggregator.accept_model(contribution(shared(2), "UM", 10))
    assert np.allclose(aggregator.aggregate_model().params[NAME], 1.25 * shared()[NAME], rtol=1e-6)


@pytest.mark.parametrize("n_samples", [None, 0, -3, 2.5, "10", True, float("inf"), 10**400])
def test_a_bad_number_of_samples_is_refused_where_it_counts(make_aggregator, shared, n_samples):
    aggregator = make_aggregator(aggregation_weights="samples")
    assert not aggregator.accept_model(contribution(shared(), n_samples=n_samples))
    assert aggregator.refused["NYU"]
    equal = make_aggregator()
    assert equal.accept_model(contribution(shared(), n_samples=n_samples))


@pytest.mark.parametrize("weights", ["equal", "samples"])
def test_the_order_of_arrival_cannot_be_seen(make_aggregator, shared, weights):
    rng = np.random.default_rng(0)
    sent = {
        client: {
            name: (rng.standard_normal(array.shape) * 10.0**k).astype(np.float32)
            for name, array in shared().items()
        }
        for k, client in enumerate(["NYU", "USM", "UM", "UCLA"], start=-2)
    }
    found = set()
    aggregator = make_aggregator(aggregation_weights=weights)
    for order in itertools.permutations(sent):
        for client in order:
            assert aggregator.accept_model(contribution(sent[client], client, len(client) * 7))
        found.add(tuple(bits(aggregator.aggregate_model()).items()))
    assert len(found) == 1


def with_nan(params):
    params[NAME] = params[NAME].copy()
    params[NAME][0, 0] = np.nan
    return params


CASES = {
    "nan": (with_nan, "'classifier.weight' holds 1 values of 16 that are not finite"),
    "infinite": (
        lambda p: p | {NAME: np.full((2, 8), np.inf, np.float32)},
        "holds 16 values of 16 that are not finite",
    ),
    "shape": (lambda p: p | {NAME: p[NAME].T.copy()}, r"is \(8, 2\) torch.float32, expected"),
    "dtype": (lambda p: p | {NAME: p[NAME].astype(np.float64)}, "float64, expected"),
    "missing": (lambda p: {k: v for k, v in p.items() if k != NAME}, "1 missing"),
    "extra": (lambda p: p | {"extra": p[NAME]}, r"1 unknown \(extra\)"),
    "empty": (lambda p: {}, "4 missing"),
    "text": (lambda p: p | {NAME: "weights"}, "'classifier.weight' is not a numeric array but str"),
    "objects": (lambda p: p | {NAME: np.array([{}])}, "is not a numeric array but ndarray"),
    "list": (lambda p: p | {NAME: p[NAME].tolist()}, "is not a numeric array but list"),
    "byte order": (lambda p: p | {NAME: p[NAME].astype(">f4")}, "byte order"),
    "negative strides": (lambda p: p | {NAME: p[NAME][::-1]}, None),
    "long double": (lambda p: p | {NAME: p[NAME].astype(np.longdouble)}, ""),
    "no name": (lambda p: p | {7: p[NAME]}, "unknown"),
    "subject": (lambda p: p | {"sub-007": p[NAME]}, r"1 unknown \(<subject>\)"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_contribution_changes_nothing(aggregator, shared, case):
    change, reason = CASES[case]
    aggregator.accept_model(contribution(shared(1), "NYU"))
    accepted = aggregator.accept_model(contribution(change(shared(5)), "UM"))
    if reason is None:  # torch says no, or a copy is made: either is right
        assert accepted == ("UM" not in aggregator.refused)
        return
    assert not accepted
    assert re.search(reason, aggregator.refused["UM"])
    assert aggregator.accepted == ["NYU"]
    mean = aggregator.aggregate_model()
    assert bits(mean) == bits(FLModel(params=shared(1)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"params_type": None}, "no weights but"),
        ({"params": None}, "no weights but"),
        ({"params": [1, 2]}, "no weights but"),
    ],
)
def test_answers_without_weights_are_refused(aggregator, shared, changes, reason):
    model = contribution(shared())
    for name, value in changes.items():
        setattr(model, name, value)
    assert not aggregator.accept_model(model)
    assert reason in aggregator.refused["NYU"]


def test_a_second_contribution_of_a_client_is_refused(aggregator, shared):
    assert aggregator.accept_model(contribution(shared(1)))
    assert not aggregator.accept_model(contribution(shared(9)))
    assert "contributed to this round already" in aggregator.refused["NYU"]
    assert bits(aggregator.aggregate_model()) == bits(FLModel(params=shared(1)))
    assert aggregator.accept_model(contribution(shared(9))), "a new round"


def test_a_sites_own_error_is_the_reason(aggregator):
    answer = FLModel(metrics={}, meta={"client_name": "UM", REPORT: {"error": "at /x/y: no disk"}})
    assert not aggregator.accept_model(answer)
    assert aggregator.refused == {"UM": "at <path>: no disk"}


def test_local_entries_are_dropped_and_it_is_said(aggregator, shared, caplog):
    network, partition = make_network_of(aggregator)
    local = to_arrays({name: network.state_dict()[name] for name in partition.local})
    assert aggregator.accept_model(contribution(shared(1) | local, "NYU"))
    assert aggregator.accept_model(contribution(shared(1), "UM"))
    assert aggregator.dropped == {"NYU": 5}
    assert "NYU sent 5 entries that belong to its batch norm" in caplog.text
    assert set(aggregator.aggregate_model().params) == set(shared())
    assert aggregator.dropped == {}


def make_network_of(aggregator):
    return make_network(aggregator._persistor.experiment(aggregator.fl_ctx))


def test_under_fedavg_statistics_are_averaged_and_counters_dropped(make_aggregator, experiment):
    aggregator = make_aggregator(policy="none")
    network, _ = make_network(experiment(policy="none"))
    for client, mean in (("NYU", 1.0), ("UM", 4.0)):
        state = network.state_dict()
        state["hidden.0.norm.running_mean"] = torch.full((8,), mean)
        assert aggregator.accept_model(contribution(to_arrays(state), client))
    params = aggregator.aggregate_model().params
    assert params["hidden.0.norm.running_mean"].tolist() == [2.5] * 8
    assert "hidden.0.norm.num_batches_tracked" not in params
    assert aggregator.dropped == {}


def test_without_any_contribution_there_is_no_mean(aggregator, shared):
    with pytest.raises(ContributionError, match="no contribution was accepted"):
        aggregator.aggregate_model()
    aggregator.accept_model(contribution(with_nan(shared())))
    with pytest.raises(ContributionError, match="no contribution was accepted"):
        aggregator.aggregate_model()


def test_resetting_forgets_the_round(aggregator, shared):
    aggregator.accept_model(contribution(shared(3)))
    aggregator.accept_model(contribution({}, "UM"))
    aggregator.reset_stats()
    assert (aggregator.accepted, aggregator.refused, aggregator.dropped) == ([], {}, {})
    assert aggregator.accept_model(contribution(shared(1)))
    assert bits(aggregator.aggregate_model()) == bits(FLModel(params=shared(1)))


def test_a_result_does_not_alias_what_arrived(aggregator, shared):
    sent = shared(1)
    aggregator.accept_model(contribution(sent))
    mean = aggregator.aggregate_model()
    sent[NAME][:] = 99
    assert np.array_equal(mean.params[NAME], shared(1)[NAME])


def test_scatter_and_gather_api(aggregator, shared):
    """FLARE's ScatterAndGather calls accept, aggregate and reset with shareables."""
    context = aggregator.fl_ctx

    def arrives(client, params, kind=DataKind.WEIGHTS):
        shareable = DXO(kind, params, {FLMetaKey.NUM_STEPS_CURRENT_ROUND: 3}).to_shareable()
        peer = FLContext()
        peer.set_prop(ReservedKey.IDENTITY_NAME, client, private=False, sticky=True)
        shareable.set_peer_props(peer.get_all_public_props())
        return aggregator.accept(shareable, context)

    assert arrives("NYU", shared(1)) is True
    assert arrives("UM", shared(3)) is True
    assert arrives("USM", with_nan(shared(5))) is False
    assert arrives("UCLA", {"accuracy": 0.5}, DataKind.METRICS) is False
    assert aggregator.accept(Shareable(), context) is False
    assert aggregator.accepted == ["NYU", "UM"]
    assert set(aggregator.refused) >= {"USM", "UCLA"}
    result = FLModelUtils.from_shareable(aggregator.aggregate(context))
    assert np.allclose(result.params[NAME], 2 * shared()[NAME], rtol=1e-6)
    aggregator.reset(context)
    assert aggregator.refused == {}


def test_a_foreign_persistor_ends_the_job(make_context, experiment):
    context = make_context(experiment(), persistor=object())
    FedBNAggregator().handle_event(EventType.START_RUN, context)
    assert context.get_engine().panics == [
        "component 'persistor' must be a SharedModelPersistor, got object"
    ]


def test_use_before_the_start_of_a_run_is_an_error(shared):
    with pytest.raises(RuntimeError, match="before the start of a run"):
        FedBNAggregator().accept_model(contribution(shared()))
