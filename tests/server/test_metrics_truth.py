"""Metrics against the truth: the engine's and the server's own logs, and a client's clock."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from tests.server.harness import open_request
from tests.server.test_real_engine import RealServer, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

FLAGS = ("--metrics-compat", "vllm", "--max-num-seqs", "2", "--max-model-len", "2048")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tiny_model: Path, tmp_path_factory: Any) -> AsyncIterator[RealServer]:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    data = tmp_path_factory.mktemp("data")
    async with serving(tiny_model, *FLAGS, "--data-dir", str(data)) as server:
        yield server
        await server.check_idle()


async def scrape(server: RealServer) -> Counter[str]:
    """Samples by name and labels; a Counter, so that two scrapes subtract."""
    samples: Counter[str] = Counter()
    text = (await server.http.get("/metrics")).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(
                f"{name}={value}"
                for name, value in sample.labels.items()
                if name not in ("model_name", "engine")
            )
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] += sample.value
    return samples


async def settled(server: RealServer) -> Counter[str]:
    """A scrape with nothing in the engine, after its last numbers have come."""
    await server.check_idle()
    await asyncio.sleep(0.2)
    return await scrape(server)


async def log_rows(server: RealServer) -> list[dict[str, Any]]:
    answer = (await server.http.get("/caudal/requests?limit=4096")).json()
    return [dict(zip(answer["columns"], row, strict=True)) for row in answer["rows"]]


async def timed_stream(server: RealServer, prompt: str, max_tokens: int) -> float:
    """Seconds from sending a request to its first token, by the client's clock."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    started = time.monotonic()
    connection = await open_request(server.port, "/v1/completions", body)
    async with asyncio.timeout(60):
        await connection.reader.readuntil(b"data: {")
        first = time.monotonic() - started
        assert b"[DONE]" in await connection.reader.read()
    await connection.close()
    return first


