"""The same numbers under the names of vLLM's V1 engine, for boards and autoscalers made for it."""

from __future__ import annotations

from caudal.metrics.text_page import Family, Info, Names

_NAMES = Names("vllm:")

VLLM: tuple[Family, ...] = (
    _NAMES.histogram("time_to_first_token_seconds", "Time to first token.", "time_to_first_token"),
    _NAMES.histogram("inter_token_latency_seconds", "Inter-token latency.", "inter_token_latency"),
    _NAMES.histogram("time_per_output_token_seconds", "Former name of it.", "inter_token_latency"),
    _NAMES.histogram(
        "request_time_per_output_token_seconds",
        "Mean time per output token of a request.",
        "time_per_output_token",
    ),
    _NAMES.histogram("e2e_request_latency_seconds", "End-to-end latency.", "e2e_request_latency"),
    _NAMES.histogram("request_queue_time_seconds", "Time in the queue.", "queue_time"),
    _NAMES.histogram("request_prefill_time_seconds", "First step to first token.", "prefill_time"),
    _NAMES.histogram("request_decode_time_seconds", "First token to last.", "decode_time"),
    _NAMES.histogram(
        "request_inference_time_seconds", "First step to last token.", "inference_time"
    ),
    _NAMES.histogram("request_prompt_tokens", "Prompt tokens of a request.", "prompt_length"),
    _NAMES.histogram("request_generation_tokens", "Output tokens of a request.", "output_tokens"),
    _NAMES.counter("prompt_tokens", "Prompt tokens processed.", "metrics.prompt_tokens"),
    _NAMES.counter("generation_tokens", "Tokens generated.", "metrics.generation_tokens"),
    _NAMES.counter(
        "prefix_cache_queries", "Prompt tokens looked up.", "engine.prefix_queries_tokens"
    ),
    _NAMES.counter("prefix_cache_hits", "Prompt tokens found cached.", "engine.prefix_hits_tokens"),
    _NAMES.counter(
        "gpu_prefix_cache_queries", "Former name of it.", "engine.prefix_queries_tokens"
    ),
    _NAMES.counter("gpu_prefix_cache_hits", "Former name of it.", "engine.prefix_hits_tokens"),
    _NAMES.counter("num_preemptions", "Preemptions.", "engine.num_preemptions"),
    _NAMES.counter("spec_decode_num_drafts", "Rows with guessed tokens.", "engine.num_drafts"),
    _NAMES.counter(
        "spec_decode_num_draft_tokens", "Guessed tokens computed.", "engine.num_draft_tokens"
    ),
    _NAMES.counter(
        "spec_decode_num_accepted_tokens",
        "Guessed tokens that were right.",
        "engine.num_accepted_tokens",
    ),
    _NAMES.gauge("num_requests_running", "Requests running.", "engine.num_running"),
    _NAMES.gauge("num_requests_waiting", "Requests waiting.", "engine.num_waiting"),
    _NAMES.gauge("kv_cache_usage_perc", "KV cache usage; 1 is full.", "kv_used"),
    _NAMES.gauge("gpu_cache_usage_perc", "KV cache usage; 1 is full.", "kv_used"),
    _NAMES.reasons("request_success", "Requests that ended.", "successes", "finished_reason"),
)
"""Series with the labels `model_name` and `engine`."""
VLLM_CACHE = Info("vllm:cache_config_info", "The KV cache.", "cache_labels")
"""With the label `engine` only."""
