from __future__ import annotations

import pytest

from fedbn.federation import devices
from fedbn.federation.devices import (
    DeviceChoice,
    DeviceError,
    choose_device,
    described,
    device_facts,
    find_device,
    out_of_memory,
)


@pytest.mark.parametrize(
    ("setting", "n_visible", "visible", "device", "physical"),
    [
        ("cpu", 0, None, "cpu", None),
        ("cpu", 4, None, "cpu", None),
        ("auto", 0, None, "cpu", None),
        ("auto", 0, "", "cpu", None),
        ("auto", 0, "-1", "cpu", None),
        ("auto", 1, None, "cuda:0", 0),
        ("auto", 4, None, "cuda:0", 0),
        ("cuda", 1, None, "cuda:0", 0),
        ("cuda", 4, None, "cuda:0", 0),
        ("cuda:0", 1, None, "cuda:0", 0),
        ("cuda:3", 4, None, "cuda:3", 3),
        ("auto", 1, "2", "cuda:0", 2),
        ("cuda", 1, "2", "cuda:0", 2),
        ("cuda:1", 2, "3, 1", "cuda:1", 1),
        ("cuda:1", 2, "3,1,9", "cuda:1", 1),
        ("auto", 1, "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "cuda:0", None),
        ("cuda:1", 2, "MIG-a,MIG-b", "cuda:1", None),
    ],
)
def test_the_device_and_its_number_in_the_machine(setting, n_visible, visible, device, physical):
    choice = choose_device(setting, n_visible, cuda_visible_devices=visible, site="NYU")
    assert (choice.device, choice.physical) == (device, physical)


@pytest.mark.parametrize(
    ("setting", "n_visible", "visible", "reason"),
    [
        ("auto", 0, None, "this process sees no CUDA device"),
        ("auto", 0, "", "this process sees no CUDA device (CUDA_VISIBLE_DEVICES is '')"),
        ("auto", 4, None, "the first of 4 visible CUDA devices"),
        ("cpu", 4, None, "asked for"),
        ("cuda", 1, "2", "asked for (CUDA_VISIBLE_DEVICES is '2')"),
        ("cuda", 1, "GPU-8932f937", "asked for (CUDA_VISIBLE_DEVICES names devices by UUID)"),
    ],
)
def test_the_reason_is_for_the_log(setting, n_visible, visible, reason):
    choice = choose_device(setting, n_visible, cuda_visible_devices=visible, site="NYU")
    assert choice.reason == reason


@pytest.mark.parametrize(
    ("setting", "n_visible", "visible", "sentence"),
    [
        ("cuda", 0, None, "device 'cuda' is asked for, but this process sees no CUDA device; mend"),
        ("cuda:0", 0, "", "sees no CUDA device (CUDA_VISIBLE_DEVICES is ''); mend the driver"),
        ("cuda:1", 1, None, "'cuda:1' is asked for, but this process sees cuda:0 alone; correct"),
        ("cuda:4", 4, None, "sees cuda:0 to cuda:3; correct device in local/fedbn_site.yml"),
        ("cuda:2", 1, "2", "sees cuda:0 alone (CUDA_VISIBLE_DEVICES is '2'); correct device"),
        ("cuda:9", 1, "GPU-12", "(CUDA_VISIBLE_DEVICES names devices by UUID)"),
        ("mps", 1, None, "there is no device 'mps'; give auto, cpu, cuda or cuda:N"),
        ("cuda:", 1, None, "there is no device 'cuda:'"),
        ("", 1, None, "there is no device ''"),
    ],
)
def test_a_device_that_is_not_there_is_one_sentence_and_no_cpu(
    setting, n_visible, visible, sentence
):
    with pytest.raises(DeviceError) as caught:
        choose_device(setting, n_visible, cuda_visible_devices=visible, site="NYU")
    assert str(caught.value).startswith("site 'NYU': ")
    assert sentence in str(caught.value)
    assert "GPU-12" not in str(caught.value), "a serial number would travel to the server"


def test_devices_are_counted_only_where_the_setting_needs_it(monkeypatch):
    def never():
        raise AssertionError("counted")

    assert find_device("cpu", site="NYU", count=never).device == "cpu"
    with pytest.raises(AssertionError, match="counted"):
        find_device("auto", site="NYU", count=never)


def test_the_variable_is_read_when_the_device_is_chosen(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert find_device("auto", site="NYU", count=lambda: 1).physical == 5
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert find_device("auto", site="NYU", count=lambda: 1).physical == 0


def test_what_is_told_of_a_device(monkeypatch):
    import torch

    assert device_facts(DeviceChoice("cpu", "asked for")) == {"device": "cpu"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a card at {device}")
    facts = device_facts(DeviceChoice("cuda:0", "asked for", 2))
    assert facts == {"device": "cuda:0", "device_name": "a card at cuda:0", "device_index": 2}
    assert described(facts) == "cuda:0 (a card at cuda:0, number 2 of the machine)"
    assert described({"device": "cpu"}) == "cpu"


def test_counting_asks_pytorch(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert devices._count() == 3


def test_a_full_device_says_what_to_do():
    sentence = out_of_memory(DeviceChoice("cuda:0", "", 2), site="NYU", batch_size=64)
    assert sentence.startswith(
        "site 'NYU': device cuda:0 (number 2 of the machine) has no memory left; "
    )
    assert "device: cpu in local/fedbn_site.yml" in sentence
    assert "batch_size below 64" in sentence
