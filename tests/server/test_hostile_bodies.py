"""Whatever bytes arrive as a body: an OpenAI-shaped 4xx, never a 500, never exception text."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from caudal.config import ServerConfig
from caudal.server.state import ServerLimits
from tests.server.harness import Served, Setup, in_process, on_loopback, open_raw

PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/render",
    "/tokenize",
    "/detokenize",
)
JSON = {"content-type": "application/json"}

SURROGATES = [
    rb'{"prompt":"emoji \ud83d"}',
    rb'{"prompt":"\ud83d","stream":true}',
    rb'{"prompt":"\ude00x"}',
    rb'{"prompt":["ok","\ud83d\u0041"]}',
    rb'{"prompt":"x","stop":"\ud83d"}',
    rb'{"prompt":"x","user":"\ud83d"}',
    rb'{"prompt":"x","banana":"\ud83d"}',
    b'{"prompt":"\xed\xa0\xbd"}',
    rb'{"model":"m","messages":[{"role":"user","content":"emoji \ud83d"}]}',
    rb'{"messages":[{"role":"user","content":"\ud83d"}],"stream":true}',
    rb'{"messages":[{"role":"user","content":[{"type":"text","text":"\ud83d"}]}]}',
    rb'{"messages":[{"role":"assistant","content":"x","tool_calls":[{"arguments":"\ud83d"}]}]}',
]
MALFORMED = [
    b"",
    b" ",
    b"{",
    b"null",
    b"[]",
    b"5",
    b'"prompt"',
    b"{}x",
    b'{"prompt":"x"',
    b'{"prompt":"x",}',
    b'{"prompt":"x" "n":1}',
    b"{'prompt':'x'}",
    b'{"prompt":NaN}',
    b'{"prompt":"x","temperature":NaN}',
    b'{"prompt":"x","temperature":Infinity}',
    b'{"prompt":"x","temperature":-Infinity}',
    b'{"prompt":"x","max_tokens":+1}',
    b'{"prompt":"x","max_tokens":01}',
    b'{"prompt":"\xff\xfe"}',
    b'{"prompt":"x","banana":"\xff"}',
    b'\xef\xbb\xbf{"prompt":"x"}',
    b'{"prompt":"a\nb"}',
    b"\x00" * 64,
    b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"banana":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt":"x","banana":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    b'{"messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":'
    + b'{"a":' * 90_000 + b"1" + b"}" * 90_000 + b"}",
]  # fmt: skip

HUGE_NUMBERS = [
    b'{"prompt":"x","temperature":1e999}',
    b'{"prompt":"x","max_tokens":1e999}',
    b'{"prompt":"x","max_tokens":' + b"9" * 5000 + b"}",
    b'{"prompt":"x","seed":-' + b"9" * 400 + b"}",
    b'{"prompt":[' + b"9" * 400 + b"]}",
]


def check_refusal(status: int, text: str, case: object) -> None:
    assert 400 <= status < 500, (case, status, text)
    error = json.loads(text)["error"]
    assert error.keys() == {"message", "type", "param", "code"}, case
    for word in ("Traceback", "Error(", "msgspec", "codec", "File "):
        assert word not in error["message"], (case, error)


@pytest.mark.parametrize("path", PATHS)
async def test_malformed_body_is_a_clean_400(app: Served, path: str) -> None:
    """B03 and its kind: the same with and without stream, before any stream byte."""
    for body in MALFORMED + SURROGATES:
        response = await app.http.post(path, content=body, headers=JSON)
        check_refusal(response.status_code, response.text, body[:60])
        assert response.headers["content-type"] == "application/json"


async def test_huge_numbers_are_out_of_range_not_crashes(app: Served) -> None:
    for body in HUGE_NUMBERS:
        response = await app.http.post("/v1/completions", content=body, headers=JSON)
        check_refusal(response.status_code, response.text, body[:60])


async def test_duplicate_keys_are_checked_and_the_last_counts(app: Served) -> None:
    body = b'{"prompt":"x","max_tokens":1,"max_tokens":2}'
    response = await app.http.post("/v1/completions", content=body, headers=JSON)
    assert response.json()["usage"]["completion_tokens"] == 2
    body = b'{"prompt":"x","max_tokens":-1,"max_tokens":2}'
    response = await app.http.post("/v1/completions", content=body, headers=JSON)
    check_refusal(response.status_code, response.text, body)


async def test_deep_nesting_in_template_variables_is_no_crash(app: Served) -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    response = await app.http.post(
        "/v1/chat/completions", json={**body, "chat_template_kwargs": {"x": deep}}
    )
    assert response.status_code in (200, 400)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200),
        ({"content-type": "application/vnd.api+json"}, 200),
    ],
)
async def test_only_json_bodies_are_read(app: Served, headers: dict[str, str], status: int) -> None:
    body = b'{"prompt":"x","max_tokens":1}'
    response = await app.http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == status, response.text
    if status != 200:
        assert response.json()["error"]["code"] == "unsupported_media_type"


async def test_body_over_the_limit_is_413_declared_or_not() -> None:
    setup = Setup(config=ServerConfig(port=0, max_body_bytes=1000))
    async with on_loopback(setup) as served:
        body = b'{"prompt":"' + b"x" * 2000 + b'"}'

        async def chunks() -> Any:
            for start in range(0, len(body), 100):
                yield body[start : start + 100]

        for content in (body, chunks()):
            response = await served.http.post("/v1/completions", content=content, headers=JSON)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "body_too_large"
            assert response.headers["connection"] == "close"
        for length in (b"99999999999999999999999", b"1001"):
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: "
            connection = await open_raw(served.port, head + length + b"\r\n\r\n")
            answer = await connection.read_all()
            assert answer.split(b" ", 2)[1] in (b"413", b"400")
            await connection.close()
        await served.check_idle()


async def test_many_large_bodies_at_once_are_refused_not_hoarded() -> None:
    """Unsent bodies must not add up to all of the memory."""
    config = ServerConfig(port=0, max_body_bytes=60_000)
    setup = Setup(config=config, limits=ServerLimits(max_buffered_bytes=100_000))
    async with on_loopback(setup) as served:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50001\r\n\r\n"
        unfinished = [await open_raw(served.port, head + b" " * 50_000) for _ in range(2)]
        async with asyncio.timeout(5):
            while served.state.bodies.num_used < 100_000:
                await asyncio.sleep(0.002)
        response = await served.http.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert served.state.metrics.requests_rejected.values["bodies"] == 1
        for connection in unfinished:
            await connection.close()
        async with asyncio.timeout(5):
            while served.state.bodies.num_used:
                await asyncio.sleep(0.002)
        await served.check_idle()


async def test_body_that_never_comes_is_given_up() -> None:
    async with on_loopback(Setup(limits=ServerLimits(body_timeout_s=0.05))) as served:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 20\r\n\r\n{"
        connection = await open_raw(served.port, head)
        answer = await connection.read_all()
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"body_timeout"' in answer
        await connection.close()
        await served.check_idle()


async def test_client_that_leaves_within_its_body_is_forgotten(server: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2000\r\n\r\n{"
    for _ in range(20):
        connection = await open_raw(server.port, head)
        await connection.close()


FIELDS = [
    "prompt",
    "messages",
    "model",
    "stream",
    "stream_options",
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "seed",
    "suffix",
    "best_of",
    "priority",
    "user",
    "tools",
    "tool_choice",
    "response_format",
    "chat_template_kwargs",
    "tokens",
    "continue_final_message",
    "add_generation_prompt",
    "include_stop_str_in_output",
    "cache_salt",
]


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(12 if depth < 3 else 9)
    if kind < 6:
        return rng.choice(
            [None, True, False, "", "x", "\x00", "日本語", "<|im_end|>", "a" * 300, "text", "user"]
        )
    if kind < 9:
        return rng.choice([0, 1, -1, 2, 20, 2**31, 2**63, -(2**63) - 1, 0.5, -0.0, 1e308, 1e-320])
    if kind < 11:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    names = ["role", "content", "type", "text", "include_usage", "5", "-1", "name", "tool_calls"]
    return {rng.choice(names): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}


async def test_random_bodies_never_cause_a_500() -> None:
    """Seeded: fields of the API with values of every kind, and damaged copies of valid bodies."""
    rng = random.Random(20260727)
    valid = {
        "/v1/completions": {"prompt": "hi", "max_tokens": 2},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 2,
        },
        "/v1/embeddings": {"input": "hi"},
        "/v1/responses": {"input": "hi", "max_output_tokens": 2},
        "/render": {"prompt": "hi"},
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [5, 6]},
    }
    statuses = set()
    async with in_process(Setup()) as served:
        for _ in range(1500):
            path = rng.choice(PATHS)
            fields = {rng.choice(FIELDS): random_value(rng) for _ in range(rng.randrange(1, 4))}
            data = json.dumps({**valid[path], **fields}).encode()
            if rng.random() < 0.2:
                cut = rng.randrange(len(data))
                data = data[:cut] + bytes([rng.randrange(256)]) + data[cut + 1 :]
            response = await served.http.post(path, content=data, headers=JSON)
            statuses.add(response.status_code)
            if response.status_code != 200:
                check_refusal(response.status_code, response.text, data)
        await served.check_idle()
    assert statuses >= {200, 400}


async def test_hostile_http_is_no_crash(server: Served) -> None:
    for data in (
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: abc\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
        b"GET /%ff%fe%00 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"GET /v1/models/%ed%a0%bd HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"GET /v1/models/" + b"a" * 20_000 + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    ):
        connection = await open_raw(server.port, data)
        answer = await connection.read_all()
        assert answer.split(b" ", 2)[1] in (b"400", b"404", b"405"), (data, answer)
        await connection.close()
