"""Batches have limits of their own: neither they nor interactive requests use the other's."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from caudal.server.batch.dispatch import PROMPT_COUNTERS
from caudal.server.batch.limits import BatchLimits
from tests.batch.harness import CHAT, COMPLETIONS, BatchServer, batch_server, completion, line

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
name = "two"
key = "two"
max_batches = 2

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


async def prompt_tokens(server: BatchServer, url: str, body: dict[str, Any]) -> int:
    response = await server.post(url, json=body)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    return int(usage.get("prompt_tokens", usage.get("input_tokens")))


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]},
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT, {"messages": TALK, "max_tokens": 4}),
        (CHAT, {"messages": TALK, "tools": [TOOL], "tool_choice": "none", "max_tokens": 4}),
        (COMPLETIONS, {"prompt": ["one two", "three"], "max_tokens": 4}),
        ("/v1/responses", {"instructions": "Be brief.", "input": "hi", "max_output_tokens": 4}),
        ("/v1/embeddings", {"input": ["one two", "three"]}),
    ],
    ids=["chat", "tools", "completions", "responses", "embeddings"],
)
async def test_enqueued_tokens_are_those_that_the_endpoint_will_read(
    tmp_path: Path, url: str, body: dict[str, Any]
) -> None:
    """The template's own, and those between sequences, too."""
    async with keyed(tmp_path, "short") as server:
        count = PROMPT_COUNTERS[url](server.served.state, json.dumps(body).encode())
        assert count == await prompt_tokens(server, url, body)
        many = [line(f"r{i}", url=url, body=body) for i in range(400 // count + 1)]
        error = await failure(server, many, endpoint=url)
        assert error["code"] == "token_limit_exceeded"
        assert (await server.run(many[:-1], endpoint=url))["status"] == "completed"


async def test_bodies_that_will_be_refused_still_count(tmp_path: Path) -> None:
    body = {"messages": [{"role": "nobody", "content": "one two three " * 200}]}
    async with keyed(tmp_path, "short") as server:
        error = await failure(server, [line("a", body=body)])
        assert error["code"] == "token_limit_exceeded"


async def test_batches_beyond_what_a_key_may_have_in_progress_are_refused(tmp_path: Path) -> None:
    async with keyed(tmp_path, "two", step_s=0.05) as server:
        first, second = [await server.create([line(f"r{i}") for i in range(30)]) for _ in "ab"]
        file_id = await server.upload([line("c")])
        body = {"input_file_id": file_id, "endpoint": CHAT}
        response = await server.post("/v1/batches", json=body)
        assert response.status_code == 429
        error = response.json()["error"]
        assert error["code"] == "rate_limit_exceeded"
        assert "max_batches of this API key is 2, and 2 are in progress" in error["message"]
        assert int(response.headers["retry-after"]) > 0
        await server.post(f"/v1/batches/{first}/cancel")
        await server.wait(first)
        third = await server.post("/v1/batches", json=body)
        assert third.status_code == 200
        for batch_id in (second, third.json()["id"]):
            await server.post(f"/v1/batches/{batch_id}/cancel")
            await server.wait(batch_id)


async def test_batches_created_at_the_same_time_are_all_counted(tmp_path: Path) -> None:
    async with keyed(tmp_path, "two", step_s=0.05) as server:
        file_id = await server.upload([line(f"r{i}") for i in range(30)])
        body = {"input_file_id": file_id, "endpoint": CHAT}
        posts = [server.post("/v1/batches", json=body) for _ in range(6)]
        responses = await asyncio.gather(*posts)
        assert sorted(r.status_code for r in responses) == [200, 200, 429, 429, 429, 429]
        for response in responses:
            if response.status_code == 200:
                await server.post(f"/v1/batches/{response.json()['id']}/cancel")
                await server.wait(response.json()["id"])
