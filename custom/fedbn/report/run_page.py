"""The page of one finished run, in FLARE or in one process: what each site gained, and how."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedbn.federation.experiment import Experiment, validated
from fedbn.federation.results import (
    AFTER_TRAINING,
    ALONE,
    BEFORE_TRAINING,
    FEDERATED,
    FINETUNED,
    weights_digest,
)
from fedbn.federation.simulation import federate, read_sites
from fedbn.federation.site_state import SiteStateError, read_scores_file
from fedbn.report import figures, parts, site_models
from fedbn.report.html import Page
from fedbn.report.panels.base import Folds
from fedbn.report.panels.registry import panels_of
from fedbn.report.reading import early_end, read_results, results_file
from fedbn.report.site_models import SiteModels
from fedbn.report.tables import (
    curve_of,
    curve_table,
    finetuned_table,
    gain_table,
    groups_table,
    metrics_table,
)
from fedbn.tasks.base import Scores, Task
from fedbn.tasks.data import SiteData

_KINDS = (ALONE, FEDERATED, FINETUNED)

Scored = dict[str, dict[str, Folds]]
"""Kind of model, then site, to the scores of its held-out units."""


def run_page(folder: Path, data_root: Path | None, on_step: Callable[[str], None]) -> Page:
    """Build the page of a run.

    Parameters
    ----------
    folder
        A simulator workspace, a downloaded job, or a ``results.json``.
    data_root
        Folder of the sites' data, for what needs a unit's class or sample. Where the sites' models
        are not below `folder`, the run is done once more in this process for them.
    on_step
        Called with what is begun.

    Raises
    ------
    ValueError
        If there is no finished run, or `data_root` holds other data.
    """
    results = read_results(results_file(folder))
    if not results["sites"]:
        raise ValueError(early_end(results) or f"no site was scored in {folder}")
    experiment = validated(results["experiment"], f"the results in {folder}")
    stores = None if data_root is None else read_sites(data_root, experiment)
    page = Page(
        f"Run of {experiment.name} at {', '.join(results['sites'])}",
        synthetic=bool(results.get("synthetic")),
    )
    page.section("What each site gained")
    page.table(gain_table(results))
    if any(FINETUNED in report for report in results["sites"].values()):
        page.table(finetuned_table(results))
    if any("groups" in one for one in results["rounds"]):
        page.section("Groups of sites")
        page.table(groups_table(results))
    page.section("Convergence")
    whose = curve_of(next(iter(results["sites"].values())))[1]
    page.text(
        f"The site's {whose} subjects, scored with the round's received weights and the site's own "
        "entries, and again after its local epochs."
    )
    panels = {site: _curves(experiment.task, results, site) for site in results["sites"]}
    parts.convergence_pictures(
        page,
        {site: found for site, found in panels.items() if found},
        _levels(experiment.task, results),
    )
    page.table(curve_table(results), folded="the same as a table")
    on_step("reading the sites' models")
    models, scored = _models(folder, results, experiment, stores, on_step)
    page.section("Every metric")
    page.table(metrics_table(results))
    if scored:
        unit = experiment.task.levels[0]
        shown = {
            kind: {site: r[kind][unit] for site, r in results["sites"].items() if kind in r}
            for kind in scored
        }
        over = f"Held-out subjects of fold {experiment.fold}."
        panels_of(experiment.task).held_out(page, scored, shown, over)
    elif stores is None:
        page.absent(f"Pictures of single subjects' scores need their data: {parts.NEEDS_DATA}")
    else:
        page.absent("No site has kept its predictions below this folder.")
    why_not = (
        f"No site's model is below this folder. To run the experiment once more in this process, "
        f"{parts.NEEDS_DATA}"
    )
    parts.sites_inside(page, models, stores, why_not, on_step)
    parts.made_from(
        page,
        {
            **parts.settings_facts(experiment.model_dump(), results["versions"]),
            "policy": experiment.policy,
            "fold": experiment.fold,
            "seed": experiment.seed,
            "transport": results.get("transport", "-"),
            "shared weights": f"sha256 {results['shared_weights_sha256']}",
        },
    )
    return page


# ------------------------------------------------------------------------------------- curves


def _curves(task: Task, results: Mapping[str, Any], site: str) -> dict[str, list[figures.Curve]]:
    """Return a site's curves: of the headline metric, and of what the rounds' facts follow."""
    followed: dict[int, dict[str, dict[str, float]]] = {}
    unit, headline = task.levels[0], task.metrics[0].name
    curve, _ = curve_of(results["sites"][site])
    for point in curve:
        for when in (BEFORE_TRAINING, AFTER_TRAINING):
            of_round = followed.setdefault(point["round"], {}).setdefault(when, {})
            of_round[f"{unit}_{headline}"] = _number(point[when][unit][headline])
    for one in results["rounds"]:
        facts = one.get("sites", {}).get(site, {})
        for when in (BEFORE_TRAINING, AFTER_TRAINING):
            of_round = followed.setdefault(one["round"], {}).setdefault(when, {})
            numbers = facts.get(when, {}).items()
            of_round |= {k: _number(value) for k, value in numbers if k in task.followed}
    found = parts.followed_curves(task, followed, FEDERATED)
    return {label: [one] for label, one in found.items()}


def _levels(task: Task, results: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return what each site's network reaches that it trains by itself."""
    metric, unit = task.metrics[0], task.levels[0]
    label, factor = parts.followed_label(task, f"{unit}_{metric.name}")
    return {
        site: {label: factor * _number(report[ALONE][unit][metric.name])}
        for site, report in results["sites"].items()
        if ALONE in report and report["curve"]
    }


