"""Tables at a FLARE client: the same bits as in process, and nothing of a patient leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tables import HEADER, table_experiment, table_rows, write_tables

from data_prep.table_store import write_table_store
from fedbn.federation.simulation import read_sites, run_federation
from fedbn.flare.doctor import FAILED, OK, WARNING, examine

SITES = ("NYU", "UM", "USM")


def changes(n_classes=2):
    content = table_experiment(n_classes).model_dump()
    return {name: content[name] for name in ("task", "network", "training", "n_folds", "rounds")}


@pytest.mark.parametrize("n_classes", [2, 3])
def test_the_bits_of_the_in_process_run(make_workflow, experiment, data_root, n_classes):
    workflow = make_workflow(**changes(n_classes), compare_with_alone=True, test_curve=True)
    write_tables(data_root, SITES, n_classes=n_classes)
    workflow.run()
    assert workflow.engine.panics == []
    found = json.loads((Path(workflow.get_run_dir()) / "results.json").read_text())
    same = experiment(sites=SITES, **changes(n_classes), compare_with_alone=True, test_curve=True)
    expected = run_federation(same, read_sites(data_root, same)).report
    for key in ("shared_weights_sha256", "across_sites", "experiment"):
        assert found[key] == expected[key]
    for site in SITES:
        assert {key: found["sites"][site][key] for key in expected["sites"][site]} == (
            expected["sites"][site]
        )


def write_with_ids(root, ids, spoil=None):
    rows = [[who, *row] for who, row in zip(ids, table_rows("North", len(ids)), strict=True)]
    if spoil is not None:
        spoil(rows)
    write_table_store(root / "North", ("participant_id", *HEADER), rows)


def ask(make_client, root, purpose="preflight", **more):
    client = make_client(table_experiment(), "North", data_root=str(root))
    return client, *client.ask(purpose, **more)


def old_age(rows):
    rows[5][1] = "sixty-one"


def unknown_class(rows):
    rows[5][-1] = "9"


def missing_class(rows):
    rows[5][-1] = ""


@pytest.mark.parametrize(
    ("spoil", "column"), [(old_age, "age"), (unknown_class, "outcome"), (missing_class, "outcome")]
)
def test_a_wrong_cell_is_told_to_the_server_without_its_row(
    make_client, tmp_path, caplog, spoil, column
):
    write_with_ids(tmp_path, [f"person {k}" for k in range(30)], spoil)
    _, report, answer = ask(make_client, tmp_path)
    assert report["error"].startswith(f"site 'North': '{column}' has a cell that cannot be used")
    assert answer.params is None
    for private in ("sixty", "'9'", "row 7", "person", str(tmp_path)):
        assert private not in report["error"]
    assert "in row 7 of " in caplog.text, "the site's own log says where it is"
    assert "not foreseen" not in caplog.text


def test_ids_of_a_table_are_taken_out_of_any_sentence(make_client, tmp_path, monkeypatch):
    ids = ["Ann Smith", "sub-01", "4711", *map(str, range(27))]
    write_with_ids(tmp_path, ids)
    client, report, _ = ask(make_client, tmp_path)
    assert "error" not in report

    def fails(*_, **__):
        raise ValueError("Ann Smith, sub-01 and 4711 are strange, 3 of 30 in round 1")

    monkeypatch.setattr("fedbn.federation.site.Site.train_round", fails)
    report, _ = client.ask("train", params={})
    assert report["error"] == (
        "site 'North': <path>, <subject> and <path> are strange, 3 of 30 in round 1"
    )


def test_columns_that_a_site_has_not_are_told_to_the_lead(make_client, tmp_path):
    write_table_store(tmp_path / "North", ("age", "outcome"), [[k, k % 2] for k in range(30)])
    _, report, _ = ask(make_client, tmp_path)
    assert report["facts"]["columns_without_values"] == ["pressure", "stage"]


@pytest.mark.parametrize("given", ["the folder", "the csv"])
def test_doctor_looks_at_a_table_by_the_job_s_task(tmp_path, write_experiment, given):
    write_tables(tmp_path / "data")
    write_experiment(tmp_path / "job" / "app" / "config", table_experiment())
    place = tmp_path / "data" / "North" / ("table.csv" if given == "the csv" else "")
    settings = tmp_path / "fedbn_site.yml"
    settings.write_text(f"site: North\ndata: {place}\n")
    found = [f for f in examine(None, settings, tmp_path / "job") if "store" in f.subject]
    assert [f.status for f in found] == [OK, OK, OK]
    assert f"{place} (from local/fedbn_site.yml): 40 subjects, 40 samples" in found[0].sentence
    assert "26 subjects to train on, 14 held out" in found[2].sentence
    assert "without values" not in found[2].sentence
    (found,) = [f for f in examine(None, settings) if f.subject == "data store"]
    assert (found.status, "looked into with --job alone" in found.sentence) == (WARNING, True)


def test_doctor_says_what_is_wrong_with_a_table(tmp_path, write_experiment):
    write_experiment(tmp_path / "job" / "app" / "config", table_experiment())
    settings = tmp_path / "fedbn_site.yml"
    settings.write_text(f"site: North\ndata: {tmp_path / 'data' / 'North'}\n")

    def look():
        return {f.subject: f for f in examine(None, settings, tmp_path / "job")}

    assert look()["data store"].status == FAILED
    write_with_ids(tmp_path / "data", [str(k) for k in range(30)], old_age)
    found = look()["data store"]
    assert (found.status, "'age' is 'sixty-one' in row 7" in found.sentence) == (FAILED, True)
    write_table_store(tmp_path / "data" / "North", ("age", "outcome"), [[1, 0], [2, 1]] * 9)
    found = look()["job and store"]
    assert found.status == OK
    assert "columns without values: pressure, stage" in found.sentence
