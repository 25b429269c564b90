from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import make_reply
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from data_prep.files import FileError
from fedbn.federation.results import weights_digest
from fedbn.federation.site_state import SHARED_WEIGHTS, load_checkpoint
from fedbn.flare.job import ERROR, PURPOSE, REPORT
from fedbn.flare.persistor import SharedModelPersistor
from fedbn.flare.workflow import FedBNWorkflow, RunFailedError

SITES = ("NYU", "UM", "USM")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"min_sites": -1}, "min_sites must be a whole number of at least 0, got -1"),
        ({"min_sites": 2.0}, "min_sites must be a whole number of at least 0, got 2.0"),
        ({"min_sites": True}, "min_sites must be a whole number of at least 0, got True"),
        ({"round_seconds": 0}, "round_seconds must be a whole number of at least 1, got 0"),
        ({"preflight_seconds": "600"}, "preflight_seconds must be .* got '600'"),
        ({"grace_seconds": -5}, "grace_seconds must be a whole number of at least 0, got -5"),
        ({"grace_seconds": None}, "grace_seconds must be .* got None"),
    ],
)
def test_arguments_are_checked_on_entry(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        FedBNWorkflow(**arguments)


def results(workflow):
    return json.loads((Path(workflow.get_run_dir()) / "results.json").read_text())


def panics(workflow):
    return workflow.engine.panics


def failing_when(purpose, inner, make_answer):
    def answer(asked, data):
        return make_answer(inner(asked, data)) if asked == purpose else inner(asked, data)

    return answer


def test_a_run_from_the_preflight_to_the_results(make_workflow, capsys):
    workflow = make_workflow()
    workflow.run()
    assert panics(workflow) == []
    purposes = [report[PURPOSE] for report, _ in workflow.asked]
    assert purposes == ["preflight", "train", "train", "final"]
    found = results(workflow)
    assert list(found["sites"]) == list(SITES)
    assert [r["accepted"] for r in found["rounds"]] == [sorted(SITES)] * 2
    assert found["not_scored"] == {}
    saved, _ = load_checkpoint(workflow.persistor.path(workflow.fl_ctx), SHARED_WEIGHTS)
    assert weights_digest(saved) == found["shared_weights_sha256"]
    assert "what each site gained" in capsys.readouterr().out
    _, final = workflow.asked[-1]
    assert all(np.array_equal(final.params[k], v.numpy()) for k, v in saved.items())


def test_a_console_without_line_characters_ends_no_run(make_workflow, monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", screen)
    workflow = make_workflow()
    workflow.run()
    monkeypatch.undo()
    assert panics(workflow) == []
    assert b"what each site gained" in screen.buffer.getvalue()


@pytest.mark.parametrize(
    ("arguments", "connected", "reason"),
    [
        ({}, ("NYU", "UM", "USMX"), "client 'USMX' is not a site of this job"),
        ({}, ("NYU", "site-1", "UM"), "two clients stand for site 'NYU'; 'site-1' is one"),
        ({}, ("NYU", "USM"), "2 sites are connected, the job needs 3; not there: UM"),
        ({"min_sites": 4}, SITES, "min_sites is 4, but the job has 3 sites"),
    ],
)
def test_the_connected_clients_must_be_the_jobs_sites(make_workflow, arguments, connected, reason):
    workflow = make_workflow(arguments, connected)
    workflow.run()
    (panic,) = panics(workflow)
    assert reason in panic
    assert workflow.asked == []


def test_a_network_that_cannot_be_used_ends_the_job_with_one_sentence(make_workflow):
    linear = {"name": "FullyConnectedNet"}
    linear["args"] = {"in_channels": 66, "out_channels": 2, "hidden_channels": [4]}
    workflow = make_workflow(network=linear)
    workflow.run()
    assert panics(workflow)
    for panic in panics(workflow):
        assert panic.startswith("network FullyConnectedNet has no batch-norm layer")
        assert "\n" not in panic


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            FLModel(metrics={}, meta={REPORT: {ERROR: "site 'UM': no store at /srv/x"}}),
            "preflight failed: site 'UM': no store at <path>",
        ),
        (FLModel(metrics={}, meta={}), "UM sent an answer that is not fedbn's"),
        (FLModel(metrics={}, meta={REPORT: {"site": "UM"}}), "does not say what its store holds"),
        (make_reply(ReturnCode.EXECUTION_EXCEPTION), "UM: it answered with the error code EXEC"),
        (None, "preflight: no answer within 1 s from UM"),
    ],
)
@pytest.mark.parametrize("min_sites", [0, 2])
def test_a_failed_preflight_ends_the_job(make_workflow, answer, reason, min_sites):
    workflow = make_workflow({"preflight_seconds": 1, "min_sites": min_sites})
    workflow.clients["UM"] = lambda purpose, data: answer
    workflow.run()
    if answer is None and min_sites == 2:  # silence is no error: the quorum decides
        assert panics(workflow) == []
        return
    (panic,) = panics(workflow)
    assert reason in panic
    assert "\n" not in panic
    assert len(workflow.asked) == 1


