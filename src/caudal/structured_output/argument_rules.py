"""Grammar rules of the arguments of a call in notations other than JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from caudal.errors import InvalidRequestError

_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_NAMES: Mapping[type, str] = {
    bool: "boolean",
    str: "string",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}

_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_MAX_OPEN = 16
"""Arguments of a function whose schema does not name them."""

JsonRule = Callable[[dict[str, Any]], str]
"""The right side of a rule for JSON of a schema."""


def type_of(value: object) -> str:
    """The JSON type of a value."""
    return _NAMES.get(type(value), "null")


def json_types(schema: object) -> frozenset[str]:
    """The JSON types that `schema` allows; none if it does not say."""
    if not isinstance(schema, dict):
        return frozenset()
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared
    if isinstance(names, list):
        return frozenset(name for name in names if isinstance(name, str) and name in _TYPES)
    if isinstance(schema.get("enum"), list):
        return frozenset(type_of(value) for value in schema["enum"])
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            parts = [json_types(part) for part in schema[key]]
            return frozenset().union(*parts) if all(parts) else frozenset()
    return frozenset()


def xml_rules(name: str, schema: dict[str, Any], json_rule: JsonRule) -> list[str]:
    """Rules from `name` on for `<parameter=KEY>` elements with the properties of `schema`.

    They come in the order of the schema. Text is any text, or one of an enum; its length and
    pattern are not enforced. Raises InvalidRequestError for a name that cannot be written.
    """
    text, text_end = f"{name.upper()}_TEXT", json.dumps("\n</parameter>\n")
    lines = [f"{text}: /(.|\\n)*/"]
    if not isinstance(schema.get("properties"), dict):
        return [
            f"{name}: {name}_any{{0,{_MAX_OPEN}}}",
            f'{name}_any: "<parameter=" {_KEY} ">\\n" {name}_value',
            f"{name}_value[lazy]: {text} {text_end}",
            *lines,
        ]
    symbols = []
    for index, (key, part, is_required) in enumerate(_properties(schema)):
        if any(char in key for char in "<>\n") or key != key.strip():
            raise _cannot(key)
        each = f"{name}_{index}"
        begin = json.dumps(f"<parameter={key}>\n")
        types = json_types(part)
        if types == {"string"} and isinstance(part.get("enum"), list):
            options = " | ".join(json.dumps(option) for option in part["enum"])
            lines.append(f"{each}: {begin} ({options}) {text_end}")
        elif types and "string" not in types:
            lines += [
                f"{each}: {begin} {each}_value {text_end}",
                f"{each}_value: {json_rule(part)}",
            ]
        else:
            lines += [f"{each}: {begin} {each}_value"]
            lines += [f"{each}_value[lazy]: {text} {text_end}"]
        symbols.append(each if is_required else f"{each}?")
    return [f"{name}: {' '.join(symbols)}", *lines]


def python_rules(name: str, schema: dict[str, Any], json_rule: JsonRule) -> list[str]:
    """Rules from `name` on for `key=value, …` with the properties of `schema`, values as JSON.

    Raises InvalidRequestError for a required name that Python does not allow.
    """
    if not isinstance(schema.get("properties"), dict):
        return [
            f'{name}: ({name}_any (", " {name}_any){{0,{_MAX_OPEN}}})?',
            f'{name}_any: {_KEY} "=" {name}_value',
            f"{name}_value: {json_rule({})}",
        ]
    lines = [f"{name}: {name}_first_0"]
    parts = []
    for key, part, is_required in _properties(schema):
        if key.isidentifier():
            parts.append((key, part, is_required))
        elif is_required:
            raise _cannot(key)
    for index, (key, part, is_required) in enumerate(parts):
        value, first, more = (f"{name}_{kind}_{index}" for kind in ("value", "first", "more"))
        next_first, next_more = f"{name}_first_{index + 1}", f"{name}_more_{index + 1}"
        skip_first, skip_more = ("", "") if is_required else (f" | {next_first}", f" | {next_more}")
        begin = json.dumps(f"{key}=")
        lines.append(f"{value}: {json_rule(part)}")
        lines.append(f"{first}: {begin} {value} {next_more}{skip_first}")
        lines.append(f'{more}: ", " {begin} {value} {next_more}{skip_more}')
    end = len(parts)
    return [*lines, f'{name}_first_{end}: ""', f'{name}_more_{end}: ""']


def _properties(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any], bool]]:
    """(name, schema with the definitions of the whole, whether it must be there)."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return []
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = schema.get("required")
    names = set(required) if isinstance(required, list) else set()
    return [
        (key, {**shared, **part} if isinstance(part, dict) else {}, key in names)
        for key, part in properties.items()
        if part is not False
    ]


def _cannot(key: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"tools: the parameter {key[:64]!r} has a name that this model cannot write.",
        param="tools",
        code="invalid_value",
    )
