"""What a hospital's IT looks at before a client is started, a line for each thing.

Nothing leaves the machine but a connection to the federation's own server, and nothing is changed.
"""

from __future__ import annotations

import contextlib
import email.utils
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import ssl
import stat
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbn.core.networks import check_allowed
from fedbn.federation.devices import DeviceError, described, device_facts, find_device
from fedbn.federation.experiment import Experiment, read_experiment
from fedbn.federation.installation import (
    InstallationError,
    check_packages,
    installed_version,
    required_packages,
    satisfies,
)
from fedbn.federation.site_settings import (
    SITE_SETTINGS_FILE,
    SiteSettings,
    SiteSettingsError,
    read_site_settings,
)
from fedbn.tasks.data import DataError, SiteData, default_data_root
from fedbn.tasks.registry import TASK_0_1, make_task

if TYPE_CHECKING:
    from fedbn.flare.startup_kit import Server, StartupKit

OK = "ok"
WARNING = "warning"
FAILED = "FAILED"

SECONDS = 5.0
"""How long to wait for the server, for each step of a connection."""

LEAST_DISK, LITTLE_DISK = 200 * 2**20, 2 * 2**30
EXPIRES_SOON = timedelta(days=30)
CLOCK_TOLERANCE = timedelta(minutes=5)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes
    ----------
    status
        ``"ok"``, ``"warning"`` (it works, but look at it) or ``"FAILED"`` (a run would not work, or
        would not keep what it promises).
    subject
        What was looked at, in a word or two.
    sentence
        What was found, and what to do.
    """

    status: str
    subject: str
    sentence: str


Findings = Iterator[Finding]


@dataclass
class _Patient:
    """What is known so far of the site that is looked at."""

    kit_folder: Path | None
    settings_file: Path | None
    job: Path | None
    kit: StartupKit | None = None
    settings: SiteSettings = field(default_factory=SiteSettings)
    misread: bool = False
    experiment: Experiment | None = None
    arguments: dict[str, Any] | None = None
    data: SiteData | None = None

    @property
    def client(self) -> str | None:
        """Name of the client, from the kit or else from the settings."""
        return self.kit.client if self.kit else self.settings.site

    @property
    def site(self) -> str | None:
        """The site that the client stands for in the job, if that is known."""
        if self.experiment is not None and self.client is not None:
            with contextlib.suppress(ValueError):
                return self.experiment.site_of(self.client)
        return self.settings.site or self.client

    @property
    def settings_place(self) -> Path | None:
        """The site's settings, given or the kit's."""
        if self.settings_file is None and self.kit_folder is not None:
            return self.kit_folder / "local" / SITE_SETTINGS_FILE
        return self.settings_file

    def of_job(self, argument: str) -> Any:
        """Return an argument that the job gives its learner."""
        return (self.arguments or {}).get(argument)


def examine(
    kit: Path | None = None, settings_file: Path | None = None, job: Path | None = None
) -> Findings:
    """Look at everything, one finding after the other, whatever the earlier ones are.

    Parameters
    ----------
    kit
        A client's startup kit; without one nothing that needs it is looked at.
    settings_file
        The site's settings; by default ``local/fedbn_site.yml`` of the kit.
    job
        A job folder: is it for this installation, this site, this store?
    """
    patient = _Patient(kit, settings_file, job)
    checks: list[tuple[str, Callable[[_Patient], Findings]]] = [
        ("Python", _python),
        ("packages", _packages),
        ("job", _job),
        ("site settings", _settings),
        ("device", _device),
        ("data store", _store),
    ]
    if kit is not None:
        checks[2:2] = [("startup kit", _kit)]
        checks += [
            ("startup files", _startup_files),
            ("privacy", _privacy),
            ("certificates", _certificates),
            ("clock", _clock),
            ("kit folder", _kit_folder),
            ("stopped or running", _marks),
            ("server", _server),
        ]
    if job is not None:
        checks.append(("job and store", _job_and_store))
    for subject, check in checks:
        try:
            yield from check(patient)
        except Exception as error:  # the other lines must still be written
            sentence = " ".join(str(error).split())
            yield Finding(FAILED, subject, f"{type(error).__name__}: {sentence}")


def _python(_: _Patient) -> Findings:
    version = platform.python_version()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        required = importlib.metadata.metadata("fedbn")["Requires-Python"] or ""
        if not satisfies(version, required):
            yield Finding(
                FAILED,
                "Python",
                f"{version}, but fedbn takes {required}; make an environment with such a Python",
            )
            return
    yield Finding(OK, "Python", f"{version} in {sys.prefix}")
    started = shutil.which("python3")
    if started is None or Path(started).parent != Path(sys.executable).parent:
        yield Finding(
            WARNING,
            "Python",
            f"the kit's start.sh runs 'python3', here {started or 'nothing'}, which is not this "
            f"one; activate the environment ({sys.prefix}) before start.sh",
        )


def _packages(_: _Patient) -> Findings:
    try:
        packages = required_packages()
        check_packages()
    except InstallationError as error:
        yield Finding(FAILED, "packages", str(error))
        return
    for each in packages:
        if not each.fits:
            there = f"{each.installed} is installed" if each.installed else "it is missing"
            yield Finding(
                FAILED,
                "packages",
                f"fedbn takes {each.name}{each.required}, but {there}; "
                f'pip install "{each.name}{each.required}"',
            )
    if all(each.fits for each in packages):
        names = ("nvflare", "torch", "monai", "scikit-learn")
        shown = ", ".join(f"{p.name} {p.installed}" for p in packages if p.name in names)
        yield Finding(
            OK,
            "packages",
            f"fedbn {installed_version()}; all {len(packages)} that it needs are there ({shown})",
        )


def _kit(patient: _Patient) -> Findings:
    from fedbn.flare.simulator import check_path
    from fedbn.flare.startup_kit import StartupKitError, read_startup_kit

    assert patient.kit_folder is not None
    try:
        patient.kit = kit = read_startup_kit(patient.kit_folder)
        check_path(kit.folder.absolute(), "the kit")
        check_path(Path(sys.executable), "this Python")
    except (StartupKitError, ValueError) as error:
        yield Finding(FAILED, "startup kit", str(error))
        return
    where = ", ".join(f"{server.host}:{server.port}" for server in kit.servers)
    yield Finding(OK, "startup kit", f"client {kit.client!r}, server {where}")


def _settings(patient: _Patient) -> Findings:
    path = patient.settings_place
    if path is None or (patient.settings_file is None and not path.exists()):
        yield Finding(
            WARNING,
            "site settings",
            f"no local/{SITE_SETTINGS_FILE}: this site does what the job says; write one to decide "
            "for yourself (docs/site_settings.md)",
        )
        return
    try:
        if not path.exists():
            raise SiteSettingsError(
                f"there is no file {path}; give the site's {SITE_SETTINGS_FILE}"
            )
        patient.settings = settings = read_site_settings(path)
        client, experiment = patient.client, patient.experiment
        if client is not None and experiment is not None:
            settings.check_site(client, experiment.site_of(client))
        elif client is not None and not re.fullmatch(r"site-[0-9]+", client):
            settings.check_site(client, client)  # the simulator's names say nothing without a job
    except ValueError as error:
        patient.misread = True
        yield Finding(FAILED, "site settings", str(error))
        return
    stated = [f"{name}: {getattr(settings, name)}" for name in settings.model_fields_set]
    yield Finding(OK, "site settings", ", ".join(sorted(stated)) or "nothing is stated")


def _job(patient: _Patient) -> Findings:
    if patient.job is None:
        return
    try:
        settings = SiteSettings()
        with contextlib.suppress(SiteSettingsError):  # what is wrong is said of them by themselves
            if patient.settings_place is not None:
                settings = read_site_settings(patient.settings_place)
        patient.experiment = experiment = read_experiment(patient.job, settings.tasks)
        if patient.client is not None:
            experiment.site_of(patient.client)
    except (ValueError, InstallationError) as error:
        yield Finding(FAILED, "job", str(error))
        return
    required = experiment.fedbn_version
    fits = f"takes fedbn {required}, here {installed_version()}" if required else "takes any fedbn"
    yield Finding(OK, "job", f"{experiment.name} {fits}; sites {', '.join(experiment.sites)}")
    path = (patient.job if patient.job.is_dir() else patient.job.parent) / "app" / "config"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads((path / "config_fed_client.json").read_bytes())
        (patient.arguments,) = [
            component.get("args", {})
            for component in content["components"]
            if component["id"] == "learner"
        ]


def _device(patient: _Patient) -> Findings:
    if patient.misread:
        yield Finding(WARNING, "device", "not looked at: correct the site settings first")
        return
    setting = patient.settings.stated("device", patient.of_job("device") or "auto")
    try:
        choice = find_device(setting, site=patient.site or "?")
        facts = device_facts(choice)
    except (DeviceError, RuntimeError) as error:
        yield Finding(FAILED, "device", " ".join(str(error).split()))
        return
    yield Finding(OK, "device", f"{described(facts)}: {choice.reason} (device: {setting})")


def _store(patient: _Patient) -> Findings:
    if patient.misread:
        yield Finding(WARNING, "data store", "not looked at: correct the site settings first")
        return
    folder, source = patient.settings.store, f"local/{SITE_SETTINGS_FILE}"
    if folder is None:
        if patient.site is None:
            yield Finding(
                WARNING,
                "data store",
                "not looked at: neither a kit nor the site settings say which site this is",
            )
            return
        root = patient.of_job("data_root")
        source = "the job" if root else "FEDBN_DATA" if os.environ.get("FEDBN_DATA") else "default"
        folder = (Path(root).expanduser() if root else default_data_root()) / patient.site
    task = make_task(TASK_0_1) if patient.experiment is None else patient.experiment.task
    if patient.experiment is None and folder.exists() and not task.has_data(folder):
        yield Finding(
            WARNING,
            "data store",
            f"{folder} (from {source}) is looked into with --job alone: a job says what it holds",
        )
        return
    try:
        if not task.has_data(folder):
            raise DataError(f"no site store at {folder}, for task {task.name!r}")
        data = task.read(folder, patient.site or folder.stem)
        if patient.site is not None and data.site != patient.site:
            raise DataError(
                f"the store in {folder} is that of site {data.site!r}, not of {patient.site!r}; "
                "correct data in the site settings"
            )
        yield Finding(
            OK,
            "data store",
            f"{folder} (from {source}): {task.describe(data)}"
            + (", synthetic" if data.synthetic else ""),
        )
        data = task.read(folder, data.site, verify=True)
    except (DataError, OSError) as error:
        yield Finding(FAILED, "data store", f"{error} (from {source})")
        return
    patient.data = data
    yield Finding(OK, "data store", "every value is finite and every checksum is right")


def _startup_files(patient: _Patient) -> Findings:
    if patient.kit is None:
        return
    kit = patient.kit
    if not kit.is_signed():
        yield Finding(
            WARNING,
            "startup files",
            "they carry no signature, so that an edit is not noticed; ask the lead to provision "
            "with fedbn's SignedStartupBuilder (sites/project.yml)",
        )
    elif edited := kit.edited_files():
        yield Finding(
            FAILED,
            "startup files",
            f"not as the lead made them: {', '.join(edited)}; unpack the startup kit again, and "
            "change local/ alone",
        )
    else:
        yield Finding(OK, "startup files", "unedited, by the kit's signature")
    key = kit.client_key
    if not key.is_file():
        yield Finding(
            FAILED, "startup files", "startup/client.key is missing; unpack the startup kit again"
        )
    elif os.name == "posix" and stat.S_IMODE(key.stat().st_mode) & 0o077:
        yield Finding(
            WARNING,
            "startup files",
            f"other users of this machine can read startup/client.key; chmod 600 {key}",
        )


def _privacy(patient: _Patient) -> Findings:
    if patient.kit is None:
        return
    from fedbn.flare.startup_kit import StartupKitError, batch_norm_policies

    to_do = "put sites/hospital/privacy.json into the kit's local/"
    try:
        policies = batch_norm_policies(patient.kit)
    except StartupKitError as error:
        yield Finding(FAILED, "privacy", f"{error}; {to_do}")
        return
    without = sorted(scope for scope, found in policies.items() if not found)
    if not policies:
        yield Finding(
            FAILED,
            "privacy",
            f"no local/privacy.json with a scope: a job alone decides what leaves; {to_do}",
        )
    elif without:
        yield Finding(
            FAILED,
            "privacy",
            f"local/privacy.json has no BatchNormFilter in scope {', '.join(map(repr, without))}, "
            f"which any job may name; add it there, or {to_do}",
        )
    else:
        shown = ", ".join(sorted(set().union(*policies.values())))
        yield Finding(OK, "privacy", f"local/privacy.json keeps batch norm here (policy {shown})")
        yield from _privacy_of_job(patient, set().union(*policies.values()))


def _privacy_of_job(patient: _Patient, policies: set[str]) -> Findings:
    experiment = patient.experiment
    if experiment is None or experiment.algorithm.name == "alone":
        return
    kept = {"fedbn": 2, "silobn": 1, "none": 0}  # the more a policy keeps, the higher
    strictest = max(policies, key=lambda policy: kept[policy])
    if kept[strictest] > kept[experiment.policy]:
        yield Finding(
            WARNING,
            "privacy",
            f"the job's policy {experiment.policy!r} shares what this site's filter (policy "
            f"{strictest!r}) keeps, and its contributions would be refused; ask the lead for a job "
            "with policy 'fedbn', or decide to relax local/privacy.json",
        )


def _certificates(patient: _Patient) -> Findings:
    if patient.kit is None:
        return
    from fedbn.flare.startup_kit import StartupKitError

    try:
        certificates = patient.kit.certificates()
    except StartupKitError as error:
        yield Finding(FAILED, "certificates", str(error))
        return
    now = datetime.now(timezone.utc)
    for each in certificates:
        name = f"startup/{each.path.name} ({each.common_name})"
        if now >= each.valid_to:
            yield Finding(
                FAILED,
                "certificates",
                f"{name} expired on {each.valid_to:%Y-%m-%d}; ask the lead for a new startup kit",
            )
        elif now < each.valid_from:
            yield Finding(
                FAILED,
                "certificates",
                f"{name} is valid from {each.valid_from:%Y-%m-%d %H:%M} UTC, and the clock of this "
                f"machine says {now:%Y-%m-%d %H:%M} UTC; set the clock (NTP)",
            )
        elif each.valid_to - now < EXPIRES_SOON:
            yield Finding(
                WARNING,
                "certificates",
                f"{name} expires on {each.valid_to:%Y-%m-%d}; ask the lead for a new startup kit",
            )
        else:
            yield Finding(OK, "certificates", f"{name} is valid until {each.valid_to:%Y-%m-%d}")
    client = certificates[-1]
    if client.common_name != patient.kit.client:
        yield Finding(
            FAILED,
            "certificates",
            f"startup/client.crt is that of {client.common_name!r}, and the kit that of "
            f"{patient.kit.client!r}; unpack the startup kit again",
        )


def _clock(patient: _Patient) -> Findings:
    if patient.kit is None:
        return
    now = datetime.now(timezone.utc)
    files = [path for path in patient.kit.folder.rglob("*") if path.is_file()]
    newest = max((path.stat().st_mtime for path in files), default=0.0)
    written = datetime.fromtimestamp(newest, timezone.utc)
    if written - now > CLOCK_TOLERANCE:
        yield Finding(
            WARNING,
            "clock",
            f"a file of the kit was written at {written:%Y-%m-%d %H:%M} UTC, after the "
            f"{now:%Y-%m-%d %H:%M} UTC of this machine's clock; compare it with another's, set NTP",
        )
    else:
        yield Finding(OK, "clock", f"{now:%Y-%m-%d %H:%M} UTC, later than every file of the kit")


def _kit_folder(patient: _Patient) -> Findings:
    if patient.kit is None:
        return
    from fedbn.flare.job import SITES_FOLDER

    folder = patient.kit.folder / SITES_FOLDER
    looked_at = folder if folder.exists() else patient.kit.folder
    try:
        with tempfile.TemporaryFile(dir=looked_at) as file:
            file.write(b"fedbn")
    except OSError as error:
        yield Finding(
            FAILED,
            "state folder",
            f"{looked_at} cannot be written ({error.strerror}); this site keeps its batch norm "
            f"there: make it writable for the user who starts FLARE",
        )
        return
    free = shutil.disk_usage(looked_at).free
    sentence = f"{looked_at} is writable, {free / 2**30:.1f} GiB are free"
    if free < LEAST_DISK:
        yield Finding(FAILED, "state folder", f"{sentence}; make room for logs and models")
    elif free < LITTLE_DISK:
        yield Finding(WARNING, "state folder", f"{sentence}; make room for logs and models")
    else:
        yield Finding(OK, "state folder", sentence)


def _marks(patient: _Patient) -> Findings:
    if patient.kit is None:
        return
    folder = patient.kit.folder
    stale = [name for name in ("shutdown.fl", "restart.fl") if (folder / name).exists()]
    if stale:
        yield Finding(
            FAILED,
            "stale files",
            f"{' and '.join(stale)} of an earlier stop: the client would end right after its "
            f"start; rm {' '.join(str(folder / name) for name in stale)}",
        )
    else:
        yield Finding(OK, "stale files", "no shutdown.fl of an earlier stop")
    with contextlib.suppress(OSError, ValueError):
        pid = int((folder / "daemon_pid.fl").read_text())
        if _is_running(pid):
            yield Finding(WARNING, "client", f"a client runs already (process {pid})")


def _is_running(pid: int) -> bool:
    if os.name != "posix":
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _server(patient: _Patient) -> Findings:
    if patient.kit is None:
        return
    for server in patient.kit.servers:
        yield from _one_server(patient.kit, server)


def _one_server(kit: StartupKit, server: Server) -> Findings:
    place = f"{server.host}:{server.port}"
    for variable in ("grpc_proxy", "https_proxy", "http_proxy"):
        if os.environ.get(variable) and not urllib.request.proxy_bypass(server.host):
            yield Finding(
                WARNING,
                "server",
                f"the environment has {variable}, and FLARE's connection would go there; if that "
                f"is not meant, set no_proxy={server.host}",
            )
            break
    try:
        addresses = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
    except OSError as error:
        yield Finding(
            FAILED,
            "server",
            f"the name {server.host!r} is not known here ({error.strerror}); ask IT for DNS, or "
            "write it with the server's address into /etc/hosts",
        )
        return
    address = addresses[0][4][0]
    try:
        connection = socket.create_connection((server.host, server.port), timeout=SECONDS)
    except OSError as error:
        reason = error.strerror or f"no answer in {SECONDS:.0f} s"
        yield Finding(
            FAILED,
            "server",
            f"nobody answers at {place} ({address}): {reason}; ask the lead whether the server "
            f"runs, and IT to let this machine open TCP port {server.port} there",
        )
        return
    with connection:
        yield Finding(OK, "server", f"{place} ({address}) takes connections")
        if kit.security == "clear":
            yield Finding(
                WARNING,
                "server",
                "this kit's connection is not encrypted (connection_security: clear); ask the lead "
                "for mtls",
            )
            return
        yield from _encrypted(kit, server, connection)


def _encrypted(kit: StartupKit, server: Server, connection: socket.socket) -> Findings:
    """Shake hands as FLARE does: each side shows its certificate and asks for the other's."""
    try:
        context = ssl.create_default_context(cafile=str(kit.root_certificate))
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # FLARE's certificates are plainer
        if kit.security == "mtls":
            context.load_cert_chain(str(kit.client_certificate), str(kit.client_key))
    except (OSError, ssl.SSLError) as error:
        yield Finding(
            FAILED,
            "TLS",
            f"the kit's certificate and key cannot be used ({_reason(error)}); unpack the startup "
            "kit again",
        )
        return
    if server.scheme == "grpc":
        context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(connection, server_hostname=server.host) as secure:
            certificate = secure.getpeercert() or {}
            until = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
            yield Finding(
                OK,
                "TLS",
                f"{secure.version()}; the server's certificate fits {server.host!r}, this project "
                f"and this clock, and is valid until {_day(until)}",
            )
            if until - time.time() < EXPIRES_SOON.total_seconds():
                yield Finding(
                    WARNING,
                    "TLS",
                    f"the server's certificate expires on {_day(until)}; tell the lead",
                )
            yield from _answer(server, secure)
    except ssl.SSLCertVerificationError as error:
        yield Finding(
            FAILED,
            "TLS",
            f"the server's certificate is refused: {error.verify_message}; ask the lead for a "
            "startup kit of this server (or compare this machine's clock, if it is about dates)",
        )
    except (ssl.SSLError, OSError) as error:
        yield Finding(
            FAILED,
            "TLS",
            f"the server ends the connection ({_reason(error)}); something else may answer at this "
            "port, or a firewall opens TLS: ask IT to let it through untouched",
        )