def test_a_site_whose_process_ends_in_the_preflight_is_not_said_to_be_slow(make_workflow):
    workflow = make_workflow({"preflight_seconds": 600})
    workflow.clients["UM"] = lambda purpose, data: None
    workflow.get_num_standing_tasks = lambda: 0  # FLARE has given the task up
    workflow.run()
    assert panics(workflow) == [
        "preflight: UM ended without an answer; its own log says why",
    ]


@pytest.mark.parametrize("n_rois", [12, 13])
@pytest.mark.parametrize("site", ["NYU", "USM"])
def test_stores_that_do_not_fit_end_the_job_with_the_difference(
    make_workflow, write_store, data_root, site, n_rois
):
    """The atlas is named, even where the network does not take its number of edges."""
    write_store(data_root / site, site, atlas="another atlas", n_rois=n_rois)
    workflow = make_workflow()
    write_store(data_root / site, site, atlas="another atlas", n_rois=n_rois)
    workflow.run()
    (panic,) = panics(workflow)
    atlases = {"twelve regions", "another atlas"}
    other = "UM" if site == "NYU" else "USM"
    found = re.search(
        f"stores of NYU and {other} do not fit together: atlas: (.*?) and ([^;]*)", panic
    )
    assert set(found.groups()) == atlases


def test_a_network_that_fits_no_site_is_told_as_that(make_workflow):
    workflow = make_workflow(network={"args": {"in_features": 65, "hidden": [8]}})
    workflow.run()
    (panic,) = panics(workflow)
    assert "site 'NYU': network ConnectomeMLP cannot take the store's samples of 66 edges" in panic
    assert "do not fit together" not in panic


def test_a_run_that_falls_below_its_quorum_midway_tells_of_its_rounds(make_workflow):
    workflow = make_workflow({"min_sites": 2, "round_seconds": 1}, rounds=5)
    for name, first in (("UM", 1), ("USM", 2)):
        inner = workflow.clients[name]
        workflow.clients[name] = lambda purpose, data, inner=inner, first=first: (
            None if purpose == "train" and data.current_round >= first else inner(purpose, data)
        )
    workflow.run()
    (panic,) = panics(workflow)
    assert panic.startswith("round 2: 1 contributions were accepted, 2 are needed; no answer from")
    found = results(workflow)
    assert (found["status"], found["reason"]) == ("failed", panic)
    assert [record["missing"] for record in found["rounds"]] == [[], ["UM"], ["UM", "USM"]]
    assert found["rounds"][2]["sites"]["NYU"]["n_steps"] > 0
    assert found["sites"] == {}
    saved, facts = load_checkpoint(workflow.persistor.path(workflow.fl_ctx), SHARED_WEIGHTS)
    assert found["shared_weights_sha256"] == weights_digest(saved), "those after round 1"
    assert facts["round"] == 1


def test_a_full_disk_at_the_server_does_not_hide_why_a_run_failed(make_workflow, monkeypatch):
    workflow = make_workflow({"round_seconds": 1})
    workflow.clients["UM"] = failing_when("train", workflow.clients["UM"], lambda _: None)

    def full(*_):
        raise FileError("results.json is not written (No space left on device)")

    monkeypatch.setattr("fedbn.flare.workflow.write_json", full)
    workflow.run()
    assert panics(workflow)[0].startswith("round 0: 2 contributions were accepted")


