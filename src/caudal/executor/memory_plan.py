"""Decides, before anything loads, what memory the weights, KV cache and scratch may take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from caudal.config import CacheConfig, KVCacheDType, ModelConfig, SchedulerConfig
from caudal.errors import InsufficientMemoryError
from caudal.ops.interface import RawMatrix

DEFAULT_KV_BYTES = 4 << 30
"""KV cache unless asked otherwise; committed by the OS only as it fills."""
KV_SHARE = 0.7
"""Share of the memory left after weights and scratch that an unasked-for KV cache may take."""
MIN_MODEL_LEN = 512
"""A context shortened to fit memory is not shortened below this."""

_BITS_PER_WEIGHT = {"w4": 5.0, "w8": 8.5, "f16": 16.0, "f32": 32.0}
_FORMAT_BY_TYPE = {0: "f32", 1: "f16", 2: "w4", 3: "w4", 12: "w4", 30: "f16"}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, and what they buy."""

    weights_bytes: int
    scratch_bytes: int
    kv_cache_bytes: int
    available_bytes: int
    num_blocks: int
    max_model_len: int
    is_shortened: bool
    """True: `max_model_len` is below the model's context because memory allows no more."""

    def as_dict(self) -> dict[str, int]:
        """Bytes by purpose, for reports."""
        return {
            "weights": self.weights_bytes,
            "kv_cache": self.kv_cache_bytes,
            "scratch": self.scratch_bytes,
            "available": self.available_bytes,
        }

    def describe(self) -> str:
        """One line for people."""
        parts = [f"{name} {_mib(size)}" for name, size in self.as_dict().items()]
        num_tokens = self.num_blocks * 16
        return f"memory: {', '.join(parts)}; KV cache holds {num_tokens:,} tokens"


def plan_memory(
    model: ModelConfig,
    tensors: Iterable[RawMatrix],
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    available_bytes: int | None = None,
) -> MemoryPlan:
    """Fit weights, scratch and KV into the available memory.

    Every request may use the full context: the KV cache holds at least one. Where memory does not
    allow the model's own context it is shortened, unless --max-model-len asked for it.
    Raises InsufficientMemoryError with the sizes and the remedies.
    """
    available = read_available_memory() if available_bytes is None else available_bytes
    weights = sum(packed_bytes(tensor) for tensor in tensors)
    scratch = _scratch_bytes(model, scheduler)
    block_bytes = kv_block_bytes(model, cache)
    free = available - weights - scratch
    asked = min(scheduler.max_model_len or model.context_length, model.context_length)
    num_blocks = _choose_num_blocks(cache, scheduler, asked, block_bytes, free)
    max_model_len = min(asked, num_blocks * cache.block_size)
    is_shortened = max_model_len < asked
    is_too_short = is_shortened and (scheduler.max_model_len > 0 or max_model_len < MIN_MODEL_LEN)
    if num_blocks * block_bytes > free or (is_too_short and cache.num_blocks is None):
        wanted = max(num_blocks, _blocks(asked, cache)) * block_bytes
        raise InsufficientMemoryError(
            f"{_mib(available)} of memory is available, but weights need {_mib(weights)}, scratch "
            f"{_mib(scratch)} and a KV cache of {asked} tokens {_mib(wanted)}. Remedies: a smaller "
            "--max-model-len, --kv-cache-dtype int8, a smaller --kv-cache-memory, or a smaller "
            "model."
        )
    return MemoryPlan(
        weights_bytes=weights,
        scratch_bytes=scratch,
        kv_cache_bytes=num_blocks * block_bytes,
        available_bytes=available,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        is_shortened=is_shortened,
    )


def _choose_num_blocks(
    cache: CacheConfig, scheduler: SchedulerConfig, max_model_len: int, block_bytes: int, free: int
) -> int:
    """As asked; else enough for every sequence, within the default size and share of `free`."""
    if cache.num_blocks is not None:
        return cache.num_blocks
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes // block_bytes
    least = _blocks(max_model_len, cache)
    budget = min(free * KV_SHARE, max(DEFAULT_KV_BYTES, least * block_bytes))
    return max(0, min(scheduler.max_num_seqs * least, int(budget) // block_bytes))


def kv_block_bytes(model: ModelConfig, cache: CacheConfig) -> int:
    """Bytes of one KV block over all layers; int8 has a float32 scale per token and head."""
    is_int8 = cache.kv_cache_dtype is KVCacheDType.INT8
    per_token = model.head_dim + 4 if is_int8 else 2 * model.head_dim
    return model.num_layers * 2 * model.num_kv_heads * cache.block_size * per_token


def packed_bytes(tensor: RawMatrix) -> int:
    """Bytes of a tensor once packed for the kernels (rows padded to 16)."""
    if len(tensor.shape) < 2:
        return int(tensor.shape[0]) * 4
    rows = -(-tensor.shape[0] // 16) * 16
    bits = _BITS_PER_WEIGHT[_FORMAT_BY_TYPE.get(int(tensor.ggml_type), "w8")]
    return int(rows * tensor.shape[1] * bits / 8)


def read_available_memory(root: Path = Path("/")) -> int:
    """Bytes a new process may take: MemAvailable, or less where a cgroup limits it."""
    available = 1 << 62
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    for limit_file, usage_file in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        (
            "sys/fs/cgroup/memory/memory.limit_in_bytes",
            "sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        limit, usage = _read_number(root / limit_file), _read_number(root / usage_file)
        if limit is not None and usage is not None:
            reclaimable = _cgroup_page_cache(root / limit_file)
            available = min(available, max(0, limit - usage + reclaimable))
    return available


def _cgroup_page_cache(limit_file: Path) -> int:
    """Bytes of inactive page cache that a cgroup's usage includes but gives up on demand."""
    try:
        lines = (limit_file.parent / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split()[:2] for line in lines if len(line.split()) >= 2)
    return int(fields.get("inactive_file", fields.get("total_inactive_file", 0)))


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _blocks(num_tokens: int, cache: CacheConfig) -> int:
    return -(-num_tokens // cache.block_size)


def _scratch_bytes(model: ModelConfig, scheduler: SchedulerConfig) -> int:
    """Activations of the largest step, logits, and the rows' token and block tables."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    features = 3 * model.hidden_size + 2 * heads + 4 * model.intermediate_size
    activations = scheduler.max_num_batched_tokens * features * 4
    logits = 2 * max(scheduler.max_num_seqs, 64) * model.vocab_size * 4
    tables = scheduler.max_num_seqs * (scheduler.max_model_len or model.context_length) * 5
    return activations + logits + tables


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
