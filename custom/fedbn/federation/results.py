"""What comes out of a run: ``results.json``, the same whatever carried the weights."""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedbn.core.normalization import bits
from fedbn.federation.experiment import Experiment
from fedbn.federation.site import OF_THE_SITE_ALONE, TEST, VALIDATION, Site
from fedbn.tasks.base import Scores

BEFORE_TRAINING = "before_training"
"""Scores of the received shared weights with the site's own batch norm, before local epochs."""

AFTER_TRAINING = "after_training"
"""Scores of the same site's network after its local epochs of the round."""

FORMAT = "fedbn-results-1"
FEDERATED = "federated"
ALONE = "alone"
FINETUNED = "finetuned"


Rounds = Mapping[int, Mapping[str, Mapping[str, Scores]]]
"""Round, and before or after training, to the scores of each part of the units."""


def site_report(
    site: Site,
    final: Scores,
    alone: Scores | None,
    rounds: Rounds,
    *,
    finetuned: Scores | None = None,
) -> dict[str, Any]:
    """Score everything that one site has predicted in one run.

    Parameters
    ----------
    site
        The site.
    final
        Of the held-out units, with the last shared weights and the site's own local entries.
    alone
        The same of the network trained on this site only, or ``None``.
    rounds
        Scores of the rounds.
    finetuned
        The same after further local epochs from the final model, or ``None``.

    Returns
    -------
    dict
        JSON-able; counts and metrics of the site as a whole, nothing about one unit.
    """
    measure = site.task.measure
    report: dict[str, Any] = {
        **{k: v for k, v in site.preparation.facts.items() if k not in OF_THE_SITE_ALONE},
        FEDERATED: measure(final),
        "curve": _curve(site, rounds, TEST),
    }
    if validation := _curve(site, rounds, VALIDATION):
        report["validation_curve"] = validation
    if finetuned is not None:
        report[FINETUNED] = measure(finetuned)
    if alone is not None:
        report[ALONE] = measure(alone)
        report["gain"] = site.task.changed(alone, final)
    return without_nan(report)


def _curve(site: Site, rounds: Rounds, part: str) -> list[dict[str, Any]]:
    """Measure one part of the units in every round in which it was scored."""
    return [
        {"round": number}
        | {
            when: site.task.measure(rounds[number][when][part])
            for when in (BEFORE_TRAINING, AFTER_TRAINING)
        }
        for number in sorted(rounds)
        if part in rounds[number][BEFORE_TRAINING]
    ]


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
                level: across_sites(
                    {site: _with_nan(metrics[level]) for site, metrics in scored.items()}
                )
                for level in experiment.task.levels
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


def across_sites(per_site: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Average metrics over sites, in both of the usual ways, each under its name.

    Parameters
    ----------
    per_site : mapping from str to mapping
        For each site, the metrics of one level, as a task measures them.
        Each site must have been scored with its own batch norm.

    Returns
    -------
    dict
        ``"macro"``: the mean of each metric in which every site counts the same.
        ``"sample_weighted"``: weighted by each site's ``"n"``.
        ``"n_sites"``: for each metric, the number of sites in these means; a site where the metric
        is undefined (NaN) is left out of both.
        ``"weights"``: each site's ``"n"``.
        The same bits in whichever order the sites are given.

    Raises
    ------
    ValueError
        If there is no site, or the sites do not have the same metrics.
    """
    if not per_site:
        raise ValueError("there is no site to average over")
    sites = sorted(per_site)
    names = [name for name in per_site[sites[0]] if name not in ("n", "reasons")]
    for site in sites:
        difference = {*names, "n"} ^ (set(per_site[site]) - {"reasons"})
        if difference:
            raise ValueError(
                f"sites {sites[0]!r} and {site!r} differ in their metrics: "
                + ", ".join(sorted(difference))
            )
    weights = {site: int(per_site[site]["n"]) for site in sites}
    macro: dict[str, float] = {}
    sample_weighted: dict[str, float] = {}
    n_sites: dict[str, int] = {}
    for name in names:
        defined = [site for site in sites if not math.isnan(per_site[site][name])]
        values = [float(per_site[site][name]) for site in defined]
        n_sites[name] = len(defined)
        macro[name] = _mean(values, [1] * len(values))
        sample_weighted[name] = _mean(values, [weights[site] for site in defined])
    return {
        "macro": macro,
        "sample_weighted": sample_weighted,
        "n_sites": n_sites,
        "weights": weights,
    }


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return one digest over the names and bits of all tensors, to compare two runs by."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(bits(tensor))
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


def _mean(values: list[float], weights: list[int]) -> float:
    total = sum(weights)
    if total == 0:
        return math.nan
    products = (value * weight for value, weight in zip(values, weights, strict=True))
    return math.fsum(products) / total
