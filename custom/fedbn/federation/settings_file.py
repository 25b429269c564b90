"""Settings as people write them: no field stands twice, and what is wrong is one sentence.

A file in which a field stands twice means one of two things, and its reader would take the last
without a word; so such a file is refused, at any depth, in JSON and in YAML.
"""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


class RepeatedFieldError(ValueError):
    """A field stands twice in one object; the message names it."""

    def __init__(self, field: object, line: int | None = None):
        again = "" if line is None else f" (again in line {line})"
        super().__init__(f"{field}: it stands there twice{again}; keep one")


def read_json(path: Path) -> Any:
    """Read a JSON file of settings, in UTF-8.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it is no JSON, or a field stands in it twice (:class:`RepeatedFieldError`).
    """
    return json.loads(path.read_bytes(), object_pairs_hook=_once)


def parse_yaml(text: str) -> Any:
    """Read YAML settings; tags that would build objects are refused.

    Raises
    ------
    yaml.YAMLError
        If it is no YAML.
    RepeatedFieldError
        With the line in which the field stands again.
    """
    import yaml

    _refuse_repeated(yaml.compose(text, Loader=yaml.SafeLoader))
    return yaml.safe_load(text)


def fault(
    error: ValidationError,
    content: Any,
    model: type[BaseModel],
    advice: Mapping[str, str] | None = None,
) -> str:
    """Say what is wrong first: the field, the value, what is allowed, and names that are close.

    Parameters
    ----------
    error
        What pydantic found.
    content
        What was validated.
    model
        What it was validated as.
    advice
        What to do about each field of the model. With it no value is quoted, for a sentence that
        leaves the machine.

    Returns
    -------
    str
        ``"training.optimizer: it must be 'sgd', 'adam' or 'adamw', got 'sdg'; did you mean …"``.
    """
    first = error.errors()[0]
    location = _location(first["loc"], content, is_missing=first["type"] == "missing")
    if first["type"] in ("extra_forbidden", "invalid_key"):
        reason = f"there is no such field; {_names(model, location, content)}"
    elif first["type"] == "value_error":
        reason = first["msg"].removeprefix("Value error, ")
    elif advice is not None:
        reason = "it cannot be used"
    elif first["type"] == "missing":
        reason = "it is missing"
    else:
        reason = _reason(first["type"], first["msg"], first["input"])
    if advice is not None and location and location[0] in advice:
        options = advice[location[0]]
        reason += f"; {options}"
        if first["type"] != "value_error":
            reason += _close(first["input"], re.findall(r"\w+", options), cutoff=0.8)
    return ": ".join(filter(None, (".".join(location), reason)))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise RepeatedFieldError(key)
        found[key] = value
    return found


def _refuse_repeated(root: Any) -> None:
    waiting, looked_at = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in looked_at or getattr(node, "id", "") not in ("mapping", "sequence"):
            continue
        looked_at.add(id(node))  # an alias of YAML may lead back to where it stands
        if node.id == "sequence":
            waiting += node.value
            continue
        seen: set[str] = set()
        for key, value in node.value:
            if str(key.value) in seen:
                raise RepeatedFieldError(key.value, key.start_mark.line + 1)
            seen.add(str(key.value))
            waiting.append(value)


def _location(loc: Iterable[Hashable], content: Any, *, is_missing: bool) -> list[str]:
    """Return the part of pydantic's location that is in the content: no names of union members."""
    found = []
    for part in loc:
        try:
            content = content[part]
        except (KeyError, IndexError, TypeError):
            continue
        found.append(str(part))
    return [*found, str(list(loc)[-1])] if is_missing else found


def _names(model: type[BaseModel], location: list[str], content: Any) -> str:
    """Say which fields there are where an unknown one stands."""
    models = {model}
    for part in location[:-1]:
        of_part = [m.model_fields[part].annotation for m in models if part in m.model_fields]
        content = content.get(part) if isinstance(content, Mapping) else None
        name = content.get("name") if isinstance(content, Mapping) else None
        inner = {one for annotation in of_part for one in _models(annotation)}
        models = {_called(one, name) or one for one in inner} or models
    names = list(dict.fromkeys(name for m in models for name in m.model_fields))
    return _close(location[-1], names).removeprefix("; ") or f"the fields are {', '.join(names)}"


def _called(model: type[BaseModel], name: object) -> type[BaseModel] | None:
    """Return the model's subclass whose objects have this name, such as a task's."""
    for one in model.__subclasses__():
        if name is not None and getattr(one.model_fields.get("name"), "default", None) == name:
            return one
        if found := _called(one, name):
            return found
    return None


def _models(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _reason(kind: str, message: str, value: Any) -> str:
    must = re.sub(r"^\w+ should ", "it must ", message)
    if kind in ("model_type", "dict_type"):
        must = "it must be an object {…}"
    hint = _close(value, re.findall(r"'([^']+)'", message)) if kind == "literal_error" else ""
    return f"{must}, got {reprlib.repr(value)}{hint}"


def _close(value: Any, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a hint where a text is close to a name, and not the name itself."""
    by_folded = {name.lower(): name for name in names}
    found = difflib.get_close_matches(str(value).lower(), by_folded, 1, cutoff)
    is_new = isinstance(value, str) and found and by_folded[found[0]] != value
    return f"; did you mean {by_folded[found[0]]!r}?" if is_new else ""
