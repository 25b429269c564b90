from __future__ import annotations

import dataclasses
import errno
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from nvflare.apis.fl_constant import FLMetaKey, ReturnCode
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import ValidateType

from data_prep.site_store import read_site_store
from fedbn.core.normalization import entries
from fedbn.federation.results import AFTER_TRAINING, BEFORE_TRAINING
from fedbn.federation.site import Site, make_network
from fedbn.federation.site_state import (
    COMPLETE_MODEL,
    LOCAL_ENTRIES,
    load_checkpoint,
    read_scores_file,
    save_checkpoint,
)
from fedbn.flare.job import to_arrays
from fedbn.flare.learner import FedBNLearner
from fedbn.tasks.connectome.task import ConnectomeTask


@pytest.fixture
def shared(experiment):
    network, partition = make_network(experiment())
    return to_arrays(entries(network, partition.shared))


def kept(client):
    return load_checkpoint(client.state_folder / "local_entries.pt", LOCAL_ENTRIES)


def same(left, right):
    return list(left) == list(right) and all(torch.equal(left[k], right[k]) for k in left)


# --------------------------------------------------------------------------------- a run's tasks


def test_the_preflight_says_what_the_store_holds_and_nothing_of_a_subject(make_client, experiment):
    client = make_client(experiment())
    report, answer = client.ask("preflight")
    assert answer.params is None
    assert report["site"] == "NYU"
    assert report["device"] in ("cpu", "cuda:0")
    assert report["signature"]["atlas"] == "twelve regions"
    assert report["facts"] == {
        "synthetic": False,
        "n_train_subjects": 15,
        "n_test_subjects": 5,
        "n_train_samples": 45,
        "n_test_samples": 15,
        "autism_share_train": pytest.approx(0.5, abs=0.04),
        "autism_share_test": pytest.approx(0.5, abs=0.11),
    }
    assert "sub-" not in str(report)
    tensors, meta = kept(client)
    assert meta["round"] == -1
    network, partition = make_network(experiment())
    assert same(tensors, entries(network, partition.local))


def test_a_restart_between_all_tasks_changes_no_bit(make_client, experiment, shared, data_root):
    """What FLARE's simulator does with fewer threads than clients."""
    site = Site("NYU", read_site_store(data_root / "NYU"), experiment())
    local = site.initial_local()
    client = make_client(experiment())
    client.ask("preflight")
    received = shared
    for number in range(3):
        client.restart()
        report, answer = client.ask("train", received, number, prepared=["NYU"])
        result = site.train_round(
            {name: torch.from_numpy(array) for name, array in received.items()}, local, number
        )
        local, received = result.local, answer.params
        tensors, meta = kept(client)
        assert same(tensors, local)
        assert meta["round"] == number
        assert list(answer.params) == list(result.shared)
        for name, tensor in result.shared.items():
            assert np.array_equal(answer.params[name], tensor.numpy())
        assert answer.params_type == ParamsType.FULL
        assert answer.meta[FLMetaKey.NUM_STEPS_CURRENT_ROUND] == 45
        assert report["training_loss"] == result.outcome.losses
        assert report[BEFORE_TRAINING] == site.task.follow(result.before["test"])
        assert report[AFTER_TRAINING] == site.task.follow(result.after["test"])
    client.restart()
    report, _ = client.ask("final", received, prepared=["NYU"])
    assert [point["round"] for point in report["results"]["curve"]] == [0, 1, 2]
    expected = site.evaluate({k: torch.from_numpy(v) for k, v in received.items()}, local)
    kept_scores = read_scores_file(client.state_folder / "predictions" / "final.npz")
    assert kept_scores["federated"] == expected
    assert report["results"]["federated"] == site.task.measure(expected)
    assert "sub-" not in str(report)
    model, meta = load_checkpoint(client.state_folder / "model.pt", COMPLETE_MODEL)
    assert same({name: model[name] for name in local}, local)
    assert meta["facts"]["local entries"] == list(local)
    assert meta["facts"]["task"] == {"name": "connectome", "standardization": "site"}
    assert {"fitted.mean", "fitted.std"} <= set(model)


@pytest.mark.parametrize("policy", ["fedbn", "silobn", "none"])
def test_an_answer_holds_shared_entries_alone(make_client, experiment, policy):
    network, partition = make_network(experiment(policy=policy))
    client = make_client(experiment(policy=policy))
    client.ask("preflight")
    _, answer = client.ask("train", to_arrays(entries(network, partition.shared)), 0)
    assert tuple(answer.params) == partition.shared


