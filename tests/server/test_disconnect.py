"""A client that leaves frees its request, in whatever state it is (B49)."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.harness import Served

BODIES = {
    "stream": {"prompt": "x", "max_tokens": 200, "stream": True},
    "plain": {"prompt": "x", "max_tokens": 200},
    "choices": {"prompt": ["x", "y"], "n": 3, "max_tokens": 200, "stream": True},
}


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(2):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("kind", BODIES)
async def test_queued_request_of_a_lost_client_never_starts(server: Served, kind: str) -> None:
    server.engine.max_running = 0
    connection = await server.raw("/v1/completions", BODIES[kind])
    await until(lambda: server.engine.stats.num_waiting)
    await connection.close()
    await until(lambda: not server.engine.stats.num_waiting)
    assert server.engine.started_ids == []
    await until(lambda: server.state.metrics.requests_cancelled == 1)
    server.engine.max_running = 8


@pytest.mark.parametrize("kind", BODIES)
async def test_request_in_admission_of_a_lost_client_is_freed(server: Served, kind: str) -> None:
    server.engine.admission_gate.clear()
    connection = await server.raw("/v1/completions", BODIES[kind])
    await until(lambda: server.engine.stats.num_waiting)
    await connection.close()
    await until(lambda: not server.engine.stats.num_waiting)
    server.engine.admission_gate.set()
    await until(lambda: server.state.num_active == 0)
    await until(lambda: server.state.metrics.requests_cancelled == 1)


@pytest.mark.parametrize("kind", BODIES)
async def test_running_request_of_a_lost_client_is_freed(server: Served, kind: str) -> None:
    server.engine.script = lambda request: [5] * 200
    server.engine.step_s = 0.005
    connection = await server.raw("/v1/completions", BODIES[kind])
    await until(lambda: server.engine.stats.num_running and server.engine.num_steps > 5)
    await connection.close()
    await until(lambda: not server.engine.stats.num_running)
    await until(lambda: server.state.num_active == 0)
    await until(lambda: server.state.metrics.requests_cancelled == 1)
    assert server.state.metrics.requests_finished.values["abort"] >= 1
    server.engine.script = lambda request: [5]


async def test_two_hundred_lost_clients_leave_nothing_behind(server: Served) -> None:
    server.engine.script = lambda request: [5] * 200
    server.engine.step_s = 0.001
    server.engine.max_running = 8
    for _ in range(10):
        kinds = [*BODIES.values()] * 7
        connections = await asyncio.gather(
            *(server.raw("/v1/completions", body) for body in kinds[:20])
        )
        await asyncio.sleep(0.01)
        for connection in connections:
            await connection.close()
    await until(lambda: server.state.num_active == 0)
    await until(lambda: not server.engine.stats.num_running)
    await until(lambda: server.state.metrics.requests_cancelled == 200)
    server.engine.script = lambda request: [5]


async def test_finished_answer_is_not_counted_as_cancelled(server: Served) -> None:
    for body in BODIES.values():
        connection = await server.raw("/v1/completions", body)
        await connection.read_all()
        await connection.close()
    await until(lambda: server.state.num_active == 0)
    assert server.state.metrics.requests_cancelled == 0
    assert server.engine.aborted == []


async def test_connection_serves_several_requests_in_a_row(server: Served) -> None:
    """Watching for a disconnect must not swallow the next request of a kept-alive connection."""
    for _ in range(5):
        await server.complete(max_tokens=2)
        await server.events("/v1/completions", {"prompt": "x", "max_tokens": 2})
    assert server.state.metrics.requests_cancelled == 0
