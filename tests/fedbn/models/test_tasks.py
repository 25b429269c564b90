"""Any task's model is exported, asked and adapted: a table of three classes, and one's own task."""

from __future__ import annotations

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from data_prep.table_store import write_table_store
from fedbn.__main__ import app
from fedbn.core.batches import TensorSamples
from fedbn.federation.experiment import Experiment
from fedbn.models.bundle import read_bundle
from fedbn.models.prediction import PredictionError, predict_files
from fedbn.models.site_model import find_kept_model, site_facts
from fedbn.tasks import registry
from fedbn.tasks.tabular import TabularTask

COLUMNS = ("participant_id", "age", "size", "kind", "grade")


def write_table(place, n=30, seed=0, columns=COLUMNS):
    """Write patients whose grade follows from age, size and kind; some cells are missing."""
    rng = np.random.default_rng(seed)
    rows = []
    for k in range(n):
        grade = k % 3
        size, age = round(grade + 0.3 * rng.standard_normal(), 3), 40 + int(20 * rng.random())
        row = {
            "participant_id": f"p{seed}-{k}",
            "age": age,
            "size": "" if k % 7 == 0 else size,
            "kind": "?" if k % 11 == 0 else ("a", "b")[grade == 2],
            "grade": ("low", "mid", "high")[grade],
        }
        rows.append([row[name] for name in columns])
    return write_table_store(place, columns, rows)


@pytest.fixture(scope="module")
def run(tmp_path_factory, keep_run):
    root = tmp_path_factory.mktemp("table_run")
    for seed, site in enumerate(("North", "South")):
        write_table(root / "data" / site, seed=seed)
    experiment = Experiment(
        name="grades",
        task={
            "name": "tabular",
            "target": "grade",
            "classes": {"none": ["low"], "some": ["mid"], "much": ["high"]},
            "numbers": ["age", "size"],
            "categories": {"kind": ["a", "b", "nobody's"]},
        },
        sites=("North", "South"),
        network={"name": "MLP", "args": {"in_features": 5, "hidden": [8], "n_classes": 3}},
        rounds=4,
        training={"batch_size": 8, "local_epochs": 5, "learning_rate": 0.05},
        n_folds=3,
        compare_with_alone=False,
    )
    return keep_run(root, experiment)


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    return run.export("North", tmp_path_factory.mktemp("bundle") / "North")


