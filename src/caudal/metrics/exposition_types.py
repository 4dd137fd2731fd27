"""What the exposition reads: the engine and the server, which it may not import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from caudal.metrics.server_metrics import ServerMetrics


class EngineGauges(Protocol):
    """The engine's gauges and counters, as its messages carry them."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_background_running: int
    num_background_waiting: int
    num_blocks_total: int
    num_blocks_free: int
    num_blocks_cached: int
    num_blocks_held: int
    kv_wasted_fraction: float
    num_preemptions: int
    num_preempted_tokens: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    num_rejected: dict[str, int]
    num_cancelled: int
    num_finished: dict[str, int]
    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int
    step_ms: dict[str, float]
    cpu_ms: dict[str, float]
    predicted_ttft_ms: float


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


@dataclass(frozen=True, slots=True)
class Series:
    """A series of the page: its name without prefix, its help and where its value is."""

    name: str
    help: str
    field: str
    scale: float = 1.0
