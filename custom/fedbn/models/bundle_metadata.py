"""What a site's bundle says of itself: MONAI's metadata and configuration, and its own page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedbn.core.networks import OWN_NETWORKS
from fedbn.federation.results import versions, weights_digest
from fedbn.federation.settings_file import fault
from fedbn.models.distances import first_batch_norm
from fedbn.models.site_model import NOTICE, KeptModel, SiteFacts
from fedbn.tasks.bundling import Bundling, TrainedOn, bundling_of, class_names

BUNDLE_FORMAT = "fedbn-site-model-1"
THRESHOLD = 0.5
SCHEMA_URL = "https://project-monai.github.io/schema/meta_schema_20240725.json"


def inference_config(kept: KeptModel) -> dict[str, Any]:
    """Return what MONAI's ConfigParser builds the network from, and what its ``run`` does."""
    return {
        "imports": ["$from fedbn.report.prediction_files import run_bundle"],
        "bundle_root": ".",
        "device": "cpu",
        "inputs": [],
        "output_dir": "$@bundle_root + '/predictions'",
        "network_def": bundling_of(kept.task).target(
            kept.model, {"_target_": _target(kept.network["name"]), **kept.network["args"]}
        ),
        "network": "$@network_def.to(@device)",
        "run": ["$run_bundle(@bundle_root, @inputs, @output_dir)"],
    }


def _target(name: str) -> str:
    """Return the dotted path of a network that a job names in one of three ways."""
    name = OWN_NETWORKS.get(name, name)
    return name.replace(":", ".") if "." in name or ":" in name else f"monai.networks.nets.{name}"


def metadata(kept: KeptModel, facts: SiteFacts) -> dict[str, Any]:
    """Return the content of ``metadata.json``: MONAI's keys, and under ``fedbn`` the site's."""
    side, card = bundling_of(kept.task), card_of(kept, facts)
    found = versions()
    layer = first_batch_norm(kept.model)
    tensor = {"dtype": "float32", "value_range": [], "is_patch_data": False}
    sizes = {"num_channels": kept.shape[0], "spatial_shape": list(kept.shape[1:])}
    names = class_names(kept.task)
    return {
        "schema": SCHEMA_URL,
        "version": "1.0.0",
        "changelog": {"1.0.0": f"exported at site {kept.site} from {kept.origin}"},
        "monai_version": found["monai"],
        "pytorch_version": found["torch"].split("+")[0],
        "numpy_version": found["numpy"],
        "required_packages_version": {"fedbn": found["fedbn"]},
        "name": card["name"],
        "task": card["task"],
        "description": (
            f"The federated network of job {kept.job} with the batch norm of site {kept.site}, "
            f"behind what was fitted there; {kept.origin}. {NOTICE}"
        ),
        "authors": f"the federation of job {kept.job}, and site {kept.site}",
        "copyright": f"of site {kept.site} and its federation; not for distribution",
        "intended_use": NOTICE,
        "data_source": f"site {kept.site}'s own subjects; they are not part of the bundle",
        "data_type": card["data_type"],
        **({"pred_classes": f"logits of {_listed(names)}"} if names else {}),
        "eval_metrics": _eval_metrics(kept, facts),
        "references": [
            "Li, X. et al. FedBN: Federated Learning on Non-IID Features via Local Batch "
            "Normalization. ICLR 2021. arXiv:2102.07623"
        ],
        "network_data_format": {
            "inputs": {"image": tensor | sizes | card["inputs"]},
            "outputs": {"pred": tensor | {"spatial_shape": []} | card["outputs"]},
        },
        "fedbn": {
            "format": BUNDLE_FORMAT,
            "notice": NOTICE,
            "site": kept.site,
            "job": kept.job,
            "origin": kept.origin,
            "finetuned": kept.finetuned,
            "adaptation": kept.adaptation and _short(kept.adaptation),
            "policy": kept.policy,
            "local_entries": list(kept.local_entries),
            "network": kept.network,
            "task": kept.task.model_dump(mode="json"),
            "classes": list(names),
            side.keys[0]: kept.signature,
            side.keys[1]: facts.reference,
            "synthetic": is_synthetic(kept, facts),
            "training": facts.training,
            "experiment": facts.experiment and facts.experiment.model_dump(mode="json"),
            "scores": facts.scores,
            "threshold": THRESHOLD if len(names) == 2 else None,
            "site_threshold": facts.site_threshold,
            "distances": facts.distances,
            "fingerprint": facts.fingerprint,
            "batch_norm_layer": layer and layer[0],
            "weights_sha256": weights_digest(kept.model.state_dict()),
            "versions": found,
        },
    }


def card_of(kept: KeptModel, facts: SiteFacts) -> dict[str, Any]:
    """Return the task's description of a model, which says so where subjects were made up."""
    trained_on = TrainedOn(kept.site, kept.signature, facts.reference)
    card = bundling_of(kept.task).card(trained_on, kept.shape)
    if is_synthetic(kept, facts):
        card["data_type"] += ", SYNTHETIC subjects"
    return card


def is_synthetic(kept: KeptModel, facts: SiteFacts) -> bool:
    """Whether the training subjects were made up."""
    return any(one and one.get("synthetic") for one in (kept.signature, facts.training))


def _short(adaptation: dict[str, Any]) -> dict[str, Any]:
    """Return how a model was adapted, without what stands elsewhere in the metadata."""
    return {k: v for k, v in adaptation.items() if k not in ("experiment", "versions", "site")}


