"""A choice among candidates: by training subjects alone, whatever the held-out ones are."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fedbn.federation.experiment import ExperimentError
from fedbn.federation.simulation import read_sites
from fedbn.federation.site import prepare
from fedbn.report.comparison_tables import difference_sentences
from fedbn.study.method import Outcome
from fedbn.study.methods import METHODS, method
from fedbn.study.plan import Run, plan_comparison
from fedbn.study.records import make_record
from fedbn.study.selection import (
    CANDIDATES_FILE,
    Candidate,
    CandidatesError,
    InnerScores,
    Member,
    Protocol,
    check_protocol,
    criterion,
    read_protocol,
    run_nested,
    threshold_by,
    training_data,
)
from fedbn.study.summary import choices
from fedbn.tasks.classification import two_class_scores

SITES = ("NYU", "UM")


@pytest.fixture
def stores(tmp_path, write_store, experiment):
    for site, n in zip(SITES, (24, 16), strict=True):
        write_store(tmp_path / site, site, n_subjects=n, folds=4)
    return read_sites(tmp_path, experiment())


@pytest.fixture
def outer(experiment):
    return experiment(fold=1, rounds=1)


def scores_of(targets, scores, folds=None):
    folds = np.arange(len(targets)) % 2 if folds is None else np.array(folds)
    return InnerScores(np.array(targets), np.array(scores, dtype=float), folds)


# ------------------------------------------------------------------------------ made-up candidates


class MadeUp:
    """Methods without training: the score of a window is a function of its subject's name."""

    def __init__(self, score_of):
        self.score_of = score_of
        self.seen = []

    def __call__(self, name):
        return SimpleNamespace(
            experiment=lambda settings: settings.changed(name=name),
            run=lambda settings, stores: self.run(name, settings, stores),
            is_nested=False,
        )

    def run(self, name, settings, stores):
        self.seen.append((name, settings, stores))
        outcomes = {}
        for site, store in stores.items():
            numbers = np.arange(len(store.participants))
            folds = [p.fold for p in store.participants]
            in_test = numbers % settings.n_folds == settings.fold
            if folds[0] is not None:
                in_test = np.array(folds) == settings.fold
            scored = {}
            for part, mine in (("test", in_test), ("train", ~in_test)):
                score = np.array([self.score_of(name, store, k) for k in numbers[mine]])
                scored[part] = two_class_scores(store.labels[mine], score, numbers[mine])
            outcomes[site] = Outcome(**scored, training_loss=[[1.0]])
        return outcomes


def truth(name, store, k):
    """Right under the name of ``good``, wrong under that of ``bad``, and no matter under others."""
    right = {"good": 0.4, "bad": -0.4, "close": 0.1}.get(name, 0.0)
    return 0.5 + right * (2 * store.labels[k] - 1)


def single(*names, threshold="half"):
    return tuple(
        Candidate(name=name, members=(Member(method=name),), threshold=threshold) for name in names
    )


@pytest.mark.parametrize(
    ("by", "names", "best"),
    [
        ("accuracy", ("bad", "good"), "good"),
        ("accuracy", ("close", "good"), "close"),  # equally good: the first
        ("auc", ("bad", "no matter", "close"), "close"),
        ("brier", ("close", "good", "bad"), "good"),
    ],
)
def test_the_best_candidate_is_fitted_on_all_training_subjects(stores, outer, by, names, best):
    made_up = MadeUp(truth)
    protocol = Protocol(candidates=single(*names), criterion=by, n_folds=3)
    outcomes = run_nested(outer, stores, protocol=protocol, lookup=made_up)
    assert [name for name, *_ in made_up.seen] == [n for n in names for _ in range(3)] + [best]
    *inner, (_, last, given) = made_up.seen
    assert given is stores
    assert (last.fold, last.n_folds, last.seed) == (outer.fold, outer.n_folds, outer.seed)
    assert [settings.fold for _, settings, _ in inner] == [0, 1, 2] * len(names)
    assert len({settings.seed for _, settings, _ in inner}) == 1
    for site, store in stores.items():
        assert outcomes[site].facts["chosen"] == best
        assert set(outcomes[site].facts["inner"]) == set(names)
        held_out = np.array([p.fold for p in store.participants]) == outer.fold
        test = outcomes[site].test
        assert np.array_equal(test.columns["target"], store.labels[held_out])
        expected = [truth(best, store, k) for k in np.flatnonzero(held_out)]
        assert test.columns["p_1"] == pytest.approx(np.array(expected))
        assert outcomes[site].training_loss is None


