"""Ollama's API: `/api/chat`, `/api/generate` and what its clients ask about models."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from caudal.server.protocol.chat import CHAT_ROLES, MAX_MESSAGES
from caudal.server.protocol.common import (
    INT32_MAX,
    JsonObject,
    Penalty,
    RepetitionPenalty,
    StopString,
    StopStrings,
)
from caudal.server.protocol.embeddings import MAX_INPUTS
from caudal.server.protocol.structured import JsonSchema
from caudal.server.protocol.tools import MAX_CALLS_IN_MESSAGE, Tools
from caudal.server.protocol.unsupported import Neutral

THINK_LEVELS = ("low", "medium", "high")

_COMMON: dict[str, Neutral] = {
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
}

OLLAMA_CHAT_UNSUPPORTED: Mapping[str, Neutral] = MappingProxyType(_COMMON)

OLLAMA_GENERATE_UNSUPPORTED: Mapping[str, Neutral] = MappingProxyType(
    {
        **_COMMON,
        "images": (None, []),
        "suffix": (None, ""),
        "template": (None, ""),
        "context": (None, []),
        "width": (None, 0),
        "height": (None, 0),
        "steps": (None, 0),
    }
)

OLLAMA_OPTIONS_UNSUPPORTED: Mapping[str, Neutral] = MappingProxyType(
    {
        "mirostat": (None, 0),
        "tfs_z": (None, 1, 1.0),
        "typical_p": (None, 1, 1.0),
    }
)


class OllamaOptions(msgspec.Struct, kw_only=True):
    """Sampling; options about loading (num_ctx, num_gpu, …) are accepted and have no effect."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    """Default 0.8, as Ollama's."""
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    """Default 40; 0 or -1: no limit."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Default 0.9."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """-1: another one for each request."""
    num_predict: Annotated[int, Meta(ge=-2, le=INT32_MAX)] | None = None
    """Output tokens at most; 0 or less: the rest of the context."""
    stop: StopString | StopStrings | None = None
    repeat_penalty: RepetitionPenalty | None = None
    """Over the whole prompt and output. Default 1: none."""
    repeat_last_n: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    """0 switches repeat_penalty off; no other value has an effect."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    num_ctx: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    """Without effect: the server decides, and refuses a prompt that does not fit."""
    mirostat: Any = None
    tfs_z: Any = None
    typical_p: Any = None


class OllamaFunction(msgspec.Struct, frozen=True):
    """Function and arguments of a call."""

    name: str
    arguments: JsonObject | None = None
    index: int | None = None


class OllamaToolCall(msgspec.Struct, frozen=True):
    """A call in an earlier message."""

    function: OllamaFunction
    id: Annotated[str, Meta(max_length=256)] | None = None


class OllamaMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: Annotated[str, Meta(extra_json_schema={"enum": list(CHAT_ROLES)})]
    content: str | None = None
    thinking: str | None = None
    """Of the assistant: what it thought."""
    images: list[Any] | None = None
    tool_calls: Annotated[list[OllamaToolCall], Meta(max_length=MAX_CALLS_IN_MESSAGE)] | None = None
    tool_name: str | None = None
    """Of a tool: whose result the content is."""
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None


class _OllamaBody(msgspec.Struct, kw_only=True):
    model: Annotated[str, Meta(max_length=1024)] | None = None
    """With or without `:latest`."""
    stream: bool | None = None
    """Unset: true."""
    options: OllamaOptions | None = None
    think: bool | Annotated[str, Meta(extra_json_schema={"enum": list(THINK_LEVELS)})] | None = None
    """Whether, or how hard, to think first; unset: as the chat template has it."""
    format: JsonSchema = None
    """`json` for any JSON object, or a JSON schema."""
    keep_alive: float | str | None = None
    """Without effect: the model stays loaded."""


class OllamaChatRequest(_OllamaBody, kw_only=True):
    """Answer a conversation; without messages, only see that the model is loaded."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Tools | None = None


