"""Caudal's own series; `docs/metrics.md` describes each."""

from __future__ import annotations

from caudal.metrics.reading import STEP_PARTS
from caudal.metrics.server_metrics import FINISH_REASONS
from caudal.metrics.text_page import ByLabel, Family, Info, Names

_MS = 0.001
CPU_PARTS = ("kernels", "engine", "server")
TARGETS = ("ttft", "tpot")


_NAMES = Names("caudal_")


_SERVER = (
    _NAMES.histogram(
        "time_to_first_token_seconds", "Arrival to first token.", "time_to_first_token"
    ),
    _NAMES.histogram(
        "time_per_output_token_seconds",
        "Mean time per output token after the first, per request.",
        "time_per_output_token",
    ),
    _NAMES.histogram(
        "inter_token_latency_seconds", "Time between output tokens.", "inter_token_latency"
    ),
    _NAMES.histogram(
        "e2e_request_latency_seconds", "Arrival to last token.", "e2e_request_latency"
    ),
    _NAMES.histogram("request_queue_time_seconds", "Arrival to first step.", "queue_time"),
    _NAMES.histogram("request_prefill_time_seconds", "First step to first token.", "prefill_time"),
    _NAMES.histogram("request_decode_time_seconds", "First token to last.", "decode_time"),
    _NAMES.histogram("request_prompt_tokens", "Prompt tokens per request.", "prompt_length"),
    _NAMES.histogram("request_generation_tokens", "Output tokens per request.", "output_tokens"),
    _NAMES.counter(
        "requests_received", "Generation requests that have come in.", "metrics.requests_received"
    ),
    _NAMES.counter(
        "requests_cancelled", "Requests whose client left.", "metrics.requests_cancelled"
    ),
    _NAMES.counter(
        "slow_readers_cut", "Streams closed because nobody read them.", "metrics.slow_readers_cut"
    ),
    _NAMES.counter(
        "engine_restarts", "Times the engine process was restarted.", "metrics.engine_restarts"
    ),
    _NAMES.counter("prompt_tokens", "Prompt tokens of accepted requests.", "metrics.prompt_tokens"),
    _NAMES.counter("generation_tokens", "Output tokens delivered.", "metrics.generation_tokens"),
    _NAMES.reasons("requests_finished", "Requests by finish.", "metrics.requests_finished.values"),
    _NAMES.reasons("requests_rejected", "Requests refused.", "metrics.requests_rejected.values"),
    _NAMES.counter(
        "batch_prompt_tokens", "Prompt tokens of batch requests.", "batch.prompt_tokens"
    ),
    _NAMES.counter(
        "batch_generation_tokens", "Output tokens of batch requests.", "batch.generation_tokens"
    ),
    _NAMES.reasons(
        "batch_requests_finished", "Choices of batches by finish.", "batch.requests_finished.values"
    ),
)
_ENGINE = (
    _NAMES.counter(
        "prefix_cache_queries", "Prompt tokens looked up.", "engine.prefix_queries_tokens"
    ),
    _NAMES.counter(
        "prefix_cache_hits", "Prompt tokens found in the cache.", "engine.prefix_hits_tokens"
    ),
    _NAMES.counter("num_preemptions", "Requests preempted.", "engine.num_preemptions"),
    _NAMES.counter(
        "preempted_tokens",
        "Computed tokens that preemptions lost.",
        "engine.num_preempted_tokens",
    ),
    _NAMES.counter(
        "engine_prompt_tokens",
        "Prompt tokens computed or found cached.",
        "engine.num_prompt_tokens",
    ),
    _NAMES.counter("engine_generation_tokens", "Tokens sampled.", "engine.num_output_tokens"),
    _NAMES.counter("spec_decode_num_drafts", "Rows with guessed tokens.", "engine.num_drafts"),
    _NAMES.counter(
        "spec_decode_num_draft_tokens", "Guessed tokens computed.", "engine.num_draft_tokens"
    ),
    _NAMES.counter(
        "spec_decode_num_accepted_tokens",
        "Guessed tokens that were right.",
        "engine.num_accepted_tokens",
    ),
    _NAMES.counter("engine_steps", "Steps run.", "engine.num_steps"),
    _NAMES.counter(
        "engine_steps_interrupted",
        "Steps of batches that ended early for others.",
        "engine.num_interrupted_steps",
    ),
    _NAMES.counter("engine_aborts", "Requests freed before their end.", "engine.num_cancelled"),
    _NAMES.gauge("num_requests_running", "Requests in the batch.", "engine.num_running"),
    _NAMES.gauge("num_requests_waiting", "Requests queued.", "engine.num_waiting"),
    _NAMES.gauge(
        "num_background_running", "Batch requests that yield.", "engine.num_background_running"
    ),
    _NAMES.gauge("num_background_waiting", "The same, queued.", "engine.num_background_waiting"),
    _NAMES.gauge("num_tokens_waiting", "Prompt tokens queued.", "engine.num_waiting_tokens"),
    _NAMES.gauge("kv_blocks", "KV blocks in the pool.", "engine.num_blocks_total"),
    _NAMES.gauge("kv_blocks_free", "KV blocks never used or evicted.", "engine.num_blocks_free"),
    _NAMES.gauge(
        "kv_blocks_cached", "Unreferenced blocks with a prefix.", "engine.num_blocks_cached"
    ),
    _NAMES.gauge("kv_blocks_held", "KV blocks that requests hold.", "engine.num_blocks_held"),
    _NAMES.gauge(
        "kv_wasted_ratio", "Reserved but unused share of held KV.", "engine.kv_wasted_fraction"
    ),
    _NAMES.gauge(
        "predicted_time_to_first_token_seconds",
        "For a request that arrived now.",
        "engine.predicted_ttft_ms",
        _MS,
    ),
    _NAMES.gauge("num_requests_preparing", "Being read or tokenized.", "num_preparing"),
    _NAMES.gauge("queue_depth", "Requests waiting or being prepared.", "queue_depth"),
    _NAMES.gauge("kv_cache_usage_ratio", "Held share of the KV blocks.", "kv_used"),
    _NAMES.gauge("kv_blocks_wasted", "Reserved but unused, in blocks.", "num_blocks_wasted"),
    _NAMES.gauge(
        "engine_ready", "1 once a step has run and while the engine lives.", "is_engine_ready"
    ),
    ByLabel(
        "counter",
        "caudal_step_time_seconds_total",
        "Time in steps by part.",
        "part",
        "engine.step_ms",
        STEP_PARTS,
        _MS,
    ),
    _NAMES.reasons(
        "engine_requests_finished",
        "As the engine saw them.",
        "engine.num_finished",
        known=FINISH_REASONS,
    ),
    Info("caudal_model_info", "The model that is served.", "model_labels"),
)
_MACHINE = (
    _NAMES.counter(
        "cpu_throttled_seconds", "Held back by the cgroup's quota.", "machine.throttled_s"
    ),
    _NAMES.counter(
        "cpu_throttled_periods", "Quota periods in which that was so.", "machine.num_throttled"
    ),
    _NAMES.counter(
        "cpu_steal_seconds", "Processor time that went to other guests.", "machine.steal_s"
    ),
    _NAMES.counter(
        "cpu_machine_seconds", "Processor time that passed, all processors.", "machine.total_s"
    ),
    ByLabel(
        "counter",
        "caudal_cpu_seconds_total",
        "Processor time; kernels are part of engine.",
        "part",
        "cpu_ms",
        CPU_PARTS,
        _MS,
    ),
    ByLabel(
        "gauge",
        "caudal_target_seconds",
        "What the scheduler aims at; 0: nothing.",
        "target",
        "targets_ms",
        TARGETS,
        _MS,
    ),
)
CAUDAL: tuple[Family, ...] = (*_SERVER, *_ENGINE, *_MACHINE)
"""All series, in the order of the page."""
