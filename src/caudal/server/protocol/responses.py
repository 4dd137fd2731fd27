"""`/v1/responses`, without state: nothing is stored, every request brings its whole input."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from caudal.server.protocol.chat import MAX_MESSAGES, ROLES, ChatTokenLogprob
from caudal.server.protocol.common import (
    INT32_MAX,
    MAX_PARTS,
    JsonObject,
    Logprobs,
    Penalty,
    RepetitionPenalty,
    ServiceTier,
    StopString,
    StopStrings,
    Timeout,
)
from caudal.server.protocol.structured import FORMAT_TYPES, JsonSchemaFormat
from caudal.server.protocol.tools import MAX_TOOLS, FunctionName, ToolType
from caudal.server.protocol.unsupported import Neutral

TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
INCLUDE_LOGPROBS = "message.output_text.logprobs"

RESPONSES_UNSUPPORTED: Mapping[str, Neutral] = MappingProxyType(
    {
        "previous_response_id": (None,),
        "conversation": (None,),
        "prompt": (None,),
        "background": (None, False),
        "response_format": (None, {"type": "text"}),  # here it is `text.format`
        "structured_outputs": (None, {}),
        "truncation": (None, "disabled"),
        "context_management": (None, []),
        "moderation": (None,),
    }
)


class InputPart(msgspec.Struct, frozen=True):
    """A part of a message; only text is accepted."""

    type: Annotated[str, Meta(extra_json_schema={"enum": list(TEXT_PARTS)})]
    text: str | None = None
    refusal: str | None = None


InputParts = Annotated[list[InputPart], Meta(max_length=MAX_PARTS)]


class ReasoningPart(msgspec.Struct, frozen=True):
    """A piece of earlier reasoning."""

    text: str


class InputItem(msgspec.Struct, frozen=True):
    """A message, a call or its result, or reasoning; by the client or from an earlier answer."""

    type: Annotated[str, Meta(extra_json_schema={"enum": list(ITEM_TYPES)})] = "message"
    role: Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})] | None = None
    content: str | InputParts | None = None
    call_id: Annotated[str, Meta(max_length=256)] | None = None
    """Of calls and results."""
    name: str | None = None
    """Of calls."""
    arguments: str | None = None
    """Of calls."""
    output: str | InputParts | None = None
    """Of results."""
    summary: Annotated[list[ReasoningPart], Meta(max_length=MAX_PARTS)] | None = None
    """Of reasoning."""


class ResponsesTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool; only functions are offered."""

    type: ToolType
    name: FunctionName | None = None
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    """Unset: no."""


class ResponsesToolRef(msgspec.Struct, frozen=True):
    """A tool by name."""

    name: str | None = None
    type: ToolType = "function"


class ResponsesToolChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that must be called, or the tools that may be."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["function", "allowed_tools"]})]
    name: str | None = None
    mode: str | None = None
    tools: Annotated[list[ResponsesToolRef], Meta(max_length=MAX_TOOLS)] | None = None


class ReasoningOptions(msgspec.Struct, frozen=True):
    """How to reason."""

    effort: str | None = None
    """A variable of the chat template."""
    summary: str | None = None
    """Without effect: reasoning is never summarised."""
    generate_summary: str | None = None
    """The former name of `summary`."""


class TextFormat(JsonSchemaFormat, kw_only=True, omit_defaults=True):
    """Text, a JSON object, or JSON of a schema."""

    type: Annotated[str, Meta(extra_json_schema={"enum": list(FORMAT_TYPES)})]


class TextOptions(msgspec.Struct, frozen=True):
    """Form of the answer."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True):
    """What a stream carries besides the events."""

    include_obfuscation: bool | None = None
    """Without effect: events are never padded."""


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Answer an input; null means the default."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: Annotated[str, Meta(max_length=1024)] | None = None
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    """Clamped to what fits the context; the answer is then `incomplete`."""
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    """Without effect: nothing is ever stored, and the answer says so."""
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: Logprobs | None = None
    include: Annotated[list[str], Meta(max_length=64)] | None = None
    """`message.output_text.logprobs` counts; what else could be included never exists here."""
    text: TextOptions | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16),
        ]
        | None
    ) = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | ResponsesToolChoice | None = None
    """Unset: `auto` with tools. `required` and a named function are enforced."""
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    reasoning: ReasoningOptions | None = None
    max_tool_calls: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    user: Annotated[str, Meta(max_length=1024)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | StopStrings | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=INT32_MAX)] | None = None
    service_tier: ServiceTier | None = None
    timeout: Timeout | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    chat_template_kwargs: JsonObject | None = None


class OutputText(msgspec.Struct, frozen=True):
    """The text of an answer."""

    type: str
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class OutputMessage(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """An answer."""

    id: str
    status: str
    role: str
    content: list[OutputText]


class ReasoningText(msgspec.Struct, frozen=True):
    """A text of reasoning."""

    type: str
    text: str


class OutputReasoning(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """What the model thought before it answered."""

    id: str
    status: str
    summary: list[Any]
    content: list[ReasoningText]


class OutputFunctionCall(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call of a function; `arguments` is JSON text."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why an answer ended early."""

    reason: str


class ResponseFailure(msgspec.Struct, frozen=True):
    """Why there is no answer."""

    code: str
    message: str


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Where the input's KV came from."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """What the output tokens were for."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ReasoningInfo(msgspec.Struct, frozen=True):
    """How the answer was reasoned about, as asked for."""

    effort: str | None = None
    summary: str | None = None


class TextInfo(msgspec.Struct, frozen=True):
    """Form of the answer."""

    format: TextFormat


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response in any of its states."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: ReasoningInfo = ReasoningInfo()
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: TextInfo
    tool_choice: str | ResponsesToolChoice = "auto"
    tools: list[ResponsesTool] = []
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class InputTokens(msgspec.Struct, frozen=True):
    """How long a prompt would be."""

    object: str
    input_tokens: int
