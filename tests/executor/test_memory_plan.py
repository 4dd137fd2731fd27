"""The memory plan: what fits, what is refused, what the machine and its cgroup leave."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from caudal.config import CacheConfig, KVCacheDType, ModelConfig, SchedulerConfig
from caudal.errors import InsufficientMemoryError
from caudal.executor.memory_plan import (
    DEFAULT_KV_BYTES,
    kv_block_bytes,
    packed_bytes,
    plan_memory,
    read_available_memory,
)

GIB = 1 << 30

QWEN_7B = ModelConfig(
    architecture="qwen2",
    name="7b",
    num_layers=28,
    hidden_size=3584,
    intermediate_size=18944,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=152064,
    context_length=32768,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    rope_dim=128,
    rope_interleaved=False,
)


@dataclass(frozen=True)
class FakeTensor:
    """A tensor that has a size but no bytes."""

    shape: tuple[int, ...]
    ggml_type: int = 2
    name: str = "t"
    data: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.uint8))


def test_kv_bytes_per_token_of_a_7b_are_not_those_of_full_attention() -> None:
    """B141."""
    per_block = kv_block_bytes(QWEN_7B, CacheConfig(kv_cache_dtype=KVCacheDType.F16))
    assert per_block // 16 == 57_344
    assert per_block * 3072 // 16 == 168 << 20


def test_int8_kv_is_about_half_with_its_scales_counted() -> None:
    f16 = kv_block_bytes(QWEN_7B, CacheConfig(kv_cache_dtype=KVCacheDType.F16))
    int8 = kv_block_bytes(QWEN_7B, CacheConfig(kv_cache_dtype=KVCacheDType.INT8))
    assert int8 / f16 == pytest.approx(0.5 + 4 / 256)


@pytest.mark.parametrize(
    ("ggml_type", "num_bytes"),
    [(2, 320), (3, 320), (12, 320), (8, 544), (14, 544), (1, 1024), (0, 2048)],
)
def test_packed_size_of_a_16_by_32_block(ggml_type: int, num_bytes: int) -> None:
    assert packed_bytes(FakeTensor((16, 32), ggml_type)) == num_bytes
    assert packed_bytes(FakeTensor((1, 32), ggml_type)) == num_bytes  # padded to 16 rows


def test_default_cache_is_bounded_and_holds_a_full_context() -> None:
    plan = plan_memory(QWEN_7B, [], CacheConfig(), SchedulerConfig(), available_bytes=64 * GIB)
    assert plan.kv_cache_bytes <= DEFAULT_KV_BYTES
    assert plan.num_blocks * 16 >= plan.max_model_len == 32768
    assert not plan.is_shortened


def test_context_is_shortened_to_what_memory_allows() -> None:
    plan = plan_memory(QWEN_7B, [], CacheConfig(), SchedulerConfig(), available_bytes=2 * GIB)
    assert plan.is_shortened
    assert 512 <= plan.max_model_len == plan.num_blocks * 16 < 32768
    assert plan.kv_cache_bytes + plan.weights_bytes + plan.scratch_bytes < 2 * GIB


@pytest.mark.parametrize(
    ("cache", "scheduler", "available"),
    [
        (CacheConfig(), SchedulerConfig(max_model_len=32768), 2 * GIB),
        (CacheConfig(kv_cache_memory_bytes=8 * GIB), SchedulerConfig(), 4 * GIB),
        (CacheConfig(), SchedulerConfig(), GIB // 8),
    ],
    ids=["context asked for", "cache asked for", "nothing fits"],
)
def test_what_cannot_fit_is_refused_with_sizes_and_remedies(
    cache: CacheConfig, scheduler: SchedulerConfig, available: int
) -> None:
    tensors = [FakeTensor((1024, 1024))]
    with pytest.raises(InsufficientMemoryError, match=r"MiB.*--kv-cache-dtype int8"):
        plan_memory(QWEN_7B, tensors, cache, scheduler, available_bytes=available)


def test_available_memory_is_memavailable_not_free(tmp_path: Path) -> None:
    """B147."""
    _write(tmp_path, "proc/meminfo", "MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable: 77 kB\n")
    assert read_available_memory(tmp_path) == 77 * 1024


@pytest.mark.parametrize("stat", ["", "inactive_file 1000\n"])
def test_cgroup_limit_counts_with_its_page_cache_reclaimable(tmp_path: Path, stat: str) -> None:
    """B147."""
    _write(tmp_path, "proc/meminfo", "MemAvailable: 1000 kB\n")
    _write(tmp_path, "sys/fs/cgroup/memory.max", "50000\n")
    _write(tmp_path, "sys/fs/cgroup/memory.current", "20000\n")
    _write(tmp_path, "sys/fs/cgroup/memory.stat", stat)
    assert read_available_memory(tmp_path) == 30000 + (1000 if stat else 0)


def test_unlimited_cgroup_is_no_limit(tmp_path: Path) -> None:
    _write(tmp_path, "proc/meminfo", "MemAvailable: 1000 kB\n")
    _write(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
    _write(tmp_path, "sys/fs/cgroup/memory.current", "20000\n")
    assert read_available_memory(tmp_path) == 1000 * 1024


def test_tied_small_model_plan_counts_every_part() -> None:
    model = replace(QWEN_7B, context_length=512, vocab_size=1000)
    plan = plan_memory(
        model, [FakeTensor((16, 32))], CacheConfig(num_blocks=40), SchedulerConfig(),
        available_bytes=GIB,
    )  # fmt: skip
    assert plan.num_blocks == 40
    assert plan.as_dict()["weights"] == 320
    assert plan.max_model_len == 512


def _write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
