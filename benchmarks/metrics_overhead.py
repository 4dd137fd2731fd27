"""What observing costs, in microseconds: python -m benchmarks.metrics_overhead

Every part runs alone in a loop, best of several rounds. The last lines add up what falls into a
step with full rows, in the server's process and in the engine's, as a share of a step of 10 ms.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from caudal.metrics.exposition import Exposition
from caudal.metrics.history_store import HistoryStore
from caudal.metrics.machine import Machine
from caudal.metrics.reading import Collector, Reading, read
from caudal.metrics.request_log import RequestLog, RequestRecord
from caudal.metrics.server_metrics import RequestTiming, ServerMetrics

ROUNDS = 7
STEP_US = 10_000.0
ROWS = 64
STATS_PER_STEP = 0.1
"""The engine tells its numbers ten times a second: every tenth step of 10 ms."""


class _Gauges:
    """An engine's numbers; every attribute is there."""

    def __init__(self) -> None:
        parts = ("schedule", "prepare", "forward", "sample", "update", "publish")
        self.step_ms = dict.fromkeys(parts, 12.5)
        self.cpu_ms = {"engine": 100.0, "kernels": 90.0}
        self.num_finished = {"stop": 5, "length": 5}
        self.num_rejected: dict[str, int] = {}

    def __getattr__(self, name: str) -> float:
        return 7.0


class _Source:
    """A server that has observed some requests."""

    def __init__(self) -> None:
        self.metrics, self.batch_metrics = ServerMetrics(), ServerMetrics()
        self.engine_gauges = _Gauges()
        self.is_engine_ready = True
        self.num_preparing = 0
        self.targets_ms = {"ttft": 500.0}
        self.model_labels = {"model_name": "m", "architecture": "a", "quantization": "q"}
        self.cache_labels: dict[str, str] = {}


def best_us(work: Callable[[], object], repeats: int) -> float:
    """Microseconds of a call, best of several rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        best = min(best, (time.perf_counter() - started) / repeats)
    return best * 1e6


def _observe_request(metrics: ServerMetrics, log: RequestLog) -> Callable[[], None]:
    def work() -> None:
        timing = RequestTiming(1.0)
        timing.observe_tokens(1.1, 1, metrics)
        metrics.observe_finished("stop", timing, 2.0)
        log.add(RequestRecord("cmpl-1", 1.0, "stop", 9, 0, 9, 64, 0, False, 0.01, 0.1, 1.0))

    return work


def measure() -> dict[str, float]:
    """Microseconds by part."""
    source = _Source()
    metrics, timing = source.metrics, RequestTiming(1.0)
    timing.first = timing.last = 1.0
    log, machine, collector = RequestLog(), Machine(), Collector()
    store = HistoryStore(":memory:", 86_400)

    def read_now() -> Reading:
        return read(source, machine.read(), time.time())  # type: ignore[arg-type]

    def tick() -> None:
        collector.note(read_now())

    for _ in range(100):
        timing.observe_tokens(timing.last + 0.01, 1, metrics)
        _observe_request(metrics, log)()
    tick()
    taken = collector.peek(read_now())
    assert taken is not None
    exposition = Exposition(source)  # type: ignore[arg-type]
    return {
        "token": best_us(lambda: timing.observe_tokens(timing.last + 0.01, 1, metrics), 20_000),
        "request": best_us(_observe_request(metrics, log), 5_000),
        "engine step (two clocks)": best_us(time.process_time, 20_000) * 2,
        "engine stats": _engine_stats_us(),
        "reading (each second)": best_us(tick, 300),
        "minute (in its own thread)": best_us(lambda: store.put(60, taken), 100),
        "scrape": best_us(exposition.render, 50),
    }


def _engine_stats_us() -> float:
    """Gathering and encoding the engine's numbers with full rows."""
    import msgspec

    from caudal.engine.messages import EngineStats, StepResult

    steps = {"schedule": 1.5, "prepare": 1.5, "forward": 1.5, "sample": 1.5, "update": 1.5}
    encoder = msgspec.msgpack.Encoder()

    def work() -> bytes:
        time.process_time()
        stats = EngineStats(num_running=64, num_steps=1000, step_ms=dict(steps), cpu_ms=dict(steps))
        return encoder.encode(StepResult(stats=stats))

    return best_us(work, 2_000)


def shares(costs: dict[str, float]) -> dict[str, float]:
    """Percent of a step of 10 ms with `ROWS` rows, by process."""
    requests_per_step = ROWS / 100.0  # answers of a hundred tokens
    server = ROWS * costs["token"] + requests_per_step * costs["request"]
    server += costs["reading (each second)"] * STEP_US / 1e6
    engine = costs["engine step (two clocks)"] + STATS_PER_STEP * costs["engine stats"]
    return {"server": server / STEP_US * 100, "engine": engine / STEP_US * 100}


def main() -> int:
    """Print the table; 1 if a share is not below one percent."""
    parser = argparse.ArgumentParser(description="Microseconds that the metrics cost.")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    options = parser.parse_args()
    costs = measure()
    percent = shares(costs)
    for name, microseconds in costs.items():
        print(f"{name:30} {microseconds:9.2f} µs")
    for process, share in percent.items():
        print(f"{process}: {share:.2f} % of a step of 10 ms with {ROWS} rows")
    if options.json is not None:
        options.json.write_text(json.dumps({"microseconds": costs, "percent": percent}, indent=1))
    return int(max(percent.values()) >= 1.0)


if __name__ == "__main__":
    sys.exit(main())
