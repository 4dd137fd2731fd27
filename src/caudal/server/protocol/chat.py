"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from caudal.server.protocol.common import (
    MAX_PARTS,
    Count,
    GenerationBody,
    JsonObject,
    Logprobs,
    PromptLogprobs,
    Usage,
)
from caudal.server.protocol.tools import (
    MAX_CALLS_IN_MESSAGE,
    AnswerToolCall,
    ToolCallParam,
    ToolChoice,
    Tools,
)

MAX_MESSAGES = 16_384
ROLES = ("system", "developer", "user", "assistant")
CHAT_ROLES = (*ROLES, "tool")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_ROLE_SCHEMA = {"enum": list(CHAT_ROLES)}


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message; only text is accepted."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text"]})]
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One turn of the conversation."""

    role: Annotated[str, Meta(extra_json_schema=_ROLE_SCHEMA)]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCallParam], Meta(max_length=MAX_CALLS_IN_MESSAGE)] | None = None
    """Of the assistant: calls that it made."""
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    """Of a tool: the call whose result the content is."""
    reasoning_content: str | None = None
    """Of the assistant: what it thought; the chat template decides what to show of it."""
    reasoning: str | None = None
    """Another name of `reasoning_content`."""
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
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    """Unset: `auto` with tools. `required` and a named function are enforced."""
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    reasoning_effort: Annotated[str, Meta(extra_json_schema={"enum": list(EFFORTS)})] | None = None
    """A variable of the chat template; `none` also sets `enable_thinking` to false there."""
    include_reasoning: bool | None = None
    """False: reasoning is left out of the answer."""
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
    content: str | None
    """Null if there are only calls."""
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same again, under its newer name."""
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET


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
    service_tier: str | None = None
    """What was given, if any was asked for."""
