"""Pooled hidden states: as the oracle says, and the same to the bit in any company."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from caudal.config import CacheConfig, KVCacheDType, SchedulerConfig
from caudal.models.registry import create_model
from caudal.ops.cpu import CpuBackend
from caudal.ops.interface import AttentionSpec, BatchArrays, KVCacheSpec, PlanSpec
from caudal.ops.raw import add_rows
from caudal.ops.reference import ReferenceBackend
from caudal.sampling_params import Pooling, SamplingParams
from caudal.scheduler.output import FinishReason
from caudal.weights.dequant import dequantize
from caudal.weights.gguf import GGUFFile
from caudal.weights.loader import WeightLoader
from caudal.weights.model_config import read_model_config
from tests.engine.engine_harness import GREEDY, Harness, Result
from tests.tiny_models import make_tiny_model

NO_TARGETS = SchedulerConfig(tpot_ms=None, ttft_ms=None)
POOLINGS: list[Pooling] = ["mean", "last"]


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 350) for _ in range(num_tokens)]


PROMPT = random_prompt(1, 133)


def pool(pooling: Pooling) -> SamplingParams:
    return SamplingParams(max_tokens=0, pooling=pooling)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, num_logprobs=0)


def vector(result: Result) -> NDArray[np.float32]:
    assert result.finish_reason is FinishReason.LENGTH
    assert result.token_ids == []
    assert result.pooled is not None
    return np.frombuffer(result.pooled, "<f4")


def alone(model: Path, pooling: Pooling, prompt: list[int] = PROMPT) -> bytes | None:
    return Harness(model).generate([prompt], pool(pooling))[0].pooled


def reference_hidden_states(path: Path, token_ids: list[int]) -> NDArray[np.float32]:
    """The oracle's final normed hidden states, computed in one pass -> [tokens, hidden]."""
    with GGUFFile.open(path) as gguf:
        config = read_model_config(gguf)
        backend = ReferenceBackend(dequantize, quantizes_activations=True, isa="")
        model = create_model(config, WeightLoader(gguf.tensors, backend, rank=0, world_size=1))
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    num_blocks = -(-len(token_ids) // 16)
    cache = backend.create_kv_cache(
        KVCacheSpec(
            config.num_layers, num_blocks, *heads[1:], block_size=16, dtype=KVCacheDType.F16
        )
    )
    spec = PlanSpec(
        attention=AttentionSpec(*heads, scale=config.head_dim**-0.5),
        rope=model.rope,
        rms_norm_eps=config.rms_norm_eps,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_num_tokens=len(token_ids),
        max_num_seqs=1,
        max_num_logits=len(token_ids),
    )
    positions = np.arange(len(token_ids), dtype=np.int32)
    batch = BatchArrays(
        input_ids=np.array(token_ids, np.int32),
        positions=positions,
        slot_mapping=positions,
        query_start_loc=np.array([0, len(token_ids)], np.int32),
        seq_lens=np.array([len(token_ids)], np.int32),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None],
        logits_indices=positions,
    )
    return backend.compile(model.hidden_states, spec, cache).run(batch)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_vector_is_what_the_oracle_gives(tmp_path: Path, arch: str) -> None:
    model = make_tiny_model(tmp_path / "tiny.gguf", arch)
    hidden = reference_hidden_states(model, PROMPT)
    engine = Harness(model)
    mean, last = (vector(engine.generate([PROMPT], pool(pooling))[0]) for pooling in POOLINGS)
    for actual, expected in ((mean, hidden.mean(axis=0)), (last, hidden[-1])):
        assert actual.shape == (128,)
        error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
        assert error < 3e-2  # bf16 activations, where the CPU has them, round at 4e-3
    assert np.linalg.norm(mean - last) > 0.1 * np.linalg.norm(last)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_vector_does_not_depend_on_company(tiny_model: Path, pooling: Pooling) -> None:
    """Among others that pool, and among others that generate: the same bits."""
    engine = Harness(tiny_model)
    engine.add("decoding", random_prompt(7, 20), greedy(200))
    for _ in range(3):
        engine.step()
    for index in range(9):
        engine.add(f"p{index}", random_prompt(index + 10, 5 + 31 * index), pool("mean"))
        engine.add(f"g{index}", random_prompt(index + 30, 40), GREEDY)
    engine.add("wanted", PROMPT, pool(pooling))
    engine.run()
    assert engine.results["wanted"].pooled == alone(tiny_model, pooling)
    expected = Harness(tiny_model).generate([random_prompt(7, 20)], greedy(200))[0]
    assert engine.results["decoding"].exact() == expected.exact()