@pytest.mark.parametrize(("threads", "needed"), [(1, 3), (2, 3), (3, 2), (None, 2)])
def test_sites_that_run_one_after_another_in_the_simulator_are_all_waited_for(
    make_workflow, threads, needed
):
    for job, quorum in (("simulate_job", needed), ("job-1", 2)):
        workflow = make_workflow({"min_sites": 2}, job=job, rounds=1)
        workflow.engine.args = SimpleNamespace(threads=threads)
        workflow.run()
        assert panics(workflow) == []
        assert workflow.quorum == quorum


def with_nan(answer):
    answer.params["classifier.bias"] = np.full(2, np.nan, np.float32)
    return answer


def of_another_shape(answer):
    answer.params["classifier.bias"] = np.zeros(3, np.float32)
    return answer


def with_an_extra_entry(answer):
    answer.params["more"] = np.zeros(2, np.float32)
    return answer


BAD_ANSWERS = {
    "nan": (with_nan, "not finite"),
    "shape": (of_another_shape, "'classifier.bias' is (3,) torch.float32, expected (2,)"),
    "extra": (with_an_extra_entry, "1 unknown (more)"),
    "its own error": (
        lambda _: FLModel(metrics={}, meta={REPORT: {ERROR: "site 'UM': disk full"}}),
        "disk full",
    ),
    "error code": (lambda _: make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR), "FILTER_ERROR"),
    "silence": (lambda _: None, None),
}


@pytest.mark.parametrize("case", BAD_ANSWERS)
@pytest.mark.parametrize("min_sites", [0, 2])
def test_a_bad_contribution_costs_itself_or_the_quorum(make_workflow, case, min_sites, caplog):
    change, reason = BAD_ANSWERS[case]
    workflow = make_workflow({"min_sites": min_sites, "round_seconds": 1})
    workflow.clients["UM"] = failing_when("train", workflow.clients["UM"], change)
    workflow.run()
    if min_sites == 0:
        (panic,) = panics(workflow)
        assert panic.startswith("round 0: 2 contributions were accepted, 3 are needed; ")
        assert (reason or "no answer from UM") in panic
        found = results(workflow)
        assert (found["status"], found["reason"]) == ("failed", panic)
        (record,) = found["rounds"]
        assert record["accepted"] == ["NYU", "USM"]
        assert (record["missing"] or list(record["refused"])) == ["UM"]
        return
    assert panics(workflow) == []
    for record in results(workflow)["rounds"]:
        assert record["accepted"] == ["NYU", "USM"]
        if reason is None:
            assert (record["missing"], record["refused"]) == (["UM"], {})
        else:
            assert record["missing"] == []
            assert reason in record["refused"]["UM"]
    assert sorted(results(workflow)["sites"]) == sorted(SITES), "it is scored at the end"
    saved, _ = load_checkpoint(workflow.persistor.path(workflow.fl_ctx), SHARED_WEIGHTS)
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())
    if reason is not None:
        assert re.search(rf"UM.*{re.escape(reason)}", caplog.text), "logged with site and reason"


def test_batch_norm_that_a_site_sends_never_enters_the_global_model(make_workflow, caplog):
    workflow = make_workflow()

    def with_batch_norm(answer):
        answer.params["hidden.0.norm.running_mean"] = np.full(8, np.nan, np.float32)
        return answer

    workflow.clients["UM"] = failing_when("train", workflow.clients["UM"], with_batch_norm)
    workflow.run()
    assert panics(workflow) == []
    for record in results(workflow)["rounds"]:
        assert record["accepted"] == sorted(SITES)
        assert record["dropped_local_entries"] == {"UM": 1}
    assert "UM sent 1 entries that belong to its batch norm" in caplog.text
    saved, _ = load_checkpoint(workflow.persistor.path(workflow.fl_ctx), SHARED_WEIGHTS)
    assert set(saved) == set(workflow.persistor.shared_entries(workflow.fl_ctx))


