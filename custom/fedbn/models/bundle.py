"""What a hospital keeps after a run: its complete model as a MONAI bundle.

A bundle is a folder in MONAI's format (docs.monai.io, "MONAI Bundle Specification") that predicts
without the run, the job and the site's data: the shared weights with the site's own batch norm,
behind what was fitted there, and all that decides what the network takes. It is put together at the
site and holds the site's batch norm, so it stays there. ::

    NYU_model/
        configs/metadata.json         MONAI's facts; under "fedbn" those of the site, in aggregate
        configs/inference.json        the network as MONAI's ConfigParser builds it, and what to run
        configs/metadata_schema.json  what MONAI asks of metadata, for its check without a network
        models/model.pt               a plain state dict, for torch.load(weights_only=True)
        models/model.ts               the same as TorchScript, where the network can be compiled
        docs/README.md                what a reader must know
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data_prep.files import atomic_folder, followed
from fedbn.core.networks import build_network
from fedbn.core.normalization import load_entries
from fedbn.federation.results import weights_digest
from fedbn.federation.site_state import COMPLETE_MODEL, load_checkpoint
from fedbn.models.bundle_metadata import (
    BUNDLE_FORMAT,
    check_facts,
    inference_config,
    metadata,
    metadata_schema,
    readme,
)
from fedbn.models.site_model import SHARED_FILE, BundleError, KeptModel, SiteFacts
from fedbn.tasks.base import Task
from fedbn.tasks.bundling import Bundling, TrainedOn, bundling_of
from fedbn.tasks.registry import TASK_0_1, make_task

TOLERANCE = 1e-5
"""How far the logits of a bundle's files may be from those of the model that the site kept."""

METADATA = Path("configs", "metadata.json")
INFERENCE = Path("configs", "inference.json")
SCHEMA = Path("configs", "metadata_schema.json")
WEIGHTS = Path("models", "model.pt")
TORCHSCRIPT = Path("models", "model.ts")
README = Path("docs", "README.md")

_SAMPLES, _NUMBERS = 64, 2**22  # at most, that the files of a bundle are compared on


def export_bundle(kept: KeptModel, facts: SiteFacts, out: Path) -> tuple[Path, bool]:
    """Write the bundle of one site, checked, or nothing.

    The folder appears under its name when it is complete: the network has been built from the
    written files by MONAI, its logits and TorchScript's are those of the model that the site kept
    to within 1e-5, and MONAI's own check of its input and output has passed.

    Parameters
    ----------
    kept, facts
        As from :func:`find_kept_model` and :func:`site_facts`.
    out
        The bundle's folder; an older bundle of fedbn there is replaced.

    Returns
    -------
    Path, bool
        The folder, and whether it holds TorchScript.

    Raises
    ------
    BundleError
        If something else is in the folder, or a check fails.
    data_prep.files.FileError
        If it cannot be written; an older bundle is unchanged.
    """
    _check_arguments(kept)
    place = followed(out)
    if place.is_dir() and any(place.iterdir()) and not is_bundle(place):
        raise BundleError(f"{out} holds something that is not a bundle of fedbn; name a new folder")
    if foreign := _foreign(place):
        raise BundleError(
            f"the bundle {out} also holds {', '.join(foreign[:5])}, which replacing it would "
            "delete; move that elsewhere, or name a new folder"
        )
    with atomic_folder(out, private=True) as folder:
        compiled = _write_files(folder, kept, facts)
        _check_files(folder, kept, compiled)
    return out, compiled


def _foreign(out: Path) -> list[str]:
    """Return what a person has put into an older bundle, such as scans and predictions."""
    files = {METADATA, INFERENCE, SCHEMA, WEIGHTS, TORCHSCRIPT, README}
    known = files | {path.parent for path in files}
    found = sorted(path.relative_to(out) for path in out.rglob("*"))
    foreign = [path for path in found if path not in known]
    return [str(path) for path in foreign if path.parent not in foreign]


