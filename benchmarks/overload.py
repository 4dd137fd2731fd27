"""Checks an overloaded server: are refusals honest, and are health probes answered in time?

    python benchmarks/overload.py retry [--model smollm2-135m] [--rounds 5] [--seconds 45]
                                       [--workload short|long|chat] [-- flags of serve]
    python benchmarks/overload.py probes [--requests 1280] [--rounds 3] [-- flags of serve]

`retry` sends a burst to the idle server until a request is refused, asks again and again until one
is admitted, and compares that time with what the refusal said (`Retry-After-Ms`); it begins no
burst after --seconds. Answers of `short` and `long` end by their limits, one prompt in four of
`long` is long; those of `chat` end by themselves, far below their limits. `probes` sends many
requests at once and measures the answers of /live, /ready and /health meanwhile, each on a new
connection.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.serve_vs_peer import caudal_server, describe_machine
from benchmarks.workloads import make_text

PROBES = ("/live", "/ready", "/health")
MAX_WAIT_S = 120.0
POLL_S = 0.05
NUM_OUTPUT = (20, 120)
"""Tokens of an answer."""
TASKS = (
    "Name the capital of {}.",
    "Write one short sentence about {}.",
    "Say what {} is in a few words.",
    "Is {} larger than a house? Answer yes or no.",
    "List three things that have to do with {}.",
)
THINGS = ("France", "a horse", "the Moon", "winter", "Japan", "a violin", "tea", "Egypt", "chess")


def completion(rng: random.Random, num_words: int, **fields: Any) -> dict[str, Any]:
    """A request whose answer ends by its limit."""
    body = {"prompt": make_text(rng, num_words), "temperature": 0, "ignore_eos": True}
    return {**body, **fields}


@dataclass(frozen=True, slots=True)
class Workload:
    """What the crowd sends."""

    path: str
    make: Callable[[random.Random], dict[str, Any]]


def _short(rng: random.Random) -> dict[str, Any]:
    return completion(rng, rng.randint(20, 100), max_tokens=rng.randint(*NUM_OUTPUT))


def _long(rng: random.Random) -> dict[str, Any]:
    num_words = rng.randint(300, 900) if rng.random() < 0.25 else rng.randint(20, 100)
    return completion(rng, num_words, max_tokens=rng.randint(*NUM_OUTPUT))


def _chat(rng: random.Random) -> dict[str, Any]:
    task = rng.choice(TASKS).format(rng.choice(THINGS))
    messages = [
        {"role": "system", "content": f"You are a helpful assistant. {make_text(rng, 20)}"},
        {"role": "user", "content": task},
    ]
    return {"messages": messages, "temperature": 0.7, "max_tokens": 600}


WORKLOADS = {
    "short": Workload("/v1/completions", _short),
    "long": Workload("/v1/completions", _long),
    "chat": Workload("/v1/chat/completions", _chat),
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a refused client was told, and what was true."""

    told_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request, and the time to retry if it was refused."""

    body: dict[str, Any]
    told_s: float | None


@dataclass(slots=True)
class Crowd:
    """Sends a workload to a server."""

    session: aiohttp.ClientSession
    workload: Workload
    rng: random.Random

    async def learn(self) -> None:
        """A few answers; they teach the server how long they are and what a step costs."""
        await asyncio.gather(*(self._send() for _ in range(16)))

    async def fill(self) -> tuple[set[asyncio.Task[_Sent]], _Sent]:
        """Send requests until one is refused; returns those in flight, and the refused one."""
        running: set[asyncio.Task[_Sent]] = set()
        while True:
            running.add(asyncio.create_task(self._send()))
            await asyncio.sleep(0.001)
            for done in [task for task in running if task.done()]:
                running.discard(done)
                if done.result().told_s is not None:
                    return running, done.result()

    async def _send(self) -> _Sent:
        """A request, until its answer is complete."""
        body = self.workload.make(self.rng)
        async with self.session.post(self.workload.path, json=body) as response:
            await response.read()
            told_ms = response.headers["retry-after-ms"] if response.status == 429 else None
            return _Sent(body, None if told_ms is None else float(told_ms) / 1e3)

    async def wait_until_admitted(self, body: dict[str, Any]) -> None:
        """Ask again and again; the status of a stream is sent when the request is admitted."""
        body = {**body, "stream": True}
        started = time.perf_counter()
        while True:
            async with self.session.post(self.workload.path, json=body) as response:
                if response.status == 200:
                    return
            assert time.perf_counter() - started < MAX_WAIT_S
            await asyncio.sleep(POLL_S)


async def measure_retry(url: str, name: str, num_rounds: int, max_s: float) -> list[Refusal]:
    """One refusal per round, on a queue that nobody else fills meanwhile; prints a row each."""
    refusals: list[Refusal] = []
    connector = aiohttp.TCPConnector(limit=0)
    print("| told (s) | true (s) | told / true |\n|---|---|---|", flush=True)
    end = time.perf_counter() + max_s
    async with aiohttp.ClientSession(url, connector=connector) as session:
        crowd = Crowd(session, WORKLOADS[name], random.Random(0))
        while len(refusals) < num_rounds and time.perf_counter() < end:
            await crowd.learn()
            running, refused = await crowd.fill()
            started = time.perf_counter()
            await crowd.wait_until_admitted(refused.body)
            assert refused.told_s is not None
            refusal = Refusal(refused.told_s, time.perf_counter() - started)
            refusals.append(refusal)
            ratio = refusal.told_s / refusal.waited_s
            print(f"| {refusal.told_s:.2f} | {refusal.waited_s:.2f} | {ratio:.2f} |", flush=True)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    return refusals


def print_refusals(refusals: list[Refusal]) -> None:
    """What the rows add up to."""
    ratios = [refusal.told_s / refusal.waited_s for refusal in refusals]
    num_true = sum(0.7 <= ratio <= 1.3 for ratio in ratios)
    print(f"\nmedian ratio {statistics.median(ratios):.2f}; within 30 %: {num_true}/{len(ratios)}")


def _flood(url: str, num_requests: int, start_at: float) -> None:
    """Another process: open all connections, then send everything at once, and read the answers."""

    async def run() -> None:
        rng = random.Random(1)
        bodies = [completion(rng, 100, max_tokens=16) for _ in range(num_requests)]
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:

            async def post(body: dict[str, Any]) -> None:
                async with session.post("/v1/completions", data=json.dumps(body)) as response:
                    await response.read()

            for body in bodies:
                body["max_tokens"] = 16
            await asyncio.sleep(max(0.0, start_at - time.time()))
            headers = {"content-type": "application/json"}
            session.headers.update(headers)
            await asyncio.gather(*(post(body) for body in bodies))

    asyncio.run(run())


async def measure_probes(url: str, num_requests: int) -> list[float]:
    """Seconds that each probe took while so many requests arrived."""
    start_at = time.time() + 3.0
    flood = get_context("spawn").Process(target=_flood, args=(url, num_requests, start_at))
    flood.start()
    host, port = url.removeprefix("http://").split(":")
    times: list[float] = []
    await asyncio.sleep(max(0.0, start_at - time.time()))
    while flood.is_alive():
        for path in PROBES:
            started = time.perf_counter()
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            status = await reader.readline()
            times.append(time.perf_counter() - started)
            assert b" 200 " in status, status
            writer.close()
        await asyncio.sleep(0.02)
    flood.join()
    return times


def main() -> None:
    """Start a server, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("retry", "probes"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--workload", choices=tuple(WORKLOADS), default="short")
    parser.add_argument("--requests", type=int, default=1280)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, flags = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    if args.what == "retry" and "--max-queue-requests" not in flags:
        flags += ["--max-queue-requests", "64"]
    print(describe_machine())
    with caudal_server(args.model, flags) as url:
        if args.what == "retry":
            measured = measure_retry(url, args.workload, args.rounds, args.seconds)
            print_refusals(asyncio.run(measured))
            return
        for _ in range(args.rounds):
            times = sorted(asyncio.run(measure_probes(url, args.requests)))
            p99 = times[int(0.99 * (len(times) - 1))]
            print(f"{len(times)} probes: p50 {times[len(times) // 2] * 1e3:.0f} ms, "
                  f"p99 {p99 * 1e3:.0f} ms, worst {times[-1] * 1e3:.0f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
