"""A site's own entries on its own disk: atomic, checksummed, alive through restarts.

FLARE builds the client object anew for every task when it runs fewer threads than clients, and
after every restart. What a site must keep between rounds therefore lives in files. They are keyed
by job and site, written to a temporary name and renamed, and carry a digest over every tensor, so
that a half-written, corrupted or foreign file is an error with a name and never a fresh batch norm.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from data_prep.files import atomic_file
from fedbn.core.normalization import bits
from fedbn.tasks.base import Scores

FORMAT = "fedbn-checkpoint-1"
SHARED_WEIGHTS = "shared weights"
LOCAL_ENTRIES = "local entries"
PREPARATION = "preparation"
COMPLETE_MODEL = "complete model"
BEST_ENTRIES = "entries of the best round"


Tensors = dict[str, torch.Tensor]


class SiteStateError(RuntimeError):
    """A state file that is missing, damaged, or not this job's; the message names the file."""


def save_checkpoint(
    path: Path, kind: str, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]
) -> None:
    """Write named tensors and JSON-able facts to one file that ``weights_only=True`` can load.

    Parameters
    ----------
    path
        The file; replaced atomically. All but shared weights is the owner's alone (0600).
    kind
        One of the kinds named in this module; :func:`load_checkpoint` asks for it again.
    tensors
        Names to tensors; copies are written, on the CPU.
    meta
        What a reader must know: job, site, round, network, …
    """
    # Clones: of a view, torch.save would write the whole storage that lies behind it.
    copies = {
        name: tensor.detach().to("cpu").as_subclass(torch.Tensor).contiguous().clone()
        for name, tensor in tensors.items()
    }
    facts = json.dumps(meta, allow_nan=False)  # in the order given: of classes it has a meaning
    content = {
        "format": FORMAT,
        "kind": kind,
        "complete_model": kind == COMPLETE_MODEL,
        "meta": facts,
        "sha256": _digest(kind, facts, copies),
        "model": copies,
    }
    # Through memory: torch.save turns a full disk's OSError into a RuntimeError about its archive.
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with atomic_file(path, private=kind != SHARED_WEIGHTS) as file:
        file.write(buffer.getbuffer())


