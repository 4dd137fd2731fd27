"""Answers of `/v1/messages`, and its errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from caudal.errors import RequestError
from caudal.scheduler.output import FinishReason
from caudal.server.generation.choice import Choice
from caudal.server.generation.plan import GenerationPlan
from caudal.server.model import ServedModel
from caudal.server.parsers.parts import (
    CallArguments,
    CallStart,
    Content,
    Part,
    Reasoning,
    decoded_arguments,
)
from caudal.server.protocol.common import Usage
from caudal.server.protocol.messages import (
    AnswerBlock,
    MessageErrorBody,
    MessageErrorResponse,
    MessageResponse,
    MessageUsage,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from caudal.server.sse import StreamType

_encode = msgspec.json.encode

_PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
_MESSAGE_EVENTS: Final = StreamType(b"text/event-stream; charset=utf-8", _PING)

_ERROR_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        408: "timeout_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        503: "overloaded_error",
    }
)


def message_error_body(error: RequestError) -> bytes:
    """The JSON body of `error` in Anthropic's shape."""
    message = error.message
    if error.code == "context_length_exceeded":
        # Agents look for these words to know that they must shorten the conversation.
        message = f"prompt is too long: {message}"
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    return _encode(MessageErrorResponse(MessageErrorBody(kind, message)))


class MessagesAnswerWriter:
    """Implements AnswerWriter for messages: one block of text, or what the parser finds."""

    stream_type = _MESSAGE_EVENTS

    def __init__(self, plan: GenerationPlan, model: ServedModel) -> None:
        number = plan.request_id.partition("-")[2]
        self._is_parsed = plan.output is not None
        self._open: type[AnswerBlock] | None = None
        self._index = -1
        self._message = MessageResponse(
            id=f"msg_{number}",
            model=model.name,
            # Only the end tells how much of the prompt was cached.
            usage=MessageUsage(len(plan.prompts[0].token_ids), 0, 0, 0),
        )

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """The message, and its block unless other blocks may come first; both empty."""
        start = _event("message_start", message=self._message)
        return start + (b"" if self._is_parsed else self._begin(TextBlock(""))) + _PING

    def chunk(self, choice: Choice, text: str) -> bytes:
        """See AnswerWriter.chunk."""
        if not self._is_parsed:
            return _DELTA_HEAD + _encode(text) + b"}}\n\n"
        return b"".join(map(self._write, choice.take_parts()))

    def last_chunk(self, choice: Choice, text: str) -> bytes:
        """The rest, and the end of the last block."""
        events = self.chunk(choice, text) if text or choice.parts else b""
        if self._index < 0:
            events += self._begin(TextBlock(""))
        return events + self._end()

    def _write(self, part: Part) -> bytes:
        match part:
            case CallStart(_, call_id, name):
                return self._begin(ToolUseBlock(call_id, name, {}))
            case CallArguments(_, text):
                return self._delta("input_json_delta", "partial_json", text)
            case Reasoning(text):
                start = self._begin_unless_open(ThinkingBlock(""))
                return start + self._delta("thinking_delta", "thinking", text)
            case Content(text):
                start = self._begin_unless_open(TextBlock(""))
                return start + self._delta("text_delta", "text", text)

    def _begin_unless_open(self, block: AnswerBlock) -> bytes:
        return b"" if self._open is type(block) else self._begin(block)

    def _begin(self, block: AnswerBlock) -> bytes:
        end = self._end()
        self._open = type(block)
        self._index += 1
        return end + _event("content_block_start", index=self._index, content_block=block)

    def _end(self) -> bytes:
        is_open, self._open = self._open is not None, None
        return _event("content_block_stop", index=self._index) if is_open else b""

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        delta = {"type": kind, field: text}
        return _event("content_block_delta", index=self._index, delta=delta)

    def ending(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Why the message ended, and the counts."""
        reason, sequence = _stop_reason(choices[0])
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return _event("message_delta", delta=delta, usage=_usage(usage)) + _event("message_stop")

    def failure(self, error: RequestError) -> bytes:
        """See AnswerWriter.failure."""
        return b"event: error\ndata: " + message_error_body(error) + b"\n\n"

    def response(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """See AnswerWriter.response."""
        message = self._message
        message.content = _blocks(choices[0])
        message.stop_reason, message.stop_sequence = _stop_reason(choices[0])
        message.usage = _usage(usage)
        return _encode(message)


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + _encode({"type": kind, **fields}) + b"\n\n"


_DELTA_HEAD: Final = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    b'"delta":{"type":"text_delta","text":'
)


def _blocks(choice: Choice) -> list[AnswerBlock]:
    """The answer in blocks. A call that was cut off, or is malformed, is shown as text."""
    blocks: list[AnswerBlock] = []
    parts = choice.take_parts() or [Content("".join(choice.texts))]
    for index, part in enumerate(parts):
        match part:
            case Reasoning(text):
                blocks.append(ThinkingBlock(text))
            case Content(text):
                blocks.append(TextBlock(text))
            case CallStart(_, call_id, name):
                following = parts[index + 1] if index + 1 < len(parts) else None
                text = following.text if isinstance(following, CallArguments) else ""
                arguments = decoded_arguments(text)
                if arguments is None:
                    blocks.append(TextBlock(f"{name}({text}"))
                else:
                    blocks.append(ToolUseBlock(call_id, name, arguments))
    return blocks


def _stop_reason(choice: Choice) -> tuple[str, str | None]:
    if choice.outcome == "tool_calls":
        return "tool_use", None
    if isinstance(choice.stop_reason, str):
        return "stop_sequence", choice.stop_reason
    return ("max_tokens" if choice.finish_reason is FinishReason.LENGTH else "end_turn"), None


def _usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, 0, cached, usage.completion_tokens)
