"""How choices are written, for one API family: whole, or as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET

from caudal.errors import RequestError
from caudal.server.generation.choice import Choice
from caudal.server.protocol.common import CompletionTokensDetails, PromptTokensDetails, Usage
from caudal.server.sse import StreamType


class AnswerWriter(Protocol):
    """Serialises the answer of one request."""

    @property
    def stream_type(self) -> StreamType:
        """How events are framed."""

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """Events to send before any token (b"" for none)."""

    def chunk(self, choice: Choice, text: str) -> bytes:
        """The event with new text of an unfinished choice."""

    def last_chunk(self, choice: Choice, text: str) -> bytes:
        """The event or events that end a choice; the only ones with a finish reason."""

    def ending(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """What follows the end of the last choice."""

    def failure(self, error: RequestError) -> bytes:
        """The event or events that end a stream in which something failed."""

    def response(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The whole answer as one JSON body."""


def usage_of(choices: Sequence[Choice], n: int) -> Usage:
    """Token counts; each prompt counts once, with what was cached before any of its choices ran."""
    num_prompt = num_cached = 0
    for first in range(0, len(choices), n):
        siblings = choices[first : first + n]
        num_prompt += len(siblings[0].prompt.token_ids)
        num_cached += min(choice.num_cached_tokens for choice in siblings)
    num_output = sum(choice.num_output_tokens for choice in choices)
    num_reasoning = sum(choice.num_reasoning_tokens for choice in choices)
    return _usage(num_prompt, num_output, num_cached, num_reasoning)


def usage_so_far(choice: Choice) -> Usage:
    """Token counts of one choice while it runs."""
    num_prompt = len(choice.prompt.token_ids)
    num_output = choice.num_output_tokens
    return _usage(num_prompt, num_output, choice.num_cached_tokens, choice.num_reasoning_tokens)


def _usage(num_prompt: int, num_output: int, num_cached: int, num_reasoning: int) -> Usage:
    return Usage(
        num_prompt,
        num_output,
        num_prompt + num_output,
        PromptTokensDetails(num_cached),
        CompletionTokensDetails(num_reasoning) if num_reasoning else UNSET,
    )


class ChunkFrame:
    """The constant bytes around the varying part of a stream's chunks, encoded once."""

    __slots__ = ("_encode", "_tail", "_tail_open", "head")

    def __init__(
        self, request_id: str, kind: str, created: int, model: str, *, usage: bool, tier: str | None
    ) -> None:
        self._encode = msgspec.json.Encoder().encode
        fields: dict[str, str | int] = {
            "id": request_id,
            "object": kind,
            "created": created,
            "model": model,
        }
        if tier is not None:
            fields["service_tier"] = tier
        self.head = b"data: " + self._encode(fields)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if usage else b"]}\n\n"
        self._tail_open = b'],"usage":'

    def event(self, choice: bytes, usage: Usage | None = None) -> bytes:
        """A chunk with one encoded choice (or none) and, if given, token counts."""
        if usage is None:
            return self.head + choice + self._tail
        return self.head + choice + self._tail_open + self._encode(usage) + b"}\n\n"
