"""Everything measured so far as one value, and what happened between two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from caudal.metrics.exposition_types import Observed
from caudal.metrics.instruments import quantile_s
from caudal.metrics.machine import MachineCounters

LATENCIES = {
    "ttft": "time_to_first_token",
    "tpot": "time_per_output_token",
    "itl": "inter_token_latency",
    "e2e": "e2e_request_latency",
    "queue_time": "queue_time",
}
"""Histograms by the short names that people know; the values are fields of ServerMetrics."""

STEP_PARTS = ("schedule", "prepare", "forward", "sample", "update", "publish")
QUANTILES = (("p50", 0.50), ("p95", 0.95), ("p99", 0.99))

_SERVER_COUNTERS = (
    *("requests_received", "requests_cancelled", "slow_readers_cut", "engine_restarts"),
    *("prompt_tokens", "generation_tokens"),
)
_ENGINE_COUNTERS = (
    *("num_preemptions", "num_preempted_tokens", "prefix_queries_tokens", "prefix_hits_tokens"),
    *("num_steps", "num_prompt_tokens", "num_output_tokens"),
)
_ENGINE_GAUGES = (
    *("num_running", "num_waiting", "num_waiting_tokens"),
    *("num_background_running", "num_background_waiting"),
    *("num_blocks_total", "num_blocks_free", "num_blocks_cached", "num_blocks_held"),
    *("kv_wasted_fraction", "predicted_ttft_ms"),
)


@dataclass(frozen=True, slots=True)
class Reading:
    """All counters, histograms and gauges at one moment."""

    time: float
    """Seconds since the epoch."""
    counters: dict[str, float]
    histograms: dict[str, list[int]]
    """Inner counts by short name."""
    gauges: dict[str, float]


def read(source: Observed, machine: MachineCounters, now: float) -> Reading:
    """What `source` and `machine` say now; some tens of microseconds."""
    metrics, engine = source.metrics, source.engine_gauges
    counters: dict[str, float] = {name: getattr(metrics, name) for name in _SERVER_COUNTERS}
    counters |= {name: getattr(engine, name) for name in _ENGINE_COUNTERS}
    batch = source.batch_metrics
    counters["batch_prompt_tokens"] = batch.prompt_tokens
    counters["batch_generation_tokens"] = batch.generation_tokens
    counters["throttled_s"] = machine.throttled_s
    counters["num_throttled"] = machine.num_throttled
    counters["steal_s"] = machine.steal_s
    counters["machine_s"] = machine.total_s
    counters["cpu_s.server"] = machine.process_s
    labelled: tuple[tuple[str, Mapping[str, float]], ...] = (
        ("finished", metrics.requests_finished.values),
        ("rejected", metrics.requests_rejected.values),
        ("batch_finished", batch.requests_finished.values),
        ("step_ms", engine.step_ms),
        ("cpu_ms", engine.cpu_ms),
    )
    for family, values in labelled:
        for label, value in values.items():
            counters[f"{family}.{label}"] = value
    gauges: dict[str, float] = {name: getattr(engine, name) for name in _ENGINE_GAUGES}
    gauges["queue_depth"] = engine.num_waiting + source.num_preparing
    gauges["num_preparing"] = source.num_preparing
    histograms = {name: getattr(metrics, of).counts.copy() for name, of in LATENCIES.items()}
    return Reading(now, counters, histograms, gauges)


class Level(msgspec.Struct, array_like=True):
    """A gauge over some time."""

    total: float = 0.0
    greatest: float = 0.0
    num_samples: int = 0

    def add(self, other: Level) -> None:
        """Take in the samples of `other`."""
        self.total += other.total
        self.greatest = max(self.greatest, other.greatest)
        self.num_samples += other.num_samples

    @property
    def mean(self) -> float:
        """Of all samples; 0 without any."""
        return self.total / self.num_samples if self.num_samples else 0.0


class Aggregate(msgspec.Struct):
    """What happened in a stretch of time; several add up to that of the whole stretch."""

    seconds: float = 0.0
    """How much of the stretch was observed."""
    counters: dict[str, float] = {}
    """How much each has grown; those that have not are absent."""
    histograms: dict[str, dict[int, int]] = {}
    """Observations by inner bucket; empty buckets are absent."""
    levels: dict[str, Level] = {}

    def add(self, other: Aggregate) -> None:
        """Take in another stretch."""
        self.seconds += other.seconds
        for name, value in other.counters.items():
            self.counters[name] = self.counters.get(name, 0.0) + value
        for name, counts in other.histograms.items():
            own = self.histograms.setdefault(name, {})
            for bucket, count in counts.items():
                own[bucket] = own.get(bucket, 0) + count
        for name, level in other.levels.items():
            self.levels.setdefault(name, Level()).add(level)

    def total(self, family: str) -> float:
        """Sum of a labelled counter over its labels."""
        prefix = family + "."
        return sum(value for name, value in self.counters.items() if name.startswith(prefix))


@dataclass(slots=True)
class Collector:
    """Turns readings that come about each second into aggregates."""

    _first: Reading | None = None
    _last: Reading | None = None
    _levels: dict[str, Level] = field(default_factory=dict)

    def note(self, reading: Reading) -> None:
        """A further reading."""
        if self._first is None:
            self._first = reading
        self._last = reading
        for name, value in reading.gauges.items():
            level = self._levels.setdefault(name, Level())
            level.add(Level(value, value, 1))

    def peek(self, now: Reading | None = None) -> Aggregate | None:
        """All between the last `take` and `now`, or else the last reading."""
        first, last = self._first, now or self._last
        if first is None or last is None or last.time <= first.time:
            return None
        seen = between(first, last)
        seen.levels = self._levels
        return seen

    def take(self) -> Aggregate | None:
        """All since the last call; the next stretch begins where this one ends."""
        taken = self.peek()
        if taken is not None:
            self._first, self._levels = self._last, {}
        return taken


def between(first: Reading, last: Reading) -> Aggregate:
    """What the counters and histograms of `last` have that `first` had not.

    A counter that is below its former value has started anew (another engine): all of it counts.
    """
    counters: dict[str, float] = {}
    for name, value in last.counters.items():
        before = first.counters.get(name, 0.0)
        grown = value - before if value >= before else value
        if grown:
            counters[name] = grown
    histograms: dict[str, dict[int, int]] = {}
    for name, counts in last.histograms.items():
        before_counts = first.histograms[name]
        if counts != before_counts:
            pairs = enumerate(zip(counts, before_counts, strict=True))
            histograms[name] = {index: new - old for index, (new, old) in pairs if new != old}
    return Aggregate(last.time - first.time, counters, histograms)


def percentiles_ms(counts: Mapping[int, int] | None) -> tuple[float | None, ...]:
    """The `QUANTILES` of sparse inner counts in milliseconds; None each if there are none."""
    if not counts:
        return (None,) * len(QUANTILES)
    dense = [0] * (max(counts) + 1)
    for bucket, count in counts.items():
        dense[bucket] = count
    return tuple(_milliseconds(dense, quantile) for _, quantile in QUANTILES)


def _milliseconds(counts: Sequence[int], quantile: float) -> float | None:
    seconds = quantile_s(counts, quantile)
    return None if seconds is None else float(f"{seconds * 1e3:.4g}")


def share(part: float, whole: float) -> float | None:
    """Rounded quotient within 0 and 1; None if there was nothing to divide."""
    return round(min(1.0, max(0.0, part / whole)), 4) if whole > 0 else None


def outside_kernels(happened: Aggregate) -> float | None:
    """Share of both processes' processor time that was not spent in forward passes."""
    counters = happened.counters
    kernels_s = counters.get("cpu_ms.kernels", 0.0) / 1e3
    all_s = counters.get("cpu_ms.engine", 0.0) / 1e3 + counters.get("cpu_s.server", 0.0)
    return share(all_s - kernels_s, all_s) if kernels_s else None
