"""What leaves the scheduler for a request: new tokens, and exactly one terminal output."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from caudal.step_io import TokenLogprobs


class FinishReason(StrEnum):
    """Why a request ended; the values are those of OpenAI plus abort, error and timeout."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"


class RequestOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Progress of one request after a step; terminal when `finish_reason` is set."""

    request_id: str
    new_token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The end-of-generation or stop id that ended the request (also in new_token_ids)."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was in the prefix cache when the request first ran."""
    num_preemptions: int = 0
    num_preempted_tokens: int = 0
    """Tokens computed again because of preemptions, set on the terminal output."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Sent once, with the first output that has tokens or is terminal."""
    pooled: bytes | None = None
    """The pooled hidden state, float32 little-endian, on the terminal output of a request that
    asked for one."""
    error: str | None = None
    queue_ms: float = 0.0
    """From arrival to the first step, set on the first output."""
