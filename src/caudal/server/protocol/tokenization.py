"""`/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from caudal.server.protocol.chat import MAX_MESSAGES, ChatMessage
from caudal.server.protocol.common import MAX_TOKEN_IDS, JsonObject, TokenId
from caudal.server.protocol.tools import Tools


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = (
        None
    )
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct, frozen=True):
    """Token ids, and their texts if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids to turn into text."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True):
    """The text; special tokens are written out."""

    prompt: str


class TokenizerInfo(msgspec.Struct, frozen=True):
    """What a client needs besides /tokenize to prepare prompts itself."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    add_bos_token: bool
    """Whether prompts begin with bos_token unless add_special_tokens is false."""
    model_max_length: int
    chat_template: str | None
    """In Jinja."""