def test_members_are_averaged_and_a_shared_member_is_fitted_once(stores, outer):
    made_up = MadeUp(truth)
    both = Candidate(name="both", members=(Member(method="good"), Member(method="no matter")))
    protocol = Protocol(candidates=(*single("bad", "no matter"), both), n_folds=2)
    outcomes = run_nested(outer, stores, protocol=protocol, lookup=made_up)
    names = [name for name, *_ in made_up.seen]
    assert names == [*["bad"] * 2, *["no matter"] * 2, *["good"] * 2, "good", "no matter"]
    for site in SITES:
        columns = outcomes[site].test.columns
        right = columns["target"] * 2 - 1
        assert outcomes[site].facts["chosen"] == "both"
        assert columns["p_1"] == pytest.approx(0.5 + 0.2 * right)


def test_a_threshold_is_chosen_on_subjects_that_the_model_has_not_seen(stores, outer):
    """Scores of training subjects are too sure; those of the inner folds are 0.2 too low."""

    def shy(name, store, k):
        is_inner = store.participants[k].fold is None
        return truth("close", store, k) - 0.2 * is_inner

    protocol = Protocol(candidates=single("shy", threshold="accuracy"), n_folds=2)
    outcomes = run_nested(outer, stores, protocol=protocol, lookup=MadeUp(shy))
    for site in SITES:
        assert outcomes[site].test.facts["threshold"] == pytest.approx(0.3)


# ---------------------------------------------------------------------------------- no way to peek


def candidates_of(n_folds=2, by="accuracy", names=("ridge_federated", "fedbn")):
    return Protocol(candidates=single(*names, threshold="accuracy"), criterion=by, n_folds=n_folds)


def test_the_inner_stores_hold_the_training_subjects_and_nobody_else(stores, outer):
    for store in stores.values():
        inner = training_data(store, outer)
        kept = [p.participant_id for p in store.participants if p.fold != outer.fold]
        assert [p.participant_id for p in inner.participants] == kept
        assert {p.fold for p in inner.participants} == {None}
        owners = [store.participants[k].participant_id for k in store.sample_participant]
        rows = [k for k, owner in enumerate(owners) if owner in kept]
        assert np.array_equal(inner.connectomes, store.connectomes[rows])
        assert np.array_equal(inner.window_start, store.window_start[rows])
        found = [inner.participants[k].participant_id for k in inner.sample_participant]
        assert found == [owners[k] for k in rows]


def test_of_a_share_of_the_training_subjects_no_other_is_used(stores, outer):
    half = outer.changed(training_share=0.5)
    store = stores["NYU"]
    used = prepare("NYU", store, half).split.train
    inner = training_data(store, half)
    assert [p.participant_id for p in inner.participants] == [
        store.participants[k].participant_id for k in used
    ]
    assert len(inner.participants) < len(training_data(store, outer).participants)


@pytest.mark.parametrize("by", ["accuracy", "auc", "brier"])
def test_held_out_subjects_change_neither_the_choice_nor_the_model(stores, outer, same_scores, by):
    """Their diagnoses are turned round and their connectomes are others."""
    turned = {}
    other = {"autism": "control", "control": "autism"}
    for site, store in stores.items():
        people = tuple(
            replace(p, diagnosis=other[p.diagnosis]) if p.fold == outer.fold else p
            for p in store.participants
        )
        held_out = np.array([p.fold for p in people]) == outer.fold
        values = np.array(store.connectomes)
        values[held_out[store.sample_participant]] *= -3
        turned[site] = replace(store, participants=people, connectomes=values)
    protocol = candidates_of(by=by)
    before, after = (
        run_nested(outer, given, protocol=protocol, lookup=method) for given in (stores, turned)
    )
    for site in SITES:
        first, second = before[site], after[site]
        for column in ("target", "p_1"):
            assert not np.array_equal(*(one.test.columns[column] for one in (first, second)))
        assert first.facts == second.facts
        assert first.test.facts == second.test.facts
        assert same_scores(first.train, second.train)


