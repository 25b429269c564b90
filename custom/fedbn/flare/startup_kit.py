"""A hospital's startup kit as FLARE reads it: server, certificates, signature, privacy policy."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from nvflare.fuel.sec.security_content_service import LoadResult, SecurityContentManager
from nvflare.lighter.utils import load_crt, verify_cert

from fedbn.flare.filters import BatchNormFilter

CONFIG = "fed_client.json"
SIGNATURE = "signature.json"
DEFAULT_PORTS = {"http": 80, "https": 443}


class StartupKitError(ValueError):
    """A folder that is no client's startup kit; the message says what to do."""


@dataclass(frozen=True)
class Server:
    """Where a client looks for the server.

    Attributes
    ----------
    host, port
        As the kit names them.
    scheme
        ``"grpc"``, ``"http"`` or ``"tcp"``.
    """

    host: str
    port: int
    scheme: str


@dataclass(frozen=True)
class Certificate:
    """A certificate of the kit.

    Attributes
    ----------
    path
        Its file.
    common_name
        Whom it names.
    valid_from, valid_to
        With a time zone (UTC).
    """

    path: Path
    common_name: str
    valid_from: datetime
    valid_to: datetime


@dataclass(frozen=True)
class StartupKit:
    """A client's startup kit.

    Attributes
    ----------
    folder
        The kit: the folder that holds ``startup`` and ``local``.
    client
        Name of the FLARE client.
    servers
        Every server that it may connect to.
    security
        ``"mtls"`` (both sides show certificates), ``"tls"`` or ``"clear"`` (not encrypted).
    """

    folder: Path
    client: str
    servers: tuple[Server, ...]
    security: str

    @property
    def startup(self) -> Path:
        """The folder that was provisioned and is not to be edited."""
        return self.folder / "startup"

    @property
    def local(self) -> Path:
        """The folder that belongs to the site."""
        return self.folder / "local"

    @property
    def root_certificate(self) -> Path:
        """The certificate of the project, by which server and client know each other."""
        return self.startup / "rootCA.pem"

    @property
    def client_certificate(self) -> Path:
        """The client's own certificate."""
        return self.startup / "client.crt"

    @property
    def client_key(self) -> Path:
        """The private key to it."""
        return self.startup / "client.key"

    def certificates(self) -> list[Certificate]:
        """Read the project's and the client's certificate.

        Raises
        ------
        StartupKitError
            If one is missing or no certificate, or the client's is not signed by the project.
        """
        found, raw = [], {}
        for path in (self.root_certificate, self.client_certificate):
            try:
                raw[path] = load_crt(path)
            except (OSError, ValueError) as error:
                raise StartupKitError(
                    f"startup/{path.name} cannot be read as a certificate; ask the lead for the "
                    "startup kit again"
                ) from error
            certificate = raw[path]
            (name, *_) = [
                attribute.value
                for attribute in certificate.subject
                if attribute.rfc4514_attribute_name == "CN"
            ] or ["?"]
            found.append(
                Certificate(
                    path,
                    str(name),
                    certificate.not_valid_before_utc,
                    certificate.not_valid_after_utc,
                )
            )
        try:
            verify_cert(raw[self.client_certificate], raw[self.root_certificate].public_key())
        except Exception as error:  # cryptography's InvalidSignature, or a key of another kind
            raise StartupKitError(
                "startup/client.crt was not made by the project of startup/rootCA.pem: files of "
                "two kits are mixed; unpack the startup kit again"
            ) from error
        return found

    def is_signed(self) -> bool:
        """Whether the kit says what its startup files were when it was made."""
        return (self.startup / SIGNATURE).is_file()

    def edited_files(self) -> list[str]:
        """Return in words which startup files are not as they were made, by FLARE's own check."""
        manager = SecurityContentManager(str(self.startup))
        there = {path.name for path in self.startup.iterdir() if path.is_file()} - {SIGNATURE}
        found = []
        for name in sorted(there):
            _, result = manager.load_content(name)
            if result == LoadResult.NOT_SIGNED:
                found.append(f"{name} was added")
            elif result != LoadResult.OK and (self.startup / name).stat().st_size:
                found.append(f"{name} was edited")
            elif result != LoadResult.OK:
                found.append(f"{name} is empty")
        missing = [name for name in manager.signature if not (self.startup / name).exists()]
        return found + [f"{name} is missing" for name in sorted(missing)]


def read_startup_kit(folder: Path) -> StartupKit:
    """Read what a client's startup kit says of the server.

    Raises
    ------
    StartupKitError
        One sentence: no kit, another participant's kit, or a file that cannot be read.
    """
    path = folder / "startup" / CONFIG
    if not path.is_file():
        other = "; it is the kit of " if (folder / "startup").is_dir() else ""
        for name, whose in (("fed_server.json", "the server"), ("fed_admin.json", "a person")):
            if other and (folder / "startup" / name).is_file():
                raise StartupKitError(
                    f"{folder} has no startup/{CONFIG}{other}{whose}, and this command looks at "
                    "the kit of a hospital"
                )
        raise StartupKitError(
            f"{folder} has no startup/{CONFIG}; give the folder that holds startup/ and local/"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        client = content["client"]
        servers = tuple(_server(entry["service"]) for entry in content["servers"])
        name = str(client["fqsn"]).rpartition("/")[2]
        security = str(client.get("connection_security", "mtls"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupKitError(
            f"startup/{CONFIG} cannot be read ({type(error).__name__}); unpack the startup kit "
            "again"
        ) from error
    if not servers:
        raise StartupKitError(f"startup/{CONFIG} names no server; ask the lead for a new kit")
    return StartupKit(folder, name, servers, security)


def _server(service: dict[str, Any]) -> Server:
    scheme = str(service.get("scheme", "grpc")).lower()
    host, colon, port = str(service["target"]).rpartition(":")
    if not colon:
        return Server(port, DEFAULT_PORTS[scheme], scheme)
    return Server(host.strip("[]"), int(port), scheme)


def batch_norm_policies(kit: StartupKit) -> dict[str, set[str]]:
    """Return the policies under which each privacy scope of the site keeps its batch norm.

    ``local/privacy.json`` is read, and its filters are built, by FLARE itself. A job may name any
    scope, so that one without the filter (an empty set) is a way around it.

    Returns
    -------
    dict
        Scope to policies (``"fedbn"``, ``"silobn"``) of the filters of what leaves; empty without
        a file or a scope in it.

    Raises
    ------
    StartupKitError
        If FLARE cannot use the file; a client would not start with it.
    """
    from nvflare.apis.fl_constant import FilterKey
    from nvflare.apis.workspace import Workspace
    from nvflare.private.fed.app.fl_conf import create_privacy_manager

    printed = io.StringIO()  # FLARE prints a traceback of its own, and raises
    try:
        workspace = Workspace(str(kit.folder), site_name=kit.client)
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            scopes = create_privacy_manager(workspace, names_only=False).name_to_scopes
    except Exception as error:
        raise StartupKitError(
            f"local/privacy.json cannot be used by FLARE: {' '.join(str(error).split())}"
        ) from error
    return {
        str(name): {
            each.policy
            for each in scope.task_result_filters[FilterKey.OUT]
            if isinstance(each, BatchNormFilter)
        }
        for name, scope in scopes.items()
    }
