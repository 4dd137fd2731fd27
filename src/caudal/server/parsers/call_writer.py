"""Calls as text of a model, for templates that know nothing of tools."""

from __future__ import annotations

import json
from typing import Any

from caudal.server.parsers.parts import decoded_arguments
from caudal.server.parsers.tool_formats import ToolFormat


def write_call(function: dict[str, Any], format: ToolFormat) -> str:
    """The call of `function`, which has a name and arguments (an object, or JSON text)."""
    begin = format.begin.replace("NAME", function["name"])
    return begin + _arguments(function["arguments"], format) + format.end


def example_call(format: ToolFormat) -> str:
    """What a call looks like, for a prompt that explains it."""
    example = {"name": "function name", "arguments": {"parameter": "value"}}
    return write_call(example, format)


def _arguments(given: Any, format: ToolFormat) -> str:
    arguments = decoded_arguments(given) if isinstance(given, str) else given
    if format.syntax == "xml" and isinstance(arguments, dict):
        each = ((key, _plain(value)) for key, value in arguments.items())
        return "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in each)
    if format.syntax == "python" and isinstance(arguments, dict):
        return ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
