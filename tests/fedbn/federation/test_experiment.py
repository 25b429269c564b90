from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from data_prep.site_store import default_data_root
from fedbn.federation.experiment import (
    EXPERIMENT_FILE,
    Experiment,
    ExperimentError,
    read_experiment,
)


def written(folder, content):
    path = folder / EXPERIMENT_FILE
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# ---------------------------------------------------------------------------------------- reading


def test_defaults_are_a_valid_experiment_of_the_paper(tmp_path):
    experiment = read_experiment(written(tmp_path, {}))
    assert experiment == Experiment()
    assert experiment.sites == ("NYU", "USM", "UM", "UCLA")
    assert experiment.policy == "fedbn"
    assert experiment.aggregation_weights == "equal"
    assert experiment.network.name == "ConnectomeMLP"


def test_what_is_written_out_is_read_back_the_same(tmp_path):
    experiment = Experiment(
        name="three layers",
        sites=("UM", "NYU"),
        network={"name": "ConnectomeMLP", "args": {"hidden": [64, 32]}},
        policy="silobn",
        rounds=3,
        training={"optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.5},
        fold=4,
    )
    assert read_experiment(written(tmp_path, experiment.model_dump(mode="json"))) == experiment


def test_a_job_folder_stands_for_its_experiment(tmp_path):
    config = tmp_path / "job" / "app" / "config"
    config.mkdir(parents=True)
    written(config, {"rounds": 7})
    assert read_experiment(tmp_path / "job").rounds == 7


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(
        ExperimentError, match=r"no experiment file .*nowhere.json; give a job folder"
    ):
        read_experiment(tmp_path / "nowhere.json")
    with pytest.raises(ExperimentError, match=r"no experiment file .*app.config.experiment\.json"):
        read_experiment(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "rounds: 3", '{"rounds": 3,}', "{'rounds': 3}"])
def test_text_that_is_not_json_is_refused(tmp_path, content):
    with pytest.raises(ExperimentError, match=r"cannot read experiment file .*experiment\.json: "):
        read_experiment(written(tmp_path, content))


def test_bytes_that_are_not_text_are_refused(tmp_path):
    (tmp_path / EXPERIMENT_FILE).write_bytes(b'{"name": "\xff\xfe"}')
    with pytest.raises(ExperimentError, match="cannot read experiment file"):
        read_experiment(tmp_path / EXPERIMENT_FILE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "it must be an object"),
        (3, "it must be an object"),
        (None, "it must be an object"),
        ({"round": 3}, "round: there is no such field"),
        ({"training": {"lr": 1e-3}}, "training.lr: there is no such field"),
        ({"network": {"name": "UNet", "channels": 3}}, "network.channels: there is no such field"),
        ({"policy": "FedBN"}, "policy: .*'fedbn', 'silobn' or 'none'"),
        ({"aggregation_weights": "uniform"}, "aggregation_weights: .*'equal' or 'samples'"),
        ({"standardization": "global"}, "standardization: .*'site' or 'none'"),
        ({"rounds": 0}, "rounds: .*greater than or equal to 1"),
        ({"rounds": 2.5}, "rounds: "),
        ({"rounds": "many"}, "rounds: "),
        ({"n_folds": 1}, "n_folds: .*greater than or equal to 2"),
        ({"fold": -1}, "fold: .*greater than or equal to 0"),
        ({"fold": 5}, "fold is 5, but with n_folds 5 it must be less"),
        ({"training_share": 0}, "training_share: give a number above 0 and at most 1"),
        ({"training_share": "a lot"}, "training_share: give a number .*, got 'a lot'"),
        ({"training_share": {"NYU": 2}}, "training_share: .* at most 1, or one for .*, got 2"),
        (
            {"training_share": {"KKI": 0.5}},
            r"training_share names 'KKI', which is no site of this experiment \(NYU, USM",
        ),
        ({"fold": 2, "n_folds": 2}, "fold is 2, but with n_folds 2 it must be less"),
        ({"seed": -1}, "seed: .*greater than or equal to 0"),
        ({"seed": 2**31}, "seed: .*less than 2147483648"),
        ({"sites": []}, r"sites must be distinct names, got \[\]"),
        (
            {"sites": ["NYU", "UM", "NYU"]},
            r"sites must be distinct names, got \['NYU', 'UM', 'NYU'",
        ),
        ({"sites": "NYU"}, "sites: "),
        ({"sites": [1]}, "sites.0: "),
        ({"training": {"learning_rate": -1}}, "training.learning_rate: .*greater than 0"),
        ({"training": {"batch_size": 1}}, "training.batch_size: "),
        ({"training": {"optimizer": "lion"}}, "training.optimizer: .*'sgd', 'adam' or 'adamw'"),
        ('{"training": {"learning_rate": NaN}}', "training.learning_rate: .*finite"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(tmp_path, content, message):
    with pytest.raises(ExperimentError, match=rf"experiment\.json: .*{message}") as caught:
        read_experiment(written(tmp_path, content))
    assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------- which site


@pytest.mark.parametrize(
    ("client", "site"),
    [
        ("site-1", "NYU"),
        ("site-2", "USM"),
        ("site-3", "UM"),
        ("site-4", "UCLA"),
        ("NYU", "NYU"),
        ("UCLA", "UCLA"),
    ],
)
def test_a_client_stands_for_a_site(client, site):
    assert Experiment().site_of(client) == site


@pytest.mark.parametrize(
    "client", ["site-0", "site-5", "site-", "site--1", "site-1 ", "xsite-1", "nyu", "NYU2", "", "1"]
)
def test_a_client_that_fits_no_site_is_told_the_choices(client):
    with pytest.raises(
        ExperimentError,
        match=rf"client '{client}' is not .* NYU, USM, UM, UCLA, or site-1 to site-4 .*this order",
    ):
        Experiment().site_of(client)


def test_sites_that_are_named_like_the_simulators_clients_are_themselves():
    experiment = Experiment(sites=("site-2", "site-1"))
    assert experiment.site_of("site-1") == "site-1"
    assert experiment.site_of("site-2") == "site-2"


# ---------------------------------------------------------------------------------------- changes


def test_changed_is_a_validated_copy():
    experiment = Experiment()
    changed = experiment.changed(rounds=2, policy="none", training={"local_epochs": 3})
    assert (changed.rounds, changed.policy, changed.training.local_epochs) == (2, "none", 3)
    assert experiment == Experiment()
    assert changed.changed(rounds=50, policy="fedbn", training=experiment.training) == experiment


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fold": 9}, "the experiment: .*fold is 9, but with n_folds 5"),
        ({"n_folds": 1}, "the experiment: n_folds: "),
        ({"folds": 2}, "the experiment: folds: there is no such field"),
        ({"sites": ("A", "A")}, "sites must be distinct"),
    ],
)
def test_changed_refuses_what_reading_refuses(changes, message):
    with pytest.raises(ExperimentError, match=message):
        Experiment().changed(**changes)


