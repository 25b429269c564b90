"""What every FLARE component of a job shares: the experiment file and the words of a message."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvflare.apis.fl_context import FLContext

from fedbn.core.control_variates import PREFIX
from fedbn.core.networks import check_allowed
from fedbn.federation.experiment import EXPERIMENT_FILE, Experiment, read_experiment
from fedbn.federation.site_settings import SITE_SETTINGS_FILE, SiteSettings, read_site_settings

REPORT = "fedbn"
"""Key of a message's meta data under which fedbn puts its own facts, in either direction."""

PURPOSE = "purpose"
PREFLIGHT = "preflight"
TRAIN = "train"
JUDGE = "judge"
FINAL = "final"
FINETUNE = "finetune"
ALONE = "alone"
"""What a task is for; each has a deadline of its own."""

BEST = "best round"
"""The best round so far, where the server judges them; ``None`` before one was judged."""

PREPARED = "prepared"
ACCEPTED = "last accepted"
"""Site name to the last round in which the server accepted the site's contribution."""

ERROR = "error"

SITES_FOLDER = "fedbn_sites"
"""Below a client's workspace root: where site state outlives the processes of a run."""

_SUBJECT = re.compile(r"(?<![0-9A-Za-z])sub-[^\s,;:'\"`()/\\]+")
_PATH = re.compile(r"(?<![\w.])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\'\"`,;:()]+[/\\])*[^\s/\\'\"`,;:()]*")


def job_experiment(fl_ctx: FLContext) -> Experiment:
    """Read the experiment that FLARE deployed with the job's app, at the server or at a client.

    Raises
    ------
    fedbn.federation.experiment.ExperimentError
        If it is missing or wrong.
    ValueError
        If its network or its task is a class that this installation's own settings do not allow.
    """
    workspace, settings = fl_ctx.get_engine().get_workspace(), site_settings(fl_ctx)
    config = Path(workspace.get_app_config_dir(fl_ctx.get_job_id()))
    experiment = read_experiment(config / EXPERIMENT_FILE, settings.tasks)
    check_allowed(experiment.network.name, settings.networks)
    return experiment


def site_settings(fl_ctx: FLContext) -> SiteSettings:
    """Read what the site has decided for itself, in its own ``local/``, where no job can write.

    Raises
    ------
    fedbn.federation.site_settings.SiteSettingsError
        If the file is wrong; without one the settings are the defaults.
    """
    workspace = fl_ctx.get_engine().get_workspace()
    return read_site_settings(Path(workspace.get_site_config_dir()) / SITE_SETTINGS_FILE)


def free_messages() -> None:
    """Free the messages of the round that has ended; called at the end of each.

    FLARE's messages lie in reference cycles, which only a full garbage collection frees. Python
    counts objects, not bytes, and starts one every fifty rounds or so: 60 MB of old weights were
    held by then. What is there after the first round (torch, FLARE, the data) stays for the whole
    run; it is taken out of all collections, so that one costs milliseconds.
    """
    if not gc.get_freeze_count():
        gc.freeze()
    gc.collect()


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Turn tensors into NumPy arrays, the form in which FLARE sends them by default.

    NumPy has no bfloat16: such values travel as float32, which holds each of them exactly.
    """
    return {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().cpu().numpy()
        for name, tensor in tensors.items()
    }


def to_tensors(
    arrays: Mapping[str, Any], like: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Turn what arrived into tensors; values are not copied where they need not be.

    Parameters
    ----------
    arrays
        Names to NumPy arrays.
    like
        Names to tensors; an entry that is bfloat16 there becomes so again. A control variate is as
        its entry.

    Raises
    ------
    TypeError
        Naming an entry that is neither a numeric array nor a tensor.
    """
    tensors = {}
    for name, value in arrays.items():
        if not isinstance(name, str):
            raise TypeError(f"the name {name!r} of an entry is unknown: it is no text")
        if isinstance(value, torch.Tensor):
            tensors[name] = value
            continue
        if not isinstance(value, (np.ndarray, np.generic)) or value.dtype.kind not in "fciub":
            raise TypeError(f"entry {name!r} is not a numeric array but {type(value).__name__}")
        array = np.asarray(value)
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        known = (like or {}).get(name, (like or {}).get(name.removeprefix(PREFIX)))
        if known is not None and known.dtype == torch.bfloat16 and tensor.dtype == torch.float32:
            tensor = tensor.bfloat16()
        tensors[name] = tensor
    return tensors


def redacted(text: str, names: Iterable[Path | str] = ()) -> str:
    """Take subject ids and file paths out of a sentence before it leaves a site.

    The full sentence stays in the site's own log.

    Parameters
    ----------
    text
        Any sentence.
    names
        Folders and subjects to take out as they are written: a relative folder, one with blanks
        in its name, and an id that is not in BIDS style cannot be told from words.
    """
    for name in sorted((str(name) for name in names), key=len, reverse=True):
        if name in text and name.strip("./\\"):
            text = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", "/path", text)
    text = _PATH.sub("<path>", _SUBJECT.sub("<subject>", text))
    return re.sub("(<path>)+", "<path>", text)
