"""What makes a model call: the form that enforced and strict calls must have."""

from __future__ import annotations

from typing import Any

from caudal.sampling_params import StructuralTag, StructuralTags, StructuredOutputsParams
from caudal.server.parsers.output_parser import ReasoningRules
from caudal.server.parsers.reasoning import ReasoningState
from caudal.server.parsers.tool_formats import ToolFormat
from caudal.server.protocol.tools import FunctionSpec
from caudal.server.tools import ToolMode, ToolUse

MAX_ENFORCED_CALLS = 16
"""In one answer: small models that may always add another call never end by themselves."""

_COMBINING = frozenset(
    {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "unevaluatedProperties"}
)


def call_constraint(
    tools: ToolUse, format: ToolFormat, reasoning: ReasoningRules | None
) -> StructuredOutputsParams | None:
    """The form of an answer that must call, or whose calls must be strict; None for a free one."""
    is_required = tools.mode is ToolMode.REQUIRED
    if not is_required and not tools.is_strict:
        return None
    after = None
    if is_required and reasoning is not None and reasoning.state is ReasoningState.REASONING:
        after = reasoning.format.end
    tags = tuple(
        StructuralTag(
            begin=format.begin.replace("NAME", function.spec.name),
            schema=_schema(function.spec, is_enforced=is_required),
            end=format.end,
        )
        for function in tools.callable
    )
    max_calls = 1 if format.is_one_list else tools.max_calls
    if is_required and max_calls is None:
        max_calls = MAX_ENFORCED_CALLS
    trigger = None if is_required else format.begin.partition("NAME")[0]
    return StructuredOutputsParams(
        structural_tags=StructuralTags(
            tags=tags,
            trigger=trigger,
            min_passages=1 if is_required else 0,
            max_passages=max_calls,
            separator=format.separator,
        ),
        after=after,
    )


def _schema(spec: FunctionSpec, *, is_enforced: bool) -> dict[str, Any]:
    if not (spec.strict or is_enforced):
        return {"type": "object"}
    if not spec.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    closed = _closed({"type": "object", **spec.parameters})
    assert isinstance(closed, dict)
    return closed


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
