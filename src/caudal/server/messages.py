"""Chat messages of a request as the plain dictionaries that templates take."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from caudal.errors import InvalidRequestError
from caudal.server.protocol.chat import CHAT_ROLES, ChatMessage, ContentPart
from caudal.server.protocol.common import MAX_ALL_PARTS
from caudal.server.protocol.tools import CalledFunction
from caudal.server.tools import check_depth

_BILLING_NONCE = re.compile(r"\A(x-anthropic-billing-header:[^\n]*?\bcch=)[^;\s]*")
"""Some agents begin the system prompt with a header line whose `cch` differs in every call."""

RESERVED_TEMPLATE_KWARGS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)

_FIELDS_BY_ROLE = (
    ("tool_calls", "assistant"),
    ("reasoning_content", "assistant"),
    ("reasoning", "assistant"),
    ("tool_call_id", "tool"),
)


def template_messages(
    messages: Sequence[ChatMessage], *, normalize_headers: bool
) -> list[dict[str, Any]]:
    """Role, content (text parts joined by line breaks) and name of each message; of the assistant
    also calls (arguments decoded) and reasoning, of tools the call and its function's name.

    `normalize_headers` makes a billing header's nonce constant, so that the prefix stays cached.
    Raises InvalidRequestError naming the message or part that cannot be used.
    """
    num_parts = sum(len(m.content) for m in messages if isinstance(m.content, list))
    if num_parts > MAX_ALL_PARTS:
        raise InvalidRequestError(
            f"messages: at most {MAX_ALL_PARTS} content parts in all, got {num_parts}.",
            param="messages",
            code="invalid_value",
        )
    result: list[dict[str, Any]] = []
    called: dict[str, str] = {}
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        _check_message(message, where)
        content = ""
        if message.content is not None or not (message.tool_calls or _reasoning(message)):
            content = _content(message.content, f"{where}.content")
        role = "system" if message.role == "developer" else message.role
        if normalize_headers and role == "system":
            content = _BILLING_NONCE.sub(r"\g<1>0", content)
        entry: dict[str, Any] = {"role": role, "content": content}
        if message.name is not None:
            entry["name"] = message.name
        if role == "assistant":
            _add_assistant_fields(entry, message, f"{where}.tool_calls", called)
        elif role == "tool":
            entry["tool_call_id"] = message.tool_call_id
            entry.setdefault("name", called.get(message.tool_call_id or ""))
        result.append(entry)
    return result


def _check_message(message: ChatMessage, where: str) -> None:
    if message.role not in CHAT_ROLES:
        raise InvalidRequestError(
            f"{where}.role: must be one of {', '.join(CHAT_ROLES)}, got {message.role[:64]!r}.",
            param=f"{where}.role",
            code="invalid_value",
        )
    if message.role == "tool" and not message.tool_call_id:
        raise InvalidRequestError(
            f"{where}.tool_call_id: required in messages with the role tool.",
            param=f"{where}.tool_call_id",
            code="invalid_value",
        )
    for field, role in _FIELDS_BY_ROLE:
        if getattr(message, field) and message.role != role:
            raise InvalidRequestError(
                f"{where}.{field}: only allowed in messages with the role {role}.",
                param=f"{where}.{field}",
                code="invalid_value",
            )
    for field in ("function_call", "audio"):
        if getattr(message, field):
            raise InvalidRequestError(
                f"{where}.{field}: not supported by this server.",
                param=f"{where}.{field}",
                code="unsupported",
            )


def _reasoning(message: ChatMessage) -> str | None:
    return message.reasoning_content or message.reasoning


def _add_assistant_fields(
    entry: dict[str, Any], message: ChatMessage, where: str, called: dict[str, str]
) -> None:
    """Calls and reasoning; notes in `called` which function each call's id stands for."""
    reasoning = _reasoning(message)
    if reasoning:
        entry["reasoning_content"] = entry["reasoning"] = reasoning
    calls = []
    for index, call in enumerate(message.tool_calls or ()):
        if call.type != "function":
            raise InvalidRequestError(
                f"{where}[{index}].type: must be function, got {call.type[:64]!r}.",
                param=f"{where}[{index}].type",
                code="invalid_value",
            )
        if call.id is not None:
            called[call.id] = call.function.name
        arguments = _arguments(call.function)
        check_depth(arguments, f"{where}[{index}].function.arguments")
        function = {"name": call.function.name, "arguments": arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    if calls:
        entry["tool_calls"] = calls


def _arguments(function: CalledFunction) -> Any:
    """As the object that templates expect; a text that is none is what the model wrote."""
    arguments = function.arguments
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def num_chars_of(value: Any) -> int:
    """Characters of all texts in a JSON-like value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + num_chars_of(item) for key, item in value.items())
    return sum(map(num_chars_of, value)) if isinstance(value, list) else 0


def _content(content: str | list[ContentPart] | None, where: str) -> str:
    if isinstance(content, str):
        return content
    if not content:
        raise InvalidRequestError(
            f"{where}: a text or a list of text parts is required.",
            param=where,
            code="invalid_value",
        )
    texts: list[str] = []
    for index, part in enumerate(content):
        if part.type != "text" or part.text is None:
            problem = (
                "a text part needs the field text"
                if part.type == "text"
                else f"parts of type {part.type[:64]!r} are not supported; this model takes text"
            )
            raise InvalidRequestError(
                f"{where}[{index}]: {problem}.", param=f"{where}[{index}]", code="invalid_value"
            )
        texts.append(part.text)
    return "\n".join(texts)


def template_kwargs(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Extra template variables. Raises InvalidRequestError if one has a reserved name."""
    for name in kwargs or {}:
        if name in RESERVED_TEMPLATE_KWARGS:
            raise InvalidRequestError(
                f"chat_template_kwargs: {name!r} is reserved.",
                param="chat_template_kwargs",
                code="invalid_value",
            )
    return kwargs or {}


def generation_prompt_flags(
    add_generation_prompt: bool | None, continue_final_message: bool | None
) -> tuple[bool, bool]:
    """(add_generation_prompt, continue_final_message). Raises InvalidRequestError if both."""
    is_continued = bool(continue_final_message)
    if is_continued and add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message: cannot be combined with add_generation_prompt: true.",
            param="continue_final_message",
            code="invalid_value",
        )
    return (not is_continued if add_generation_prompt is None else add_generation_prompt), (
        is_continued
    )
