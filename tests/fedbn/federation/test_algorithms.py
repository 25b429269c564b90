"""Methods as whole runs in this process, on small made-up sites."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from classifier import train_classifier

from data_prep.site_store import read_site_store
from fedbn.core import control_variates
from fedbn.core.aggregation import WeightedMean
from fedbn.core.control_variates import PREFIX
from fedbn.core.networks import NoHeadError
from fedbn.core.normalization import StateMismatchError, entries
from fedbn.core.training import derive_seed
from fedbn.federation.experiment import ExperimentError
from fedbn.federation.results import without_nan
from fedbn.federation.simulation import federate, read_sites, run_federation
from fedbn.federation.site import Site
from fedbn.study.methods import METHODS, method

SGD = {"optimizer": "sgd", "batch_size": 20, "local_epochs": 2, "learning_rate": 0.05}
SCAFFOLD = {"algorithm": {"name": "scaffold"}, "training": SGD}
NORM = "hidden.0.norm"
FEDERATED_IN_FLARE = [name for name, found in METHODS.items() if found.in_flare]


@pytest.fixture
def run(data_root, experiment):
    def go(**changes):
        settings = experiment(**changes)
        return federate(settings, read_sites(data_root, settings), score_rounds=False)

    return go


@pytest.fixture
def make_site(data_root, experiment):
    def make(name="NYU", **changes):
        return Site(name, read_site_store(data_root / name), experiment(**changes))

    return make


def same(left, right):
    return list(left) == list(right) and all(torch.equal(left[k], right[k]) for k in left)


# -------------------------------------------------------------------------------------- SCAFFOLD


@pytest.mark.parametrize("policy", ["fedbn", "silobn", "none"])
def test_two_rounds_of_scaffold_by_hand(run, make_site, policy):
    """Written out over plain training: nothing of the server or the site's own code is used."""
    sites = {name: make_site(name, policy=policy, **SCAFFOLD) for name in ("NYU", "UM")}
    one = sites["NYU"]
    state = one.network.state_dict()
    x = {name: state[name].clone() for name in one.partition.shared}
    local = {
        name: {k: site.network.state_dict()[k].clone() for k in site.partition.local}
        for name, site in sites.items()
    }
    trained = [name for name, _ in one.network.named_parameters() if name in x]
    c = {name: torch.zeros_like(x[name]) for name in trained}
    own = {site: dict(c) for site in sites}
    for number in range(2):
        y = {}
        for name, site in sites.items():
            site.network.load_state_dict({**x, **local[name]})
            outcome = train_classifier(
                site.network,
                site.train_samples.inputs,
                site.train_samples.targets,
                site.experiment.training,
                seed=derive_seed(5, name, number, "train"),
                correction={k: c[k] - own[name][k] for k in trained},
            )
            assert outcome.n_steps == {"NYU": 6, "UM": 4}[name]  # 45 and 36 in batches of 20
            y[name] = entries(site.network, site.partition.shared)
            local[name] = entries(site.network, site.partition.local)
            own[name] = {
                k: (
                    own[name][k].double()
                    - c[k].double()
                    + (x[k].double() - y[name][k].double()) / (outcome.n_steps * 0.05)
                ).float()
                for k in trained
            }
        x = {k: ((y["NYU"][k].double() + y["UM"][k].double()) / 2).float() for k in x}
        c = {k: ((own["NYU"][k].double() + own["UM"][k].double()) / 2).float() for k in trained}
    found = run(policy=policy, **SCAFFOLD)
    assert same(found.shared, control_variates.join(x, c))
    for site in sites:
        assert same(found.local[site], control_variates.join(local[site], own[site]))
    of_norm = {name for name in found.shared if name.startswith(PREFIX) and NORM in name}
    assert of_norm == (
        set() if policy == "fedbn" else {f"{PREFIX}{NORM}.weight", f"{PREFIX}{NORM}.bias"}
    )


def test_the_first_round_of_scaffold_is_that_of_plain_sgd_and_the_second_is_not(run):
    plain = run(rounds=1, training=SGD)
    first = run(rounds=1, **SCAFFOLD)
    assert same(control_variates.separate(first.shared)[0], plain.shared)
    second = control_variates.separate(run(rounds=2, **SCAFFOLD).shared)[0]
    assert not same(second, run(rounds=2, training=SGD).shared)


def test_a_site_alone_under_scaffold_is_plain_sgd(make_site):
    """With one site c equals c_i: nothing is corrected."""
    corrected = make_site(**SCAFFOLD).train_alone()
    assert corrected == make_site(training=SGD).train_alone()


