"""A provisioned FLARE system on this machine: a server, four hospitals and people, over TLS.

Every process is started by the kits' own scripts, carries a mark in its environment, and is found
again and ended by that mark: none is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

REPOSITORY = Path(__file__).parents[2]
SITES_FOLDER = REPOSITORY / "sites"
SITES = ("NYU", "USM", "UM", "UCLA")
SERVER = "fedbn-server"
LEAD, ADMIN, MEMBER = "lead@fedbn.org", "admin@fedbn.org", "member@fedbn.org"
MARK = "FEDBN_TEST_RUN"
SECONDS = 240
ENDED = "FINISHED"


def free_port() -> int:
    """Return a TCP port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def environment_of(pid: int) -> dict[str, str]:
    """Return a process's environment; empty if it has ended or is another user's."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(item.partition("=")[::2] for item in text.split("\0") if item)


def command_of(pid: int) -> list[str]:
    """Return a process's command line; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


class Console:
    """FLARE's admin console on a terminal, as a person at the keyboard has it."""

    PROMPT = "> "

    def __init__(self, terminal: int):
        self.terminal = terminal

    def read_until(self, sign: str, seconds: float = 60) -> str:
        """Return what appears on the screen up to a sign."""
        text = ""
        end = time.monotonic() + seconds
        while sign not in text:
            assert time.monotonic() < end, f"no {sign!r} on the screen within {seconds} s:\n{text}"
            if select.select([self.terminal], [], [], 0.2)[0]:
                text += os.read(self.terminal, 65536).decode(errors="replace")
        return text

    def type(self, line: str, until: str = PROMPT) -> str:
        """Type a line and return the answer."""
        os.write(self.terminal, f"{line}\n".encode())
        return self.read_until(until)


