"""Where a site trains: one device, chosen once, with the reason, and never a silent CPU.

Several hospitals may share one machine, and FLARE's GPU consumer and the simulator's ``-gpu`` give
a process its device by ``CUDA_VISIBLE_DEVICES``: inside, that device is ``cuda:0`` whatever its
number in the machine. Nothing here talks to CUDA before the setting asks for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"

_SETTING = re.compile(r"auto|cpu|cuda(?::(0|[1-9][0-9]*))?")


class DeviceError(RuntimeError):
    """A device that is asked for and not there; the message names the site."""


@dataclass(frozen=True)
class DeviceChoice:
    """A device and why it was taken.

    Attributes
    ----------
    device
        ``"cpu"`` or ``"cuda:N"``, as PyTorch counts in this process.
    reason
        One clause for the log.
    physical
        Number of the device in the machine, where it is known.
    """

    device: str
    reason: str
    physical: int | None = None


def choose_device(
    setting: str,
    n_visible: int,
    *,
    cuda_visible_devices: str | None = None,
    site: str,
) -> DeviceChoice:
    """Choose a device from what is asked for and what this process can see.

    Parameters
    ----------
    setting
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``; N counts the visible devices from 0.
    n_visible
        Number of CUDA devices that this process sees.
    cuda_visible_devices
        Value of ``CUDA_VISIBLE_DEVICES``, ``None`` where it is not set.
    site
        For the message of an error.

    Raises
    ------
    DeviceError
        If the setting is none of these, or asks for a device that this process does not see.
    """
    asked = _SETTING.fullmatch(setting)
    if asked is None:
        raise DeviceError(
            f"site {site!r}: there is no device {setting!r}; give auto, cpu, cuda or cuda:N"
        )
    if setting == "cpu":
        return DeviceChoice("cpu", "asked for")
    limit = "" if cuda_visible_devices is None else f" ({_shown(cuda_visible_devices)})"
    if n_visible < 1:
        if setting == "auto":
            return DeviceChoice("cpu", f"this process sees no CUDA device{limit}")
        raise DeviceError(
            f"site {site!r}: device {setting!r} is asked for, but this process sees no CUDA "
            f"device{limit}; mend the driver or PyTorch's CUDA build, or set device: cpu in "
            "local/fedbn_site.yml"
        )
    index = int(asked[1] or 0)
    if index >= n_visible:
        there = "cuda:0 alone" if n_visible == 1 else f"cuda:0 to cuda:{n_visible - 1}"
        raise DeviceError(
            f"site {site!r}: device {setting!r} is asked for, but this process sees {there}{limit};"
            " correct device in local/fedbn_site.yml (N counts from 0 among the visible devices)"
        )
    reason = "asked for" if setting != "auto" else f"the first of {n_visible} visible CUDA devices"
    return DeviceChoice(f"cuda:{index}", reason + limit, _physical(cuda_visible_devices, index))


def find_device(setting: str, *, site: str, count: Callable[[], int] | None = None) -> DeviceChoice:
    """Choose a device for this process; devices are counted only where the setting needs it."""
    n_visible = 0 if setting == "cpu" else (count or _count)()
    return choose_device(
        setting, n_visible, cuda_visible_devices=os.environ.get(VISIBLE), site=site
    )


def device_facts(choice: DeviceChoice) -> dict[str, Any]:
    """Return what may be told of a device: its kind and numbers, no serial number.

    Returns
    -------
    dict
        ``device``, and for a CUDA device ``device_name`` and ``device_index`` (its number in the
        machine, or ``None``).
    """
    if choice.device == "cpu":
        return {"device": "cpu"}
    import torch

    name = torch.cuda.get_device_name(choice.device)
    return {"device": choice.device, "device_name": name, "device_index": choice.physical}


def described(facts: Mapping[str, Any]) -> str:
    """Return a device's facts in words: ``"cuda:0 (NVIDIA H200, number 2 of the machine)"``."""
    known = [str(facts["device_name"])] if facts.get("device_name") else []
    if facts.get("device_index") is not None:
        known.append(f"number {facts['device_index']} of the machine")
    return str(facts["device"]) + (f" ({', '.join(known)})" if known else "")


def out_of_memory(choice: DeviceChoice, *, site: str, batch_size: int) -> str:
    """Return the sentence for a CUDA device whose memory does not suffice."""
    device = described({"device": choice.device, "device_index": choice.physical})
    return (
        f"site {site!r}: device {device} has no memory left; end what else runs on "
        f"it, set device: cpu in local/fedbn_site.yml, or ask for a job whose training has a "
        f"batch_size below {batch_size}"
    )


def _count() -> int:
    import torch

    return torch.cuda.device_count()  # asks NVML where it can: no context is made on any device


def _shown(visible: str) -> str:
    """Show the variable, but no device's serial number (UUID), which would travel."""
    if not re.fullmatch(r"[-+0-9, ]*", visible):
        return f"{VISIBLE} names devices by UUID"
    return f"{VISIBLE} is {visible!r}"


def _physical(visible: str | None, index: int) -> int | None:
    """Return a visible device's number in the machine, ``None`` where it is named by a UUID."""
    if visible is None:
        return index
    entries = [entry.strip() for entry in visible.split(",")]
    if index < len(entries) and entries[index].isdecimal():
        return int(entries[index])
    return None
