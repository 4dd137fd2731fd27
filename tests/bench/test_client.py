"""Whatever a server sends, one request fails at most, and for the right reason."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from caudal.bench.client import Clock, create_session, send_request
from caudal.bench.record import FailureKind, RequestRecord
from caudal.bench.target import Target, TargetOptions

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def streaming(*pieces: bytes) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        return response

    return answer


async def send(handler: Handler) -> tuple[RequestRecord, str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    async with TestServer(app) as server:
        options = TargetOptions(timeout_s=5.0)
        target = Target(str(server.make_url("/v1")), "m", options)
        record = RequestRecord(0, 0, 0.0)
        async with create_session(options) as session:
            text = await send_request(session, target, target.body([], 5), record, Clock())
    return record, text


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
WORD = event({"choices": [{"delta": {"content": "word"}}]})
STOP = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
USAGE = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})


@pytest.mark.parametrize(
    "pieces",
    [
        (WORD, WORD, STOP, USAGE, DONE),
        (WORD, WORD, STOP),  # no [DONE], as some servers do
        (WORD, WORD, DONE),
        tuple(bytes([byte]) for byte in WORD + WORD + STOP + DONE),
        (WORD, event({"choices": None}), event({"usage": None}), WORD, STOP, DONE),
        (WORD, event({"choices": [{"delta": None, "text": "word"}]}), STOP, DONE),
    ],
)
async def test_complete_answers_are_taken(pieces: tuple[bytes, ...]) -> None:
    record, text = await send(streaming(*pieces))
    assert record.failure is None, record.message
    assert text == "wordword"
    assert record.num_output_tokens == 2


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ((WORD, WORD), FailureKind.CUT),
        ((), FailureKind.CUT),
        ((DONE,), FailureKind.EMPTY),
        ((STOP, DONE), FailureKind.EMPTY),
        ((WORD, b"data: {nonsense\n\n", DONE), FailureKind.BAD_ANSWER),
        ((WORD, b"data: [1, 2]\n\n", DONE), FailureKind.BAD_ANSWER),
        ((WORD, b"data: " + b"[" * 200_000 + b"\n\n", DONE), FailureKind.BAD_ANSWER),
        ((WORD, event({"error": "full"}), DONE), FailureKind.ERROR_EVENT),
        ((WORD, b"event: error\ndata: {}\n\n", DONE), FailureKind.ERROR_EVENT),
        ((event({"choices": 7}), event({"choices": [7, {"delta": "x"}]}), STOP), FailureKind.EMPTY),
    ],
)
async def test_broken_answers_fail_alone(pieces: tuple[bytes, ...], kind: FailureKind) -> None:
    record, _ = await send(streaming(*pieces))
    assert record.failure is kind


async def test_tokens_without_text_have_a_first_token_at_their_finish() -> None:
    record, text = await send(streaming(STOP, USAGE, DONE))
    assert record.failure is None and text == ""
    assert record.num_output_tokens == 2
    assert record.ttft_s is not None and record.itl_s == []


async def test_reasoning_and_tool_calls_are_output() -> None:
    pieces = (
        event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
        event({"choices": [{"delta": {"reasoning_content": "hm"}}]}),
        event({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}),
        STOP,
        DONE,
    )
    record, _ = await send(streaming(*pieces))
    assert record.failure is None
    assert len(record.chunk_s) == 2


async def test_a_connection_that_breaks_is_a_cut_answer() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(WORD)
        assert request.transport is not None
        request.transport.abort()
        return response

    record, _ = await send(answer)
    assert record.failure is FailureKind.CUT


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (429, b'{"error": {"message": "full"}}', FailureKind.REJECTED, "full"),
        (404, b'{"detail": "Not Found"}', FailureKind.REFUSED, "Not Found"),
        (503, b"<html>down</html>", FailureKind.SERVER_ERROR, "<html>down</html>"),
        (500, b"", FailureKind.SERVER_ERROR, ""),
        (400, b'{"error": "plain"}', FailureKind.REFUSED, "plain"),
    ],
)
async def test_statuses_become_kinds_with_the_words_of_the_server(
    status: int, body: bytes, kind: FailureKind, message: str
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body)

    record, _ = await send(answer)
    assert (record.failure, record.status) == (kind, status)
    assert message in record.message
