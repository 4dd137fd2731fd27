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
from caudal.server.model import ServedModel
from caudal.server.protocol.chat import ChatTokenLogprob
from caudal.server.protocol.common import Usage
from caudal.server.protocol.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ResponseFailure,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    TextInfo,
)
from caudal.server.sse import SERVER_SENT_EVENTS

_encode = msgspec.json.encode
_PLACE = {"output_index": 0, "content_index": 0}
_DELTA = "response.output_text.delta"


class ResponsesAnswerWriter:
    """Implements AnswerWriter for responses: one message with one text."""

    stream_type = SERVER_SENT_EVENTS

    def __init__(
        self, plan: GenerationPlan, model: ServedModel, created: int, body: ResponsesRequest
    ) -> None:
        self._plan = plan
        self._model = model
        number = plan.request_id.partition("-")[2]
        self._item_id = f"msg_{number}"
        self._response = _initial_response(f"resp_{number}", plan, model, created, body)
        self._sequence_number = 0
        self._texts: list[str] = []
        self._logprobs: list[ChatTokenLogprob] = []
        head = {"type": _DELTA, "item_id": self._item_id, **_PLACE}
        self._delta_head = _event_head(_DELTA) + _encode(head)[:-1] + b',"delta":'

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """The response, its message and its text, all empty."""
        item = OutputMessage(self._item_id, "message", "in_progress", "assistant", [])
        part = OutputText("output_text", "", [], [])
        return (
            self._event("response.created", response=self._response)
            + self._event("response.in_progress", response=self._response)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", item_id=self._item_id, **_PLACE, part=part)
        )

    def chunk(self, choice: Choice, text: str) -> bytes:
        """See AnswerWriter.chunk."""
        logprobs = self._take_logprobs(choice)
        self._texts.append(text)
        middle = _encode(text) + b',"logprobs":' + _encode(logprobs)
        return self._delta_head + middle + b',"sequence_number":%d}\n\n' % self._next_number()

    def last_chunk(self, choice: Choice, text: str) -> bytes:
        """The rest of the text, then the ends of the text and of the message."""
        events = self.chunk(choice, text) if text or choice.logprobs else b""
        message = self._message(choice, "".join(self._texts))
        part = message.content[0]
        where = {"item_id": self._item_id, **_PLACE}
        return (
            events
            + self._event(
                "response.output_text.done", **where, text=part.text, logprobs=part.logprobs
            )
            + self._event("response.content_part.done", **where, part=part)
            + self._event("response.output_item.done", output_index=0, item=message)
        )

    def ending(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The whole response."""
        self._complete(choices[0], "".join(self._texts), usage)
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
        self._take_logprobs(choice)
        self._complete(choice, "".join(choice.texts), usage)
        return _encode(self._response)

    def _complete(self, choice: Choice, text: str, usage: Usage) -> None:
        response = self._response
        message = self._message(choice, text)
        response.status = message.status
        response.completed_at = int(time.time())
        response.output = [message]
        if message.status == "incomplete":
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        response.usage = ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(),
            usage.total_tokens,
        )

    def _message(self, choice: Choice, text: str) -> OutputMessage:
        is_cut = choice.finish_reason is FinishReason.LENGTH
        part = OutputText("output_text", text, [], self._logprobs)
        status = "incomplete" if is_cut else "completed"
        return OutputMessage(self._item_id, "message", status, "assistant", [part])

    def _take_logprobs(self, choice: Choice) -> list[ChatTokenLogprob]:
        num_top = self._plan.num_logprobs
        if num_top is None:
            return []
        new = chat_logprobs(self._model, choice.take_logprobs(), num_top).content
        self._logprobs += new
        return new

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
        text=TextInfo({"type": "text"}),
        top_logprobs=plan.num_logprobs or 0,
        top_p=plan.sampling.top_p,
        service_tier=plan.service_tier or "default",
        user=body.user,
    )
