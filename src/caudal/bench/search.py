"""Finds the highest rate at which enough requests meet the objective."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from caudal.bench.record import RequestRecord
from caudal.bench.runner import Live, Observer
from caudal.bench.statistics import Objective

TOLERANCE = 1.08
"""Stop when the bracket is this narrow; finer than runs of this length can tell."""
MIN_RATE = 0.01


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Search for the highest rate that keeps the objective."""

    goodput_percent: float | None = None
    """Search the highest rate at which this percentage of requests meets --ttft-ms and --tpot-ms,
    such as 90 or 95."""
    max_runs: int = 10
    """Levels that the search may run, at most."""
    window_s: float = 20.0
    """Seconds of arrivals in each run of the search; a run has at least 20 requests."""


@dataclass(slots=True)
class SearchResult:
    """Where the search ended. `best_rate` None: no rate tried meets the objective."""

    share: float
    best_rate: float | None = None
    failing_rate: float | None = None
    """The lowest rate that missed; None if none did."""
    tried: list[tuple[float, float, bool]] = field(default_factory=list)
    """(rate, share of good answers, whether it passed), in the order of trying."""

    @property
    def is_narrow(self) -> bool:
        """Whether the bracket is as narrow as it will get."""
        if self.best_rate is None or self.failing_rate is None:
            return False
        return self.failing_rate / self.best_rate <= TOLERANCE

    def next_rate(self) -> float:
        """Doubles or halves until both sides are known, then bisects geometrically."""
        if self.best_rate is None:
            assert self.failing_rate is not None
            return self.failing_rate / 2
        if self.failing_rate is None:
            return self.best_rate * 2
        return math.sqrt(self.best_rate * self.failing_rate)

    def note(self, rate: float, good_share: float, has_passed: bool) -> None:
        """Take the outcome of one run."""
        self.tried.append((rate, good_share, has_passed))
        if has_passed:
            self.best_rate = max(rate, self.best_rate or 0.0)
        elif self.failing_rate is None or rate < self.failing_rate:
            self.failing_rate = rate


RunAtRate = Callable[[float], Awaitable[tuple[float, bool]]]
"""Runs one level -> (share of good answers, whether it passed)."""


async def search_rate(options: SearchOptions, first_rate: float, run_at: RunAtRate) -> SearchResult:
    """At most `options.max_runs` runs, beginning at `first_rate`."""
    assert options.goodput_percent is not None
    result, rate = SearchResult(options.goodput_percent / 100), first_rate
    for _ in range(options.max_runs):
        result.note(rate, *await run_at(rate))
        if result.is_narrow:
            break
        rate = result.next_rate()
        if rate < MIN_RATE:
            break
    return result


class MissWatch:
    """Gives a run up once so many requests have missed that it cannot pass any more."""

    def __init__(self, objective: Objective, share: float, also: Observer) -> None:
        self._objective = objective
        self._share = share
        self._also = also

    def __call__(self, live: Live) -> bool:
        """An observer of a level."""
        allowed = math.floor((1 - self._share) * live.num_planned + 1e-9)
        now = live.clock.now()
        missed = sum(self._has_missed(record, now) for record in live.records)
        return self._also(live) or missed > allowed

    def _has_missed(self, record: RequestRecord, now: float) -> bool:
        if record.end_s:
            return not self._objective.is_met(record)
        waited_ms = 1e3 * (now - record.intended_s)
        ttft_ms, e2e_ms = self._objective.ttft_ms, self._objective.e2e_ms
        is_late = record.first_s is None and ttft_ms is not None and waited_ms > ttft_ms
        return is_late or (e2e_ms is not None and waited_ms > e2e_ms)
