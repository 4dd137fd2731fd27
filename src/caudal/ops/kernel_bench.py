"""Times each native kernel and compares it with what this machine can do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from caudal import _native
from caudal.errors import ConfigError
from caudal.ops.interface import BatchArrays, SamplingArrays

MODEL_POOL = 96 << 20
"""Bytes of weights that a small model reads per step."""

MEMORY_POOL = 512 << 20
"""More than any cache holds."""


@dataclass(frozen=True, slots=True)
class BenchSpec:
    """What to measure, and for how long."""

    isa: str = ""
    """A kernel set by name; "" for the best one."""
    num_threads: int = 1
    seconds: float = 0.2
    """Per kernel and shape."""
    is_quick: bool = False
    """Fewer shapes, and the read peak is that of a model's size, which a large cache may hold."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured limits of all threads together, per second."""

    int8_ops: float
    fp32_ops: float
    read_bytes: float


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """One kernel at one shape; an operation is a multiplication or an addition."""

    kernel: str
    shape: str
    num_tokens: int
    median_seconds: float
    best_seconds: float
    num_ops: float
    num_bytes: float
    """Weights or cached keys and values that one call reads."""
    ops_limit: str
    """The field of Peaks that bounds the operations."""

    @property
    def gops(self) -> float:
        """Thousand million operations per second, median."""
        return self.num_ops / self.median_seconds / 1e9

    @property
    def gops_best(self) -> float:
        """The same for the fastest call."""
        return self.num_ops / self.best_seconds / 1e9

    @property
    def gbytes(self) -> float:
        """Thousand million bytes per second, median."""
        return self.num_bytes / self.median_seconds / 1e9

    def share_of_peak(self, peaks: Peaks) -> tuple[float, str]:
        """(share, name) of the peak that the median comes closest to."""
        operations = self.gops * 1e9 / float(getattr(peaks, self.ops_limit))
        reading = self.gbytes * 1e9 / peaks.read_bytes
        return max((operations, self.ops_limit), (reading, "read_bytes"))


@dataclass(frozen=True, slots=True)
class _Linear:
    format: str
    rows: int
    cols: int
    tokens: tuple[int, ...]
    pool: int = MODEL_POOL


_TOKENS = (1, 2, 4, 8, 16, 64, 256)
_QUICK_LINEARS = (
    _Linear("w4", 3072, 576, (1, 16, 256)),
    _Linear("w4 wide", 3072, 576, (1, 4, 16, 256)),
    _Linear("w8", 49152, 576, (1, 16)),
    _Linear("f16", 3072, 576, (1, 16)),
)
_LINEARS = (
    _Linear("w4", 3072, 576, _TOKENS),
    _Linear("w4", 576, 1536, _TOKENS),
    _Linear("w4 wide", 960, 576, _TOKENS),
    _Linear("w4 wide", 576, 576, _TOKENS),
    _Linear("w4 wide", 3072, 576, _TOKENS),
    _Linear("w4 wide", 3072, 576, (1,), MEMORY_POOL),
    _Linear("w4 wide", 576, 1536, _TOKENS),
    _Linear("w4 wide", 4096, 4096, _TOKENS, MEMORY_POOL),
    _Linear("w8", 49152, 576, (1, 2, 4, 8, 16, 64)),
    _Linear("w8", 49152, 576, (1,), MEMORY_POOL),
    _Linear("f16", 3072, 576, (1, 8, 64)),
    _Linear("f32", 3072, 576, (1, 8, 64)),
)

_QUICK_BF16_LINEARS = (
    _Linear("w4 bf16", 3072, 576, (1, 16, 256)),
    _Linear("w8 bf16", 49152, 576, (1, 16)),
)
_BF16_LINEARS = (
    _Linear("w4 bf16", 3072, 576, _TOKENS),
    _Linear("w4 bf16", 3072, 576, (1,), MEMORY_POOL),
    _Linear("w4 bf16", 576, 1536, _TOKENS),
    _Linear("w4 bf16", 4096, 4096, _TOKENS, MEMORY_POOL),
    _Linear("w8 bf16", 49152, 576, (1, 8, 16, 64)),
)