def test_training_subjects_do_change_it(stores, outer):
    """Otherwise the test above would pass with a choice that looks at nothing."""
    store = stores["UM"]
    other = {"autism": "control", "control": "autism"}
    people = tuple(
        replace(p, diagnosis=other[p.diagnosis]) if p.fold == 0 else p for p in store.participants
    )
    changed = {**stores, "UM": replace(store, participants=people)}
    before, after = (
        run_nested(outer, given, protocol=candidates_of(), lookup=method)
        for given in (stores, changed)
    )
    assert before["NYU"].facts["inner"] != after["NYU"].facts["inner"]


def test_the_chosen_one_is_the_method_by_itself(stores, outer, same_scores):
    protocol = Protocol(candidates=single("fedbn"), n_folds=2)
    chosen = run_nested(outer, stores, protocol=protocol, lookup=method)
    plain = METHODS["fedbn"].run(METHODS["fedbn"].experiment(outer), stores)
    for site in SITES:
        assert same_scores(chosen[site].test, plain[site].test)
        assert same_scores(chosen[site].train, plain[site].train)


# ----------------------------------------------------------------------------- criteria, thresholds


def test_criteria_by_hand():
    of_site = {
        "NYU": scores_of([0, 0, 1, 1], [0.1, 0.6, 0.4, 0.9]),
        "UM": scores_of([0, 1], [0.2, 0.8]),
    }
    assert criterion(of_site, "accuracy", "half") == pytest.approx((0.5 + 1) / 2)
    assert criterion(of_site, "auc", "half") == pytest.approx((0.75 + 1) / 2)
    brier = (0.1**2 + 0.6**2 + 0.6**2 + 0.1**2) / 4
    assert criterion(of_site, "brier", "half") == pytest.approx((brier + 0.04) / 2)


@pytest.mark.parametrize(
    ("rule", "expected"), [("half", 0.5), ("accuracy", 0.45), ("prevalence", 0.25)]
)
def test_thresholds_by_hand(rule, expected):
    targets = np.array([0, 1, 0, 1, 1])
    scores = np.array([0.3, 0.2, 0.1, 0.6, 0.7])
    assert threshold_by(rule, targets, scores) == pytest.approx(expected)


@pytest.mark.parametrize(("share", "expected"), [(0, 0.85), (4, 0.1)])
def test_a_prevalence_of_none_or_all_has_a_threshold_beyond_all_scores(share, expected):
    targets = (np.arange(4) < share).astype(int)
    scores = np.array([0.2, 0.3, 0.4, 0.7])
    assert threshold_by("prevalence", targets, scores) == pytest.approx(expected)


def test_an_inner_fold_is_decided_by_a_threshold_of_the_others():
    inner = scores_of([0, 1, 0, 1], [0.1, 0.3, 0.5, 0.9], folds=[0, 0, 1, 1])
    # Fold 1 suggests 0.7 for fold 0, and fold 0 suggests 0.2 for fold 1.
    assert inner.decisions("accuracy").tolist() == [False, False, True, True]
    assert inner.decisions("prevalence").tolist() == [False, False, True, True]
    assert inner.decisions("half").tolist() == [False, False, True, True]
    assert criterion({"UM": inner}, "accuracy", "accuracy") == 0.5


# --------------------------------------------------------------------------------- file and command


def test_the_candidates_that_come_with_fedbn_are_methods(experiment):
    protocol = read_protocol(CANDIDATES_FILE)
    check_protocol(protocol, experiment(), method)
    assert not any(METHODS[m.method].needs_pooled_data for m in protocol.members)