def is_bundle(folder: Path) -> bool:
    """Whether a folder holds a bundle that fedbn has written."""
    try:
        content = json.loads((folder / METADATA).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and isinstance(content.get("fedbn"), dict)


def _check_arguments(kept: KeptModel) -> None:
    """Refuse network arguments that MONAI's configuration would run as code."""

    def look(value: Any) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                look(key)
                look(item)
        elif isinstance(value, list | tuple):
            for item in value:
                look(item)
        elif isinstance(value, str) and (value[:1] in ("$", "@", "%", "+") or "_target_" in value):
            raise BundleError(
                f"network {kept.network['name']!r} has the argument {value!r}, which MONAI's "
                "configuration files would run as code; such a model is not exported"
            )

    look(kept.network["args"])


def _write_files(folder: Path, kept: KeptModel, facts: SiteFacts) -> bool:
    """Write all files, through memory: PyTorch ends the process where a disk is full."""
    for part in ("configs", "models", "docs"):
        (folder / part).mkdir()
    weights = io.BytesIO()
    torch.save({k: tensor.contiguous() for k, tensor in kept.model.state_dict().items()}, weights)
    (folder / WEIGHTS).write_bytes(weights.getvalue())
    for path, content in (
        (METADATA, metadata(kept, facts)),
        (INFERENCE, inference_config(kept)),
        (SCHEMA, metadata_schema()),
    ):
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
        (folder / path).write_text(text, encoding="utf-8")
    script = _compiled(folder)
    if script is not None:
        (folder / TORCHSCRIPT).write_bytes(script)
    page = readme(kept, facts, compiled=script is not None)
    (folder / README).write_text(page, encoding="utf-8")
    return script is not None


def _compiled(folder: Path) -> bytes | None:
    """Have MONAI make the TorchScript file: compiled, else traced, else not at all."""
    for trace in (False, True):
        script = io.BytesIO()
        with contextlib.suppress(Exception), _monai_quiet() as bundle:  # what it cannot take
            bundle.ckpt_export(
                "network_def",
                filepath=script,
                ckpt_file=str(folder / WEIGHTS),
                meta_file=str(folder / METADATA),
                config_file=str(folder / INFERENCE),
                use_trace=trace,
            )
            return script.getvalue()
    return None


@contextlib.contextmanager
def _monai_quiet() -> Iterator[Any]:
    """Give MONAI's bundle commands without their log, and PyTorch's notices on TorchScript."""
    import monai.bundle

    disabled = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield monai.bundle
    finally:
        logging.disable(disabled)


def _check_files(folder: Path, kept: KeptModel, compiled: bool) -> None:
    """Compare what the written files compute with the model that the site kept."""
    n = max(2, min(_SAMPLES, _NUMBERS // math.prod(kept.shape)))
    x = bundling_of(kept.task).example(kept.model, kept.shape, n, seed=0)
    with torch.no_grad():
        expected = kept.model(x)
    if expected.dtype != torch.float32:
        raise BundleError(
            f"site {kept.site!r}: network {kept.network['name']!r} gives {expected.dtype}, and "
            "MONAI's tools take float32; let its forward pass end in .float()"
        )
    with _monai_quiet() as bundle:
        parser = bundle.ConfigParser()
        parser.read_config(str(folder / INFERENCE))
        rebuilt = parser.get_parsed_content("network_def")
        rebuilt.load_state_dict(torch.load(folder / WEIGHTS, weights_only=True))
        found = {"models/model.pt": rebuilt}
        if compiled:
            found["models/model.ts"] = torch.jit.load(str(folder / TORCHSCRIPT))
        for name, model in found.items():
            with torch.no_grad():
                difference = float((model.eval()(x) - expected).abs().max())
            if not difference <= TOLERANCE:
                raise BundleError(
                    f"site {kept.site!r}: the logits of {name} differ from those of the model that "
                    f"the site kept by {difference:.1e}, more than {TOLERANCE:.0e}; nothing was "
                    "exported"
                )
        bundle.verify_net_in_out(
            "network_def",
            meta_file=str(folder / METADATA),
            config_file=str(folder / INFERENCE),
            device="cpu",
        )


@dataclass(frozen=True)
class Bundle:
    """A site's model, ready to predict.

    Attributes
    ----------
    path
        The folder.
    task
        What the model has learned.
    model
        The network behind what was fitted at the site; in eval mode, on the CPU.
    fitted
        What was fitted.
    facts
        What ``metadata.json`` holds under ``fedbn``.
    """

    path: Path
    task: Task
    model: nn.Module
    fitted: dict[str, torch.Tensor]
    facts: dict[str, Any]

    @property
    def site(self) -> str:
        """Name of the site."""
        return str(self.facts["site"])

    @property
    def side(self) -> Bundling:
        """What the task knows of being asked."""
        return bundling_of(self.task)

    @property
    def trained_on(self) -> TrainedOn:
        """What the model was trained on."""
        signature, reference = (self.facts[key] for key in self.side.keys)
        return TrainedOn(self.site, signature, reference)

    @property
    def synthetic(self) -> bool:
        """Whether the training subjects were made up."""
        signature = self.trained_on.signature
        return bool(signature.get("synthetic") or self.facts.get("synthetic"))


def read_bundle(path: Path) -> Bundle:
    """Read a bundle that fedbn has written, without building anything from its configuration.

    The network is the one that ``metadata.json`` names. Nothing in the bundle is executed, and its
    weights must be those that were exported.

    Raises
    ------
    BundleError
        If it is no bundle of fedbn, or has been changed.
    fedbn.federation.site_state.SiteStateError
        If it is the file of the shared weights, which cannot predict alone.
    """
    if path.is_file() or (path.is_dir() and not (path / METADATA).is_file()):
        _refuse_other(path)
    if not path.is_dir():
        raise BundleError(f"no bundle at {path}; make one with `fedbn export`")
    try:
        content = json.loads((path / METADATA).read_text(encoding="utf-8"))
        facts = content["fedbn"]
        if facts["format"] != BUNDLE_FORMAT:
            raise BundleError(
                f"{path} has the format {facts['format']!r}, this version reads {BUNDLE_FORMAT}"
            )
        task = make_task(facts.get("task") or TASK_0_1)
        side = bundling_of(task)
        check_facts(facts, side)
        weights = torch.load(path / WEIGHTS, map_location="cpu", weights_only=True)
        fitted = side.fitted_of(weights)
        inner = build_network(facts["network"]["name"], facts["network"]["args"], 0)
        model = side.wrap(inner, fitted).eval()
        load_entries(model, weights)
        side.check(facts, model)
    except BundleError:
        raise
    except Exception as error:
        raise BundleError(
            f"{path} is damaged or not a bundle that fedbn has written ({type(error).__name__}: "
            f"{error}); export it again"
        ) from error
    if weights_digest(weights) != facts["weights_sha256"]:
        raise BundleError(
            f"{path / WEIGHTS} was changed after the export: its checksum is not the one in "
            "metadata.json; export it again"
        )
    return Bundle(path, task, model, fitted, facts)


def _refuse_other(path: Path) -> None:
    """Say what somebody has given in place of a bundle."""
    files = [path] if path.is_file() else sorted(path.rglob(SHARED_FILE))
    if path.is_dir() and not files:
        raise BundleError(
            f"{path} is not a bundle, it has no {METADATA}; make one with `fedbn export`"
        )
    load_checkpoint(files[0], COMPLETE_MODEL)  # shared weights are refused here, with the reason
    raise BundleError(
        f"{path} is the file that a site keeps, not a bundle; make one of it with "
        f"`fedbn export --run {path} --site SITE --out FOLDER`"
    )