def test_an_experiment_cannot_be_changed_in_place():
    with pytest.raises(ValidationError, match="frozen"):
        Experiment().rounds = 3


# -------------------------------------------------------------------------------------- data root


def test_data_root_is_the_variable_or_a_folder_in_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.delenv("FEDBN_DATA", raising=False)
    assert default_data_root() == tmp_path / "fedbn_data"
    for value, expected in (
        ("", tmp_path / "fedbn_data"),
        ("/data/abide", Path("/data/abide")),
    ):
        monkeypatch.setenv("FEDBN_DATA", value)
        assert default_data_root() == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rounds", True),
        ("rounds", "3"),
        ("fold", True),
        ("sites", [""]),
        ("sites", ["a/b", "c"]),
        ("sites", [".."]),
        ("sites", ["NYU", "NYU "]),
    ],
)
def test_values_that_would_fail_late_are_refused_at_once(field, value):
    with pytest.raises(ExperimentError, match=field):
        Experiment().changed(**{field: value})


@pytest.mark.parametrize("client", ["site-01", "site-٣"])
def test_only_the_simulators_own_spelling_of_a_number_is_a_site(client):
    with pytest.raises(ExperimentError, match="is not a site of this job"):
        Experiment().site_of(client)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"polcy": "fedbn"}, "polcy: there is no such field; did you mean 'policy'?"),
        ({"fold": 5}, "experiment.json: fold is 5, but with n_folds 5"),
        ({"algorithm": "alone"}, "algorithm: it must be an object {…}, got 'alone'"),
        ({"training": {"momentum": 0.9}}, "training: momentum is 0.9, but optimizer 'adam'"),
    ],
)
def test_a_wrong_file_is_told_in_our_words(tmp_path, content, sentence):
    path = tmp_path / "experiment.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ExperimentError) as caught:
        read_experiment(path)
    assert sentence in str(caught.value)
    assert "Value error" not in str(caught.value)


def test_a_site_that_is_not_named_has_all_its_training_subjects():
    experiment = Experiment(training_share={"NYU": 0.1})
    assert experiment.training_share_of("NYU") == 0.1
    assert experiment.training_share_of("UM") == 1
    assert Experiment(training_share=0.5).training_share_of("UM") == 0.5
