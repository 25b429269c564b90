"""What a site states in its own file holds, whatever the job says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from fedbn.core.normalization import entries
from fedbn.federation import devices
from fedbn.federation.site import Site, make_network
from fedbn.flare.job import to_arrays


@pytest.fixture
def shared(experiment):
    network, partition = make_network(experiment())
    return to_arrays(entries(network, partition.shared))


@pytest.fixture
def make_site(make_client, experiment):
    """A client whose kit holds a settings file."""

    def make(text, name="NYU", **arguments):
        client = make_client(experiment(), name, **arguments)
        folder = Path(client.learner.workspace_root) / "local"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "fedbn_site.yml").write_text(text)
        return client

    return make


def test_the_site_s_own_store_replaces_the_job_s_and_the_environment_s_data_root(
    make_site, data_root, tmp_path, monkeypatch, shared
):
    own = tmp_path / "somewhere else" / "connectomes"
    shutil.move(data_root / "NYU", own)
    monkeypatch.setenv("FEDBN_DATA", "/nowhere")
    for root in (str(data_root), None):
        client = make_site(f"data: {own}", data_root=root)
        report, _ = client.ask("preflight")
        assert "error" not in report
        client.restart()
        report, _ = client.ask("train", shared, 0, prepared=["NYU"])
        assert report["n_samples"] == 45
        shutil.rmtree(client.state_folder)


@pytest.mark.parametrize("name", ["NYU_pilot", "", "NYU"])
def test_what_else_lies_beside_a_missing_store_is_not_told(make_site, data_root, name):
    (data_root / "NYU").rename(data_root / "secret_study")
    report, _ = make_site(f"data: {data_root / name}").ask("preflight")
    assert report["error"].startswith("site 'NYU': no site store at <path>; name this site's own")
    assert "secret_study" not in report["error"]
    assert "UM" not in report["error"]


def test_the_store_of_another_site_is_refused(make_site, data_root):
    report, _ = make_site(f"data: {data_root / 'UM'}").ask("preflight")
    assert report["error"] == "site 'NYU': its store holds the data of site 'UM'"


def test_the_site_s_device_and_threads_win_over_the_job_s(make_site, monkeypatch, shared):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 / 0)
    text = "device: cpu\ncpu_threads: 3\n"
    report, _ = make_site(text, device="cuda:7", torch_threads=1).ask("preflight")
    assert report["device"] == "cpu"
    assert asked == [3]


def test_where_the_file_is_silent_the_job_s_arguments_hold(make_site, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    report, _ = make_site("site: NYU", device="cuda:7").ask("preflight")
    assert "device 'cuda:7' is asked for, but this process sees no CUDA device" in report["error"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "devise: cpu",
            "site 'NYU': local/fedbn_site.yml: devise: there is no such field; "
            "did you mean 'device'?",
        ),
        (
            "site: UM",
            "local/fedbn_site.yml: site: it says 'UM', but this client is 'NYU' and stands for "
            "site 'NYU'; correct the file, or install the startup kit of the right site",
        ),
        ("data: /hospital/store", "site 'NYU': no site store at <path>"),
        ("data: ~/hospital store", "site 'NYU': no site store at <path>"),
        ("device: cuda", "site 'NYU': device 'cuda' is asked for, but this process sees no CUDA"),
    ],
)
def test_a_wrong_file_ends_the_job_in_the_preflight(make_site, text, sentence, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    client = make_site(text)
    report, _ = client.ask("preflight")
    assert report["error"].startswith(sentence)
    assert "hospital" not in report["error"]
    assert not list(Path(client.learner.workspace_root).rglob("local_entries.pt"))


def test_a_file_that_is_spoilt_between_rounds_costs_the_round_and_no_state(make_site, shared):
    client = make_site("device: cpu")
    client.ask("preflight")
    before = (client.state_folder / "local_entries.pt").read_bytes()
    (Path(client.learner.workspace_root) / "local" / "fedbn_site.yml").write_text("device: gpu")
    client.restart()
    report, answer = client.ask("train", shared, 0, prepared=["NYU"])
    assert "local/fedbn_site.yml: device: it cannot be used" in report["error"]
    assert answer.params is None
    assert (client.state_folder / "local_entries.pt").read_bytes() == before


def test_the_cpu_in_place_of_a_device_is_said_once_in_the_log(make_site, shared, caplog):
    caplog.set_level("INFO")
    client = make_site("device: auto")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        client.ask("preflight")
        client.restart()
        client.ask("train", shared, 0, prepared=["NYU"])
    assert caplog.text.count("trains on cpu: this process sees no CUDA device") == 1


def test_a_full_device_is_one_sentence(make_site, shared, monkeypatch, caplog):
    client = make_site("device: auto")
    client.ask("preflight")
    choice = devices.DeviceChoice("cuda:0", "asked for", 2)
    client.learner._device = choice

    def full(*_, **__):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nSee it")

    monkeypatch.setattr(Site, "train", full)
    before = (client.state_folder / "local_entries.pt").read_bytes()
    report, answer = client.ask("train", shared, 0, prepared=["NYU"])
    assert report["error"] == devices.out_of_memory(choice, site="NYU", batch_size=16)
    assert answer.params is None
    assert "Tried to allocate 20 GiB" in caplog.text, "the site's own log has PyTorch's words"
    assert (client.state_folder / "local_entries.pt").read_bytes() == before


def test_a_device_that_is_full_in_the_preflight_is_no_misfit_of_the_network(make_site, monkeypatch):
    client = make_site("device: auto")

    def full(*_, **__):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("fedbn.tasks.classification.predict", full)
    report, _ = client.ask("preflight")
    assert "has no memory left" in report["error"]
    assert "cannot take" not in report["error"]