class _Facts(BaseModel):
    """The part of ``metadata.json`` that :mod:`fedbn.models.prediction` uses."""

    model_config = ConfigDict(strict=True)

    site: str
    job: str
    finetuned: bool
    network: dict[str, Any]
    experiment: dict[str, Any] | None
    threshold: float | None
    site_threshold: float | None
    distances: dict[str, Annotated[list[float], Field(min_length=3, max_length=3)]] | None
    weights_sha256: str


def check_facts(facts: dict[str, Any], side: Bundling) -> None:
    """Refuse facts of a bundle that are not as :func:`metadata` writes them.

    Raises
    ------
    ValueError
        Naming the first field that is wrong, and why.
    """
    models: list[type[BaseModel]] = [_Facts, *([side.facts_model] if side.facts_model else [])]
    for model in models:
        try:
            model.model_validate(facts)
        except ValidationError as error:
            raise ValueError(f"metadata.json, fedbn.{fault(error, facts, model)}") from None


def _eval_metrics(kept: KeptModel, facts: SiteFacts) -> dict[str, Any]:
    if not facts.scores:
        return {}
    of_units = facts.scores[kept.task.levels[0]]
    return {name: of_units.get(name) for name in (*(m.name for m in kept.task.metrics), "n")}


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def metadata_schema() -> dict[str, Any]:
    """Return, as a JSON schema, what MONAI's bundle specification asks of ``metadata.json``.

    MONAI's ``verify_metadata`` downloads the schema that the metadata names unless the file is
    there; with this file it needs no network. It asks for nothing less than MONAI's own does.
    """
    words = [
        "schema", "version", "monai_version", "pytorch_version", "numpy_version", "task",
        "description", "authors", "copyright",
    ]  # fmt: skip
    tensor = {
        "type": "object",
        "properties": {
            "type": {"type": "string"},
            "format": {"type": "string"},
            "num_channels": {"type": "integer"},
            "spatial_shape": {"type": "array", "items": {"type": ["string", "integer"]}},
            "dtype": {"type": "string"},
            "value_range": {"type": "array", "items": {"type": "number"}},
            "is_patch_data": {"type": "boolean"},
            "channel_def": {"type": "object"},
        },
        "required": ["type", "format", "num_channels", "spatial_shape", "dtype", "value_range"],
    }
    tensors = {"type": "object", "additionalProperties": tensor, "minProperties": 1}
    return {
        "$schema": "https://json-schema.org/draft/2019-09/schema",
        "type": "object",
        "properties": {
            **{name: {"type": "string"} for name in words},
            "required_packages_version": {"type": "object"},
            "changelog": {"type": "object"},
            "eval_metrics": {"type": "object"},
            "references": {"type": "array", "items": {"type": "string"}},
            "network_data_format": {
                "type": "object",
                "properties": {"inputs": tensors, "outputs": tensors},
                "required": ["inputs", "outputs"],
            },
        },
        "required": [*words, "required_packages_version", "network_data_format"],
    }


def readme(kept: KeptModel, facts: SiteFacts, *, compiled: bool) -> str:
    """Return the bundle's own page."""
    card, names = card_of(kept, facts), class_names(kept.task)
    lines = [
        f"# The model of site {kept.site}",
        "",
        f"**{NOTICE}**",
        "",
        "**It stays at the site.** It holds the site's own batch norm and what was fitted there, "
        "which no message of the federation carries.",
        "",
        f"- Job {kept.job}, policy {kept.policy}; {kept.origin}.",
        f"- Network: {kept.network['name']}"
        + (", trained further at this site after the last round." if kept.finetuned else "."),
        f"- Input: {card['input']}.",
        *([f"- Output: logits of {_listed(names)}."] if names else []),
        *_readme_scores(kept, facts),
        "",
        "## Use",
        "",
        "```sh",
        f"fedbn predict --model FOLDER --input {card['example']} --out {kept.site}_predictions",
        "```",
        "",
        "MONAI's own commands, in this folder (they need `pip install fire jsonschema`):",
        "",
        "```sh",
        "python -m monai.bundle verify_metadata --meta_file configs/metadata.json "
        "--filepath configs/metadata_schema.json",
        "python -m monai.bundle verify_net_in_out network_def --meta_file configs/metadata.json "
        "--config_file configs/inference.json",
        "python -m monai.bundle ckpt_export network_def --filepath models/model.ts "
        "--ckpt_file models/model.pt --meta_file configs/metadata.json "
        "--config_file configs/inference.json",
        "python -m monai.bundle run --meta_file configs/metadata.json "
        f"--config_file configs/inference.json --inputs \"['{card['example']}']\"",
        "```",
        "",
    ]
    if not compiled:
        lines += [
            "This network cannot be compiled by TorchScript: there is no models/model.ts.",
            "",
        ]
    return "\n".join(lines)


def _readme_scores(kept: KeptModel, facts: SiteFacts) -> list[str]:
    lines = []
    if facts.scores:
        of_units = facts.scores[kept.task.levels[0]]
        found = ", ".join(f"{m.title} {_shown(of_units[m.name])}" for m in kept.task.metrics[:3])
        lines.append(f"- Held-out subjects: {of_units['n']}, {found}.")
    else:
        lines.append("- Its scores are not known: no held-out subject of this site was scored.")
    if facts.site_threshold is not None:
        lines.append(
            f"- Threshold of the best accuracy on the site's training subjects: "
            f"{facts.site_threshold:.3f}; the scores are at {THRESHOLD}."
        )
    if facts.distances is None:
        lines.append(
            "- Exported without the site's data: it cannot say whether what it is asked about is "
            "unlike those it was trained on."
        )
    return lines


def _shown(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"
