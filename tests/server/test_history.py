"""Live numbers and history: what dashboards build upon may not lie, block or vanish."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from caudal.config import ServerConfig
from caudal.metrics.history_columns import COLUMNS
from tests.server.harness import MODEL, Served, Setup, in_process


def settings(data_dir: Path, **fields: Any) -> Setup:
    return Setup(config=ServerConfig(port=0, data_dir=data_dir, **fields))


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with in_process(settings(tmp_path)) as served:
        yield served
        await served.state.close_recorder()


async def rows_of(served: Served, query: str = "window=1h") -> list[dict[str, Any]]:
    response = await served.http.get(f"/caudal/history?{query}")
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["columns"] == list(COLUMNS)
    return [dict(zip(answer["columns"], row, strict=True)) for row in answer["rows"]]


async def test_snapshot_counts_what_has_just_happened(served: Served) -> None:
    first = (await served.http.get("/caudal/live")).json()
    assert first["status"] == "ready"
    assert first["model"]["name"] == MODEL
    assert first["minute"]["ttft_ms"] == {"count": 0, "p50": None, "p95": None, "p99": None}
    for _ in range(3):
        await served.complete(max_tokens=4)
    live = (await served.http.get("/caudal/live")).json()
    minute = live["minute"]
    assert (minute["requests"], minute["finished"]) == (3, {"length": 3})
    assert minute["ttft_ms"]["count"] == minute["e2e_ms"]["count"] == 3
    assert minute["itl_ms"]["count"] == 9
    assert 0 < minute["ttft_ms"]["p50"] <= minute["ttft_ms"]["p99"] <= minute["e2e_ms"]["p99"] * 1.1
    assert live["rates"]["output_tokens"] > 0
    assert live["requests"] == []
    assert live["blocks"]["total"] == 64
    assert sum(live["blocks"][part] for part in ("used", "cached", "free")) == 64


async def test_snapshot_shows_open_requests_until_they_end(served: Served) -> None:
    served.engine.step_gate.clear()
    task = asyncio.create_task(served.complete(max_tokens=5, n=2))
    async with asyncio.timeout(5):
        while not served.state.generations:
            await asyncio.sleep(0.001)
    live = (await served.http.get("/caudal/live")).json()
    assert [request["state"] for request in live["requests"]] == ["waiting", "waiting"]
    assert live["num_requests"] == 2
    request = live["requests"][0]
    assert (request["output_tokens"], request["max_tokens"], request["ttft_ms"]) == (0, 5, None)
    served.engine.step_gate.set()
    answer = await task
    assert answer["id"].startswith(request["id"][:8])
    assert (await served.http.get("/caudal/live")).json()["requests"] == []


async def test_log_has_one_row_for_each_accepted_choice(served: Served) -> None:
    await served.complete(max_tokens=4, n=2)
    await served.http.post("/v1/completions", json={"prompt": "x", "n": 1000})
    answer = (await served.http.get("/caudal/requests?limit=10")).json()
    rows = [dict(zip(answer["columns"], row, strict=True)) for row in answer["rows"]]
    assert [row["reason"] for row in rows] == ["length", "length"]
    assert [row["output_tokens"] for row in rows] == [4, 4]
    assert 0 < rows[0]["ttft_ms"] <= rows[0]["e2e_ms"]


async def test_client_that_leaves_is_cancelled_in_the_log(tmp_path: Path) -> None:
    async with in_process(settings(tmp_path)) as served:
        served.engine.step_gate.clear()
        task = asyncio.create_task(served.complete(max_tokens=5))
        async with asyncio.timeout(5):
            while not served.state.generations:
                await asyncio.sleep(0.001)
        next(iter(served.state.generations)).client_left()
        await asyncio.gather(task, return_exceptions=True)
        (record,) = served.state.request_log.latest(5)
        assert (record.reason, record.num_output_tokens) == ("cancelled", 0)


async def test_history_has_the_minute_that_is_not_over(served: Served) -> None:
    await served.http.get("/caudal/live")
    recorder = served.state.recorder
    recorder.tick()
    await served.complete(max_tokens=4)
    (row,) = await rows_of(served)
    assert (row["requests"], row["finished"], row["output_tokens"]) == (1, 1, 4)
    assert row["ttft_ms_p50"] > 0
    assert row["running_max"] == 0
    assert row["t"] % 60 == 0


async def test_history_survives_a_restart(tmp_path: Path) -> None:
    for _ in range(2):
        async with in_process(settings(tmp_path)) as served:
            served.state.recorder.tick()
            assert served.state.recorder.keeper is not None
            await served.complete(max_tokens=4)
            served.state.recorder.tick()
            await served.state.close_recorder()
    async with in_process(settings(tmp_path)) as served:
        rows = await rows_of(served)
        assert sum(row["requests"] for row in rows) == 2
        assert sum(row["output_tokens"] for row in rows) == 8
        await served.state.close_recorder()


async def test_broken_file_is_moved_aside_and_recording_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "history.sqlite3").write_bytes(b"this is no database" * 1000)
    async with in_process(settings(tmp_path)) as served:
        served.state.recorder.tick()
        await served.complete(max_tokens=4)
        assert [row["requests"] for row in await rows_of(served)] == [1]
        await served.state.close_recorder()
    assert "moved aside" in caplog.text
    assert len(list(tmp_path.glob("history.broken-*"))) == 1
    with sqlite3.connect(tmp_path / "history.sqlite3") as connection:
        assert connection.execute("SELECT count(*) FROM minutes").fetchone() == (1,)
    connection.close()


async def test_second_server_on_the_directory_records_in_memory(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await rows_of(served)
    async with in_process(settings(tmp_path)) as second:
        response = await second.http.get("/caudal/history")
        assert response.json()["is_kept"] is False
        assert "another server records" in caplog.text
        await second.state.close_recorder()
    assert (await served.http.get("/caudal/history")).json()["is_kept"] is True


@pytest.mark.parametrize("query", ["window=2h", "window=1h&step=1", "step=x", "window=1h&step=1e9"])
async def test_bad_query_is_a_400(served: Served, query: str) -> None:
    response = await served.http.get(f"/caudal/history?{query}")
    assert response.status_code == 400
    assert "window" in response.text or "step" in response.text


@pytest.mark.parametrize("query", ["limit=0", "limit=5000", "limit=-1"])
async def test_bad_limit_is_a_400(served: Served, query: str) -> None:
    response = await served.http.get(f"/caudal/requests?{query}")
    assert response.status_code == 400
    assert "limit" in response.text


async def test_no_history_is_a_404_and_writes_nothing(tmp_path: Path) -> None:
    async with in_process(settings(tmp_path, enable_history=False)) as served:
        served.state.recorder.tick()
        response = await served.http.get("/caudal/history")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "history_off"
        assert (await served.http.get("/caudal/live")).status_code == 200
        await served.state.close_recorder()
    assert list(tmp_path.iterdir()) == []


async def test_every_path_needs_the_key(tmp_path: Path) -> None:
    setup = settings(tmp_path)
    setup.config = dataclasses.replace(setup.config, api_keys=("secret",))
    async with in_process(setup) as served:
        for path in ("/caudal/live", "/caudal/requests", "/caudal/history"):
            assert (await served.http.get(path)).status_code == 401