def test_the_answer_does_not_alias_the_network(make_client, experiment, shared):
    client = make_client(experiment())
    client.ask("preflight")
    _, first = client.ask("train", shared, 0)
    before = {name: array.copy() for name, array in first.params.items()}
    client.ask("train", shared, 1)
    assert all(np.array_equal(first.params[name], array) for name, array in before.items())


def test_a_preflight_that_is_sent_twice_changes_nothing(make_client, experiment):
    client = make_client(experiment())
    client.ask("preflight")
    before = kept(client)
    client.restart()
    report, _ = client.ask("preflight")
    assert "error" not in report
    assert same(kept(client)[0], before[0])


def test_a_late_site_is_prepared_when_it_is_first_asked(make_client, experiment, shared):
    client = make_client(experiment())
    report, _ = client.ask("train", shared, 3, prepared=["UM"])
    assert "error" not in report
    assert kept(client)[1]["round"] == 3


def test_flares_validation_before_each_training_is_not_done_twice(make_client, experiment, shared):
    client = make_client(experiment())
    model = FLModel(
        params_type=ParamsType.FULL,
        params=shared,
        meta={FLMetaKey.VALIDATE_TYPE: ValidateType.BEFORE_TRAIN_VALIDATE},
    )
    assert client.learner.validate(model) is None


def test_weights_of_another_workflow_are_scored_beside_the_sites_batch_norm(
    make_client, experiment, shared, data_root
):
    client = make_client(experiment())
    client.ask("preflight")
    client.ask("train", shared, 0)
    client.restart()
    scores = client.learner.validate(FLModel(params_type=ParamsType.FULL, params=shared)).metrics
    site = Site("NYU", read_site_store(data_root / "NYU"), experiment())
    shared = {name: torch.from_numpy(array) for name, array in shared.items()}
    assert scores == site.task.follow(site.evaluate(shared, kept(client)[0]))
    assert scores != site.task.follow(site.evaluate(shared, site.initial_local()))


def test_a_local_model_is_not_given_away(make_client, experiment):
    client = make_client(experiment())
    assert client.learner.get_model("best") == ReturnCode.BAD_TASK_DATA


def test_an_aborted_task_keeps_the_state_of_the_round_before(make_client, experiment, shared):
    client = make_client(experiment())
    client.ask("preflight")
    client.ask("train", shared, 0)
    before = kept(client)
    client.learner.abort_signal.trigger("stop")
    report, answer = client.ask("train", shared, 1)
    assert "the entries of the round before are kept" in report["error"]
    assert answer.params is None
    assert same(kept(client)[0], before[0])
    assert kept(client)[1]["round"] == 0


# ------------------------------------------------------------------------------- a lost state


def flipped(path):
    content = bytearray(path.read_bytes())
    for position in range(len(content) // 3, len(content) // 3 + 40):
        content[position] ^= 255
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-30])


def of_another_site(path):
    tensors, meta = load_checkpoint(path, LOCAL_ENTRIES)
    save_checkpoint(path, LOCAL_ENTRIES, tensors, meta | {"site": "UM"})


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("local_entries.pt", flipped, "local entries file <path> is (damaged|corrupted)"),
        ("local_entries.pt", cut, "local entries file <path> is damaged"),
        ("local_entries.pt", of_another_site, "belongs to site 'UM', not to 'NYU'"),
        ("local_entries.pt", lambda p: p.unlink(), "its batch norm of this job is missing in"),
        ("preparation.pt", flipped, "preparation file <path> is (damaged|corrupted)"),
        ("preparation.pt", lambda p: p.unlink(), "preparation file preparation.pt is missing"),
    ],
)
@pytest.mark.parametrize("purpose", ["train", "final"])
def test_a_lost_or_damaged_state_is_named_and_never_replaced(
    make_client, experiment, shared, name, damage, reason, purpose
):
    client = make_client(experiment())
    client.ask("preflight")
    client.ask("train", shared, 0, prepared=["NYU"])
    folder = client.state_folder
    damage(folder / name)
    left = {path.name: path.read_bytes() for path in folder.glob("*.pt")}
    client.restart()
    for _ in range(2):
        report, answer = client.ask(purpose, shared, 1, prepared=["NYU"])
        assert re.search(reason, report["error"]), report["error"]
        assert "site 'NYU'" in report["error"]
        assert str(folder) not in report["error"]
        assert answer.params is None
    assert {path.name: path.read_bytes() for path in folder.glob("*.pt")} == left


