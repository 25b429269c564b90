"""Real `nvflare simulator` processes, each in its own session, none of which is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from deployment import deployed

from fedbn.federation.changes import with_changes
from fedbn.federation.experiment import read_experiment
from fedbn.federation.job_folder import write_job
from fedbn.federation.simulation import read_sites, run_federation
from fedbn.study.methods import flare_experiment

REPOSITORY = Path(__file__).parents[2]
JOB = REPOSITORY / "jobs" / "abide_fedbn"
N_ROIS = 12
N_EDGES = N_ROIS * (N_ROIS - 1) // 2
SECONDS = 240

SMALL = {
    "sites": ["NYU", "UM"],
    "network": {"name": "ConnectomeMLP", "args": {"in_features": N_EDGES, "hidden": [8]}},
    "rounds": 2,
    "n_folds": 4,
    "seed": 5,
    "compare_with_alone": False,
    "training": {"batch_size": 16, "local_epochs": 1, "learning_rate": 0.01},
}

RECIPE = """
import sys

from nvflare.recipe import SimEnv

from fedbn.flare.recipe import FedBNRecipe

job, folder, *clients = sys.argv[1:]
recipe = FedBNRecipe(job, name="workspace")
run = recipe.run(SimEnv(clients=clients, workspace_root=folder))
assert run.get_result() == folder + "/workspace"
"""

RECORDER = '''
import os
import sys

FOLDER = os.environ.get("FRAMES_FOLDER")


class Hook:
    """Wraps the one method through which each message of a process leaves it."""

    name = "nvflare.fuel.f3.sfm.sfm_conn"

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            send = module.SfmConnection.__init__

            def init(connection, conn, *args, **kwargs):
                frame = conn.send_frame

                def recorded(data):
                    with open(os.path.join(FOLDER, f"{os.getpid()}.bin"), "ab") as file:
                        file.write(bytes(data))
                    return frame(data)

                conn.send_frame = recorded
                send(connection, conn, *args, **kwargs)

            module.SfmConnection.__init__ = init

        spec.loader.exec_module = exec_module
        return spec


if FOLDER:
    sys.meta_path.insert(0, Hook())
'''


def processes_marked(mark):
    """Return the living processes that were started with a mark in their environment.

    FLARE's simulator gives each client a session of its own, so that the group does not hold them.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