def test_a_message_without_control_variates_is_refused(make_site):
    site = make_site(**SCAFFOLD)
    shared, _ = control_variates.separate(site.initial_shared())
    with pytest.raises(StateMismatchError, match="the server's control variates do not fit"):
        site.train_round(shared, site.initial_local(), 0)
    local, _ = control_variates.separate(site.initial_local())
    with pytest.raises(StateMismatchError, match="the site's control variates do not fit"):
        site.train_round(site.initial_shared(), local, 0)


def test_other_algorithms_take_no_control_variates(make_site):
    site = make_site()
    shared = make_site(**SCAFFOLD).initial_shared()
    with pytest.raises(StateMismatchError, match=r"unknown .control_variate:"):
        site.train_round(shared, site.initial_local(), 0)


@pytest.mark.parametrize("change", [{"optimizer": "adam"}, {"momentum": 0.9}, {"proximal_mu": 1.0}])
def test_scaffold_is_for_plain_sgd(experiment, change):
    with pytest.raises(ExperimentError, match="'scaffold' needs training with optimizer 'sgd', mo"):
        experiment().changed(algorithm={"name": "scaffold"}, training={**SGD, **change})


# ----------------------------------------------------------------------------------------- alone


def test_a_federation_in_which_nothing_is_shared_is_every_site_alone(run, make_site):
    found = run(algorithm={"name": "alone"}, policy="none")
    assert found.shared == {}
    for name in ("NYU", "UM"):
        site = make_site(name, policy="none")
        probability = site.train_alone()
        assert same(found.local[name], entries(site.network, site.network.state_dict()))
        after = found.sites[name].evaluate(found.received[name], found.local[name])
        assert after == probability


def test_alone_there_is_nothing_to_hold_on_to(experiment):
    with pytest.raises(ExperimentError, match=r"proximal_mu 0\.5, but under algorithm 'alone'"):
        experiment().changed(algorithm={"name": "alone"}, training={"proximal_mu": 0.5})


# ---------------------------------------------------------------------------------------- groups


def cuts(mean_norm=100.0, site_norm=0.01):
    return {
        "name": "clustered",
        "split_mean_norm": mean_norm,
        "split_site_norm": site_norm,
    }


@pytest.fixture
def three_sites(data_root, write_store):
    write_store(data_root / "USM", "USM", n_subjects=24)
    return ("NYU", "UM", "USM")


def test_groups_that_are_never_cut_are_one_federation(run, three_sites):
    plain = run(sites=three_sites, policy="none")
    found = run(sites=three_sites, policy="none", algorithm=cuts(site_norm=1e6))
    assert list(found.shared) == [f"group NYU+UM+USM:{name}" for name in plain.shared]
    assert all(same(received, plain.shared) for received in found.received.values())
    assert [fact["groups"] for fact in found.facts] == [[list(three_sites)]] * 2


def test_after_a_cut_each_group_is_its_own_mean(run, three_sites, make_site):
    found = run(sites=three_sites, policy="none", algorithm=cuts(), rounds=1)
    (groups,) = [fact["groups"] for fact in found.facts]
    assert sorted(map(len, groups)) == [1, 2]
    for group in groups:
        results = {}
        for name in group:
            site = make_site(name, policy="none")
            results[name] = site.train_round(site.initial_shared(), site.initial_local(), 0)
        mean = WeightedMean(site.initial_shared())
        for name, result in results.items():
            mean.add(name, result.shared)
        for name in group:
            assert same(found.received[name], mean.result())


@pytest.mark.parametrize("policy", ["none", "fedbn"])
def test_groups_do_not_depend_on_the_order_of_sites(run, three_sites, policy):
    runs = [
        run(sites=order, policy=policy, algorithm=cuts(), rounds=3)
        for order in (three_sites, three_sites[::-1], ("UM", "USM", "NYU"))
    ]
    assert len(runs[0].facts[-1]["groups"]) == 3
    for other in runs[1:]:
        assert same(other.shared, runs[0].shared)
        assert other.facts == runs[0].facts
        assert all(same(other.local[site], runs[0].local[site]) for site in three_sites)


def test_groups_of_a_round_are_in_the_report(data_root, experiment, three_sites):
    settings = experiment(sites=three_sites, algorithm=cuts())
    report = run_federation(settings, read_sites(data_root, settings)).report
    assert len(report["rounds"][-1]["groups"]) == 3
    assert report["rounds"][0]["updates"][0]["sites"] == list(three_sites)


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        ({"name": "clustered"}, "algorithm: .*'clustered' needs split_mean_norm and split_site_no"),
        ({"name": "clustered", "split_mean_norm": 1}, "needs split_mean_norm and split_site_norm"),
        ({"split_mean_norm": 1}, "are for algorithm 'clustered', not for 'average'"),
        (cuts(mean_norm=0), "algorithm.split_mean_norm: .*greater than 0"),
        (cuts(site_norm=-1), "algorithm.split_site_norm: .*greater than or equal to 0"),
        ({"name": "sgd"}, "algorithm.name: .*'average', 'alone', 'scaffold' or 'clustered'"),
        ({"server_rate": 1}, "algorithm.server_rate: there is no such field"),
    ],
)
def test_an_algorithm_that_cannot_be_run_is_told(experiment, algorithm, reason):
    with pytest.raises(ExperimentError, match=reason):
        experiment().changed(algorithm=algorithm)


