"""JSON schemas of clients: what is enforced passes, what could not be is refused by its place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from fractions import Fraction
from math import lcm
from typing import Any

from caudal.errors import InvalidRequestError
from caudal.structured_output.limits import (
    MAX_ENUM_VALUES,
    MAX_ITEMS,
    MAX_MULTIPLE,
    MAX_OPTIONAL_PROPERTIES,
    MAX_PROPERTIES,
    MAX_SCHEMA_DEPTH,
    MAX_SUBSCHEMAS,
    MAX_TEXT_CHARS,
)
from caudal.structured_output.regex import check_regex

Schema = dict[str, Any]

_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalItems", "additionalProperties")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "if": (),
    "then": (),
    "else": (),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "propertyNames": (True, {}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "contains": (),
    "minContains": (),
    "maxContains": (),
    "uniqueItems": (False,),
    "$dynamicRef": (),
    "$recursiveRef": (),
    "x-guidance": (),
}
"""Keywords that would be wrong to ignore, with the values that ask for nothing."""

_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_STANDARD_FORMATS = _FORMATS | {
    "idn-email",
    "idn-hostname",
    "iri",
    "iri-reference",
    "uri-reference",
    "uri-template",
    "json-pointer",
    "relative-json-pointer",
    "regex",
}
"""Formats of the JSON Schema standard; others are annotations that nobody could enforce."""


def parse_schema(value: dict[str, Any] | bool | str, where: str) -> Schema:
    """A schema as given by a client (an object, or its JSON text) as an object.

    Raises InvalidRequestError, beginning with `where`.
    """
    if isinstance(value, str):
        check_length(value, where)
        value = _load(value, where)
    if value is True:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{where}: must be a JSON schema, an object.", code=_CODE)
    return value


def check_length(text: str, where: str) -> None:
    """Raise InvalidRequestError if a schema or grammar is too long."""
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidRequestError(
            f"{where}: at most {MAX_TEXT_CHARS} characters, got {len(text)}.", code=_CODE
        )


def check_schema(schema: Schema, where: str) -> Schema:
    """`schema` without what has no effect; raises InvalidRequestError for what is not enforced.

    Messages begin with `where`, then the JSON pointer of the keyword.
    """
    return _Checker(where).check(schema)


_CODE = "invalid_json_schema"


def _load(text: str, where: str) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        raise InvalidRequestError(f"{where}: not valid JSON.", code=_CODE) from None


def pointer(parts: tuple[str | int, ...]) -> str:
    """A JSON pointer (RFC 6901)."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


