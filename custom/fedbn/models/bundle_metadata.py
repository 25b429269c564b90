"""What a site's bundle says of itself: MONAI's metadata and configuration, and its own page."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedbn.core.networks import OWN_NETWORKS
from fedbn.federation.results import versions, weights_digest
from fedbn.federation.settings_file import fault
from fedbn.models.site_model import KeptModel, SiteFacts
from fedbn.models.site_network import NOTICE, first_batch_norm
from fedbn.tasks.classification import TWO_CLASSES

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
        "network_def": {
            "_target_": "fedbn.models.site_network.SiteNetwork",
            "network": {"_target_": _target(kept.network["name"]), **kept.network["args"]},
            "n_features": len(kept.model.mean),
        },
        "network": "$@network_def.to(@device)",
        "run": ["$run_bundle(@bundle_root, @inputs, @output_dir)"],
    }


def _target(name: str) -> str:
    """Return the dotted path of a network that a job names in one of three ways."""
    name = OWN_NETWORKS.get(name, name)
    return name.replace(":", ".") if "." in name or ":" in name else f"monai.networks.nets.{name}"


def metadata(kept: KeptModel, facts: SiteFacts) -> dict[str, Any]:
    """Return the content of ``metadata.json``: MONAI's keys, and under ``fedbn`` the site's."""
    n_features = len(kept.model.mean)
    found = versions()
    layer = first_batch_norm(kept.model)
    return {
        "schema": SCHEMA_URL,
        "version": "1.0.0",
        "changelog": {"1.0.0": f"exported at site {kept.site} from {kept.origin}"},
        "monai_version": found["monai"],
        "pytorch_version": found["torch"].split("+")[0],
        "numpy_version": found["numpy"],
        "required_packages_version": {"fedbn": found["fedbn"]},
        "name": f"Autism from connectomes at {kept.site}",
        "task": "Classification of a resting-state fMRI connectome: autism or control",
        "description": (
            f"The federated network of job {kept.job} with the batch norm and the standardisation "
            f"of site {kept.site}. {NOTICE}"
        ),
        "authors": f"the federation of job {kept.job}, and site {kept.site}",
        "copyright": f"of site {kept.site} and its federation; not for distribution",
        "intended_use": NOTICE,
        "data_source": f"site {kept.site}'s own subjects; they are not part of the bundle",
        "data_type": _data_type(kept),
        "pred_classes": "logits of " + " and ".join(kept.classes),
        "eval_metrics": _eval_metrics(facts),
        "references": [
            "Li, X. et al. FedBN: Federated Learning on Non-IID Features via Local Batch "
            "Normalization. ICLR 2021. arXiv:2102.07623"
        ],
        "network_data_format": {
            "inputs": {
                "image": {
                    "type": "series",
                    "format": "connectome",
                    "modality": "fMRI",
                    "num_channels": n_features,
                    "spatial_shape": [],
                    "dtype": "float32",
                    "value_range": [],
                    "is_patch_data": False,
                    "channel_def": {"0": "edges in numpy.triu_indices order, not standardised"},
                }
            },
            "outputs": {
                "pred": {
                    "type": "probabilities",
                    "format": "classes",
                    "num_channels": len(kept.classes),
                    "spatial_shape": [],
                    "dtype": "float32",
                    "value_range": [],
                    "is_patch_data": False,
                    "channel_def": {str(k): name for k, name in enumerate(kept.classes)},
                }
            },
        },
        "fedbn": {
            "format": BUNDLE_FORMAT,
            "notice": NOTICE,
            "site": kept.site,
            "job": kept.job,
            "origin": kept.origin,
            "finetuned": kept.finetuned,
            "policy": kept.policy,
            "local_entries": list(kept.local_entries),
            "network": kept.network,
            "classes": list(kept.classes),
            "connectome": kept.signature,
            "scan": facts.scan,
            "training": facts.training,
            "experiment": facts.experiment and facts.experiment.model_dump(mode="json"),
            "scores": facts.scores,
            "threshold": THRESHOLD,
            "site_threshold": facts.site_threshold,
            "distances": facts.distances,
            "batch_norm_layer": layer and layer[0],
            "weights_sha256": weights_digest(kept.model.state_dict()),
            "versions": found,
        },
    }


class _Connectome(BaseModel):
    """What a store's signature states, as far as a prediction needs it."""

    model_config = ConfigDict(strict=True)

    atlas: str
    kind: str
    estimator: str
    transform: str
    edge_order: str
    negative: str
    window: Annotated[int, Field(ge=3)] | None
    stride: Annotated[int, Field(ge=1)] | None
    n_edges: int
    rois: list[Annotated[list[str], Field(min_length=2, max_length=2)]]


