"""The messages of Ollama's `/api/chat` as those of a chat."""

from __future__ import annotations

from collections.abc import Sequence

from caudal.errors import InvalidRequestError
from caudal.server.protocol.chat import CHAT_ROLES, ChatMessage
from caudal.server.protocol.ollama import OllamaMessage
from caudal.server.protocol.tools import CalledFunction, ToolCallParam


def chat_messages(messages: Sequence[OllamaMessage]) -> list[ChatMessage]:
    """The conversation. Calls without an id get one; a result belongs to the earliest open call,
    of its tool's name if it has one.

    Raises InvalidRequestError naming what has no place in it.
    """
    result: list[ChatMessage] = []
    open_calls: list[tuple[str, str]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role not in CHAT_ROLES:
            roles = ", ".join(CHAT_ROLES)
            raise _error(f"{where}.role", f"must be one of {roles}, got {message.role[:64]!r}")
        if message.images:
            raise _error(f"{where}.images", "not supported by this server", code="unsupported")
        chat = ChatMessage(role=message.role, content=message.content or "")
        if message.role == "tool":
            chat.name = message.tool_name
            chat.tool_call_id = message.tool_call_id or _open_call(open_calls, message.tool_name)
        if message.role == "assistant":
            chat.reasoning_content = message.thinking
            chat.tool_calls = _calls(message, index)
            open_calls = [(call.id or "", call.function.name) for call in chat.tool_calls]
        elif message.tool_calls:
            raise _error(f"{where}.tool_calls", "only allowed in messages of the assistant")
        result.append(chat)
    return result


def _calls(message: OllamaMessage, index: int) -> list[ToolCallParam]:
    return [
        ToolCallParam(
            CalledFunction(call.function.name, call.function.arguments or {}),
            call.id or f"call_{index}_{number}",
        )
        for number, call in enumerate(message.tool_calls or ())
    ]


def _open_call(open_calls: list[tuple[str, str]], name: str | None) -> str:
    for place, (call_id, function) in enumerate(open_calls):
        if name in (None, function):
            del open_calls[place]
            return call_id
    return "call"


def _error(param: str, problem: str, *, code: str = "invalid_value") -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {problem}.", param=param, code=code)