def _answer(server: Server, secure: ssl.SSLSocket) -> Findings:
    """Read what the server says after the handshake: a refusal, or the time by its clock.

    Under TLS 1.3 a client has shaken hands before the server has looked at its certificate. A gRPC
    server then speaks first, or ends the connection without a word.
    """
    is_http = server.scheme in ("http", "https")
    refused = False
    text = b""
    secure.settimeout(SECONDS if is_http else 2.0)
    try:
        if is_http:
            secure.sendall(f"GET / HTTP/1.1\r\nHost: {server.host}\r\n\r\n".encode())
        text = secure.recv(4096)
        refused = not text
    except TimeoutError:  # it waits for more: neither yes nor no
        return
    except OSError:
        refused = True
    if refused:
        yield Finding(
            FAILED,
            "TLS",
            "the server ends the connection when it sees this site's certificate; ask the lead for "
            "a new startup kit",
        )
        return
    yield Finding(OK, "TLS", "the server takes this site's certificate")
    for line in text.decode("latin-1").splitlines() if is_http else ():
        if line.lower().startswith("date:"):
            with contextlib.suppress(ValueError, TypeError):
                there = email.utils.parsedate_to_datetime(line.partition(":")[2].strip())
                yield _offset(datetime.now(timezone.utc) - there)


