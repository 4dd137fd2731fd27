"""The page that Prometheus scrapes, from the cheap instruments and the engine's latest gauges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from caudal.metrics.caudal_names import CAUDAL
from caudal.metrics.exposition_types import EngineGauges, MetricsSource
from caudal.metrics.machine import Machine, MachineCounters
from caudal.metrics.server_metrics import ServerMetrics
from caudal.metrics.text_page import Family, Labels, Writer

_VLLM_REASONS = ("stop", "length", "abort", "error")
_VLLM_ENGINE = ("engine", "0")


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one page is written from; the paths of the families begin here."""

    source: MetricsSource
    machine: MachineCounters
    metrics: ServerMetrics
    batch: ServerMetrics
    engine: EngineGauges

    @property
    def num_preparing(self) -> int:
        """Requests that the server has and the engine has not."""
        return self.source.num_preparing

    @property
    def queue_depth(self) -> int:
        """All that are not being computed."""
        return self.engine.num_waiting + self.source.num_preparing

    @property
    def kv_used(self) -> float:
        """Held share of the KV blocks."""
        return self.engine.num_blocks_held / max(1, self.engine.num_blocks_total)

    @property
    def num_blocks_wasted(self) -> float:
        """Reserved but unused."""
        return self.engine.num_blocks_held * self.engine.kv_wasted_fraction

    @property
    def is_engine_ready(self) -> bool:
        """True while the engine answers."""
        return self.source.is_engine_ready

    @property
    def cpu_ms(self) -> Mapping[str, float]:
        """Processor time of all parts."""
        return {"server": self.machine.process_s * 1000.0, **self.engine.cpu_ms}

    @property
    def targets_ms(self) -> Mapping[str, float]:
        """What the scheduler aims at."""
        return self.source.targets_ms

    @property
    def model_labels(self) -> Mapping[str, str]:
        """What is served."""
        return self.source.model_labels

    @property
    def cache_labels(self) -> Mapping[str, str]:
        """What is fixed about the KV cache."""
        return self.source.cache_labels

    @property
    def successes(self) -> Mapping[str, float]:
        """Requests by finish as vLLM counts them: a timeout is an abort there."""
        finished = self.metrics.requests_finished.values
        counts = {reason: finished.get(reason, 0.0) for reason in _VLLM_REASONS}
        counts["abort"] += finished.get("timeout", 0.0)
        return counts


class Exposition:
    """Writes the page. What it keeps are texts: names, help and labels, put together once."""

    content_type = b"text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, source: MetricsSource, compat: str = "none") -> None:
        """`compat`: "vllm" adds the series under vLLM's names."""
        self._source, self._machine = source, Machine()
        self._own = _compile(CAUDAL)
        self._is_vllm = compat == "vllm"
        self._vllm: list[Writer] = []
        self._vllm_model: str | None = None
        self._process = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._process)

    def render(self) -> bytes:
        """The page in Prometheus' text format 0.0.4."""
        source = self._source
        scrape = Scrape(
            source,
            self._machine.read(),
            source.metrics,
            source.batch_metrics,
            source.engine_gauges,
        )
        writers = [*self._own, *self._vllm_writers()]
        text = "".join([write(scrape) for write in writers])
        return text.encode() + generate_latest(self._process)

    def _vllm_writers(self) -> list[Writer]:
        """They name the model, which is not known from the start."""
        if not self._is_vllm:
            return []
        model = self._source.model_labels["model_name"]
        if model != self._vllm_model:
            from caudal.metrics.vllm_names import VLLM, VLLM_CACHE

            labels = (("model_name", model), _VLLM_ENGINE)
            self._vllm = [*_compile(VLLM, labels), VLLM_CACHE.compile((_VLLM_ENGINE,))]
            self._vllm_model = model
        return self._vllm


def _compile(families: Iterable[Family], labels: Labels = ()) -> list[Writer]:
    return [family.compile(labels) for family in families]