def test_bad_answers_do_not_start_the_grace(make_workflow):
    """Quorum 2: one good and one bad answer are two answers, but not a quorum."""
    workflow = make_workflow({"min_sites": 2, "grace_seconds": 0, "round_seconds": 60})
    waited = []
    usm = workflow.clients["USM"]
    workflow.clients["UM"] = failing_when("train", workflow.clients["UM"], with_nan)
    late = {}

    def hesitating(purpose, data):
        if purpose != "train":
            return usm(purpose, data)
        late["data"] = data
        return None

    workflow.clients["USM"] = hesitating
    count = workflow.get_num_standing_tasks

    def checked():
        if workflow.standing:
            waited.append(len(workflow.aggregator.accepted))
            if len(waited) % 5 == 0:  # some time later the third site answers
                answer = usm("train", late["data"])
                answer.meta["client_name"] = "USM"
                workflow._callback(answer)
                workflow.standing = set()
        return count()

    workflow.get_num_standing_tasks = checked
    workflow.run()
    assert panics(workflow) == []
    assert [r["accepted"] for r in results(workflow)["rounds"]] == [["NYU", "USM"]] * 2
    assert waited == [1] * 10


def test_the_grace_ends_a_round_once_the_quorum_is_met(make_workflow):
    workflow = make_workflow({"min_sites": 2, "grace_seconds": 0, "round_seconds": 1000})
    um = workflow.clients["UM"]
    workflow.clients["UM"] = failing_when("train", um, lambda _: None)
    cancelled = []
    cancel = workflow.cancel_all_tasks
    workflow.cancel_all_tasks = lambda: (cancelled.append(1), cancel())
    workflow.run()
    assert panics(workflow) == []
    assert len(cancelled) == 2
    assert [r["missing"] for r in results(workflow)["rounds"]] == [["UM"]] * 2


def test_a_site_that_joins_late_cannot_lose_its_state_silently(make_workflow):
    """It was not there at the preflight, so only its first contribution makes it known."""
    workflow = make_workflow({"min_sites": 2, "preflight_seconds": 1}, rounds=3)
    um = workflow.clients["UM"]

    def late_and_forgetful(purpose, data):
        if purpose == "preflight":
            return None
        if purpose == "train" and data.current_round == 1:
            (um.client.state_folder / "local_entries.pt").unlink()
        um.client.restart()
        return um(purpose, data)

    workflow.clients["UM"] = late_and_forgetful
    workflow.run()
    records = results(workflow)["rounds"]
    assert records[0]["accepted"] == ["NYU", "UM", "USM"]
    for record in records[1:]:
        assert "its batch norm of this job is missing" in record["refused"]["UM"]
    assert "its batch norm of this job is missing" in results(workflow)["not_scored"]["UM"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda report: report.pop("results"),
        lambda report: report.update(results="good"),
        lambda report: report["results"].pop("federated"),
        lambda report: report["results"].update(curve=[{"round": 0}]),
        lambda report: report["results"]["federated"]["subject"].update(accuracy="best"),
        lambda report: report["results"].update(more={1, 2}),
        lambda report: report["results"]["federated"]["subject"].update(dice=0.5),
    ],
)
@pytest.mark.parametrize("min_sites", [0, 2])
def test_results_that_cannot_be_read_cost_only_their_site(make_workflow, spoil, min_sites):
    workflow = make_workflow({"min_sites": min_sites})

    def spoilt(answer):
        spoil(answer.meta[REPORT])
        return answer

    workflow.clients["UM"] = failing_when("final", workflow.clients["UM"], spoilt)
    workflow.run()
    found = results(workflow)
    assert sorted(found["sites"]) == ["NYU", "USM"]
    assert "its results cannot be read" in found["not_scored"]["UM"]
    if min_sites == 2:
        assert panics(workflow) == []
    else:
        (panic,) = panics(workflow)
        assert panic.startswith("2 sites were scored at the end, 3 are needed; UM: its results")


