"""Answers of `/caudal/live`, `/caudal/requests` and `/caudal/history`, and their queries."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Value = str | int | float | bool | None


class Spread(msgspec.Struct, frozen=True):
    """Percentiles of a latency in milliseconds; null without observations."""

    count: int
    p50: float | None
    p95: float | None
    p99: float | None


class LiveModel(msgspec.Struct, frozen=True):
    """The model that is served."""

    name: str
    architecture: str
    quantization: str
    num_parameters: int
    weights_bytes: int
    """In the file."""
    max_model_len: int


class LiveEngine(msgspec.Struct, frozen=True):
    """What is fixed since the engine has started."""

    isa: str
    num_threads: int
    block_size: int
    max_num_seqs: int
    load_ms: float
    memory_plan: dict[str, int]
    """Bytes by purpose: weights, kv_cache, scratch, available."""
    settings: dict[str, Value]
    """Configuration of scheduler and cache by field: ttft_ms, tpot_ms, max_num_seqs …"""


class LiveQueue(msgspec.Struct, frozen=True):
    """Requests now; the batch ones yield to all others and are part of running and waiting."""

    running: int
    waiting: int
    preparing: int
    """Being read or tokenized by the server."""
    depth: int
    """waiting + preparing."""
    waiting_tokens: int
    batch_running: int
    batch_waiting: int
    predicted_ttft_ms: float
    """For a request that would arrive now."""


class LiveBlocks(msgspec.Struct, frozen=True):
    """KV blocks now: used + cached + free = total."""

    total: int
    used: int
    cached: int
    """Hold a reusable prefix, and give way when somebody needs the place."""
    free: int
    wasted_ratio: float
    """Reserved but unused share of what is used."""


class LiveRates(msgspec.Struct, frozen=True):
    """Per second, over the last `seconds`."""

    seconds: float
    requests: float
    prompt_tokens: float
    """Of accepted requests, cached ones included."""
    output_tokens: float
    batch_output_tokens: float
    steps: float


class LiveMinute(msgspec.Struct, frozen=True):
    """What happened in the last `seconds`, a minute once the server is that old."""

    seconds: float
    requests: int
    finished: dict[str, int]
    """By reason: stop, length, abort, error, timeout."""
    rejected: dict[str, int]
    """By reason; those that did not happen are absent."""
    cancelled: int
    preemptions: int
    preempted_tokens: int
    """Computed tokens that preemptions lost."""
    cache_query_tokens: int
    cache_hit_tokens: int
    cache_hit_rate: float | None
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    queue_ms: Spread
    step_ms: float | None
    """Mean milliseconds of a step, all parts together."""
    step_parts_ms: dict[str, float]
    """Mean milliseconds of a step by part: schedule, prepare, forward, sample, update, publish."""
    cpu_outside_kernels: float | None
    """Share of both processes' processor time that was not spent in forward passes."""
    throttled_ratio: float
    """Seconds that the cgroup's quota held processes back, per second."""
    steal_ratio: float | None
    """Share of the machine's processor time that the hypervisor gave to others."""


class LiveRequest(msgspec.Struct, frozen=True):
    """A request that the engine has accepted and not yet ended (one per choice)."""

    id: str
    """The first characters of its id."""
    state: Literal["waiting", "prefill", "decode"]
    """waiting: not scheduled yet, or preempted; prefill: no token has come out yet."""
    prompt_tokens: int
    computed_tokens: int | None
    """Tokens whose KV is there; null where the engine did not say in time."""
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    age_s: float
    ttft_ms: float | None
    tokens_per_s: float | None
    """Since its first token."""
    preemptions: int
    is_batch: bool


class LiveSnapshot(msgspec.Struct, frozen=True):
    """The server now."""

    time: float
    """Seconds since the epoch."""
    status: Literal["loading", "ready", "draining", "down"]
    version: str
    uptime_s: float
    engine_restarts: int
    model: LiveModel | None
    """null while it loads."""
    engine: LiveEngine | None
    """null while it is not ready."""
    queue: LiveQueue
    blocks: LiveBlocks
    rates: LiveRates
    minute: LiveMinute
    requests: list[LiveRequest]
    """Oldest first, at most 256 of them."""
    num_requests: int


class RequestsQuery(msgspec.Struct, frozen=True):
    """Query of `/caudal/requests`."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 256


class Table(msgspec.Struct, frozen=True):
    """Rows of numbers, oldest first; null where there is nothing to tell."""

    columns: list[str]
    rows: list[list[Value]]


class HistoryQuery(msgspec.Struct, frozen=True):
    """Query of `/caudal/history`."""

    window: Literal["1h", "24h", "7d", "30d"] = "1h"
    step: Annotated[int, msgspec.Meta(ge=60, le=86_400)] | None = None
    """Seconds of a row, rounded up to what keeps the answer within 720 rows."""


class History(msgspec.Struct, frozen=True):
    """Aggregates over time; the columns are in docs/http-api.md."""

    window: str
    step: int
    """Seconds of a row; `t` is where it begins."""
    is_kept: bool
    """False: in memory only, because the data directory cannot be used."""
    columns: list[str]
    rows: list[list[float | None]]
