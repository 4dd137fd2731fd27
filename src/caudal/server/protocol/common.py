"""Fields that completions and chat completions share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from caudal.sampling_params import MAX_LOGPROBS
from caudal.server.protocol.structured import FormFields

INT32_MAX = 2**31 - 1
MAX_TIMEOUT_S = 86_400
MAX_CHOICES = 128
MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 4096
MAX_PARTS = 2048
"""Parts of a message's content, and of every list like it."""
MAX_ALL_PARTS = 65_536
"""Parts in all messages of a request."""
MAX_TOKEN_IDS = 2**20
"""Token ids of a prompt: more than any context."""

StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
StopStrings = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
TokenIds = Annotated[list[int], Meta(max_length=MAX_TOKEN_IDS)]
Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]
"""Logits are divided by it: one near 0 would make them infinite."""
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


ServiceTier = Literal["auto", "default", "flex", "priority", "scale"]
Timeout = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream carries besides the text."""

    include_usage: bool | None = None
    """A last chunk with token counts and no choices."""
    continuous_usage_stats: bool | None = None
    """Token counts in every chunk."""


class GenerationBody(FormFields, kw_only=True):
    """Model, sampling, stopping and streaming; null means the default."""

    model: Annotated[str, Meta(max_length=1024)] | None = None
    """Absent or empty: the model that is served."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    """Clamped to what fits the context; the answer then ends with `length`."""
    min_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    """0 or -1: no limit."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    """Token id (as a string) to bias."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """With `n > 1`, choice i uses seed + i."""
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: Logprobs | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=INT32_MAX)] | None = None
    """Lower runs first."""
    service_tier: ServiceTier | None = None
    """priority before, flex after all others; what was given is told in the answer."""
    timeout: Timeout | None = None
    """Seconds within which the answer must be complete, else the request is dropped."""
    user: Annotated[str, Meta(max_length=1024)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    """Requests with different salts never share cached prompt prefixes."""


class ErrorBody(msgspec.Struct, frozen=True):
    """What went wrong, for people and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct, frozen=True):
    """Every error of every endpoint."""

    error: ErrorBody


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Where the prompt's KV came from."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """What the output tokens were for."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts; a prompt counts once whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Only of an answer with reasoning."""


class PromptLogprob(msgspec.Struct, frozen=True):
    """One candidate at a prompt position."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Per prompt token: token id → candidate; null for the first."""
JsonObject = dict[str, Any]