@pytest.mark.parametrize("step", ["render", "new_sites.keep", "print"])
def test_what_fails_after_the_results_does_not_lose_them(make_workflow, monkeypatch, step, caplog):
    workflow = make_workflow()
    whole = []  # a report of one site is rendered before, to see whether it can be read

    def fails(*arguments, **_):
        if step != "render" or len(whole) == len(SITES):
            raise IndexError("nobody has foreseen it")
        whole.append(arguments)
        return ""

    monkeypatch.setattr(f"fedbn.flare.workflow.{step}", fails, raising=False)
    workflow.run()
    assert panics(workflow) == []
    assert results(workflow)["status"] == "completed"
    assert "nobody has foreseen it" in caplog.text


@pytest.mark.parametrize("purpose", ["finetune", "alone"])
@pytest.mark.parametrize("end", ["aborted", "unforeseen", "killed"])
def test_what_ends_a_run_after_its_sites_are_scored_does_not_lose_their_scores(
    make_workflow, purpose, end
):
    workflow = make_workflow(finetune={"epochs": 1}, compare_with_alone=True)
    inner = workflow.clients["NYU"]

    def ends(asked, data):
        if asked == purpose:
            assert sorted(results(workflow)["sites"]) == sorted(SITES)
            if end == "aborted":
                workflow.abort_signal.trigger("stop")
            else:
                raise (IndexError if end == "unforeseen" else KeyboardInterrupt)("here")
        return inner(asked, data)

    workflow.clients["NYU"] = ends
    with contextlib.suppress(IndexError, KeyboardInterrupt):
        workflow.run()
    found = results(workflow)
    assert sorted(found["sites"]) == sorted(SITES)
    assert "federated" in found["across_sites"]
    assert found["status"] == ("failed" if end == "unforeseen" else "aborted")
    if end == "killed":
        assert found["reason"] == "the sites are scored, but their work 'alone' has not ended"


@pytest.mark.parametrize("step", ["_messages", "save_model"])
def test_what_nobody_has_foreseen_does_not_lose_the_rounds(make_workflow, step):
    workflow = make_workflow({}, rounds=3)
    unharmed = getattr(workflow, step)

    def fails(*arguments):
        if len(workflow.rounds) == 2:
            raise IndexError("nobody has foreseen it")
        return unharmed(*arguments)

    setattr(workflow, step, fails)
    with pytest.raises(IndexError):
        workflow.run()
    found = results(workflow)
    assert (found["status"], found["reason"]) == ("failed", "IndexError: nobody has foreseen it")
    assert len(found["rounds"]) == 2


def test_results_that_cannot_be_written_are_shown_and_told(make_workflow, monkeypatch, capsys):
    def full(*_):
        raise FileError("results.json is not written (No space left on device)")

    workflow = make_workflow()
    monkeypatch.setattr("fedbn.flare.workflow.write_json", full)
    workflow.run()
    assert panics(workflow) == ["results.json is not written (No space left on device)"]
    assert "what each site gained" in capsys.readouterr().out


def test_no_answer_at_the_end_is_told(make_workflow):
    workflow = make_workflow({"round_seconds": 1})
    workflow.clients["UM"] = failing_when("final", workflow.clients["UM"], lambda _: None)
    workflow.run()
    (panic,) = panics(workflow)
    assert "2 sites were scored at the end, 3 are needed; UM: no answer within 1 s" in panic
    assert sorted(results(workflow)["sites"]) == ["NYU", "USM"]


def test_an_aborted_run_stops_without_results(make_workflow):
    workflow = make_workflow()
    nyu = workflow.clients["NYU"]

    def stop(purpose, data):
        if purpose == "train":
            workflow.abort_signal.trigger("stop")
        return nyu(purpose, data)

    workflow.clients["NYU"] = stop
    workflow.clients["UM"] = failing_when("train", workflow.clients["UM"], lambda _: None)
    workflow.run()
    assert [report[PURPOSE] for report, _ in workflow.asked] == ["preflight", "train"]
    with pytest.raises(FileNotFoundError):
        results(workflow)


