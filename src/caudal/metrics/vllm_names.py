"""The same numbers under the names of vLLM's V1 engine, for boards and autoscalers made for it."""

from __future__ import annotations

from caudal.metrics.text_page import ByLabel, Distribution, Family, Info, Value


def _histogram(name: str, text: str, field: str) -> Family:
    return Distribution(f"vllm:{name}", text, f"metrics.{field}")


def _counter(name: str, text: str, path: str) -> Family:
    return Value("counter", f"vllm:{name}_total", text, path)


def _gauge(name: str, text: str, path: str) -> Family:
    return Value("gauge", f"vllm:{name}", text, path)


VLLM: tuple[Family, ...] = (
    _histogram("time_to_first_token_seconds", "Time to first token.", "time_to_first_token"),
    _histogram("inter_token_latency_seconds", "Inter-token latency.", "inter_token_latency"),
    _histogram("time_per_output_token_seconds", "Former name of it.", "inter_token_latency"),
    _histogram(
        "request_time_per_output_token_seconds",
        "Mean time per output token of a request.",
        "time_per_output_token",
    ),
    _histogram("e2e_request_latency_seconds", "End-to-end latency.", "e2e_request_latency"),
    _histogram("request_queue_time_seconds", "Time in the queue.", "queue_time"),
    _histogram("request_prefill_time_seconds", "First step to first token.", "prefill_time"),
    _histogram("request_decode_time_seconds", "First token to last.", "decode_time"),
    _histogram("request_inference_time_seconds", "First step to last token.", "inference_time"),
    _histogram("request_prompt_tokens", "Prompt tokens of a request.", "prompt_length"),
    _histogram("request_generation_tokens", "Output tokens of a request.", "output_tokens"),
    _counter("prompt_tokens", "Prompt tokens processed.", "metrics.prompt_tokens"),
    _counter("generation_tokens", "Tokens generated.", "metrics.generation_tokens"),
    _counter("prefix_cache_queries", "Prompt tokens looked up.", "engine.prefix_queries_tokens"),
    _counter("prefix_cache_hits", "Prompt tokens found cached.", "engine.prefix_hits_tokens"),
    _counter("gpu_prefix_cache_queries", "Former name of it.", "engine.prefix_queries_tokens"),
    _counter("gpu_prefix_cache_hits", "Former name of it.", "engine.prefix_hits_tokens"),
    _counter("num_preemptions", "Preemptions.", "engine.num_preemptions"),
    _gauge("num_requests_running", "Requests running.", "engine.num_running"),
    _gauge("num_requests_waiting", "Requests waiting.", "engine.num_waiting"),
    _gauge("kv_cache_usage_perc", "KV cache usage; 1 is full.", "kv_used"),
    _gauge("gpu_cache_usage_perc", "KV cache usage; 1 is full.", "kv_used"),
    ByLabel(
        "counter",
        "vllm:request_success_total",
        "Requests that ended.",
        "finished_reason",
        "successes",
    ),
)
"""Series with the labels `model_name` and `engine`."""
VLLM_CACHE = Info("vllm:cache_config_info", "The KV cache.", "cache_labels")
"""With the label `engine` only."""
