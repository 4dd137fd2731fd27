"""Shapes of time series: a steady climb, a sawtooth, or neither."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

MIN_POINTS = 12
"""With fewer observations every series counts as flat."""
NUM_BINS = 24
CLIMB_CORRELATION = 0.75
"""Rank correlation with time above which a series climbs."""
CLIMB_FACTOR = 2.0
"""Last third over first third, at least."""
TOOTH_FACTOR = 3.0
"""Peaks over the base, at least."""


class Shape(StrEnum):
    """How a series goes."""

    FLAT = "flat"
    CLIMB = "climb"
    SAWTOOTH = "sawtooth"


@dataclass(frozen=True, slots=True)
class Trend:
    """A series in a few numbers."""

    shape: Shape
    correlation: float
    """Spearman's, with time."""
    factor: float
    """Mean of the last third over that of the first."""
    num_teeth: int
    """Times that it rose above half of its range and came back."""


def percentile(values: Sequence[float], share: float) -> float:
    """Linearly interpolated; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def mean(values: Sequence[float]) -> float:
    """0 for no values."""
    return sum(values) / len(values) if values else 0.0


def bins(points: Sequence[tuple[float, float]], num_bins: int = NUM_BINS) -> list[float]:
    """Means of (time, value) points over equal stretches of time; empty ones are left out."""
    if not points:
        return []
    start, end = points[0][0], max(point[0] for point in points)
    width = (end - start) / num_bins or 1.0
    sums: dict[int, tuple[float, int]] = {}
    for time, value in points:
        index = min(num_bins - 1, int((time - start) / width))
        total, count = sums.get(index, (0.0, 0))
        sums[index] = total + value, count + 1
    return [total / count for _, (total, count) in sorted(sums.items())]


def find_trend(points: Sequence[tuple[float, float]], floor: float = 0.0) -> Trend:
    """The shape of (time, value) points; what stays below `floor` counts as no rise at all."""
    if len(points) < MIN_POINTS:
        return Trend(Shape.FLAT, 0.0, 1.0, 0)
    values = bins(points)
    correlation = rank_correlation(values)
    third = max(1, len(values) // 3)
    first, last = mean(values[:third]), mean(values[-third:])
    factor = last / max(first, floor, 1e-9)
    num_teeth = count_teeth([value for _, value in points], floor)
    if correlation >= CLIMB_CORRELATION and factor >= CLIMB_FACTOR and last > floor:
        return Trend(Shape.CLIMB, correlation, factor, num_teeth)
    shape = Shape.SAWTOOTH if num_teeth >= 2 else Shape.FLAT
    return Trend(shape, correlation, factor, num_teeth)


def count_teeth(values: Sequence[float], floor: float = 0.0) -> int:
    """How often a series rises to its upper half and comes back to its base."""
    base, peak = percentile(values, 0.1), percentile(values, 0.97)
    if peak < max(floor, TOOTH_FACTOR * base, 1e-9):
        return 0
    high, low = base + 0.5 * (peak - base), base + 0.2 * (peak - base)
    num_teeth, is_up = 0, False
    for value in values:
        if not is_up and value >= high:
            is_up = True
        elif is_up and value <= low:
            is_up = False
            num_teeth += 1
    return num_teeth


def rank_correlation(values: Sequence[float]) -> float:
    """Spearman's correlation with the order; ties share their rank. 0 for fewer than three."""
    count = len(values)
    if count < 3:
        return 0.0
    order = sorted(range(count), key=lambda index: values[index])
    ranks = [0.0] * count
    at = 0
    while at < count:
        end = at
        while end + 1 < count and values[order[end + 1]] == values[order[at]]:
            end += 1
        for index in order[at : end + 1]:
            ranks[index] = (at + end) / 2
        at = end + 1
    middle = (count - 1) / 2
    covariance = sum((index - middle) * (rank - middle) for index, rank in enumerate(ranks))
    own = sum((index - middle) ** 2 for index in range(count))
    other = sum((rank - middle) ** 2 for rank in ranks)
    return covariance / math.sqrt(own * other) if other else 0.0


def dispersion(times: Sequence[float]) -> float:
    """Variance over mean of the arrivals per stretch: 1 for a Poisson process, more for bursts.

    The stretches hold four arrivals on average.
    """
    if len(times) < MIN_POINTS:
        return 1.0
    start, span = times[0], times[-1] - times[0]
    num_bins = max(3, len(times) // 4)
    if span <= 0:
        return float(len(times))
    counts = [0] * num_bins
    for time in times:
        counts[min(num_bins - 1, int((time - start) / span * num_bins))] += 1
    average = mean(counts)
    return sum((count - average) ** 2 for count in counts) / num_bins / average