class Deployment:
    """Startup kits, the processes that they start, and what people do with them.

    Parameters
    ----------
    folder
        An empty folder for everything.
    data
        Folder with one site store per site.
    sites
        Clients that `start` starts.
    recorder
        Python code that every process runs first, with $FRAMES_FOLDER to write to.
    """

    def __init__(
        self, folder: Path, data: Path, sites: tuple[str, ...] = SITES, recorder: str = ""
    ):
        self.folder = folder
        self.data = data
        self.sites = sites
        self.frames = folder / "frames"
        self.frames.mkdir()
        self.hooks = folder / "hooks"
        self.hooks.mkdir()
        (self.hooks / "sitecustomize.py").write_text(recorder)
        self.port = free_port()
        self.mark = uuid.uuid4().hex

    # Kits

    def provision(self, name: str = "fedbn", folder: str = "workspace") -> Path:
        """Run `nvflare provision` on a copy of sites/project.yml; return the folder of its kits."""
        project = yaml.safe_load((SITES_FOLDER / "project.yml").read_text())
        project["name"] = name
        for participant in project["participants"]:
            if participant["type"] == "server":
                participant["fed_learn_port"] = self.port
        project["participants"].append(
            {"name": MEMBER, "type": "admin", "org": "nyu", "role": "member"}
        )
        file = self.folder / f"{name}.yml"
        file.write_text(yaml.safe_dump(project, sort_keys=False))
        self.call("nvflare", "provision", "-p", str(file), "-w", str(self.folder / folder))
        return self.folder / folder / name / "prod_00"

    @property
    def kits(self) -> Path:
        return self.folder / "workspace" / "fedbn" / "prod_00"

    def kit(self, name: str) -> Path:
        """Return the startup kit of the server, a site or a person."""
        return self.kits / name

    def install(self, site: str, *, data: Path | None = None, strict: bool = False) -> None:
        """Put a site's own settings into its kit, as its README says; only the data folder differs.

        Jobs see a change of the data folder at once, the site's process `strict` after a restart.
        """
        local = self.kit(site) / "local"
        for file in (SITES_FOLDER / "hospital").glob("*.json"):
            shutil.copy(file, local)
        if strict:
            shutil.copy(SITES_FOLDER / "hospital" / "strict" / "authorization.json", local)
        settings = yaml.safe_load((SITES_FOLDER / site / "fedbn_site.yml").read_text())
        settings["data"] = str(data or self.data / site)
        (local / "fedbn_site.yml").write_text(yaml.safe_dump(settings))

    def install_server(self) -> None:
        """Put the server's own settings into its kit; its storage goes below the folder."""
        file = self.kit(SERVER) / "local" / "resources.json"
        resources = json.loads((SITES_FOLDER / "server" / "resources.json").read_text())
        file.write_text(json.dumps(resources | {"storage": str(self.storage)}))

    @property
    def storage(self) -> Path:
        return self.folder / "storage"

    # Processes

    def environment(self, **changes: str) -> dict[str, str]:
        """Return the environment of every process: this Python first, and the mark."""
        kept = {k: v for k, v in os.environ.items() if k not in ("FEDBN_DATA", "FRAMES_FOLDER")}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        home = self.folder / "home"  # `nvflare` keeps a configuration in the home folder
        home.mkdir(exist_ok=True)
        return {
            **kept,
            "PATH": path,
            "HOME": str(home),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(self.hooks), kept.get("PYTHONPATH")])),
            "FRAMES_FOLDER": str(self.frames),
            MARK: self.mark,
            **changes,
        }

    def call(self, *command: str, seconds: int = SECONDS, check: bool = True) -> str:
        """Run a command to its end and return what it printed."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0 or not check, f"{command}:\n{done.stdout}"
        return done.stdout

    def start_one(self, name: str, kit: Path | None = None, *options: str, **environment: str):
        """Run a kit's start.sh (with options: its sub_start.sh in the foreground)."""
        kit = kit or self.kit(name)
        (kit / "shutdown.fl").unlink(missing_ok=True)
        script = "sub_start.sh" if options else "start.sh"
        with (self.folder / f"{name}.out").open("ab") as output:
            return subprocess.Popen(
                [str(kit / "startup" / script), *options],
                cwd=self.folder,
                env=self.environment(FEDBN_TEST_KIT=str(kit), **environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start(self) -> None:
        """Provision, install, start the server and all sites, and wait until they are connected."""
        self.provision()
        self.install_server()
        for site in self.sites:
            self.install(site)
        for name in (SERVER, *self.sites):
            self.start_one(name)
        self.wait_for_clients()

    def restart(self, name: str, **environment: str) -> None:
        """Start the server or a site (again), and wait until it is back and all are connected."""
        self.kill(name)
        for stale in ("pid.fl", "daemon_pid.fl"):
            (self.kit(name) / stale).unlink(missing_ok=True)
        before = self.starts(name)
        self.start_one(name, **environment)
        self.wait_until(lambda: self.starts(name) > before, 60, f"{name} did not start again")
        self.wait_for_clients()

    def starts(self, name: str) -> int:
        """Return how often the server has started, or the server has registered this site."""
        sign = "Server started" if name == SERVER else f"Client: New client {name}@"
        return self.log(SERVER).count(sign)

    def stop(self, name: str, seconds: int = 40) -> None:
        """Stop a server or site the way that the README tells: `touch shutdown.fl`."""
        (self.kit(name) / "shutdown.fl").touch()
        self.wait_until(lambda: not self.pids(name), seconds, f"{name} did not stop")

    def pids(self, name: str | None = None, job: str | None = None) -> list[int]:
        """Return the living processes of this deployment, of one kit, or of one kit's job.

        A job's process is the one that FLARE starts at a site (or the server) for this job.
        """
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or not is_alive(int(entry.name)):
                continue
            pid = int(entry.name)
            environment = environment_of(pid)
            if environment.get(MARK) != self.mark:
                continue
            if name is not None and environment.get("FEDBN_TEST_KIT") != str(self.kit(name)):
                continue
            if job is not None and job not in command_of(pid):
                continue
            found.append(pid)
        return found

    def kill(self, name: str | None = None, job: str | None = None, seconds: int = 30) -> None:
        """End processes at once, as a power cut would: all, those of a kit, or of its job there.

        Without a job the script that would start a site again after five seconds ends, too.
        """
        end = time.monotonic() + seconds
        while left := self.pids(name, job):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < end, f"processes {left} are still there"
            time.sleep(0.05)

    def wait_until(self, condition, seconds: float = SECONDS, what: str = "waited in vain") -> Any:
        """Wait until a condition is true and return its value; fail with the logs' ends."""
        end = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < end, f"{what} after {seconds} s\n{self.ends_of_logs()}"
            time.sleep(0.3)
        return value

    # What people do

    @contextlib.contextmanager
    def session(self, user: str = LEAD, timeout: float = 30) -> Iterator[Session]:
        """Open a session of FLARE's Python API; it is closed whatever happens."""
        session = new_secure_session(user, str(self.kit(user)), timeout=timeout)
        try:
            yield session
        finally:
            session.close()

    @contextlib.contextmanager
    def console(self, user: str = LEAD) -> Iterator[Console]:
        """Open the admin console of a person's kit, log in, and leave it at the end."""
        terminal, screen = pty.openpty()
        process = subprocess.Popen(
            [str(self.kit(user) / "startup" / "fl_admin.sh")],
            cwd=self.folder,
            env=self.environment(),
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
        )
        os.close(screen)
        console = Console(terminal)
        try:
            console.read_until("User Name: ")
            console.type(user)
            yield console
            os.write(terminal, b"bye\n")
            process.wait(30)
        finally:
            process.kill()
            process.wait()
            os.close(terminal)

    def command(self, *words: str, user: str = LEAD, **options: Any) -> str:
        """Run `nvflare job …` with a person's startup kit and return what it printed."""
        return self.call("nvflare", "job", *words, "--startup-kit", str(self.kit(user)), **options)

    def clients(self, session: Session) -> set[str]:
        return {client.name for client in session.get_system_info().client_info}

    def wait_for_clients(self, sites: tuple[str, ...] | None = None, seconds: int = 90) -> None:
        """Wait until the server counts all sites (or these) among its clients."""
        expected = set(sites or self.sites)
        self.wait_until(lambda: self.starts(SERVER), seconds, "the server did not start")
        with self.session() as session:
            self.wait_until(
                lambda: expected <= self.clients(session), seconds, f"not all of {expected}"
            )

    def copy_of(self, job: Path, name: str = "job") -> Path:
        """Copy a job folder for submitting: FLARE signs what is submitted, in place."""
        folder = self.folder / "submitted" / uuid.uuid4().hex[:8] / name
        shutil.copytree(job, folder, ignore=shutil.ignore_patterns("__pycache__"))
        return folder

    def submit(self, job: Path, user: str = LEAD) -> str:
        """Submit a copy of a job folder through FLARE's Python API; return the job's id."""
        with self.session(user) as session:
            return session.submit_job(str(self.copy_of(job)))

    def status(self, job_id: str) -> str:
        """Return FLARE's word for where a job is, as SUBMITTED, RUNNING, FINISHED:COMPLETED."""
        with self.session() as session:
            return str(session.get_job_meta(job_id)["status"])

    def wait(self, job_id: str, seconds: float = SECONDS, status: str = ENDED) -> str:
        """Wait until a job's status begins with a word, by default until it has ended."""
        with self.session() as session:
            return self.wait_until(
                lambda: (
                    (word := str(session.get_job_meta(job_id)["status"])).startswith(
                        (status, ENDED)
                    )
                    and word
                ),
                seconds,
                f"job {job_id} is not {status}",
            )

    def abort(self, job_id: str) -> None:
        with self.session() as session:
            session.abort_job(job_id)

    def download(self, job_id: str, user: str = LEAD) -> Path:
        """Download a job's result as this person; return the folder."""
        with self.session(user) as session:
            return Path(session.download_job_result(job_id, str(self.folder / "downloads")))

    def results(self, job_id: str) -> dict[str, Any]:
        """Download a job's result and read its results.json."""
        return json.loads((self.download(job_id) / "workspace" / "results.json").read_text())

    # Logs

    def log(self, name: str) -> str:
        """Return the log of the server or a site; jobs have their own, see `job_log`."""
        file = self.kit(name) / "log.txt"
        return file.read_text(errors="replace") if file.exists() else ""

    def job_log(self, name: str, job_id: str) -> str:
        """Return the log of a job at the server or a site, while it runs and after.

        At its end FLARE moves the server's folder of a job into the storage, zipped.
        """
        file = self.kit(name) / job_id / "log.txt"
        stored = self.storage / "jobs" / job_id / "workspace"
        if file.exists():
            return file.read_text(errors="replace")
        if name == SERVER and stored.exists():
            with zipfile.ZipFile(stored) as archive:
                return archive.read("log.txt").decode(errors="replace")
        return ""

    def state(self, site: str, job_id: str) -> Path:
        """Return the folder in which a site keeps its own batch norm of a job."""
        return self.kit(site) / "fedbn_sites" / job_id / site

    def ends_of_logs(self, characters: int = 1500) -> str:
        outputs = [*sorted(self.folder.glob("*.out")), *sorted(self.folder.glob("*.log"))]
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-characters:]}" for path in outputs
        )


def job_id_in(text: str) -> str:
    """Return the job id that FLARE has printed."""
    found = re.search(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", text)
    assert found, text
    return found[0]


@contextlib.contextmanager
def deployed(
    folder: Path, data: Path, sites: tuple[str, ...] = SITES, recorder: str = ""
) -> Iterator[Deployment]:
    """Start a whole system, and end every process of it whatever happens."""
    deployment = Deployment(folder, data, sites, recorder)
    try:
        deployment.start()
        yield deployment
    finally:
        deployment.kill()
