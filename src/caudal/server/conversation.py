"""A chat request to what the model reads and what is looked for in its answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from caudal.errors import InvalidRequestError
from caudal.sampling_params import StructuredOutputsParams
from caudal.server.dialect import Dialect, call_id, dialect_of, without_tool_roles
from caudal.server.messages import (
    generation_prompt_flags,
    num_chars_of,
    template_kwargs,
    template_messages,
)
from caudal.server.model import ServedModel
from caudal.server.parsers import harmony
from caudal.server.parsers.output_parser import (
    OutputRules,
    ReasoningRules,
    ToolRules,
    is_harmony,
)
from caudal.server.parsers.reasoning import ReasoningState, state_after
from caudal.server.prompts import Conversation, EncodedChat, encode_chat, run_prompt_work
from caudal.server.protocol.chat import EFFORTS, ChatCompletionRequest
from caudal.server.state import AppState
from caudal.server.tool_constraint import call_constraint
from caudal.server.tools import ToolMode, ToolUse, resolve_tools

_ARGUMENT_MARKS = ("[ARGS]", "[CALL_ID]")


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A conversation that is ready for the engine."""

    text: str
    token_ids: list[int]
    output: OutputRules | None
    constraint: StructuredOutputsParams | None
    """The form that calls must have."""
    shown_token_ids: frozenset[int]
    """Special tokens that the parser must see."""
    tools: ToolUse | None


async def prepare_chat(
    state: AppState, model: ServedModel, body: ChatCompletionRequest
) -> PreparedChat:
    """The rendered conversation of `body`, of whatever length, with its tools.

    Raises InvalidRequestError naming the field, or for a length that is absurd.
    """
    dialect, tools, chat = _read(state, model, body)
    num_chars = num_chars_of(chat.messages) + num_chars_of(chat.tools)
    work = partial(_encode, state, model, body, chat, num_chars)
    text, token_ids = await run_prompt_work(state, num_chars, work)
    is_parsed = tools is not None and (
        tools.mode is ToolMode.REQUIRED or state.config.enable_auto_tool_choice
    )
    output = _output_rules(body, dialect, tools if is_parsed else None, chat, text)
    reasoning = None if output is None else output.reasoning
    return PreparedChat(
        text,
        token_ids,
        output,
        call_constraint(tools, dialect.tools, reasoning) if tools and is_parsed else None,
        _special_ids(model, output),
        tools,
    )


def count_chat_tokens(state: AppState, model: ServedModel, body: ChatCompletionRequest) -> int:
    """Tokens of the prompt of `body`, for any thread that may be held up. Raises likewise."""
    chat = _read(state, model, body)[2]
    num_chars = num_chars_of(chat.messages) + num_chars_of(chat.tools)
    return len(_encode(state, model, body, chat, num_chars).token_ids)


def _read(
    state: AppState, model: ServedModel, body: ChatCompletionRequest
) -> tuple[Dialect, ToolUse | None, Conversation]:
    dialect = dialect_of(state.config, model)
    is_parallel = body.parallel_tool_calls is not False and dialect.is_parallel
    tools = resolve_tools(body.tools, body.tool_choice, is_parallel=is_parallel)
    return dialect, tools, _conversation(state, body, dialect, tools)


def _encode(
    state: AppState,
    model: ServedModel,
    body: ChatCompletionRequest,
    chat: Conversation,
    num_chars: int,
) -> EncodedChat:
    return encode_chat(
        model,
        chat,
        num_chars=num_chars,
        max_model_len=state.engine.info.max_model_len,
        add_special_tokens=body.add_special_tokens is not False,
    )


def _conversation(
    state: AppState, body: ChatCompletionRequest, dialect: Dialect, tools: ToolUse | None
) -> Conversation:
    messages = template_messages(
        body.messages, normalize_headers=state.config.normalize_client_headers
    )
    flags = generation_prompt_flags(body.add_generation_prompt, body.continue_final_message)
    kwargs = _kwargs(body, dialect)
    if not dialect.has_native_tools:
        uses_tools = tools or any(m["role"] == "tool" or "tool_calls" in m for m in messages)
        if uses_tools:
            messages = without_tool_roles(messages, dialect.tools, tools)
        return Conversation(messages, None, flags, kwargs)
    for message in messages:
        if "tool_call_id" in message:
            message["tool_call_id"] = call_id(message["tool_call_id"], dialect.tools)
        for call in message.get("tool_calls", ()):
            call["id"] = call_id(call["id"], dialect.tools)
    return Conversation(messages, tools.template_tools() if tools else None, flags, kwargs)


def _kwargs(body: ChatCompletionRequest, dialect: Dialect) -> dict[str, Any]:
    kwargs = dict(template_kwargs(body.chat_template_kwargs))
    effort = body.reasoning_effort
    if effort is None:
        return kwargs
    if effort not in EFFORTS:
        raise InvalidRequestError(
            f"reasoning_effort: must be one of {', '.join(EFFORTS)}, got {effort[:64]!r}.",
            param="reasoning_effort",
            code="invalid_value",
        )
    if effort != "none" and dialect.reasoning is None:
        raise InvalidRequestError(
            "reasoning_effort: this model does not reason.",
            param="reasoning_effort",
            code="unsupported",
        )
    kwargs.setdefault("reasoning_effort", effort)
    if effort == "none":
        kwargs.setdefault("enable_thinking", False)
    return kwargs


def _output_rules(
    body: ChatCompletionRequest,
    dialect: Dialect,
    tools: ToolUse | None,
    chat: Conversation,
    text: str,
) -> OutputRules | None:
    if dialect.reasoning is None and tools is None:
        return None
    reasoning = tool_rules = None
    if dialect.reasoning is not None:
        adds_prompt, is_continued = chat.flags
        state = ReasoningState.UNDECIDED
        if is_continued:
            written = chat.messages[-1]["content"]
            state = state_after(written, dialect.reasoning, is_continued=True)
        elif adds_prompt:
            state = state_after(text, dialect.reasoning, is_continued=False)
        is_shown = body.include_reasoning is not False
        reasoning = ReasoningRules(dialect.reasoning, state, is_shown)
    if tools is not None:
        tool_rules = ToolRules(
            dialect.tools,
            tools.names,
            tools.max_calls,
            tools.parameters,
            ends_at_repeat=tools.mode is ToolMode.REQUIRED,
        )
    return OutputRules(reasoning, tool_rules)


def _special_ids(model: ServedModel, output: OutputRules | None) -> frozenset[int]:
    """Ids of the marks that are special tokens, which decoding would leave out."""
    if output is None:
        return frozenset()
    marks: list[str] = []
    if output.reasoning is not None:
        marks += output.reasoning.format
    if is_harmony(output):
        marks += harmony.MARKS
    if output.tools is not None:
        marks += _tool_marks(output.tools)
    special = model.tokenizer.control_texts.intersection(marks)
    encode = model.tokenizer.encode
    return frozenset(
        token_id for mark in special for token_id in encode(mark, add_bos=False, parse_special=True)
    )


def _tool_marks(tools: ToolRules) -> Iterable[str]:
    yield from tools.format.openers
    yield tools.format.closer
    if tools.format.has_name_before:
        yield from _ARGUMENT_MARKS
