"""Windows and minutes: differences that are wrong would make every chart wrong."""

from __future__ import annotations

import random
import statistics

import pytest

from caudal.metrics.instruments import (
    LATENCY_BUCKETS_S,
    LATENCY_DETAIL_S,
    create_latency_histogram,
    quantile_s,
)
from caudal.metrics.reading import Aggregate, Collector, Level, Reading, between, percentiles_ms


def reading(time: float, **counters: float) -> Reading:
    return Reading(time, counters, {"ttft": [0, 0, 0]}, {"num_running": counters.get("a", 0.0)})


def test_inner_buckets_contain_the_shown_ones() -> None:
    assert set(LATENCY_BUCKETS_S) <= set(LATENCY_DETAIL_S)
    assert list(LATENCY_DETAIL_S) == sorted(set(LATENCY_DETAIL_S))


def test_percentiles_are_within_five_percent_of_the_exact_ones() -> None:
    random.seed(5)
    values = [random.lognormvariate(-2.0, 1.2) for _ in range(20_000)]
    histogram = create_latency_histogram()
    for value in values:
        histogram.observe(value)
    exact = statistics.quantiles(values, n=100)
    for quantile in (0.50, 0.95, 0.99):
        estimate = quantile_s(histogram.counts, quantile)
        assert estimate == pytest.approx(exact[round(quantile * 100) - 1], rel=0.05)
    sparse = {index: count for index, count in enumerate(histogram.counts) if count}
    assert percentiles_ms(sparse)[0] == pytest.approx(exact[49] * 1e3, rel=0.05)


def test_nothing_observed_has_no_percentiles() -> None:
    assert quantile_s([0, 0], 0.5) is None
    assert percentiles_ms(None) == percentiles_ms({}) == (None, None, None)


def test_values_beyond_the_last_bucket_are_told_as_its_bound() -> None:
    histogram = create_latency_histogram()
    histogram.observe(1e6)
    assert quantile_s(histogram.counts, 0.99) == LATENCY_DETAIL_S[-1]


def test_counters_of_a_new_engine_count_from_zero() -> None:
    happened = between(reading(1.0, a=100.0), reading(2.0, a=7.0))
    assert happened.counters == {"a": 7.0}


def test_minutes_follow_each_other_without_gap_or_overlap() -> None:
    collector = Collector()
    taken = []
    for second in range(9):
        collector.note(reading(float(second), a=float(second**2)))
        if second in (3, 6):
            taken.append(collector.take())
    assert [each and each.counters["a"] for each in taken] == [9.0, 27.0]
    assert [each and each.seconds for each in taken] == [3.0, 3.0]
    assert taken[1] is not None
    assert taken[1].levels["num_running"].num_samples == 3
    assert taken[1].levels["num_running"].greatest == 36.0


def test_stretches_add_up_to_the_whole() -> None:
    whole = Aggregate()
    for part in (
        Aggregate(60.0, {"a": 1.0}, {"ttft": {3: 2}}, {"g": Level(10.0, 4.0, 5)}),
        Aggregate(30.0, {"a": 2.0, "b": 1.0}, {"ttft": {3: 1, 9: 1}}, {"g": Level(5.0, 5.0, 1)}),
    ):
        whole.add(part)
    assert (whole.seconds, whole.counters) == (90.0, {"a": 3.0, "b": 1.0})
    assert whole.histograms == {"ttft": {3: 3, 9: 1}}
    assert (whole.levels["g"].mean, whole.levels["g"].greatest) == (2.5, 5.0)