@pytest.mark.parametrize("chunk", [1, 7, 64, 101])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_vector_does_not_depend_on_chunks(tiny_model: Path, pooling: Pooling, chunk: int) -> None:
    scheduler = replace(NO_TARGETS, max_num_batched_tokens=chunk, max_num_seqs=1)
    engine = Harness(tiny_model, scheduler=scheduler)
    assert engine.generate([PROMPT], pool(pooling))[0].pooled == alone(tiny_model, pooling)
    assert engine.num_steps >= len(PROMPT) // chunk


def test_cached_prefix_is_used_where_only_the_last_token_counts(tiny_model: Path) -> None:
    engine = Harness(tiny_model)
    engine.generate([PROMPT])
    mean, last = (engine.generate([PROMPT], pool(pooling))[0] for pooling in POOLINGS)
    assert (mean.num_cached_tokens, last.num_cached_tokens) == (0, 128)
    assert mean.pooled == alone(tiny_model, "mean")
    assert last.pooled == alone(tiny_model, "last")


def test_preempted_request_starts_its_sum_anew(tiny_model: Path) -> None:
    """A sum that survived its row would count tokens twice."""
    engine = Harness(
        tiny_model,
        cache=CacheConfig(num_blocks=40),
        scheduler=replace(NO_TARGETS, max_model_len=512, max_num_batched_tokens=16, max_num_seqs=8),
    )
    prompts = [random_prompt(seed, 60) for seed in range(4)]
    for index, prompt in enumerate(prompts):
        engine.add(f"g{index}", prompt, greedy(120))
    for _ in range(25):
        engine.step()
    engine.add("long", random_prompt(9, 300), pool("mean"))
    engine.run()
    assert sum(result.num_preemptions for result in engine.results.values()) > 0
    assert engine.results["long"].pooled == alone(tiny_model, "mean", random_prompt(9, 300))


def test_hidden_states_that_are_no_numbers_fail_alone(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Harness(tiny_model)
    good = random_prompt(2, 50)
    expected = alone(tiny_model, "mean", good)

    def poison(backend: object, hidden: NDArray[np.float32], sums: NDArray[np.float64]) -> None:
        add_rows(hidden, sums)
        if len(hidden) == len(PROMPT):
            sums[3] = np.nan

    monkeypatch.setattr(CpuBackend, "add_rows", poison)
    bad_result, good_result = engine.generate([PROMPT, good], pool("mean"))
    assert bad_result.finish_reason is FinishReason.ERROR
    assert "not numbers" in str(bad_result.error)
    assert good_result.pooled == expected


def test_failed_pass_of_those_that_pool_spares_the_others(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Harness(tiny_model)

    def fail(*arguments: object) -> None:
        raise MemoryError("secret detail")

    monkeypatch.setattr(CpuBackend, "add_rows", fail)
    engine.add("pooling", PROMPT, pool("mean"))
    engine.add("generating", PROMPT, GREEDY)
    engine.run()
    assert engine.results["pooling"].finish_reason is FinishReason.ERROR
    assert "secret" not in str(engine.results["pooling"].error)
    assert len(engine.results["generating"].token_ids) == GREEDY.max_tokens


def test_prompt_at_the_context_length_fits(tiny_model: Path) -> None:
    engine = Harness(tiny_model)
    prompt = random_prompt(3, engine.executor.info.memory.max_model_len)
    assert np.isfinite(vector(engine.generate([prompt], pool("last"))[0])).all()