def test_a_state_of_an_earlier_run_of_the_same_job_is_not_taken_over(
    make_client, experiment, shared
):
    client = make_client(experiment())
    client.ask("preflight")
    client.ask("train", shared, 4)
    client.restart()
    report, _ = client.ask("preflight")
    assert "holds its batch norm after round 4 of an earlier run of job 'job-1'" in report["error"]
    for number in (0, 2, 3):
        report, _ = client.ask("train", shared, number, prepared=["NYU"])
        expected = f"is that after round 4, but round {number} is to be trained"
        assert expected in report["error"]
    assert kept(client)[1]["round"] == 4


def test_a_round_whose_answer_was_lost_is_trained_again_from_the_round_before(
    make_client, experiment, shared
):
    """The process was killed after it had kept its entries: FLARE sends the same task again."""
    client = make_client(experiment())
    client.ask("preflight")
    for number in range(3):
        _, answer = client.ask("train", shared, number, prepared=["NYU"])
    first, (entries_then, _) = answer.params, kept(client)
    for _ in range(2):
        client.restart()
        _, answer = client.ask("train", shared, 2, prepared=["NYU"], accepted={"NYU": 1})
        assert all(np.array_equal(first[name], array) for name, array in answer.params.items())
        entries_now, meta = kept(client)
        assert same(entries_now, entries_then)
        assert (meta["round"], int(entries_now["hidden.0.norm.num_batches_tracked"])) == (2, 18)


@pytest.mark.parametrize("purpose", ["train", "final"])
def test_a_state_that_is_older_than_what_the_server_accepted_is_refused(
    make_client, experiment, shared, purpose
):
    client = make_client(experiment())
    client.ask("preflight")
    client.ask("train", shared, 0, prepared=["NYU"])
    backup = {path: path.read_bytes() for path in client.state_folder.glob("*.pt")}
    client.ask("train", shared, 1, prepared=["NYU"], accepted={"NYU": 0})
    for path, content in backup.items():
        path.write_bytes(content)
    client.restart()
    report, answer = client.ask(purpose, shared, 2, prepared=["NYU"], accepted={"NYU": 1, "UM": 1})
    assert "site 'NYU': its batch norm is that after round 0, but the server" in report["error"]
    assert "contribution of round 1: the state is an older one, as from a backup" in report["error"]
    assert answer.params is None
    for accepted in ({"NYU": 0, "UM": 1}, {"UM": 1}, ["NYU"], {"NYU": "1"}):  # it was absent
        report, _ = client.ask(purpose, shared, 2, prepared=["NYU"], accepted=accepted)
        assert "error" not in report


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_full_disk_costs_the_contribution_and_leaves_the_older_state_whole(
    make_client, experiment, shared, monkeypatch, nth, caplog
):
    """Where the older entries are copied, where the new ones or the predictions are written."""
    client = make_client(experiment())
    client.ask("preflight")
    client.ask("train", shared, 0, prepared=["NYU"])
    before, _ = kept(client)
    good, calls = os.replace, []

    def full_at_last(*arguments):
        calls.append(arguments)
        if len(calls) == nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return good(*arguments)

    monkeypatch.setattr(os, "replace", full_at_last)
    report, answer = client.ask("train", shared, 1, prepared=["NYU"], accepted={"NYU": 0})
    monkeypatch.undo()
    name = ("local_entries_before.pt", "local_entries.pt", "round_000001.npz")[nth - 1]
    assert f"{name} is not written and stays as it was" in caplog.text
    assert report["error"] == (
        "site 'NYU': <path> is not written and stays as it was (No space left on device); free "
        "some space, or name another place"
    )
    assert answer.params is None
    if nth < 3:
        assert same(kept(client)[0], before)
    client.restart()
    for number in (1, 2):  # the same task again, then the next
        report, _ = client.ask("train", shared, number, prepared=["NYU"], accepted={"NYU": 0})
        assert "error" not in report
    assert int(kept(client)[0]["hidden.0.norm.num_batches_tracked"]) == 18


def test_a_store_that_changes_during_the_job_is_refused(
    make_client, experiment, shared, data_root, write_store
):
    client = make_client(experiment())
    client.ask("preflight")
    write_store(data_root / "NYU", "NYU", n_subjects=22)
    client.restart()
    report, _ = client.ask("train", shared, 0, prepared=["NYU"])
    assert "the store has changed since this job began" in report["error"]


def test_an_array_that_changes_under_its_description_is_refused(
    make_client, experiment, shared, data_root
):
    client = make_client(experiment())
    client.ask("preflight")
    array = np.load(data_root / "NYU" / "connectomes.npy", mmap_mode="r+")
    array[0, 0] += 1
    array.flush()
    with (data_root / "NYU" / "connectomes.npy").open("r+b") as file:
        content = file.read()
        file.seek(0)
        file.write(content)
    client.restart()
    report, _ = client.ask("train", shared, 0, prepared=["NYU"])
    assert "connectomes.npy" in report["error"]


