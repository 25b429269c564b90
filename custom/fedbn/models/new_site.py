"""A hospital that joins after the training: what it starts from, without a label.

The shared weights of a finished run are no complete model under FedBN: batch norm stayed at the
hospitals. A new hospital takes the shared weights as they are, gamma and beta as the mean over the
hospitals that allow to share theirs, and the running statistics of its own unlabelled samples (Li
et al., ICLR 2021, appendix on unknown domains; Andreux et al., 2020). What the task fits at a site
is fitted on the same samples. Nothing of the new hospital leaves it.

That is one of several starts, and the paper's name for it does not make it the best:
:mod:`fedbn.study.leave_one_site_out` measures them all on hospitals that a federation has not seen.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from data_prep.files import write_json
from fedbn.core.aggregation import WeightedMean
from fedbn.core.batches import Samples, TensorSamples
from fedbn.core.normalization import (
    Partition,
    Policy,
    affine_names,
    check_entries,
    entries,
    load_entries,
    recompute_statistics,
)
from fedbn.federation.experiment import EXPERIMENT_FILE, Experiment, read_experiment, validated
from fedbn.federation.results import FORMAT as RESULTS_FORMAT
from fedbn.federation.results import versions, weights_digest
from fedbn.federation.run_folder import RESULTS_FILE, SAVED_FILE, only_file
from fedbn.federation.site import Preparation, Site, make_network
from fedbn.federation.site_state import (
    SHARED_WEIGHTS,
    SiteState,
    load_checkpoint,
    network_fingerprint,
    save_checkpoint,
)
from fedbn.tasks.data import DataError, SiteData, Split

FORMAT = "fedbn-adaptation-1"
REPORT_FILE = "adaptation.json"
MODEL_FILE = "model.pt"

AFFINE = "gamma and beta for new sites"
"""Kind of the file in which a server keeps the mean of what willing sites sent."""
AFFINE_FILE = "affine_for_new_sites.pt"
MIN_WILLING_SITES = 2
"""Of one site alone the mean would be that site's own gamma and beta."""

MIN_SUBJECTS, ENOUGH_SUBJECTS = 2, 8
MEASURED = (
    "measured on ABIDE: accuracy 56 % from one subject, 63 from 2, 66 from 4, 67 from 8, 68 from 16"
)
"""What a model is worth that is adapted to few subjects."""


class AdaptationError(ValueError):
    """A run or a store from which a new hospital cannot start; one sentence."""


@dataclass(frozen=True)
class Start:
    """What a new hospital's network consists of.

    Attributes
    ----------
    name
        As it is typed.
    title
        As a table says it.
    policy
        Of the run that the shared weights come from.
    affine
        Gamma and beta: ``"shared"`` (the run's policy shares them), ``"initial"`` (1 and 0), or
        ``"mean"`` (over the hospitals that allow it).
    statistics
        Running mean and variance: ``"shared"``, ``"initial"`` (0 and 1), ``"own"`` (of the new
        hospital's unlabelled samples), or ``"mean"`` (over hospitals: for comparison alone, because
        they never leave one).
    """

    name: str
    title: str
    policy: Policy
    affine: Literal["shared", "initial", "mean"]
    statistics: Literal["shared", "initial", "own", "mean"]

    @property
    def can_be_built(self) -> bool:
        """Whether a real run leaves what it needs."""
        return self.statistics != "mean"


STARTS: dict[str, Start] = {
    start.name: start
    for start in (
        Start("fedavg", "FedAvg as it is", "none", "shared", "shared"),
        Start("fedavg_statistics", "FedAvg, statistics recomputed", "none", "shared", "own"),
        Start("silobn_statistics", "SiloBN, statistics recomputed", "silobn", "shared", "own"),
        Start("fedbn_default", "FedBN, untouched batch norm", "fedbn", "initial", "initial"),
        Start("fedbn_statistics", "FedBN, statistics recomputed", "fedbn", "initial", "own"),
        Start("fedbn_mean", "FedBN, mean gamma, beta and statistics", "fedbn", "mean", "mean"),
        Start(
            "fedbn_affine",
            "FedBN, mean gamma and beta, statistics recomputed",
            "fedbn",
            "mean",
            "own",
        ),
    )
}
"""Starts without a label, by name; those of one policy from the simplest to the fullest."""