def _offset(offset: timedelta) -> Finding:
    seconds = offset.total_seconds()
    words = f"{abs(seconds):.0f} s {'after' if seconds > 0 else 'before'} the server's"
    if abs(offset) > CLOCK_TOLERANCE:
        return Finding(WARNING, "clock", f"this machine's clock is {words}; set NTP on both")
    return Finding(OK, "clock", f"this machine's clock is {words}")


def _reason(error: OSError) -> str:
    return str(getattr(error, "reason", None) or error.strerror or error)


def _day(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d}"


def _job_and_store(patient: _Patient) -> Findings:
    """Do what the job's preflight does at this site, without any server."""
    if patient.experiment is None:
        return
    from fedbn.federation.site import Site

    try:
        check_allowed(patient.experiment.network.name, patient.settings.networks)
        if patient.data is None or patient.site is None:
            return
        site = Site(patient.site, patient.data, patient.experiment)
        site.check_network()
    except (ValueError, RuntimeError, ArithmeticError, OSError) as error:
        yield Finding(FAILED, "job and store", " ".join(str(error).split()))
        return
    facts = site.preparation.facts
    if doubt := site.partition.warning():
        yield Finding(WARNING, "network", doubt)
    yield Finding(
        OK,
        "job and store",
        f"the job can train here: {facts['n_train_subjects']} subjects to train on, "
        f"{facts['n_test_subjects']} held out; "
        + "; ".join([*site.task.remarks(facts), site.partition.describe()]),
    )
