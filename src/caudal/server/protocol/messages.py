"""`/v1/messages`, in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

import msgspec
from msgspec import Meta

from caudal.server.protocol.chat import MAX_MESSAGES
from caudal.server.protocol.common import INT32_MAX, MAX_PARTS, JsonObject, StopStrings
from caudal.server.protocol.structured import JsonSchema
from caudal.server.protocol.tools import MAX_TOOLS, FunctionName
from caudal.server.protocol.unsupported import Neutral

TURN_ROLES = ("user", "assistant")
BLOCK_TYPES = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
TOOL_CHOICES = ("auto", "any", "tool", "none")
THINKING_TYPES = ("enabled", "disabled", "adaptive")

MESSAGES_UNSUPPORTED: Mapping[str, Neutral] = MappingProxyType(
    {
        "container": (None,),
        "mcp_servers": (None, []),
        "context_management": (None, {}),
        "service_tier": (None, "auto", "standard_only"),
        "speed": (None, "standard"),
    }
)


class TextBlockParam(msgspec.Struct, frozen=True):
    """A block of the system prompt or of a result; only text is accepted."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text"]})]
    text: str | None = None


TextBlocks = Annotated[list[TextBlockParam], Meta(max_length=MAX_PARTS)]


class BlockParam(msgspec.Struct, frozen=True):
    """A block of a turn."""

    type: Annotated[str, Meta(extra_json_schema={"enum": list(BLOCK_TYPES)})]
    text: str | None = None
    id: Annotated[str, Meta(max_length=256)] | None = None
    """Of a call."""
    name: str | None = None
    """Of the function that is called."""
    input: JsonObject | None = None
    """Arguments of the call."""
    tool_use_id: Annotated[str, Meta(max_length=256)] | None = None
    """The call whose result this is."""
    content: str | TextBlocks | None = None
    """The result."""
    is_error: bool | None = None
    """Without effect: the content says what went wrong."""
    thinking: str | None = None
    """What the model thought; the chat template decides what to show of it."""


class MessageTool(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: FunctionName | None = None
    description: str | None = None
    input_schema: JsonObject | None = None
    """JSON schema of an object."""
    type: Annotated[str, Meta(extra_json_schema={"enum": ["custom"]})] | None = None
    strict: bool | None = None


class MessageToolChoice(msgspec.Struct, frozen=True):
    """Whether tools may or must be called."""

    type: Annotated[str, Meta(extra_json_schema={"enum": list(TOOL_CHOICES)})]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(msgspec.Struct, frozen=True):
    """Whether the model shall think first; `adaptive` leaves it to the chat template."""

    type: Annotated[str, Meta(extra_json_schema={"enum": list(THINKING_TYPES)})]
    budget_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    """Without effect."""


class MessageParam(msgspec.Struct, frozen=True):
    """One turn; neighbours of one role are one turn. A last turn of the assistant is continued."""

    role: Annotated[str, Meta(extra_json_schema={"enum": list(TURN_ROLES)})]
    content: str | Annotated[list[BlockParam], Meta(max_length=MAX_PARTS)]


class MessageMetadata(msgspec.Struct, frozen=True):
    """Labels without effect."""

    user_id: Annotated[str, Meta(max_length=1024)] | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    """JSON of a schema."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["json_schema"]})]
    schema: JsonSchema = None


class OutputConfig(msgspec.Struct, frozen=True):
    """Form of the answer."""

    format: OutputFormat | None = None
    effort: str | None = None
    """Without effect."""


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """The part of a messages request that makes the prompt."""

    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: Annotated[str, Meta(max_length=1024)] | None = None
    system: str | TextBlocks | None = None
    tools: Annotated[list[MessageTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    """Unset: `auto` with tools. `any` and a named tool are enforced."""
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Former place of `output_config.format`."""


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Answer a conversation; null means the default."""

    max_tokens: Annotated[int, Meta(ge=1, le=INT32_MAX)]
    """Clamped to what fits the context."""
    metadata: MessageMetadata | None = None
    stop_sequences: StopStrings | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A text of an answer."""

    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """What the model thought before it answered."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call."""

    id: str
    name: str
    input: JsonObject


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, frozen=True):
    """Token counts; the input is the sum of its three."""

    input_tokens: int
    """Of the prompt, those that were not cached."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageResponse(msgspec.Struct, kw_only=True):
    """An answer, whole or before its first token."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[AnswerBlock] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class CountTokensResponse(msgspec.Struct, frozen=True):
    """Tokens of the prompt."""

    input_tokens: int


class MessageErrorBody(msgspec.Struct, frozen=True):
    """What went wrong, for people and for programs."""

    type: str
    message: str


class MessageErrorResponse(msgspec.Struct, frozen=True):
    """Every error of these endpoints, and the error event."""

    error: MessageErrorBody
    type: str = "error"
