"""What comes out of a run: ``results.json``, the same whatever carried the weights."""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedbn.federation.experiment import Experiment
from fedbn.federation.site import Site
from fedbn.tasks import evaluation

FORMAT = "fedbn-results-1"
FEDERATED = "federated"
ALONE = "alone"
FINETUNED = "finetuned"


def site_report(
    site: Site,
    final: np.ndarray,
    alone: np.ndarray | None,
    rounds: Mapping[int, Mapping[str, np.ndarray]],
    *,
    finetuned: np.ndarray | None = None,
) -> dict[str, Any]:
    """Score everything that one site has predicted in one run.

    Parameters
    ----------
    site
        The site; its test subjects are scored.
    final
        Probabilities with the last shared weights and the site's own local entries.
    alone
        Probabilities of the same network trained on this site only, or ``None``.
    rounds
        Round number to the probabilities before and after local training.
    finetuned
        Probabilities after further local epochs from the final model, or ``None``.

    Returns
    -------
    dict
        JSON-able; counts and metrics of the site as a whole, nothing about one subject.
    """
    report: dict[str, Any] = {
        **{key: value for key, value in site.preparation.facts.items() if key != "store"},
        FEDERATED: site.metrics(final),
        "curve": [
            {
                "round": number,
                evaluation.BEFORE_TRAINING: site.metrics(
                    rounds[number][evaluation.BEFORE_TRAINING]
                ),
                evaluation.AFTER_TRAINING: site.metrics(rounds[number][evaluation.AFTER_TRAINING]),
            }
            for number in sorted(rounds)
        ],
    }
    if finetuned is not None:
        report[FINETUNED] = site.metrics(finetuned)
    if alone is not None:
        report[ALONE] = site.metrics(alone)
        report["gain"] = site.subjects_changed(alone, final)
    return without_nan(report)


def run_report(
    experiment: Experiment,
    sites: Mapping[str, Mapping[str, Any]],
    rounds: Sequence[Mapping[str, Any]],
    shared: Mapping[str, torch.Tensor],
    **facts: Any,
) -> dict[str, Any]:
    """Join the sites' reports into the report of a run.

    Parameters
    ----------
    experiment
        What was run.
    sites
        Site name to :func:`site_report`.
    rounds
        For each round, who took part, who was refused and why.
    shared
        The last shared weights, for their digest.
    facts
        Further facts to keep (job id, transport, …).
    """
    across = {}
    for name in (FEDERATED, FINETUNED, ALONE):
        scored = {site: report[name] for site, report in sites.items() if name in report}
        if scored:
            across[name] = {
                level: evaluation.across_sites(
                    {site: _with_nan(metrics[level]) for site, metrics in scored.items()}
                )
                for level in ("subject", "window")
            }
    return without_nan(
        {
            "format": FORMAT,
            "synthetic": any(report.get("synthetic") for report in sites.values()),
            **facts,
            "experiment": experiment.model_dump(mode="json"),
            "versions": versions(),
            "shared_weights_sha256": weights_digest(shared),
            "sites": dict(sites),
            "across_sites": across,
            "rounds": list(rounds),
        }
    )


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return one digest over the names and bits of all tensors, to compare two runs by."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Return the versions that decide the numbers."""
    found = {"python": platform.python_version()}
    for name in ("fedbn", "torch", "numpy", "nvflare", "monai", "scikit-learn"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def without_nan(value: Any) -> Any:
    """Replace NaN and infinity by ``None``, which JSON has; the reason stands beside it."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return value


def _with_nan(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: math.nan if value is None else value for name, value in metrics.items()}
