"""The server's side of each algorithm, against means computed by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from fedbn.core.aggregation import ContributionError
from fedbn.core.control_variates import PREFIX
from fedbn.core.normalization import StateMismatchError, split
from fedbn.federation.experiment import Experiment
from fedbn.federation.server import ClusteredServer, ScaffoldServer, Server, make_server, warm_start

SITES = ("NYU", "UM", "USM")


def lists(tensors):
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def entry(*values):
    return {"w": torch.tensor([float(value) for value in values])}


def with_variate(weight, variate):
    return {"w": torch.tensor([float(weight)]), f"{PREFIX}w": torch.tensor([float(variate)])}


@pytest.mark.parametrize(("weights", "expected"), [((1, 1, 1), 4.0), ((10, 20, 30), 4.5)])
def test_a_mean_of_equal_and_of_unequal_sites(weights, expected):
    server = Server(entry(0))
    for site, value, weight in zip(SITES, (3, 3, 6), weights, strict=True):
        server.add(site, entry(value), weight)
    assert lists(server.message("NYU")) == {"w": [0.0]}
    server.update()
    assert lists(server.message("NYU")) == {"w": [expected]} == lists(server.state())
    assert server.facts() == {}
    assert server.addressees(SITES) == [list(SITES)]


# -------------------------------------------------------------------------------------- SCAFFOLD


def test_control_variates_start_at_zero_for_trained_entries_alone():
    server = ScaffoldServer({"w": torch.ones(2), "statistic": torch.ones(2)}, ["w"])
    assert lists(server.message("NYU")) == {
        "w": [1.0, 1.0],
        "statistic": [1.0, 1.0],
        f"{PREFIX}w": [0.0, 0.0],
    }


def test_the_server_s_variate_is_the_mean_of_the_sites():
    server = ScaffoldServer(entry(0), ["w"])
    for site, weight, variate in zip(SITES, (1, 2, 6), (3, 0, 6), strict=True):
        server.add(site, with_variate(weight, variate))
    server.update()
    assert lists(server.message("NYU")) == {"w": [3.0], f"{PREFIX}w": [3.0]}


def test_a_site_that_misses_a_round_counts_with_its_last_variate():
    """The paper's c + |S| / N * mean(c_i' - c_i) = 3 + 2/3 * mean(9 - 3, 3 - 0) = 6."""
    server = ScaffoldServer(entry(0), ["w"])
    for site, variate in zip(SITES, (3, 0, 6), strict=True):
        server.add(site, with_variate(1, variate))
    server.update()
    server.reset()
    server.add("UM", with_variate(4, 3))
    server.add("NYU", with_variate(2, 9))
    server.update()
    assert lists(server.message("USM")) == {"w": [3.0], f"{PREFIX}w": [6.0]}


def test_a_refused_variate_leaves_no_trace():
    server = ScaffoldServer(entry(0), ["w"])
    with pytest.raises(ContributionError, match="entry 'control_variate:w' holds 1 values of 1"):
        server.add("UM", with_variate(1, float("nan")))
    with pytest.raises(ContributionError, match=r"1 missing .*control_variate:w"):
        server.add("USM", entry(1))
    server.add("NYU", with_variate(1, 5))
    server.update()
    assert lists(server.state()) == {"w": [1.0], f"{PREFIX}w": [5.0]}


def test_what_is_kept_of_a_site_is_a_copy():
    server = ScaffoldServer(entry(0), ["w"])
    sent = with_variate(1, 5)
    server.add("NYU", sent)
    server.update()
    sent[f"{PREFIX}w"].fill_(99)
    server.reset()
    server.add("UM", with_variate(1, 1))
    server.update()
    assert lists(server.state())[f"{PREFIX}w"] == [3.0]


# ---------------------------------------------------------------------------------------- groups


def clustered(*, mean_norm=1.0, site_norm=1.0, sites=SITES):
    return ClusteredServer(entry(0, 0), ["w"], sites, mean_norm=mean_norm, site_norm=site_norm)


def one_round(server, **updates):
    server.reset()
    for site, values in updates.items():
        server.add(site, entry(*values))
    server.update()


def test_a_group_is_cut_and_each_part_goes_on_from_its_own_mean():
    server = clustered()
    one_round(server, NYU=[2, 1], UM=[4, 1], USM=[-6, 0])  # their mean (0, 2/3) is short
    assert lists(server.message("NYU")) == lists(server.message("UM")) == {"w": [3.0, 1.0]}
    assert lists(server.message("USM")) == {"w": [-6.0, 0.0]}
    assert server.addressees(["USM", "UM", "NYU"]) == [["USM"], ["UM", "NYU"]]
    assert lists(server.state()) == {"group NYU+UM:w": [3.0, 1.0], "group USM:w": [-6.0, 0.0]}
    facts = server.facts()
    assert facts["groups"] == [["NYU", "UM"], ["USM"]]
    (look,) = facts["updates"]
    assert look["sites"] == list(SITES)
    assert look["cut"] == [["NYU", "UM"], ["USM"]]
    assert look["mean_norm"] == pytest.approx(2 / 3)
    assert look["largest_site_norm"] == 6.0
    assert look["similarity_across"] == pytest.approx(-2 / 5**0.5)  # NYU and USM


def test_a_group_that_agrees_stays_and_its_update_counts_from_its_own_model():
    server = clustered()
    one_round(server, NYU=[4, 0], UM=[4, 1], USM=[4, -1])
    assert server.facts()["groups"] == [list(SITES)]
    assert lists(server.message("UM")) == {"w": [4.0, 0.0]}
    one_round(server, NYU=[4, 0], UM=[6, 0], USM=[2, 0])  # updates 0, 2 and -2
    (look,) = server.facts()["updates"]
    assert look["mean_norm"] == 0.0
    assert server.facts()["groups"] == [["NYU", "UM"], ["USM"]]  # a tie, taken by name


def test_groups_are_cut_again():
    server = clustered(sites=("A", "B", "C", "D"))
    one_round(server, A=[3, 1], B=[3, -1], C=[-3, 1], D=[-3, -1])
    assert server.facts()["groups"] == [["A", "B"], ["C", "D"]]
    one_round(server, A=[3, 5], B=[3, -5], C=[-3, 0], D=[-3, 0.5])
    assert server.facts()["groups"] == [["A"], ["B"], ["C", "D"]]
    assert [look["sites"] for look in server.facts()["updates"]] == [["A", "B"], ["C", "D"]]


def test_only_a_complete_group_is_cut_and_an_absent_one_keeps_its_model():
    server = clustered()
    one_round(server, NYU=[4, 0], USM=[-4, 0])
    assert server.facts() == {"groups": [list(SITES)], "updates": []}
    one_round(server, NYU=[2, 1], UM=[4, 1], USM=[-6, 0])
    one_round(server, USM=[-7, 0])
    assert lists(server.message("NYU")) == {"w": [3.0, 1.0]}
    assert lists(server.message("USM")) == {"w": [-7.0, 0.0]}
    with pytest.raises(ContributionError, match="no contribution was accepted"):
        one_round(server)


def test_entries_that_are_not_trained_point_nowhere_but_are_averaged():
    shared = {"w": torch.zeros(1), "statistic": torch.zeros(1)}
    server = ClusteredServer(shared, ["w"], ("A", "B"), mean_norm=1, site_norm=0.5)
    server.add("A", {"w": torch.ones(1), "statistic": torch.full((1,), 50.0)})
    server.add("B", {"w": torch.ones(1), "statistic": torch.full((1,), -50.0)})
    server.update()
    assert server.facts()["groups"] == [["A", "B"]]
    assert lists(server.message("A")) == {"w": [1.0], "statistic": [0.0]}


def test_a_contribution_that_does_not_fit_is_refused_and_changes_nothing():
    server = clustered()
    for tensors, reason in (
        (entry(1), "expected .2,."),
        (entry(1, float("inf")), "not finite"),
        ({}, "1 missing"),
    ):
        with pytest.raises(ContributionError, match=reason):
            server.add("NYU", tensors)
    server.add("NYU", entry(1, 1))
    with pytest.raises(ContributionError, match="already"):
        server.add("NYU", entry(1, 1))
    with pytest.raises(ContributionError, match="site 'XYZ' belongs to no group"):
        server.add("XYZ", entry(1, 1))


# ------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"name": "scaffold"},
        {"name": "clustered", "split_mean_norm": 10, "split_site_norm": 0.1},
    ],
)
def test_the_order_of_sites_changes_no_bit(algorithm):
    network = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    partition = split(network, "none")
    generator = torch.Generator().manual_seed(0)
    states = []
    for order in itertools.permutations(SITES):
        experiment = Experiment(sites=order, algorithm=algorithm, training={"optimizer": "sgd"})
        server = make_server(experiment, network, partition)
        for number in range(2):
            server.reset()
            sent = {}
            for site in SITES:
                generator.manual_seed(1000 * number + SITES.index(site))
                sent[site] = {
                    name: tensor + torch.randn(tensor.shape, generator=generator)
                    for name, tensor in server.message(site).items()
                }
            for site in order:
                server.add(site, sent[site], 3 + SITES.index(site))
            server.update()
            if order == SITES:  # saved and restored after each round: the same bits
                saved = server.saved()
                server = make_server(experiment, network, partition)
                server.restore(*saved)
        states.append(server.state())
    for state in states[1:]:
        assert list(state) == list(states[0])
        assert all(torch.equal(tensor, states[0][name]) for name, tensor in state.items())
    if algorithm.get("name") == "scaffold":
        variates = {name for name in states[0] if name.startswith(PREFIX)}
        assert variates == {f"{PREFIX}{name}" for name, _ in network.named_parameters()}


# ----------------------------------------------------------------------------- saved and restored


def test_a_restored_server_remembers_the_variate_of_a_site_that_is_absent_then():
    servers = [ScaffoldServer(entry(0), ["w"]) for _ in range(2)]
    for site, weight, variate in zip(SITES, (1, 2, 6), (3, 0, 6), strict=True):
        servers[0].add(site, with_variate(weight, variate), weight)
    servers[0].update()
    tensors, facts = servers[0].saved()
    assert facts == {"site_weights": {"NYU": 1, "UM": 2, "USM": 6}}
    servers[1].restore(tensors, facts)
    for server in servers:
        server.reset()
        server.add("NYU", with_variate(2, 9))
        server.update()
    assert lists(servers[1].state()) == lists(servers[0].state())
    assert lists(servers[1].saved()[0]) == lists(servers[0].saved()[0])


def test_a_restored_server_has_the_groups_of_before():
    server = clustered()
    one_round(server, NYU=[2, 1], UM=[4, 1], USM=[-6, 0])
    again = clustered()
    again.restore(*server.saved())
    assert again.addressees(SITES) == [["NYU", "UM"], ["USM"]]
    for each in (server, again):
        one_round(each, NYU=[3, 9], UM=[3, -9], USM=[0, 0])
    assert lists(again.state()) == lists(server.state())
    assert again.facts() == server.facts()


@pytest.mark.parametrize(
    ("server", "saved", "reason"),
    [
        (Server(entry(0)), ({"v": torch.zeros(1)}, {}), "the saved entries do not fit"),
        (ScaffoldServer(entry(0), ["w"]), (entry(1), {}), "no control variates of SCAFFOLD"),
        (
            ScaffoldServer(entry(0), ["w"]),
            (with_variate(1, 1), {"site_weights": {"NYU": 1.0}}),
            "saved control variates of site 'NYU' do not fit",
        ),
        (clustered(), (entry(1, 2), {}), "no groups of NYU, UM, USM"),
        (clustered(), (entry(1, 2), {"groups": [["NYU", "UM"]]}), "no groups of NYU, UM, USM"),
        (clustered(), (entry(1, 2), {"groups": [list(SITES)]}), "group NYU.UM.USM do not fit"),
    ],
)
def test_what_another_server_has_saved_is_refused_and_changes_nothing(server, saved, reason):
    before = lists(server.saved()[0])
    with pytest.raises(StateMismatchError, match=reason):
        server.restore(*saved)
    assert lists(server.saved()[0]) == before


def test_a_warm_start_takes_the_networks_entries_alone():
    scaffold = ScaffoldServer(entry(0), ["w"])
    scaffold.add("NYU", with_variate(4, 3))
    scaffold.update()
    assert lists(warm_start(scaffold.saved()[0])) == {"w": [4.0]}
    groups = clustered()
    assert lists(warm_start(groups.saved()[0])) == {"w": [0.0, 0.0]}
    one_round(groups, NYU=[2, 1], UM=[4, 1], USM=[-6, 0])
    with pytest.raises(StateMismatchError, match=r"2 groups of sites \(NYU.UM, USM\): no single"):
        warm_start(groups.saved()[0])
