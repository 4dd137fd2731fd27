"""`/render`."""

from __future__ import annotations

import msgspec


class RenderedPromptBody(msgspec.Struct, frozen=True):
    """What the model would read for one prompt."""

    text: str
    """Before tokenization: a BOS that the tokenizer adds is only in the ids."""
    token_ids: list[int]
    num_tokens: int
    max_tokens: int
    """Output tokens that would be generated at most."""


class RenderResponse(msgspec.Struct, frozen=True):
    """All prompts of the request: one of a chat."""

    model: str
    max_model_len: int
    prompts: list[RenderedPromptBody]
