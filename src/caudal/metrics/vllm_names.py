"""The same numbers under the names of vLLM's V1 engine, for boards and autoscalers made for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from caudal.metrics.exposition_types import MetricsSource, Series
from caudal.metrics.instruments import Histogram

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

_LABELS = ("model_name", "engine")
_ENGINE = "0"

HISTOGRAMS = (
    Series("time_to_first_token_seconds", "Time to first token.", "time_to_first_token"),
    Series("inter_token_latency_seconds", "Inter-token latency.", "inter_token_latency"),
    Series("time_per_output_token_seconds", "Former name of it.", "inter_token_latency"),
    Series(
        "request_time_per_output_token_seconds",
        "Mean time per output token of a request.",
        "time_per_output_token",
    ),
    Series("e2e_request_latency_seconds", "End-to-end latency.", "e2e_request_latency"),
    Series("request_queue_time_seconds", "Time in the queue.", "queue_time"),
    Series("request_prefill_time_seconds", "First step to first token.", "prefill_time"),
    Series("request_decode_time_seconds", "First token to last.", "decode_time"),
    Series("request_inference_time_seconds", "First step to last token.", "inference_time"),
    Series("request_prompt_tokens", "Prompt tokens of a request.", "prompt_length"),
    Series("request_generation_tokens", "Output tokens of a request.", "output_tokens"),
)
SERVER_COUNTERS = (
    Series("prompt_tokens", "Prompt tokens processed.", "prompt_tokens"),
    Series("generation_tokens", "Tokens generated.", "generation_tokens"),
)
ENGINE_COUNTERS = (
    Series("prefix_cache_queries", "Prompt tokens looked up.", "prefix_queries_tokens"),
    Series("prefix_cache_hits", "Prompt tokens found cached.", "prefix_hits_tokens"),
    Series("gpu_prefix_cache_queries", "Former name of it.", "prefix_queries_tokens"),
    Series("gpu_prefix_cache_hits", "Former name of it.", "prefix_hits_tokens"),
    Series("num_preemptions", "Preemptions.", "num_preemptions"),
)
GAUGES = (
    Series("num_requests_running", "Requests running.", "num_running"),
    Series("num_requests_waiting", "Requests waiting.", "num_waiting"),
)
USAGE = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
"""Today's name and the former one; 1 is full."""
REASONS = ("stop", "length", "abort", "error")


class VllmCollector(Collector):
    """Reads the same instruments as Caudal's own series."""

    def __init__(self, source: MetricsSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Family]:
        metrics, gauges = self._source.metrics, self._source.engine_gauges
        labels = [self._source.model_labels["model_name"], _ENGINE]
        for series in HISTOGRAMS:
            histogram: Histogram = getattr(metrics, series.field)
            family = HistogramMetricFamily(f"vllm:{series.name}", series.help, labels=_LABELS)
            family.add_metric(labels, histogram.cumulative_buckets(), histogram.sum)
            yield family
        for series in SERVER_COUNTERS:
            yield _counter(series, getattr(metrics, series.field), labels)
        for series in ENGINE_COUNTERS:
            yield _counter(series, getattr(gauges, series.field), labels)
        for series in GAUGES:
            yield _gauge(series.name, series.help, getattr(gauges, series.field), labels)
        used = gauges.num_blocks_held / max(1, gauges.num_blocks_total)
        for name in USAGE:
            yield _gauge(name, "KV cache usage; 1 is full.", used, labels)
        yield _successes(metrics.requests_finished.values, labels)
        cache = {"engine": _ENGINE, **self._source.cache_labels}
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=list(cache))
        info.add_metric(list(cache.values()), 1.0)
        yield info


def _successes(finished: Mapping[str, float], labels: list[str]) -> Family:
    """Requests by finish; a timeout is an abort there."""
    family = CounterMetricFamily(
        "vllm:request_success", "Requests that ended.", labels=[*_LABELS, "finished_reason"]
    )
    for reason in REASONS:
        count = finished.get(reason, 0.0)
        if reason == "abort":
            count += finished.get("timeout", 0.0)
        family.add_metric([*labels, reason], count)
    return family


def _counter(series: Series, value: float, labels: list[str]) -> Family:
    family = CounterMetricFamily(f"vllm:{series.name}", series.help, labels=_LABELS)
    family.add_metric(labels, value)
    return family


def _gauge(name: str, text: str, value: float, labels: list[str]) -> Family:
    family = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
    family.add_metric(labels, value)
    return family
