"""What makes a model call: the form that enforced and strict calls must have."""

from __future__ import annotations

from typing import Any

from caudal.errors import InvalidRequestError
from caudal.sampling_params import StructuralTag, StructuralTags, StructuredOutputsParams
from caudal.server.parsers.output_parser import OutputRules, ReasoningRules
from caudal.server.parsers.reasoning import ReasoningState
from caudal.server.parsers.tool_formats import ToolFormat
from caudal.server.tools import Function, ToolMode, ToolUse

MAX_ENFORCED_CALLS = 16
"""In one answer: small models that may always add another call never end by themselves."""

_PLAIN = frozenset(
    {
        *("type", "properties", "required", "items", "enum", "const", "additionalProperties"),
        *("$ref", "$defs", "definitions", "anyOf", "minItems", "maxItems", "minimum", "maximum"),
        *("minLength", "maxLength", "title", "description"),
    }
)
_COMBINING = frozenset(
    {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "unevaluatedProperties"}
)


def call_constraint(
    tools: ToolUse, format: ToolFormat, reasoning: ReasoningRules | None
) -> StructuredOutputsParams | None:
    """The form of an answer that must call, or whose calls must be strict; None for a free one."""
    is_required = tools.mode is ToolMode.REQUIRED
    if not is_required and not (tools.is_strict and format.has_trigger):
        return None
    max_calls = 1 if format.is_one_list else tools.max_calls
    if is_required and max_calls is None:
        max_calls = MAX_ENFORCED_CALLS
    trigger = None if is_required else format.begin.partition("NAME")[0]
    return StructuredOutputsParams(
        structural_tags=StructuralTags(
            tags=_tags(tools, format, is_required=is_required),
            trigger=trigger,
            min_passages=1 if is_required else 0,
            max_passages=max_calls,
            separator=format.separator,
        ),
        after=_after(reasoning) if is_required else None,
    )


def _tags(tools: ToolUse, format: ToolFormat, *, is_required: bool) -> tuple[StructuralTag, ...]:
    return tuple(
        StructuralTag(
            begin=format.begin.replace("NAME", function.spec.name),
            schema=_schema(function, is_enforced=is_required),
            end=format.end,
            syntax=format.syntax,
        )
        for function in tools.callable
    )


def with_calls(
    form: StructuredOutputsParams, tools: ToolUse | None, output: OutputRules | None
) -> StructuredOutputsParams | None:
    """The form of an answer that is one call or has the form `form`.

    None if no call is possible, or `form` is no JSON.
    """
    schema = {"type": "object"} if form.json_object else form.json
    if schema is None or tools is None or output is None or output.tools is None:
        return None
    calls = _tags(tools, output.tools.format, is_required=True)
    tags = StructuralTags(
        tags=(*calls, StructuralTag(begin="", schema=schema)), min_passages=1, max_passages=1
    )
    return StructuredOutputsParams(structural_tags=tags, after=_after(output.reasoning))


def _after(reasoning: ReasoningRules | None) -> str | None:
    """What ends the reasoning that the prompt has begun."""
    is_open = reasoning is not None and reasoning.state is ReasoningState.REASONING
    return reasoning.format.end if reasoning is not None and is_open else None


def _schema(function: Function, *, is_enforced: bool) -> dict[str, Any]:
    spec = function.spec
    if not (spec.strict or is_enforced):
        return {"type": "object"}
    if not spec.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    closed = _closed({"type": "object", **spec.parameters})
    assert isinstance(closed, dict)
    return _enforceable(closed, function)


def _enforceable(schema: dict[str, Any], function: Function) -> dict[str, Any]:
    """`schema`, or without `strict` what of it can be enforced.

    Raises InvalidRequestError for a strict function with keywords that cannot be.
    """
    from caudal.structured_output.json_schema import check_schema

    where = f"tools[{function.index}].function.parameters"
    for candidate in (schema, _plain(schema)):
        try:
            check_schema(candidate, where)
            return candidate
        except InvalidRequestError as error:
            if function.spec.strict:
                error.param = where
                raise
    return {"type": "object"}


def _plain(schema: Any) -> Any:
    """`schema` with none but the most common keywords."""
    if not isinstance(schema, dict):
        return schema
    result = {key: schema[key] for key in schema if key in _PLAIN}
    for key in ("items", "additionalProperties"):
        if key in result:
            result[key] = _plain(result[key])
    for key in ("properties", "$defs", "definitions"):
        if isinstance(result.get(key), dict):
            result[key] = {name: _plain(part) for name, part in result[key].items()}
    if isinstance(result.get("anyOf"), list):
        result["anyOf"] = [_plain(part) for part in result["anyOf"]]
    return result


def _closed(schema: Any) -> Any:
    """`schema` without properties that it does not name, where it leaves them open.

    Models fill what is open with noise. Parts that other parts are combined with stay open.
    """
    if not isinstance(schema, dict):
        return schema
    schema = dict(schema)
    if isinstance(schema.get("items"), dict):
        schema["items"] = _closed(schema["items"])
    properties = schema.get("properties")
    if isinstance(properties, dict):
        schema["properties"] = {name: _closed(part) for name, part in properties.items()}
        if not _COMBINING & schema.keys():
            schema.setdefault("additionalProperties", False)
    return schema
