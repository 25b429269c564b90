"""One sentence for what is wrong in a settings file, whichever file and whichever depth."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedbn.federation.experiment import ExperimentError, read_experiment
from fedbn.federation.settings_file import RepeatedFieldError, fault, parse_yaml, read_json
from fedbn.study.selection import CandidatesError, read_protocol


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Cat(_Strict):
    kind: Literal["cat"] = "cat"
    lives: int = Field(default=9, ge=1)


class Dog(_Strict):
    kind: Literal["dog"] = "dog"
    tricks: tuple[str, ...] = ()


class Home(_Strict):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")] = Cat()
    rooms: dict[Annotated[str, Field(pattern="^[a-z]+$")], Cat | None] = {}
    weights: Literal["balanced"] | list[float] | None = None
    address: str


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"adress": "x"}, "address: it is missing"),
        ({"address": "x", "addres": 1}, "addres: there is no such field; did you mean 'address'?"),
        (
            {"address": "x", "q": 1},
            "q: there is no such field; the fields are pet, rooms, weights, address",
        ),
        (
            {"address": "x", "pet": {"kind": "dog", "trick": []}},
            "pet.trick: there is no such field; did you mean 'tricks'?",
        ),
        (
            {"address": "x", "pet": {"kind": "cat", "lives": 0}},
            "pet.lives: it must be greater than or equal to 1, got 0",
        ),
        (
            {"address": "x", "rooms": {"hall": {"live": 2}}},
            "rooms.hall.live: there is no such field; did you mean 'lives'?",
        ),
        (
            {"address": "x", "rooms": {"HALL": None}},
            "rooms.HALL: it must match pattern '^[a-z]+$', got 'HALL'",
        ),
        ({"address": "x", "rooms": {"hall": 3}}, "rooms.hall: it must be an object {…}, got 3"),
        (
            {"address": "x", "weights": "balancd"},
            "weights: it must be 'balanced', got 'balancd'; did you mean 'balanced'?",
        ),
        ("x", "it must be an object {…}, got 'x'"),
    ],
)
def test_a_fault_is_the_field_the_value_what_is_allowed_and_close_names(content, sentence):
    with pytest.raises(ValidationError) as caught:
        Home.model_validate(content)
    assert fault(caught.value, content, Home) == sentence


def test_a_long_value_is_quoted_in_part():
    content = {"address": ["x" * 1000]}
    with pytest.raises(ValidationError) as caught:
        Home.model_validate(content)
    assert len(fault(caught.value, content, Home)) < 100


def test_with_advice_no_value_is_quoted():
    content = {"address": 3, "pet": {"kind": "cat"}}
    with pytest.raises(ValidationError) as caught:
        Home.model_validate(content)
    advice = {"address": "give a street"}
    assert fault(caught.value, content, Home, advice) == "address: it cannot be used; give a street"


REPEATED = ['{"a": 1, "a": 1}', '{"b": {"a": 1, "a": 2}}', '{"b": [{"a": 1}, {"a": 1, "a": 2}]}']


@pytest.mark.parametrize("text", REPEATED)
def test_a_field_that_stands_twice_is_refused_at_any_depth(tmp_path, text):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(RepeatedFieldError, match=r"^a: it stands there twice; keep one$"):
        read_json(tmp_path / "file.json")
    with pytest.raises(RepeatedFieldError, match=r"^a: it stands there twice \(again in line 1\)"):
        parse_yaml(text)


def test_the_same_field_in_two_objects_is_no_repetition(tmp_path):
    text = '{"a": {"b": 1}, "c": {"b": 1, "a": 2}}'
    (tmp_path / "file.json").write_text(text)
    assert read_json(tmp_path / "file.json") == parse_yaml(text) == json.loads(text)


@pytest.mark.parametrize(
    ("read", "error", "text"),
    [
        (read_experiment, ExperimentError, '{"rounds": 2, "rounds": 20}'),
        (read_experiment, ExperimentError, '{"training": {"batch_size": 2, "batch_size": 8}}'),
        (read_experiment, ExperimentError, '{"network": {"args": {"hidden": 1, "hidden": 2}}}'),
        (read_protocol, CandidatesError, '{"n_folds": 3, "candidates": [], "n_folds": 4}'),
    ],
)
def test_every_settings_file_refuses_it(tmp_path, read, error, text):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(error, match=r"file\.json: \w+: it stands there twice; keep one"):
        read(tmp_path / "file.json")