class OllamaGenerateRequest(_OllamaBody, kw_only=True):
    """Answer a prompt through the chat template; without one, see that the model is loaded."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    """Continue the prompt itself, without the template."""


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    """Which model to describe."""

    model: Annotated[str, Meta(max_length=1024)] | None = None
    name: Annotated[str, Meta(max_length=1024)] | None = None
    """The former name of `model`."""
    verbose: bool | None = None


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """Vectors of texts; without any, only see that the model is loaded."""

    model: Annotated[str, Meta(max_length=1024)] | None = None
    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)] | None = None
    truncate: bool | None = None
    """Unset or true: of a text beyond the context only the beginning is used. False: refused."""
    dimensions: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    """Keep so many values, and make the rest of length 1 again; 0: all."""
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True):
    """The vector of one text: the former shape of OllamaEmbedRequest."""

    model: Annotated[str, Meta(max_length=1024)] | None = None
    prompt: str | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


class OllamaStoreRequest(msgspec.Struct, kw_only=True):
    """A model to fetch, make, send, copy or delete."""

    model: Annotated[str, Meta(max_length=1024)] | None = None
    name: Annotated[str, Meta(max_length=1024)] | None = None
    """The former name of `model`."""
    stream: bool | None = None
    """Unset: true."""
    insecure: bool | None = None


class OllamaStatus(msgspec.Struct, frozen=True):
    """How far it is."""

    status: str


class OllamaEmbedResponse(msgspec.Struct, frozen=True):
    """Vectors of length 1, in the order of the texts; durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    """Always 0: the model is loaded."""
    prompt_eval_count: int


class OllamaEmbeddingsResponse(msgspec.Struct, frozen=True):
    """A vector of length 1."""

    embedding: list[float]


class OllamaCalledFunction(msgspec.Struct, frozen=True):
    """Function and arguments of a call."""

    index: int
    name: str
    arguments: JsonObject


class OllamaAnswerCall(msgspec.Struct, frozen=True):
    """A call in an answer, always whole."""

    id: str
    function: OllamaCalledFunction


class OllamaAnswerMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """The assistant's message, or the next part of it."""

    role: str
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaAnswerCall] | None = None


class OllamaAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An answer, or a part of one, without its text.

    The last part, and only it, has the statistics; durations are in nanoseconds.
    """

    model: str
    created_at: str
    done: bool
    done_reason: str | None = None
    """stop, length, or load."""
    total_duration: int | None = None
    load_duration: int | None = None
    """Time in the queue."""
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    """From the queue to the first token."""
    eval_count: int | None = None
    eval_duration: int | None = None
    """From the first token to the last."""


class OllamaChatResponse(OllamaAnswer, kw_only=True):
    """An answer to a conversation, or the next part of it."""

    message: OllamaAnswerMessage


class OllamaGenerateResponse(OllamaAnswer, kw_only=True):
    """An answer to a prompt, or the next part of it."""

    response: str
    thinking: str | None = None


class OllamaErrorResponse(msgspec.Struct, frozen=True):
    """Every error of these endpoints, and the last line of a stream that failed."""

    error: str


class OllamaDetails(msgspec.Struct, frozen=True):
    """What kind of model it is."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class _OllamaModel(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    """Identifies name, kind and size of the model, not the bytes of its file."""
    details: OllamaDetails


class OllamaModel(_OllamaModel, frozen=True, kw_only=True):
    """One model."""

    modified_at: str


class OllamaModelList(msgspec.Struct, frozen=True):
    """All models: the served one."""

    models: list[OllamaModel]


class OllamaRunningModel(_OllamaModel, frozen=True, kw_only=True):
    """A loaded model."""

    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningList(msgspec.Struct, frozen=True):
    """All loaded models: the served one."""

    models: list[OllamaRunningModel]


class OllamaModelCard(msgspec.Struct, frozen=True):
    """What the model file says about itself."""

    modelfile: str
    parameters: str
    template: str
    """In Jinja."""
    details: OllamaDetails
    model_info: dict[str, str | int | float | bool]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct, frozen=True):
    """Versions."""

    version: str
    """Of Ollama's API that these endpoints follow."""
    caudal: str
    """Of this server."""
