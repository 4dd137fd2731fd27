"""Chat messages of a request as the plain dictionaries that templates take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from caudal.errors import InvalidRequestError
from caudal.server.protocol.chat import ROLES, ChatMessage, ContentPart

_BILLING_NONCE = re.compile(r"\A(x-anthropic-billing-header:[^\n]*?\bcch=)[^;\s]*")
"""Some agents begin the system prompt with a header line whose `cch` differs in every call."""

RESERVED_TEMPLATE_KWARGS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)


def template_messages(
    messages: Sequence[ChatMessage], *, normalize_headers: bool
) -> list[dict[str, Any]]:
    """Role, content (text parts joined by line breaks) and name of each message.

    `normalize_headers` makes a billing header's nonce constant, so that the prefix stays cached.
    Raises InvalidRequestError naming the message or part that cannot be used.
    """
    result: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        _check_message(message, where)
        content = _content(message.content, f"{where}.content")
        role = "system" if message.role == "developer" else message.role
        if normalize_headers and role == "system":
            content = _BILLING_NONCE.sub(r"\g<1>0", content)
        entry: dict[str, Any] = {"role": role, "content": content}
        if message.name is not None:
            entry["name"] = message.name
        result.append(entry)
    return result


def _check_message(message: ChatMessage, where: str) -> None:
    if message.role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role: {message.role[:64]!r} is not supported; roles: {', '.join(ROLES)}.",
            param=f"{where}.role",
            code="invalid_value",
        )
    for field in ("tool_calls", "tool_call_id", "function_call", "audio"):
        if getattr(message, field):
            raise InvalidRequestError(
                f"{where}.{field}: not supported by this server.",
                param=f"{where}.{field}",
                code="unsupported",
            )


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
