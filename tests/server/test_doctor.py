"""What the server tells about its load: never a text to others, never without bound."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from caudal.cli.units import api_key
from caudal.config import ServerConfig
from caudal.metrics.reading import Aggregate
from tests.server.harness import Served, Setup, in_process

STABLE = "the river runs through the old town and under seven bridges to the sea " * 4


def stamped(time: str) -> str:
    return f"It is {time} o'clock now. {STABLE}"


async def ask(http: httpx.AsyncClient, prompt: str, key: str = "", **fields: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"prompt": prompt, "max_tokens": 3, **fields}
    return await http.post("/v1/completions", json=body, headers=headers)


async def test_the_trace_has_times_lengths_and_common_beginnings_only(app: Served) -> None:
    for name in ("Ann", "Bob"):
        await ask(app.http, f"{STABLE}{name}")
    response = await app.http.get("/caudal/trace")
    assert response.headers["content-type"] == "application/jsonl"
    first, second = map(json.loads, response.text.splitlines())
    assert first["timestamp"] == 0 and second["timestamp"] >= 0
    assert first["input_length"] == len(app.tokenizer.encode(f"{STABLE}Ann"))
    assert first["output_length"] == 3 and first["max_tokens"] == 3
    shared = [a == b for a, b in zip(first["hash_ids"], second["hash_ids"], strict=True)]
    assert len(shared) >= 4 and all(shared[:-1])
    assert first["hash_ids"] == list(range(len(first["hash_ids"])))
    assert "Ann" not in response.text and "cmpl" not in response.text


async def test_a_refused_request_is_load_and_a_vanished_one_is_not(app: Served) -> None:
    app.engine.max_running = 0
    app.engine.max_waiting = 0
    assert (await ask(app.http, "hello there")).status_code == 429
    app.engine.max_running = app.engine.max_waiting = 1_000_000
    (row,) = map(json.loads, (await app.http.get("/caudal/trace")).text.splitlines())
    assert row["is_refused"] and row["ttft_ms"] is None


async def test_a_time_in_front_of_what_is_shared_is_shown_with_its_price(app: Served) -> None:
    for minute in range(10, 20):
        await ask(app.http, stamped(f"09:{minute}"))
    report = (await app.http.get("/caudal/prefixes?limit=3")).json()
    assert report["is_enabled"] and report["num_requests"] == 10
    assert len(report["requests"]) == 3
    pattern = max(report["patterns"], key=lambda each: each["num_requests"])
    assert pattern["reason"] == "changed" and pattern["share_lost"] > 0.5
    assert pattern["lost_ms"] > 0
    assert "move it behind" in pattern["advice"]
    latest = report["requests"][0]
    assert latest["reason"] == "changed" and latest["text"] and latest["neighbour_text"]
    assert latest["block"] == latest["token"] // 16


async def test_keys_see_the_lint_of_their_own_requests_only() -> None:
    config = ServerConfig(port=0, api_keys=(api_key("", "alpha"), api_key("", "beta")))
    async with in_process(Setup(config=config)) as app:
        await ask(app.http, f"secret of alpha {STABLE}", key="alpha")
        await ask(app.http, f"secret of alpha {STABLE}", key="alpha")
        response = await app.http.get("/caudal/prefixes", headers={"Authorization": "Bearer beta"})
        assert response.json()["num_requests"] == 0 and "secret" not in response.text
        own = await app.http.get("/caudal/prefixes", headers={"Authorization": "Bearer alpha"})
        assert own.json()["num_requests"] == 2
        for path in ("/caudal/prefixes", "/caudal/trace", "/caudal/doctor"):
            assert (await app.http.get(path)).status_code == 401


async def test_the_lint_can_be_switched_off() -> None:
    config = ServerConfig(port=0, prefix_lint=False)
    async with in_process(Setup(config=config)) as app:
        await ask(app.http, STABLE)
        report = (await app.http.get("/caudal/prefixes")).json()
        assert not report["is_enabled"] and report["requests"] == []
        row = json.loads((await app.http.get("/caudal/trace")).text)
        assert row["hash_ids"] == [] and row["input_length"] > 0
        assert app.state.load_log.num_tokens == 0


@pytest.mark.parametrize("limit", ["0", "257", "-1", "x", "1e3", ""])
async def test_bad_limits_are_named(app: Served, limit: str) -> None:
    response = await app.http.get(f"/caudal/prefixes?limit={limit}")
    assert response.status_code == 400 and response.json()["error"]["param"] == "limit"


async def test_choices_of_one_request_are_linted_once(app: Served) -> None:
    await ask(app.http, STABLE, n=3, temperature=1.0)
    await ask(app.http, STABLE, echo=True, logprobs=1)
    assert (await app.http.get("/caudal/prefixes")).json()["num_requests"] == 1
    assert len((await app.http.get("/caudal/trace")).text.splitlines()) == 4


async def test_a_diagnosis_is_shared_by_those_who_ask_together(app: Served) -> None:
    for _ in range(3):
        await ask(app.http, STABLE)
    answers = await asyncio.gather(*(app.http.get("/caudal/doctor") for _ in range(3)))
    bodies = [answer.json() for answer in answers]
    assert bodies[0] == bodies[1] == bodies[2]
    assert bodies[0]["num_requests"] == 3
    assert {"findings", "window_s", "serve_flags", "model_error_percent"} <= set(bodies[0])


async def test_the_history_is_diagnosed_with_the_minute_that_is_not_over(tmp_path: Path) -> None:
    config = ServerConfig(port=0, data_dir=tmp_path)
    async with in_process(Setup(config=config)) as app:
        app.state.recorder.tick()
        assert app.state.recorder.keeper is not None
        minutes = [Aggregate(60.0, {"requests_received": 5.0}) for _ in range(20)]
        start = int(time.time()) // 60 * 60
        for index, minute in enumerate(minutes):
            app.state.recorder.keeper.put(start - 60 * index, minute)
        await ask(app.http, STABLE)
        for last in ("2h", "8d"):
            response = await app.http.get(f"/caudal/doctor?last={last}")
            past = response.json()["past"]
            assert past["num_busy_minutes"] >= 2 and past["observed_s"] >= 1200
            assert response.json()["num_requests"] == 101
        await app.state.close_recorder()


async def test_without_a_history_there_is_nothing_to_ask_it() -> None:
    config = ServerConfig(port=0, enable_history=False)
    async with in_process(Setup(config=config)) as app:
        response = await app.http.get("/caudal/doctor?last=24h")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "history_off"


@pytest.mark.parametrize("query", ["last=1w", "last=", "last=9m", "last=24h&seconds=60"])
async def test_bad_stretches_of_the_history_are_named(app: Served, query: str) -> None:
    response = await app.http.get(f"/caudal/doctor?{query}")
    assert response.status_code == 400 and response.json()["error"]["param"] == "last"


async def test_no_diagnosis_before_the_engine_is_up() -> None:
    async with in_process(Setup(is_ready=False)) as app:
        response = await app.http.get("/caudal/doctor")
        assert response.status_code == 503
        assert (await app.http.get("/caudal/trace")).text == ""


@pytest.mark.parametrize("path", ["/caudal/trace", "/caudal/doctor"])
@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "1e9", "x"])
async def test_bad_windows_are_named(app: Served, path: str, seconds: str) -> None:
    response = await app.http.get(f"{path}?seconds={seconds}")
    assert response.status_code == 400 and response.json()["error"]["param"] == "seconds"


async def test_a_window_leaves_out_what_was_before(app: Served) -> None:
    await ask(app.http, "earlier")
    await asyncio.sleep(0.3)
    await ask(app.http, "later")
    assert len((await app.http.get("/caudal/trace?seconds=0.1")).text.splitlines()) == 1
    assert len((await app.http.get("/caudal/trace?seconds=100")).text.splitlines()) == 2
