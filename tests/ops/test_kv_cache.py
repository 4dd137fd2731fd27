"""The KV cache's memory: blocks travel between caches, untouched blocks cost nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caudal import _native
from caudal.config import KVCacheDType
from caudal.errors import ConfigError
from caudal.ops import create_backend
from caudal.ops.cpu import kv_block_bytes
from caudal.ops.interface import KVCacheSpec
from tests.ops.tiny_forward import (
    Chunk,
    Model,
    compile_plan,
    kv_spec,
    make_batch,
    random_ids,
    supported,
)

BACKEND = create_backend("cpu", 2)
IDS = random_ids(30)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize("isa", _native.available_isas())
def test_auto_is_what_the_kernels_are_fast_with(isa: str) -> None:
    backend = create_backend("cpu", 1, isa)
    auto = KVCacheDType.BF16 if isa == "amx" else KVCacheDType.F16
    assert backend.kv_cache_dtype(KVCacheDType.AUTO) is auto
    assert backend.kv_cache_dtype(KVCacheDType.INT8) is KVCacheDType.INT8


@pytest.mark.parametrize("isa", [isa for isa in _native.available_isas() if isa.startswith("avx")])
def test_bf16_without_a_tile_unit_is_refused(isa: str) -> None:
    backend = create_backend("cpu", 1, isa)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: bf16 needs a CPU with AMX"):
        backend.kv_cache_dtype(KVCacheDType.BF16)


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("asked", KVCacheDType)
def test_exported_blocks_continue_elsewhere(name: str, asked: KVCacheDType) -> None:
    model = Model(create_backend(name, 2))
    dtype = supported(model.backend, asked)
    plan, cache = compile_plan(model, dtype=dtype)
    plan.run(make_batch(Chunk(IDS, [4, 9])))
    expected = plan.run(make_batch(Chunk([*IDS, 1], [4, 9], start=30))).copy()
    data = cache.export_blocks(int32(4, 9))
    other_plan, other_cache = compile_plan(model, dtype=dtype)
    other_cache.import_blocks(int32(2, 0), data)
    actual = other_plan.run(make_batch(Chunk([*IDS, 1], [2, 0], start=30)))
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("asked", KVCacheDType)
def test_block_bytes_are_as_planned(asked: KVCacheDType) -> None:
    spec = kv_spec(supported(BACKEND, asked))
    cache = BACKEND.create_kv_cache(spec)
    assert cache.block_nbytes == kv_block_bytes(spec)
    assert cache.export_blocks(int32(1, 2, 3)).shape == (3, cache.block_nbytes)


def test_new_cache_is_zero() -> None:
    assert not BACKEND.create_kv_cache(kv_spec()).export_blocks(int32(0, 23)).any()


@pytest.mark.parametrize("ids", [int32(-1), int32(24), int32(0, 2**31 - 1)])
def test_blocks_that_do_not_exist_are_refused(ids: np.ndarray) -> None:
    cache = BACKEND.create_kv_cache(kv_spec())
    with pytest.raises(ValueError, match="block_ids"):
        cache.export_blocks(ids)
    with pytest.raises(ValueError, match="block_ids"):
        cache.import_blocks(ids, np.zeros((len(ids), cache.block_nbytes), np.uint8))


@pytest.mark.parametrize("shape", [(2, 8), (1, 8), (1, 0)])
def test_imported_data_must_have_the_size_of_blocks(shape: tuple[int, int]) -> None:
    cache = BACKEND.create_kv_cache(kv_spec())
    with pytest.raises(ValueError, match="data"):
        cache.import_blocks(int32(0), np.zeros(shape, np.uint8))


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 20},
        {"head_dim": 512},
        {"head_dim": 0},
        {"num_layers": 0},
        {"num_blocks": 0},
        {"num_blocks": 2**31},
        {"num_kv_heads": 0},
        {"block_size": 32},
    ],
)
def test_shapes_that_kernels_cannot_address_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BACKEND.create_kv_cache(replace(kv_spec(), **change))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_untouched_blocks_cost_no_memory() -> None:
    before = resident_bytes()
    cache = BACKEND.create_kv_cache(KVCacheSpec(30, 10_000, 3, 64, 16, KVCacheDType.F16))
    assert cache.block_nbytes * cache.num_blocks > 3 << 30
    cache.import_blocks(int32(0), np.ones((1, cache.block_nbytes), np.uint8))
    assert resident_bytes() - before < 16 << 20
