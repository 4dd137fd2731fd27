"""Measures what an offline batch costs interactive users, and how much idle capacity it uses.

    python benchmarks/batch_idle.py [--model smollm2-135m] [--seconds 60] [--rate 1.0] [--rounds 2]

Users come at random (a Poisson process): the same times and lengths in each phase, other words. A
round is: users alone, users beside a batch, the batch alone. What users leave idle is the share of
time without a step while they are alone; the batch's speed beside them is compared with that share
of its speed alone, on this server and on one without latency targets (the machine's capacity).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.client import stream_request
from benchmarks.measurement import Run, percentile
from benchmarks.serve_vs_peer import caudal_server, describe_machine, served_model
from benchmarks.workloads import Prompt, make_text

BATCH_LINES = 20_000
SETTLE_S = 3.0
"""Time for a batch to reach its speed before it is measured."""
MIN_IDLE_SHARE = 0.15
"""Where users leave less idle, a share of it says nothing."""
MIN_ANSWERS = 100
"""Fewer have no 99th percentile."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Users of one phase: when they come, and what they ask."""

    rate_per_s: float
    seconds: float
    seed: int

    def arrivals(self, words: int) -> Iterator[tuple[float, Prompt]]:
        """(seconds after the start, request); `words` only changes the texts."""
        times, texts = random.Random(self.seed), random.Random(words)
        now = times.expovariate(self.rate_per_s)
        while now < self.seconds:
            num_words, num_tokens = times.randint(50, 200), times.randint(40, 120)
            yield now, Prompt(make_text(texts, num_words), num_tokens)
            now += times.expovariate(self.rate_per_s)


@dataclass(slots=True)
class Phase:
    """What one phase gave."""

    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    """Per request: mean time of a token after the first."""
    gap_ms: list[float] = field(default_factory=list)
    num_failed: int = 0
    busy_share: float = 0.0
    batch_tokens_per_s: float = 0.0

    def add(self, run: Run) -> None:
        """Take one user's answer."""
        self.ttft_ms += [1e3 * ttft for ttft in run.ttft_s]
        self.gap_ms += [1e3 * gap for gap in run.gaps_s]
        if run.num_output_tokens > 1:
            self.tpot_ms.append(1e3 * sum(run.gaps_s) / (run.num_output_tokens - 1))


@dataclass(frozen=True, slots=True)
class Counters:
    """The server's counters at one moment."""

    when: float
    step_s: float
    batch_tokens: float

    @staticmethod
    async def read(session: aiohttp.ClientSession) -> Counters:
        async with session.get("/metrics") as response:
            text = await response.text()
        return Counters(
            time.perf_counter(),
            _sum(text, "caudal_step_time_seconds_total"),
            _sum(text, "caudal_batch_generation_tokens_total"),
        )


def _sum(page: str, series: str) -> float:
    lines = [line for line in page.splitlines() if line.startswith((series + "{", series + " "))]
    return math.fsum(float(line.rsplit(" ", 1)[1]) for line in lines)


class Server:
    """A running server and what is done with it."""

    def __init__(self, session: aiohttp.ClientSession, model: str) -> None:
        self._session = session
        self._model = model

    async def measure(self, traffic: Traffic | None, words: int, seconds: float) -> Phase:
        """Users (or nobody) for so long; counts what the server did meanwhile."""
        phase = Phase()
        before = await Counters.read(self._session)
        if traffic is None:
            await asyncio.sleep(seconds)
        else:
            await self._serve(traffic, words, phase)
        after = await Counters.read(self._session)
        elapsed_s = after.when - before.when
        phase.busy_share = (after.step_s - before.step_s) / elapsed_s
        phase.batch_tokens_per_s = (after.batch_tokens - before.batch_tokens) / elapsed_s
        return phase

    async def _serve(self, traffic: Traffic, words: int, phase: Phase) -> None:
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for when, prompt in traffic.arrivals(words):
                await asyncio.sleep(max(0.0, started + when - time.perf_counter()))
                group.create_task(self._ask(prompt, phase))

    async def _ask(self, prompt: Prompt, phase: Phase) -> None:
        run = Run()
        try:
            await stream_request(self._session, self._model, prompt, run)
        except (aiohttp.ClientError, TimeoutError, ValueError, RuntimeError) as error:
            print(f"a request failed: {error}", file=sys.stderr)
            phase.num_failed += 1
        phase.add(run)

    async def start_batch(self, words: int) -> str:
        """A batch with more requests than can be run; returns its id."""
        source = random.Random(words)
        lines = []
        for number in range(BATCH_LINES):
            body = {
                "prompt": make_text(source, 100),
                "max_tokens": 100,
                "temperature": 0,
                "ignore_eos": True,
            }
            request = {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
            lines.append(json.dumps({**request, "body": body}))
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(lines).encode(), filename="batch.jsonl")
        file = await self._post("/v1/files", data=form)
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions"}
        batch = await self._post("/v1/batches", json=body)
        while (await self._get(f"/v1/batches/{batch['id']}"))["status"] == "validating":
            await asyncio.sleep(0.1)
        await asyncio.sleep(SETTLE_S)
        return str(batch["id"])

    async def stop_batch(self, batch_id: str) -> None:
        """Cancel it and wait until it is gone."""
        await self._post(f"/v1/batches/{batch_id}/cancel")
        while (await self._get(f"/v1/batches/{batch_id}"))["status"] != "cancelled":
            await asyncio.sleep(0.1)

    async def _post(self, path: str, **kwargs: Any) -> dict[str, Any]:
        async with self._session.post(path, **kwargs) as response:
            answer: dict[str, Any] = await response.json()
            if response.status != 200:
                sys.exit(f"{path}: {answer}")
            return answer

    async def _get(self, path: str) -> dict[str, Any]:
        async with self._session.get(path) as response:
            answer: dict[str, Any] = await response.json()
            return answer


