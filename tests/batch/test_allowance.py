"""Batches have limits of their own: neither they nor interactive requests use the other's."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from caudal.server.batch.limits import BatchLimits
from tests.batch.harness import COMPLETIONS, BatchServer, batch_server, completion, line

KEYS = """
[[keys]]
name = "few"
key = "few"
max_batch_requests = 50

[[keys]]
name = "short"
key = "short"
max_batch_tokens = 400

[[keys]]
name = "slow"
key = "slow"
max_concurrency = 1
requests_per_minute = 2
tokens_per_minute = 60
"""
QUICK = BatchLimits(commit_interval_s=0.01, retry_failed_job_s=0.05)


@contextlib.asynccontextmanager
async def keyed(root: Path, key: str, **setup: Any) -> AsyncIterator[BatchServer]:
    """A server with these keys, used with one of them."""
    path = root / "keys.toml"
    path.write_text(KEYS)
    path.chmod(0o600)
    async with batch_server(root / "data", QUICK, api_key_file=path, **setup) as server:
        server.headers = {"authorization": f"Bearer {key}"}
        yield server


def completions(num: int, **fields: Any) -> list[dict[str, Any]]:
    return [completion(f"r{i}", **fields) for i in range(num)]


async def failure(server: BatchServer, lines: list[Any], **fields: Any) -> dict[str, Any]:
    """The only error of a batch that fails."""
    batch = await server.run(lines, **fields)
    assert batch["status"] == "failed"
    (error,) = batch["errors"]["data"]
    assert isinstance(error, dict) and error["line"] is None
    return error


async def test_requests_beyond_what_a_key_may_enqueue_fail_their_batch(tmp_path: Path) -> None:
    async with keyed(tmp_path, "few", step_s=0.05) as server:
        first = await server.create([line(f"r{i}") for i in range(40)])
        await server.wait(first, "in_progress")
        error = await failure(server, [line(f"s{i}") for i in range(20)])
        assert error["code"] == "request_limit_exceeded"
        assert "max_batch_requests of this API key is 50" in error["message"]
        assert "once some of your batches have ended" in error["message"]
        await server.post(f"/v1/batches/{first}/cancel")
        await server.wait(first)
        second = await server.create([line(f"s{i}") for i in range(20)])
        await server.wait(second, "in_progress")
        await server.post(f"/v1/batches/{second}/cancel")
        await server.wait(second)


async def test_file_that_can_never_fit_is_told_to_be_split(tmp_path: Path) -> None:
    async with keyed(tmp_path, "few") as server:
        error = await failure(server, [line(f"r{i}") for i in range(51)])
        assert error["code"] == "request_limit_exceeded" and "Split" in error["message"]
        assert (await server.run([line(f"r{i}") for i in range(50)]))["status"] == "completed"


@pytest.mark.parametrize("prompt", ["a river runs on " * 40, [5] * 300, ["one two"] * 200])
async def test_prompt_tokens_beyond_what_a_key_may_enqueue_fail_their_batch(
    tmp_path: Path, prompt: Any
) -> None:
    async with keyed(tmp_path, "short") as server:
        error = await failure(server, completions(4, prompt=prompt), endpoint=COMPLETIONS)
        assert error["code"] == "token_limit_exceeded"
        assert "max_batch_tokens of this API key is 400" in error["message"]
        small = await server.run(completions(4), endpoint=COMPLETIONS)
        assert small["status"] == "completed"


async def test_what_is_enqueued_counts_after_a_restart(tmp_path: Path) -> None:
    lines = completions(4, prompt=[5] * 60, max_tokens=50)
    async with keyed(tmp_path, "short", step_s=0.2) as server:
        batch_id = await server.create(lines, endpoint=COMPLETIONS)
        await server.wait(batch_id, "in_progress")
    async with keyed(tmp_path, "short", step_s=0.2) as server:
        await server.wait(batch_id, "in_progress")
        error = await failure(server, lines, endpoint=COMPLETIONS)
        assert error["code"] == "token_limit_exceeded" and "240 tokens are enq" in error["message"]
        await server.post(f"/v1/batches/{batch_id}/cancel")
        await server.wait(batch_id)


async def test_batches_and_interactive_requests_leave_each_others_limits_alone(
    tmp_path: Path,
) -> None:
    async with keyed(tmp_path, "slow", step_s=0.02) as server:
        batch_id = await server.create(completions(30), endpoint=COMPLETIONS)
        await server.wait_for_count(batch_id, 5)
        body = {"prompt": "the river", "max_tokens": 2}
        for expected in (200, 200, 429):
            response = await server.post(COMPLETIONS, json=body)
            assert response.status_code == expected, response.text
        assert (await server.wait(batch_id))["request_counts"]["completed"] == 30
