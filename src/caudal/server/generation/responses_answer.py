"""Answers of `/v1/responses`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from caudal.errors import OverloadedError, RequestError
from caudal.scheduler.output import FinishReason
from caudal.server.generation.choice import Choice
from caudal.server.generation.logprobs import chat_logprobs
from caudal.server.generation.plan import GenerationPlan
from caudal.server.generation.response_items import ResponseItems
from caudal.server.model import ServedModel
from caudal.server.parsers.parts import Content, Part
from caudal.server.protocol.chat import ChatTokenLogprob
from caudal.server.protocol.common import Usage
from caudal.server.protocol.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ReasoningInfo,
    ResponseFailure,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    TextFormat,
    TextInfo,
)
from caudal.server.sse import SERVER_SENT_EVENTS

_encode = msgspec.json.encode


class ResponsesAnswerWriter:
    """Implements AnswerWriter for responses: a message, or what the parser finds."""

    stream_type = SERVER_SENT_EVENTS

    def __init__(
        self, plan: GenerationPlan, model: ServedModel, created: int, body: ResponsesRequest
    ) -> None:
        self._plan = plan
        self._model = model
        number = plan.request_id.partition("-")[2]
        self._response = _initial_response(f"resp_{number}", plan, model, created, body)
        self._sequence_number = 0
        self._items = ResponseItems(number, self._event, self._next_number)

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """The response, and its message unless other items may come first; all empty."""
        return (
            self._event("response.created", response=self._response)
            + self._event("response.in_progress", response=self._response)
            + (self._items.open_message() if self._plan.output is None else b"")
        )

    def chunk(self, choice: Choice, text: str) -> bytes:
        """See AnswerWriter.chunk."""
        logprobs = self._take_logprobs(choice)
        if self._plan.output is None:
            return self._items.write(Content(text), logprobs)
        return self._write(choice.take_parts(), logprobs)

    def last_chunk(self, choice: Choice, text: str) -> bytes:
        """The rest, and the end of the last item."""
        is_rest = text or choice.parts or choice.logprobs
        return (self.chunk(choice, text) if is_rest else b"") + self._close(choice)

    def _write(self, parts: Sequence[Part], logprobs: list[ChatTokenLogprob]) -> bytes:
        """Log-probabilities go with the first content; those of nothing but marks go nowhere."""
        events = []
        for part in parts:
            is_content = isinstance(part, Content)
            events.append(self._items.write(part, logprobs if is_content else None))
            logprobs = [] if is_content else logprobs
        return b"".join(events)

    def _close(self, choice: Choice) -> bytes:
        is_cut = choice.finish_reason is FinishReason.LENGTH
        events = self._items.close("incomplete" if is_cut else "completed")
        if not self._items.items:
            events = self._items.open_message()
            events += self._items.close("incomplete" if is_cut else "completed")
        return events

    def ending(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The whole response."""
        self._complete(choices[0], usage)
        return self._event(f"response.{self._response.status}", response=self._response)

    def failure(self, error: RequestError) -> bytes:
        """The response with its error."""
        code = "rate_limit_exceeded" if isinstance(error, OverloadedError) else "server_error"
        self._response.status = "failed"
        self._response.error = ResponseFailure(code, error.message)
        return self._event("response.failed", response=self._response)

    def response(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """See AnswerWriter.response."""
        choice = choices[0]
        parts = choice.take_parts() or [Content("".join(choice.texts))]
        self._write(parts, self._take_logprobs(choice))
        self._close(choice)
        self._complete(choice, usage)
        return _encode(self._response)

    def _complete(self, choice: Choice, usage: Usage) -> None:
        response = self._response
        is_cut = choice.finish_reason is FinishReason.LENGTH
        response.status = "incomplete" if is_cut else "completed"
        response.completed_at = int(time.time())
        response.output = self._items.items
        if is_cut:
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        response.usage = ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(choice.num_reasoning_tokens),
            usage.total_tokens,
        )

    def _take_logprobs(self, choice: Choice) -> list[ChatTokenLogprob]:
        num_top = self._plan.num_logprobs
        if num_top is None:
            return []
        return chat_logprobs(self._model, choice.take_logprobs(), num_top).content

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, **fields, "sequence_number": self._next_number()}
        return _event_head(kind) + _encode(data) + b"\n\n"

    def _next_number(self) -> int:
        number = self._sequence_number
        self._sequence_number += 1
        return number


def _event_head(kind: str) -> bytes:
    return f"event: {kind}\ndata: ".encode()


def _initial_response(
    response_id: str,
    plan: GenerationPlan,
    model: ServedModel,
    created: int,
    body: ResponsesRequest,
) -> ResponseObject:
    return ResponseObject(
        id=response_id,
        created_at=created,
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=model.name,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=plan.sampling.temperature,
        reasoning=ReasoningInfo(body.reasoning.effort if body.reasoning else None),
        text=TextInfo(_format_of(body)),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=plan.num_logprobs or 0,
        top_p=plan.sampling.top_p,
        service_tier=plan.service_tier or "default",
        user=body.user,
    )


def _format_of(body: ResponsesRequest) -> TextFormat:
    given = body.text.format if body.text is not None else None
    return given or TextFormat(type="text")