async def leave(server: RealServer) -> None:
    """A client that goes away in the middle of its answer."""
    body = {"prompt": "gone", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    connection = await open_request(server.port, "/v1/completions", body)
    await connection.read_until(b"data: {")
    await connection.close()


async def test_counts_equal_those_of_the_request_log_and_of_the_engine(server: RealServer) -> None:
    before, rows_before = await settled(server), len(await log_rows(server))
    await asyncio.gather(
        *(timed_stream(server, f"the river {i}", 10 + i) for i in range(8)),
        *(
            server.complete(prompt=f"town {i}", max_tokens=5, n=2, ignore_eos=True)
            for i in range(3)
        ),
        leave(server),
    )
    after = await settled(server)
    rows = (await log_rows(server))[rows_before:]
    grown = Counter({name: after[name] - before[name] for name in after})
    reasons = Counter("abort" if row["reason"] == "cancelled" else row["reason"] for row in rows)
    for reason in ("stop", "length", "abort", "error", "timeout"):
        assert grown[f"caudal_requests_finished_total{{reason={reason}}}"] == reasons[reason]
        engine = f"caudal_engine_requests_finished_total{{reason={reason}}}"
        assert grown[engine] == reasons[reason], reason
    assert reasons["abort"] == grown["caudal_requests_cancelled_total"] == 1
    complete = [row for row in rows if row["reason"] != "cancelled"]
    for name, count in {
        "time_to_first_token_seconds": sum(row["ttft_ms"] is not None for row in rows),
        "time_per_output_token_seconds": sum(row["output_tokens"] > 1 for row in complete),
        "e2e_request_latency_seconds": len(complete),
        "request_queue_time_seconds": len(complete),
        "request_generation_tokens": len(complete),
    }.items():
        assert grown[f"caudal_{name}_count"] == count, name
    for name, column in {
        "time_to_first_token_seconds": "ttft_ms",
        "time_per_output_token_seconds": "tpot_ms",
        "e2e_request_latency_seconds": "e2e_ms",
        "request_queue_time_seconds": "queue_ms",
    }.items():
        relevant = rows if column == "ttft_ms" else complete
        total = sum(row[column] for row in relevant if row[column] is not None) / 1e3
        assert grown[f"caudal_{name}_sum"] == pytest.approx(total, rel=0.02, abs=1e-3), name
    outputs = sum(row["output_tokens"] for row in rows)
    assert grown["caudal_generation_tokens_total"] == outputs
    # The engine may have sampled some tokens more for the client that left.
    assert outputs <= grown["caudal_engine_generation_tokens_total"] <= outputs + 50
    prompts = sum(row["prompt_tokens"] for row in rows)
    assert grown["caudal_engine_prompt_tokens_total"] == prompts


async def test_first_token_is_within_five_percent_of_the_clients_clock(server: RealServer) -> None:
    """Two at a time, so that most wait: what a queue does to users must show in full."""
    before = await settled(server)
    seen = await asyncio.gather(*(timed_stream(server, f"q {i}", 900) for i in range(10)))
    grown = await settled(server)
    grown.subtract(before)
    name = "caudal_time_to_first_token_seconds"
    # The settling's own request has a first token, too: a short one.
    assert grown[f"{name}_count"] == len(seen) + 1
    assert grown[f"{name}_sum"] == pytest.approx(sum(seen), rel=0.05)


async def test_names_of_vllm_tell_the_same(server: RealServer) -> None:
    samples = await settled(server)
    for name, own in {
        "time_to_first_token_seconds_count": "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_sum": "inter_token_latency_seconds_sum",
        "request_time_per_output_token_seconds_sum": "time_per_output_token_seconds_sum",
        "e2e_request_latency_seconds_count": "e2e_request_latency_seconds_count",
        "generation_tokens_total": "generation_tokens_total",
        "prefix_cache_queries_total": "prefix_cache_queries_total",
        "num_requests_running": "num_requests_running",
        "request_success_total{finished_reason=length}": "requests_finished_total{reason=length}",
    }.items():
        assert f"vllm:{name}" in samples
        assert samples[f"vllm:{name}"] == samples[f"caudal_{own}"], name
    text = (await server.http.get("/metrics")).text
    assert 'vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0' in text


async def test_snapshot_knows_the_settings_and_where_requests_are(server: RealServer) -> None:
    streams = [asyncio.create_task(timed_stream(server, f"s {i}", 800)) for i in range(5)]
    async with asyncio.timeout(20):
        while True:
            live = (await server.http.get("/caudal/live")).json()
            states = Counter(request["state"] for request in live["requests"])
            if states["decode"] == 2 and states["waiting"] == 3:
                break
    decoding = next(r for r in live["requests"] if r["state"] == "decode")
    assert decoding["computed_tokens"] >= decoding["prompt_tokens"]
    settings = live["engine"]["settings"]
    assert (settings["ttft_ms"], settings["max_num_seqs"]) == (500.0, 2)
    assert live["engine"]["memory_plan"]["kv_cache"] > 0
    blocks = live["blocks"]
    assert blocks["used"] + blocks["cached"] + blocks["free"] == blocks["total"]
    await asyncio.gather(*streams)
    minute = (await server.http.get("/caudal/live")).json()["minute"]
    assert 0 < minute["cpu_outside_kernels"] < 1
    assert minute["step_ms"] == pytest.approx(sum(minute["step_parts_ms"].values()), rel=0.05)


async def test_history_outlives_kills_and_stops(tiny_model: Path, tmp_path: Path) -> None:
    """A killed server (`kill -9`) loses its last ten seconds, one that is told to stop nothing."""
    flags = ("--data-dir", str(tmp_path))
    async with serving(tiny_model, *flags) as server:
        await server.complete(max_tokens=3, ignore_eos=True)
        await asyncio.sleep(12)
        server.process.kill()
    async with serving(tiny_model, *flags) as server:
        await server.complete(max_tokens=4, ignore_eos=True)
        server.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(server.process.wait(), 20) == 0
    async with serving(tiny_model, *flags) as server:
        answer = (await server.http.get("/caudal/history?window=1h")).json()
        assert answer["is_kept"] is True
        rows = [dict(zip(answer["columns"], row, strict=True)) for row in answer["rows"]]
        assert sum(row["output_tokens"] for row in rows) == 7
        assert sum(row["finished"] for row in rows) == 2
