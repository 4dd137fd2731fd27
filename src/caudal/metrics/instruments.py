"""Counters and histograms that cost a fraction of a microsecond, for use from one event loop."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

LATENCY_BUCKETS_S: tuple[float, ...] = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Upper bounds from 1 ms to ten minutes; dense where the service-level targets are."""

TOKEN_BUCKETS: tuple[float, ...] = tuple(float(2**power) for power in range(18))
"""Upper bounds for token counts, 1 to 131,072."""


class Histogram:
    """Observations by bucket. Not thread-safe: one event loop owns it."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BUCKETS_S) -> None:
        assert list(bounds) == sorted(bounds), "bucket bounds must ascend"
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count `value` in the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self._counts)

    def cumulative_buckets(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it) in Prometheus' text form, ending with +Inf."""
        totals = accumulate(self._counts)
        names = [*map(repr, self._bounds), "+Inf"]
        return [(name, float(total)) for name, total in zip(names, totals, strict=True)]


class LabelledCounter:
    """A counter per value of one label; the known values exist from the start, at zero."""

    __slots__ = ("label", "values")

    def __init__(self, label: str, known: tuple[str, ...]) -> None:
        self.label = label
        self.values: dict[str, float] = dict.fromkeys(known, 0.0)

    def increment(self, value: str, by: float = 1.0) -> None:
        """Add `by` to the counter of label `value`."""
        self.values[value] = self.values.get(value, 0.0) + by
