"""Prometheus text from the cheap instruments and the engine's latest gauges."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from caudal.metrics.exposition_types import EngineGauges, MetricsSource, Series
from caudal.metrics.instruments import Histogram, LabelledCounter
from caudal.metrics.machine import Machine, MachineCounters

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | InfoMetricFamily

HISTOGRAMS = (
    Series("time_to_first_token_seconds", "Arrival to first token.", "time_to_first_token"),
    Series(
        "time_per_output_token_seconds",
        "Mean time per output token after the first, per request.",
        "time_per_output_token",
    ),
    Series("inter_token_latency_seconds", "Time between output tokens.", "inter_token_latency"),
    Series("e2e_request_latency_seconds", "Arrival to last token.", "e2e_request_latency"),
    Series("request_queue_time_seconds", "Arrival to first step.", "queue_time"),
    Series("request_prefill_time_seconds", "First step to first token.", "prefill_time"),
    Series("request_decode_time_seconds", "First token to last.", "decode_time"),
    Series("request_prompt_tokens", "Prompt tokens per request.", "prompt_length"),
    Series("request_generation_tokens", "Output tokens per request.", "output_tokens"),
)
SERVER_COUNTERS = (
    Series("requests_received", "Generation requests that have come in.", "requests_received"),
    Series("requests_cancelled", "Requests whose client left.", "requests_cancelled"),
    Series("slow_readers_cut", "Streams closed because nobody read them.", "slow_readers_cut"),
    Series("engine_restarts", "Times the engine process was restarted.", "engine_restarts"),
    Series("prompt_tokens", "Prompt tokens of accepted requests.", "prompt_tokens"),
    Series("generation_tokens", "Output tokens delivered.", "generation_tokens"),
)
BATCH_COUNTERS = (
    Series("batch_prompt_tokens", "Prompt tokens of batch requests.", "prompt_tokens"),
    Series("batch_generation_tokens", "Output tokens of batch requests.", "generation_tokens"),
)
ENGINE_COUNTERS = (
    Series("prefix_cache_queries", "Prompt tokens looked up.", "prefix_queries_tokens"),
    Series("prefix_cache_hits", "Prompt tokens found in the cache.", "prefix_hits_tokens"),
    Series("num_preemptions", "Requests preempted.", "num_preemptions"),
    Series("preempted_tokens", "Computed tokens that preemptions lost.", "num_preempted_tokens"),
    Series("engine_prompt_tokens", "Prompt tokens computed or found cached.", "num_prompt_tokens"),
    Series("engine_generation_tokens", "Tokens sampled.", "num_output_tokens"),
    Series("engine_steps", "Steps run.", "num_steps"),
    Series("engine_aborts", "Requests freed before their end.", "num_cancelled"),
)
ENGINE_GAUGES = (
    Series("num_requests_running", "Requests in the batch.", "num_running"),
    Series("num_requests_waiting", "Requests queued.", "num_waiting"),
    Series("num_background_running", "Batch requests that yield.", "num_background_running"),
    Series("num_background_waiting", "The same, queued.", "num_background_waiting"),
    Series("num_tokens_waiting", "Prompt tokens queued.", "num_waiting_tokens"),
    Series("kv_blocks", "KV blocks in the pool.", "num_blocks_total"),
    Series("kv_blocks_free", "KV blocks never used or evicted.", "num_blocks_free"),
    Series("kv_blocks_cached", "Unreferenced blocks with a prefix.", "num_blocks_cached"),
    Series("kv_blocks_held", "KV blocks that requests hold.", "num_blocks_held"),
    Series("kv_wasted_ratio", "Reserved but unused share of held KV.", "kv_wasted_fraction"),
    Series(
        "predicted_time_to_first_token_seconds",
        "For a request that arrived now.",
        "predicted_ttft_ms",
        0.001,
    ),
)
MACHINE_COUNTERS = (
    Series("cpu_throttled_seconds", "Held back by the cgroup's quota.", "throttled_s"),
    Series("cpu_throttled_periods", "Quota periods in which that was so.", "num_throttled"),
    Series("cpu_steal_seconds", "Processor time that went to other guests.", "steal_s"),
    Series("cpu_machine_seconds", "Processor time that passed, all processors.", "total_s"),
)
STEP_PARTS = ("schedule", "prepare", "forward", "sample", "update", "publish")
ENGINE_REASONS = ("stop", "length", "abort", "error", "timeout")
CPU_PARTS = ("kernels", "engine", "server")
TARGETS = ("ttft", "tpot")


class _CaudalCollector(Collector):
    """Reads the instruments when Prometheus asks, so that observing stays free of its locks."""

    def __init__(self, source: MetricsSource) -> None:
        self._source = source
        self._machine = Machine()

    def collect(self) -> Iterator[Family]:
        machine = self._machine.read()
        yield from self._server_families()
        yield from self._engine_families()
        yield from self._machine_families(machine)

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
        yield from self._queue_families(gauges)
        used = gauges.num_blocks_held / max(1, gauges.num_blocks_total)
        yield _gauge(Series("kv_cache_usage_ratio", "Held share of the KV blocks.", ""), used)
        wasted = gauges.num_blocks_held * gauges.kv_wasted_fraction
        yield _gauge(Series("kv_blocks_wasted", "Reserved but unused, in blocks.", ""), wasted)
        ready = Series("engine_ready", "1 once a step has run and while the engine lives.", "")
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

    def _queue_families(self, gauges: EngineGauges) -> Iterator[Family]:
        preparing = self._source.num_preparing
        yield _gauge(Series("num_requests_preparing", "Being read or tokenized.", ""), preparing)
        depth = Series("queue_depth", "Requests waiting or being prepared.", "")
        yield _gauge(depth, gauges.num_waiting + preparing)

    def _machine_families(self, machine: MachineCounters) -> Iterator[Family]:
        for series in MACHINE_COUNTERS:
            yield _counter(series, getattr(machine, series.field))
        spent = LabelledCounter("part", CPU_PARTS)
        spent.increment("server", machine.process_s)
        for part, milliseconds in self._source.engine_gauges.cpu_ms.items():
            spent.increment(part, milliseconds / 1000.0)
        yield _labelled("cpu_seconds", "Processor time; kernels are part of engine.", spent)
        targets = GaugeMetricFamily(
            "caudal_target_seconds", "What the scheduler aims at; 0: nothing.", labels=["target"]
        )
        for target in TARGETS:
            targets.add_metric([target], self._source.targets_ms.get(target, 0.0) / 1000.0)
        yield targets


def _counter(series: Series, value: float) -> Family:
    return CounterMetricFamily(f"caudal_{series.name}", series.help, value=value)


def _gauge(series: Series, value: float) -> Family:
    return GaugeMetricFamily(f"caudal_{series.name}", series.help, value=value)


def _labelled(name: str, text: str, counter: LabelledCounter) -> Family:
    family = CounterMetricFamily(f"caudal_{name}", text, labels=[counter.label])
    for label, value in counter.values.items():
        family.add_metric([label], value)
    return family


class Exposition:
    """A private registry over one source: nothing is registered globally."""

    content_type = b"text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, source: MetricsSource, compat: str = "none") -> None:
        """`compat`: "vllm" adds the series under vLLM's names."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_CaudalCollector(source))
        if compat == "vllm":
            from caudal.metrics.vllm_names import VllmCollector

            self._registry.register(VllmCollector(source))
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The page in Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)