def test_other_shared_names_are_refused_and_the_state_is_kept(make_client, experiment, shared):
    client = make_client(experiment())
    client.ask("preflight")
    before = kept(client)
    mean = {"hidden.0.norm.running_mean": np.zeros(8, np.float32)}
    for params, reason in (
        (shared | mean, "entries given twice: hidden.0.norm.running_mean"),
        ({"classifier.bias": shared["classifier.bias"]}, "do not fit the network: 3 missing"),
        (shared | {"classifier.bias": np.zeros(3, np.float32)}, r"'classifier.bias' is \(3,\)"),
        (
            shared | {"classifier.bias": np.full(2, np.nan, np.float32)},
            "no finite score for 15 samples",
        ),
    ):
        report, _ = client.ask("train", params, 0)
        assert re.search(reason, report["error"]), report["error"]
    assert same(kept(client)[0], before[0])


# ---------------------------------------------------------------------------------- bad data


UNET = {
    "name": "UNet",
    "args": {
        "spatial_dims": 2,
        "in_channels": 1,
        "out_channels": 2,
        "channels": [4, 8],
        "strides": [2],
    },
}


def rewritten(**changes):
    return lambda root, write: write(root / "NYU", "NYU", **changes)


def another_sites(root, write):
    shutil.rmtree(root / "NYU")
    shutil.copytree(root / "UM", root / "NYU")


def one_value_changed(root, write):
    array = np.load(root / "NYU" / "connectomes.npy", mmap_mode="r+")
    array[3, 3] = np.nan
    array.flush()


def listed_twice(root, write):
    table = root / "NYU" / "participants.tsv"
    lines = table.read_text().splitlines()
    table.write_text("\n".join([*lines[:-1], lines[1]]) + "\n")


PREFLIGHTS = {
    "no store": (lambda root, write: shutil.rmtree(root / "NYU"), {}, "no site store at <path>"),
    "one class": (
        rewritten(diagnoses=("autism",)),
        {},
        r"one diagnosis only \(20 of autism\); training needs both",
    ),
    "three subjects": (rewritten(n_subjects=3), {}, "3 subjects"),
    "another site's": (another_sites, {}, "'UM'"),
    "damaged array": (one_value_changed, {}, "connectomes.npy was changed after the store was"),
    "a subject twice": (listed_twice, {}, "<subject> appears twice in participants.tsv"),
    "another fold": (rewritten(folds=3), {}, "prepare the store again for this fold"),
    "width": (
        lambda root, write: None,
        {"network": {"args": {"in_features": 67, "hidden": [8]}}},
        r"network ConnectomeMLP cannot take the store's samples of 66 edges: .*\(n, 67\)",
    ),
    "outputs": (
        lambda root, write: None,
        {"network": {"args": {"in_features": 66, "hidden": [8], "n_classes": 3}}},
        "network ConnectomeMLP has 3 outputs, but there are 2 classes",
    ),
    "no batch norm": (
        lambda root, write: None,
        {"network": UNET},
        "network UNet has no batch-norm layer .*choose policy 'none'",
    ),
    "takes images": (
        lambda root, write: None,
        {"network": UNET, "policy": "none"},
        "network UNet cannot take the store's samples of 66 edges",
    ),
    "unknown network": (
        lambda root, write: None,
        {"network": {"name": "ConectomeMLP"}},
        "unknown network 'ConectomeMLP'; close names: ConnectomeMLP",
    ),
}


@pytest.mark.parametrize("case", PREFLIGHTS)
def test_the_preflight_tells_what_is_wrong_in_one_sentence(
    make_client, experiment, data_root, write_store, case, caplog
):
    spoil, changes, reason = PREFLIGHTS[case]
    spoil(data_root, write_store)
    client = make_client(experiment(**changes))
    report, answer = client.ask("preflight")
    assert set(report) <= {"error", "signature"}
    sentence = report["error"]
    assert re.search(reason, sentence), sentence
    assert "site 'NYU'" in sentence
    assert "\n" not in sentence
    assert str(data_root) not in sentence
    assert "sub-" not in sentence
    assert answer.params is None
    assert "not foreseen" not in caplog.text
    assert not list(data_root.parent.rglob("local_entries.pt"))
    fired = [kind for kind, _ in client.engine.events]
    assert not [kind for kind in fired if "log" in kind], "FLARE could send it to the server"


