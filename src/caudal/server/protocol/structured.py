"""Fields that say what form an answer must have: OpenAI's, vLLM's and vLLM's former ones."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

FORMAT_TYPES = ("text", "json_object", "json_schema")

_TYPE_SCHEMA = {"enum": list(FORMAT_TYPES)}
_OBJECT_OR_BOOLEAN = {"type": ["object", "boolean"]}

JsonSchema = Annotated[Any, Meta(extra_json_schema=_OBJECT_OR_BOOLEAN)]


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """A schema with a name. It is always enforced, whatever `strict` says."""

    name: Annotated[str, Meta(max_length=256)] | None = None
    description: str | None = None
    schema: JsonSchema = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's way to ask for JSON."""

    type: Annotated[str, Meta(extra_json_schema=_TYPE_SCHEMA)]
    json_schema: JsonSchemaFormat | None = None
    """With type json_schema."""


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's way: exactly one of these."""

    json: JsonSchema = None
    """A JSON schema, as an object or as its text."""
    json_object: bool | None = None
    """true: any JSON object."""
    regex: str | None = None
    """Matches the whole answer."""
    choice: list[str] | None = None
    """The answer is one of these."""
    grammar: str | None = None
    """Lark's notation with a rule `start`, or GBNF with a rule `root`."""


class FormFields(msgspec.Struct, kw_only=True):
    """At most one of these may ask for a form."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema = None
    """Former name of `structured_outputs.json`; so are the next ones."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
