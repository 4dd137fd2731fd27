"""What a request's key, tier and timeout make of it on its way to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from caudal.config import ServerConfig
from caudal.scheduler.output import FinishReason, RequestOutput
from caudal.scheduler.service_class import ServiceClass
from caudal.server.tenancy import TIER_STEP
from tests.server.harness import Served, Setup, in_process, parse_events

FILE = """
[[keys]]
name = "a"
key = "a"
weight = 3.0

[[keys]]
key = "b"
min_priority = -100
"""
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x", "max_tokens": 2}),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", {"input": "x", "max_output_tokens": 2}),
    ("/v1/messages", CHAT),
    ("/api/chat", {"model": "tiny", "messages": CHAT["messages"], "stream": False}),
    ("/api/generate", {"model": "tiny", "prompt": "x", "stream": False}),
    ("/v1/embeddings", {"input": "x"}),
]


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Served]:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    config = ServerConfig(port=0, api_key_file=path, api_keys=("plain",))
    async with in_process(Setup(config=config)) as served:
        yield served
        served.http.headers["x-api-key"] = "b"
        await served.check_idle()


async def send(
    served: Served, key: str, path: str, body: dict[str, Any], **headers: str
) -> httpx.Response:
    headers = {"x-api-key": key, **{name.replace("_", "-"): v for name, v in headers.items()}}
    return await served.http.post(path, json=body, headers=headers)


@pytest.mark.parametrize(("path", "body"), FAMILIES)
async def test_keys_share_no_cache_and_take_turns_in_every_family(
    keyed: Served, path: str, body: dict[str, Any]
) -> None:
    for key in ("a", "b", "plain"):
        response = await send(keyed, key, path, body)
        assert response.status_code == 200, response.text
    requests = keyed.engine.accepted
    assert len({request.namespace for request in requests}) == 3
    assert len({request.tenant for request in requests}) == 3
    assert [request.weight for request in requests] == [3.0, 1.0, 1.0]
    assert "name:a" in requests[0].namespace


async def test_salt_divides_the_cache_of_a_key_further(keyed: Served) -> None:
    for key, salt in (("a", "s"), ("a", "t"), ("a", None), ("b", "s")):
        body = {"prompt": "x", "max_tokens": 1, "cache_salt": salt}
        assert (await send(keyed, key, "/v1/completions", body)).status_code == 200
    assert len({request.namespace for request in keyed.engine.accepted}) == 4


async def test_no_salt_reaches_the_cache_of_another_key(keyed: Served) -> None:
    """Key and salt cannot be confused, whatever a salt contains."""
    await send(keyed, "a", "/v1/completions", {"prompt": "x", "cache_salt": "s"})
    theirs = keyed.engine.accepted[0].namespace
    for salt in (theirs, f"\0{theirs}", "name:a", "name:a\0s"):
        await send(keyed, "b", "/v1/completions", {"prompt": "x", "cache_salt": salt})
    assert theirs not in {request.namespace for request in keyed.engine.accepted[1:]}


async def test_cache_may_be_shared_on_request() -> None:
    config = ServerConfig(port=0, api_keys=("a", "b"), prefix_cache_per_key=False)
    async with in_process(Setup(config=config)) as served:
        for key in ("a", "b"):
            await send(served, key, "/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert {request.namespace for request in served.engine.accepted} == {""}
        assert len({request.tenant for request in served.engine.accepted}) == 2


async def test_tiers_order_requests_whatever_their_priority(app: Served) -> None:
    for tier, priority in (("priority", 2**31 - 1), (None, -(2**31)), ("auto", 2**31 - 1)):
        await app.complete(service_tier=tier, priority=priority, max_tokens=1)
    await app.complete(service_tier="flex", priority=-(2**31), max_tokens=1)
    priorities = [request.priority for request in app.engine.accepted]
    assert priorities == sorted(priorities)
    assert len(set(priorities)) == 4
    # All stay within the band of their class.
    assert max(map(abs, priorities)) < ServiceClass.INTERACTIVE.end_priority


@pytest.mark.parametrize(
    ("asked", "given"),
    [("auto", "default"), ("default", "default"), ("flex", "flex"), ("priority", "priority"),
     ("scale", "default")],
)  # fmt: skip
async def test_given_tier_is_told_in_answers_and_streams(
    app: Served, asked: str, given: str
) -> None:
    for path, body in FAMILIES[:3]:
        response = await app.http.post(path, json={**body, "service_tier": asked})
        assert response.json()["service_tier"] == given
        if path != "/v1/responses":
            *chunks, done = await app.events(path, {**body, "service_tier": asked})
            assert done == "[DONE]"
            assert {chunk["service_tier"] for chunk in chunks} == {given}
    assert "service_tier" not in await app.complete(max_tokens=1)


async def test_key_cannot_push_ahead_of_others(keyed: Served) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    refused = await send(keyed, "a", "/v1/completions", {**body, "priority": -1})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "priority"
    assert "at least 0 for this API key" in refused.json()["error"]["message"]
    answer = await send(keyed, "a", "/v1/completions", {**body, "service_tier": "priority"})
    assert answer.json()["service_tier"] == "default"
    for key, fields in (
        ("a", {"priority": 1}),
        ("b", {"priority": -100, "service_tier": "priority"}),
        ("plain", {"priority": -(2**31)}),
    ):
        assert (await send(keyed, key, "/v1/completions", {**body, **fields})).status_code == 200
    assert [r.priority for r in keyed.engine.accepted] == [0, 1, -100 - TIER_STEP, -(2**31)]


@pytest.mark.parametrize(("path", "body"), FAMILIES)
async def test_timeout_header_counts_in_every_family(
    app: Served, path: str, body: dict[str, Any]
) -> None:
    response = await app.http.post(path, json=body, headers={"x-request-timeout": "7.5"})
    assert response.status_code == 200
    timeout_s = app.engine.accepted[0].timeout_s
    assert timeout_s is not None and 6.5 < timeout_s <= 7.5
    for bad in ("0", "-1", "nan", "inf", "soon", "86401", ""):
        response = await app.http.post(path, json=body, headers={"x-request-timeout": bad})
        assert response.status_code == 400, bad
        assert "x-request-timeout" in response.text


async def test_smaller_of_two_timeouts_counts(app: Served) -> None:
    for body_s, header_s in ((3, "9"), (9, "3")):
        body = {"prompt": "x", "max_tokens": 1, "timeout": body_s}
        headers = {"x-request-timeout": header_s}
        await app.http.post("/v1/completions", json=body, headers=headers)
    for request in app.engine.accepted:
        assert request.timeout_s is not None and 2.5 < request.timeout_s <= 3
    for bad in (0, -1, 86_401, "5"):
        response = await app.http.post("/v1/completions", json={"prompt": "x", "timeout": bad})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "timeout")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_expired_request_is_a_504_or_an_error_in_its_stream(
    app: Served, is_stream: bool
) -> None:
    """What the engine says of a request past its deadline, before and after its first token."""
    app.engine.step_gate.clear()
    body = {"prompt": "x", "max_tokens": 50, "timeout": 5, "stream": is_stream}
    running = asyncio.create_task(app.http.post("/v1/completions", json=body))
    async with asyncio.timeout(3):
        while not app.engine.accepted:
            await asyncio.sleep(0.002)
    name = app.engine.accepted[0].request_id
    entry = app.engine._waiting.pop(name)
    entry.stream.put(RequestOutput(request_id=name, finish_reason=FinishReason.TIMEOUT))
    response = await running
    app.engine.step_gate.set()
    error = parse_events(response.text)[-1]["error"] if is_stream else response.json()["error"]
    assert response.status_code == (200 if is_stream else 504)
    assert (error["type"], error["param"]) == ("timeout_error", "timeout")
    assert error["code"] == "deadline_exceeded"
    assert "5 s" in error["message"] and "before its first token" in error["message"]
    assert app.state.metrics.requests_finished.values["timeout"] == 1


async def test_time_spent_before_the_queue_counts(app: Served) -> None:
    app.state.turns = SlowTurns(0.05)
    response = await app.http.post("/v1/completions", json={"prompt": "x", "timeout": 0.01})
    assert response.status_code == 504
    assert app.engine.accepted == []


class SlowTurns:
    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s

    async def take(self) -> None:
        await asyncio.sleep(self._wait_s)


async def test_cross_origin_requests_of_allowed_pages_only() -> None:
    config = ServerConfig(port=0, api_keys=("k",), allowed_origins=("https://good.example",))
    preflight = {"access-control-request-method": "POST",
                 "access-control-request-headers": "authorization, content-type"}  # fmt: skip
    async with in_process(Setup(config=config)) as served:
        good = {"origin": "https://good.example"}
        response = await served.http.options("/v1/completions", headers=good | preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == good["origin"]
        assert "authorization" in response.headers["access-control-allow-headers"]
        bad = {"origin": "https://bad.example"}
        response = await served.http.options("/v1/completions", headers=bad | preflight)
        assert response.status_code == 400
        body = {"prompt": "x", "max_tokens": 2, "stream": True}
        for origin, key, status in ((good, "k", 200), (good, "wrong", 401), (bad, "k", 200)):
            response = await served.http.post(
                "/v1/completions", json=body, headers={**origin, "x-api-key": key}
            )
            assert response.status_code == status
            allowed = response.headers.get("access-control-allow-origin")
            assert allowed == (good["origin"] if origin is good else None)
        assert "retry-after" in response.headers["access-control-expose-headers"].lower()
