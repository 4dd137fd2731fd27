"""The columns of the history: names, and how an aggregate fills them."""

from __future__ import annotations

from collections.abc import Callable

from caudal.metrics.reading import (
    LATENCIES,
    QUANTILES,
    STEP_PARTS,
    Aggregate,
    Level,
    outside_kernels,
    percentiles_ms,
    share,
)
from caudal.metrics.server_metrics import REJECTION_REASONS

Cell = float | None

_FINISHED = ("stop", "length")
_FAILED = ("error", "timeout")


def _counter(name: str) -> Callable[[Aggregate], Cell]:
    return lambda aggregate: aggregate.counters.get(name, 0.0)


def _sum_of(family: str, labels: tuple[str, ...]) -> Callable[[Aggregate], Cell]:
    names = [f"{family}.{label}" for label in labels]
    return lambda aggregate: sum(aggregate.counters.get(name, 0.0) for name in names)


def _level(aggregate: Aggregate, name: str) -> Level:
    return aggregate.levels.get(name) or Level()


def _mean(name: str) -> Callable[[Aggregate], Cell]:
    return lambda aggregate: round(_level(aggregate, name).mean, 4)


def _greatest(name: str) -> Callable[[Aggregate], Cell]:
    return lambda aggregate: _level(aggregate, name).greatest


def _used_share(name: str, *, is_mean: bool) -> Callable[[Aggregate], Cell]:
    def compute(aggregate: Aggregate) -> Cell:
        level = _level(aggregate, name)
        total = _level(aggregate, "num_blocks_total").greatest
        return share(level.mean if is_mean else level.greatest, total)

    return compute


def _hit_rate(aggregate: Aggregate) -> Cell:
    counters = aggregate.counters
    hits = counters.get("prefix_hits_tokens", 0.0)
    return share(hits, counters.get("prefix_queries_tokens", 0.0))


def _steal(aggregate: Aggregate) -> Cell:
    return share(aggregate.counters.get("steal_s", 0.0), aggregate.counters.get("machine_s", 0.0))


_SIMPLE: dict[str, Callable[[Aggregate], Cell]] = {
    "seconds": lambda aggregate: round(aggregate.seconds, 3),
    "requests": _counter("requests_received"),
    "finished": _sum_of("finished", _FINISHED),
    "failed": _sum_of("finished", _FAILED),
    "cancelled": _counter("requests_cancelled"),
    "rejected": lambda aggregate: aggregate.total("rejected"),
    **{f"rejected_{reason}": _counter(f"rejected.{reason}") for reason in REJECTION_REASONS},
    "prompt_tokens": _counter("prompt_tokens"),
    "output_tokens": _counter("generation_tokens"),
    "cached_tokens": _counter("prefix_hits_tokens"),
    "hit_rate": _hit_rate,
    "batch_prompt_tokens": _counter("batch_prompt_tokens"),
    "batch_output_tokens": _counter("batch_generation_tokens"),
    "running_mean": _mean("num_running"),
    "running_max": _greatest("num_running"),
    "waiting_mean": _mean("num_waiting"),
    "waiting_max": _greatest("num_waiting"),
    "queue_depth_mean": _mean("queue_depth"),
    "queue_depth_max": _greatest("queue_depth"),
    "waiting_tokens_mean": _mean("num_waiting_tokens"),
    "waiting_tokens_max": _greatest("num_waiting_tokens"),
    "predicted_ttft_ms_max": _greatest("predicted_ttft_ms"),
    "kv_used_mean": _used_share("num_blocks_held", is_mean=True),
    "kv_used_max": _used_share("num_blocks_held", is_mean=False),
    "kv_cached_mean": _used_share("num_blocks_cached", is_mean=True),
    "kv_wasted_mean": _mean("kv_wasted_fraction"),
    "preemptions": _counter("num_preemptions"),
    "preempted_tokens": _counter("num_preempted_tokens"),
    "steps": _counter("num_steps"),
    **{f"step_{part}_ms": _counter(f"step_ms.{part}") for part in STEP_PARTS},
    "cpu_outside_kernels": outside_kernels,
    "throttled_s": _counter("throttled_s"),
    "steal_ratio": _steal,
    "engine_restarts": _counter("engine_restarts"),
}

COLUMNS: tuple[str, ...] = (
    "t",
    *_SIMPLE,
    *(f"{name}_ms_{quantile}" for name in LATENCIES for quantile, _ in QUANTILES),
)


def make_row(start: int, aggregate: Aggregate) -> list[Cell]:
    """Values of `COLUMNS` for the stretch that begins at `start` (seconds since the epoch)."""
    row: list[Cell] = [float(start)]
    for compute in _SIMPLE.values():
        value = compute(aggregate)
        row.append(None if value is None else round(value, 4))
    for name in LATENCIES:
        row.extend(percentiles_ms(aggregate.histograms.get(name)))
    return row
