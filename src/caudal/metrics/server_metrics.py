"""What the HTTP front observes about requests."""

from __future__ import annotations

from caudal.metrics.instruments import (
    TOKEN_BUCKETS,
    Histogram,
    LabelledCounter,
    create_latency_histogram,
)

FINISH_REASONS = ("stop", "length", "abort", "error", "timeout")
REJECTION_REASONS = (
    *("queue_requests", "queue_tokens", "queue_ttft", "deadline", "bodies", "unavailable"),
    *("key_concurrency", "key_requests", "key_tokens"),
)


class ServerMetrics:
    """Every series that the server itself measures; one per process, owned by the event loop."""

    __slots__ = (
        "decode_time",
        "e2e_request_latency",
        "engine_restarts",
        "generation_tokens",
        "inference_time",
        "inter_token_latency",
        "output_tokens",
        "prefill_time",
        "prompt_length",
        "prompt_tokens",
        "queue_time",
        "requests_cancelled",
        "requests_finished",
        "requests_received",
        "requests_rejected",
        "slow_readers_cut",
        "time_per_output_token",
        "time_to_first_token",
    )

    def __init__(self) -> None:
        self.time_to_first_token = create_latency_histogram()
        self.time_per_output_token = create_latency_histogram()
        self.inter_token_latency = create_latency_histogram()
        self.e2e_request_latency = create_latency_histogram()
        self.queue_time = create_latency_histogram()
        self.prefill_time = create_latency_histogram()
        self.decode_time = create_latency_histogram()
        self.inference_time = create_latency_histogram()
        self.prompt_length = Histogram(TOKEN_BUCKETS)
        self.output_tokens = Histogram(TOKEN_BUCKETS)
        self.requests_finished = LabelledCounter("reason", FINISH_REASONS)
        self.requests_rejected = LabelledCounter("reason", REJECTION_REASONS)
        self.requests_received = 0
        self.requests_cancelled = 0
        self.slow_readers_cut = 0
        self.engine_restarts = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0

    def observe_finished(self, reason: str, timing: RequestTiming, now: float) -> None:
        """Record one request (one choice) that ran to its end at `now`."""
        timing.finished = now
        self.requests_finished.increment(reason)
        self.e2e_request_latency.observe(now - timing.arrival)
        self.queue_time.observe(timing.queue_s)
        self.output_tokens.observe(timing.num_output_tokens)
        started = timing.arrival + timing.queue_s
        if timing.first:
            self.prefill_time.observe(max(0.0, timing.first - started))
            self.decode_time.observe(timing.last - timing.first)
            self.inference_time.observe(max(0.0, timing.last - started))
        if timing.first and timing.num_output_tokens > 1:
            decode_s = timing.last - timing.first
            self.time_per_output_token.observe(decode_s / (timing.num_output_tokens - 1))


class RequestTiming:
    """Clock readings of one choice, in seconds of a monotonic clock."""

    __slots__ = (
        "arrival",
        "finished",
        "first",
        "last",
        "num_output_tokens",
        "num_preemptions",
        "queue_s",
    )

    def __init__(self, arrival: float) -> None:
        self.arrival = arrival
        self.first = 0.0
        self.last = 0.0
        self.finished = 0.0
        """0: not, or without success."""
        self.num_preemptions = 0
        self.queue_s = 0.0
        self.num_output_tokens = 0

    def observe_tokens(self, now: float, num_tokens: int, metrics: ServerMetrics) -> None:
        """Account `num_tokens` tokens that arrived together at `now`."""
        if self.first:
            metrics.inter_token_latency.observe((now - self.last) / num_tokens)
        else:
            self.first = now
            metrics.time_to_first_token.observe(now - self.arrival)
        self.last = now
        self.num_output_tokens += num_tokens
