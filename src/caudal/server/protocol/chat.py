"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from caudal.server.protocol.common import (
    Count,
    GenerationBody,
    JsonObject,
    Logprobs,
    PromptLogprobs,
    Usage,
)

MAX_MESSAGES = 16_384
ROLES = ("system", "developer", "user", "assistant")

_ROLE_SCHEMA = {"enum": list(ROLES)}


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message; only text is accepted."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text"]})]
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One turn of the conversation."""

    role: Annotated[str, Meta(extra_json_schema=_ROLE_SCHEMA)]
    content: str | list[ContentPart] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: Any = None
    function_call: Any = None
    audio: Any = None


class ChatCompletionRequest(GenerationBody, kw_only=True):
    """Answer a conversation."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    """The current name of `max_tokens`; unset: the rest of the context."""
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    """Needs `logprobs: true`."""
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Continue the last message instead of starting an answer."""


class ChatTopLogprob(msgspec.Struct, frozen=True):
    """A likely token at one position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """The sampled token at one position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """One entry per sampled token."""

    content: list[ChatTokenLogprob]


class ChatAnswer(msgspec.Struct, frozen=True):
    """The assistant's message."""

    role: str
    content: str
    refusal: str | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class ChatCompletionResponse(msgspec.Struct, frozen=True):
    """All answers."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
