"""`/v1/embeddings`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

import msgspec
from msgspec import Meta

from caudal.server.protocol.common import INT32_MAX, MAX_TOKEN_IDS, ServiceTier, Timeout, TokenIds
from caudal.server.protocol.unsupported import Neutral

MAX_INPUTS = 2048
ENCODING_FORMATS = ("float", "base64")
POOLINGS = ("mean", "last")

_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_INPUT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "minItems": 1,
            "maxItems": MAX_INPUTS,
        },
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_INPUTS},
    ]
}

EMBEDDING_UNSUPPORTED: Mapping[str, Neutral] = MappingProxyType(
    {
        "truncate_prompt_tokens": (None,),
        "normalize": (None, True),
        "messages": (None,),
        "embed_dtype": (None, "float32"),
        "endianness": (None, "native", "little"),
    }
)


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """Vectors of texts: the model's final hidden states, pooled, of length 1."""

    input: Annotated[
        str | Annotated[list[str | int | TokenIds], Meta(max_length=MAX_TOKEN_IDS)],
        Meta(extra_json_schema=_INPUT_SCHEMA),
    ]
    """A text, texts, token ids, or lists of token ids. Text never counts as special tokens."""
    model: Annotated[str, Meta(max_length=1024)] | None = None
    encoding_format: (
        Annotated[str, Meta(extra_json_schema={"enum": list(ENCODING_FORMATS)})] | None
    ) = None
    """base64: the bytes of little-endian float32."""
    dimensions: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    """Keep so many values, and make the rest of length 1 again."""
    pooling: Annotated[str, Meta(extra_json_schema={"enum": list(POOLINGS)})] | None = None
    """The mean over all tokens, or the last token; unset: as the model file says, else the mean."""
    add_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=INT32_MAX)] | None = None
    service_tier: ServiceTier | None = None
    timeout: Timeout | None = None
    user: Annotated[str, Meta(max_length=1024)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None


class Embedding(msgspec.Struct, frozen=True):
    """The vector of one input."""

    object: str
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(msgspec.Struct, frozen=True):
    """All vectors, in the order of the inputs."""

    object: str
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
