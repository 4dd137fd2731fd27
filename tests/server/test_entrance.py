"""Connections before they are requests: probes in a burst, silence, and heads without end."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from caudal.config import ServerConfig
from caudal.server import http_protocol
from caudal.server.acceptor import Acceptor, Pace
from caudal.server.app import MAX_HEADERS
from caudal.server.probes import ProbeAnswer, Probes
from tests.server.harness import Connection, Served, Setup, make_state, on_loopback, open_raw

PROBE = b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n"


async def read_answer(connection: Connection) -> tuple[int, bytes]:
    head = await connection.read_until(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return int(head.split(b" ")[1]), await connection.reader.readexactly(length)


async def test_connection_goes_on_after_a_probe(server: Served) -> None:
    connection = await open_raw(server.port, PROBE)
    assert await read_answer(connection) == (200, b'{"status":"ready"}')
    body = b'{"prompt":"x","max_tokens":1}'
    connection.writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body) + body
    )
    assert (await read_answer(connection))[0] == 200
    connection.writer.write(PROBE)
    assert (await read_answer(connection))[0] == 200
    await connection.close()


async def test_requests_behind_a_probe_are_not_lost(server: Served) -> None:
    connection = await open_raw(server.port, PROBE + b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await read_answer(connection))[0] == 200
    assert b"version" in (await read_answer(connection))[1]
    await connection.close()


async def test_probe_in_pieces_is_answered(server: Served) -> None:
    connection = await open_raw(server.port, b"GET /li")
    await asyncio.sleep(0.02)
    connection.writer.write(b"ve HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert (await connection.read_all()).startswith(b"HTTP/1.1 200")
    await connection.close()


def test_only_plain_whole_probes_are_answered_at_once() -> None:
    state, engine = make_state(Setup(is_ready=False))
    probes = Probes(state)

    def status(data: bytes) -> int | None:
        answer = probes.answer(data)
        return None if answer is None else int(answer.data.split(b" ")[1])

    assert status(PROBE) == 503
    assert status(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n") == 200
    engine.become_ready()
    assert status(PROBE) == 200
    state.is_draining = True
    assert status(PROBE) == 503
    assert status(PROBE.replace(b"/ready", b"/health")) == 200
    for data in (
        b"",
        PROBE[:-1],
        b"GET /ready HTTP/1.0\r\n\r\n",
        b"POST /ready HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /ready?x HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /readyz HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /ready HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc",
        b"GET /ready HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /ready HTTP/1.1\r\nOrigin: https://a.example\r\n\r\n",
        b"\x16\x03\x01",
    ):
        assert probes.answer(data) is None, data
    state.pool.shutdown()


async def test_probe_overtakes_a_burst_of_other_connections(server: Served) -> None:
    """Whatever has been accepted before it: a pass opens a few connections, and no more."""
    request = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    crowd = [asyncio.create_task(open_raw(server.port, request)) for _ in range(300)]
    probe = await open_raw(server.port, PROBE.replace(b"host: x", b"connection: close"))
    assert (await probe.read_all()).startswith(b"HTTP/1.1 200")
    await probe.close()
    for connection in await asyncio.gather(*crowd):
        assert (await connection.read_all()).startswith(b"HTTP/1.1 200")
        await connection.close()


def no_probe(data: bytes) -> ProbeAnswer | None:
    return None


async def test_silent_connections_are_closed_and_others_not() -> None:
    opened: list[asyncio.BaseTransport] = []

    class Recorder(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            opened.append(transport)

    listener = socket.create_server(("127.0.0.1", 0))
    acceptor = Acceptor(listener, Recorder, no_probe, backlog=64, pace=Pace(silence_s=0.1))
    acceptor.start()
    port = listener.getsockname()[1]
    silent = [await open_raw(port, b"") for _ in range(5)]
    speaking = await open_raw(port, b"x")
    started = time.monotonic()
    for connection in silent:
        assert await connection.read_all() == b""
        await connection.close()
    assert time.monotonic() - started < 2
    assert len(opened) == 1 and not opened[0].is_closing()
    await speaking.close()
    late = await open_raw(port, b"")
    await asyncio.sleep(0.02)
    acceptor.stop()
    assert await late.read_all() == b""
    await late.close()
    opened[0].close()
    listener.close()
    await asyncio.sleep(0.01)


async def test_head_without_end_is_431_not_memory(server: Served) -> None:
    for start in (b"GET /", b"GET / HTTP/1.1\r\nx: "):
        # One byte too many: what is not read any more would reset the connection.
        connection = await open_raw(server.port, start.ljust(65_537, b"a"))
        answer = await connection.read_all()
        assert answer.startswith(b"HTTP/1.1 431"), answer[:80]
        assert (
            "larger than 65536 bytes"
            in json.loads(answer.split(b"\r\n\r\n")[1])["error"]["message"]
        )
        await connection.close()


async def test_too_many_headers_are_431(server: Served) -> None:
    headers = [(f"x-{i}", "1") for i in range(MAX_HEADERS)]
    response = await server.http.get("/v1/models", headers=headers)
    assert response.status_code == 431
    assert f"At most {MAX_HEADERS} headers" in response.json()["error"]["message"]
    response = await server.http.get("/v1/models", headers=headers[:100])
    assert response.status_code == 200


async def test_head_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.1)
    async with on_loopback(Setup(config=ServerConfig(port=0))) as served:
        connection = await open_raw(served.port, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        answer = await connection.read_all()
        assert answer.startswith(b"HTTP/1.1 408")
        await connection.close()
        # The clock stops with the head, and starts again with the next one.
        connection = await open_raw(served.port, b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await read_answer(connection))[0] == 200
        await asyncio.sleep(0.15)
        connection.writer.write(b"GET /version HTTP/1.1\r\n")
        assert (await connection.read_all()).startswith(b"HTTP/1.1 408")
        await connection.close()
        await served.check_idle()


async def test_what_is_not_http_is_told_so_in_json(server: Served) -> None:
    connection = await open_raw(server.port, b"HELO mail\r\n\r\n")
    answer = await connection.read_all()
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "invalid_http"
    await connection.close()
