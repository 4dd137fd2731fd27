"""Limits of API keys: each is enforced, named, and says truly when to come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from caudal.config import ServerConfig
from caudal.errors import InvalidRequestError
from caudal.server.keys import KeyLimits
from caudal.server.quota import Quota, RateLimitError, duration
from tests.server.harness import Served, Setup, in_process

FILE = """
[[keys]]
name = "busy"
key = "busy"
max_concurrency = 2

[[keys]]
name = "often"
key = "often"
requests_per_minute = 3

[[keys]]
name = "much"
key = "much"
tokens_per_minute = 40

[[keys]]
key = "free"
"""


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Served]:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    async with in_process(Setup(config=ServerConfig(port=0, api_key_file=path))) as served:
        yield served
        served.http.headers["x-api-key"] = "free"
        await served.check_idle()


async def post(served: Served, key: str, **fields: Any) -> httpx.Response:
    body = {"prompt": "the river", "max_tokens": 2, **fields}
    return await served.http.post("/v1/completions", json=body, headers={"x-api-key": key})


def refused_for(quota: Quota, num_tokens: int) -> float:
    with pytest.raises(RateLimitError) as caught:
        quota.take_prompt(num_tokens)
    return caught.value.retry_after_s


def test_refused_tokens_fit_exactly_when_said() -> None:
    clock = Clock()
    quota = Quota(KeyLimits(tokens_per_minute=600), clock)
    quota.take_prompt(500)
    quota.use_tokens(300)
    wait_s = refused_for(quota, 100)
    assert wait_s == pytest.approx(30.0)
    clock.now += wait_s - 0.1
    assert refused_for(quota, 100) == pytest.approx(0.1)
    clock.now += 0.11
    quota.take_prompt(100)


def test_prompt_above_the_limit_is_no_matter_of_waiting() -> None:
    quota = Quota(KeyLimits(tokens_per_minute=600), Clock())
    with pytest.raises(InvalidRequestError, match="tokens_per_minute of this API key is 600"):
        quota.take_prompt(601)


def test_requests_come_back_one_by_one() -> None:
    clock = Clock()
    quota = Quota(KeyLimits(requests_per_minute=60), clock)
    for _ in range(60):
        quota.leave(quota.enter())
    with pytest.raises(RateLimitError) as caught:
        quota.enter()
    assert caught.value.retry_after_s == pytest.approx(1.0)
    clock.now += 1.0
    quota.enter()
    assert quota.num_active == 1


def test_changed_limit_starts_anew_and_others_stay() -> None:
    quota = Quota(KeyLimits(requests_per_minute=2, tokens_per_minute=100), Clock())
    quota.enter()
    quota.take_prompt(90)
    quota.limits = KeyLimits(requests_per_minute=5, tokens_per_minute=100)
    headers = dict(quota.headers())
    assert headers[b"x-ratelimit-remaining-requests"] == b"5"
    assert headers[b"x-ratelimit-remaining-tokens"] == b"10"
    quota.limits = KeyLimits()
    assert quota.headers() == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.0201, "21ms"), (1.5, "1.5s"), (360, "6m0s"), (61, "1m1s")]
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


async def test_concurrency_beyond_the_limit_is_429_and_counts_running_streams(
    keyed: Served,
) -> None:
    keyed.engine.step_gate.clear()
    running = [asyncio.create_task(post(keyed, "busy", stream=True)) for _ in range(2)]
    async with asyncio.timeout(3):
        while len(keyed.engine.accepted) < 2:
            await asyncio.sleep(0.002)
    response = await post(keyed, "busy")
    assert response.status_code == 429
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "max_concurrency of this API key is 2" in error["message"]
    assert int(response.headers["retry-after"]) >= 1
    other = asyncio.create_task(post(keyed, "free"))
    keyed.engine.step_gate.set()
    assert [(await task).status_code for task in running] == [200, 200]
    assert (await other).status_code == 200
    assert (await post(keyed, "busy")).status_code == 200
    assert keyed.state.metrics.requests_rejected.values["key_concurrency"] == 1


async def test_request_rate_is_limited_per_key_and_told_in_headers(keyed: Served) -> None:
    for left in (2, 1, 0):
        response = await post(keyed, "often")
        assert response.status_code == 200
        assert response.headers["x-ratelimit-limit-requests"] == "3"
        assert response.headers["x-ratelimit-remaining-requests"] == str(left)
    assert "x-ratelimit-limit-tokens" not in response.headers
    response = await post(keyed, "often")
    assert response.status_code == 429
    assert "requests_per_minute of this API key is 3" in response.json()["error"]["message"]
    assert 15 <= int(response.headers["retry-after"]) <= 20
    assert 15_000 < int(response.headers["retry-after-ms"]) <= 20_000
    assert response.headers["x-ratelimit-remaining-requests"] == "0"
    models = await keyed.http.get("/v1/models", headers={"x-api-key": "often"})
    assert models.status_code == 200
    assert (await post(keyed, "free")).status_code == 200


async def test_output_tokens_count_too_and_refused_requests_do_not(keyed: Served) -> None:
    num_prompt = len(keyed.tokenizer.encode("the river"))
    response = await post(keyed, "much", max_tokens=6)
    assert response.headers["x-ratelimit-remaining-tokens"] == str(40 - num_prompt)
    keyed.engine.max_running = keyed.engine.max_waiting = 0
    assert (await post(keyed, "much")).json()["error"]["code"] == "server_overloaded"
    keyed.engine.max_running = keyed.engine.max_waiting = 100
    response = await post(keyed, "much", prompt=[5] * (40 - num_prompt - 6), max_tokens=1)
    assert response.status_code == 200
    assert response.headers["x-ratelimit-remaining-tokens"] == "0"
    response = await post(keyed, "much")
    assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    response = await post(keyed, "much", prompt=[5] * 41)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "tokens_per_minute_exceeded"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ("/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/responses", {"input": "x"}),
    ],
)
async def test_limits_hold_in_every_api_family(
    keyed: Served, path: str, body: dict[str, Any]
) -> None:
    statuses = []
    for _ in range(4):
        response = await keyed.http.post(path, json=body, headers={"x-api-key": "often"})
        statuses.append(response.status_code)
    assert statuses == [200, 200, 200, 429]
    assert "requests_per_minute" in response.text