@dataclass(frozen=True)
class FinishedRun:
    """What a finished run has left at its server.

    Attributes
    ----------
    experiment
        What was run.
    job
        Its id.
    shared
        Entries of the network that all sites share.
    affine
        Mean gamma and beta of the willing sites, or ``None``.
    willing
        Names of those sites.
    no_affine
        Why `affine` is ``None``; one clause.
    signature
        What the sites' stores have in common, or ``None`` if the run has not kept it.
    """

    experiment: Experiment
    job: str
    shared: dict[str, torch.Tensor]
    affine: dict[str, torch.Tensor] | None
    willing: tuple[str, ...]
    no_affine: str
    signature: dict[str, Any] | None


def mean_over_sites(
    of_sites: Mapping[str, Mapping[str, torch.Tensor]], expected: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Average entries over sites, each counting the same.

    Parameters
    ----------
    of_sites
        Site name to its entries; more than `expected` are passed over.
    expected
        Names, shapes and dtypes of what is averaged.

    Raises
    ------
    fedbn.core.aggregation.ContributionError
        If an entry is missing, of another shape, or not finite.
    """
    mean = WeightedMean(expected)
    for site in sorted(of_sites):
        mean.add(site, {name: of_sites[site][name] for name in expected if name in of_sites[site]})
    return mean.result()


def save_affine(
    path: Path,
    experiment: Experiment,
    job: str,
    of_sites: Mapping[str, Mapping[str, torch.Tensor]],
    *,
    n_willing: int | None = None,
) -> str:
    """Keep the mean gamma and beta of the willing sites beside the global model.

    Parameters
    ----------
    path
        The file; replaced atomically.
    experiment, job
        What was run.
    of_sites
        Name of each willing site to its gamma and beta. With fewer than two the file holds the
        initial ones instead, and the reason.
    n_willing
        How many sites were willing, where they were too few to be asked.

    Returns
    -------
    str
        One sentence for the log.
    """
    network, partition = make_network(experiment)
    initial = entries(network, affine_names(network, partition))
    willing = sorted(of_sites)
    reason = ""
    if len(willing) < MIN_WILLING_SITES:
        values = initial
        n_sharing = len(willing) if n_willing is None else n_willing
        reason = (
            f"{n_sharing} of {len(experiment.sites)} sites share gamma and beta; at least "
            f"{MIN_WILLING_SITES} are needed: a mean over fewer would be one site's own"
        )
        willing = []
    else:
        values = mean_over_sites(of_sites, initial)
    facts = {
        "job": job,
        "network": experiment.network.model_dump(),
        "sites": willing,
        "fallback": reason,
    }
    save_checkpoint(path, AFFINE, values, facts)
    if reason:
        return f"new hospitals start from gamma 1 and beta 0: {reason}"
    return f"gamma and beta for new hospitals: mean over {', '.join(willing)}"


def read_run(folder: Path) -> FinishedRun:
    """Read what a new hospital is given of a finished run.

    Parameters
    ----------
    folder
        A simulator workspace, a server's folder of the job, a downloaded job, or the file of
        shared weights itself. What sites keep inside a workspace is not looked at.

    Raises
    ------
    AdaptationError
        If there is no such run, more than one, or its algorithm leaves no one shared model.
    fedbn.federation.site_state.SiteStateError
        If a file is damaged.
    """
    path = only_file(
        folder,
        SAVED_FILE,
        "give the folder of one finished run: a simulator workspace, a downloaded job, or the "
        "job's folder at the server",
        AdaptationError,
    )
    saved, meta = load_checkpoint(path, SHARED_WEIGHTS)
    if isinstance(meta.get("experiment"), dict):
        experiment = validated(meta["experiment"], path.name)
    else:
        experiment = read_experiment(path.parent / "config" / EXPERIMENT_FILE)
    after = meta.get("round")
    if isinstance(after, int) and after + 1 < experiment.rounds:
        raise AdaptationError(
            f"the run in {folder} ended after {after + 1} of {experiment.rounds} rounds; continue "
            "it with `fedbn resume` first"
        )
    if experiment.algorithm.name in ("alone", "clustered"):
        raise AdaptationError(
            f"the run in {folder} has algorithm {experiment.algorithm.name!r}, which leaves no one "
            "model that all sites share; start from a run that averages"
        )
    network, partition = make_network(experiment)
    # Beside them the server may have saved what its algorithm remembers of the sites.
    shared = {name: tensor for name, tensor in saved.items() if name in partition.shared}
    check_entries(shared, entries(network, partition.shared), f"the entries of {path.name}")
    affine, willing, no_affine = _read_affine(path.parent / AFFINE_FILE, network, partition)
    return FinishedRun(
        experiment=experiment,
        job=str(meta.get("job")),
        shared=shared,
        affine=affine,
        willing=willing,
        no_affine=no_affine,
        signature=_signature(path.parent.parent / RESULTS_FILE),
    )


def _read_affine(
    path: Path, network: nn.Module, partition: Partition
) -> tuple[dict[str, torch.Tensor] | None, tuple[str, ...], str]:
    """Return the mean gamma and beta, whose they are, and otherwise why there are none."""
    names = affine_names(network, partition)
    if not names:
        return None, (), "the run's policy shares gamma and beta"
    if not path.is_file():
        return None, (), f"the run has no {AFFINE_FILE}"
    affine, meta = load_checkpoint(path, AFFINE)
    check_entries(affine, entries(network, names), f"the entries of {path.name}")
    willing = tuple(str(site) for site in meta["sites"])
    if len(willing) < MIN_WILLING_SITES:
        return None, (), str(meta["fallback"])
    return affine, willing, ""


def _signature(path: Path) -> dict[str, Any] | None:
    """Return what the sites' stores had in common, as the server wrote it with the results."""
    content: Any = None
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_bytes())
    if not isinstance(content, dict) or content.get("format") != RESULTS_FORMAT:
        return None
    signature = content.get("signature")
    return signature if isinstance(signature, dict) else None