class _Checker:
    """Walks every place of a schema where a schema stands."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._num_schemas = 0
        self._num_values = 0
        self._depth = 0
        self._multiples: list[Fraction] = []

    def check(self, schema: Schema) -> Schema:
        result = self._schema(schema, ())
        assert isinstance(result, dict)
        return result

    def _error(self, path: tuple[str | int, ...], problem: str) -> InvalidRequestError:
        place = pointer(path)[:512] or "/"
        return InvalidRequestError(f"{self._where}: {place}: {problem}.", code=_CODE)

    def _schema(self, schema: Any, path: tuple[str | int, ...]) -> Any:
        self._num_schemas += 1
        if self._num_schemas > MAX_SUBSCHEMAS:
            raise self._error(path, f"more than {MAX_SUBSCHEMAS} schemas within the schema")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise self._error(path, "must be a schema: an object or a boolean")
        self._depth += 1
        if self._depth > MAX_SCHEMA_DEPTH:
            raise self._error(path, f"nested more than {MAX_SCHEMA_DEPTH} levels deep")
        result: Schema = {}
        for key, value in schema.items():
            if key in _UNSUPPORTED:
                self._refuse(key, value, (*path, key))
            elif key in _SCHEMA_MAPS:
                result[key] = self._map(value, (*path, key))
            elif key in _SCHEMA_LISTS or (key == "items" and isinstance(value, list)):
                result[key] = self._list(value, (*path, key))
            elif key in _SCHEMAS:
                result[key] = self._schema(value, (*path, key))
            elif key not in ("$id", "id", "format"):
                self._value(key, value, (*path, key))
                result[key] = value
        self._check_object(schema, path)
        if self._keeps_format(schema, path):
            result["format"] = schema["format"]
        self._depth -= 1
        return result

    def _refuse(self, key: str, value: Any, path: tuple[str | int, ...]) -> None:
        neutral = _UNSUPPORTED[key]
        if not any(type(value) is type(other) and value == other for other in neutral):
            raise self._error(path, f"the keyword {key!r} is not supported")

    def _map(self, value: Any, path: tuple[str | int, ...]) -> Schema:
        if not isinstance(value, dict):
            raise self._error(path, "must be an object of schemas")
        if path[-1] == "patternProperties":
            for name in value:
                check_regex(name, f"{self._where}: {pointer((*path, name))[:512]}", _CODE)
        return {name: self._schema(item, (*path, name)) for name, item in value.items()}

    def _list(self, value: Any, path: tuple[str | int, ...]) -> list[Any]:
        if not isinstance(value, list):
            raise self._error(path, "must be a list of schemas")
        return [self._schema(item, (*path, index)) for index, item in enumerate(value)]

    def _value(self, key: str, value: Any, path: tuple[str | int, ...]) -> None:
        """Check a keyword that holds no schema."""
        if key == "$ref":
            if not isinstance(value, str) or not value.startswith("#"):
                raise self._error(path, "only references within the schema ('#/…') are supported")
        elif key == "enum":
            self._num_values += len(value) if isinstance(value, list) else 0
            if self._num_values > MAX_ENUM_VALUES:
                raise self._error(path, f"more than {MAX_ENUM_VALUES} enum values in the schema")
        elif key == "pattern":
            if not isinstance(value, str):
                raise self._error(path, "must be a text")
            check_regex(value, f"{self._where}: {pointer(path)[:512]}", _CODE)
        elif key in _COUNTS:
            if isinstance(value, int | float) and value > MAX_ITEMS:
                raise self._error(path, f"must be at most {MAX_ITEMS}")
        elif key == "multipleOf":
            self._multiple(value, path)

    def _multiple(self, value: Any, path: tuple[str | int, ...]) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
            raise self._error(path, "must be a number above 0")
        self._multiples.append(Fraction(repr(value)))
        unit = lcm(*(each.denominator for each in self._multiples))
        if lcm(*(int(each * unit) for each in self._multiples)) > MAX_MULTIPLE:
            raise self._error(
                path,
                "the common multiple of all multipleOf, in units of the last decimal place, must "
                f"be at most {MAX_MULTIPLE}",
            )

    def _check_object(self, schema: Schema, path: tuple[str | int, ...]) -> None:
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            return
        required = schema.get("required")
        names = set(map(str, required)) if isinstance(required, list) else set()
        num_optional = len(properties.keys() - names)
        if len(properties) > MAX_PROPERTIES or num_optional > MAX_OPTIONAL_PROPERTIES:
            raise self._error(
                (*path, "properties"),
                f"at most {MAX_PROPERTIES} properties, {MAX_OPTIONAL_PROPERTIES} of them not "
                f"required; got {len(properties)}, {num_optional} of them not required",
            )

    def _keeps_format(self, schema: Schema, path: tuple[str | int, ...]) -> bool:
        name = schema.get("format")
        if name not in _STANDARD_FORMATS:
            return False
        kinds = schema.get("type", "string")
        if kinds != "string" and not (isinstance(kinds, list) and "string" in kinds):
            return False
        if name not in _FORMATS:
            raise self._error((*path, "format"), f"the format {name!r} is not supported")
        return True


MOVED_ROOT = "/$defs/root"
"""Where `find_fault` puts the whole schema, to look at its parts."""


def find_fault(
    schema: Schema, compile_error: Callable[[Schema], str | None], max_tries: int = 64
) -> tuple[str, str] | None:
    """Pointer and error of the innermost subschema that does not compile by itself."""
    root = _with_moved_refs(schema)
    places = sorted(_places(schema, ()), key=len, reverse=True)
    for path in places[-max_tries:]:
        error = compile_error({"$defs": {"root": root}, "$ref": "#" + MOVED_ROOT + pointer(path)})
        if error is not None:
            return pointer(path) or "/", error
    return None


def _with_moved_refs(value: Any) -> Any:
    """The schema with its references changed for its new place."""
    if isinstance(value, list):
        return [_with_moved_refs(item) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _with_moved_refs(item) for key, item in value.items()}
    ref = moved.get("$ref")
    if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")):
        moved["$ref"] = "#" + MOVED_ROOT + ref[1:]
    return moved


def _places(schema: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    if not isinstance(schema, dict):
        return
    yield path
    for key, value in schema.items():
        if key in _SCHEMA_MAPS and isinstance(value, dict):
            for name, item in value.items():
                yield from _places(item, (*path, key, name))
        elif isinstance(value, list) and (key in _SCHEMA_LISTS or key == "items"):
            for index, item in enumerate(value):
                yield from _places(item, (*path, key, index))
        elif key in _SCHEMAS:
            yield from _places(value, (*path, key))
