"""Answers of Ollama's `/api/chat` and `/api/generate`, and errors in its shape."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from caudal.errors import RequestError
from caudal.server.generation.choice import Choice
from caudal.server.parsers.parts import (
    CallArguments,
    CallStart,
    Content,
    Part,
    Reasoning,
    decoded_arguments,
    joined,
)
from caudal.server.protocol.common import Usage
from caudal.server.protocol.ollama import (
    OllamaAnswerCall,
    OllamaAnswerMessage,
    OllamaCalledFunction,
    OllamaChatResponse,
    OllamaErrorResponse,
    OllamaGenerateResponse,
)
from caudal.server.sse import StreamType

_encode = msgspec.json.encode

_LINES: Final = StreamType(b"application/x-ndjson", b"")


def ollama_error_body(error: RequestError) -> bytes:
    """The JSON body of `error` in Ollama's shape."""
    return _encode(OllamaErrorResponse(error.message))


def rfc3339(seconds: float) -> str:
    """A moment, given in seconds since 1970, in UTC."""
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def load_answer(model_name: str, *, is_chat: bool) -> bytes:
    """What a request without a prompt gets: the model is loaded."""
    return _encode(_answer(model_name, "", {}, is_chat=is_chat, done=True, done_reason="load"))


class OllamaAnswerWriter:
    """Implements AnswerWriter for Ollama: one JSON object a line."""

    stream_type = _LINES

    def __init__(self, model_name: str, *, is_chat: bool) -> None:
        """`model_name` as the client wrote it."""
        self._model_name = model_name
        self._is_chat = is_chat
        self._call: tuple[CallStart, list[str]] | None = None
        self._head = b'{"model":' + _encode(model_name) + b',"created_at":"'
        self._middle = (
            b'","message":{"role":"assistant","content":' if is_chat else b'","response":'
        )
        self._tail = b'},"done":false}\n' if is_chat else b',"done":false}\n'

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """Nothing: the first line brings text."""
        return b""

    def chunk(self, choice: Choice, text: str) -> bytes:
        """See AnswerWriter.chunk."""
        if choice.parts:
            return b"".join(map(self._part, choice.take_parts()))
        return self._text(text)

    def _text(self, text: str) -> bytes:
        now = rfc3339(time.time()).encode()
        return self._head + now + self._middle + _encode(text) + self._tail

    def last_chunk(self, choice: Choice, text: str) -> bytes:
        """The rest of the text; the line that ends the answer comes with the counts."""
        events = self.chunk(choice, text) if text or choice.parts else b""
        return events + self._end_call()

    def _part(self, part: Part) -> bytes:
        """A line for each part; calls are gathered, because they come whole."""
        match part:
            case CallStart():
                events, self._call = self._end_call(), (part, [])
                return events
            case CallArguments(_, text):
                assert self._call is not None
                self._call[1].append(text)
                return b""
            case Content(text):
                return self._end_call() + self._text(text)
            case Reasoning(text):
                return self._line("", thinking=text)

    def _end_call(self) -> bytes:
        if self._call is None:
            return b""
        (start, texts), self._call = self._call, None
        content, calls = _whole_call(start, "".join(texts))
        return self._line(content, tool_calls=calls) if calls else self._text(content)

    def _line(self, text: str, **fields: Any) -> bytes:
        answer = _answer(self._model_name, text, fields, is_chat=self._is_chat, done=False)
        return _encode(answer) + b"\n"

    def ending(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The line without text and with the statistics."""
        return self._whole("", {}, choices[0], usage) + b"\n"

    def failure(self, error: RequestError) -> bytes:
        """See AnswerWriter.failure."""
        return ollama_error_body(error) + b"\n"

    def response(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """See AnswerWriter.response."""
        choice = choices[0]
        answer = joined(choice.take_parts())
        content = answer.content or "".join(choice.texts)
        fields: dict[str, Any] = {}
        if answer.reasoning:
            fields["thinking"] = answer.reasoning
        for index, call in enumerate(answer.calls):
            text, calls = _whole_call(CallStart(index, call.call_id, call.name), call.arguments)
            content += text
            if calls:
                fields.setdefault("tool_calls", []).extend(calls)
        return self._whole(content, fields, choice, usage)

    def _whole(self, text: str, fields: dict[str, Any], choice: Choice, usage: Usage) -> bytes:
        timing = choice.timing
        started = timing.arrival + timing.queue_s
        answer = _answer(
            self._model_name,
            text,
            fields,
            is_chat=self._is_chat,
            done=True,
            done_reason=str(choice.finish_reason),
            total_duration=_nanoseconds(time.monotonic() - timing.arrival),
            load_duration=_nanoseconds(timing.queue_s),
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=_nanoseconds(timing.first - started),
            eval_count=usage.completion_tokens,
            eval_duration=_nanoseconds(timing.last - timing.first),
        )
        return _encode(answer)


def _answer(
    model_name: str, text: str, extra: dict[str, Any], *, is_chat: bool, **fields: Any
) -> OllamaChatResponse | OllamaGenerateResponse:
    """`extra` belongs to the message, as the text does."""
    now = rfc3339(time.time())
    if is_chat:
        message = OllamaAnswerMessage("assistant", text, **extra)
        return OllamaChatResponse(model=model_name, created_at=now, message=message, **fields)
    fields |= extra
    return OllamaGenerateResponse(model=model_name, created_at=now, response=text, **fields)


def _whole_call(start: CallStart, text: str) -> tuple[str, list[OllamaAnswerCall]]:
    """Content and calls: one that was cut off, or is malformed, is shown as text."""
    arguments = decoded_arguments(text)
    if arguments is None:
        return f"{start.name}({text}", []
    function = OllamaCalledFunction(start.index, start.name, arguments)
    return "", [OllamaAnswerCall(start.call_id, function)]


def _nanoseconds(seconds: float) -> int:
    """At least 1: clients divide by durations."""
    return max(1, round(seconds * 1e9))