_FLOAT_FORMATS = ("f16", "f32")
_BLOCK_BYTES = {"w4": 320, "w8": 544, "f16": 1024, "f32": 2048}
"""Bytes of 16 rows x 32 columns."""


def measure_peaks(spec: BenchSpec) -> Peaks:
    """Instruction and memory limits of `spec.num_threads` threads.

    Raises ConfigError if this CPU cannot run `spec.isa` or the number of threads is out of range.
    """
    pool = MODEL_POOL if spec.is_quick else MEMORY_POOL
    try:
        rates = _native.bench.peaks(spec.isa, spec.num_threads, spec.seconds, pool)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Peaks(**rates)


def measure_kernels(spec: BenchSpec) -> Iterator[KernelTiming]:
    """Time linear, attention and sampling at the shapes of small models, one after another."""
    runtime = _native.Runtime(spec.isa, spec.num_threads)
    linears: tuple[_Linear, ...] = _QUICK_LINEARS if spec.is_quick else _LINEARS
    if runtime.has_bf16 and runtime.isa != "ref":
        linears += _QUICK_BF16_LINEARS if spec.is_quick else _BF16_LINEARS
    for linear in linears:
        for num_tokens in linear.tokens:
            yield _time_linear(spec, linear, num_tokens)
    for kv_format in ("f16", "bf16_tiles", "int8_tiles") if runtime.has_tiles else ("f16", "int8"):
        yield _time_attention(spec, kv_format, num_seqs=32, num_queries=1, context=1024)
        yield _time_attention(spec, kv_format, num_seqs=1, num_queries=256, context=1024)
        if not spec.is_quick:
            yield _time_attention(spec, kv_format, num_seqs=1, num_queries=1, context=4096)
    yield _time_sampling(spec, "greedy", temperature=0.0, top_p=1.0)
    yield _time_sampling(spec, "top_p 0.9", temperature=0.8, top_p=0.9)


