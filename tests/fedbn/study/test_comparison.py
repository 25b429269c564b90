"""A comparison of methods: paired, resumable, the same numbers as single runs, in any order."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score
from typer.testing import CliRunner

from data_prep.__main__ import app as data_prep
from data_prep.site_store import read_site_store
from fedbn.__main__ import app
from fedbn.federation.changes import parse_network
from fedbn.federation.experiment import ExperimentError
from fedbn.federation.simulation import federate, read_sites, run_federation
from fedbn.report.comparison_tables import (
    comparison_tables,
    difference_sentences,
    difference_table,
    scores_table,
    width,
)
from fedbn.report.tables import SYNTHETIC, render
from fedbn.study import comparison, execution, paired
from fedbn.study.comparison import compare, read_summary
from fedbn.study.method import Outcome
from fedbn.study.methods import METHODS
from fedbn.study.plan import ComparisonError, Run, plan_comparison
from fedbn.study.records import make_record, score_record
from fedbn.study.summary import convergence
from fedbn.tasks.classification import TWO_CLASSES, make_scores

LINEAR = 'torch.nn.Linear:{"in_features": 66, "out_features": 2}'
METHODS_COMPARED = ("fedbn", "fedavg", "pooled", "fedavg_threshold", "ridge")


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def all_rows_of(folder):
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def rows_of(folder):
    """Return the rows that count for the tables."""
    return [row for row in all_rows_of(folder) if row["when"] != "after_training"]


@pytest.fixture
def plan(experiment):
    def make(methods=METHODS_COMPARED, n_seeds=2, reference=None, **changes):
        settings = experiment(**{"n_folds": 2, "rounds": 1, **changes})
        return plan_comparison(settings, methods, n_seeds, reference)

    return make


@pytest.fixture(scope="module")
def finished(tmp_path_factory, write_store, experiment):
    """One comparison, run through to its end by two processes."""
    root = tmp_path_factory.mktemp("compared")
    write_store(root / "data" / "NYU", "NYU")
    write_store(root / "data" / "UM", "UM", n_subjects=16)
    plan = plan_comparison(experiment(n_folds=2, rounds=1), METHODS_COMPARED, 2)
    told = []
    summary = compare(
        plan, root / "data", root / "out", processes=2, on_run=lambda *n: told.append(n)
    )
    return {
        "plan": plan,
        "data": root / "data",
        "out": root / "out",
        "told": told,
        "summary": json.loads(json.dumps(summary)),
    }


# ------------------------------------------------------------------------------------ single runs


@pytest.mark.slow
def test_runs_are_those_of_the_methods_by_themselves(finished):
    plan = finished["plan"]
    stores = read_sites(finished["data"], plan.experiment)
    for run in (Run(name, 1, 0) for name in METHODS_COMPARED):
        settings = plan.experiment.changed(seed=1, fold=0)
        outcomes = METHODS[run.method].run(METHODS[run.method].experiment(settings), stores)
        (path,) = (finished["out"] / "runs").glob(f"{run.method}_seed1_fold0_*.json")
        record = json.loads(path.read_text())
        assert record["sites"] == {site: make_record(outcomes[site]) for site in ("NYU", "UM")}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), [("fedbn", "fedbn"), ("fedavg", "none")])
def test_metrics_are_those_of_a_federation_by_itself(finished, name, policy):
    settings = finished["plan"].experiment.changed(policy=policy, seed=1, fold=1)
    report = run_federation(settings, read_sites(finished["data"], settings)).report
    rows = [
        row
        for row in rows_of(finished["out"])
        if (row["method"], row["seed"], row["fold"]) == (name, "1", "1")
    ]
    assert [row["site"] for row in rows] == ["NYU", "UM"]
    after = [
        row
        for row in all_rows_of(finished["out"])
        if (row["method"], row["seed"], row["fold"]) == (name, "1", "1")
        and row["when"] == "after_training"
    ]
    assert [row["site"] for row in after] == ["NYU", "UM"]
    differing = 0
    for row, row_after in zip(rows, after, strict=True):
        assert row["when"] == "before_training"
        of_site = report["sites"][row["site"]]
        last = of_site["curve"][-1]["after_training"]
        for level in ("subject", "window"):
            for metric in TWO_CLASSES[:-1]:
                column = f"{level}_{metric.name}"
                assert float(row[column]) == of_site["federated"][level][metric.name]
                assert float(row_after[column]) == last[level][metric.name]
                differing += row[column] != row_after[column]
    assert differing, "the last local epochs change no score: the test shows nothing"
    for row in rows:
        of_site = report["sites"][row["site"]]
        for count in ("n_train_subjects", "n_test_subjects"):
            assert int(row[count]) == of_site[count]


@pytest.mark.slow
def test_every_subject_is_held_out_once_a_seed_and_every_method_has_the_same(finished):
    rows = rows_of(finished["out"])
    assert len(rows) == len(METHODS_COMPARED) * 2 * 2 * 2  # sites, seeds, folds
    assert {row["method"] for row in rows if row["when"] == "before_training"} == {
        "fedbn",
        "fedavg",
    }
    assert {row["when"] for row in rows} == {"before_training", "final"}
    targets = {}
    for path in (finished["out"] / "runs").iterdir():
        record = json.loads(path.read_text())
        for site, content in record["sites"].items():
            place = site, record["seed"], record["fold"]
            targets.setdefault(place, set()).add(tuple(content["test"]["columns"]["target"]))
    assert all(len(found) == 1 for found in targets.values())
    for site, n in (("NYU", 20), ("UM", 16)):
        for seed in (0, 1):
            assert sum(len(*targets[site, seed, fold]) for fold in (0, 1)) == n


@pytest.mark.slow
def test_the_threshold_rival_is_fedavg_at_its_own_threshold(finished):
    rows = {(r["method"], r["site"], r["seed"], r["fold"]): r for r in rows_of(finished["out"])}
    moved = 0
    for (name, *place), row in rows.items():
        if name == "fedavg_threshold":
            plain = rows[("fedavg", *place)]
            for level in ("subject", "window"):
                assert row[f"{level}_accuracy"] == plain[f"{level}_accuracy_own_threshold"]
                assert row[f"{level}_auc"] == plain[f"{level}_auc"]
                assert row[f"{level}_brier"] == plain[f"{level}_brier"]
            assert row["threshold"] == plain["own_threshold"]
            moved += row["subject_accuracy"] != plain["subject_accuracy"]
    assert moved, "no accuracy was moved by a threshold: the test shows nothing"


@pytest.mark.slow
def test_nothing_names_a_subject(finished):
    ids = {
        participant.participant_id
        for site in ("NYU", "UM")
        for participant in read_site_store(finished["data"] / site).participants
    }
    for path in finished["out"].rglob("*.*"):
        text = path.read_text()
        assert not any(name in text for name in ids), path.name
        assert str(finished["data"]) not in text, path.name


# ------------------------------------------------------------------- stopping, resuming, reordering


class StopHereError(Exception):
    pass


def stop_after(n):
    def on_run(done, total):
        if done >= n:
            raise StopHereError

    return on_run


@pytest.mark.slow
def test_a_stopped_comparison_repeats_nothing_and_ends_with_the_same_bytes(finished, tmp_path):
    plan, out = finished["plan"], tmp_path / "out"
    with pytest.raises(StopHereError):
        compare(plan, finished["data"], out, processes=2, on_run=stop_after(3))
    assert not (out / "results.csv").exists()
    runs = {path: path.stat().st_mtime_ns for path in (out / "runs").iterdir()}
    assert 3 <= len(runs) < len(plan.runs)
    assert all(path.suffix == ".json" for path in runs), "runs that had begun left nothing half"
    damaged = sorted(runs)[0]
    damaged.write_text(damaged.read_text()[:-40])
    told = []
    compare(plan, finished["data"], out, processes=1, on_run=lambda *n: told.append(n))
    assert told == [(n, len(plan.runs)) for n in range(len(runs) - 1, len(plan.runs) + 1)]
    for path, written in runs.items():
        assert (path.stat().st_mtime_ns == written) == (path != damaged)
    for name in ("results.csv", "summary.json", "comparison.json"):
        assert (out / name).read_bytes() == (finished["out"] / name).read_bytes()


@pytest.mark.slow
def test_reordering_methods_and_sites_changes_no_number(finished, tmp_path, experiment):
    settings = experiment(n_folds=2, rounds=1, sites=("UM", "NYU"))
    plan = plan_comparison(settings, METHODS_COMPARED[::-1], 2)
    summary = compare(plan, finished["data"], tmp_path / "out", processes=2)
    csvs = [(folder / "results.csv").read_bytes() for folder in (tmp_path / "out", finished["out"])]
    assert csvs[0] == csvs[1]
    before = finished["summary"]
    for part in (
        "scores",
        "differences",
        "calibration",
        "n_subjects",
        "reference",
        "after_training",
        "convergence",
    ):
        assert json.loads(json.dumps(summary[part])) == before[part]
    assert summary["sites"] == ["UM", "NYU"]
    assert list(summary["methods"]) == list(METHODS_COMPARED[::-1])
    # And a method run by itself, by one process, with no other before it.
    alone = plan_comparison(settings, ["pooled"], 1)
    compare(alone, finished["data"], tmp_path / "alone")
    expected = [
        row
        for row in all_rows_of(finished["out"])
        if (row["method"], row["seed"]) == ("pooled", "0")
    ]
    assert all_rows_of(tmp_path / "alone") == expected


@pytest.mark.slow
def test_a_comparison_grows_by_methods_and_seeds_and_runs_only_those(finished, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(finished["out"], out)
    settings = finished["plan"].experiment
    plan = plan_comparison(settings, [*METHODS_COMPARED, "silobn"], 3)
    told = []
    summary = compare(plan, finished["data"], out, processes=2, on_run=lambda *n: told.append(n))
    n_before = len(finished["plan"].runs)
    assert told[0] == (n_before, len(plan.runs))
    assert len(told) == 1 + len(plan.runs) - n_before
    assert summary["n_seeds"] == 3
    smaller = compare(finished["plan"], finished["data"], out)
    assert json.loads(json.dumps(smaller)) == finished["summary"]
    assert (out / "results.csv").read_bytes() == (finished["out"] / "results.csv").read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_a_killed_command_leaves_no_process_and_is_continued(finished, tmp_path):
    job, out = tmp_path / "experiment.json", tmp_path / "out"
    job.write_text(json.dumps(finished["plan"].experiment.model_dump(mode="json")))
    command = [
        sys.executable, "-m", "fedbn", "compare", str(job), "--data", str(finished["data"]),
        "--methods", ",".join(METHODS_COMPARED), "--seeds", "2", "--out", str(out), "--jobs", "2",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    wait_for(lambda: len(list((out / "runs").glob("*.json"))) >= 2)
    workers = children(process.pid)
    assert len(workers) >= 2
    process.kill()
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "Traceback" not in errors
    wait_for(lambda: not any(Path(f"/proc/{pid}/stat").exists() for pid in workers))
    n_kept = len(list((out / "runs").glob("*.json")))
    assert n_kept < len(finished["plan"].runs), "it ended before it was stopped"
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"{n_kept} of {len(finished['plan'].runs)} runs are there already" in done.stderr
    for name in ("results.csv", "summary.json"):
        assert (out / name).read_bytes() == (finished["out"] / name).read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_ctrl_c_ends_at_once_without_waiting_for_runs_that_have_begun(finished, tmp_path):
    job, out = tmp_path / "experiment.json", tmp_path / "out"
    endless = finished["plan"].experiment.changed(rounds=10**6)
    job.write_text(json.dumps(endless.model_dump(mode="json")))
    process = subprocess.Popen(
        [
            sys.executable, "-m", "fedbn", "compare", str(job), "--data", str(finished["data"]),
            "--methods", "ridge,fedbn", "--seeds", "1", "--out", str(out), "--jobs", "2",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for(lambda: len(list((out / "runs").glob("*.json"))) == 2)
        workers = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers, too
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "fedbn: stopped; finished runs are kept, start again to go on" in errors
    assert "Traceback" not in errors
    wait_for(lambda: not any(Path(f"/proc/{pid}/stat").exists() for pid in workers))
    kept = sorted(path.name for path in (out / "runs").iterdir())
    assert len(kept) == 2
    assert all(name.startswith("ridge") and name.endswith(".json") for name in kept)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_an_interrupt_between_two_runs_ends_those_that_have_begun(finished, tmp_path):
    """Wherever it is raised: also where a finished run is read, and whoever keeps the error."""
    endless = finished["plan"].experiment.changed(rounds=10**6)
    plan = plan_comparison(endless, ["ridge", "fedbn"], 1)

    def interrupt(done, _):
        if done == 2:
            raise KeyboardInterrupt

    before = set(children(os.getpid()))
    with pytest.raises(KeyboardInterrupt) as kept:
        compare(plan, finished["data"], tmp_path / "out", processes=2, on_run=interrupt)
    wait_for(lambda: set(children(os.getpid())) <= before | set(helpers()))
    assert kept


def helpers():
    """Processes of multiprocessing itself, which live as long as this one."""
    return [
        child
        for child in children(os.getpid())
        if b"resource_tracker" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def children(pid):
    found = [
        int(child)
        for task in Path(f"/proc/{pid}/task").glob("*/children")
        for child in task.read_text().split()
    ]
    return found + [grandchild for child in found for grandchild in children(child)]


# ----------------------------------------------------------------------------------------- misuse


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"methods": ["fedbn", "fedbm"]}, "unknown method 'fedbm'; choose from singleset, fedavg"),
        ({"methods": ["fedbn", "fedbn"]}, "method 'fedbn' is named twice"),
        ({"methods": []}, "no method to compare"),
        ({"n_seeds": 0}, "seeds is 0"),
        ({"reference": "silobn"}, "reference 'silobn' is not among the methods"),
        ({"n_folds": 1}, "n_folds"),
    ],
)
def test_what_cannot_be_compared_is_told_when_it_is_planned(plan, experiment, arguments, reason):
    if "n_folds" in arguments:
        with pytest.raises(ExperimentError, match=reason):
            experiment().changed(**arguments)
    else:
        with pytest.raises(ValueError, match=reason):
            plan(**arguments)


@pytest.mark.parametrize(
    ("methods", "reference"), [(("fedbn", "fedavg"), "fedavg"), (("silobn", "fedbn"), "silobn")]
)
def test_the_reference_is_fedavg_if_it_is_there(plan, methods, reference):
    assert plan(methods).reference == reference


def test_a_plan_pairs_methods(plan):
    made = plan(("fedbn", "fedavg"))
    assert made.runs[:3] == [Run("fedbn", 0, 0), Run("fedavg", 0, 0), Run("fedbn", 0, 1)]
    first, second = (made.experiment_of(run) for run in made.runs[:2])
    assert (first.policy, second.policy) == ("fedbn", "none")
    same = first.changed(policy="none", name="fedavg")
    assert same == second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"rounds": 2}, "rounds is 1 there and 2 here"),
        ({"n_folds": 4}, "n_folds is 2 there and 4 here"),
        ({"sites": ("NYU",)}, "sites is"),
        ({"training": {"batch_size": 8}}, "training.learning_rate is 0.01 there and 0.001 here"),
    ],
)
def test_a_folder_of_another_comparison_is_refused(finished, plan, changes, difference):
    before = {path: path.stat().st_mtime_ns for path in finished["out"].rglob("*")}
    with pytest.raises(ComparisonError, match=difference) as refused:
        compare(plan(**changes), finished["data"], finished["out"])
    assert "holds another comparison" in str(refused.value)
    assert {path: path.stat().st_mtime_ns for path in finished["out"].rglob("*")} == before


@pytest.mark.slow
def test_other_data_under_the_same_settings_are_refused(finished, tmp_path, write_store):
    data, out = tmp_path / "data", tmp_path / "out"
    shutil.copytree(finished["data"] / "NYU", data / "NYU")
    write_store(data / "UM", "UM", n_subjects=18)
    shutil.copytree(finished["out"], out)
    with pytest.raises(ComparisonError, match=r"the data of site '(NYU|UM)' have changed since"):
        compare(finished["plan"], data, out)


def test_a_folder_of_something_else_is_refused(plan, data_root, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("a year of work")
    with pytest.raises(ComparisonError, match="is not empty and holds no comparison"):
        compare(plan(), data_root, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_the_others_are_kept(experiment, data_root, tmp_path):
    settings = experiment(
        n_folds=2, rounds=1, training={"optimizer": "sgd", "learning_rate": 1e30, "batch_size": 16}
    )
    plan = plan_comparison(settings, ["ridge", "fedbn"], 1)
    with pytest.raises(ComparisonError, match=r"method fedbn, seed 0, fold \d: .*the loss is nan"):
        compare(plan, data_root, tmp_path / "out")
    kept = [path.name for path in (tmp_path / "out" / "runs").iterdir()]
    assert kept
    assert all(name.startswith("ridge_seed0") for name in kept)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--methods", "fedbn,x"], "unknown method 'x'"),
        (["--methods", ","], "no method"),
        (["--folds", "1"], "n_folds"),
        (["--seeds", "0"], "seeds is 0"),
        (["--batch-size", "1"], "batch_size"),
        (["--reference", "pooled"], "reference 'pooled'"),
        (["--network", "torch.nn.MLP"], "fedbn: module 'torch.nn' has no network 'MLP'"),
        (["--network", "ConnectomeMLP:{hidden: 3}"], "its arguments are not JSON"),
        (["--network", 'ConnectomeMLP:{"depth": 3}'], "unexpected keyword argument 'depth'"),
        (["--network", LINEAR], "method fedbn: network Linear has no batch-norm layer"),
        (["--network", "ConnectomeMLP"], "network ConnectomeMLP cannot take the store's samples"),
        (["--training-share", "half"], "training share 'half' is neither a number"),
        (["--training-share", "USM=0.5"], "training_share names 'USM', which is no site of this"),
        (["--training-share", "UM=0.05"], "site 'UM': training_share 0.05 leaves none of its"),
        (["--aggregation-weights", "none"], "aggregation_weights: it must be 'equal' or"),
        (["--set", "policy=none"], "policy: this command decides it for each of its runs; leave"),
        (["--fold", "1"], "fold: this command decides it"),
        (["--target-loss", "0"], "target loss is 0; it must be a number above 0"),
        (["--data", "no/such/folder"], "NYU"),
        (["--out", "FILE"], "not a folder"),
    ],
)
def test_misuse_is_one_sentence(experiment, data_root, tmp_path, arguments, sentence):
    job = tmp_path / "experiment.json"
    job.write_text(json.dumps(experiment().model_dump(mode="json")))
    arguments = [job if argument == "FILE" else argument for argument in arguments]
    done = invoke("compare", job, "--data", data_root, "--out", tmp_path / "out", *arguments)
    assert done.exit_code == 1
    assert sentence in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("fedbn:")]) == 1
    assert "Traceback" not in done.output


@pytest.mark.parametrize("change", [parse_network(LINEAR), {"args": {"in_features": 67}}])
def test_a_network_that_does_not_fit_leaves_no_folder(data_root, tmp_path, experiment, change):
    with pytest.raises(ValueError, match="network"):
        compare(
            plan_comparison(experiment(network=change), ["fedbn", "ridge"], 1),
            data_root,
            tmp_path / "out",
        )
    assert not (tmp_path / "out").exists()


def test_linear_methods_need_no_network_that_fits(data_root, tmp_path, experiment, in_this_process):
    settings = experiment(n_folds=2, network={"args": {"in_features": 67}})
    summary = compare(plan_comparison(settings, ["ridge"], 1), data_root, tmp_path / "out")
    assert summary["scores"]["ridge"]["NYU"]["subject"]["accuracy"]["mean"] > 0.5
    assert summary["convergence"] is None
    assert summary["after_training"] == {}


# ------------------------------------------------------------- one federation for several methods


@pytest.fixture
def in_this_process(monkeypatch):
    """Do tasks one after the other, without another process."""
    tasks_done = []

    def execute(tasks, _processes):
        for task in tasks:
            tasks_done.append([unit.run for unit in task.units])
            execution.do(task)
            yield from tasks_done[-1]

    execution._read.cache_clear()
    monkeypatch.setattr(comparison, "execute", execute)
    return tasks_done


SHARING = ("fedavg", "fedavg_threshold", "fedavg_adabn", "fedavg_finetune")


def test_methods_that_begin_alike_share_a_federation_and_keep_their_numbers(
    data_root, tmp_path, experiment, in_this_process, monkeypatch
):
    trained = []

    def counted(settings, *args, **more):
        trained.append(settings.policy)
        return federate(settings, *args, **more)

    monkeypatch.setattr("fedbn.study.method.federate", counted)
    names = [*SHARING[::-1], "fedbn_finetune_head", "fedbn", "singleset"]
    plan = plan_comparison(experiment(n_folds=2, rounds=1), names, 1)
    compare(plan, data_root, tmp_path / "out")
    assert trained == ["none", "fedbn"] * 2
    of_fold = [{run.method for run in task} for task in in_this_process[:3]]
    assert of_fold == [
        set(SHARING),
        {"fedbn", "fedbn_finetune_head"},
        {"singleset"},
    ]
    stores = read_sites(data_root, plan.experiment)
    alone = {}
    for name in names:
        outcomes = METHODS[name].run(plan.experiment_of(Run(name, 0, 1)), stores)
        alone[name] = {site: make_record(outcomes[site]) for site in ("NYU", "UM")}
        (path,) = (tmp_path / "out" / "runs").glob(f"{name}_seed0_fold1_*.json")
        assert json.loads(path.read_text())["sites"] == alone[name], name
    tests = {name: alone[name]["UM"]["test"] for name in names}
    scores = {name: tuple(test["parts"]["columns"]["p_1"]) for name, test in tests.items()}
    assert scores["fedavg"] == scores["fedavg_threshold"]
    assert len(set(scores.values())) == len(names) - 1, "two methods do the same: nothing is shown"


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ("fedavg", "fedavg_adabn", True),
        ("fedbn", "fedbn_finetune_head", True),
        ("fedavg", "fedprox", False),
        ("fedavg", "fedbn", False),
        ("fedavg", "singleset", False),
        ("ridge", "logistic", False),
    ],
)
def test_only_equal_federations_of_one_seed_and_fold_are_shared(plan, first, second, shared):
    made = plan((first, second), n_seeds=2)
    units = [
        execution.Unit(run, made.experiment_of(run), Path(run.method), "") for run in made.runs
    ]
    groups = execution.together(units)
    assert len(groups) == (4 if shared else 8)
    assert all(len({(unit.run.seed, unit.run.fold) for unit in group}) == 1 for group in groups)


# ------------------------------------------------------------------------------------ convergence


def losses_of(plan, by_method):
    """Make records of two sites whose mean loss of each round is as given, fold by fold."""
    return {
        Run(name, 0, fold): {
            "sites": {
                "NYU": {"training_loss": [[9.0, loss + 0.25] for loss in of_fold]},
                "UM": {"training_loss": [[9.0, loss - 0.25] for loss in of_fold]},
            }
        }
        for name, folds in by_method.items()
        for fold, of_fold in enumerate(folds)
    }


LOSSES = {
    "fedbn": [[0.9, 0.5, 0.4], [0.8, 0.7, 0.3]],
    "fedavg": [[0.9, 0.8, 0.5], [0.9, 0.6, 0.75]],
    "fedprox": [[0.9, 0.8, 0.6], [0.9, 0.8, 0.7]],
}


def test_rounds_until_the_reference_s_last_loss_by_hand(plan):
    made = plan(tuple(LOSSES), n_seeds=1, rounds=3)
    found = convergence(made, losses_of(made, LOSSES), 1.0)
    assert (found["of"], found["target"]) == ("fedavg", 0.625)
    fedbn, fedavg, fedprox = (found["methods"][name] for name in LOSSES)
    assert (fedbn["low"], fedbn["median"], fedbn["high"]) == (2, 2, 2)
    assert (fedavg["low"], fedavg["median"], fedavg["high"]) == (2, 2.5, 3)  # a loss may rise again
    assert (fedprox["reached"], fedprox["runs"]) == (1, 2)
    assert (fedprox["low"], fedprox["high"]) == (3, math.inf)
    assert fedprox["difference"] is None, "no difference where a run does not get there"
    expected = paired.compare([2 - 3, 2 - 2], 1.0)
    assert fedbn["difference"]["mean"] == expected.mean
    assert fedbn["difference"]["high"] == pytest.approx(expected.high)
    assert fedbn["loss"] == [pytest.approx([0.85, 0.6, 0.35])]
    assert fedbn["last_loss"]["mean"] == pytest.approx(0.35)


def test_rounds_until_a_loss_of_ones_own(plan, experiment):
    settings = experiment(n_folds=2, rounds=3)
    made = plan_comparison(settings, list(LOSSES), 1, target_loss=0.4)
    found = convergence(made, losses_of(made, LOSSES), 1.0)
    assert (found["of"], found["target"]) == (None, 0.4)
    assert [found["methods"][name]["reached"] for name in LOSSES] == [2, 0, 0]
    assert found["methods"]["fedbn"]["difference"] is None


def test_losses_are_those_of_the_local_training(data_root, tmp_path, experiment, in_this_process):
    settings = experiment(n_folds=2, rounds=2)
    plan = plan_comparison(settings, ["fedbn", "singleset"], 1, target_loss=99.0)
    summary = compare(plan, data_root, tmp_path / "out")
    federation = federate(plan.experiment_of(Run("fedbn", 0, 0)), read_sites(data_root, settings))
    (path,) = (tmp_path / "out" / "runs").glob("fedbn_seed0_fold0_*.json")
    sites = json.loads(path.read_text())["sites"]
    for site in ("NYU", "UM"):
        assert sites[site]["training_loss"] == federation.losses[site]
        assert [len(epochs) for epochs in federation.losses[site]] == [2, 2]
    assert list(summary["convergence"]["methods"]) == ["fedbn"]
    assert summary["convergence"]["methods"]["fedbn"]["high"] == 1
    assert read_summary(tmp_path / "out") == json.loads(json.dumps(summary))


# ------------------------------------------------------------------------------- rows and summary


WINDOWS = (0.9, 0.3, 0.3, 0.6, 0.45, 0.3)


def outcome_of(windows, task):
    """Three windows of each of two subjects, numbered 7 and 4 in their site; four in training."""

    def scores(positive, targets, owners):
        columns = np.stack([1 - np.array(positive), positive], axis=1)
        return make_scores(columns, np.array(targets), np.array(owners), parts=True)

    test = scores(windows, [1, 1, 1, 0, 0, 0], [7, 7, 7, 4, 4, 4])
    train = scores([0.8, 0.3, 0.62, 0.36], [1, 0, 1, 0], [0, 1, 2, 3])
    facts = task.decisions(train)
    return Outcome(replace(test, facts=facts), replace(train, facts=facts))


@pytest.fixture
def task(experiment):
    return experiment().task


@pytest.fixture
def outcome(task):
    return outcome_of(WINDOWS, task)


def test_a_row_against_values_worked_out_by_hand(task, outcome):
    record = json.loads(json.dumps(make_record(outcome)))
    test = record["test"]
    assert test["units"] == [0, 1]  # subjects 4 and 7
    assert test["columns"]["target"] == [0, 1]
    assert test["columns"]["p_1"] == pytest.approx([0.45, 0.5])
    assert test["parts"]["units"] == [1, 1, 1, 0, 0, 0]
    assert test["facts"] == {"threshold": 0.5, "own_threshold": pytest.approx(0.49)}
    (row,) = score_record(task, Run("fedbn", 3, 1), {"sites": {"UM": record}})
    expected = {
        "method": "fedbn", "site": "UM", "seed": 3, "fold": 1,
        "n_train_subjects": 4, "n_test_subjects": 2, "n_test_windows": 6,
        "threshold": 0.5, "own_threshold": 0.49,
        "subject_accuracy": 1.0, "subject_accuracy_own_threshold": 1.0,
        "subject_auc": 1.0, "subject_sensitivity": 1.0, "subject_specificity": 1.0,
        "subject_brier": (0.45**2 + 0.5**2) / 2,
        "window_accuracy": 3 / 6, "window_accuracy_own_threshold": 3 / 6,
        "window_sensitivity": 1 / 3, "window_specificity": 2 / 3, "window_balanced_accuracy": 0.5,
        "window_auc": roc_auc_score([1, 1, 1, 0, 0, 0], [0.9, 0.3, 0.3, 0.6, 0.45, 0.3]),
        "window_brier": np.mean([0.1**2, 0.7**2, 0.7**2, 0.6**2, 0.45**2, 0.3**2]),
    }  # fmt: skip
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert {f"{level}_{m.name}" for level in ("subject", "window") for m in TWO_CLASSES} <= set(row)
    assert row["when"] == "final"


def test_a_federated_method_has_a_row_before_and_one_after_training(task, outcome):
    after = outcome_of(1 - np.array(WINDOWS), task)
    record = make_record(replace(outcome, after_training=after))
    before_row, after_row = score_record(task, Run("fedbn", 3, 1), {"sites": {"UM": record}})
    (alone,) = score_record(task, Run("fedbn", 3, 1), {"sites": {"UM": make_record(outcome)}})
    assert before_row == {**alone, "when": "before_training"}
    assert after_row["when"] == "after_training"
    assert after_row["subject_auc"] == 1 - before_row["subject_auc"] == 0
    assert list(before_row) == list(after_row) == list(alone)


def test_an_undefined_metric_is_an_empty_cell_and_never_a_number(task, outcome):
    record = make_record(outcome)
    record["test"]["columns"]["target"] = [1, 1]
    (row,) = score_record(task, Run("fedbn", 0, 0), {"sites": {"UM": record}})
    assert math.isnan(row["subject_auc"])
    assert math.isnan(row["subject_specificity"])
    assert row["subject_accuracy"] == 0.5


@pytest.mark.slow
def test_the_summary_is_worked_out_from_the_rows(finished):
    summary, rows = finished["summary"], rows_of(finished["out"])

    def value(name, site, seed, fold, column):
        (row,) = (
            r
            for r in rows
            if (r["method"], r["site"], r["seed"], r["fold"]) == (name, site, str(seed), str(fold))
        )
        return float(row[column])

    column = "window_brier"  # continuous: it differs in every run
    of_seed = [
        statistics.fmean(value("fedbn", "UM", seed, fold, column) for fold in (0, 1))
        for seed in (0, 1)
    ]
    cell = summary["scores"]["fedbn"]["UM"]["window"]["brier"]
    assert cell["mean"] == pytest.approx(statistics.fmean(of_seed))
    assert cell["sd"] == pytest.approx(statistics.stdev(of_seed))

    def macro(name, seed, fold):
        return statistics.fmean(value(name, site, seed, fold, column) for site in ("NYU", "UM"))

    places = [(seed, fold) for seed in (0, 1) for fold in (0, 1)]
    differences = [macro("fedbn", *place) - macro("fedavg", *place) for place in places]
    expected = paired.compare(differences, test_to_train=1.0)
    found = summary["differences"]["fedbn"]["macro"]["window"]["brier"]
    assert found["mean"] == pytest.approx(expected.mean)
    assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high))
    assert found["verdict"] == paired.verdict(expected)
    assert found["n"] == 4
    weighted = summary["scores"]["fedbn"]["weighted"]["subject"]["accuracy"]["mean"]
    by_hand = statistics.fmean(
        sum(
            n * value("fedbn", site, *place, "subject_accuracy")
            for site, n in (("NYU", 10), ("UM", 8))
        )
        / 18
        for place in places
    )
    assert weighted == pytest.approx(by_hand)
    assert summary["n_subjects"] == {"NYU": 20, "UM": 16}
    assert summary["test_to_train"] == {"NYU": 1.0, "UM": 1.0, "macro": 1.0}
    assert read_summary(finished["out"]) == summary
    with pytest.raises(ComparisonError, match="is not the summary of a comparison"):
        read_summary(finished["data"])


# ----------------------------------------------------------------------------------------- tables


@pytest.mark.slow
def test_tables_show_the_summary(finished):
    summary = finished["summary"]
    text = render([scores_table(summary, "subject")], width(summary))
    row = next(line for line in text.splitlines() if line.startswith(" FedBN"))
    for scope in ("NYU", "UM", "macro"):
        cell = summary["scores"]["fedbn"][scope]["subject"]["accuracy"]
        assert f"{100 * cell['mean']:.1f} ({100 * cell['sd']:.1f})" in row
    subjects = next(line for line in text.splitlines() if "subjects" in line.split())
    assert subjects.split() == ["subjects", "20", "16", "36"]
    assert "ridge, pooled *" in text
    assert "* needs all sites' data in one place" in text
    everything = render(comparison_tables(summary), width(summary))
    assert "by window of held-out subjects" in everything
    assert "windows" in everything
    assert SYNTHETIC.strip() not in everything
    synthetic = comparison_tables({**summary, "synthetic": True})
    assert render(synthetic, width(summary)).count(SYNTHETIC.strip()) == len(synthetic)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mean", "low", "high", "claimed"),
    [
        (0.04, -0.01, 0.09, False),
        (0.04, 0.0, 0.08, False),
        (0.04, 0.001, 0.08, True),
        (-0.04, -0.08, -0.001, True),
        (-0.04, -0.08, 0.001, False),
    ],
)
def test_no_table_or_sentence_claims_what_the_interval_does_not(finished, mean, low, high, claimed):
    summary = json.loads(json.dumps(finished["summary"]))
    difference = paired.Difference(mean, low, high, 0.04, 0.02, 25)
    for scope in ("macro", "NYU", "UM"):
        summary["differences"]["fedbn"][scope]["subject"]["accuracy"] = {
            **vars(difference),
            "verdict": paired.verdict(difference),
            "p_holm": 0.08,
        }
    sentence = next(s for s in difference_sentences(summary) if s.startswith("FedBN "))
    table = render([difference_table(summary)], width(summary)).splitlines()
    start = next(k for k, line in enumerate(table) if line.startswith(" FedBN"))
    rows = table[start : start + 3]
    words = ("higher", "lower", "better", "worse")
    if claimed:
        word = "higher" if mean > 0 else "lower"
        assert sentence.startswith(f"FedBN is 4.0 points {word} than FedAvg (95% interval ")
        assert all(row.split()[-1] == word for row in rows)
    else:
        assert sentence.startswith("FedBN against FedAvg: no difference shown (")
        assert "includes zero" in sentence
        assert not any(word in sentence for word in words)
        assert all(row.rstrip().endswith("not shown") for row in rows)


# --------------------------------------------------------------------- for the right reason, or not


@pytest.fixture(scope="module")
def cohorts(tmp_path_factory):
    """Stores of the synthetic cohort: scanners that differ, and the same one everywhere."""
    root = tmp_path_factory.mktemp("cohorts")
    arguments = ["synthetic", "--whole-scan", "--subjects", "72"]
    for name, more in (("shift", []), ("none", ["--no-shift"])):
        done = CliRunner().invoke(data_prep, [*arguments, *more, "--out", str(root / name)])
        assert done.exit_code == 0, done.output
    return root


@pytest.mark.slow
@pytest.mark.parametrize("cohort", ["shift", "none"])
def test_fedbn_is_above_fedavg_where_scanners_differ_and_nowhere_else(
    cohorts, tmp_path, experiment, cohort
):
    """Without site standardisation only batch norm can take a scanner's shift out.

    Plain SGD: its steps through batch norm leave the mean of the raw features alone. Adam's do not,
    so that local statistics no longer fit the averaged weights, and FedBN loses what it gains.
    """
    settings = experiment(
        sites=("NYU", "USM", "UM", "UCLA"),
        network={
            "args": {"in_features": 6105, "hidden": [32], "input_dropout": 0.0, "dropout": 0.0}
        },
        standardization="none",
        rounds=20,
        training={
            "optimizer": "sgd",
            "local_epochs": 2,
            "learning_rate": 0.1,
            "weight_decay": 0.001,
            "batch_size": 16,
        },
        n_folds=3,
    )
    plan = plan_comparison(settings, ["fedavg", "fedbn"], 2)
    summary = compare(plan, cohorts / cohort, tmp_path / "out", processes=2)
    assert summary["synthetic"]
    found = summary["differences"]["fedbn"]["macro"]["subject"]["accuracy"]
    told = f"{found['mean']:+.3f} ({found['low']:+.3f} to {found['high']:+.3f})"
    if cohort == "shift":
        assert found["mean"] > 0.1, told
        assert found["verdict"] == paired.HIGHER, told
    else:
        assert found["low"] <= 0 <= found["high"], told
        assert abs(found["mean"]) < 0.05, told
        assert found["verdict"] == paired.NOT_SHOWN
