"""What metrics need to know of the engine, which they may not import."""

from __future__ import annotations

from typing import Protocol


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
