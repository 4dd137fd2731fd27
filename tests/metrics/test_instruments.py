"""Instruments that lie about a bucket or a count would mislead every alarm built on them."""

from __future__ import annotations

import pytest

from caudal.metrics.instruments import Histogram, LabelledCounter
from caudal.metrics.server_metrics import RequestTiming, ServerMetrics


def test_observations_fall_into_the_first_bucket_not_below_them() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.0, 1.0, 1.5, 2.0, 5.0, 5.1, 1e9):
        histogram.observe(value)
    assert histogram.bounds == ("1.0", "2.0", "5.0", "+Inf")
    assert histogram.cumulative_counts() == [2, 4, 5, 7]
    assert histogram.count == 7
    assert histogram.sum == pytest.approx(1e9 + 14.6)


def test_unsorted_bounds_are_a_programming_error() -> None:
    with pytest.raises(AssertionError):
        Histogram((2.0, 1.0))


def test_known_labels_exist_before_anything_happens() -> None:
    counter = LabelledCounter("reason", ("stop", "length"))
    assert counter.values == {"stop": 0, "length": 0}
    counter.increment("stop")
    counter.increment("surprise", 2)
    assert counter.values == {"stop": 1, "length": 0, "surprise": 2}


def test_first_token_counts_for_ttft_and_never_for_the_gaps() -> None:
    """A gap list with the prefill in it would hide what readers feel."""
    metrics = ServerMetrics()
    timing = RequestTiming(arrival=10.0)
    timing.observe_tokens(11.0, 1, metrics)
    timing.observe_tokens(11.01, 1, metrics)
    timing.observe_tokens(11.04, 3, metrics)
    metrics.observe_finished("stop", timing, 11.05)
    assert metrics.time_to_first_token.sum == pytest.approx(1.0)
    assert metrics.inter_token_latency.count == 2
    assert metrics.inter_token_latency.sum == pytest.approx(0.01 + 0.01)
    assert metrics.time_per_output_token.sum == pytest.approx(0.04 / 4)
    assert metrics.e2e_request_latency.sum == pytest.approx(1.05)
    assert metrics.requests_finished.values["stop"] == 1


def test_answer_without_tokens_gives_no_token_latencies() -> None:
    metrics = ServerMetrics()
    metrics.observe_finished("length", RequestTiming(arrival=1.0), 3.0)
    assert metrics.time_to_first_token.count == 0
    assert metrics.time_per_output_token.count == 0
    assert metrics.e2e_request_latency.sum == pytest.approx(2.0)
