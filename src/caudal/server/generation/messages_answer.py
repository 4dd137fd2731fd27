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
from caudal.server.protocol.common import Usage
from caudal.server.protocol.messages import (
    MessageErrorBody,
    MessageErrorResponse,
    MessageResponse,
    MessageUsage,
    TextBlock,
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
    """Implements AnswerWriter for messages: one block of text."""

    stream_type = _MESSAGE_EVENTS

    def __init__(self, plan: GenerationPlan, model: ServedModel) -> None:
        number = plan.request_id.partition("-")[2]
        self._message = MessageResponse(
            id=f"msg_{number}",
            model=model.name,
            # Only the end tells how much of the prompt was cached.
            usage=MessageUsage(len(plan.prompts[0].token_ids), 0, 0, 0),
        )

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """The message and its block, both empty."""
        return (
            _event("message_start", message=self._message)
            + _event("content_block_start", index=0, content_block=TextBlock("text", ""))
            + _PING
        )

    def chunk(self, choice: Choice, text: str) -> bytes:
        """See AnswerWriter.chunk."""
        return _DELTA_HEAD + _encode(text) + b"}}\n\n"

    def last_chunk(self, choice: Choice, text: str) -> bytes:
        """The rest of the text, and the end of the block."""
        return (self.chunk(choice, text) if text else b"") + _event("content_block_stop", index=0)

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
        message.content = [TextBlock("text", "".join(choices[0].texts))]
        message.stop_reason, message.stop_sequence = _stop_reason(choices[0])
        message.usage = _usage(usage)
        return _encode(message)


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + _encode({"type": kind, **fields}) + b"\n\n"


_DELTA_HEAD: Final = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    b'"delta":{"type":"text_delta","text":'
)


def _stop_reason(choice: Choice) -> tuple[str, str | None]:
    if isinstance(choice.stop_reason, str):
        return "stop_sequence", choice.stop_reason
    return ("max_tokens" if choice.finish_reason is FinishReason.LENGTH else "end_turn"), None


def _usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, 0, cached, usage.completion_tokens)
