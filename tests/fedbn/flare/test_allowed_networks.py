"""A job names MONAI's and fedbn's networks; any other class only as the installation allows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType

from fedbn.federation.experiment import Experiment
from fedbn.federation.simulation import read_sites, run_federation
from fedbn.flare.doctor import FAILED, OK, examine
from fedbn.flare.filters import BatchNormFilter
from fedbn.flare.persistor import SharedModelPersistor

MODULE = "a_researcher_s_nets"
REFUSED = f"network '{MODULE}.Net' is a class that is not allowed here"


@pytest.fixture
def own(tmp_path, monkeypatch, experiment):
    """An experiment whose network is a class of an installed package, not yet imported."""
    code = "from fedbn.tasks.connectome.network import ConnectomeMLP\n"
    (tmp_path / f"{MODULE}.py").write_text(f"{code}class Net(ConnectomeMLP):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.delenv("FEDBN_ALLOW_NETWORKS", raising=False)
    yield experiment(network={"name": f"{MODULE}.Net", "args": {"in_features": 66, "hidden": [8]}})
    sys.modules.pop(MODULE, None)


@pytest.fixture(params=["refused", "file", "environment"])
def allowed(request, monkeypatch):
    """Allow the class in a workspace, in one of the two ways, or not."""

    def allow(context_or_root):
        root = Path(context_or_root)
        if request.param == "file":
            (root / "local").mkdir(parents=True)
            text = f"allow_networks:\n  - {MODULE}:Net\n"
            (root / "local" / "fedbn_site.yml").write_text(text)
        if request.param == "environment":
            monkeypatch.setenv("FEDBN_ALLOW_NETWORKS", f"x.Y, {MODULE}.Net")
        return request.param != "refused"

    return allow


def root_of(context):
    return context.get_engine().get_workspace().get_root_dir()


def test_a_site_looks_before_it_imports(own, allowed, make_client):
    client = make_client(own)
    is_allowed = allowed(client.learner.workspace_root)
    report, _ = client.ask("preflight")
    assert (MODULE in sys.modules) == is_allowed
    assert ("error" not in report) == is_allowed
    assert is_allowed or report["error"].startswith(f"site 'NYU': {REFUSED}: a job names")


def test_the_server_looks_before_it_imports(own, allowed, make_context):
    context = make_context(own)
    is_allowed = allowed(root_of(context))
    SharedModelPersistor().handle_event(EventType.START_RUN, context)
    assert (MODULE in sys.modules) == is_allowed
    panics = context.get_engine().panics
    assert panics == [] if is_allowed else panics[0].startswith(REFUSED)


def test_a_site_s_filter_lets_nothing_pass_of_a_network_that_is_not_allowed(
    own, allowed, make_context, experiment
):
    context = make_context(own, name="NYU")
    is_allowed = allowed(root_of(context))
    result = DXO(DataKind.WEIGHTS, {"classifier.bias": 0}).to_shareable()
    if is_allowed:
        BatchNormFilter().process(result, context)
    else:
        with pytest.raises(ValueError, match=REFUSED):
            BatchNormFilter().process(result, context)
    assert (MODULE in sys.modules) == is_allowed


@pytest.mark.parametrize("with_store", [True, False])
def test_doctor_says_so_before_a_job_is_submitted(
    own, allowed, tmp_path, write_experiment, data_root, with_store
):
    write_experiment(tmp_path / "job" / "app" / "config", own)
    is_allowed = allowed(tmp_path)
    settings = tmp_path / "local" / "fedbn_site.yml"
    settings.parent.mkdir(exist_ok=True)
    text = settings.read_text() if settings.exists() else ""
    place = data_root / ("NYU" if with_store else "nowhere")
    settings.write_text(f"{text}site: NYU\ndata: {place}\n")
    found = [f for f in examine(None, settings, tmp_path / "job") if f.subject == "job and store"]
    if is_allowed and not with_store:
        assert found == []
        return
    assert found[0].status == (OK if is_allowed else FAILED)
    assert is_allowed or found[0].sentence.startswith(REFUSED)


def test_what_a_researcher_runs_in_process_is_the_researcher_s_own(own, data_root):
    result = run_federation(own, read_sites(data_root, own))
    assert set(result.report["sites"]) == set(own.sites)
    assert isinstance(own, Experiment)