def test_a_run_that_is_aborted_after_a_round_tells_of_it(make_workflow):
    workflow = make_workflow()
    nyu = workflow.clients["NYU"]

    def stop(purpose, data):
        if purpose == "train" and data.current_round == 1:
            workflow.abort_signal.trigger("stop")
        return nyu(purpose, data)

    workflow.clients["NYU"] = stop
    workflow.clients["UM"] = lambda purpose, data, inner=workflow.clients["UM"]: (
        None if data.current_round == 1 else inner(purpose, data)
    )
    workflow.run()
    found = results(workflow)
    assert found["status"] == "aborted"
    assert found["reason"].startswith("the job was aborted: by a person, or by FLARE because")
    assert [record["round"] for record in found["rounds"]] == [0]


def test_components_of_another_kind_end_the_job(make_workflow):
    workflow = make_workflow()
    workflow.engine.components["aggregator"] = object()
    workflow.run()
    assert panics(workflow) == ["component 'aggregator' must be a FedBNAggregator"]
    workflow = make_workflow()
    workflow.persistor = None
    with pytest.raises(RunFailedError, match="'persistor' must be a SharedModelPersistor"):
        workflow._run()


def test_the_model_that_goes_out_holds_shared_entries_alone(make_workflow):
    workflow = make_workflow()
    workflow.run()
    shared = set(workflow.persistor.shared_entries(workflow.fl_ctx))
    for report, data in workflow.asked:
        if report[PURPOSE] == "preflight":
            assert data.params is None
        else:
            assert set(data.params) == shared
            assert data.params_type == ParamsType.FULL
            assert all(torch.isfinite(torch.from_numpy(v)).all() for v in data.params.values())


def test_device_and_versions_of_each_site_are_in_the_results(make_workflow, caplog):
    workflow = make_workflow()

    def on_a_card(answer):
        answer.meta[REPORT] |= {
            "device": "cuda:0",
            "device_name": "a card\n/home/ann/sub-0050952",
            "device_index": 3,
            "device_uuid": "GPU-12",
        }
        answer.meta[REPORT]["versions"] |= {"torch": "1.0", "numpy": 7, "home": "/home/ann"}
        return answer

    workflow.clients["UM"] = failing_when("preflight", workflow.clients["UM"], on_a_card)
    workflow.run()
    assert panics(workflow) == []
    report = results(workflow)
    here = report["versions"]
    nyu, um = report["sites"]["NYU"], report["sites"]["UM"]
    assert nyu["versions"] == here
    assert um["versions"] == {k: v for k, v in here.items() if k != "numpy"} | {"torch": "1.0"}
    assert {name: um[name] for name in um if "device" in name} == {
        "device": "cuda:0",
        "device_name": "a card <path>",
        "device_index": 3,
    }
    assert f"UM has other versions: torch 1.0 (here {here['torch']})" in caplog.text
    assert "NYU has other versions" not in caplog.text


@pytest.mark.parametrize("wrong", [{"versions": ["x"], "device": 5, "device_index": True}, {}])
def test_an_answer_without_device_or_versions_is_no_error(make_workflow, wrong):
    workflow = make_workflow()

    def silent(answer):
        report = answer.meta[REPORT]
        answer.meta[REPORT] = {k: report[k] for k in ("site", "signature")} | wrong
        return answer

    workflow.clients["UM"] = failing_when("preflight", workflow.clients["UM"], silent)
    workflow.run()
    assert panics(workflow) == []
    facts = results(workflow)["sites"]["UM"]
    assert facts["versions"] == {}
    assert "device" not in facts


def test_a_server_with_another_fedbn_ends_the_job_before_any_site_is_asked(
    make_context, experiment, monkeypatch
):
    monkeypatch.setattr(
        "fedbn.federation.installation.installed_version", lambda package="fedbn": "0.3.0"
    )
    persistor = SharedModelPersistor()
    context = make_context(experiment(sites=SITES, fedbn_version=">=0.1,<0.2"), persistor=persistor)
    persistor.handle_event(EventType.START_RUN, context)
    (sentence,) = context.get_engine().panics
    assert "the job needs fedbn >=0.1,<0.2, but fedbn 0.3.0 is installed here" in sentence
