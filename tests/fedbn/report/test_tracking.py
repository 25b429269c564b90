"""A comparison in a local MLflow store."""

from __future__ import annotations

import importlib.util
import shutil

import pytest
from typer.testing import CliRunner

from fedbn.__main__ import app
from fedbn.report import tracking

needs_mlflow = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in tracking._NEEDED),
    reason="the optional extra is not installed (pip install 'fedbn[mlflow]')",
)


def test_an_unknown_tracker_is_refused_before_anything_runs(tmp_path):
    done = CliRunner().invoke(
        app, ["compare", "no/such/job", "--out", str(tmp_path / "out"), "--track", "wandb"]
    )
    assert done.exit_code == 1
    assert "unknown tracker 'wandb'; choose from mlflow" in done.stderr


def test_a_tracker_that_is_not_installed_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(tracking, "_NEEDED", ("no_such_package",))
    with pytest.raises(ValueError, match=r"needs no_such_package: .*fedbn\[mlflow\]"):
        tracking.check_tracker("mlflow")


@needs_mlflow
@pytest.mark.slow
def test_every_run_is_in_the_store_once(compared, summary, tmp_path):
    folder = shutil.copytree(compared, tmp_path / "comparison")
    store = tracking.track(folder)
    assert tracking.track(folder) == store  # there already

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name(tracking.EXPERIMENT).experiment_id
    runs = client.search_runs([experiment])
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    (parent,) = [run for run in runs if run not in children]
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert len(children) == 3 * 2 * 2
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert parent.data.params["training.batch_size"] == "16"
    assert parent.data.params["methods"] == "singleset,fedavg,fedbn"
    cell = summary["scores"]["fedbn"]["macro"]["subject"]["accuracy"]["mean"]
    assert parent.data.metrics["fedbn/macro/subject/accuracy"] == pytest.approx(cell)
    of_fedbn = [run for run in children if run.data.params["method"] == "fedbn"]
    values = [run.data.metrics["macro/subject/accuracy"] for run in of_fedbn]
    assert sum(values) / 4 == pytest.approx(cell)
    kept = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert {"results.csv", "summary.json", "comparison.json"} <= kept
    assert {path.name for path in folder.iterdir()} >= {"mlflow.db", "mlflow_artefacts"}
