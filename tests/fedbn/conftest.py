"""A hospital's startup kit as `nvflare provision` makes it; a small finished run at two sites."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from nvflare.lighter.utils import (
    Identity,
    generate_cert,
    serialize_cert,
    serialize_pri_key,
    sign_folders,
)

from data_prep.connectome import correlation_connectomes
from data_prep.files import write_json
from data_prep.site_store import Participant, write_site_store
from fedbn.federation.experiment import Experiment
from fedbn.federation.results import run_report, site_report
from fedbn.federation.simulation import federate, read_sites
from fedbn.federation.site_state import (
    SHARED_WEIGHTS,
    SiteState,
    network_fingerprint,
    save_checkpoint,
)
from fedbn.models.bundle import export_bundle
from fedbn.models.site_model import find_kept_model, site_facts


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """As jobs run: the same bits each time; and the tensors here are too small for two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _one_thread_again(_one_thread):
    """Some test before may have asked for more."""
    torch.set_num_threads(1)


PRIVACY = Path(__file__).parents[2] / "sites" / "hospital" / "privacy.json"


class Project:
    """A project's root key, and what it makes for its participants."""

    def __init__(self, name="project"):
        self.identity = Identity(name, "lead", None)
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        year = {"not_valid_before": now() - timedelta(days=2), "valid_days": 3650}
        self.certificate = serialize_cert(
            generate_cert(
                self.identity, self.identity, self.key, self.key.public_key(), ca=True, **year
            )
        )

    def write_certificate(self, folder, role, name, start=-2, days=365, **more):
        """Write `role`.crt and .key for a participant; valid from `start` days from now on."""
        key = ec.generate_private_key(ec.SECP256R1())
        begin = now() + timedelta(days=start)
        certificate = generate_cert(
            Identity(name, "org", None),
            self.identity,
            self.key,
            key.public_key(),
            not_valid_before=begin,
            not_valid_after=begin + timedelta(days=days),
            **more,
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{role}.crt").write_bytes(serialize_cert(certificate))
        file = folder / f"{role}.key"
        file.write_bytes(serialize_pri_key(key))
        file.chmod(0o600)
        (folder / "rootCA.pem").write_bytes(self.certificate)

    def write_kit(
        self,
        folder,
        client="NYU",
        target="localhost:1",
        scheme="grpc",
        security="mtls",
        signed=True,
        privacy=True,
        **certificate,
    ):
        startup, local = folder / "startup", folder / "local"
        local.mkdir(parents=True)
        self.write_certificate(startup, "client", client, **certificate)
        config = {
            "format_version": 2,
            "servers": [
                {
                    "name": "project",
                    "service": {"target": target, "scheme": scheme},
                    "identity": "server",
                }
            ],
            "client": {
                "ssl_private_key": "client.key",
                "ssl_cert": "client.crt",
                "ssl_root_cert": "rootCA.pem",
                "fqsn": client,
                "is_leaf": True,
                "connection_security": security,
            },
        }
        (startup / "fed_client.json").write_text(json.dumps(config, indent=2))
        (startup / "start.sh").write_text("#!/usr/bin/env bash\n")
        if signed:  # as fedbn's SignedStartupBuilder does
            sign_folders(str(startup), self.key, signature_file="signature.json")
        if privacy:
            shutil.copy(PRIVACY, local / "privacy.json")
        return folder


def now():
    return datetime.now(timezone.utc).replace(microsecond=0)


@pytest.fixture(scope="session")
def project():
    return Project()


@pytest.fixture(scope="session")
def other_project():
    return Project("other")


@pytest.fixture
def make_kit(project, tmp_path):
    def make(name="kit", **arguments):
        return project.write_kit(tmp_path / name, **arguments)

    return make


# ---------------------------------------------------------------------------- a small finished run


@dataclass(frozen=True)
class FinishedRun:
    """What two sites and a server have on their disks after a run, and the series it came from."""

    workspace: Path
    data: Path
    experiment: Experiment
    series: dict[str, dict[str, np.ndarray]]
    results: dict[str, Any]

    def folder(self, site):
        (folder,) = self.workspace.rglob(f"a_job/{site}")
        return folder

    def export(self, site, out):
        kept = find_kept_model(self.workspace, site)
        facts = site_facts(kept, self.workspace, self.experiment.task.read(self.data / site, site))
        return export_bundle(kept, facts, out)[0]

    def write_series(self, path, subject, *, order=None, rois=None, keep=None, separator=" "):
        """Write a subject's ROI time series with its ids as a header."""
        site = subject[4:6]
        series = self.series["NYU" if site == "NY" else "UM"][subject][:keep]
        ids = [f"{10 + k}" for k in range(series.shape[1])] if rois is None else rois
        order = np.arange(len(ids)) if order is None else order
        mark = "#" if separator == " " else ""
        lines = [separator.join(f"{mark}{ids[k]}" for k in order)]
        lines += [separator.join(f"{value:.9f}" for value in row[order]) for row in series]
        path.write_text("\n".join(lines) + "\n")
        return path


N_ROIS = 8


def series_of(rng, autism):
    """A scan of 60 volumes in which patients have stronger links between the first regions."""
    series = rng.standard_normal((60, N_ROIS))
    series[:, :4] += (1.2 if autism else 0.5) * rng.standard_normal((60, 1))
    return 100 + series


def write_series_store(folder, site, rng, n_subjects=20, **description):
    """Write a store whose connectomes come from ROI time series; return these."""
    ids = [f"sub-{site[:2]}{k:02d}" for k in range(n_subjects)]
    series = {name: series_of(rng, k % 2 == 0) for k, name in enumerate(ids)}
    settings = {"kind": "correlation", "estimator": "ledoit-wolf", "window": 20, "stride": 20}
    made = [
        correlation_connectomes(one, window=20, stride=20, negative="keep")
        for one in series.values()
    ]
    write_site_store(
        folder,
        site=site,
        participants=[
            Participant(name, ("autism", "control")[k % 2], 10.0, "F", site, 60, 3)
            for k, name in enumerate(ids)
        ],
        rois=[(str(10 + k), f"region {k}") for k in range(N_ROIS)],
        window_starts=[[0, 20, 40]] * n_subjects,
        connectomes=np.concatenate(made),
        description={
            "atlas": "eight regions",
            "synthetic": False,
            "connectome": settings | {"negative": "keep"},
            "quality_rule": {"silent_rois": "exclude"},
        }
        | description,
    )
    return series


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    root = tmp_path_factory.mktemp("finished_run")
    rng = np.random.default_rng(0)
    experiment = Experiment(
        name="small",
        sites=("NYU", "UM"),
        network={"args": {"in_features": N_ROIS * (N_ROIS - 1) // 2, "hidden": [8]}},
        rounds=3,
        training={"batch_size": 16, "local_epochs": 4, "learning_rate": 0.02},
        n_folds=4,
        compare_with_alone=False,
    )
    series = {s: write_series_store(root / "data" / s, s, rng) for s in experiment.sites}
    return FinishedRun(
        root / "workspace", root / "data", experiment, series, keep(root, experiment)
    )


def keep(root, experiment):
    """Run an experiment on the data in a folder, and keep what FLARE would; return the results."""
    federation = federate(experiment, read_sites(root / "data", experiment))
    reports = {}
    for number, name in enumerate(experiment.sites, start=1):
        site = federation.load(name)
        reports[name] = site_report(
            site,
            site.evaluate(federation.shared, federation.local[name]),
            None,
            federation.scores[name],
        )
        state = SiteState.under(
            root / "workspace" / f"site-{number}" / "fedbn_sites",
            job="a_job",
            site=name,
            network=network_fingerprint(experiment.network.name, site.network.state_dict()),
        )
        state.save_preparation(site.preparation.tensors(), site.preparation.facts)
        state.save_local(federation.local[name], 2)
        state.save_model(*site.complete_model())
    server = root / "workspace" / "server" / "a_job"
    results = run_report(experiment, reports, [], federation.shared, job="a_job")
    write_json(server / "results.json", results)
    facts = {"job": "a_job", "network": experiment.network.model_dump(), "policy": "fedbn"}
    facts["experiment"] = experiment.model_dump(mode="json")
    save_checkpoint(
        server / "app_server" / "FL_global_model.pt", SHARED_WEIGHTS, federation.shared, facts
    )
    return results


@pytest.fixture(scope="session")
def keep_run():
    def run(root, experiment):
        return FinishedRun(
            root / "workspace", root / "data", experiment, {}, keep(root, experiment)
        )

    return run


@pytest.fixture(scope="session")
def make_series_store():
    return write_series_store


@pytest.fixture(scope="session")
def bundles(finished_run, tmp_path_factory):
    """The bundles of both sites; a test that changes one copies it first."""
    root = tmp_path_factory.mktemp("bundles")
    return {site: finished_run.export(site, root / site) for site in ("NYU", "UM")}
