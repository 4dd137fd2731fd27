"""How the served model writes calls and reasoning, and how it is told about tools."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from caudal.config import ServerConfig
from caudal.server.parsers.call_writer import example_call, write_call
from caudal.server.parsers.reasoning import (
    HARMONY,
    REASONING_FORMATS,
    ReasoningFormat,
    detect_reasoning_format,
)
from caudal.server.parsers.tool_formats import (
    OPENAI,
    TOOL_FORMATS,
    ToolFormat,
    detect_tool_format,
)
from caudal.server.tools import ToolUse, function_entry

if TYPE_CHECKING:
    from caudal.server.model import ServedModel

_TOOLS_VARIABLE = re.compile(r"\{%[^%]*\btools\b|\{\{[^}]*\btools\b")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Dialect:
    """The formats of a model, by its chat template unless the command line says otherwise."""

    tools: ToolFormat
    reasoning: ReasoningFormat | None
    has_native_tools: bool
    """Whether the chat template itself shows tools, calls and results."""
    is_parallel: bool = True
    """Whether the chat template accepts several calls in one message."""


def resolve_dialect(config: ServerConfig, template: str | None) -> Dialect:
    """The dialect of a model with the chat template `template`."""
    format = TOOL_FORMATS.get(config.tool_call_parser) or detect_tool_format(template)
    reasoning = REASONING_FORMATS.get(config.reasoning_parser)
    if config.reasoning_parser == "auto":
        reasoning = detect_reasoning_format(template)
    if format.syntax == "harmony":
        reasoning = HARMONY
    elif reasoning is HARMONY:
        format = OPENAI
    has_native_tools = _TOOLS_VARIABLE.search(template or "") is not None
    # So Llama's templates say why they refuse a message with two calls.
    is_parallel = "only supports single tool-calls" not in (template or "")
    return Dialect(format, reasoning, has_native_tools, is_parallel)


def dialect_of(config: ServerConfig, model: ServedModel) -> Dialect:
    """The dialect of `model`, looked up once."""
    if model.dialect is None:
        model.dialect = resolve_dialect(config, model.chat_template.source)
    return model.dialect


def without_tool_roles(
    messages: Sequence[Message], format: ToolFormat, tools: ToolUse | None
) -> list[Message]:
    """The conversation for a template that knows nothing of tools.

    Tools become a section of the system message, calls text of the assistant in `format`, and
    results messages of the user.
    """
    result: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            text = _result_text(message)
            if result and result[-1].get("is_result"):
                result[-1]["content"] += "\n\n" + text
            else:
                result.append({"role": "user", "content": text, "is_result": True})
        else:
            calls = message.get("tool_calls", ())
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            written = format.separator.join(write_call(call["function"], format) for call in calls)
            plain["content"] = "\n".join(filter(None, (plain["content"], written)))
            result.append(plain)
    for message in result:
        message.pop("is_result", None)
    if tools is not None:
        _add_section(result, _section(tools, format))
    return result


def _add_section(messages: list[Message], section: str) -> None:
    if messages and messages[0]["role"] == "system":
        messages[0]["content"] = "\n\n".join(filter(None, (messages[0]["content"], section)))
    else:
        messages.insert(0, {"role": "system", "content": section})


def _section(tools: ToolUse, format: ToolFormat) -> str:
    functions = "\n".join(
        json.dumps(function_entry(spec), ensure_ascii=False) for spec in tools.shown
    )
    return (
        "You can call functions. These are available, with JSON schemas of their parameters:\n"
        f"{functions}\n"
        "To call a function, answer with nothing but this, once for each call:\n"
        f"{example_call(format)}\n"
        "If no function is needed, answer in plain text."
    )


def _result_text(message: Message) -> str:
    name = message.get("name")
    return f"Result of {name or 'the function'}:\n{message['content']}"


def call_id(given: str | None, format: ToolFormat) -> str | None:
    """An id of a call as the template wants it; equal ids stay equal."""
    length = format.id_length
    if given is None or length is None or (len(given) == length and given.isalnum()):
        return given
    return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:length]
