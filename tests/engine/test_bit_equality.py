"""Greedy output is the same to the bit, whatever shares the machine with a request.

Compared are token ids and the float32 log-probability of each, so that a difference in the last
bit of a logit is seen even where it does not change the token.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from caudal import _native
from caudal.config import CacheConfig, KVCacheDType, SchedulerConfig
from caudal.sampling_params import SamplingParams
from tests.engine.engine_harness import GREEDY, Harness, Result

DTYPES = [KVCacheDType.F16, KVCacheDType.INT8]
if "amx" in _native.available_isas():
    DTYPES.append(KVCacheDType.BF16)
NO_TARGETS = SchedulerConfig(tpot_ms=None, ttft_ms=None)

pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(20, 49_000) for _ in range(num_tokens)]


PROMPT = random_prompt(1, 333)


@cache
def alone(model: Path, dtype: KVCacheDType) -> Result:
    """The reference: one request, one engine, nothing cached, one thread's worth of doubt."""
    return Harness(model, cache=CacheConfig(kv_cache_dtype=dtype, num_blocks=256)).generate(
        [PROMPT]
    )[0]


def check(result: Result, model: Path, dtype: KVCacheDType) -> None:
    assert result.exact() == alone(model, dtype).exact()
    assert len(result.token_ids) == GREEDY.max_tokens


def test_result_differs_between_prompts(demo_model: Path, dtype: KVCacheDType) -> None:
    """The comparison can fail: another prompt gives other bits."""
    engine = Harness(demo_model, cache=CacheConfig(kv_cache_dtype=dtype, num_blocks=256))
    other = engine.generate([random_prompt(2, 333)])[0]
    assert other.exact() != alone(demo_model, dtype).exact()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_among_31_others(demo_model: Path, dtype: KVCacheDType, num_threads: int) -> None:
    engine = Harness(
        demo_model,
        cache=CacheConfig(kv_cache_dtype=dtype, num_blocks=1024),
        num_threads=num_threads,
    )
    prompts = [random_prompt(100 + index, 5 + 11 * index) for index in range(31)]
    prompts.insert(17, PROMPT)
    check(engine.generate(prompts)[17], demo_model, dtype)


@pytest.mark.parametrize("chunk", [1, 7, 33, 64, 301])
def test_chunked_at_odd_sizes(demo_model: Path, dtype: KVCacheDType, chunk: int) -> None:
    engine = Harness(
        demo_model,
        cache=CacheConfig(kv_cache_dtype=dtype, num_blocks=256),
        scheduler=replace(NO_TARGETS, max_num_batched_tokens=chunk, max_num_seqs=1),
    )
    check(engine.generate([PROMPT])[0], demo_model, dtype)
    assert engine.num_steps >= len(PROMPT) // chunk


@pytest.mark.parametrize("num_shared", [len(PROMPT), 160, 17])
def test_on_a_prefix_hit(demo_model: Path, dtype: KVCacheDType, num_shared: int) -> None:
    engine = Harness(demo_model, cache=CacheConfig(kv_cache_dtype=dtype, num_blocks=256))
    engine.generate([PROMPT[:num_shared] + random_prompt(3, 40)])
    result = engine.generate([PROMPT])[0]
    assert result.num_cached_tokens == min(num_shared, len(PROMPT) - 1) // 16 * 16
    check(result, demo_model, dtype)


def test_after_preemption(demo_model: Path, dtype: KVCacheDType) -> None:
    """A pool of less than half the need: whoever was preempted still gives the same bits."""
    num_blocks = 60
    engine = Harness(
        demo_model,
        cache=CacheConfig(kv_cache_dtype=dtype, num_blocks=num_blocks),
        scheduler=replace(NO_TARGETS, max_model_len=400, max_num_batched_tokens=96),
    )
    long = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True, num_logprobs=0)
    reference = Harness(demo_model, cache=CacheConfig(kv_cache_dtype=dtype, num_blocks=num_blocks))
    prompts = [random_prompt(seed, 250 + seed) for seed in range(6)]
    results = engine.generate(prompts, long)
    assert sum(result.num_preemptions for result in results) > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert result.exact() == reference.generate([prompt], long)[0].exact()


def test_without_prefix_cache(demo_model: Path, dtype: KVCacheDType) -> None:
    engine = Harness(
        demo_model,
        cache=CacheConfig(kv_cache_dtype=dtype, num_blocks=256, enable_prefix_caching=False),
    )
    for result in engine.generate([PROMPT, PROMPT]):
        assert result.num_cached_tokens == 0
        check(result, demo_model, dtype)
