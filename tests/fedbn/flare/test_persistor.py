from __future__ import annotations

import re

import pytest
import torch
from nvflare.apis.event_type import EventType
from nvflare.app_common.abstract.model import ModelLearnableKey, make_model_learnable

from fedbn.core.normalization import entries
from fedbn.federation.site import make_network
from fedbn.federation.site_state import (
    COMPLETE_MODEL,
    SHARED_WEIGHTS,
    load_checkpoint,
    save_checkpoint,
)
from fedbn.flare.persistor import SharedModelPersistor


@pytest.mark.parametrize(
    ("policy", "n_shared", "n_local"), [("fedbn", 4, 5), ("silobn", 6, 3), ("none", 8, 1)]
)
def test_the_schema_is_the_network_without_local_entries(
    make_persistor, experiment, policy, n_shared, n_local
):
    persistor, context = make_persistor(experiment(policy=policy))
    network, partition = make_network(experiment(policy=policy))
    weights = persistor.load_model(context)[ModelLearnableKey.WEIGHTS]
    assert tuple(weights) == partition.shared
    assert (len(weights), len(persistor.local_names(context))) == (n_shared, n_local)
    state = network.state_dict()
    assert all(torch.equal(torch.from_numpy(array), state[k]) for k, array in weights.items())


def test_the_saved_file_says_that_it_is_not_a_complete_model(make_persistor, experiment):
    persistor, context = make_persistor(experiment())
    persistor.save_model(persistor.load_model(context), context)
    content = torch.load(persistor.path(context), weights_only=True)
    assert content["complete_model"] is False
    tensors, facts = load_checkpoint(persistor.path(context), SHARED_WEIGHTS)
    assert set(tensors) == set(persistor.shared_entries(context))
    assert facts["policy"] == "fedbn"
    assert len(facts["kept at the sites"]) == 5
    assert facts["network"] == {
        "name": "ConnectomeMLP",
        "args": {"in_features": 66, "hidden": [8]},
    }


def test_starting_from_an_earlier_run(make_persistor, make_context, experiment):
    first, context = make_persistor(experiment())
    shared = {name: tensor + 1 for name, tensor in first.shared_entries(context).items()}
    weights = {name: tensor.numpy() for name, tensor in shared.items()}
    first.save_model(make_model_learnable(weights, {}), context)
    second = SharedModelPersistor(initial_weights="FL_global_model.pt")
    second.handle_event(EventType.START_RUN, context)
    found = second.shared_entries(context)
    assert all(torch.equal(found[name], tensor) for name, tensor in shared.items())


def fewer(tensors):
    return dict(list(tensors.items())[1:])


def other_shape(tensors):
    return {name: tensor[:1] for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        (SHARED_WEIGHTS, fewer, "do not fit the network: 1 missing"),
        (SHARED_WEIGHTS, other_shape, "do not fit the network: entry"),
        (COMPLETE_MODEL, dict, "holds 'complete model', expected 'shared weights'"),
        (None, None, "file weights.pt is missing"),
    ],
)
def test_initial_weights_that_do_not_fit_end_the_job(
    make_context, experiment, tmp_path, kind, change, reason
):
    persistor = SharedModelPersistor(initial_weights="weights.pt")
    context = make_context(experiment(), persistor=persistor)
    if kind is not None:
        network, partition = make_network(experiment())
        path = tmp_path / "workspaces" / "server" / "job-1" / "app" / "weights.pt"
        save_checkpoint(path, kind, change(entries(network, partition.shared)), {})
    persistor.handle_event(EventType.START_RUN, context)
    (panic,) = context.get_engine().panics
    assert reason in panic


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"network": {"name": "NoSuchNet"}}, "unknown network 'NoSuchNet'"),
        (
            {
                "network": {
                    "name": "UNet",
                    "args": {
                        "spatial_dims": 2,
                        "in_channels": 1,
                        "out_channels": 2,
                        "channels": [4, 8],
                        "strides": [2],
                    },
                }
            },
            "network UNet has no batch-norm layer .*InstanceNorm2d.*norm='batch'",
        ),
        (
            {
                "network": {
                    "name": "torch.nn.Linear",
                    "args": {"in_features": 66, "out_features": 2},
                }
            },
            r"network Linear has no batch-norm layer \(normalisation layers found: none\)",
        ),
    ],
)
def test_a_network_that_cannot_be_used_ends_the_job(
    make_context, experiment, monkeypatch, changes, reason
):
    monkeypatch.setenv("FEDBN_ALLOW_NETWORKS", "torch.nn.Linear")
    persistor = SharedModelPersistor()
    context = make_context(experiment(**changes), persistor=persistor)
    persistor.handle_event(EventType.START_RUN, context)
    (panic,) = context.get_engine().panics
    assert re.search(reason, panic)
    assert "\n" not in panic


def test_fedavg_takes_a_network_without_batch_norm(make_persistor, experiment, monkeypatch):
    monkeypatch.setenv("FEDBN_ALLOW_NETWORKS", "torch.nn.Linear")
    linear = {"name": "torch.nn.Linear", "args": {"in_features": 66, "out_features": 2}}
    persistor, context = make_persistor(experiment(policy="none", network=linear))
    assert context.get_engine().panics == []
    assert set(persistor.shared_entries(context)) == {"weight", "bias"}