async def measure_rounds(url: str, options: argparse.Namespace) -> dict[str, list[Phase]]:
    """Phases by name, one of each per round."""
    phases: dict[str, list[Phase]] = {"users": [], "users and batch": [], "batch": []}
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        server = Server(session, served_model(url))
        await server.measure(Traffic(options.rate, 5.0, -1), -1, 5.0)  # warms up
        for number in range(options.rounds):
            traffic = Traffic(options.rate, options.seconds, number)
            words = 10 * number
            phases["users"].append(await server.measure(traffic, words + 1, 0))
            batch_id = await server.start_batch(words + 2)
            phases["users and batch"].append(await server.measure(traffic, words + 3, 0))
            seconds = min(20.0, options.seconds / 2)
            phases["batch"].append(await server.measure(None, 0, seconds))
            await server.stop_batch(batch_id)
            print(f"round {number + 1} of {options.rounds} done", flush=True)
    return phases


async def measure_capacity(url: str, seconds: float) -> float:
    """Output tokens per second of a batch on a server without latency targets."""
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        server = Server(session, served_model(url))
        batch_id = await server.start_batch(7)
        phase = await server.measure(None, 0, seconds)
        await server.stop_batch(batch_id)
        return phase.batch_tokens_per_s


def format_report(phases: dict[str, list[Phase]], capacity: float) -> str:
    """A Markdown table of people's latencies, and what the batch made of the idle time."""
    lines = [
        "| | TTFT p50 | p99 | TPOT p50 | p99 | gap p99 | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    p99: dict[str, list[float]] = {}
    for name in ("users", "users and batch"):
        merged = Phase()
        for phase in phases[name]:
            merged.ttft_ms += phase.ttft_ms
            merged.tpot_ms += phase.tpot_ms
            merged.gap_ms += phase.gap_ms
            merged.num_failed += phase.num_failed
        pairs = (merged.ttft_ms, merged.tpot_ms, merged.gap_ms)
        p99[name] = [percentile(values, 99) for values in pairs]
        cells = (
            f"{percentile(merged.ttft_ms, 50):.1f}",
            f"{p99[name][0]:.1f}",
            f"{percentile(merged.tpot_ms, 50):.2f}",
            f"{p99[name][1]:.2f}",
            f"{p99[name][2]:.2f}",
            str(merged.num_failed),
        )
        lines.append(f"| {name} ({len(merged.ttft_ms)} answers), ms | {' | '.join(cells)} |")
    ratios = [b / a for a, b in zip(p99["users"], p99["users and batch"], strict=True)]
    lines.append(f"| ratio of p99 | | {ratios[0]:.2f} | | {ratios[1]:.2f} | {ratios[2]:.2f} | |")
    idle = 1 - statistics.median(phase.busy_share for phase in phases["users"])
    beside = statistics.median(phase.batch_tokens_per_s for phase in phases["users and batch"])
    alone = statistics.median(phase.batch_tokens_per_s for phase in phases["batch"])
    lines += [
        "",
        f"Users leave {idle:.0%} of the time idle. Batch: {beside:.0f} tok/s beside them, "
        f"{alone:.0f} alone, {capacity:.0f} without latency targets.",
    ]
    if idle < MIN_IDLE_SHARE:
        lines.append("That is too little for a verdict: lower --rate, or use a quiet machine.")
    else:
        lines.append(
            f"Used of the idle capacity: {beside / (idle * alone):.0%} of what this server's "
            f"batches reach, {beside / (idle * capacity):.0%} of what the machine can do."
        )
    num_answers = min(sum(len(p.ttft_ms) for p in phases[name]) for name in p99)
    if num_answers < MIN_ANSWERS:
        lines.append(f"{num_answers} answers are too few for a 99th percentile.")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="known name or GGUF path")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a phase")
    parser.add_argument("--rate", type=float, default=1.0, help="users per second")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("serve_flags", nargs="*", help="after --: flags for caudal serve")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    print(describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--data-dir", folder, *options.serve_flags]
        with caudal_server(options.model, [*flags, "--profile", "batch"]) as url:
            seconds = min(20.0, options.seconds)
            capacity = asyncio.run(measure_capacity(url, seconds))
        with caudal_server(options.model, flags) as url:
            phases = asyncio.run(measure_rounds(url, options))
    print("\n" + format_report(phases, capacity))


if __name__ == "__main__":
    main()
