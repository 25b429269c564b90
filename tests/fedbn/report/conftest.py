"""A small comparison and a small run, made once for all tests of the report."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser

import pytest

from data_prep.files import write_json
from fedbn.federation.experiment import Experiment
from fedbn.federation.simulation import read_sites, run_federation
from fedbn.federation.site import Site
from fedbn.federation.site_state import SiteState, network_fingerprint
from fedbn.report import figures
from fedbn.report.html import table_html
from fedbn.report.writing import write_report
from fedbn.study import comparison, execution
from fedbn.study.plan import plan_comparison

N_EDGES = 66
JOB = "a_job"


@pytest.fixture(scope="session", autouse=True)
def _quick():
    """Coarse pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "_DPI", 50)
        yield


class Reader(HTMLParser):
    """Collects what a test asks of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self.captions, self._in = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "link", "img", "br"}:
            self._in.append(tag)
        if tag == "caption":
            self.captions.append("")

    def handle_endtag(self, tag):
        assert self._in.pop() == tag, f"<{tag}> is not closed where it should be"

    def handle_data(self, data):
        self.text.append(data)
        if "caption" in self._in:
            self.captions[-1] += data

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="session")
def read_page():
    return lambda path: Reader(path.read_text())


@pytest.fixture(scope="session")
def as_html():
    return lambda table: Reader(table_html(table))


@pytest.fixture(scope="session")
def settings():
    return Experiment(
        name="small",
        sites=("NYU", "UM"),
        network={"args": {"in_features": N_EDGES, "hidden": [8]}},
        rounds=2,
        training={"batch_size": 16, "local_epochs": 1, "learning_rate": 0.01},
        n_folds=2,
        seed=0,
    )


@pytest.fixture(scope="session")
def stores_root(tmp_path_factory, write_store):
    root = tmp_path_factory.mktemp("report") / "data"
    write_store(root / "NYU", "NYU", n_subjects=64)
    write_store(root / "UM", "UM", n_subjects=40)
    return root


def in_this_process(tasks, _processes):
    for task in tasks:
        execution.do(task)
        yield from (unit.run for unit in task.units)


def make_comparison(out, settings, root, methods):
    plan = plan_comparison(settings, methods, n_seeds=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "execute", in_this_process)
        execution._read.cache_clear()
        comparison.compare(plan, root, out)
    return out


@pytest.fixture(scope="session")
def compare_methods():
    return make_comparison


@pytest.fixture(scope="session")
def compared(tmp_path_factory, settings, stores_root):
    """A finished comparison of three methods at two sites."""
    out = tmp_path_factory.mktemp("report") / "comparison"
    return make_comparison(out, settings, stores_root, ["singleset", "fedavg", "fedbn"])


@pytest.fixture(scope="session")
def made_up(tmp_path_factory, settings, write_store):
    """A data root of made-up subjects, and a comparison on it."""
    folder = tmp_path_factory.mktemp("report")
    for site in settings.sites:
        write_store(folder / "data" / site, site, n_subjects=64, synthetic=True)
    out = make_comparison(folder / "out", settings, folder / "data", ["fedavg", "fedbn"])
    return folder / "data", out


@pytest.fixture(scope="session")
def results(settings, stores_root):
    """What ``fedbn run`` gives of the same experiment, with its federation's result."""
    return run_federation(settings, read_sites(stores_root, settings))


@pytest.fixture(scope="session")
def workspace(tmp_path_factory, settings, stores_root, results):
    """A folder as a FLARE run leaves it: results at the server, a model at each site."""
    folder = tmp_path_factory.mktemp("report") / "workspace"
    for k, (name, store) in enumerate(read_sites(stores_root, settings).items(), start=1):
        site = Site(name, store, settings)
        final = site.evaluate(results.shared, results.local[name])
        tensors, facts = site.complete_model()
        network = network_fingerprint("ConnectomeMLP", site.network.state_dict())
        root = folder / f"site-{k}" / "fedbn_sites"
        state = SiteState.under(root, job=JOB, site=name, network=network)
        state.save_model(tensors, facts)
        state.save_scores("final", {"federated": final})
    write_json(folder / "server" / JOB / "results.json", {**results.report, "job": JOB})
    return folder


@pytest.fixture(scope="session")
def page_of(tmp_path_factory):
    """Write a report into a folder of its own."""

    def write(folder, data_root=None):
        return write_report(folder, tmp_path_factory.mktemp("report") / "out", data_root)

    return write


@pytest.fixture(scope="session")
def compared_page(page_of, compared, stores_root):
    return page_of(compared, stores_root)


@pytest.fixture(scope="session")
def run_page(page_of, workspace, stores_root):
    return page_of(workspace, stores_root)


@pytest.fixture
def summary(compared):
    return json.loads((compared / "summary.json").read_text())


@pytest.fixture
def replaced():
    return dataclasses.replace