@dataclass
class Running:
    """A process that leads its own session, and all that it starts, known by their mark."""

    process: subprocess.Popen
    log: Path
    mark: str
    started: float = field(default_factory=time.monotonic)

    @property
    def output(self):
        return self.log.read_text(errors="replace")

    def wait(self, seconds=SECONDS):
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds} s:\n{self.output[-4000:]}")

    def wait_until(self, condition, seconds=SECONDS):
        """Wait for a condition; folders that it looks into may come and go meanwhile."""
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(FileNotFoundError):
                if condition():
                    return
            if self.process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"ended or waited in vain:\n{self.output[-4000:]}")
            time.sleep(0.02)

    def kill(self):
        """End the group and all clients at once, as a power cut would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        end = time.monotonic() + 30
        while (left := processes_marked(self.mark)) and time.monotonic() < end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self.process.wait(30)
        assert not left, f"processes {left} are still there"


def skip_where_flare_cannot_start():
    if len(sys.executable.split()) > 1:
        pytest.skip(f"FLARE splits the commands of its processes at blanks: {sys.executable}")


@contextlib.contextmanager
def started(command, log, *, cwd, **environment):
    skip_where_flare_cannot_start()
    mark = f"FEDBN_TEST_RUN={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    kept = {k: v for k, v in os.environ.items() if k not in ("FEDBN_DATA", "FRAMES_FOLDER")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=cwd,
            env={**kept, "OMP_NUM_THREADS": "1", **environment, name: value},
            start_new_session=True,
        )
    running = Running(process, log, mark)
    try:
        yield running
    finally:
        running.kill()


@dataclass
class Simulation:
    """A job folder, a data root and a workspace, and what a run of it left."""

    folder: Path
    data: Path
    experiment: object
    code: int | None = None
    output: str = ""

    @property
    def job(self):
        return self.folder / "job"

    @property
    def workspace(self):
        return self.folder / "workspace"

    @property
    def run_folder(self):
        return self.workspace / "server" / "simulate_job"

    @property
    def results(self):
        return json.loads((self.run_folder / "results.json").read_text())

    @property
    def shared_file(self):
        return self.run_folder / "app_server" / "FL_global_model.pt"

    def state(self, site):
        (found,) = self.workspace.glob(f"*/fedbn_sites/simulate_job/{site}")
        return found

    def frames(self, name="frames"):
        return {int(path.stem): path.read_bytes() for path in (self.folder / name).iterdir()}

    @contextlib.contextmanager
    def start(self, *options, record=False):
        nvflare = str(Path(sys.executable).with_name("nvflare"))
        command = [nvflare, "simulator", str(self.job), "-w", str(self.workspace), *options]
        environment = {"FEDBN_DATA": str(self.data)}
        if record:
            hooks, frames = self.folder / "hooks", self.folder / "frames"
            hooks.mkdir()
            frames.mkdir()
            (hooks / "sitecustomize.py").write_text(RECORDER)
            paths = [str(hooks), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment |= {"PYTHONPATH": os.pathsep.join(paths), "FRAMES_FOLDER": str(frames)}
        with started(command, self.folder / "log.txt", cwd=self.folder, **environment) as running:
            yield running

    def run(self, *options, record=False):
        with self.start(*options, record=record) as running:
            self.code = running.wait()
        self.output = running.output
        return self

    def run_recipe(self, *clients):
        """Run the job's experiment by FLARE's Recipe API, in the same workspace."""
        command = [sys.executable, "-c", RECIPE, str(self.job), str(self.folder), *clients]
        log, environment = self.folder / "log.txt", {"FEDBN_DATA": str(self.data)}
        with started(command, log, cwd=self.folder, **environment) as running:
            self.code = running.wait()
        self.output = running.output
        return self

    def succeeded(self):
        assert self.code == 0, self.output[-4000:]
        return self


@pytest.fixture(scope="session")
def data(tmp_path_factory, write_store):
    """The stores of three sites, of different sizes."""
    root = tmp_path_factory.mktemp("stores with blanks") / "data"
    for site, n_subjects in (("NYU", 20), ("UM", 16), ("USM", 24)):
        write_store(root / site, site, n_subjects=n_subjects)
    return root


@pytest.fixture(scope="session")
def simulation(tmp_path_factory, data):
    """Make a small job like the main one; `learner` is code for app/custom, `changes` as --set."""

    def make(*, stores=data, learner=None, workflow=None, method="fedbn", **changes):
        folder = tmp_path_factory.mktemp("run")
        experiment = flare_experiment(method, read_experiment(JOB)).changed(name="abide_fedbn")
        write_job(JOB, folder / "job", with_changes(experiment, SMALL | changes))
        config = folder / "job" / "app" / "config"
        if learner is not None:
            module = folder / "job" / "app" / "custom" / "abide_fedbn_job" / "learner.py"
            module.write_text(textwrap.dedent(learner))
            client = config / "config_fed_client.json"
            text = client.read_text()
            client.write_text(
                text.replace("fedbn.flare.learner.FedBNLearner", "abide_fedbn_job.learner.Learner")
            )
        if workflow is not None:
            server = config / "config_fed_server.json"
            content = json.loads(server.read_text())
            content["workflows"][0]["args"] |= workflow
            server.write_text(json.dumps(content))
        return Simulation(folder, stores, read_experiment(folder / "job"))

    return make


@pytest.fixture(scope="session")
def simulation_of():
    """Take the job folder that is there, as ``job`` in a folder, with the stores of a data root."""

    def make(folder, stores):
        return Simulation(folder, stores, read_experiment(folder / "job"))

    return make


@pytest.fixture(scope="session")
def in_process():
    """Run the same experiment without FLARE, on one thread as the job does."""

    def run(simulation, **changes):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            experiment = simulation.experiment.changed(**changes)
            return run_federation(experiment, read_sites(simulation.data, experiment))
        finally:
            torch.set_num_threads(threads)

    return run


@pytest.fixture(scope="session")
def fedbn_run(simulation):
    """One undisturbed run of the main job's wiring, one thread a client, its messages recorded."""
    return simulation().run("-n", "2", "-t", "2", record=True).succeeded()


@pytest.fixture(scope="session")
def fedavg_run(simulation):
    """The same with policy "none", where batch norm travels."""
    return simulation(policy="none").run("-n", "2", "-t", "2", record=True).succeeded()


@pytest.fixture(scope="session")
def deployment(tmp_path_factory, write_store):
    """A server and four hospitals over TLS, started once for all tests that need them."""
    skip_where_flare_cannot_start()
    folder = tmp_path_factory.mktemp("deployment")
    stores = folder / "stores with blanks"
    for site, n_subjects in (("NYU", 20), ("USM", 24), ("UM", 16), ("UCLA", 12)):
        write_store(stores / site, site, n_subjects=n_subjects)
    with deployed(folder, stores, recorder=RECORDER) as running:
        yield running
