"""Runs a workload against an OpenAI-compatible server, streaming."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import aiohttp

from benchmarks.measurement import Run
from benchmarks.workloads import Prompt, Workload

REQUEST_TIMEOUT_S = 1800


def run_workload(url: str, model: str, workload: Workload, seed: int) -> Run:
    """Every request of the workload; failures are counted, not raised."""
    return asyncio.run(_run(url, model, workload, seed))


async def _run(url: str, model: str, workload: Workload, seed: int) -> Run:
    run, pending = Run(), iter(workload.create_prompts(seed))
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    # Some servers close a connection just when it is used again.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        started = time.perf_counter()
        workers = (_work(session, model, pending, run) for _ in range(workload.concurrency))
        await asyncio.gather(*workers)
        run.wall_s = time.perf_counter() - started
    return run


async def _work(
    session: aiohttp.ClientSession, model: str, pending: Iterator[Prompt], run: Run
) -> None:
    for prompt in pending:
        try:
            await stream_request(session, model, prompt, run)
        except (aiohttp.ClientError, TimeoutError, ValueError, RuntimeError) as error:
            run.num_failed += 1
            run.first_error = run.first_error or f"{type(error).__name__}: {error}"


async def stream_request(
    session: aiohttp.ClientSession, model: str, prompt: Prompt, run: Run
) -> None:
    """One answer, read to its end. Raises for a refusal, an error event or a cut stream."""
    body = {
        "model": model,
        "prompt": prompt.text,
        "max_tokens": prompt.num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent = previous = time.perf_counter()
    has_text, num_tokens = False, None
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                continue
            chunk = json.loads(line[5:])
            if "error" in chunk:
                raise RuntimeError(str(chunk["error"]))
            if chunk.get("usage"):
                num_tokens = int(chunk["usage"]["completion_tokens"])
            if any(choice.get("text") for choice in chunk.get("choices", ())):
                now = time.perf_counter()
                (run.gaps_s if has_text else run.ttft_s).append(now - previous)
                has_text, previous = True, now
    if num_tokens is None:
        raise RuntimeError(f"the stream ended after {time.perf_counter() - sent:.1f} s, no usage")
    run.num_output_tokens += num_tokens
