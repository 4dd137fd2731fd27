"""The flags that start a server configured as a given one."""

from __future__ import annotations

from caudal.diagnosis.report import ServerFacts

_FLAGS = {
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "batching": "--batching",
    "max_queue_requests": "--max-queue-requests",
    "max_queue_tokens": "--max-queue-tokens",
    "max_queue_ttft_s": "--max-queue-ttft",
    "kv_cache_dtype": "--kv-cache-dtype",
    "ttft_ms": "--ttft-ms",
    "tpot_ms": "--tpot-ms",
}


def serve_flags(facts: ServerFacts) -> list[str]:
    """Words for `caudal serve`, without model, address and keys."""
    settings = facts.settings
    flags: list[str] = []
    if settings.get("tpot_ms") is None and "tpot_ms" in settings:
        flags += ["--profile", "batch"]
    for name, flag in _FLAGS.items():
        value = settings.get(name)
        if value is not None:
            flags += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    if facts.max_model_len:
        flags += ["--max-model-len", str(facts.max_model_len)]
    if facts.memory.get("kv_cache"):
        flags += ["--kv-cache-memory", str(facts.memory["kv_cache"])]
    if settings.get("enable_prefix_caching") is False:
        flags.append("--no-enable-prefix-caching")
    return [*flags, "--threads", str(facts.num_threads)]


def with_flag(flags: list[str], change: str) -> list[str]:
    """`flags` with one more, which replaces its former value."""
    name, _, value = change.partition(" ")
    bare = name.removeprefix("--no-").removeprefix("--")
    kept: list[str] = []
    at = 0
    while at < len(flags):
        word = flags[at]
        has_value = at + 1 < len(flags) and not flags[at + 1].startswith("--")
        if word.removeprefix("--no-").removeprefix("--") != bare:
            kept += flags[at : at + 1 + has_value]
        at += 1 + has_value
    return [*kept, name, *([value] if value else [])]