def test_ids_of_another_style_are_taken_out_too(make_client, experiment, data_root, write_store):
    def rename(_, participants):
        participants[4] = dataclasses.replace(participants[4], participant_id="Smith J 1950")

    write_store(data_root / "NYU", "NYU", edit=rename)
    table = data_root / "NYU" / "participants.tsv"
    lines = table.read_text().splitlines()
    table.write_text("\n".join([*lines[:-1], lines[5]]) + "\n")
    report, _ = make_client(experiment()).ask("preflight")
    assert report["error"] == "site 'NYU': <path> appears twice in participants.tsv"


def test_a_client_that_is_no_site_is_told_the_names(make_client, experiment):
    report, _ = make_client(experiment(), "UCLAX").ask("preflight")
    assert "client 'UCLAX' is not a site of this job: name it one of NYU, UM" in report["error"]


def test_a_numbered_client_reads_its_sites_store(make_client, experiment):
    report, _ = make_client(experiment(), "site-2").ask("preflight")
    assert report["site"] == "UM"


def test_a_site_with_another_fedbn_refuses_with_both_versions(make_client, experiment, monkeypatch):
    monkeypatch.setattr(
        "fedbn.federation.installation.installed_version", lambda package="fedbn": "0.3.0"
    )
    report, _ = make_client(experiment(fedbn_version=">=0.1,<0.2")).ask("preflight")
    assert report["error"].startswith(
        "site 'NYU': the job needs fedbn >=0.1,<0.2, but fedbn 0.3.0 is installed here; "
    )


def without(monkeypatch, name):
    """Make a package one that is not installed, for those who look and for those who import."""

    class Finder:
        @staticmethod
        def find_spec(module, path=None, target=None):
            if module.partition(".")[0] == name:
                raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])


@pytest.mark.parametrize(
    ("name", "package"), [("sklearn", "scikit-learn"), ("scipy", "scipy"), ("monai", "monai")]
)
def test_a_package_that_the_last_task_needs_is_missed_in_the_preflight(
    make_client, experiment, monkeypatch, name, package
):
    client = make_client(experiment())
    with monkeypatch.context() as patch:
        without(patch, name)
        report, _ = client.ask("preflight")
    assert report["error"] == (
        f"site 'NYU': missing in this site's Python: {package}; install it where FLARE runs "
        f"(pip install {package})"
    )
    assert not list(Path(client.learner.workspace_root).rglob("local_entries.pt"))


def test_a_package_that_is_missed_late_is_a_sentence_too(
    make_client, experiment, shared, monkeypatch
):
    client = make_client(experiment())
    client.ask("preflight")

    def fails(*_):
        raise ModuleNotFoundError("No module named 'sklearn.metrics'", name="sklearn.metrics")

    monkeypatch.setattr(ConnectomeTask, "measure", fails)
    report, _ = client.ask("final", shared, prepared=["NYU"])
    assert "missing in this site's Python: scikit-learn; install it" in report["error"]


def test_what_is_not_foreseen_is_an_answer_too(make_client, experiment, monkeypatch, caplog):
    client = make_client(experiment())

    def fails(*_):
        raise KeyError("sub-0050952 of /home/ann")

    monkeypatch.setattr(Site, "check_network", fails)
    report, _ = client.ask("preflight")
    assert report["error"] == "site 'NYU': '<subject> of <path>'"
    assert "not foreseen, please report it" in caplog.text
    assert "sub-0050952 of /home/ann" in caplog.text, "the site's own log has all of it"


def test_without_a_data_root_the_default_is_used(make_client, experiment, data_root, monkeypatch):
    monkeypatch.setenv("FEDBN_DATA", str(data_root))
    report, _ = make_client(experiment(), data_root=None).ask("preflight")
    assert "error" not in report


# ------------------------------------------------------------------------------------- curves


def test_curves_are_written_where_there_is_a_writer(make_client, experiment, shared):
    points = []

    class Writer:
        def add_scalar(self, name, value, step):
            points.append((name, value, step))

    client = make_client(experiment())
    client.ask("preflight")
    client.ask("train", shared, 0)
    assert points == []
    client.engine.components["log_writer"] = Writer()
    report, _ = client.ask("train", shared, 1)
    assert len(points) == 7
    assert ("training_loss", report["training_loss"][-1], 1) in points
    assert ("subject_accuracy/before_training", report[BEFORE_TRAINING]["subject_accuracy"], 1) in (
        points
    )


def test_init_only_stores_its_arguments():
    learner = FedBNLearner(data_root="~/x", torch_threads=None, device="cpu", writer_id="w")
    assert (learner.data_root, learner.torch_threads) == ("~/x", None)
    assert (learner.device, learner.writer_id) == ("cpu", "w")
