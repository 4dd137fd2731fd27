"""Overload, readiness and an engine that dies: quick, honest answers."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.server.harness import Served, Setup, in_process, on_loopback, parse_events

BODY = {"prompt": "x", "max_tokens": 200}


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(3):
        while not condition():
            await asyncio.sleep(0.002)


async def test_full_queue_is_429_with_retry_after_and_spares_the_accepted(server: Served) -> None:
    """B117."""
    engine = server.engine
    engine.script = lambda request: [5] * 50
    engine.step_s = 0.001
    engine.max_running, engine.max_waiting = 4, 4
    responses = await asyncio.gather(
        *(server.http.post("/v1/completions", json=BODY) for _ in range(50))
    )
    refused = [r for r in responses if r.status_code == 429]
    accepted = [r for r in responses if r.status_code == 200]
    assert len(refused) + len(accepted) == 50
    assert len(refused) > 20
    assert len(accepted) >= 8
    for response in refused:
        assert response.headers["retry-after"] == "3"
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "server_overloaded")
    for response in accepted:
        assert response.json()["usage"]["completion_tokens"] == 51
    assert server.state.metrics.requests_rejected.values["queue_requests"] == len(refused)


async def test_overload_of_a_stream_is_a_status_not_an_event(server: Served) -> None:
    server.engine.max_running = server.engine.max_waiting = 0
    for path, body in (
        ("/v1/completions", BODY),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 4}),
    ):
        response = await server.http.post(path, json={**body, "stream": True})
        assert response.status_code == 429
        assert response.headers["content-type"] == "application/json"
    assert server.engine.stats.num_waiting == 0
    server.engine.max_running = 8


async def test_not_ready_before_the_first_step_and_alive_all_the_time() -> None:
    """B121."""
    async with in_process(Setup(is_ready=False)) as served:
        statuses = [(await served.http.get(p)).status_code for p in ("/live", "/ready", "/health")]
        assert statuses == [200, 503, 503]
        for path in ("/v1/completions", "/v1/models"):
            response = await served.http.request(
                "POST" if "comp" in path else "GET", path, json=BODY if "comp" in path else None
            )
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["type"] == "service_unavailable"
        assert served.state.metrics.requests_rejected.values["unavailable"] == 1
        served.engine.become_ready()
        statuses = [(await served.http.get(p)).status_code for p in ("/live", "/ready", "/health")]
        assert statuses == [200, 200, 200]
        await served.check_idle()


async def test_loading_model_is_503_everywhere_but_live() -> None:
    async with in_process() as served:
        model, served.state.model = served.state.model, None
        for path in ("/v1/models", "/ready"):
            assert (await served.http.get(path)).status_code == 503
        for path, body in (("/v1/completions", BODY), ("/tokenize", {"prompt": "x"})):
            assert (await served.http.post(path, json=body)).status_code == 503
        assert (await served.http.get("/live")).status_code == 200
        served.state.model = model


@pytest.mark.parametrize("is_stream", [False, True])
async def test_dead_engine_ends_requests_with_an_error(is_stream: bool) -> None:
    """B119: in-flight requests get an answer at once, probes turn 503."""
    async with on_loopback() as served:
        served.engine.step_gate.clear()
        running = asyncio.create_task(
            served.http.post("/v1/completions", json={**BODY, "stream": is_stream})
        )
        await until(lambda: served.engine.accepted)
        served.engine.die()
        response = await running
        if is_stream:
            error = parse_events(response.text)[-1]["error"]
        else:
            assert response.status_code == 503
            error = response.json()["error"]
        assert error["code"] == "engine_dead"
        assert "-9" not in error["message"]
        for path, status in (("/live", 200), ("/ready", 503), ("/health", 503)):
            assert (await served.http.get(path)).status_code == status
        response = await served.http.post("/v1/completions", json=BODY)
        assert response.status_code == 503
        assert served.state.num_active == 0


async def test_draining_server_refuses_new_requests_and_finishes_old_ones(server: Served) -> None:
    server.engine.step_gate.clear()
    running = asyncio.create_task(server.http.post("/v1/completions", json=BODY))
    await until(lambda: server.engine.accepted)
    server.state.is_draining = True
    response = await server.http.post("/v1/completions", json=BODY)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
    assert (await server.http.get("/ready")).status_code == 503
    assert (await server.http.get("/health")).status_code == 200
    server.engine.step_gate.set()
    assert (await running).status_code == 200
    server.state.is_draining = False


async def test_requests_aborted_by_the_drain_limit_are_errors_not_short_answers(
    server: Served,
) -> None:
    server.engine.step_gate.clear()
    body = {**BODY, "stream": True}
    plain = asyncio.create_task(server.http.post("/v1/completions", json=BODY))
    stream = asyncio.create_task(server.http.post("/v1/completions", json=body))
    await until(lambda: len(server.engine.accepted) == 2)
    await server.engine.drain(0.01)
    assert (await plain).status_code == 503
    assert parse_events((await stream).text)[-1]["error"]["code"] == "aborted"
    server.engine.step_gate.set()


async def test_probe_is_quick_while_a_thousand_requests_arrive(server: Served) -> None:
    """No pass of the event loop holds more than a few requests' work."""
    server.engine.max_running = 64
    body = {"prompt": "the river runs through the old town " * 4, "max_tokens": 4}
    connections = await asyncio.gather(*(server.raw("/v1/completions", body) for _ in range(600)))
    slowest = 0.0
    async with asyncio.timeout(60):
        while server.engine.stats.num_waiting or server.state.num_active:
            started = time.monotonic()
            assert (await server.http.get("/live")).status_code == 200
            slowest = max(slowest, time.monotonic() - started)
    for connection in connections:
        assert (await connection.read_all()).startswith(b"HTTP/1.1 200")
        await connection.close()
    assert slowest < 2.0  # far above what is measured: the clients share this loop


async def test_turns_are_bounded_per_pass_and_in_order() -> None:
    from caudal.server.turns import Turns

    turns = Turns(per_pass=2)
    order: list[tuple[int, int]] = []
    num_passes = 0

    async def count_passes() -> None:
        nonlocal num_passes
        while len(order) < 10:
            num_passes += 1
            await asyncio.sleep(0)

    async def work(number: int) -> None:
        await turns.take()
        order.append((number, num_passes))

    tasks = [asyncio.create_task(work(i)) for i in range(9)]
    tasks[4].cancel()
    extra = asyncio.create_task(work(9))
    counting = asyncio.create_task(count_passes())
    await asyncio.gather(*tasks, extra, return_exceptions=True)
    order.append((-1, 0))
    await counting
    numbers = [number for number, _ in order[:-1]]
    assert numbers == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    per_pass = [at for _, at in order[:-1]]
    assert max(per_pass.count(at) for at in set(per_pass)) <= 2 + 1