class _Facts(BaseModel):
    """The part of ``metadata.json`` that :mod:`fedbn.models.prediction` uses."""

    model_config = ConfigDict(strict=True)

    site: str
    job: str
    finetuned: bool
    network: dict[str, Any]
    connectome: _Connectome
    scan: dict[str, Any] | None
    experiment: dict[str, Any] | None
    threshold: float
    site_threshold: float | None
    distances: dict[str, Annotated[list[float], Field(min_length=3, max_length=3)]] | None
    weights_sha256: str


def check_facts(facts: dict[str, Any]) -> None:
    """Refuse facts of a bundle that are not as :func:`metadata` writes them.

    Raises
    ------
    ValueError
        Naming the first field that is wrong, and why.
    """
    try:
        found = _Facts.model_validate(facts)
    except ValidationError as error:
        raise ValueError(f"metadata.json, fedbn.{fault(error, facts, _Facts)}") from None
    n_rois = len(found.connectome.rois)
    if found.connectome.n_edges != n_rois * (n_rois - 1) // 2:
        raise ValueError(
            f"metadata.json states {found.connectome.n_edges} edges for {n_rois} regions"
        )


def _data_type(kept: KeptModel) -> str:
    made_up = ", SYNTHETIC subjects" if kept.signature.get("synthetic") else ""
    return f"{kept.signature['kind']} connectomes, {kept.signature['atlas']}{made_up}"


def _eval_metrics(facts: SiteFacts) -> dict[str, Any]:
    if not facts.scores:
        return {}
    of_subject = facts.scores["subject"]
    return {name: of_subject.get(name) for name in (*(m.name for m in TWO_CLASSES[:5]), "n")}


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
    signature = kept.signature
    window = "the whole scan"
    if signature.get("window"):
        window = f"windows of {signature['window']} time points, {signature['stride']} apart"
    lines = [
        f"# The model of site {kept.site}",
        "",
        f"**{NOTICE}**",
        "",
        "**It stays at the site.** It holds the site's own batch norm and standardisation, which "
        "no message of the federation carries.",
        "",
        f"- Job {kept.job}, policy {kept.policy}; {kept.origin}.",
        f"- Network: {kept.network['name']}"
        + (", trained further at this site after the last round." if kept.finetuned else "."),
        f"- Input: {_data_type(kept)}: {len(kept.model.mean)} edges between "
        f"{signature['n_rois']} regions, {window}, estimator {signature['estimator']}, "
        f"transform {signature['transform']}, negative values: {signature['negative']}. "
        "Not standardised: that is a layer of the network.",
        f"- Output: logits of {' and '.join(kept.classes)}.",
        *_readme_scores(facts),
        "",
        "## Use",
        "",
        "```sh",
        f"fedbn predict --model FOLDER --input SCAN_rois.1D --out {kept.site}_predictions",
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
        "--config_file configs/inference.json --inputs \"['SCAN_rois.1D']\"",
        "```",
        "",
    ]
    if not compiled:
        lines += [
            "This network cannot be compiled by TorchScript: there is no models/model.ts.",
            "",
        ]
    return "\n".join(lines)


def _readme_scores(facts: SiteFacts) -> list[str]:
    lines = []
    if facts.scores:
        of_subject = facts.scores["subject"]
        accuracy, auc = of_subject["accuracy"], of_subject["auc"]
        lines.append(
            f"- Held-out subjects: {of_subject['n']}, accuracy {_shown(accuracy)} at a threshold "
            f"of {THRESHOLD}, AUC {_shown(auc)}."
        )
    else:
        lines.append("- Its scores are not known: no held-out subject of this site was scored.")
    if facts.site_threshold is not None:
        lines.append(
            f"- Threshold of the best accuracy on the site's training subjects: "
            f"{facts.site_threshold:.3f}."
        )
    if facts.distances is None:
        lines.append(
            "- Exported without the site's store: it cannot say whether a scan is unlike those it "
            "was trained on."
        )
    return lines


def _shown(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"
