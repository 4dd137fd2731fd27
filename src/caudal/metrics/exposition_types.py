"""What the exposition reads: the engine and the server, which it may not import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from caudal.metrics.server_metrics import ServerMetrics


class EngineGauges(Protocol):
    """The engine's numbers that are reckoned with; all others are read by their names."""

    num_waiting: int
    num_blocks_total: int
    num_blocks_held: int
    kv_wasted_fraction: float
    step_ms: dict[str, float]
    cpu_ms: dict[str, float]


class Observed(Protocol):
    """The numbers themselves; read when they are wanted."""

    @property
    def metrics(self) -> ServerMetrics:
        """The instruments of interactive requests."""

    @property
    def batch_metrics(self) -> ServerMetrics:
        """The same for the requests of offline batches."""

    @property
    def engine_gauges(self) -> EngineGauges:
        """The engine's latest numbers (zeros before it is ready)."""

    @property
    def num_preparing(self) -> int:
        """Requests that the server has and the engine has not."""


class MetricsSource(Observed, Protocol):
    """Where a scrape gets its numbers, and what it says about them."""

    @property
    def is_engine_ready(self) -> bool:
        """True while the engine answers."""

    @property
    def targets_ms(self) -> Mapping[str, float]:
        """What the scheduler aims at: `ttft`, `tpot`; those without a target are absent."""

    @property
    def model_labels(self) -> Mapping[str, str]:
        """Labels of the model's info metric."""

    @property
    def cache_labels(self) -> Mapping[str, str]:
        """Labels about the KV cache; empty before the engine is ready."""
