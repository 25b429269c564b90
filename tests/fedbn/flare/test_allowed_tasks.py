"""A job's task is fedbn's; a package's own only as the installation allows."""

from __future__ import annotations

import json

import pytest
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType
from own_task import REFUSED, WAYS, allow, block, fresh, imported, install, write_signals

from fedbn.flare.doctor import FAILED, OK, examine
from fedbn.flare.filters import BatchNormFilter
from fedbn.flare.persistor import SharedModelPersistor


class AsWritten:
    """An experiment's file that is not validated where a test writes it: that would import."""

    def model_dump(self, mode):
        # Not MONAI's network: importing it takes longer than all of this.
        return json.loads(block("json")) | {
            "network": {"name": "SmallDigitCNN", "args": {}},
            "policy": "none",
        }


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


@pytest.fixture(autouse=True)
def _installed(tmp_path, monkeypatch):
    with fresh(tmp_path / "site-packages", monkeypatch):
        install(tmp_path / "site-packages")
        yield


def test_a_site_looks_before_it_imports(make_client, tmp_path, monkeypatch, way):
    client = make_client(AsWritten(), "North", data_root=str(write_signals(tmp_path / "signals")))
    is_allowed = allow(way, client.learner.workspace_root, monkeypatch)
    report, _ = client.ask("preflight")
    assert imported() == is_allowed
    assert REFUSED in report["error"] or is_allowed
    # The network is for pictures: what the task reads has come as far as that.
    assert "cannot take the site's samples" in report["error"] or not is_allowed
    assert report["error"].startswith("site 'North': ")


def test_the_server_looks_before_it_imports(make_context, monkeypatch, way):
    context = make_context(AsWritten())
    root = context.get_engine().get_workspace().get_root_dir()
    is_allowed = allow(way, root, monkeypatch)
    SharedModelPersistor().handle_event(EventType.START_RUN, context)
    assert imported() == is_allowed
    panics = context.get_engine().panics
    assert panics == [] if is_allowed else REFUSED in panics[0]


def test_a_site_s_filter_lets_nothing_pass_of_a_task_that_is_not_allowed(make_context, monkeypatch):
    result = DXO(DataKind.WEIGHTS, {"classifier.bias": 0}).to_shareable()
    with pytest.raises(ValueError, match="not allowed here"):
        BatchNormFilter().process(result, make_context(AsWritten(), name="North"))
    assert not imported()


def test_doctor_says_so_before_a_job_is_submitted(tmp_path, write_experiment, monkeypatch, way):
    write_experiment(tmp_path / "job" / "app" / "config", AsWritten())
    data = write_signals(tmp_path / "signals")
    is_allowed = allow(way, tmp_path, monkeypatch)
    settings = tmp_path / "local" / "fedbn_site.yml"
    settings.parent.mkdir(exist_ok=True)
    text = settings.read_text() if settings.exists() else ""
    settings.write_text(f"{text}site: North\ndata: {data / 'North'}\n")
    found = [f for f in examine(None, settings, tmp_path / "job") if f.subject == "job"]
    assert [f.status for f in found] == [OK if is_allowed else FAILED]
    assert is_allowed or REFUSED in found[0].sentence
    assert imported() == is_allowed
