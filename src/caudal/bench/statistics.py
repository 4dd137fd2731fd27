"""Distributions of latencies, and what a level gave in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from caudal.bench.record import FailureKind, RequestRecord


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of `count` values; percentiles are interpolated linearly, as in `vllm bench serve`."""

    count: int = 0
    mean: float = 0.0
    std: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        """All zero for no values; look at `count`."""
        if not values:
            return cls()
        array = np.asarray(values, dtype=np.float64)
        p50, p90, p95, p99 = (float(p) for p in np.percentile(array, (50, 90, 95, 99)))
        mean, std = float(array.mean()), float(array.std())
        return cls(len(values), mean, std, p50, p90, p95, p99, float(array.max()))


@dataclass(frozen=True, slots=True)
class Objective:
    """What an answer must keep to be a good one; a limit of None is not asked for."""

    ttft_ms: float | None = None
    """Most milliseconds to the first token."""
    tpot_ms: float | None = None
    """Most milliseconds per output token after the first."""
    e2e_ms: float | None = None
    """Most milliseconds to the end of the answer."""

    @property
    def is_set(self) -> bool:
        """Whether anything is asked for."""
        return any(v is not None for v in (self.ttft_ms, self.tpot_ms, self.e2e_ms))

    def is_met(self, record: RequestRecord) -> bool:
        """A failed request never is. An answer of one token has no TPOT to miss."""
        if not record.is_ok:
            return False
        pairs = (
            (self.ttft_ms, record.ttft_s),
            (self.tpot_ms, record.tpot_s),
            (self.e2e_ms, record.e2e_s),
        )
        return all(limit is None or value is None or 1e3 * value <= limit for limit, value in pairs)

    def __str__(self) -> str:
        limits = (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms), ("E2E", self.e2e_ms))
        return ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in limits if limit is not None)


@dataclass(frozen=True, slots=True)
class Summary:
    """One level in numbers. Latencies are of complete answers; failures are counted apart."""

    duration_s: float
    """From the level's start to its last answer."""
    num_completed: int
    num_failed: int
    num_given_up: int
    """Sent or planned when the level was already decided; neither completed nor failed."""
    failures: dict[str, int]
    """By kind."""
    first_messages: dict[str, str]
    """What the first failure of each kind said."""
    num_input_tokens: int
    num_cached_tokens: int | None
    """Prompt tokens that the server found in its cache; None if it does not say."""
    num_output_tokens: int
    num_without_usage: int
    """Answers whose tokens had to be counted by pieces."""
    tokens_per_piece: float
    request_throughput: float
    output_throughput: float
    total_throughput: float
    peak_output_throughput: float
    """Output tokens in the best second, spread over the pieces they came in."""
    peak_concurrency: int
    num_good: int | None
    """Answers that met the objective; None without one."""
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    e2e_ms: Distribution

    @property
    def goodput(self) -> float | None:
        """Good answers a second."""
        if self.num_good is None:
            return None
        return self.num_good / self.duration_s if self.duration_s else 0.0

    @property
    def good_share(self) -> float | None:
        """Of all requests that ended, failed ones included."""
        total = self.num_completed + self.num_failed
        return None if self.num_good is None or not total else self.num_good / total


def summarize(records: Sequence[RequestRecord], duration_s: float, objective: Objective) -> Summary:
    """The numbers of one level that took `duration_s`."""
    done = [record for record in records if record.is_ok]
    given_up = [r for r in records if r.failure is FailureKind.GIVEN_UP]
    failed = [r for r in records if not r.is_ok and r.failure is not FailureKind.GIVEN_UP]
    num_output = sum(r.num_output_tokens or 0 for r in done)
    num_input = sum(r.num_prompt_tokens or 0 for r in done)
    cached = [r.num_cached_tokens for r in done if r.num_cached_tokens is not None]
    num_pieces = sum(len(r.chunk_s) for r in done)
    seconds = duration_s or 1.0
    first_messages: dict[str, str] = {}
    for record in failed:
        first_messages.setdefault(str(record.failure), record.message)
    return Summary(
        duration_s=duration_s,
        num_completed=len(done),
        num_failed=len(failed),
        num_given_up=len(given_up),
        failures=dict(Counter(str(r.failure) for r in failed).most_common()),
        first_messages=first_messages,
        num_input_tokens=num_input,
        num_cached_tokens=sum(cached) if cached else None,
        num_output_tokens=num_output,
        num_without_usage=sum(not r.has_usage for r in done),
        tokens_per_piece=num_output / num_pieces if num_pieces else 0.0,
        request_throughput=len(done) / seconds,
        output_throughput=num_output / seconds,
        total_throughput=(num_input + num_output) / seconds,
        peak_output_throughput=_peak_throughput(done),
        peak_concurrency=max((n for _, n in in_flight(records)), default=0),
        num_good=sum(map(objective.is_met, done)) if objective.is_set else None,
        ttft_ms=_ms(r.ttft_s for r in done),
        tpot_ms=_ms(r.tpot_s for r in done),
        itl_ms=_ms(gap for r in done for gap in r.itl_s),
        e2e_ms=_ms(r.e2e_s for r in done),
    )


def _ms(values: Iterable[float | None]) -> Distribution:
    return Distribution.of([1e3 * value for value in values if value is not None])


def tokens_by_second(records: Iterable[RequestRecord]) -> list[float]:
    """Output tokens that came in each second; those of an answer are spread over its pieces."""
    seconds: list[float] = []
    for record in records:
        if not record.chunk_s:
            continue
        each = (record.num_output_tokens or len(record.chunk_s)) / len(record.chunk_s)
        for when in record.chunk_s:
            index = max(0, int(when))
            seconds.extend([0.0] * (index + 1 - len(seconds)))
            seconds[index] += each
    return seconds


def _peak_throughput(records: Iterable[RequestRecord]) -> float:
    return max(tokens_by_second(records), default=0.0)


def in_flight(records: Iterable[RequestRecord]) -> list[tuple[float, int]]:
    """(time, requests in flight from then on), ascending in time."""
    changes = []
    for record in records:
        changes += [(record.sent_s, 1), (record.end_s, -1)]
    number, steps = 0, []
    for when, change in sorted(changes):
        number += change
        steps.append((when, number))
    return steps
