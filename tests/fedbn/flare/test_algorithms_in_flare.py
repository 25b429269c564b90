"""What SCAFFOLD, groups, fine-tuning and training alone need of FLARE's components."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.abstract.model import ModelLearnableKey, make_model_learnable

from data_prep.site_store import read_site_store
from fedbn.core.control_variates import PREFIX
from fedbn.federation.site import Site, make_network
from fedbn.federation.site_state import (
    COMPLETE_MODEL,
    LOCAL_ENTRIES,
    SHARED_WEIGHTS,
    load_checkpoint,
    read_scores_file,
)
from fedbn.flare.aggregator import FedBNAggregator
from fedbn.flare.filters import BatchNormFilter
from fedbn.flare.job import to_arrays, to_tensors

SCAFFOLD = {
    "algorithm": {"name": "scaffold"},
    "training": {"optimizer": "sgd", "batch_size": 16, "learning_rate": 0.05},
}
CUTS = {
    "sites": ("NYU", "UM", "USM"),
    "algorithm": {"name": "clustered", "split_mean_norm": 100, "split_site_norm": 0.01},
    "policy": "none",
}


@pytest.fixture
def make_aggregator(make_persistor, experiment):
    def make(**changes):
        persistor, context = make_persistor(experiment(**changes))
        aggregator = FedBNAggregator()
        aggregator.handle_event(EventType.START_RUN, context)
        return aggregator, persistor, context

    return make


def contribution(client, params):
    return FLModel(params_type=ParamsType.FULL, params=params, meta={"client_name": client})


def same(left, right):
    return list(left) == list(right) and all(torch.equal(left[k], right[k]) for k in left)


# -------------------------------------------------------------------------------------- SCAFFOLD


def test_a_control_variate_survives_a_new_process_for_each_task(make_client, experiment, data_root):
    site = Site("NYU", read_site_store(data_root / "NYU"), experiment(**SCAFFOLD))
    local, received = site.initial_local(), site.initial_shared()
    client = make_client(experiment(**SCAFFOLD))
    client.ask("preflight")
    for number in range(3):
        client.restart()
        _, answer = client.ask("train", to_arrays(received), number, prepared=["NYU"])
        result = site.train_round(received, local, number)
        assert same(to_tensors(answer.params), result.shared)
        kept, _ = load_checkpoint(client.state_folder / "local_entries.pt", LOCAL_ENTRIES)
        assert same(kept, result.local)
        assert bool(kept[f"{PREFIX}classifier.weight"].any())
        # The server's variate is another: other sites have sent theirs.
        local = result.local
        received = {
            name: tensor * 0.5 if name.startswith(PREFIX) else tensor
            for name, tensor in result.shared.items()
        }
    client.ask("final", to_arrays(received), prepared=["NYU"])
    model, _ = load_checkpoint(client.state_folder / "model.pt", COMPLETE_MODEL)
    assert not [name for name in model if name.startswith(PREFIX)]
    assert set(site.network.state_dict()) < set(model)


def test_control_variates_travel_under_their_prefix_and_are_saved(make_aggregator):
    aggregator, persistor, context = make_aggregator(**SCAFFOLD)
    ((clients, arrays),) = aggregator.messages(["site-1", "site-2"])
    assert clients == ["site-1", "site-2"]
    start = persistor.load_model(context)[ModelLearnableKey.WEIGHTS]
    assert list(arrays) == list(start)
    variates = [name for name in arrays if name.startswith(PREFIX)]
    assert len(variates) == len(arrays) - len(variates) == 4
    assert not any(arrays[name].any() for name in variates)
    for client, value in (("site-1", 1), ("site-2", 3)):
        sent = {name: np.full_like(array, value) for name, array in arrays.items()}
        assert aggregator.accept_model(contribution(client, sent))
    mean = aggregator.aggregate_model()
    assert {float(array.flat[0]) for array in mean.params.values()} == {2.0}
    assert list(aggregator.messages(["site-1"])[0][1]) == list(mean.params)
    persistor.save_model(make_model_learnable(mean.params, {}), context)
    saved, facts = load_checkpoint(persistor.path(context), SHARED_WEIGHTS)
    of_sites = [name for name in saved if name.startswith(f"{PREFIX}site ")]
    assert [name for name in saved if name not in of_sites] == list(mean.params)
    assert of_sites == [
        f"{PREFIX}site {site}:{name.removeprefix(PREFIX)}"
        for site in ("NYU", "UM")
        for name in variates
    ]
    assert facts["server"] == {"site_weights": {"NYU": 1.0, "UM": 1.0}}


def test_a_warm_start_takes_the_network_s_entries_and_begins_with_no_variate(
    make_aggregator, make_persistor, experiment
):
    _, first, context = make_aggregator(**SCAFFOLD)
    start = first.load_model(context)[ModelLearnableKey.WEIGHTS]
    first.save_model(make_model_learnable({k: v + 1 for k, v in start.items()}, {}), context)
    second, context = make_persistor(
        experiment(**SCAFFOLD), initial_weights=str(first.path(context))
    )
    found = second.load_model(context)[ModelLearnableKey.WEIGHTS]
    for name, array in start.items():
        expected = array if name.startswith(PREFIX) else array + 1
        assert np.array_equal(found[name], expected), name


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_control_variate_that_is_not_finite_is_refused(make_aggregator, broken):
    aggregator, _, _ = make_aggregator(**SCAFFOLD)
    ((_, arrays),) = aggregator.messages(["site-1"])
    name = f"{PREFIX}classifier.bias"
    sent = {**arrays, name: np.full_like(arrays[name], broken)}
    assert not aggregator.accept_model(contribution("site-1", sent))
    assert f"entry '{name}' holds 2 values of 2 that are not finite" in aggregator.refused["site-1"]


def test_a_sites_filter_lets_the_variates_of_shared_entries_pass_alone(make_context, experiment):
    """A job without local batch norm, at a site whose own filter keeps batch norm."""
    settings = experiment(policy="none", **SCAFFOLD)
    network, partition = make_network(settings)
    names = [*partition.shared, *(f"{PREFIX}{name}" for name, _ in network.named_parameters())]
    data = {name: np.ones(1, dtype=np.float32) for name in names}
    message = DXO(DataKind.WEIGHTS, data).to_shareable()
    result = BatchNormFilter().process(message, make_context(settings, name="site-1"))
    passed = {"hidden.0.linear.weight", "hidden.0.linear.bias"} & set(data) | {
        name for name in data if ".norm." not in name
    }
    assert set(from_shareable(result).data) == passed
    assert any(name.startswith(PREFIX) for name in passed)


# ---------------------------------------------------------------------------------------- groups


def test_each_group_of_clients_receives_its_own_model(make_aggregator):
    aggregator, _, _ = make_aggregator(**CUTS)
    clients = ["site-1", "site-2", "site-3"]
    ((together, arrays),) = aggregator.messages(clients)
    assert together == clients
    for client, value in zip(clients, (1.0, -1.0, 1.0), strict=True):
        sent = {name: array + np.float32(value) for name, array in arrays.items()}
        assert aggregator.accept_model(contribution(client, sent))
    state = aggregator.aggregate_model().params
    assert {name.partition(":")[0] for name in state} == {"group NYU+USM", "group UM"}
    assert aggregator.facts()["groups"] == [["NYU", "USM"], ["UM"]]
    messages = aggregator.messages(clients)
    assert [group for group, _ in messages] == [["site-1", "site-3"], ["site-2"]]
    for (_, received), value in zip(messages, (1.0, -1.0), strict=True):
        assert all(np.allclose(received[k], arrays[k] + value, atol=1e-6) for k in arrays)


# ----------------------------------------------------------------------------------- fine-tuning


def test_the_fine_tuned_model_is_kept_beside_the_federated_one(make_client, experiment, data_root):
    settings = experiment(finetune={"epochs": 2, "entries": "head"})
    site = Site("NYU", read_site_store(data_root / "NYU"), settings)
    client = make_client(settings)
    client.ask("preflight")
    shared, local = site.initial_shared(), site.initial_local()
    report, _ = client.ask("final", to_arrays(shared), prepared=["NYU"])
    further, _ = client.ask("finetune", to_arrays(shared), prepared=["NYU"])
    federated = site.evaluate(shared, local)
    tuned = site.finetune()
    assert report["results"]["federated"] == site.task.measure(federated)
    assert further["results"] == {"finetuned": site.task.measure(tuned)}
    files = [client.state_folder / name for name in ("model.pt", "model_finetuned.pt")]
    (plain, _), (finetuned, _) = (load_checkpoint(file, COMPLETE_MODEL) for file in files)
    changed = {name for name in plain if not torch.equal(plain[name], finetuned[name])}
    assert changed == {"classifier.weight", "classifier.bias"}
    assert torch.equal(finetuned["classifier.bias"], site.network.classifier.bias)
    kept = read_scores_file(client.state_folder / "predictions" / "final.npz")
    assert kept == {"federated": federated, "finetuned": tuned}


# ----------------------------------------------------------------------------------------- alone


def test_a_site_that_trains_alone_sends_no_array(make_client, make_aggregator, experiment):
    settings = {"algorithm": {"name": "alone"}, "policy": "none"}
    aggregator, _, _ = make_aggregator(**settings)
    ((_, arrays),) = aggregator.messages(["NYU"])
    assert arrays == {}
    client = make_client(experiment(**settings))
    client.ask("preflight")
    report, answer = client.ask("train", {}, 0, prepared=["NYU"])
    assert "error" not in report
    assert answer.params == {}
    answer.meta["client_name"] = "NYU"
    assert aggregator.accept_model(answer)
    assert aggregator.aggregate_model().params == {}
    kept, _ = load_checkpoint(client.state_folder / "local_entries.pt", LOCAL_ENTRIES)
    assert list(kept) == list(make_network(experiment())[0].state_dict())
