"""`/v1/completions`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from caudal.server.protocol.common import (
    MAX_TOKEN_IDS,
    GenerationBody,
    Logprobs,
    PromptLogprobs,
    TokenIds,
    Usage,
)

MAX_PROMPTS = 1024

_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
        },
    ]
}


class CompletionRequest(GenerationBody, kw_only=True):
    """Continue one or several prompts, given as text or as token ids."""

    prompt: Annotated[
        str | Annotated[list[str | int | TokenIds], Meta(max_length=MAX_TOKEN_IDS)],
        Meta(extra_json_schema=_PROMPT_SCHEMA),
    ]
    echo: bool | None = None
    """Put the prompt before the answer."""
    logprobs: Logprobs | None = None
    """Log-probabilities of each token and of so many alternatives."""
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    """Only accepted when it equals `n`."""


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Parallel lists, one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One answer to one prompt; index = prompt number × n + choice number."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(msgspec.Struct, frozen=True):
    """All answers."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: str | None = None
    """What was given, if any was asked for."""