def load_start(
    network: nn.Module,
    partition: Partition,
    start: Start,
    shared: Mapping[str, torch.Tensor],
    inputs: torch.Tensor,
    *,
    affine: Mapping[str, torch.Tensor] | None = None,
    statistics: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Put a start into a network.

    Parameters
    ----------
    network, partition
        As :func:`fedbn.federation.site.make_network` makes them; the network's local entries are
        the initial ones, or overwritten here.
    start
        What to put together.
    shared
        The run's shared entries.
    inputs
        Unlabelled samples of the new hospital, as the network takes them, (n, ...).
    affine
        Mean gamma and beta, for a start that has them.
    statistics
        Mean running statistics, for a start that has them.

    Raises
    ------
    AdaptationError
        If what the start needs is not given, or the run's policy is another.
    """
    if partition.policy != start.policy:
        raise AdaptationError(
            f"start {start.name!r} needs a run of policy {start.policy!r}, this one's is "
            f"{partition.policy!r}"
        )
    parts: dict[str, torch.Tensor] = dict(shared)
    for kind, given in (("affine", affine), ("statistics", statistics)):
        if getattr(start, kind) == "mean":
            if given is None:
                raise AdaptationError(f"start {start.name!r} needs the mean {kind} of the sites")
            parts |= given
    load_entries(network, {**entries(network, partition.local), **parts})
    if start.statistics == "own":
        recompute_statistics(network, inputs, partition.layers)


def unlabelled(data: SiteData, experiment: Experiment) -> Preparation:
    """Fit what the task fits on all units of some data; no label is looked at."""
    everyone = np.arange(len(data.units))
    return Preparation(
        Split(everyone, everyone[:0], everyone),
        experiment.task.fit(data, everyone),
        {"store": data.fingerprint(), "synthetic": bool(data.synthetic)},
    )


def default_start(run: FinishedRun) -> str:
    """Return the fullest start that a run can be built into, by its policy alone."""
    return buildable(run)[-1]


def buildable(run: FinishedRun) -> list[str]:
    """Return the names of the starts that this run allows."""
    return [
        name
        for name, start in STARTS.items()
        if start.policy == run.experiment.policy
        and start.can_be_built
        and not (start.affine == "mean" and run.affine is None)
    ]


def adapt(run: FinishedRun, store: SiteData, out: Path, *, start: str, why: str) -> dict[str, Any]:
    """Build a new hospital's complete model, and keep it as a site keeps its own.

    Parameters
    ----------
    run
        From :func:`read_run`.
    store
        The new hospital's data; no label is looked at.
    out
        Folder for ``model.pt`` and ``adaptation.json``.
    start
        One of :func:`buildable`.
    why
        Why this one; one sentence for the report.

    Returns
    -------
    dict
        The content of ``adaptation.json``.

    Raises
    ------
    AdaptationError
        If the start cannot be built, the hospital took part in the run, has fewer than two
        subjects, or `out` holds a model.
    fedbn.tasks.data.DataError
        If the data were made in another way than those of the run, or do not fit the network.
    """
    if start not in STARTS:
        raise AdaptationError(f"unknown start {start!r}; choose from {', '.join(buildable(run))}")
    if start not in buildable(run):
        reason = _why_not(run, STARTS[start])
        raise AdaptationError(
            f"start {start!r} cannot be built from this run: {reason}; choose from "
            f"{', '.join(buildable(run))}"
        )
    _check_store(run, store)
    if (out / MODEL_FILE).exists():
        raise AdaptationError(f"{out} holds a {MODEL_FILE} already; give another --out")
    chosen = STARTS[start]
    site = Site(store.site, store, run.experiment, preparation=unlabelled(store, run.experiment))
    site.check_network()
    inputs = all_inputs(site.test)
    load_start(site.network, site.partition, chosen, run.shared, inputs, affine=run.affine)
    report = _report(run, site, chosen, why)
    state = SiteState(
        out,
        job=run.job,
        site=site.name,
        network=network_fingerprint(run.experiment.network.name, site.network.state_dict()),
    )
    tensors, facts = site.complete_model()
    state.save_model(tensors, facts | {"adaptation": report})
    write_json(out / REPORT_FILE, report)
    return report


def all_inputs(samples: Samples) -> torch.Tensor:
    """Return the inputs of all samples as one tensor, (n, ...)."""
    if isinstance(samples, TensorSamples):
        return samples.inputs
    return torch.cat([batch.inputs for batch in samples.batches(1)])


def _why_not(run: FinishedRun, start: Start) -> str:
    if start.policy != run.experiment.policy:
        return f"it needs policy {start.policy!r}, and the run's is {run.experiment.policy!r}"
    if not start.can_be_built:
        return "the sites' running statistics never leave them"
    return run.no_affine


def _check_store(run: FinishedRun, store: SiteData) -> None:
    if len(store.units) < MIN_SUBJECTS:
        raise AdaptationError(
            f"site {store.site!r} has {len(store.units)} subject, too few to adapt to: give at "
            f"least {MIN_SUBJECTS} ({MEASURED})"
        )
    if store.site in run.experiment.sites:
        raise AdaptationError(
            f"site {store.site!r} took part in the run: it is no new hospital, and has its own "
            f"{MODEL_FILE}"
        )
    if run.signature is not None:
        signature = json.loads(json.dumps(store.signature()))
        if differences := run.experiment.task.differences(run.signature, signature):
            raise DataError(
                f"the stores of the run and of {store.site!r} do not fit together: "
                + "; ".join(differences)
            )


def _report(run: FinishedRun, site: Site, start: Start, why: str) -> dict[str, Any]:
    n_subjects = len(site.data.units)
    n_samples = sum(unit.n_samples for unit in site.data.units)
    own = f"of all {n_subjects} subjects here ({n_samples} samples), no label"
    warnings = []
    if n_subjects < ENOUGH_SUBJECTS:
        warnings.append(
            f"{n_subjects} subjects are few to adapt to; with {ENOUGH_SUBJECTS} or more the model "
            f"is better ({MEASURED})"
        )
    affine = {
        "shared": "the run's, shared by its policy",
        "initial": "1 and 0",
        "mean": f"mean over {', '.join(run.willing)}",
    }[start.affine]
    if start.policy == "fedbn" and start.affine == "initial" and run.no_affine:
        affine += f" ({run.no_affine})"
    statistics = {"shared": "the run's", "initial": "0 and 1", "own": own}[start.statistics]
    return {
        "format": FORMAT,
        "site": site.name,
        "synthetic": site.data.synthetic,
        "job": run.job,
        "experiment": run.experiment.model_dump(mode="json"),
        "start": start.name,
        "title": start.title,
        "why": why,
        "n_subjects": n_subjects,
        "n_samples": n_samples,
        "fingerprint": site.data.fingerprint(),
        "warnings": warnings,
        "used": {
            "shared weights": f"sha256 {weights_digest(run.shared)}",
            "gamma and beta": affine,
            "running mean and variance": statistics,
            "standardisation": own if site.preparation.fitted else "none",
            "labels": "none",
        },
        "stores compared": run.signature is not None,
        "versions": versions(),
    }
