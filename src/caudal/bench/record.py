"""What is remembered of one request, and the ways in which a request can fail."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class FailureKind(StrEnum):
    """Why a request has no complete answer."""

    REJECTED = "rejected (429)"
    REFUSED = "refused (4xx)"
    SERVER_ERROR = "server error (5xx)"
    CONNECTION = "connection"
    TIMEOUT = "timeout"
    ERROR_EVENT = "error in the stream"
    CUT = "stream cut"
    BAD_ANSWER = "not an OpenAI answer"
    EMPTY = "empty answer"
    GIVEN_UP = "given up by this tool"
    """The level was already decided; says nothing about the server."""


@dataclass(slots=True)
class RequestRecord:
    """One request; all times in seconds after the level's start.

    Latencies count from `intended_s`, so that a late client or a full connection limit cannot
    hide what a user would have waited.
    """

    conversation: int
    turn: int
    intended_s: float
    sent_s: float = 0.0
    first_s: float | None = None
    """First piece of output; None if nothing came or the answer was not streamed."""
    last_s: float | None = None
    end_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    """Arrival of each piece that carried output."""
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    """From the server's usage; without one, the number of pieces."""
    has_usage: bool = False
    finish_reason: str | None = None
    status: int | None = None
    failure: FailureKind | None = None
    message: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether the answer is complete."""
        return self.failure is None

    @property
    def ttft_s(self) -> float | None:
        """From the intended send time to the first output."""
        return None if self.first_s is None else self.first_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of an output token after the first, by the number of tokens, not of pieces."""
        if self.first_s is None or self.last_s is None or (self.num_output_tokens or 0) < 2:
            return None
        assert self.num_output_tokens is not None
        return (self.last_s - self.first_s) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between consecutive pieces of output, whatever number of tokens they carry."""
        return [b - a for a, b in zip(self.chunk_s, self.chunk_s[1:], strict=False)]

    @property
    def e2e_s(self) -> float:
        """From the intended send time to the end of the answer."""
        return self.end_s - self.intended_s

    def fail(self, kind: FailureKind, message: str) -> None:
        """Mark as failed; the first reason stays."""
        if self.failure is None:
            self.failure, self.message = kind, message[:500]
