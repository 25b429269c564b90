"""Changes of an experiment as people write them: the dotted path of a field, and its value."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fedbn.federation.experiment import Experiment, ExperimentError, validated
from fedbn.federation.settings_file import read_json


def parse_changes(texts: Iterable[str]) -> dict[str, Any]:
    """Read changes as they are typed: ``training.learning_rate=0.01``, ``policy=none``.

    Parameters
    ----------
    texts
        A field's dotted path and a value, which is JSON or else a text. Of three fields a text may
        also be ``NAME`` or ``NAME:{JSON object of arguments}`` (network), ``NYU=0.1,UM=0.5``
        (training_share) or ``NYU,UM`` (sites).

    Returns
    -------
    dict
        Dotted path to value.

    Raises
    ------
    ExperimentError
        If one is no change, or a field is changed twice.
    """
    found: dict[str, Any] = {}
    for text in texts:
        path, equals, value = (part.strip() for part in text.partition("="))
        if not path or not equals:
            raise ExperimentError(
                f"--set {text!r} changes nothing: write FIELD=VALUE, as in training.batch_size=32"
            )
        if path in found:
            raise ExperimentError(f"{path} is set twice; keep one")
        try:
            found[path] = json.loads(value)
        except ValueError:
            found[path] = _AS_TYPED.get(path, str)(value)
    return found


def read_changes(path: Path) -> dict[str, Any]:
    """Read a file of changes: one JSON object, its keys fields or dotted paths of fields.

    Raises
    ------
    ExperimentError
        If it cannot be read, is no JSON object, or names a field twice.
    """
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise ExperimentError(f"cannot read the changes in {path}: {error}") from error
    if not isinstance(content, dict):
        raise ExperimentError(f"{path}: it must be an object {{…}} of fields and their values")
    return content


def with_changes(
    experiment: Experiment, changes: Mapping[str, Any], where: str = "the experiment"
) -> Experiment:
    """Return a copy with some fields changed, validated like the original when all are.

    Parameters
    ----------
    experiment
        Stays as it is.
    changes
        Dotted path to value. An object changes the fields that it names and leaves the others of
        its group (``training``, ``finetune``); one with a ``name`` takes the place of the whole
        (``network``, ``algorithm``, ``task``), and so does what is no group (``network.args``).
    where
        For the message.

    Raises
    ------
    ExperimentError
        With the first field that is wrong, and why.
    """
    content = experiment.model_dump()
    for path, value in changes.items():
        _put(content, experiment, path, value, where)
    return validated(content, where)


def _put(place: dict[str, Any], settings: Any, path: str, value: Any, where: str) -> None:
    *groups, name = path.split(".")
    for k, group in enumerate(groups):
        if place.get(group) is None:
            place[group] = {}
        if not isinstance(place[group], dict):
            raise ExperimentError(
                f"{where}: {path}: {'.'.join(groups[: k + 1])} is {place[group]!r}, which has no "
                "fields; set it as a whole"
            )
        place, settings = place[group], getattr(settings, group, None)
    inner = getattr(settings, name, None)
    if isinstance(inner, BaseModel) and isinstance(value, dict) and "name" not in value:
        for key, one in value.items():
            _put(place[name], inner, key, one, where)
    else:
        place[name] = value


def parse_network(text: str) -> dict[str, Any]:
    """Read a network as it is typed: ``NAME``, or ``NAME:{JSON object of arguments}``.

    Raises
    ------
    ExperimentError
        If the arguments are no JSON object.
    """
    name, brace, rest = text.partition("{")
    if not brace:
        return {"name": text.strip(), "args": {}}
    try:
        args = json.loads(brace + rest)
    except ValueError as error:
        raise ExperimentError(
            f"network {text!r}: its arguments are not JSON ({error}); write them as in "
            "'MLP:{\"hidden\": [16, 16]}'"
        ) from error
    name = name.strip()
    if not name.endswith(":"):
        raise ExperimentError(f"network {text!r}: put a colon between its name and its arguments")
    return {"name": name.removesuffix(":").strip(), "args": args}


def parse_training_share(text: str) -> float | dict[str, float]:
    """Read a share of training subjects as it is typed: ``0.25``, or ``NYU=0.1,UM=0.5``.

    Raises
    ------
    ExperimentError
        If it is neither.
    """
    try:
        if "=" not in text:
            return float(text)
        pairs = [part.split("=") for part in text.split(",")]
        shares = {site.strip(): float(share) for site, share in pairs}
    except ValueError as error:
        raise ExperimentError(
            f"training share {text!r} is neither a number, such as 0.25, nor one for each site, "
            "such as NYU=0.1,UM=0.5"
        ) from error
    if len(shares) < len(pairs):
        raise ExperimentError(f"training share {text!r} names a site twice")
    return shares


def parse_sites(text: str) -> list[str]:
    """Read names of sites as they are typed: ``NYU,UM``."""
    return [name.strip() for name in text.split(",")]


_AS_TYPED = {
    "network": parse_network,
    "training_share": parse_training_share,
    "sites": parse_sites,
}
