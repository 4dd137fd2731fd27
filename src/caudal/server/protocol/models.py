"""`/v1/models` and the small operational answers."""

from __future__ import annotations

import msgspec


class ModelMetadata(msgspec.Struct, frozen=True):
    """What Caudal knows about the model file."""

    architecture: str
    quantization: str
    vocab_size: int
    has_chat_template: bool
    warnings: list[str]
    """Anything that may make answers differ from the model's reference (tokenizer, template)."""


class ModelCard(msgspec.Struct, frozen=True):
    """One model."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    type: str
    display_name: str
    created_at: str
    """As Anthropic's clients read it, like the two before."""
    metadata: ModelMetadata


class ModelList(msgspec.Struct, frozen=True):
    """All models (one today), as one page."""

    object: str
    data: list[ModelCard]
    has_more: bool
    first_id: str
    last_id: str


class Version(msgspec.Struct, frozen=True):
    """The server's version."""

    version: str


class Status(msgspec.Struct, frozen=True):
    """Answer of the probes."""

    status: str
