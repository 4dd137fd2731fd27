"""Prometheus text from the cheap instruments and the engine's latest gauges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from caudal.metrics.exposition_types import EngineGauges
from caudal.metrics.instruments import Histogram, LabelledCounter
from caudal.metrics.server_metrics import ServerMetrics

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | InfoMetricFamily


class MetricsSource(Protocol):
    """Where a scrape gets its numbers; read at scrape time only."""

    @property
    def metrics(self) -> ServerMetrics:
        """The server's own instruments."""

    @property
    def batch_metrics(self) -> ServerMetrics:
        """The same for the requests of offline batches."""

    @property
    def engine_gauges(self) -> EngineGauges:
        """The engine's latest numbers (zeros before it is ready)."""

    @property
    def is_engine_ready(self) -> bool:
        """True while the engine answers."""

    @property
    def model_labels(self) -> Mapping[str, str]:
        """Labels of `caudal_model_info`."""


@dataclass(frozen=True, slots=True)
class _Series:
    name: str
    help: str
    field: str
    scale: float = 1.0


HISTOGRAMS = (
    _Series("time_to_first_token_seconds", "Arrival to first token.", "time_to_first_token"),
    _Series(
        "time_per_output_token_seconds",
        "Mean time per output token after the first, per request.",
        "time_per_output_token",
    ),
    _Series("inter_token_latency_seconds", "Time between output tokens.", "inter_token_latency"),
    _Series("e2e_request_latency_seconds", "Arrival to last token.", "e2e_request_latency"),
    _Series("request_queue_time_seconds", "Arrival to first step.", "queue_time"),
    _Series("request_prompt_tokens", "Prompt tokens per request.", "prompt_length"),
    _Series("request_generation_tokens", "Output tokens per request.", "output_tokens"),
)
SERVER_COUNTERS = (
    _Series("requests_cancelled", "Requests whose client left.", "requests_cancelled"),
    _Series("slow_readers_cut", "Streams closed because nobody read them.", "slow_readers_cut"),
    _Series("engine_restarts", "Times the engine process was restarted.", "engine_restarts"),
    _Series("prompt_tokens", "Prompt tokens of accepted requests.", "prompt_tokens"),
    _Series("generation_tokens", "Output tokens delivered.", "generation_tokens"),
)
BATCH_COUNTERS = (
    _Series("batch_prompt_tokens", "Prompt tokens of batch requests.", "prompt_tokens"),
    _Series("batch_generation_tokens", "Output tokens of batch requests.", "generation_tokens"),
)
ENGINE_COUNTERS = (
    _Series("prefix_cache_queries", "Prompt tokens looked up.", "prefix_queries_tokens"),
    _Series("prefix_cache_hits", "Prompt tokens found in the cache.", "prefix_hits_tokens"),
    _Series("num_preemptions", "Requests preempted.", "num_preemptions"),
    _Series("preempted_tokens", "Computed tokens that preemptions lost.", "num_preempted_tokens"),
    _Series("engine_prompt_tokens", "Prompt tokens computed or found cached.", "num_prompt_tokens"),
    _Series("engine_generation_tokens", "Tokens sampled.", "num_output_tokens"),
    _Series("engine_steps", "Steps run.", "num_steps"),
    _Series("engine_aborts", "Requests freed before their end.", "num_cancelled"),
)
ENGINE_GAUGES = (
    _Series("num_requests_running", "Requests in the batch.", "num_running"),
    _Series("num_requests_waiting", "Requests queued.", "num_waiting"),
    _Series("num_background_running", "Batch requests that yield.", "num_background_running"),
    _Series("num_background_waiting", "The same, queued.", "num_background_waiting"),
    _Series("num_tokens_waiting", "Prompt tokens queued.", "num_waiting_tokens"),
    _Series("kv_blocks", "KV blocks in the pool.", "num_blocks_total"),
    _Series("kv_blocks_free", "KV blocks never used or evicted.", "num_blocks_free"),
    _Series("kv_blocks_cached", "Unreferenced blocks with a prefix.", "num_blocks_cached"),
    _Series("kv_blocks_held", "KV blocks that requests hold.", "num_blocks_held"),
    _Series("kv_wasted_ratio", "Reserved but unused share of held KV.", "kv_wasted_fraction"),
    _Series(
        "predicted_time_to_first_token_seconds",
        "For a request that arrived now.",
        "predicted_ttft_ms",
        0.001,
    ),
)
STEP_PARTS = ("schedule", "prepare", "forward", "sample", "update", "publish")
ENGINE_REASONS = ("stop", "length", "abort", "error")


class _CaudalCollector(Collector):
    """Reads the instruments when Prometheus asks, so that observing stays free of its locks."""

    def __init__(self, source: MetricsSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Family]:
        yield from self._server_families()
        yield from self._engine_families()

    def _server_families(self) -> Iterator[Family]:
        metrics = self._source.metrics
        for series in HISTOGRAMS:
            histogram: Histogram = getattr(metrics, series.field)
            family = HistogramMetricFamily(f"caudal_{series.name}", series.help)
            family.add_metric([], histogram.cumulative_buckets(), histogram.sum)
            yield family
        for series in SERVER_COUNTERS:
            yield _counter(series, getattr(metrics, series.field))
        yield _labelled("requests_finished", "Requests by finish.", metrics.requests_finished)
        yield _labelled("requests_rejected", "Requests refused.", metrics.requests_rejected)
        batch = self._source.batch_metrics
        for series in BATCH_COUNTERS:
            yield _counter(series, getattr(batch, series.field))
        yield _labelled(
            "batch_requests_finished", "Choices of batches by finish.", batch.requests_finished
        )

    def _engine_families(self) -> Iterator[Family]:
        gauges = self._source.engine_gauges
        for series in ENGINE_COUNTERS:
            yield _counter(series, getattr(gauges, series.field))
        for series in ENGINE_GAUGES:
            yield _gauge(series, getattr(gauges, series.field) * series.scale)
        used = gauges.num_blocks_held / max(1, gauges.num_blocks_total)
        yield _gauge(_Series("kv_cache_usage_ratio", "Held share of the KV blocks.", ""), used)
        ready = _Series("engine_ready", "1 once a step has run and while the engine lives.", "")
        yield _gauge(ready, float(self._source.is_engine_ready))
        steps = LabelledCounter("part", STEP_PARTS)
        for part, milliseconds in gauges.step_ms.items():
            steps.increment(part, milliseconds / 1000.0)
        yield _labelled("step_time_seconds", "Time in steps by part.", steps)
        finished = LabelledCounter("reason", ENGINE_REASONS)
        for reason, count in gauges.num_finished.items():
            finished.increment(reason, count)
        yield _labelled("engine_requests_finished", "As the engine saw them.", finished)
        info = InfoMetricFamily("caudal_model", "The model that is served.")
        info.add_metric([], dict(self._source.model_labels))
        yield info


def _counter(series: _Series, value: float) -> Family:
    return CounterMetricFamily(f"caudal_{series.name}", series.help, value=value)


def _gauge(series: _Series, value: float) -> Family:
    return GaugeMetricFamily(f"caudal_{series.name}", series.help, value=value)


def _labelled(name: str, text: str, counter: LabelledCounter) -> Family:
    family = CounterMetricFamily(f"caudal_{name}", text, labels=[counter.label])
    for label, value in counter.values.items():
        family.add_metric([label], value)
    return family


class Exposition:
    """A private registry over one source: nothing is registered globally."""

    content_type = b"text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, source: MetricsSource) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_CaudalCollector(source))
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The page in Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)
