"""What a hospital keeps after a run: its complete model as a MONAI bundle.

A bundle is a folder in MONAI's format (docs.monai.io, "MONAI Bundle Specification") that predicts
without the run, the job and the stores: the shared weights with the site's own batch norm, its
standardisation as a layer, and all that decides how a connectome is made. It is put together at the
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
import copy
import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
from fedbn.models.site_network import SiteNetwork

TOLERANCE = 1e-5
"""How far the logits of a bundle's files may be from those of the model that the site kept."""

METADATA = Path("configs", "metadata.json")
INFERENCE = Path("configs", "inference.json")
SCHEMA = Path("configs", "metadata_schema.json")
WEIGHTS = Path("models", "model.pt")
TORCHSCRIPT = Path("models", "model.ts")
README = Path("docs", "README.md")

_SAMPLES = 64  # connectomes that the files of a bundle are compared on


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
    """
    _check_arguments(kept)
    there = next(folder for folder in out.absolute().parents if folder.exists())
    if not there.is_dir():
        raise BundleError(f"cannot write {out}: {there} is a file; name another place")
    if out.exists() and not (out.is_dir() and (is_bundle(out) or not any(out.iterdir()))):
        raise BundleError(f"{out} holds something that is not a bundle of fedbn; name a new folder")
    if foreign := _foreign(out):
        raise BundleError(
            f"the bundle {out} also holds {', '.join(foreign[:5])}, which replacing it would "
            "delete; move that elsewhere, or name a new folder"
        )
    try:
        with _temporary(out) as temporary:
            compiled = _write_files(temporary, kept, facts)
            _check_files(temporary, kept, compiled)
            _put_in_place(temporary, out)
    except OSError as error:
        raise BundleError(
            f"cannot write {out}: {error.strerror or error}; free disk space or make the folder "
            "writable (an older bundle is unchanged)"
        ) from error
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


@contextlib.contextmanager
def _temporary(out: Path) -> Iterator[Path]:
    """Make a folder beside the bundle's, which is removed whatever happens."""
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.parent / f".{out.name}.partial-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _put_in_place(temporary: Path, out: Path) -> None:
    """Rename the finished folder; an older bundle steps aside first and is then removed."""
    out = out.absolute()
    aside = out.parent / f".{out.name}.replaced-{os.getpid()}"
    if out.exists():
        out.rename(aside)
    try:
        temporary.rename(out)
    except OSError:
        if aside.exists():
            aside.rename(out)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _write_files(folder: Path, kept: KeptModel, facts: SiteFacts) -> bool:
    for part in ("configs", "models", "docs"):
        (folder / part).mkdir()
    state = {name: tensor.contiguous() for name, tensor in kept.model.state_dict().items()}
    with (folder / WEIGHTS).open("wb") as file:
        torch.save(state, file)
    _write_json(folder / METADATA, metadata(kept, facts))
    _write_json(folder / INFERENCE, inference_config(kept))
    _write_json(folder / SCHEMA, metadata_schema())
    compiled = _compile(folder)
    (folder / README).write_text(readme(kept, facts, compiled=compiled), encoding="utf-8")
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    return compiled


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _compile(folder: Path) -> bool:
    """Have MONAI write the TorchScript file: compiled, else traced, else not at all."""
    for trace in (False, True):
        try:
            with _monai_quiet() as bundle:
                bundle.ckpt_export(
                    "network_def",
                    filepath=str(folder / TORCHSCRIPT),
                    ckpt_file=str(folder / WEIGHTS),
                    meta_file=str(folder / METADATA),
                    config_file=str(folder / INFERENCE),
                    use_trace=trace,
                )
        except OSError:
            raise
        except Exception:  # whatever a compiler cannot take
            (folder / TORCHSCRIPT).unlink(missing_ok=True)
        else:
            return True
    return False


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
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(_SAMPLES, len(kept.model.mean), generator=generator)
    x = kept.model.mean + kept.model.std * noise
    with torch.no_grad():
        network = copy.deepcopy(kept.model.network).eval()
        expected = network((x - kept.model.mean) / kept.model.std)
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
    model
        In eval mode, on the CPU.
    facts
        What ``metadata.json`` holds under ``fedbn``.
    """

    path: Path
    model: SiteNetwork
    facts: dict[str, Any]

    @property
    def site(self) -> str:
        """Name of the site."""
        return str(self.facts["site"])

    @property
    def signature(self) -> dict[str, Any]:
        """What a connectome is, as in a store's signature."""
        signature: dict[str, Any] = self.facts["connectome"]
        return signature

    @property
    def rois(self) -> tuple[tuple[str, str], ...]:
        """ROI id and name of each node."""
        return tuple((str(i), str(name)) for i, name in self.signature["rois"])


def read_bundle(path: Path) -> Bundle:
    """Read a bundle; nothing in it is executed, and its weights must be those that were exported.

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
        check_facts(facts)
        weights = torch.load(path / WEIGHTS, map_location="cpu", weights_only=True)
        if len(weights["mean"]) != facts["connectome"]["n_edges"]:
            raise ValueError(f"the network takes {len(weights['mean'])} edges")
        inner = build_network(facts["network"]["name"], facts["network"]["args"], 0)
        model = SiteNetwork(inner, len(weights["mean"])).eval()
        load_entries(model, weights)
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
    return Bundle(path, model, facts)


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
