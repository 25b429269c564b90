"""Classes from a table: what a network gets of numbers, categories and missing cells."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tables import SITES, table_experiment, write_tables

from data_prep.table_store import write_table_store
from fedbn.federation.experiment import ExperimentError, read_experiment, validated
from fedbn.federation.simulation import read_sites, run_federation
from fedbn.federation.site import Site, prepare
from fedbn.tasks.classification import ANY_CLASSES, TWO_CLASSES
from fedbn.tasks.data import DataError, Split
from fedbn.tasks.registry import make_task

JOB = Path(__file__).parents[3] / "jobs" / "heart_fedbn"
SETTINGS = {
    "name": "tabular",
    "target": "outcome",
    "classes": {"well": ["0"], "ill": ["1"]},
    "numbers": ["age", "height"],
    "categories": {"stage": ["a", "b", "c"]},
}
HEADER = ("age", "height", "stage", "outcome")
CPU = torch.device("cpu")


@pytest.fixture
def read(tmp_path):
    def read(rows, header=HEADER, **changes):
        task = make_task(SETTINGS | changes)
        write_table_store(tmp_path / "North", header, rows)
        return task, task.read(tmp_path / "North", "North")

    return read


def inputs_of(task, data, train):
    fitted = task.fit(data, np.array(train))
    samples = task.samples(data, np.arange(len(data.units)), fitted, CPU)
    assert samples.inputs.dtype == torch.float32
    assert samples.inputs.shape == (len(data.lines), len(task.features))
    return fitted, samples


# ------------------------------------------------------------------------------------ the features


def test_features_are_named_in_the_order_of_the_network_s_inputs():
    assert make_task(SETTINGS).features == ("age", "height", "stage=a", "stage=b", "stage=c")
    experiment = read_experiment(JOB)
    assert len(experiment.task.features) == experiment.network.args["in_features"]


def test_the_order_of_classes_and_categories_outlives_a_file_that_sorts_names(tmp_path):
    task = make_task(SETTINGS | {"categories": {"stage": ["a", "b"], "group": ["x", "y"]}})
    sorted_names = json.dumps(task.model_dump(), sort_keys=True)
    assert make_task(json.loads(sorted_names)) == task
    other = make_task(SETTINGS | {"classes": {"ill": ["1"], "well": ["0"]}})
    assert json.dumps(other.model_dump(), sort_keys=True) != sorted_names
    assert (task.class_names, other.class_names) == (("well", "ill"), ("ill", "well"))


def test_z_scores_by_hand(read):
    rows = [[1, 10, "a", 0], [3, 10, "b", 1], [5, 16, "b", 0], [100, 2, "c", 1]]
    task, data = read(rows)
    fitted, samples = inputs_of(task, data, [0, 1, 2])
    np.testing.assert_allclose(fitted["mean"], [3, 12, 1 / 3, 2 / 3, 0], rtol=1e-6)
    np.testing.assert_allclose(fitted["std"], [8**0.5 / 3**0.5, 8**0.5, 2**0.5 / 3, 2**0.5 / 3, 0])
    of_train = samples.inputs[:3]
    np.testing.assert_allclose(of_train.mean(dim=0), 0, atol=1e-6)
    np.testing.assert_allclose(of_train.std(dim=0, correction=0), [1, 1, 1, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(samples.inputs[3, 1], -10 / 8**0.5, rtol=1e-6)
    assert samples.targets.tolist() == [0, 1, 0, 1]
    assert samples.owners.tolist() == [0, 1, 2, 3]


def test_missing_cells_get_what_is_usual_among_the_training_patients(read):
    rows = [
        [1, 5, "b", 0],
        [2, "", "b", 1],
        [9, 7, "a", 0],
        ["?", 6, "", 1],
        [500, 900, "c", 0],  # held out, as are two more: they decide nothing
        [500, 900, "c", 1],
        ["", "", "", 1],
    ]
    task, data = read(rows, standardization="none")
    fitted, samples = inputs_of(task, data, [0, 1, 2, 3])
    np.testing.assert_array_equal(fitted["fill"], [2, 6, 0, 1, 0])
    np.testing.assert_array_equal(samples.inputs[3], [2, 6, 0, 1, 0])
    np.testing.assert_array_equal(samples.inputs[1], [2, 6, 0, 1, 0])
    np.testing.assert_array_equal(samples.inputs[6], [2, 6, 0, 1, 0])
    np.testing.assert_array_equal(samples.inputs[4], [500, 900, 0, 0, 1])


@pytest.mark.parametrize("standardization", ["site", "none"])
def test_held_out_patients_decide_nothing(read, standardization):
    rows = [[k, 100 - k, "abc"[k % 3], k % 2] for k in range(8)]
    task, data = read(rows, standardization=standardization)
    before = task.fit(data, np.arange(6))
    rows[6:] = [["", 1e6, "c", 0], [-1e6, "", "", 1]]
    after = task.fit(read(rows, standardization=standardization)[1], np.arange(6))
    assert all(torch.equal(before[name], after[name]) for name in ("fill", "mean", "std"))


@pytest.mark.parametrize("standardization", ["site", "none"])
@pytest.mark.parametrize("where", ["no column", "missing cells", "a held-out patient's alone"])
def test_a_column_without_values_is_0_for_everybody_and_said(read, where, standardization):
    rows = [[k, "", "ab"[k % 2], k % 2] for k in range(8)]
    header = HEADER
    if where == "no column":
        rows, header = [[row[0], *row[2:]] for row in rows], ("age", "stage", "outcome")
    elif where != "missing cells":
        rows[7][1] = 250
    task, data = read(rows, header, standardization=standardization)
    fitted, samples = inputs_of(task, data, range(7))
    assert not samples.inputs[:, 1].any()
    assert not samples.inputs[:, 4].any(), "nobody has stage c"
    assert all(bool(torch.isfinite(tensor).all()) for tensor in fitted.values())
    facts = task.facts(data, Split(np.arange(7), np.empty(0, int), np.array([7])))
    alone = where.startswith("a held-out")
    assert facts["columns_without_values"] == ([] if alone else ["height"])
    assert facts["missing_cells_share"] == (7 if alone else 8) / 24


@pytest.mark.parametrize("value", [250, 1e-9, -3])
def test_a_number_that_does_not_vary_is_0_even_for_one_who_differs(read, value):
    rows = [[k, value, "ab"[k % 2], k % 2] for k in range(7)] + [[3, value + 50, "a", 1]]
    _, samples = inputs_of(*read(rows), range(7))
    assert not samples.inputs[:, 1].any()


def test_a_small_unit_is_no_reason_to_drop_a_number(read):
    rows = [[k, k * 1e-12, "ab"[k % 2], k % 2] for k in range(8)]
    _, samples = inputs_of(*read(rows), range(8))
    np.testing.assert_allclose(samples.inputs[:, 1], samples.inputs[:, 0], rtol=1e-5)


def test_a_participant_with_two_rows_is_one_unit_with_two_samples(read):
    header = ("participant_id", *HEADER)
    rows = [[f"p{k // 2}", k, k, "ab"[k % 2], k // 2 % 2] for k in range(16)]
    task, data = read(rows, header)
    fitted = task.fit(data, np.arange(6))
    samples = task.samples(data, np.array([6, 7]), fitted, CPU)
    assert samples.owners.tolist() == [6, 6, 7, 7]
    assert len(samples) == 4


def test_spreadsheets_that_write_categories_as_numbers_are_understood(read):
    changes = {"categories": {"sex": [0, 1]}, "classes": {"well": [0], "ill": [1, "2.0"]}}
    header = ("age", "height", "sex", "outcome")
    rows = [[k, k, "1.0" if k % 2 else "", f"{k % 3}.0"] for k in range(9)]
    task, data = read(rows, header, **changes)
    assert task.categories == (("sex", ("0", "1")),)
    assert data.labels.tolist() == [0, 1, 1] * 3
    _, samples = inputs_of(task, data, range(9))
    assert samples.inputs.shape == (9, 4)


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"classes": {"well": ["0"]}}, "give two classes or more"),
        ({"classes": {"well": ["0"], "ill": []}}, "give two classes or more"),
        ({"classes": {"well": ["0"], "ill": ["1", "0.0"]}}, "cell '0' means two classes"),
        ({"classes": [["a", ["0"]], ["a", ["1"]]]}, "class 'a' is named twice"),
        ({"numbers": [], "categories": {}}, "give columns to learn from"),
        ({"numbers": ["age", "age"]}, "column 'age' is named twice"),
        ({"numbers": ["stage"]}, "column 'stage' is named twice"),
        ({"numbers": ["outcome"]}, "the target 'outcome' is among the columns"),
        ({"categories": {"outcome": ["0", "1"]}}, "the target 'outcome' is among the columns"),
        ({"categories": {"stage": ["a"]}}, "give two values or more of 'stage', each once"),
        ({"categories": {"stage": ["1", "1.0"]}}, "give two values or more of 'stage', each once"),
        ({"classes": {"well": [0.5], "ill": ["1"]}}, "valid string"),
        ({"target": None}, "target"),
        ({"columns": []}, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_cannot_be_meant(changes, sentence):
    with pytest.raises(ValidationError, match=sentence):
        make_task(SETTINGS | changes)
    content = table_experiment().model_dump() | {"task": SETTINGS | changes}
    with pytest.raises(ExperimentError, match=r"^the job: task") as caught:
        validated(content, "the job")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("column", "cell", "sentence"),
    [
        ("age", "old", "'age' is 'old' in row 3 of .*; give a number, or leave a missing cell"),
        ("age", "61,5", "'age' is '61,5' in row 3"),
        ("height", "inf", "'height' is 'inf' in row 3"),
        ("height", "1_000", "'height' is '1_000' in row 3"),
        ("stage", "d", "'stage' is 'd' in row 3 of .*; the job states a, b, c"),
        ("stage", "A", "'stage' is 'A' in row 3"),
        ("outcome", "2", "'outcome' is '2' in row 3 of .*; give one of 0, 1"),
        ("outcome", "", "'outcome' is missing in row 3"),
    ],
)
def test_a_wrong_cell_is_named_by_row_and_column_to_the_site_alone(read, column, cell, sentence):
    rows = [[1, 2, "a", 0], [3, 4, "b", 1], [5, 6, "c", 0]]
    rows[1][HEADER.index(column)] = cell
    with pytest.raises(DataError, match=f"^site 'North': {sentence}") as caught:
        prepare("North", read(rows)[1], table_experiment(task=SETTINGS, sites=("North",)))
    assert f"'{column}' has a cell that cannot be used" in caught.value.public
    assert "row 3" not in caught.value.public
    assert cell == "2" or not cell or repr(cell) not in caught.value.public


def test_a_column_that_is_spelt_in_another_way_is_not_taken_for_missing(read):
    with pytest.raises(DataError, match=r"has a column 'Age', which the job calls 'age'; rename"):
        read([[1, 2, "a", 0]], ("Age", "height", "stage", "outcome"))


def test_a_table_with_none_of_the_columns_is_refused(read):
    with pytest.raises(DataError, match=r"no value in any column .* age, height, stage"):
        read([[1, 0], [2, 1]], ("weight", "outcome"))


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"in_features": 6}, r"cannot take the table's rows of 5 features: MLP takes .*\(n, 6\)"),
        ({"in_features": 5, "n_classes": 3}, r"3 outputs, but there are 2 classes \(well, ill\)"),
    ],
)
def test_a_network_that_does_not_fit_is_named(tmp_path, args, reason):
    experiment = table_experiment(network={"name": "MLP", "args": args})
    data = read_sites(write_tables(tmp_path), experiment)
    with pytest.raises(DataError, match=f"site 'North': network MLP (has )?{reason}"):
        Site("North", data["North"], experiment).check_network()


def test_sites_that_learn_other_classes_cannot_train_together(tmp_path):
    write_tables(tmp_path)
    (tmp_path / "South" / "dataset_description.json").write_text('{"synthetic": true}')
    with pytest.raises(
        DataError, match=r"'North' and 'South' cannot .* synthetic is False and True"
    ):
        read_sites(tmp_path, table_experiment())


# ----------------------------------------------------------------------------------- a federation


def test_metrics_by_the_number_of_classes():
    assert make_task(SETTINGS).metrics == TWO_CLASSES
    three = table_experiment(3).task
    assert three.metrics[:3] == ANY_CLASSES
    assert [m.title for m in three.metrics[3:]] == [f"recall of {n}" for n in three.class_names]


@pytest.mark.parametrize("n_classes", [2, 3])
def test_a_federation_learns(tmp_path, n_classes):
    experiment = table_experiment(n_classes, rounds=12, compare_with_alone=False)
    data = read_sites(write_tables(tmp_path, n=60, n_classes=n_classes), experiment, verify=True)
    report = run_federation(experiment, data).report
    json.dumps(report, allow_nan=False)
    for site in SITES:
        found = report["sites"][site]["federated"]["subject"]
        assert found["accuracy"] > 1.5 / n_classes
        assert found["auc"] > 0.75
        assert {"accuracy", "balanced_accuracy", "auc"} < set(found)
    assert report["sites"]["North"]["n_train_subjects"] == 40


def test_a_class_that_a_site_has_not_is_undefined_there_and_a_loss_elsewhere(tmp_path):
    experiment = table_experiment(3, compare_with_alone=False)
    write_tables(tmp_path, ("North",), n_classes=3)
    write_tables(tmp_path, ("South",), n_classes=2)
    report = run_federation(experiment, read_sites(tmp_path, experiment)).report
    south = report["sites"]["South"]["federated"]["subject"]
    assert south["recall_2"] is south["auc"] is None
    assert south["reasons"]["recall_2"] == "none of the 14 samples is of class 2"
    across = report["across_sites"]["federated"]["subject"]["n_sites"]
    assert (across["accuracy"], across["auc"], across["recall_2"]) == (2, 1, 1)


def test_columns_that_a_site_has_not_are_in_its_report(tmp_path):
    write_tables(tmp_path)
    rows = [[k, k % 2] for k in range(30)]
    write_table_store(tmp_path / "South", ("age", "outcome"), rows)
    experiment = table_experiment(compare_with_alone=False)
    report = run_federation(experiment, read_sites(tmp_path, experiment)).report["sites"]
    assert report["North"]["columns_without_values"] == []
    assert report["South"]["columns_without_values"] == ["pressure", "stage"]
    assert report["South"]["ill_share_train"] == 0.5


def test_who_is_held_out_does_not_depend_on_the_order_of_rows(read):
    header = ("participant_id", *HEADER)
    rows = [[f"p{k}", k, k, "ab"[k % 2], k % 2] for k in range(20)]
    held_out = []
    for order in (rows, rows[::-1]):
        _, data = read(order, header)
        made = prepare("North", data, table_experiment(task=SETTINGS, sites=("North",)))
        held_out.append({data.units[k].id for k in made.split.test})
    assert held_out[0] == held_out[1]
