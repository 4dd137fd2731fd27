"""Counters and histograms that cost a fraction of a microsecond, for use from one event loop."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

LATENCY_BUCKETS_S: tuple[float, ...] = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Upper bounds from 1 ms to ten minutes; dense where the service-level targets are."""

TOKEN_BUCKETS: tuple[float, ...] = tuple(float(2**power) for power in range(18))
"""Upper bounds for token counts, 1 to 131,072."""

DETAIL_RATIO = 1.1
"""Largest quotient of neighbouring inner bounds: percentiles are right within about 5 %."""


def _refined(bounds: Sequence[float], least: float) -> tuple[float, ...]:
    """`bounds` and, from `least` on, further ones between them, in geometric steps."""
    found = [least]
    for low, high in pairwise((least, *bounds)):
        num_parts = math.ceil(math.log(high / low) / math.log(DETAIL_RATIO))
        found += [low * (high / low) ** (part / num_parts) for part in range(1, num_parts)]
        found.append(high)
    return tuple(found)


LATENCY_DETAIL_S = _refined(LATENCY_BUCKETS_S, 0.0001)
"""Bounds of what is kept; those of `LATENCY_BUCKETS_S`, which are shown, are among them."""


class Histogram:
    """Observations by bucket. Not thread-safe: one event loop owns it."""

    __slots__ = ("_detail", "_shown", "bounds", "counts", "sum")

    def __init__(
        self,
        bounds: tuple[float, ...] = LATENCY_BUCKETS_S,
        detail: tuple[float, ...] = (),
    ) -> None:
        """`detail`: bounds of the buckets inside, with all of `bounds`; none: just these."""
        self._detail = detail or bounds
        assert list(self._detail) == sorted(self._detail), "bucket bounds must ascend"
        self._shown = [*(self._detail.index(bound) for bound in bounds), len(self._detail)]
        self.bounds = (*map(repr, bounds), "+Inf")
        """Upper bounds that are shown, in Prometheus' text form."""
        self.counts = [0] * (len(self._detail) + 1)
        """By inner bucket, the last one without an upper bound."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count `value` in the first bucket whose bound is not below it."""
        self.counts[bisect_left(self._detail, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def cumulative_counts(self) -> list[int]:
        """Observations up to each of `bounds`."""
        totals = list(accumulate(self.counts))
        return [totals[index] for index in self._shown]


def create_latency_histogram() -> Histogram:
    """A histogram of seconds, fine enough for percentiles."""
    return Histogram(LATENCY_BUCKETS_S, LATENCY_DETAIL_S)


def quantile_s(counts: Sequence[int], quantile: float) -> float | None:
    """The quantile (0 to 1) of a latency histogram's inner `counts`, in seconds; None if empty.

    Linear within its bucket, as Prometheus' histogram_quantile.
    """
    rank = quantile * sum(counts)
    if not rank:
        return None
    below = 0.0
    for index, count in enumerate(counts):
        if count and below + count >= rank:
            if index == len(LATENCY_DETAIL_S):
                return LATENCY_DETAIL_S[-1]
            low = LATENCY_DETAIL_S[index - 1] if index else 0.0
            return low + (LATENCY_DETAIL_S[index] - low) * (rank - below) / count
        below += count
    return LATENCY_DETAIL_S[-1]


class LabelledCounter:
    """A counter per value of one label; the known values exist from the start, at zero."""

    __slots__ = ("label", "values")

    def __init__(self, label: str, known: tuple[str, ...]) -> None:
        self.label = label
        self.values: dict[str, float] = dict.fromkeys(known, 0.0)

    def increment(self, value: str, by: float = 1.0) -> None:
        """Add `by` to the counter of label `value`."""
        self.values[value] = self.values.get(value, 0.0) + by
