"""Gamma and beta of willing sites, kept at the server for hospitals that join later."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import FLContextKey
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedbn.federation.site import make_network
from fedbn.federation.site_settings import SiteSettingsError
from fedbn.federation.site_state import load_checkpoint
from fedbn.flare.filters import BatchNormFilter
from fedbn.flare.job import FINAL, REPORT, TRAIN, to_arrays
from fedbn.flare.new_sites import PREFIX, SEND_AFFINE, SHARES_AFFINE
from fedbn.models.new_site import AFFINE, AFFINE_FILE, read_run

SITES = ("NYU", "UM", "USM")
NORM = "hidden.0.norm"
GAMMA_BETA = (f"{NORM}.weight", f"{NORM}.bias")
TRAVELLING = {PREFIX + name for name in GAMMA_BETA}


def settle(client, text):
    folder = Path(client.learner.workspace_root) / "local"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fedbn_site.yml").write_text(text)


@pytest.fixture
def make_run(make_workflow):
    """Run a workflow with some willing sites; gives what was heard of whom in answer to what."""

    def make(willing, change=None, **changes):
        heard = []
        workflow = make_workflow(**changes)

        def answering(name, client):
            def answer(purpose, data):
                task = client.learner.train if purpose == TRAIN else client.learner.validate
                found = task(data)
                if change is not None and purpose == FINAL:
                    change(name, found)
                heard.append((name, purpose, found))
                return found

            return answer

        clients = {name: answer.client for name, answer in workflow.clients.items()}
        for name in willing:
            settle(clients[name], "share_affine: true\n")
        workflow.clients = {name: answering(name, client) for name, client in clients.items()}
        workflow.run()
        assert workflow.engine.panics == []
        return workflow, heard, clients

    return make


def kept(workflow):
    path = workflow.persistor.path(workflow.fl_ctx).parent / AFFINE_FILE
    return load_checkpoint(path, AFFINE) if path.exists() else None


# ------------------------------------------------------------------------------- on its way there


def test_the_server_keeps_the_mean_over_willing_sites_and_hears_of_no_other(make_run):
    workflow, heard, clients = make_run({"NYU", "USM"})
    tensors, meta = kept(workflow)
    assert meta["sites"] == ["NYU", "USM"]
    of_sites = [clients[name].learner._load_state().load_local()[0] for name in meta["sites"]]
    for name in GAMMA_BETA:
        mean = torch.stack([local[name] for local in of_sites]).double().mean(dim=0).float()
        assert torch.equal(tensors[name], mean)
        assert not torch.equal(of_sites[0][name], of_sites[1][name])
    for name, purpose, found in heard:
        params = set(found.params or {})
        if purpose == FINAL and name in meta["sites"]:
            assert params == TRAVELLING
        else:
            assert not [key for key in params if NORM in key]
    assert [purpose for _, purpose, _ in heard].count(FINAL) == 3


@pytest.mark.parametrize("willing", [set(), {"UM"}])
def test_one_site_alone_is_not_even_asked(make_run, willing):
    workflow, heard, _ = make_run(willing)
    tensors, meta = kept(workflow)
    assert meta["sites"] == []
    assert f"{len(willing)} of 3 sites share gamma and beta" in meta["fallback"]
    assert [tensors[name].unique().tolist() for name in GAMMA_BETA] == [[1.0], [0.0]]
    assert not any(found.params for _, purpose, found in heard if purpose == FINAL)


def test_a_new_hospital_reads_the_run(make_run):
    workflow, _, clients = make_run({"NYU", "USM"})
    run = read_run(workflow.persistor.path(workflow.fl_ctx))
    assert run.willing == ("NYU", "USM")
    results = json.loads((Path(workflow.get_run_dir()) / "results.json").read_text())
    store = clients["NYU"].learner._load_site().data
    assert results["signature"] == json.loads(json.dumps(store.signature()))


@pytest.mark.parametrize("policy", ["none", "silobn"])
def test_where_gamma_and_beta_are_shared_anyway_there_is_no_file(make_run, policy):
    workflow, heard, _ = make_run({"NYU", "USM"}, policy=policy)
    assert kept(workflow) is None
    assert not any(found.params for _, purpose, found in heard if purpose == FINAL)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda params: params.clear(), "2 missing"),
        (lambda params: params.update({PREFIX + GAMMA_BETA[0]: np.ones(3, np.float32)}), "(3,)"),
        (lambda params: params[PREFIX + GAMMA_BETA[1]].fill(np.nan), "not finite"),
        (lambda params: params.update({PREFIX + GAMMA_BETA[0]: "text"}), "not a numeric array"),
    ],
)
def test_what_does_not_fit_is_left_out_and_named(make_run, caplog, spoil, reason):
    def change(name, found):
        if name == "UM":
            found.params = {key: np.array(value) for key, value in found.params.items()}
            spoil(found.params)

    workflow, _, _ = make_run(set(SITES), change)
    assert kept(workflow)[1]["sites"] == ["NYU", "USM"]
    assert "gamma and beta of UM are not used" in caplog.text
    assert reason in caplog.text


def test_too_few_that_fit_are_no_mean(make_run):
    def change(name, found):
        if name == "UM":
            found.params = None

    workflow, _, _ = make_run({"NYU", "UM"}, change)
    tensors, meta = kept(workflow)
    assert "1 of 3 sites share" in meta["fallback"]
    assert tensors[GAMMA_BETA[0]].tolist() == [1.0] * 8


# ---------------------------------------------------------------------------- the site's own word


def test_a_job_that_asks_gets_nothing_from_a_site_that_has_not_said_so(good_client, experiment):
    client = good_client("NYU").client
    report, _ = client.ask("preflight")
    assert report[SHARES_AFFINE] is False
    network, partition = make_network(experiment(sites=SITES))
    state = to_arrays(network.state_dict())
    shared = {name: state[name] for name in partition.shared}
    client.ask("train", shared, 0, prepared=["NYU"])
    wish = FLModel(
        params_type=ParamsType.FULL,
        params=shared,
        meta={REPORT: {"purpose": FINAL, "prepared": ["NYU"], SEND_AFFINE: True}},
    )
    answer = client.learner.validate(wish)
    assert "results" in answer.meta[REPORT]
    assert not answer.params
    settle(client, "share_affine: true\n")
    client.restart()
    assert set(client.learner.validate(wish).params) == TRAVELLING


@pytest.fixture
def context(make_context, experiment):
    def make(text="share_affine: true\n", task=AppConstants.TASK_VALIDATION):
        context = make_context(experiment(), name="site-1")
        context.set_prop(FLContextKey.TASK_NAME, task, private=True, sticky=False)
        folder = Path(context.get_engine().get_workspace().get_site_config_dir())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "fedbn_site.yml").write_text(text)
        return context

    return make


@pytest.fixture
def everything(experiment):
    """All that a site could try to send at the end, under all names."""
    state = to_arrays(make_network(experiment())[0].state_dict())
    return {
        **{PREFIX + name: value for name, value in state.items()},
        **{"control_variate:" + PREFIX + name: value for name, value in state.items()},
        **{name: value for name, value in state.items() if NORM in name},
        PREFIX + "extra": np.ones(3),
        PREFIX: np.ones(3),
    }


def left(data, context, kind=DataKind.WEIGHTS):
    result = BatchNormFilter().process(DXO(kind, dict(data)).to_shareable(), context)
    return set(from_shareable(result).data)


def test_the_filter_lets_gamma_and_beta_pass_and_nothing_else(context, everything):
    assert left(everything, context()) == TRAVELLING


@pytest.mark.parametrize("text", ["", "share_affine: false\n", "cpu_threads: 2\n"])
def test_the_filter_stops_them_where_the_site_has_not_said_so(context, everything, text):
    assert left(everything, context(text)) == set()


def test_the_filter_stops_them_in_every_round_and_as_differences(context, everything):
    assert left(everything, context(task=AppConstants.TASK_TRAIN)) == set()
    assert left(everything, context(), DataKind.WEIGHT_DIFF) == set()


def test_nothing_passes_where_the_sites_settings_cannot_be_read(context, everything):
    with pytest.raises(SiteSettingsError, match="share_affine"):
        left(everything, context("share_affine: perhaps\n"))


def test_the_filter_lets_a_willing_sites_own_answer_through(make_run, context):
    _, heard, _ = make_run({"NYU", "USM"})
    (answer,) = [found for name, purpose, found in heard if (name, purpose) == ("NYU", FINAL)]
    report = answer.meta[REPORT]
    result = BatchNormFilter().process(FLModelUtils.to_shareable(answer), context())
    back = FLModelUtils.from_shareable(result)
    assert set(back.params) == TRAVELLING
    assert back.meta[REPORT] == report
