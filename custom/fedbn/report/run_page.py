"""The page of one finished run, in FLARE or in one process: what each site gained, and how."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

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
from fedbn.report.held_out import HeldOut, Scored
from fedbn.report.html import Page
from fedbn.report.reading import early_end, read_results, results_file
from fedbn.report.site_models import SiteModels
from fedbn.report.tables import (
    LOOK,
    SYNTHETIC,
    curve_table,
    finetuned_table,
    gain_table,
    groups_table,
)
from fedbn.tasks.base import Scores
from fedbn.tasks.data import SiteData

_KINDS = (ALONE, FEDERATED, FINETUNED)
_METRICS = ("auc", "accuracy", "balanced_accuracy", "sensitivity", "specificity")


def run_page(folder: Path, data_root: Path | None, on_step: Callable[[str], None]) -> Page:
    """Build the page of a run.

    Parameters
    ----------
    folder
        A simulator workspace, a downloaded job, or a ``results.json``.
    data_root
        Folder of the site stores, for what needs a subject's class or connectome. Where the sites'
        models are not below `folder`, the run is done once more in this process for them.
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
    page.table(decision_table(results))
    if any(FINETUNED in report for report in results["sites"].values()):
        page.table(finetuned_table(results))
    if any("groups" in one for one in results["rounds"]):
        page.section("Groups of sites")
        page.table(groups_table(results))
    page.section("Convergence")
    page.text(
        "The site's held-out subjects, scored with the round's received weights and the site's own "
        "entries, and again after its local epochs."
    )
    panels = {site: _panels(results, site) for site in results["sites"]}
    parts.convergence_pictures(
        page, {site: found for site, found in panels.items() if found}, _levels(results)
    )
    page.table(curve_table(results), folded="the same as a table")
    on_step("reading the sites' models")
    models, scored = _models(folder, results, experiment, stores, on_step)
    page.section("Ranking and operating point")
    if scored:
        auc = {
            kind: {site: _auc(results, site, kind) for site in results["sites"]} for kind in scored
        }
        over = f"Held-out subjects of fold {experiment.fold}."
        parts.ranking_pictures(page, scored, auc, over)
    elif stores is None:
        page.absent(
            f"ROC, confusion matrices and calibration need the subjects' classes: "
            f"{parts.NEEDS_DATA}"
        )
    else:
        page.absent("No site has kept its predictions below this folder.")
    why_not = (
        f"No site's model is below this folder. To run the experiment once more in this process, "
        f"{parts.NEEDS_DATA}"
    )
    on_step("drawing how the sites differ")
    parts.site_differences(page, models, stores, why_not)
    parts.telling_edges(page, models, why_not)
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


def decision_table(results: Mapping[str, Any]) -> Table:
    """One row a site and model: how it ranks and where it decides, by held-out subject."""
    table = Table(
        **LOOK,
        title=(
            f"{SYNTHETIC if results.get('synthetic') else ''}ranking and operating point by "
            "held-out subject"
        ),
        caption="AUC does not depend on the threshold of 0.5; the others (in %) do.",
    )
    for heading in ("site", "model"):
        table.add_column(heading)
    for heading in ("AUC", "accuracy", "balanced", "sensitivity", "specificity", "patients in %"):
        table.add_column(heading, justify="right")
    for site, report in results["sites"].items():
        for kind in _KINDS:
            if kind not in report:
                continue
            found = report[kind]["subject"]
            cells = [
                "-"
                if found[name] is None
                else f"{found[name]:.3f}"
                if name == "auc"
                else f"{100 * found[name]:.1f}"
                for name in _METRICS
            ]
            share = f"{100 * report['autism_share_test']:.0f}"
            table.add_row(site, kind, *cells, share)
        table.add_section()
    return table


# ------------------------------------------------------------------------------------- curves


def _panels(results: Mapping[str, Any], site: str) -> dict[str, list[figures.Curve]]:
    curve = results["sites"][site]["curve"]
    if not curve:
        return {}
    panels = {
        "accuracy by subject, %": _curve(
            [
                (
                    point["round"],
                    *(
                        _percent(point[when]["subject"]["accuracy"])
                        for when in (BEFORE_TRAINING, AFTER_TRAINING)
                    ),
                )
                for point in curve
            ]
        )
    }
    entropy = [
        (
            one["round"],
            *(
                _number(one["sites"][site].get(when, {}).get("cross_entropy"))
                for when in (BEFORE_TRAINING, AFTER_TRAINING)
            ),
        )
        for one in results["rounds"]
        if site in one.get("sites", {})
    ]
    if entropy:
        panels["cross entropy by window"] = _curve(entropy)
    return {metric: [found] for metric, found in panels.items()}


def _curve(points: list[tuple[float, ...]]) -> figures.Curve:
    rounds, before, after = np.array(points, dtype=np.float64).T
    return figures.Curve(FEDERATED, rounds, before, after)


def _levels(results: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    return {
        site: {
            "accuracy by subject, %": 100 * report[ALONE]["subject"]["accuracy"]
            if ALONE in report and report[ALONE]["subject"]["accuracy"] is not None
            else None
        }
        for site, report in results["sites"].items()
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
    scored = {FEDERATED: {}}
    for name in federation.sites:
        site = federation.sites[name]
        final = site.evaluate(federation.received[name], federation.local[name])
        scored[FEDERATED][name] = [_held_out(final)]
    return site_models.from_federation(federation, experiment, experiment.sites), scored


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
        kind: {name: [_held_out(kinds[kind])] for name, kinds in found.items()}
        for kind in _KINDS
        if all(kind in kinds for kinds in found.values())
    }


def _held_out(scores: Scores) -> HeldOut:
    positive = scores.columns["p_1"]
    return HeldOut(scores.columns["target"], positive, positive >= 0.5)


def _auc(results: Mapping[str, Any], site: str, kind: str) -> float | None:
    found = results["sites"][site].get(kind)
    return None if found is None else found["subject"]["auc"]


def _percent(value: float | None) -> float:
    return math.nan if value is None else 100 * value


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
