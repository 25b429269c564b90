"""What is in the messages, read byte by byte from everything that a run's processes send."""

from __future__ import annotations

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedbn.federation.site import make_network
from fedbn.federation.site_state import LOCAL_ENTRIES, load_checkpoint

pytestmark = pytest.mark.slow

STATISTICS = ("hidden.0.norm.running_mean", "hidden.0.norm.running_var")


def in_any(needle, frames):
    return any(needle in sent for sent in frames.values())


def bits(tensor):
    return tensor.numpy().tobytes()


def local_entries_after_each_round(run, in_process):
    """Return (round, site, name, tensor) of every entry of batch norm that is not trivial."""
    found = []
    for rounds in range(1, run.experiment.rounds + 1):
        for site, entries in in_process(run, rounds=rounds).local.items():
            found += [(rounds - 1, site, name, tensor) for name, tensor in entries.items()]
    return [item for item in found if item[3].is_floating_point()]


def test_batch_norm_is_in_no_message_in_either_direction(fedbn_run, in_process):
    frames = fedbn_run.frames()
    assert len(frames) >= 3, "the server's process and one for each client"
    _, partition = make_network(fedbn_run.experiment)
    for name in partition.local:
        assert not in_any(name.encode(), frames), f"the name {name} was sent"
    kept = local_entries_after_each_round(fedbn_run, in_process)
    assert len(kept) == 2 * 2 * 4  # rounds, sites, entries
    for number, site, name, tensor in kept:
        assert len(bits(tensor)) == 32
        assert len(tensor.unique()) == 8, "so that its bytes stand for nothing else"
        assert not in_any(bits(tensor), frames), f"{name} of {site} after round {number} was sent"
    for site in fedbn_run.experiment.sites:
        last, _ = load_checkpoint(fedbn_run.state(site) / "local_entries.pt", LOCAL_ENTRIES)
        for name, tensor in last.items():
            assert not (tensor.is_floating_point() and in_any(bits(tensor), frames)), name


def test_the_same_reader_finds_shared_entries_in_both_directions(fedbn_run, in_process):
    """A control: without it, a reader that sees nothing would pass the test above."""
    frames = fedbn_run.frames()
    network, partition = make_network(fedbn_run.experiment)
    state = network.state_dict()
    after_one_round = in_process(fedbn_run, rounds=1)
    at_the_end = in_process(fedbn_run)
    for name in partition.shared:
        # The server: the initial weights, and the mean after each round. The clients: theirs.
        senders = [pid for pid, sent in frames.items() if bits(state[name]) in sent]
        assert len(senders) == 1, "only the server sends the initial weights"
        (server,) = senders
        assert bits(after_one_round.shared[name]) in frames[server]
        assert bits(at_the_end.shared[name]) in frames[server]
        clients = [pid for pid, sent in frames.items() if name.encode() in sent and pid != server]
        assert len(clients) == 2, "two clients send an entry of this name"
    alone = in_process(fedbn_run, sites=("UM",), rounds=1)  # the mean over one site is its weights
    for name in partition.shared:
        senders = [pid for pid, sent in frames.items() if bits(alone.shared[name]) in sent]
        assert len(senders) == 1
        assert senders != [server]


def test_the_same_reader_finds_batch_norm_where_it_travels(fedavg_run, in_process):
    """The other control: under FedAvg names and values of batch norm are seen."""
    frames = fedavg_run.frames()
    after_one_round = in_process(fedavg_run, rounds=1)
    for name in (*STATISTICS, "hidden.0.norm.weight", "hidden.0.norm.bias"):
        assert in_any(name.encode(), frames), name
        assert in_any(bits(after_one_round.shared[name]), frames), name
    assert not in_any(b"num_batches_tracked", frames)


@pytest.mark.parametrize("run", ["fedbn_run", "fedavg_run"])
def test_no_subject_and_no_path_is_in_any_message(run, request):
    run = request.getfixturevalue(run)
    frames = run.frames()
    for needle in (b"sub-NYU", b"sub-UM", str(run.data).encode(), b"stores with blanks"):
        assert not in_any(needle, frames), needle
    assert in_any(b"twelve regions", frames), "the atlas is part of the preflight's answer"


def test_the_curves_arrive_at_the_server_for_every_site_and_round(fedbn_run):
    folder = fedbn_run.run_folder / "tb_events"
    assert sorted(path.name for path in folder.iterdir()) == ["site-1", "site-2"]
    records = fedbn_run.results["rounds"]
    for client, site in (("site-1", "NYU"), ("site-2", "UM")):
        events = EventAccumulator(str(folder / client))
        events.Reload()
        names = [
            f"{metric}/{when}"
            for metric in ("window_accuracy", "subject_accuracy", "cross_entropy")
            for when in ("before_training", "after_training")
        ]
        assert sorted(events.Tags()["scalars"]) == sorted([*names, "training_loss"])
        for name in names:
            metric, when = name.split("/")
            points = {event.step: event.value for event in events.Scalars(name)}
            expected = {r["round"]: r["sites"][site][when][metric] for r in records}
            assert points == pytest.approx(expected, rel=1e-6)
        losses = [event.value for event in events.Scalars("training_loss")]
        assert losses == pytest.approx([r["sites"][site]["training_loss"][-1] for r in records])


def test_random_bytes_are_not_found():
    """The reader's own test: 32 bytes that nobody sent are in no frame."""
    frames = {1: bits(torch.zeros(64))}
    assert in_any(bits(torch.zeros(8)), frames)
    assert not in_any(bits(torch.rand(8)), frames)
