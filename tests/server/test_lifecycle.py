"""Start, signals, drain, restart and exit codes, in real processes."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from caudal.config import ServerConfig
from caudal.errors import ConfigError
from caudal.server.run import bind
from tests.server.harness import Connection, open_request

LONG = {"prompt": [5], "max_tokens": 40, "stream": True}


@contextlib.asynccontextmanager
async def process(plan: str) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.server.fake_server",
        plan,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def ready_port(server: asyncio.subprocess.Process) -> int:
    """The port of the line that says «Ready»."""
    assert server.stdout is not None
    async with asyncio.timeout(30):
        line = (await server.stdout.readline()).decode()
    match = re.search(r"http://127\.0\.0\.1:(\d+) ", line)
    assert match, line
    assert line.startswith("Ready: tiny at ")
    assert "curl http://127.0.0.1" in line
    return int(match.group(1))


async def exit_code(server: asyncio.subprocess.Process, within_s: float) -> int:
    async with asyncio.timeout(within_s):
        return await server.wait()


async def open_stream(port: int) -> Connection:
    connection = await open_request(port, "/v1/completions", LONG)
    await connection.read_until(b"data: ")
    return connection


async def test_sigterm_finishes_running_requests_and_exits_zero() -> None:
    async with process("good") as server:
        port = await ready_port(server)
        connection = await open_stream(port)
        server.send_signal(signal.SIGTERM)
        answer = await connection.read_all()
        assert b"[DONE]" in answer
        await connection.close()
        assert await exit_code(server, 5) == 0


async def test_drain_limit_ends_what_takes_too_long_with_an_error() -> None:
    async with process("good") as server:
        port = await ready_port(server)
        body = {**LONG, "max_tokens": 200}
        connection = await open_request(port, "/v1/completions", body)
        await connection.read_until(b"data: ")
        server.send_signal(signal.SIGTERM)
        answer = await connection.read_all()
        assert b'"aborted"' in answer
        assert b"[DONE]" not in answer
        await connection.close()
        assert await exit_code(server, 5) == 0


async def test_second_signal_ends_at_once() -> None:
    async with process("good") as server:
        port = await ready_port(server)
        connection = await open_request(port, "/v1/completions", {**LONG, "max_tokens": 200})
        await connection.read_until(b"data: ")
        started = time.monotonic()
        server.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        server.send_signal(signal.SIGINT)
        await exit_code(server, 5)
        assert time.monotonic() - started < 0.9
        await connection.close()


async def test_idle_kept_alive_connections_do_not_delay_the_exit() -> None:
    async with process("good") as server:
        port = await ready_port(server)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/live")).status_code == 200
            started = time.monotonic()
            server.send_signal(signal.SIGTERM)
            assert await exit_code(server, 5) == 0
            assert time.monotonic() - started < 1.5


async def test_signal_before_the_engine_is_ready_exits_zero() -> None:
    async with process("unready") as server:
        assert server.stdout is not None
        assert await server.stdout.readline() == b"loading\n"
        server.send_signal(signal.SIGTERM)
        assert await exit_code(server, 5) == 0


async def test_dead_engine_is_restarted_and_serves_again() -> None:
    """B119: the stream gets an error, probes turn 503 and back to 200."""
    async with process("once") as server:
        port = await ready_port(server)
        connection = await open_stream(port)
        answer = await connection.read_all()
        assert b'"engine_dead"' in answer
        assert b"[DONE]" not in answer
        await connection.close()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/live")).status_code == 200
            async with asyncio.timeout(5):
                while (await client.get("/ready")).status_code != 200:
                    await asyncio.sleep(0.05)
            response = await client.post("/v1/completions", json={"prompt": [5]})
            assert response.status_code == 200
            assert "caudal_engine_restarts_total 1.0" in (await client.get("/metrics")).text
        server.send_signal(signal.SIGTERM)
        assert await exit_code(server, 5) == 0


async def test_engine_that_keeps_dying_ends_the_server_with_one() -> None:
    async with process("dies") as server:
        await ready_port(server)
        assert await exit_code(server, 15) == 1


@pytest.mark.parametrize(
    ("plan", "reason"), [("broken", "the weights do not fit"), ("nomodel", "is missing")]
)
async def test_failed_start_exits_one_and_says_why(plan: str, reason: str) -> None:
    async with process(plan) as server:
        assert await exit_code(server, 15) == 1
        assert server.stderr is not None
        assert reason in (await server.stderr.read()).decode()


def test_taken_port_is_a_clear_configuration_error() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--host/--port: cannot listen on .*:{port}"):
            bind(ServerConfig(port=port))
    with pytest.raises(ConfigError, match="cannot listen"):
        bind(ServerConfig(host="no.such.host.invalid", port=0))
