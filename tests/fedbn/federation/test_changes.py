"""Changes of an experiment as they are typed or stand in a file."""

from __future__ import annotations

import json

import pytest

from fedbn.federation.changes import (
    parse_changes,
    parse_network,
    parse_training_share,
    read_changes,
    with_changes,
)
from fedbn.federation.experiment import Experiment, ExperimentError


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("rounds=3", "rounds", 3),
        (" training.learning_rate = 1e-2", "training.learning_rate", 0.01),
        ("policy=none", "policy", "none"),
        ('name="3"', "name", "3"),
        ("name=a = b", "name", "a = b"),
        ("finetune=null", "finetune", None),
        ("compare_with_alone=false", "compare_with_alone", False),
        ("network.args.hidden=[4, 4]", "network.args.hidden", [4, 4]),
        ("network=DenseNet121", "network", {"name": "DenseNet121", "args": {}}),
        ("training_share=0.5", "training_share", 0.5),
        ("training_share=NYU=0.1,UM=1", "training_share", {"NYU": 0.1, "UM": 1}),
        ("sites=NYU, UM", "sites", ["NYU", "UM"]),
        ("sites=NYU", "sites", ["NYU"]),
    ],
)
def test_a_value_is_json_or_a_text(text, path, value):
    assert parse_changes([text]) == {path: value}


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (["rounds"], "--set 'rounds' changes nothing: write FIELD=VALUE"),
        (["=3"], "--set '=3' changes nothing"),
        (["rounds=3", "rounds=4"], "rounds is set twice; keep one"),
        (["network=MLP{"], "network 'MLP{': its arguments are not JSON"),
    ],
)
def test_what_changes_nothing_or_twice_is_refused(texts, sentence):
    with pytest.raises(ExperimentError) as caught:
        parse_changes(texts)
    assert sentence in str(caught.value)


def test_all_changes_are_made_before_one_is_judged(experiment):
    before = experiment()
    sgd = {"training.optimizer": "sgd", "training.momentum": 0.9, "algorithm.name": "average"}
    after = with_changes(before, sgd | {"n_folds": 9, "fold": 8, "finetune.epochs": 3})
    assert (after.training.optimizer, after.training.momentum) == ("sgd", 0.9)
    assert after.training.batch_size == before.training.batch_size
    assert (after.fold, after.finetune.epochs, after.finetune.entries) == (8, 3, "all")
    assert before == experiment()


def test_an_object_changes_what_it_names_and_one_with_a_name_the_whole(experiment):
    before = experiment(algorithm={"name": "clustered", "split_mean_norm": 1, "split_site_norm": 2})
    changes = {"training": {"batch_size": 8}, "algorithm": {"name": "average"}}
    after = with_changes(before, changes | {"network.args": {"in_features": 3}})
    assert after.training == before.training.model_copy(update={"batch_size": 8})
    assert after.algorithm.split_mean_norm is None
    assert (after.network.name, after.network.args) == ("ConnectomeMLP", {"in_features": 3})
    again = with_changes(after, {"network": {"name": "DenseNet121"}})
    assert (again.network.name, again.network.args) == ("DenseNet121", {})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"training.learning_rat": 1}, "training.learning_rat: there is no such field; did you me"),
        ({"trainin.batch_size": 8}, "trainin: there is no such field; did you mean 'training'?"),
        (
            {"training": {"lr": 1}},
            "training.lr: there is no such field; the fields are optimizer, ",
        ),
        (
            {"training.optimizer": "sdg"},
            "training.optimizer: it must be 'sgd', 'adam' or 'adamw', ",
        ),
        ({"rounds": "many"}, "rounds: it must be a valid integer, got 'many'"),
        ({"policy.name": "none"}, "policy.name: policy is 'fedbn', which has no fields; set it as"),
        ({"sites.0": "NYU"}, "sites.0: sites is ('NYU', 'UM'), which has no fields"),
        ({"network.args.in_features.x": 1}, "network.args.in_features is 66, which has no fields"),
        (
            {"algorithm.name": "scaffold"},
            "algorithm 'scaffold' needs training with optimizer 'sgd'",
        ),
        ({"": 1}, "there is no such field"),
    ],
)
def test_a_wrong_change_names_the_field_and_close_names(experiment, changes, sentence):
    with pytest.raises(ExperimentError) as caught:
        with_changes(experiment(), changes)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_of_changes_holds_what_set_takes(tmp_path):
    content = {"rounds": 3, "training.batch_size": 8, "training": {"optimizer": "sgd"}}
    (tmp_path / "protocol.json").write_text(json.dumps(content))
    after = with_changes(Experiment(), read_changes(tmp_path / "protocol.json"))
    assert (after.rounds, after.training.batch_size, after.training.optimizer) == (3, 8, "sgd")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", r"it must be an object \{…\}"),
        ("{", "cannot read the changes in"),
        ('{"rounds": 1, "rounds": 2}', "rounds: it stands there twice; keep one"),
        (None, "cannot read the changes in .*No such file"),
    ],
)
def test_a_file_that_holds_no_changes_is_named(tmp_path, text, reason):
    if text is not None:
        (tmp_path / "file.json").write_text(text)
    with pytest.raises(ExperimentError, match=rf"file\.json.*{reason}|{reason}.*file\.json"):
        read_changes(tmp_path / "file.json")


@pytest.mark.parametrize(
    ("text", "name", "args"),
    [
        ("ConnectomeMLP", "ConnectomeMLP", {}),
        ('ConnectomeMLP:{"hidden": [16, 16]}', "ConnectomeMLP", {"hidden": [16, 16]}),
        ('nets:Small: {"a": {"b": ":"}}', "nets:Small", {"a": {"b": ":"}}),
        ("nets.small:Small", "nets.small:Small", {}),
    ],
)
def test_a_network_as_it_is_typed(text, name, args):
    assert parse_network(text) == {"name": name, "args": args}
    assert Experiment(network=parse_network(text)).network.args == args


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ConnectomeMLP:{hidden: 3}", "its arguments are not JSON .* write them as in 'MLP"),
        ('ConnectomeMLP{"hidden": [3]}', "put a colon between its name and its arguments"),
    ],
)
def test_a_network_that_cannot_be_read_is_told(text, reason):
    with pytest.raises(ExperimentError, match=reason):
        parse_network(text)


def test_shares_as_they_are_typed():
    assert parse_training_share("0.25") == 0.25
    assert parse_training_share("NYU=0.1, UM=1") == {"NYU": 0.1, "UM": 1.0}
    for text in ("half", "NYU=", "NYU=0.1,UM", "=0.1=2"):
        with pytest.raises(ExperimentError, match=r"is neither a number, such as 0\.25, nor one"):
            parse_training_share(text)
    with pytest.raises(ExperimentError, match="names a site twice"):
        parse_training_share("UM=0.1,UM=0.2")