def _time_linear(spec: BenchSpec, linear: _Linear, num_tokens: int) -> KernelTiming:
    seconds = _native.bench.linear(
        spec.isa,
        linear.format,
        linear.rows,
        linear.cols,
        num_tokens,
        spec.num_threads,
        linear.pool,
        spec.seconds,
    )
    where = "" if linear.pool == MODEL_POOL else f", {linear.pool >> 20} MiB"
    return KernelTiming(
        kernel=f"linear {linear.format}",
        shape=f"{linear.rows} x {linear.cols}{where}",
        num_tokens=num_tokens,
        median_seconds=statistics.median(seconds),
        best_seconds=min(seconds),
        num_ops=2.0 * linear.rows * linear.cols * num_tokens,
        num_bytes=-(-linear.rows // 16) * linear.cols / 32 * _BLOCK_BYTES[linear.format.split()[0]],
        ops_limit="fp32_ops" if linear.format in _FLOAT_FORMATS else "int8_ops",
    )


_HEADS, _KV_HEADS, _HEAD_DIM, _LAYERS, _BLOCK_SIZE = 9, 3, 64, 4, 16


def _filled_cache(num_blocks: int, kv_format: str, rng: np.random.Generator) -> _native.KVCache:
    cache = _native.KVCache(_LAYERS, num_blocks, _KV_HEADS, _HEAD_DIM, kv_format)
    num_heads = _LAYERS * _KV_HEADS
    values = 2 * _BLOCK_SIZE * _HEAD_DIM
    if kv_format == "bf16_tiles":
        normal = rng.standard_normal((num_heads, values)).astype(np.float32)
        block = (normal.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    elif kv_format != "f16":
        block = np.empty((num_heads, values + 2 * _BLOCK_SIZE * 4), np.uint8)
        block[:, :values] = rng.integers(0, 256, (num_heads, values), np.uint8)
        block[:, values:] = np.full((num_heads, 2 * _BLOCK_SIZE), 0.01, np.float32).view(np.uint8)
    else:
        block = rng.standard_normal((num_heads, values)).astype(np.float16).view(np.uint8)
    for block_id in range(num_blocks):
        cache.import_blocks(np.array([block_id], np.int32), block.reshape(1, -1))
    return cache


def _time_attention(
    spec: BenchSpec, kv_format: str, num_seqs: int, num_queries: int, context: int
) -> KernelTiming:
    rng = np.random.default_rng(0)
    blocks_each = context // _BLOCK_SIZE
    tables = rng.permutation(num_seqs * blocks_each).astype(np.int32).reshape(num_seqs, -1)
    num_tokens = num_seqs * num_queries
    first = context - num_queries
    batch = BatchArrays(
        input_ids=np.zeros(num_tokens, np.int32),
        positions=np.tile(np.arange(first, context, dtype=np.int32), num_seqs),
        slot_mapping=np.zeros(num_tokens, np.int32),
        query_start_loc=np.arange(0, num_tokens + 1, num_queries, dtype=np.int32),
        seq_lens=np.full(num_seqs, context, np.int32),
        block_tables=np.ascontiguousarray(tables),
        logits_indices=np.zeros(0, np.int32),
    )
    cache = _filled_cache(tables.size, kv_format, rng)
    q = rng.standard_normal((num_tokens, _HEADS * _HEAD_DIM)).astype(np.float32)
    seconds = _native.bench.attention(spec.isa, q, batch, cache, spec.num_threads, spec.seconds)
    attended = num_seqs * sum(range(first + 1, context + 1))
    kind = "decode" if num_queries == 1 else "prefill"
    return KernelTiming(
        kernel=f"attention {kv_format.removesuffix('_tiles')} {kind}",
        shape=f"{num_seqs} x {context}, {_HEADS}/{_KV_HEADS} heads x {_HEAD_DIM}",
        num_tokens=num_tokens,
        median_seconds=statistics.median(seconds),
        best_seconds=min(seconds),
        num_ops=4.0 * attended * _HEADS * _HEAD_DIM,
        num_bytes=float(tables.size * cache.block_nbytes // _LAYERS),
        ops_limit="fp32_ops",
    )


def _sampling_params(rows: int, temperature: float, top_p: float) -> SamplingArrays:
    empty = np.zeros(0, np.int32)
    floats = {
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": temperature,
        "top_p": top_p,
    }
    return SamplingArrays(
        **{name: np.full(rows, value, np.float32) for name, value in floats.items()},
        logit_rows=np.arange(rows, dtype=np.int32),
        top_k=np.zeros(rows, np.int32),
        seed=np.arange(rows, dtype=np.uint64),
        position=np.zeros(rows, np.int64),
        bias_indptr=np.zeros(rows + 1, np.int32),
        bias_ids=empty,
        bias_values=np.zeros(0, np.float32),
        history_indptr=np.zeros(rows + 1, np.int32),
        history_ids=empty,
        history_counts=empty,
        num_logprobs=np.full(rows, -1, np.int32),
        target_ids=np.full(rows, -1, np.int32),
        mask_rows=np.full(rows, -1, np.int32),
        mask_words=np.zeros((0, 0), np.int32),
    )


def _time_sampling(spec: BenchSpec, name: str, temperature: float, top_p: float) -> KernelTiming:
    rows, vocab = 32, 49152
    logits = (3 * np.random.default_rng(0).standard_normal((rows, vocab))).astype(np.float32)
    params = _sampling_params(rows, temperature, top_p)
    seconds: list[float] = []
    deadline = time.perf_counter() + spec.seconds
    while len(seconds) < 5 or time.perf_counter() < deadline:
        scratch = logits.copy()
        start = time.perf_counter()
        _native.testing.sample(spec.isa, scratch, params, spec.num_threads)
        seconds.append(time.perf_counter() - start)
    return KernelTiming(
        kernel=f"sample {name}",
        shape=f"{rows} x {vocab}",
        num_tokens=rows,
        median_seconds=statistics.median(seconds),
        best_seconds=min(seconds),
        num_ops=0.0,
        num_bytes=float(logits.nbytes),
        ops_limit="fp32_ops",
    )