def load_checkpoint(path: Path, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read and verify what :func:`save_checkpoint` wrote; nothing in the file is executed.

    Returns
    -------
    tensors, meta
        Names to CPU tensors, and the facts.

    Raises
    ------
    SiteStateError
        If the file is missing, cannot be read, is of another kind, or its digest is wrong.
    """
    if not path.is_file():
        raise SiteStateError(f"{kind} file {path.name} is missing in {path.parent}")
    try:
        data = io.BytesIO(path.read_bytes())
        if not _is_saved_by_torch(data):
            raise ValueError("no archive of torch.save")
        content = torch.load(data, map_location="cpu", weights_only=True)
    except OSError as error:
        raise SiteStateError(
            f"cannot read {kind} file {path}: {error.strerror or error}"
        ) from error
    except Exception as error:
        raise SiteStateError(
            f"{kind} file {path} is damaged or not a fedbn file ({type(error).__name__}); "
            "restore it from a backup, or delete it and start a new job"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise SiteStateError(f"{path} is not a {FORMAT} file")
    if content.get("kind") != kind:
        hint = ""
        if content.get("kind") == SHARED_WEIGHTS and kind == COMPLETE_MODEL:
            hint = (
                ": it holds the shared weights without any site's batch norm and cannot predict; "
                "use a site's own model.pt"
            )
        raise SiteStateError(f"{path} holds {content.get('kind')!r}, expected {kind!r}{hint}")
    tensors, facts = content.get("model"), content.get("meta")
    if (
        not isinstance(tensors, dict)
        or not isinstance(facts, str)
        or not all(_is_dense(tensor) for tensor in tensors.values())
        or _digest(kind, facts, tensors) != content.get("sha256")
        or content.get("complete_model") is not (kind == COMPLETE_MODEL)
    ):
        raise SiteStateError(
            f"{kind} file {path} is corrupted: its checksum does not match its content; "
            "restore it from a backup, or delete it and start a new job"
        )
    return tensors, json.loads(facts)


def _is_saved_by_torch(data: IO[bytes]) -> bool:
    """Whether this is an archive of ``torch.save``: no bare pickle, and no TorchScript."""
    if not zipfile.is_zipfile(data):
        return False
    with zipfile.ZipFile(data) as archive:
        names = archive.namelist()
    data.seek(0)
    return not any(name.endswith("/constants.pkl") for name in names)


class SiteState:
    """What one site keeps for one job, in a folder that outlives every process of the run.

    Parameters
    ----------
    folder
        ``<root>/<job>/<site>``, see :meth:`under`.
    job, site
        Written into every file and asked for when it is read.
    network
        Fingerprint of the network (see :func:`network_fingerprint`); a state of another network
        is refused.
    """

    def __init__(self, folder: Path, *, job: str, site: str, network: str):
        self.folder = folder
        self.job = job
        self.site = site
        self.network = network

    @classmethod
    def under(cls, root: Path, *, job: str, site: str, network: str) -> SiteState:
        """Return the state of a job and site below a common root."""
        for name in (job, site):
            if not _is_plain(name):
                raise SiteStateError(f"{name!r} cannot name a folder of site state")
        return cls(root / job / site, job=job, site=site, network=network)

    @property
    def local_path(self) -> Path:
        """The file with the site's local entries."""
        return self.folder / "local_entries.pt"

    @property
    def earlier_local_path(self) -> Path:
        """The file with the local entries of the round before those of :attr:`local_path`."""
        return self.folder / "local_entries_before.pt"

    @property
    def best_path(self) -> Path:
        """The file with the entries of the best round so far, where rounds are judged."""
        return self.folder / "best_entries.pt"

    @property
    def preparation_path(self) -> Path:
        """The file with the site's split and standardisation."""
        return self.folder / "preparation.pt"

    @property
    def model_path(self) -> Path:
        """The file with the complete model, written at the end."""
        return self.folder / "model.pt"

    @property
    def finetuned_model_path(self) -> Path:
        """The file with the complete model after fine-tuning at this site."""
        return self.folder / "model_finetuned.pt"

    @property
    def exists(self) -> bool:
        """Whether this site has kept local entries for this job."""
        return self.local_path.exists()

    def save_local(self, entries: Mapping[str, torch.Tensor], round_number: int) -> None:
        """Keep the local entries as they are after a round (-1: before the first).

        Those of the round before stay beside them: where the server has stopped, each site may
        have trained a round that nobody has seen, and goes on from what it was before that.

        Raises
        ------
        SiteStateError
            If a value is not finite (the older file stays), or the file cannot be written.
        """
        for name, tensor in entries.items():
            if not bool(torch.isfinite(tensor).all()):
                raise SiteStateError(
                    f"site {self.site!r}: local entry {name!r} is not finite after round "
                    f"{round_number}; the entries of the round before are kept"
                )
        self._keep_earlier(round_number)
        self._save(self.local_path, LOCAL_ENTRIES, entries, {"round": round_number})

    def load_local(self, at_most: int | None = None) -> tuple[dict[str, torch.Tensor], int]:
        """Return the local entries and the round after which they were kept.

        Parameters
        ----------
        at_most
            Return the latest entries of a round that is not after this one.

        Raises
        ------
        SiteStateError
            If a file is missing or damaged, or both that are kept are of later rounds.
        """
        tensors, meta = self._load(self.local_path, LOCAL_ENTRIES)
        if at_most is None or meta["round"] <= at_most:
            return tensors, int(meta["round"])
        if self.earlier_local_path.exists():
            tensors, earlier = self._load(self.earlier_local_path, LOCAL_ENTRIES)
            if earlier["round"] <= at_most:
                return tensors, int(earlier["round"])
        raise SiteStateError(
            f"site {self.site!r}: {self.folder} holds the local entries after round "
            f"{meta['round']}, and none after round {at_most} or before it"
        )

    def keep_best(self, number: int) -> None:
        """Keep the local entries of the round that is the best so far, as the server says.

        Of a site that missed that round they are the latest before it. They stay until another
        round is the best, so that they and that round's shared weights are always of one round.
        """
        if self._best_round() != number:
            local, _ = self.load_local(at_most=number)
            self.save_best({}, local, number)

    def save_best(
        self,
        shared: Mapping[str, torch.Tensor],
        local: Mapping[str, torch.Tensor],
        number: int,
        value: float | None = None,
    ) -> None:
        """Keep all entries of this site's own best round, with what it was judged by."""
        joined = {f"shared/{name}": tensor for name, tensor in shared.items()}
        joined |= {f"local/{name}": tensor for name, tensor in local.items()}
        self._save(self.best_path, BEST_ENTRIES, joined, {"round": number, "value": value})

    def load_best(
        self,
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int, float | None]:
        """Return shared and local entries of the best round, its number, and its value.

        Raises
        ------
        SiteStateError
            If there are none, or the file is damaged.
        """
        tensors, meta = self._load(self.best_path, BEST_ENTRIES)
        shared, local = (
            {n.removeprefix(part): t for n, t in tensors.items() if n.startswith(part)}
            for part in ("shared/", "local/")
        )
        return shared, local, int(meta["round"]), meta["value"]

    def _best_round(self) -> int | None:
        return self.load_best()[2] if self.best_path.exists() else None

    def save_preparation(
        self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]
    ) -> None:
        """Keep what was fitted on the site's training subjects, once, before the first round."""
        self._save(self.preparation_path, PREPARATION, tensors, {"facts": dict(facts)})

    def load_preparation(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return what :meth:`save_preparation` kept."""
        tensors, meta = self._load(self.preparation_path, PREPARATION)
        return tensors, meta["facts"]

    def save_model(
        self,
        tensors: Mapping[str, torch.Tensor],
        facts: Mapping[str, Any],
        *,
        finetuned: bool = False,
    ) -> None:
        """Write the complete model (shared entries and the site's own) that the site keeps."""
        path = self.finetuned_model_path if finetuned else self.model_path
        self._save(path, COMPLETE_MODEL, tensors, {"facts": dict(facts)})

    def save_scores(self, name: str, scores: Mapping[str, Scores]) -> None:
        """Keep some scores under one name at the site, for metrics and curves."""
        if not _is_plain(name):
            raise SiteStateError(f"{name!r} cannot name a file of scores")
        kept: dict[str, Any] = {}
        for key, one in scores.items():
            kept |= one.arrays(f"{key}/")
        for key, array in kept.items():
            if array.dtype.hasobject:
                raise SiteStateError(f"scores {name!r}: array {key!r} holds Python objects")
        path = self.folder / "predictions" / f"{name}.npz"
        with atomic_file(path, private=True) as file:
            np.savez(file, **kept)

    def load_scores(self) -> dict[str, dict[str, Scores]]:
        """Return all kept scores by name, sorted; none of those that version 0.1 kept."""
        kept = {}
        for path in sorted((self.folder / "predictions").glob("[!.]*.npz")):
            try:
                kept[path.stem] = read_scores_file(path)
            except Exception as error:
                raise SiteStateError(
                    f"site {self.site!r}: predictions file {path} is damaged "
                    f"({type(error).__name__}); delete it to go on without that round"
                ) from error
        return kept

    def _keep_earlier(self, round_number: int) -> None:
        """Let the kept entries stand beside those of a later round that will replace them.

        A copy, not a rename: whenever a process is killed, both names hold a whole file.
        """
        try:
            _, meta = self._load(self.local_path, LOCAL_ENTRIES)
        except SiteStateError:
            return  # there are none, or none that anything could go on from
        if meta["round"] < round_number:
            with atomic_file(self.earlier_local_path, private=True) as file:
                file.write(self.local_path.read_bytes())

    def _save(
        self, path: Path, kind: str, tensors: Mapping[str, torch.Tensor], meta: dict[str, Any]
    ) -> None:
        keyed = {"job": self.job, "site": self.site, "network": self.network, **meta}
        save_checkpoint(path, kind, tensors, keyed)

    def _load(self, path: Path, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        try:
            tensors, meta = load_checkpoint(path, kind)
        except SiteStateError as error:
            raise SiteStateError(f"site {self.site!r}: {error}") from error
        for key, expected in (("job", self.job), ("site", self.site), ("network", self.network)):
            if meta.get(key) != expected:
                raise SiteStateError(
                    f"site {self.site!r}: {kind} file {path} belongs to {key} "
                    f"{meta.get(key)!r}, not to {expected!r}; "
                    "delete it to start anew, or run the job it belongs to"
                )
        return tensors, meta


def read_scores_file(path: Path) -> dict[str, Scores]:
    """Read the scores that a site has kept in one file, by name."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    keys = [key.removesuffix("/units") for key in arrays if key.endswith("/units")]
    return {key: Scores.from_arrays(arrays, f"{key}/") for key in keys}


def network_fingerprint(name: str, state: Mapping[str, torch.Tensor]) -> str:
    """Name a network by its class and the names, shapes and dtypes of its entries."""
    lines = [f"{key} {tuple(tensor.shape)} {tensor.dtype}" for key, tensor in state.items()]
    return f"{name}-{hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:16]}"


def _is_dense(tensor: object) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
    )


def _digest(kind: str, facts: str, tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(f"{FORMAT}\n{kind}\n{facts}\n".encode())
    for name in sorted(tensors, key=str):
        tensor = tensors[name]
        digest.update(f"{name}\n{tuple(tensor.shape)}\n{tensor.dtype}\n".encode())
        digest.update(bits(tensor))
    return digest.hexdigest()


def _is_plain(name: str) -> bool:
    """Whether a name stays inside its folder, and is not hidden there."""
    return bool(name) and not name.startswith(".") and not set(name) & set("/\\\0")