def command(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def test_raw_rows_give_what_prepared_ones_give_the_bare_network(run):
    kept = find_kept_model(run.workspace, "North")
    task, data = run.experiment.task, run.experiment.task.read(run.data / "North", "North")
    everyone = np.arange(len(data.units))
    raw, ready = (
        task.samples(data, everyone, fitted, torch.device("cpu")) for fitted in ({}, kept.fitted)
    )
    assert raw.inputs.isnan().any()
    with torch.no_grad():
        assert torch.equal(kept.model(raw.inputs), kept.model.network(ready.inputs))


def test_a_table_is_exported_and_asked(run, folder, tmp_path):
    scores = run.results["sites"]["North"]["federated"]["subject"]
    content = json.loads((folder / "configs" / "metadata.json").read_text())
    assert content["fedbn"]["task"] == run.experiment.task.model_dump(mode="json")
    assert content["fedbn"]["scores"]["subject"] == scores
    assert content["pred_classes"] == "logits of none, some and much"
    inputs = content["network_data_format"]["inputs"]["image"]
    assert inputs["channel_def"] == {"0": "age", "1": "size", "2": "kind=a", "3": "kind=b",
                                     "4": "kind=nobody's"}  # fmt: skip
    assert content["network_data_format"]["outputs"]["pred"]["num_channels"] == 3
    assert (
        f"{scores['n']}, accuracy {scores['accuracy']:.3f}"
        in (folder / "docs" / "README.md").read_text()
    )
    done = command("predict", "--model", folder, "--input", run.data / "North", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert (
        f"held-out subjects: {scores['n']}, accuracy {100 * scores['accuracy']:.1f} %"
        in done.output
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["predictions.tsv"]
    rows = rows_of(tmp_path / "predictions.tsv")
    for row in rows:
        probability = [float(row[f"probability_{name}"]) for name in ("none", "some", "much")]
        assert sum(probability) == pytest.approx(1, abs=1e-5)
        assert row["class"] == ("none", "some", "much")[int(np.argmax(probability))]
    right = sum(r["class"] == r["target"] for r in rows if r["in_training"] == "no")
    assert right == round(scores["accuracy"] * scores["n"])
    assert rows[0]["missing"] == "size, kind"


def test_rows_without_a_class_are_asked_about(folder, tmp_path):
    write_table(tmp_path / "new", n=6, seed=5, columns=("participant_id", "size", "age"))
    found = predict_files(read_bundle(folder), [tmp_path / "new" / "table.csv"])
    assert [(p.case.target, p.case.in_training) for p in found] == [(None, None)] * 6
    assert {p.case.facts["missing"] for p in found} == {"kind", "size, kind"}


def test_a_row_is_far_where_it_is_unlike_the_training(folder, tmp_path):
    write_table_store(tmp_path, ("age", "size", "kind"), [(50, 1, "a"), (5000, -70, "b")])
    near, far = predict_files(read_bundle(folder), [tmp_path])
    assert near.far == ()
    assert "features" in far.far
    assert far.case.warnings[0].startswith("unlike the patients that the model was trained on")


@pytest.mark.parametrize(
    ("header", "rows", "sentence"),
    [
        (("age", "size", "kind"), [(50, "big", "a")], "'size' is 'big' in row 2 of"),
        (
            ("age", "size", "kind"),
            [(50, 1, "c")],
            "'kind' is 'c' in row 2 of .* states a, b, nobody's",
        ),
        (("weight",), [(50,)], "has no value in any column .*: age, size, kind"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(folder, tmp_path, header, rows, sentence):
    write_table_store(tmp_path, header, rows)
    with pytest.raises(ValueError, match=sentence):
        predict_files(read_bundle(folder), [tmp_path])


def test_options_of_another_task_are_refused(folder, run):
    with pytest.raises(PredictionError, match="a model of task 'tabular' takes no --atlas"):
        predict_files(read_bundle(folder), [run.data / "North"], {"atlas": "a.nii"})
    done = command("predict", "--model", folder, "--input", "nowhere.csv")
    assert done.exit_code == 1
    assert done.stderr == "fedbn: there is no table nowhere.csv\n"


def test_a_new_hospitals_table_is_adapted_to_exported_and_asked(run, tmp_path):
    write_table(tmp_path / "data" / "East", n=9, seed=7)
    out = tmp_path / "out"
    server = run.workspace / "server"
    done = command("adapt", "--run", server, "--data", tmp_path / "data", "--out", out)
    assert done.exit_code == 0, done.output
    done = command(
        "export",
        "--run",
        out,
        "--site",
        "East",
        "--data",
        tmp_path / "data",
        "--out",
        tmp_path / "b",
    )
    assert done.exit_code == 0, done.output
    assert "nobody at East was trained on" in done.output
    found = predict_files(read_bundle(tmp_path / "b"), [tmp_path / "data" / "East"])
    assert len(found) == 9
    assert {p.case.in_training for p in found} == {False}


# ------------------------------------------------------------------------ a network's own dtypes


class OtherDtype(nn.Module):
    """Layers of another dtype than float32, between which the network converts."""

    def __init__(self, linear: str, norm: str):
        super().__init__()
        self.linear = nn.Linear(5, 8).to(getattr(torch, linear))
        self.norm = nn.BatchNorm1d(8).to(getattr(torch, norm))
        self.head = nn.Linear(8, 3).to(getattr(torch, linear))

    def forward(self, x):
        hidden = self.linear(x.to(self.linear.weight.dtype)).to(self.norm.weight.dtype)
        return self.head(torch.relu(self.norm(hidden)).to(self.head.weight.dtype))


@pytest.mark.parametrize(
    "dtypes",
    [("float64", "float64"), ("float16", "float32"), ("bfloat16", "bfloat16"),
     ("float32", "bfloat16")],
)  # fmt: skip
def test_a_network_of_another_dtype_is_exported_and_asked_as_it_was_trained(
    run, tmp_path, keep_run, dtypes
):
    shutil.copytree(run.data, tmp_path / "data")
    network = {
        "name": f"{__name__}.OtherDtype",
        "args": dict(zip(("linear", "norm"), dtypes, strict=True)),
    }
    training = {"optimizer": "sgd", "learning_rate": 0.05, "batch_size": 8}
    kept = keep_run(tmp_path, run.experiment.changed(network=network, rounds=1, training=training))
    folder = kept.export("North", tmp_path / "bundle")
    scores = kept.results["sites"]["North"]["federated"]["subject"]
    done = command("predict", "--model", folder, "--input", kept.data / "North")
    assert done.exit_code == 0, done.output
    said = f"held-out subjects: {scores['n']}, accuracy {100 * scores['accuracy']:.1f} %"
    assert said in done.output


# ------------------------------------------------------------------------- a researcher's own task


class OwnTask(TabularTask):
    """Nothing is fitted, and nothing is said of being packed or asked."""

    name: str = "own"

    def fit(self, data, train):
        return {}

    def samples(self, data, units, fitted, device):
        made = super().samples(data, units, {}, device)
        return TensorSamples(made.inputs.nan_to_num(), made.targets, made.owners)

    def bundling(self):
        return None


class FittingTask(OwnTask):
    """It fits, and does not say how what it fits precedes the network."""

    name: str = "fitting"

    def fit(self, data, train):
        return {"offset": torch.zeros(5)}


@pytest.fixture
def own_run(run, tmp_path, keep_run, monkeypatch):
    def make(task):
        monkeypatch.setitem(
            registry.TASKS, task.model_fields["name"].default, f"{__name__}:{task.__name__}"
        )
        shutil.copytree(run.data, tmp_path / "data")
        settings = run.experiment.task.model_dump() | {"name": task.model_fields["name"].default}
        return keep_run(tmp_path, run.experiment.changed(task=settings))

    return make


def test_ones_own_task_is_exported_and_asked_if_nothing_is_fitted(own_run, tmp_path):
    run = own_run(OwnTask)
    folder = run.export("South", tmp_path / "bundle")
    scores = run.results["sites"]["South"]["federated"]["subject"]
    done = command("predict", "--model", folder, "--input", run.data / "South")
    assert done.exit_code == 0, done.output
    assert (
        f"held-out subjects: {scores['n']}, accuracy {100 * scores['accuracy']:.1f} %"
        in done.output
    )
    assert list(read_bundle(folder).facts["distances"]) == ["batch_norm"]


def test_ones_own_task_that_fits_something_is_refused(own_run):
    run = own_run(FittingTask)
    with pytest.raises(ValueError, match="task 'fitting' fits offset at a site and does not say"):
        find_kept_model(run.workspace, "South")


def test_a_task_that_is_not_installed_is_named(own_run, tmp_path, monkeypatch):
    run = own_run(OwnTask)
    folder = run.export("South", tmp_path / "bundle")
    monkeypatch.delitem(registry.TASKS, "own")
    done = command("predict", "--model", folder, "--input", run.data / "South")
    assert done.exit_code == 1
    assert "there is no task 'own'" in done.stderr


def test_data_are_named_themselves_or_by_the_folder_above(run):
    task = run.experiment.task
    own = run.data / "North"
    assert task.find(run.data, "North") == task.find(own, "North") == task.find(own) == own
    with pytest.raises(ValueError, match=r"holds the data of 2 sites \(North, South\); name one"):
        task.find(run.data)
    with pytest.raises(ValueError, match="holds no site's data"):
        task.find(run.workspace)
    kept = find_kept_model(run.workspace, "North")
    assert site_facts(kept, run.workspace, task.read(own, "North")).scores is not None
