"""Schemas of clients: enforced or refused by their place, never quietly ignored."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from caudal.errors import InvalidRequestError
from caudal.sampling_params import StructuredOutputsParams
from caudal.structured_output.grammar import check_grammar
from tests.structured_output.walker import (
    KINDS,
    can_follow,
    compile_form,
    feed,
    random_text,
)

SHARED_PARTS = {
    "$defs": {
        "B": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 10}},
            "required": ["x"],
        }
    },
    "allOf": [
        {"$ref": "#/$defs/B"},
        {"type": "object", "properties": {"y": {"type": "string"}}, "required": ["y"]},
    ],
}


def form(schema: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=schema)


def refusal(schema: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        check_grammar(form(schema), "here")
    assert caught.value.code == "invalid_json_schema"
    return caught.value.message


def in_property(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("not", {"type": "string"}),
        ("propertyNames", {"pattern": "^a"}),
        ("unevaluatedProperties", False),
        ("unevaluatedItems", False),
        ("uniqueItems", True),
        ("contains", {"type": "string"}),
        ("dependentRequired", {"a": ["b"]}),
        ("if", {"type": "string"}),
        ("$dynamicRef", "#x"),
        ("x-guidance", {"lenient": True}),
    ],
)
def test_keyword_that_cannot_be_enforced_is_named_by_its_pointer(keyword: str, value: Any) -> None:
    """B67."""
    message = refusal(in_property({"type": "array", "items": {keyword: value}}))
    assert message.startswith(f"here: /properties/a/items/{keyword}: the keyword '{keyword}' is")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "/oneOf"),
        ({"type": "foo"}, "/type"),
        ({"$ref": "#/$defs/nowhere"}, "/$ref"),
        ({"$ref": "http://example.com/schema"}, "/$ref"),
        ({"type": "string", "pattern": "(?=a)b"}, "/pattern"),
        ({"type": "string", "pattern": "(a{1000}){1000}"}, "/pattern"),
        ({"type": "string", "format": "uri-template"}, "/format"),
        ({"type": "string", "maxLength": 10**9}, "/maxLength"),
        ({"type": "integer", "multipleOf": 1_000_003}, "/multipleOf"),
        ({"properties": {f"p{i}": {} for i in range(300)}}, "/properties"),
        ({"enum": list(range(5_001))}, "/enum"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, ""),
        ({"properties": {"b/c": 7}}, "/properties/b~1c"),
    ],
)
def test_what_only_compiling_finds_still_has_a_pointer(schema: Any, place: str) -> None:
    assert refusal(in_property(schema)).startswith(f"here: /properties/a{place}: ")


@pytest.mark.parametrize(
    "schema", ["{", "[]", "nope", '{"a": NaN}', 7, False, "[" * 5_000, '{"a":' * 5_000]
)
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    refusal(schema)


def test_schema_nested_too_deeply_is_refused_before_it_is_compiled() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        schema = in_property(schema)
    assert "more than 32 levels deep" in refusal(schema)
    assert "131072 characters" in refusal(json.dumps({"title": "x" * 140_000}))
    wide = {"anyOf": [{"const": i} for i in range(6_000)]}
    assert "more than 5000 schemas" in refusal(wide)


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": False, "unevaluatedProperties": True, "dependentRequired": {}},
        {"title": "x", "description": "y", "default": 3, "examples": [1], "$comment": "z"},
        {"type": "integer", "format": "int64", "banana": 1, "discriminator": {"propertyName": "k"}},
        {"type": "string", "format": "password", "$id": "http://example.com/x"},
        True,
        {},
    ],
)
def test_keyword_that_asks_for_nothing_is_accepted(schema: Any) -> None:
    check_grammar(form(schema), "here")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "schema",
    [
        {
            "type": "object",
            "properties": {"a": {"type": "string", "pattern": "^hello there indeed\\\\!$"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        SHARED_PARTS,
        {
            "$defs": {"C": {"enum": ["r", "g"]}},
            "properties": {"c": {"$ref": "#/$defs/C"}},
            "required": ["c"],
            "type": "object",
        },
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        {"type": "string", "pattern": "\\S"},
        {"type": "string", "pattern": "e r", "maxLength": 12},
    ],
    ids=["B53", "B55", "B63", "B59", "B61", "unanchored"],
)
def test_output_validates_whatever_the_model_prefers(schema: Any, kind: str) -> None:
    """B53, B55, B59, B61, B63: fifty seeds each."""
    for seed in range(25):
        jsonschema.validate(json.loads(random_text(form(schema), seed, kind=kind)), schema)


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "const"]
    if depth < 2:
        kinds += ["array", "object", "object", "anyOf", "nullable"]
    kind = rng.choice(kinds)
    if kind == "integer":
        low = rng.randrange(-50, 50)
        bounds = [{}, {"minimum": low}, {"maximum": low}, {"minimum": low, "maximum": low + 7}]
        return {"type": "integer", **rng.choice([*bounds, {"multipleOf": rng.randrange(1, 9)}])}
    if kind == "number":
        bounds = [{}, {"minimum": -1.5}, {"exclusiveMinimum": 0, "maximum": 2.25}]
        return {"type": "number", **rng.choice(bounds)}
    if kind == "string":
        options: list[dict[str, Any]] = [
            {"maxLength": 5}, {"minLength": 2, "maxLength": 4}, {"pattern": "^[a-c]{1,3}-\\d$"},
            {"format": "date"}, {"format": "ipv4"}, {"format": "uuid"},
        ]  # fmt: skip
        return {"type": "string", **rng.choice(options)}
    if kind == "enum":
        return {"enum": rng.sample(["a", "bc", 'q"x', "ü", 1, 2.5, None, True], 3)}
    if kind == "const":
        return {"const": rng.choice(["x", 5, False, [1, "a"], {"k": None}])}
    if kind == "array":
        item = random_schema(rng, depth + 1)
        return {"type": "array", "items": item, "minItems": rng.randrange(2), "maxItems": 3}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    if kind == "nullable":
        return {"type": ["null", rng.choice(["boolean", "integer"])]}
    if kind == "object":
        names = rng.sample(["a", "b c", 'd"e', "ф", "e"], rng.randrange(1, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth + 1) for name in names},
            "required": rng.sample(names, rng.randrange(len(names) + 1)),
            "additionalProperties": False,
        }
    return {"type": kind}


@pytest.mark.parametrize("seed", range(120))
def test_output_of_a_random_schema_parses_and_validates(seed: int) -> None:
    rng = random.Random(seed)
    schema = random_schema(rng)
    checker = jsonschema.FormatChecker()
    for attempt in range(3):
        text = random_text(form(schema), seed + attempt, kind=rng.choice(KINDS))
        jsonschema.validate(json.loads(text), schema, format_checker=checker)


def test_white_space_between_tokens_does_not_go_on_for_ever() -> None:
    """B57."""
    constraint = compile_form(StructuredOutputsParams(json_object=True))
    feed(constraint, "{        ")
    assert not can_follow(constraint, " ")
    assert not can_follow(constraint, "\n")
    assert can_follow(constraint, "}")
    for seed in range(20):
        text = random_text(StructuredOutputsParams(json_object=True), seed)
        outside = re.sub(r'"(?:\\.|[^"\\])*"', '""', text)
        assert not re.search(r"\s{9}", outside)


@pytest.mark.parametrize("start", ['{"a": ', '{"a": -', '{"a": 1.', '{"a": [1, '])
def test_number_does_not_go_on_for_ever(start: str) -> None:
    constraint = compile_form(StructuredOutputsParams(json_object=True))
    feed(constraint, start + "1" * 32)
    assert not can_follow(constraint, "1")
    assert can_follow(constraint, " ")
    in_text = compile_form(StructuredOutputsParams(json_object=True))
    feed(in_text, '{"a": "' + "1" * 40)
    assert can_follow(in_text, "1")


def test_number_goes_on_where_the_schema_wants_nothing_else() -> None:
    constraint = compile_form(form({"const": 10**40}))
    feed(constraint, "1" + "0" * 38)
    assert can_follow(constraint, "0")


def test_nothing_but_an_end_follows_a_complete_object() -> None:
    """B57."""
    constraint = compile_form(form({"type": "object", "additionalProperties": False}))
    feed(constraint, "{}")
    assert not can_follow(constraint, " ")
    assert not constraint.is_complete
