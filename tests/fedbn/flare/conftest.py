"""FLARE's contexts and engine in memory: components as they are, without any process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from fedbn.flare.aggregator import FedBNAggregator
from fedbn.flare.job import ACCEPTED, BEST, PREPARED, PURPOSE, REPORT
from fedbn.flare.learner import FedBNLearner
from fedbn.flare.persistor import SharedModelPersistor
from fedbn.flare.workflow import FedBNWorkflow

SITES = ("NYU", "UM", "USM")


@pytest.fixture(autouse=True)
def _no_search_for_garbage(request, monkeypatch):
    """Leave out the full collection after each round, but where memory is what is looked at."""
    if "memory" not in request.node.nodeid:
        quick = SimpleNamespace(get_freeze_count=lambda: 1, collect=lambda: 0)
        monkeypatch.setattr("fedbn.flare.job.gc", quick)


class Workspace:
    def __init__(self, root: Path):
        self.root = root

    def get_root_dir(self):
        return str(self.root)

    def get_site_config_dir(self):
        return str(self.root / "local")

    def get_run_dir(self, job):
        return str(self.root / job)

    def get_app_dir(self, job):
        return str(self.root / job / "app")

    def get_app_config_dir(self, job):
        return str(self.root / job / "app" / "config")


class Engine:
    """Knows components, and remembers the events that are fired, with their data."""

    def __init__(self, root: Path, **components):
        self.workspace = Workspace(root)
        self.components = components
        self.events = []

    def get_workspace(self):
        return self.workspace

    def get_component(self, name):
        return self.components.get(name)

    def get_clients(self):
        return []

    def fire_event(self, event_type, fl_ctx):
        self.events.append((event_type, fl_ctx.get_prop(FLContextKey.EVENT_DATA)))

    @property
    def panics(self):
        return [data for kind, data in self.events if kind == EventType.FATAL_SYSTEM_ERROR]


@pytest.fixture
def make_context(tmp_path, write_experiment):
    """Deploy an experiment to one FLARE process and return its context."""

    def make(experiment, name="server", job="job-1", **components):
        root = tmp_path / "workspaces" / name
        write_experiment(root / job / "app" / "config", experiment)
        context = FLContext()
        context.set_prop(ReservedKey.ENGINE, Engine(root, **components), private=True, sticky=False)
        context.set_prop(ReservedKey.RUN_NUM, job, private=False, sticky=True)
        context.set_prop(ReservedKey.IDENTITY_NAME, name, private=False, sticky=True)
        app = str(root / job / "app")
        context.set_prop(FLContextKey.APP_ROOT, app, private=True, sticky=True)
        return context

    return make


@pytest.fixture
def make_persistor(make_context):
    def make(experiment, **arguments):
        persistor = SharedModelPersistor(**arguments)
        context = make_context(experiment, persistor=persistor)
        persistor.handle_event(EventType.START_RUN, context)
        return persistor, context

    return make


class Client:
    """One site's learner; `restart` builds it anew, as the simulator does for every task."""

    def __init__(self, make_context, experiment, name, job, **arguments):
        self.make = lambda: (FedBNLearner(**arguments), make_context(experiment, name, job))
        self.restart()

    def restart(self):
        self.learner, context = self.make()
        self.engine = context.get_engine()
        self.learner.fl_ctx = context
        self.learner.engine = self.engine
        self.learner.site_name = context.get_identity_name()
        self.learner.job_id = context.get_job_id()
        self.learner.workspace_root = self.engine.get_workspace().get_root_dir()
        self.learner.abort_signal = Signal()

    @property
    def state_folder(self):
        (folder,) = Path(self.learner.workspace_root).glob(f"fedbn_sites/{self.learner.job_id}/*")
        return folder

    def ask(self, purpose, params=None, number=0, prepared=(), accepted=None, best=None):
        """Send one task, and return the report of the answer and the answer."""
        message = FLModel(
            params_type=None if params is None else ParamsType.FULL,
            params=params,
            metrics={} if params is None else None,
            current_round=number,
            meta={
                REPORT: {
                    PURPOSE: purpose,
                    "prepared": list(prepared),
                    "last accepted": accepted or {},
                    BEST: best,
                }
            },
        )
        task = self.learner.train if purpose == "train" else self.learner.validate
        answer = task(message)
        return answer.meta[REPORT], answer


@pytest.fixture
def make_client(make_context, data_root):
    def make(experiment, name="NYU", job="job-1", **arguments):
        arguments = {"data_root": str(data_root), **arguments}
        return Client(make_context, experiment, name, job, **arguments)

    return make


class Rehearsal(FedBNWorkflow):
    """The workflow with clients in memory: FLARE's broadcast is a call of each client."""

    clients: dict
    asked: list
    standing = frozenset()
    deadline = 0
    ticks = 0

    def broadcast_model(self, data, task_name, targets, callback, timeout, **_):
        self.standing, self.deadline, self.ticks = set(targets), timeout, 0
        self.asked.append((data.meta[REPORT], data))
        for name in targets:
            answer = self.clients[name](data.meta[REPORT][PURPOSE], data)
            if answer is None:  # nothing comes
                continue
            if isinstance(answer, FLModel):
                answer.meta["client_name"] = name
                callback(answer)
            else:
                self._accept_train_result(name, answer, self.fl_ctx)
            self.standing.discard(name)

    def get_num_standing_tasks(self):
        self.ticks += 1
        if self.ticks > self.deadline * 10:  # ten looks a second, in quick motion
            self.standing = set()
        return int(bool(self.standing))

    def cancel_all_tasks(self, *_, **__):
        self.standing = set()


@pytest.fixture
def good_client(make_client, experiment, write_store, data_root):
    """Return a function that makes a client which answers all tasks as it should."""
    write_store(data_root / "USM", "USM")

    def make(name, job="job-1", **changes):
        client = make_client(experiment(sites=SITES, **changes), name, job)

        def answer(purpose, data):
            report = data.meta[REPORT]
            prepared, accepted = report[PREPARED], report[ACCEPTED]
            told = (prepared, accepted, report[BEST])
            return client.ask(purpose, data.params, data.current_round, *told)[1]

        answer.client = client
        return answer

    return make


@pytest.fixture
def make_workflow(make_context, experiment, good_client):
    def make(arguments=None, connected=SITES, job="job-1", initial_weights=None, **changes):
        persistor, aggregator = SharedModelPersistor(initial_weights), FedBNAggregator()
        context = make_context(
            experiment(sites=SITES, **changes), job=job, persistor=persistor, aggregator=aggregator
        )
        engine = context.get_engine()
        persistor.handle_event(EventType.START_RUN, context)
        aggregator.handle_event(EventType.START_RUN, context)
        engine.get_clients = lambda: [SimpleNamespace(name=name) for name in connected]
        workflow = Rehearsal(**{"grace_seconds": 0, **(arguments or {})})
        workflow.asked = []
        workflow.clients = {
            name: good_client(name, job, **changes) for name in connected if name in SITES
        }
        workflow.start_controller(context)
        workflow.abort_signal = Signal()
        workflow._task_check_period = 0.001
        return workflow

    return make
