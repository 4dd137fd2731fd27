"""The benchmark client: honest timings, failures apart, the same work for every system."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from benchmarks import client, serve_vs_peer
from benchmarks.measurement import Run, percentile, summarize
from benchmarks.workloads import WORKLOADS, Prompt, Workload


def event(text: str | None = None, num_tokens: int | None = None) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text}]
    usage = None if num_tokens is None else {"completion_tokens": num_tokens}
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


@asynccontextmanager
async def serving(*answers: list[bytes | float] | int) -> AsyncIterator[str]:
    """Gives each answer once: an HTTP status, or the pieces and pauses (s) of a stream."""
    pending = list(answers)

    async def complete(request: web.Request) -> web.StreamResponse:
        answer = pending.pop(0)
        if isinstance(answer, int):
            return web.Response(status=answer, text="no")
        response = web.StreamResponse()
        await response.prepare(request)
        for part in answer:
            if isinstance(part, bytes):
                await response.write(part)
            else:
                await asyncio.sleep(part)
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def workload(num_requests: int, concurrency: int = 1) -> Workload:
    return Workload("w", concurrency, num_requests, lambda _source, _shared: Prompt("x", 3))


async def measure(num_requests: int, *answers: list[bytes | float] | int) -> Run:
    async with serving(*answers) as url:
        return await client._run(url, "m", workload(num_requests), 0)


async def test_wait_for_the_first_token_is_not_a_gap_between_tokens() -> None:
    run = await measure(1, [0.2, event("a"), 0.01, event("b"), event(num_tokens=2)])
    assert run.ttft_s[0] >= 0.2
    assert len(run.gaps_s) == 1
    assert run.gaps_s[0] < 0.15
    assert (run.num_output_tokens, run.num_failed) == (2, 0)


async def test_failures_are_counted_apart_and_give_no_timing() -> None:
    good: list[bytes | float] = [event("a"), event(num_tokens=1)]
    cut: list[bytes | float] = [event("a")]
    broken: list[bytes | float] = [b'data: {"error": {"message": "died"}}\n\n']
    run = await measure(5, good, 500, cut, broken, good)
    assert (run.num_failed, run.num_output_tokens) == (3, 2)
    assert len(run.ttft_s) == 3  # a cut answer did have a first token
    assert run.first_error == "RuntimeError: HTTP 500: no"


async def test_answer_without_text_has_no_invented_first_token() -> None:
    run = await measure(1, [event(num_tokens=0)])
    assert run.ttft_s == []
    assert math.isnan(summarize([run]).ttft_p50_ms)


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, p) for p in (50, 95, 99, 100)] == [50.0, 95.0, 99.0, 100.0]
    assert percentile([7.0], 95) == 7.0
    assert math.isnan(percentile([], 50))


def test_summary_takes_medians_and_adds_failures() -> None:
    runs = [Run(wall_s=w, num_output_tokens=100, num_failed=1) for w in (1.0, 2.0, 10.0)]
    summary = summarize(runs)
    assert (summary.wall_s, summary.output_tokens_per_s, summary.num_failed) == (2.0, 50.0, 3)


@pytest.mark.parametrize("name", WORKLOADS)
def test_rounds_repeat_by_seed_and_share_no_prefix_otherwise(name: str) -> None:
    chosen = WORKLOADS[name]
    first, again, other = (chosen.create_prompts(seed) for seed in (1, 1, 2))
    assert first == again
    assert len(first) == chosen.num_requests
    assert first[0].text.split()[:20] != other[0].text.split()[:20]


def test_workloads_have_their_lengths() -> None:
    agents = WORKLOADS["agents"].create_prompts(0)
    assert {prompt.text.split("\n")[0] for prompt in agents} == {agents[0].text.split("\n")[0]}
    assert len({prompt.text for prompt in agents}) == len(agents)
    assert {len(prompt.text.split()) for prompt in agents} == {640}
    mixed = WORKLOADS["mixed"].create_prompts(0)
    assert all(20 <= prompt.num_output_tokens <= 400 for prompt in mixed)
    assert all(20 <= len(prompt.text.split()) <= 300 for prompt in mixed)


def test_systems_take_turns_in_alternating_order_with_the_same_seeds() -> None:
    calls: list[tuple[str, int]] = []

    def system(name: str) -> serve_vs_peer.System:
        def run(_workload: Workload, seed: int) -> Run:
            calls.append((name, seed))
            return Run(wall_s=1.0 if name == "a" else 2.0)

        return run

    results = serve_vs_peer.measure({"a": system("a"), "b": system("b")}, [workload(1)], rounds=2)
    assert calls == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    table = serve_vs_peer.format_table(results)
    assert "| w | a | 0.0 | nan | nan | nan | 0 | 2.00× |" in table
    assert "| w | b | 0.0 | nan | nan | nan | 0 | 1.00× |" in table
