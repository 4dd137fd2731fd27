"""Sends one request and notes when each piece of its answer came."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp

from caudal.bench.record import FailureKind, RequestRecord
from caudal.bench.sse import Event, SSEDecoder
from caudal.bench.target import Target, TargetOptions

KEEP_ALIVE_S = 4.0
"""Below the 5 s after which common servers close an idle connection: no race with their end."""
CONNECT_TIMEOUT_S = 30.0
MAX_MESSAGE_BYTES = 65536


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def now(self) -> float:
        """Monotonic seconds since the start."""
        return time.perf_counter() - self._started


def create_session(options: TargetOptions) -> aiohttp.ClientSession:
    """Connections without a limit on their number; close it when done."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    return aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=not options.insecure
        ),
        timeout=aiohttp.ClientTimeout(total=options.timeout_s, sock_connect=CONNECT_TIMEOUT_S),
    )


async def send_request(
    session: aiohttp.ClientSession,
    target: Target,
    body: dict[str, Any],
    record: RequestRecord,
    clock: Clock,
) -> str:
    """Fill `record` and return the answer's text; failures are recorded, not raised."""
    answer = _Answer(record, clock)
    record.sent_s = clock.now()
    try:
        async with session.post(target.url, json=body) as response:
            record.status = response.status
            if response.status != 200:
                text = await response.content.read(MAX_MESSAGE_BYTES)
                record.fail(_kind_of_status(response.status), error_message(text))
            elif target.options.stream:
                await _read_stream(response, answer)
            else:
                answer.take_whole(await response.read())
    except asyncio.CancelledError:
        record.fail(FailureKind.GIVEN_UP, "")
        raise
    except TimeoutError:
        record.fail(FailureKind.TIMEOUT, f"no end after {target.options.timeout_s:g} s")
    except aiohttp.ClientPayloadError as error:
        record.fail(FailureKind.CUT, str(error))
    except (aiohttp.ClientError, OSError) as error:
        is_inside = record.status == 200
        kind = FailureKind.CUT if is_inside else FailureKind.CONNECTION
        record.fail(kind, f"{type(error).__name__}: {error}")
    finally:
        record.end_s = clock.now()
    answer.finish(target.options.stream)
    return answer.text


async def _read_stream(response: aiohttp.ClientResponse, answer: _Answer) -> None:
    decoder = SSEDecoder()
    async for piece in response.content.iter_any():
        for event in decoder.feed(piece):
            answer.take(event)
        if answer.is_done:
            return
    for event in decoder.finish():
        answer.take(event)


class _Answer:
    """An answer as it arrives."""

    def __init__(self, record: RequestRecord, clock: Clock) -> None:
        self._record = record
        self._clock = clock
        self._pieces: list[str] = []
        self._finish_s: float | None = None
        self.is_done = False

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def take(self, event: Event) -> None:
        """One event of a stream."""
        if event.data.strip() == b"[DONE]":
            self.is_done = True
            return
        chunk = self._parse(event.data)
        if chunk is None:
            return
        error = chunk.get("error")
        if error or event.kind == "error":
            self._record.fail(FailureKind.ERROR_EVENT, error_message(event.data))
            return
        if self._take_choices(chunk):
            now = self._clock.now()
            self._record.chunk_s.append(now)
            if self._record.first_s is None:
                self._record.first_s = now
            self._record.last_s = now
        self._take_usage(chunk)

    def take_whole(self, body: bytes) -> None:
        """An answer that was not streamed."""
        answer = self._parse(body)
        if answer is not None:
            self._take_choices(answer)
            self._take_usage(answer)
            self.is_done = True

    def finish(self, is_stream: bool) -> None:
        """Judge what came: an answer without an end or without output has failed."""
        record = self._record
        if record.failure is not None:
            return
        if not self.is_done and record.finish_reason is None:
            record.fail(FailureKind.CUT, "the stream ended without [DONE] or a finish reason")
            return
        if not record.has_usage:
            record.num_output_tokens = len(record.chunk_s) if is_stream else None
        if is_stream and not record.chunk_s:
            if not record.num_output_tokens:
                record.fail(FailureKind.EMPTY, "the answer has no output")
            # Tokens without text (special tokens only): the finish is the first sign of them.
            record.first_s = record.last_s = self._finish_s or record.end_s

    def _parse(self, data: bytes) -> dict[str, Any] | None:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return value
        self._record.fail(FailureKind.BAD_ANSWER, data[:200].decode("utf-8", "replace"))
        return None

    def _take_choices(self, chunk: dict[str, Any]) -> bool:
        """Whether the chunk carries output."""
        has_output = False
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            delta = choice.get("delta") or choice.get("message") or choice
            if not isinstance(delta, dict):
                continue
            text = delta.get("content") or delta.get("text") or ""
            if isinstance(text, str):
                self._pieces.append(text)
            has_output |= bool(
                text
                or delta.get("reasoning_content")
                or delta.get("reasoning")
                or delta.get("tool_calls")
                or choice.get("token_ids")
            )
            if choice.get("finish_reason"):
                self._record.finish_reason = str(choice["finish_reason"])
                self._finish_s = self._clock.now()
        return has_output

    def _take_usage(self, chunk: dict[str, Any]) -> None:
        usage = chunk.get("usage")
        if not isinstance(usage, dict):
            return
        record = self._record
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        record.num_prompt_tokens = _count(usage.get("prompt_tokens"))
        record.num_cached_tokens = _count(cached)
        output = _count(usage.get("completion_tokens"))
        if output is not None:
            record.num_output_tokens, record.has_usage = output, True


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _kind_of_status(status: int) -> FailureKind:
    if status == 429:
        return FailureKind.REJECTED
    return FailureKind.SERVER_ERROR if status >= 500 else FailureKind.REFUSED


def error_message(body: bytes) -> str:
    """The server's own words in an OpenAI-shaped error, else the beginning of the body."""
    try:
        value = json.loads(body)
    except ValueError:
        return body[:200].decode("utf-8", "replace").strip()
    error = value.get("error", value) if isinstance(value, dict) else value
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or value)