# ----------------------------------------------------------------------------------- fine-tuning


def test_all_entries_are_tuned_by_further_epochs(run, make_site):
    found = run(finetune={"epochs": 3})
    site = found.load("UM")
    before = entries(site.network, site.network.state_dict())
    probability = site.finetune()
    after = entries(site.network, site.network.state_dict())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(before)

    by_hand = make_site("UM", training={**vars(site.experiment.training), "local_epochs": 3})
    by_hand.network.load_state_dict(before)
    seed = derive_seed(5, "UM", "finetune")
    outcome = train_classifier(
        by_hand.network,
        by_hand.train_samples.inputs,
        by_hand.train_samples.targets,
        by_hand.experiment.training,
        seed=seed,
    )
    assert outcome.n_steps == 3 * 3
    assert same(after, entries(by_hand.network, by_hand.network.state_dict()))
    shared = {k: after[k] for k in found.shared}
    assert probability == site.evaluate(shared, found_local(after, found))


def found_local(state, federation):
    return {name: state[name] for name in state if name not in federation.shared}


@pytest.mark.parametrize("policy", ["fedbn", "none"])
@pytest.mark.parametrize("network", [None, "SpectralNorm", "ParametrizedNorms", "OwnBesideStock"])
def test_the_head_is_tuned_and_nothing_else_moves(run, policy, network):
    changes = {} if network is None else {"network": {"name": f"odd_networks.{network}"}}
    site = run(policy=policy, finetune={"epochs": 2, "entries": "head"}, **changes).load("NYU")
    before = entries(site.network, site.network.state_dict())
    site.finetune()
    after = entries(site.network, site.network.state_dict())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.partition(".")[0] for name in changed} == {"classifier"}
    assert all(parameter.requires_grad for parameter in site.network.parameters())
    assert all(parameter.grad is None for parameter in site.network.parameters())


def test_fine_tuning_is_scored_beside_the_federation_and_changes_nothing_of_it(
    data_root, experiment
):
    reports = []
    for finetune in (None, {"epochs": 3}):
        settings = experiment(finetune=finetune, compare_with_alone=True)
        reports.append(run_federation(settings, read_sites(data_root, settings)).report)
    plain, tuned = reports
    for site, report in tuned["sites"].items():
        assert "finetuned" not in plain["sites"][site]
        assert report["finetuned"] != report["federated"]
        assert {k: v for k, v in report.items() if k != "finetuned"} == plain["sites"][site]
    assert set(tuned["across_sites"]) == {"federated", "finetuned", "alone"}
    assert tuned["shared_weights_sha256"] == plain["shared_weights_sha256"]


def test_a_network_without_a_head_is_refused_before_it_trains(make_site):
    network = {"name": "torch.nn.BatchNorm1d", "args": {"num_features": 66}}
    with pytest.raises(NoHeadError, match="BatchNorm1d has no linear layer that is its head; fine"):
        make_site(network=network, policy="none", finetune={"entries": "head"})


@pytest.mark.parametrize("finetune", [{"epochs": 0}, {"entries": "tail"}, {"rounds": 1}])
def test_fine_tuning_that_cannot_be_run_is_told(experiment, finetune):
    with pytest.raises(ExperimentError, match="finetune"):
        experiment().changed(finetune=finetune)


# --------------------------------------------------------------------------------------- by name


@pytest.mark.slow
@pytest.mark.parametrize("name", FEDERATED_IN_FLARE)
def test_every_method_that_flare_runs_gives_the_outcome_of_its_experiment(
    data_root, experiment, name
):
    settings = method(name).experiment(experiment())
    stores = read_sites(data_root, settings)
    outcomes = method(name).run(settings, stores)
    report = run_federation(settings, stores).report
    scored = "finetuned" if settings.finetune else "federated"
    for site, outcome in outcomes.items():
        found = settings.task.measure(dataclasses.replace(outcome.test, facts={}))
        assert report["sites"][site][scored] == without_nan(found)


def test_a_method_leaves_nothing_of_another_in_the_experiment(experiment):
    base = experiment(algorithm=cuts(), finetune={"epochs": 1}, training={"proximal_mu": 1})
    changed = method("fedavg").experiment(base)
    assert changed.algorithm.name == "average"
    assert changed.finetune is None
    assert changed.training.proximal_mu == 0
