"""Batches of a whole server process: killed, restarted, stopped, with a real engine."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.batch.harness import BatchClient, completion, line
from tests.server.test_real_engine import RealServer, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(autouse=True, scope="module", loop_scope="module")
async def lookup_threads() -> None:
    """Name lookups run in the loop's executor, whose threads outlive a single test here."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))


def client_of(server: RealServer) -> BatchClient:
    return BatchClient(server.http, server.openai)


def flags(data_dir: Path) -> tuple[str, ...]:
    return ("--data-dir", str(data_dir))


def ids(lines: list[dict[str, Any]]) -> list[str]:
    return sorted(str(item["custom_id"]) for item in lines)


async def test_killed_server_answers_every_request_exactly_once(
    tiny_model: Path, tmp_path: Path
) -> None:
    lines = [
        completion(f"r{i}", max_tokens=150, temperature=0, ignore_eos=True) for i in range(400)
    ]
    lines[7]["body"]["temperature"] = 9
    partial = tmp_path / "files"

    def num_on_disk() -> int:
        return sum(path.read_bytes().count(b'"response"') for path in partial.iterdir())

    async with serving(tiny_model, *flags(tmp_path)) as server:
        client = client_of(server)
        batch_id = await client.create(lines, endpoint="/v1/completions")
        await client.wait_for_count(batch_id, 80)
        async with asyncio.timeout(10):
            while num_on_disk() == 0:  # results are committed in intervals
                await asyncio.sleep(0.01)
        engine = server.engine_pid()
        server.process.send_signal(signal.SIGKILL)
        await server.process.wait()
    async with asyncio.timeout(10):
        while Path(f"/proc/{engine}").exists():
            await asyncio.sleep(0.05)
    num_before = num_on_disk()
    async with serving(tiny_model, *flags(tmp_path)) as server:
        client = client_of(server)
        batch = await client.wait(batch_id, timeout_s=60)
        assert batch["status"] == "completed"
        output, errors = await client.all_results(batch)
        assert ids(output + errors) == ids(lines)
        assert ids(errors) == ["r7"]
        assert 0 < num_before < len(lines)
        # Same answers whether before or after the crash, and as over HTTP.
        for item in output[::50]:
            direct = await client.post(
                "/v1/completions",
                json=next(x["body"] for x in lines if x["custom_id"] == item["custom_id"]),
            )
            answer = item["response"]["body"]
            assert answer["choices"][0]["text"] == direct.json()["choices"][0]["text"]
        await server.check_idle()


async def test_engine_that_dies_under_a_batch_costs_no_request(
    tiny_model: Path, tmp_path: Path
) -> None:
    lines = [completion(f"r{i}", max_tokens=24, ignore_eos=True) for i in range(100)]
    async with serving(tiny_model, *flags(tmp_path)) as server:
        client = client_of(server)
        batch_id = await client.create(lines, endpoint="/v1/completions")
        await client.wait_for_count(batch_id, 30)
        os.kill(server.engine_pid(), signal.SIGKILL)
        batch = await client.wait(batch_id, timeout_s=60)
        assert batch["request_counts"] == {"total": 100, "completed": 100, "failed": 0}
        output, _ = await client.all_results(batch)
        assert ids(output) == ids(lines)


async def test_sigterm_stops_at_once_though_a_batch_runs(tiny_model: Path, tmp_path: Path) -> None:
    lines = [completion(f"r{i}", max_tokens=40, ignore_eos=True) for i in range(400)]
    async with serving(tiny_model, *flags(tmp_path), "--drain-timeout", "60") as server:
        client = client_of(server)
        batch_id = await client.create(lines, endpoint="/v1/completions")
        await client.wait_for_count(batch_id, 1)
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await server.process.wait() == 0
    async with serving(tiny_model, *flags(tmp_path)) as server:
        client = client_of(server)
        batch = await client.batch(batch_id)
        assert batch["status"] == "in_progress"
        await client.post(f"/v1/batches/{batch_id}/cancel")
        batch = await client.wait(batch_id)
        assert batch["status"] == "cancelled"
        output, errors = await client.all_results(batch)
        assert len(output) >= 1
        assert errors == []
        await server.check_idle()


async def test_people_are_answered_while_a_batch_runs(tiny_model: Path, tmp_path: Path) -> None:
    lines = [line(f"r{i}") for i in range(150)]
    async with serving(tiny_model, *flags(tmp_path), "--max-num-seqs", "4") as server:
        client = client_of(server)
        batch_id = await client.create(lines)
        await client.wait_for_count(batch_id, 10)
        answers = await asyncio.gather(*(server.complete(max_tokens=8) for _ in range(12)))
        assert all(answer["usage"]["completion_tokens"] <= 8 for answer in answers)
        assert (await client.batch(batch_id))["request_counts"]["completed"] < 150
        batch = await client.wait(batch_id, timeout_s=60)
        assert batch["request_counts"]["completed"] == 150
        assert await server.metric("caudal_batch_generation_tokens_total") > 0
        await server.check_idle()