def test_changes_are_those_of_the_member_alone(experiment):
    changes = {"standardization": "site", "training": {"learning_rate": 0.5}}
    member = Member(method="ridge_federated_tangent", changes=changes)
    settings = member.experiment(experiment(), method)
    assert settings.task.standardization == "site"
    assert settings.training.learning_rate == 0.5
    assert settings.training.batch_size == experiment().training.batch_size


GOOD = {"candidates": [{"name": "a", "members": [{"method": "fedbn"}]}]}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "cannot read the candidates in .*list.json: "),
        ({}, "list.json: candidates: it is missing"),
        ({**GOOD, "criterion": "luck"}, "list.json: criterion: it must be 'accuracy'"),
        ({**GOOD, "n_folds": 1}, "list.json: n_folds: "),
        ({"candidates": GOOD["candidates"] * 2}, "list.json: candidate 'a' is there twice"),
        (
            {"candidates": [{"name": "a", "members": []}]},
            r"list.json: candidates.0.members: .* at least 1 item",
        ),
        (
            {"candidates": [{"name": "a", "members": [{"method": "x", "changes": {"seed": 1}}]}]},
            "seed cannot be changed by a candidate, only network, rounds, training",
        ),
        (
            {"candidates": [{"name": "a", "members": [{"method": "nested"}]}]},
            "method 'nested' cannot be a candidate: it is chosen by inner cross-validation itself",
        ),
        (
            {"candidates": [{"name": "a", "members": [{"method": "fedbm"}]}]},
            "unknown method 'fedbm'; choose from singleset, ",
        ),
    ],
)
def test_a_wrong_list_is_refused_before_anything_runs(
    tmp_path, monkeypatch, experiment, content, sentence
):
    path = tmp_path / "list.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    monkeypatch.setenv("FEDBN_CANDIDATES", str(path))
    with pytest.raises(ValueError, match=sentence):
        plan_comparison(experiment(), ["nested", "fedavg"], 1)


def test_a_list_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CandidatesError, match=r"cannot read the candidates in .*nowhere\.json"):
        read_protocol(tmp_path / "nowhere.json")


def test_a_change_that_does_not_fit_is_refused(experiment):
    member = Member(method="fedbn", changes={"training": {"optimizer": "luck"}})
    protocol = Protocol(candidates=(Candidate(name="a", members=(member,)),))
    with pytest.raises(ExperimentError, match="optimizer"):
        check_protocol(protocol, experiment(), method)


def test_other_candidates_are_another_experiment(tmp_path, monkeypatch, experiment):
    """So that a stopped comparison is continued with the same list, and never with another one."""
    names = [METHODS["nested"].experiment(experiment()).name]
    for n_folds in (3, 4):
        path = tmp_path / "list.json"
        path.write_text(json.dumps({**GOOD, "n_folds": n_folds}))
        monkeypatch.setenv("FEDBN_CANDIDATES", str(path))
        names.append(METHODS["nested"].experiment(experiment()).name)
    assert len(set(names)) == 3


def test_the_choice_is_kept_with_the_run(stores, outer):
    outcomes = run_nested(outer, stores, protocol=candidates_of(), lookup=method)
    record = json.loads(json.dumps(make_record(outcomes["UM"])))
    assert record["facts"] == outcomes["UM"].facts
    assert record["facts"]["chosen"] in ("ridge_federated", "fedbn")
    assert record["test"]["facts"] == outcomes["UM"].test.facts


def test_choices_are_counted_and_told():
    taken = {"nested": ["a", "b", "b"], "fedavg_threshold_cv": ["fedavg"] * 3, "fedbn": [None] * 3}
    records = {
        Run(name, 0, fold): {"sites": {"UM": {"facts": {"chosen": one}} if one else {}}}
        for name, of_method in taken.items()
        for fold, one in enumerate(of_method)
    }
    counts = choices(records)
    assert counts == {"fedavg_threshold_cv": {"fedavg": 3}, "nested": {"b": 2, "a": 1}}
    summary = {
        "reference": "nested",
        "methods": {name: {"title": METHODS[name].title} for name in taken},
        "differences": {},
        "choices": counts,
    }
    assert difference_sentences(summary) == [
        "chosen by nested CV: of 3 runs it took b 2 times, a once."
    ]