# ------------------------------------------------------------------------- models and subjects


def _models(
    folder: Path,
    results: Mapping[str, Any],
    experiment: Experiment,
    stores: Mapping[str, SiteData] | None,
    on_step: Callable[[str], None],
) -> tuple[SiteModels | None, Scored]:
    """Read the sites' models and predictions, or make them again where the data are given."""
    workspace = folder if folder.is_dir() else folder.parent
    job = results.get("job")
    models = site_models.from_workspace(workspace, experiment, str(job)) if job else None
    if models is not None:
        scored = {} if stores is None else _kept_scores(workspace, str(job), models, stores)
        return models, scored
    if stores is None:
        return None, {}
    on_step("running the experiment once more, for the sites' models")
    federation = federate(experiment, stores, score_rounds=False)
    if weights_digest(federation.shared) != results["shared_weights_sha256"]:
        raise ValueError(
            "the experiment run once more gives other weights than this run had: the data, the "
            "versions or the machine differ; leave --data out"
        )
    final: dict[str, Folds] = {
        name: [[site.evaluate(federation.received[name], federation.local[name])]]
        for name, site in federation.sites.items()
    }
    models = site_models.from_federation(federation, experiment, experiment.sites)
    return models, {FEDERATED: final}


def _kept_scores(
    workspace: Path, job: str, models: SiteModels, stores: Mapping[str, SiteData]
) -> Scored:
    """Join the predictions that the sites have kept with their subjects' classes."""
    found: dict[str, dict[str, Scores]] = {}
    sites = {}
    for name in models.by_site:
        sites[name] = site_models.checked_site(models, name, stores[name])
        paths = sorted(workspace.rglob(f"{job}/{name}/predictions/final.npz"))
        if not paths:
            return {}
        found[name] = read_scores_file(paths[0])
        for kind, scores in found[name].items():
            if not np.array_equal(scores.units, np.unique(sites[name].test.owners)):
                raise SiteStateError(f"{paths[0]}: {kind!r} is not of this fold's samples")
    return {
        kind: {name: [[kinds[kind]]] for name, kinds in found.items()}
        for kind in _KINDS
        if all(kind in kinds for kinds in found.values())
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
