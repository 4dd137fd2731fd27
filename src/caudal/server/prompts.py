"""Prompt text to token ids, without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from caudal.errors import InvalidRequestError
from caudal.server.model import ServedModel
from caudal.server.protocol.completions import MAX_PROMPTS
from caudal.server.state import AppState
from caudal.tokenizer.rendered_prompt import PromptSegment, RenderedPrompt

T = TypeVar("T")

_MIN_CHARS_PER_TOKEN_CHECKED = 8
"""Prompts shorter than this per token of context are simply tokenized and counted."""


def split_prompts(
    prompt: str | Sequence[Any], *, param: str = "prompt", max_prompts: int = MAX_PROMPTS
) -> list[str | list[int]]:
    """The prompts of a request: a text, texts, token ids, or lists of token ids.

    Raises InvalidRequestError (naming `param`) for an empty, mixed or too long list.
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [[*prompt]]
    problem = None
    if len(prompt) > max_prompts:
        problem = f"at most {max_prompts} prompts in one request, got {len(prompt)}"
    elif not prompt or (kinds == {list} and not all(prompt)):
        problem = "must not be an empty list"
    elif len(kinds) > 1:
        problem = "must not mix texts, token ids and lists of token ids"
    elif kinds == {list} and any(set(map(type, ids)) != {int} for ids in prompt):
        problem = "lists must hold token ids only"
    if problem is not None:
        raise _prompt_error(problem, param)
    return list(prompt)


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str = "prompt") -> None:
    """Raise InvalidRequestError if an id is outside the vocabulary."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        bad = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise InvalidRequestError(
            f"{param}: {bad} is not a token id; ids are 0 to {vocab_size - 1}.",
            param=param,
            code="invalid_value",
        )


def _prompt_error(problem: str, param: str = "prompt") -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {problem}.", param=param, code="invalid_value")


async def run_prompt_work(state: AppState, num_chars: int, work: Callable[[], T]) -> T:
    """Run `work` here if it is short, else in the tokenizer's thread."""
    if num_chars <= state.limits.inline_chars:
        return work()
    return await asyncio.get_running_loop().run_in_executor(state.pool, work)


def encode_text(
    model: ServedModel, text: str, *, max_model_len: int, add_special_tokens: bool
) -> list[int]:
    """Token ids of a raw prompt; special tokens written in it count.

    Raises InvalidRequestError if it is empty for this model or certain to exceed the context.
    """
    check_length(model, len(text), max_model_len, "prompt")
    add_bos = None if add_special_tokens else False
    token_ids = model.tokenizer.encode(text, add_bos=add_bos, parse_special=True)
    if not token_ids:
        bos_id = model.tokenizer.bos_id
        if bos_id is None or not add_special_tokens:
            raise _prompt_error("must not be empty: this model has no token to start from")
        token_ids = [bos_id]
    return token_ids


class Conversation(NamedTuple):
    """What a chat template renders."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    flags: tuple[bool, bool]
    """add_generation_prompt and continue_final_message"""
    kwargs: dict[str, Any]


class EncodedChat(NamedTuple):
    """A rendered conversation."""

    text: str
    """As the template gives it; a BOS that the tokenizer adds is only in the ids."""
    token_ids: list[int]


def encode_chat(
    model: ServedModel,
    chat: Conversation,
    *,
    num_chars: int,
    max_model_len: int,
    add_special_tokens: bool,
) -> EncodedChat:
    """A conversation rendered by the model's template, and its token ids.

    Raises InvalidRequestError with the template's message, or if the conversation, of `num_chars`
    characters, is certain to exceed the context.
    """
    messages = chat.messages
    add_generation_prompt, is_continued = chat.flags
    check_length(model, num_chars, max_model_len, "messages")
    rendered = model.chat_template.render(
        messages,
        tools=chat.tools,
        add_generation_prompt=add_generation_prompt,
        chat_template_kwargs=chat.kwargs,
    )
    if is_continued:
        rendered = cut_after(rendered, messages[-1]["content"])
    add_bos = None if add_special_tokens else False
    token_ids = model.tokenizer.encode_prompt(rendered, add_bos=add_bos)
    if not token_ids:
        raise InvalidRequestError(
            "messages: the chat template renders them to nothing.",
            param="messages",
            code="invalid_value",
        )
    return EncodedChat(rendered.text, token_ids)


def cut_after(rendered: RenderedPrompt, content: str) -> RenderedPrompt:
    """`rendered` up to the end of its last message's `content`, so that the answer goes on there.

    Templates may strip a message, so surrounding blanks of `content` are not looked for. Raises
    InvalidRequestError if the template has changed the content beyond recognition.
    """
    wanted = content.strip()
    position = rendered.text.rfind(wanted)
    if position < 0:
        raise InvalidRequestError(
            "continue_final_message: the chat template alters the final message.",
            param="continue_final_message",
            code="invalid_value",
        )
    left = position + len(wanted)
    segments: list[PromptSegment] = []
    for segment in rendered.segments:
        if left <= 0:
            break
        segments.append(PromptSegment(segment.text[:left], segment.is_content))
        left -= len(segment.text)
    return RenderedPrompt(tuple(segments))


def check_length(model: ServedModel, num_chars: int, max_model_len: int, param: str) -> None:
    """Refuse a text that even the longest tokens cannot fit, before spending time on it."""
    if num_chars <= _MIN_CHARS_PER_TOKEN_CHECKED * max_model_len:
        return
    num_tokens = num_chars // model.max_token_bytes
    if num_tokens > max_model_len:
        raise InvalidRequestError(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt has "
            f"at least {num_tokens} tokens. Shorten the prompt.",
            param=param,
            code="context_length_exceeded",
        )
