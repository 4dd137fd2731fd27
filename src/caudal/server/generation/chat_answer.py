"""Answers of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from caudal.errors import RequestError
from caudal.server.generation.answer import ChunkFrame, usage_so_far
from caudal.server.generation.choice import Choice
from caudal.server.generation.logprobs import chat_logprobs, prompt_logprobs
from caudal.server.generation.plan import GenerationPlan
from caudal.server.model import ServedModel
from caudal.server.parsers.parts import (
    CallArguments,
    CallStart,
    Content,
    Part,
    Reasoning,
    joined,
)
from caudal.server.protocol.chat import ChatAnswer, ChatChoice, ChatLogprobs
from caudal.server.protocol.common import Usage
from caudal.server.protocol.tools import AnswerToolCall, FunctionCall
from caudal.server.sse import DONE, SERVER_SENT_EVENTS, error_event

_encode = msgspec.json.encode


class _FunctionDelta(msgspec.Struct, omit_defaults=True):
    arguments: str
    name: str | None = None


class _CallDelta(msgspec.Struct, omit_defaults=True):
    index: int
    function: _FunctionDelta
    id: str | None = None
    type: str | None = None


class _Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_CallDelta] | None = None


class _ChunkChoice(msgspec.Struct):
    index: int
    delta: _Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class _LastChunkChoice(_ChunkChoice):
    stop_reason: str | int | None


class _ResponseBody(msgspec.Struct, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: msgspec.Raw | None = None
    service_tier: str | None = None


class ChatAnswerWriter:
    """Implements AnswerWriter for chat."""

    stream_type = SERVER_SENT_EVENTS

    def __init__(self, plan: GenerationPlan, model: ServedModel, created: int) -> None:
        self._plan = plan
        self._model = model
        self._created = created
        self._continuous = plan.stream.continuous_usage
        self._is_plain = plan.num_logprobs is None and not self._continuous
        has_usage = plan.stream.include_usage
        self._frame = ChunkFrame(
            plan.request_id,
            "chat.completion.chunk",
            created,
            model.name,
            usage=has_usage,
            tier=plan.service_tier,
        )
        tail = b'},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
        self._plain_tail = tail if has_usage else tail.replace(b',"usage":null', b"")
        self._plain_heads = [
            self._frame.head + b'{"index":%d,"delta":{"content":' % index
            for index in range(len(plan.prompts) * plan.n)
        ]

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """A chunk with the role for each choice."""
        delta = _Delta(role="assistant", content="")
        bodies = [_ChunkChoice(choice.index, delta, None, None) for choice in choices]
        usages = [usage_so_far(choice) if self._continuous else None for choice in choices]
        events = zip(bodies, usages, strict=True)
        return b"".join(self._frame.event(_encode(body), usage) for body, usage in events)

    def chunk(self, choice: Choice, text: str) -> bytes:
        """See AnswerWriter.chunk."""
        if choice.parts:
            return self._parts(choice)
        if self._is_plain:
            return self._plain_heads[choice.index] + _encode(text) + self._plain_tail
        body = _ChunkChoice(choice.index, _Delta(content=text), self._logprobs(choice), None)
        return self._event(choice, body)

    def last_chunk(self, choice: Choice, text: str) -> bytes:
        """See AnswerWriter.last_chunk."""
        before = b""
        if text or choice.logprobs or choice.parts:
            before = self.chunk(choice, text)
        body = _LastChunkChoice(choice.index, _Delta(), None, choice.outcome, choice.stop_reason)
        return before + self._event(choice, body)

    def _parts(self, choice: Choice) -> bytes:
        """An event for each part; log-probabilities come with the first."""
        events: list[bytes] = []
        for part in choice.take_parts():
            logprobs = None if events else self._logprobs(choice)
            body = _ChunkChoice(choice.index, _delta(part), logprobs, None)
            events.append(self._event(choice, body))
        return b"".join(events)

    def _event(self, choice: Choice, body: _ChunkChoice) -> bytes:
        return self._frame.event(_encode(body), usage_so_far(choice) if self._continuous else None)

    def ending(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """See AnswerWriter.ending."""
        return (self._frame.event(b"", usage) if self._plan.stream.include_usage else b"") + DONE

    def failure(self, error: RequestError) -> bytes:
        """See AnswerWriter.failure."""
        return error_event(error)

    def response(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """See AnswerWriter.response."""
        plan = self._plan
        bodies = [
            ChatChoice(
                choice.index,
                _message(choice),
                self._logprobs(choice),
                choice.outcome,
                choice.stop_reason,
            )
            for choice in choices
        ]
        body = _ResponseBody(
            plan.request_id, "chat.completion", self._created, self._model.name, bodies, usage
        )
        body.service_tier = plan.service_tier
        if plan.num_prompt_logprobs is not None:
            entries = choices[0].prompt_logprobs or []
            body.prompt_logprobs = prompt_logprobs(self._model, entries, plan.num_prompt_logprobs)
        return _encode(body)

    def _logprobs(self, choice: Choice) -> ChatLogprobs | None:
        if self._plan.num_logprobs is None:
            return None
        return chat_logprobs(self._model, choice.take_logprobs(), self._plan.num_logprobs)


def _delta(part: Part) -> _Delta:
    match part:
        case Reasoning(text):
            return _Delta(reasoning_content=text, reasoning=text)
        case Content(text):
            return _Delta(content=text)
        case CallStart(index, call_id, name):
            function = _FunctionDelta("", name)
            return _Delta(tool_calls=[_CallDelta(index, function, call_id, "function")])
        case CallArguments(index, text):
            return _Delta(tool_calls=[_CallDelta(index, _FunctionDelta(text))])


def _message(choice: Choice) -> ChatAnswer:
    parts = choice.take_parts()
    if not parts:
        return ChatAnswer("assistant", "".join(choice.texts))
    answer = joined(parts)
    calls = [AnswerToolCall(c.call_id, FunctionCall(c.name, c.arguments)) for c in answer.calls]
    return ChatAnswer(
        "assistant",
        answer.content or (None if calls else ""),
        reasoning_content=answer.reasoning or UNSET,
        reasoning=answer.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )
