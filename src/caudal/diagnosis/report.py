"""What a diagnosis works on, and what it says; all of it travels as JSON."""

from __future__ import annotations

import msgspec

from caudal.scheduler.step_cost import StepCosts


class LoadRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request as it was served; no text, no ids."""

    arrival_s: float
    """Seconds on any clock that all records share."""
    num_prompt_tokens: int
    num_output_tokens: int = 0
    max_tokens: int = 0
    num_cached_tokens: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    num_waiting: int = 0
    """Requests that waited in the engine when this one came."""
    num_running: int = 0
    kv_used: float = 0.0
    """Share of the KV blocks that requests held then."""
    num_preemptions: int = 0
    is_refused: bool = False
    prefix_ids: tuple[int, ...] = ()
    """One per full block from the prompt's start: equal ids stand for equal beginnings."""


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How a server is configured, and what it has learnt of its machine."""

    model: str = ""
    costs: StepCosts = StepCosts()
    num_blocks: int = 0
    block_size: int = 16
    max_model_len: int = 0
    settings: dict[str, str | int | float | bool | None] = {}
    """Fields of SchedulerConfig and CacheConfig by name."""
    kv_block_bytes: dict[str, int] = {}
    memory: dict[str, int] = {}
    """Bytes by purpose: weights, kv_cache, scratch, available."""
    num_threads: int = 1
    num_cores: int = 1
    """Physical cores that the server may use."""


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """Where the machine's time went; None: not known."""

    outside_kernels: float | None = None
    """Share of the step time that was not spent in the forward pass."""
    throttled: float | None = None
    """Share of the time in which the cgroup's quota held processes back."""
    steal: float | None = None
    """Share of the processors' time that the hypervisor gave to others."""
    load_per_core: float | None = None
    """Runnable processes and threads (load average of a minute) per core."""


class ReorderHint(msgspec.Struct, frozen=True, kw_only=True):
    """What the prefix lint found in many requests: one change early in their prompts."""

    token: int
    """Where the prompts begin to differ."""
    num_requests: int
    num_lost_tokens: int
    """Per request: equal tokens behind the change, which the cache cannot use there."""
    share_lost: float
    """Of the prompt tokens of these requests."""
    lost_ms: float
    """Per request."""


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of the history."""

    seconds: int
    """That were asked for, up to now."""
    minutes: msgspec.Raw
    """MessagePack of a list of (start in seconds since the epoch, Aggregate), oldest first."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is looked at. Travels as MessagePack."""

    records: list[LoadRecord]
    """In order of arrival."""
    facts: ServerFacts
    host: HostReport = HostReport()
    hints: list[ReorderHint] = []
    past: Past | None = None
    """Look at this instead of the records."""


class Evidence(msgspec.Struct, frozen=True):
    """A number that speaks for a finding."""

    metric: str
    value: float
    threshold: float
    text: str


class Prediction(msgspec.Struct, frozen=True, rename={"before": "from", "after": "to"}):
    """What a remedy would change, by simulating the recorded load on the engine's cost model."""

    metric: str
    before: float
    after: float
    gain_percent: float
    """Positive is better."""


class Remedy(msgspec.Struct, frozen=True):
    """Something to do about a finding."""

    action: str
    """A stable name."""
    flag: str
    """Of `caudal serve`; empty: it is no flag."""
    cost: str
    """What it takes: nothing, quality, answers, memory, hardware …"""
    predicted: Prediction | None
    text: str


class Finding(msgspec.Struct, frozen=True):
    """Something that limits the server, and its remedies, cheapest first."""

    id: str
    title: str
    severity: str
    """critical, warning or info."""
    evidence: list[Evidence]
    remedies: list[Remedy]


class WorstHour(msgspec.Struct, frozen=True, kw_only=True):
    """The hour of the clock in which requests waited longest."""

    start: int
    """Seconds since the epoch."""
    num_requests: int
    """That came; refused ones included."""
    num_refused: int
    """For want of capacity."""
    ttft_p95_ms: float | None
    queue_depth: float
    """Requests that waited, on average."""
    kv_used: float
    """Greatest share of the KV cache that was held."""
    load: float | None
    """Work that came, over what the machine can do by the engine's cost model."""


class PastSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a diagnosis from the history looked at."""

    seconds: int
    """That were asked for."""
    observed_s: float
    """Of these, so many were recorded."""
    num_busy_minutes: int
    """In which requests came."""
    worst_hour: WorstHour | None
    """None: too few requests."""
    note: str
    """Why there are no findings or no predictions; empty: there may be both."""


class Diagnosis(msgspec.Struct, frozen=True):
    """What a diagnosis came to."""

    findings: list[Finding]
    """Most severe first; empty: nothing limits the server noticeably."""
    num_requests: int
    """That were looked at."""
    window_s: float
    """From the first of them to the last."""
    model_error_percent: float | None = None
    """How far the simulated TTFT (p95) is from the measured one; None: too little to tell."""
    calibration: float = 1.0
    """By which the engine's costs were multiplied to come that close."""
    serve_flags: list[str] = []
    """Flags that start a server configured as this one."""
    past: PastSummary | None = None
    """Of the history, if that was looked at instead of the latest requests."""
