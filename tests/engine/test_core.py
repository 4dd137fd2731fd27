"""The engine core on a tiny model: terminal outputs, failures that stay alone, aborts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from caudal.config import Batching, CacheConfig, KVCacheDType, SchedulerConfig
from caudal.engine.messages import EngineRequest
from caudal.models.registry import create_model
from caudal.ops import create_backend
from caudal.ops.interface import AttentionSpec, BatchArrays, KVCacheSpec, PlanSpec
from caudal.sampling_params import SamplingParams
from caudal.scheduler.output import FinishReason
from caudal.step_io import Interrupt, ModelRunnerOutput, SchedulerOutput
from caudal.weights.ggml_types import GGMLType
from caudal.weights.gguf import GGUFFile
from caudal.weights.loader import WeightLoader
from caudal.weights.model_config import read_model_config
from tests.engine.engine_harness import GREEDY, Harness
from tests.tiny_models import make_tiny_model

PROMPTS = [[3 + index * 7 % 200 for index in range(length)] for length in (1, 5, 16, 17, 40, 77)]


def naive_greedy(model: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Recompute the whole sequence for every token with the NumPy oracle."""
    backend = create_backend("reference")
    with GGUFFile.open(model) as gguf:
        config = read_model_config(gguf)
        network = create_model(config, WeightLoader(gguf.tensors, backend))
        num_blocks = 16
        cache = backend.create_kv_cache(
            KVCacheSpec(
                config.num_layers,
                num_blocks,
                config.num_kv_heads,
                config.head_dim,
                16,
                KVCacheDType.F16,
            )
        )
        heads = AttentionSpec(
            config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5
        )
        spec = PlanSpec(
            attention=heads,
            rope=network.rope,
            rms_norm_eps=config.rms_norm_eps,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_num_tokens=256,
            max_num_seqs=1,
            max_num_logits=1,
        )
        plan = backend.compile(network.forward, spec, cache)
        ids = list(prompt)
        for _ in range(num_tokens):
            positions = np.arange(len(ids), dtype=np.int32)
            logits = plan.run(
                BatchArrays(
                    input_ids=np.array(ids, dtype=np.int32),
                    positions=positions,
                    slot_mapping=positions,
                    query_start_loc=np.array([0, len(ids)], dtype=np.int32),
                    seq_lens=np.array([len(ids)], dtype=np.int32),
                    block_tables=np.arange(num_blocks, dtype=np.int32)[None, :],
                    logits_indices=np.array([len(ids) - 1], dtype=np.int32),
                )
            )
            ids.append(int(np.argmax(logits[0])))
    return ids[len(prompt) :]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_engine_equals_naive_recomputation(tmp_path: Path, architecture: str) -> None:
    model = make_tiny_model(
        tmp_path / "tiny.gguf",
        arch=architecture,
        linear_type=GGMLType.F32,
        embedding_type=GGMLType.F32,
        output_type=GGMLType.F32,
    )
    engine = Harness(
        model,
        cache=CacheConfig(num_blocks=64, kv_cache_dtype=KVCacheDType.F16),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=24, max_model_len=160),
    )
    for prompt, result in zip(PROMPTS, engine.generate(PROMPTS), strict=True):
        assert result.token_ids == naive_greedy(model, prompt, GREEDY.max_tokens)


@pytest.mark.parametrize("batching", list(Batching), ids=str)
def test_batching_modes_give_the_same_tokens(tiny_model: Path, batching: Batching) -> None:
    scheduler = SchedulerConfig(max_num_seqs=4, batching=batching)
    results = Harness(tiny_model, scheduler=scheduler).generate(PROMPTS)
    expected = Harness(tiny_model).generate(PROMPTS)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert {r.finish_reason for r in results} == {FinishReason.LENGTH}


def test_failing_request_fails_alone(tiny_model: Path) -> None:
    expected = Harness(tiny_model).generate(PROMPTS)
    engine = Harness(tiny_model)
    for index, prompt in enumerate(PROMPTS):
        engine.add(f"r{index}", prompt)
    engine.core.inject_fault("r2", 5)
    engine.run()
    for index, result in enumerate(expected):
        own = engine.results[f"r{index}"]
        if index == 2:
            assert own.finish_reason is FinishReason.ERROR
            assert own.error and "injected" not in own.error
            assert own.token_ids == result.token_ids[:5]
        else:
            assert own.exact() == result.exact()
    assert engine.core.stats().num_blocks_held == 0


def test_step_that_fails_as_a_whole_ends_its_requests_only(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Harness(tiny_model)
    execute = engine.executor.execute
    remaining = [True]

    def fail_once(output: SchedulerOutput, interrupt: Interrupt | None) -> ModelRunnerOutput:
        if output.num_scheduled_tokens and remaining and remaining.pop():
            raise RuntimeError("secret detail")
        return execute(output, interrupt)

    monkeypatch.setattr(engine.executor, "execute", fail_once)
    engine.add("lost", PROMPTS[1])
    engine.run()
    assert engine.results["lost"].finish_reason is FinishReason.ERROR
    assert "secret" not in (engine.results["lost"].error or "")
    engine.add("next", PROMPTS[1])
    engine.run()
    assert engine.results["next"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("num_steps", [0, 1, 3, 8])
def test_abort_in_any_state_frees_the_blocks_at_once(tiny_model: Path, num_steps: int) -> None:
    engine = Harness(
        tiny_model, scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16)
    )
    for index in range(4):
        engine.add(f"r{index}", PROMPTS[5])
    for _ in range(num_steps):
        engine.step()
    engine.core.abort([f"r{index}" for index in range(4)])
    assert engine.core.stats().num_blocks_held == 0
    engine.step()
    assert {r.finish_reason for r in engine.results.values()} == {FinishReason.ABORT}
    assert not engine.core.has_work
    assert engine.core.stats().num_cancelled == 4


def test_prompt_logprobs_cover_each_position_once_across_chunks(tiny_model: Path) -> None:
    sampling = SamplingParams(
        temperature=0.0, max_tokens=1, num_prompt_logprobs=2, num_logprobs=1, ignore_eos=True
    )
    whole = Harness(tiny_model).generate([PROMPTS[5]], sampling)[0]
    chunked = Harness(
        tiny_model, scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=7)
    ).generate([PROMPTS[5]], sampling)[0]
    assert [entry.token_id for entry in whole.prompt_logprobs] == PROMPTS[5][1:]
    assert whole.prompt_logprobs == chunked.prompt_logprobs
    assert all(len(entry.top_ids) == 2 for entry in whole.prompt_logprobs)


def test_seeded_sampling_does_not_depend_on_company(tiny_model: Path) -> None:
    sampling = SamplingParams(temperature=1.2, seed=42, max_tokens=20, ignore_eos=True)
    alone = Harness(tiny_model).generate([PROMPTS[4]], sampling)[0]
    crowd = Harness(tiny_model).generate(PROMPTS, sampling)
    assert crowd[4].token_ids == alone.token_ids
    other = SamplingParams(temperature=1.2, seed=43, max_tokens=20, ignore_eos=True)
    assert Harness(tiny_model).generate([PROMPTS[4]], other)[0].token_ids != alone.token_ids


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 0])
def test_any_signed_seed_repeats_and_harms_no_neighbour(tiny_model: Path, seed: int) -> None:
    """A negative one made the whole step fail, the requests of others included."""
    sampling = SamplingParams(temperature=1.2, seed=seed, max_tokens=8, ignore_eos=True)
    harness = Harness(tiny_model)
    expected = harness.generate([PROMPTS[0]])[0].token_ids
    harness.add("seeded", PROMPTS[4], sampling)
    harness.add("neighbour", PROMPTS[0])
    harness.run()
    seeded, neighbour = harness.results["seeded"], harness.results["neighbour"]
    assert (seeded.error, neighbour.error) == (None, None)
    assert neighbour.token_ids == expected
    assert harness.generate([PROMPTS[4]], sampling)[0].token_ids == seeded.token_ids


def test_zero_tokens_computes_the_prompt_only(tiny_model: Path) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=0, num_prompt_logprobs=0)
    result = Harness(tiny_model).generate([PROMPTS[3]], sampling)[0]
    assert result.token_ids == []
    assert result.finish_reason is FinishReason.LENGTH
    assert len(result.prompt_logprobs) == len(PROMPTS[3]) - 1


def test_refusal_says_whether_to_retry(tiny_model: Path) -> None:
    engine = Harness(tiny_model, scheduler=SchedulerConfig(max_queue_requests=1, max_num_seqs=1))
    requests = [
        EngineRequest(request_id=f"q{index}", prompt_token_ids=[1, 2], sampling=GREEDY)
        for index in range(4)
    ]
    refusals = [refusal for request in requests for refusal in engine.core.add_requests([request])]
    assert refusals and all((refusal.retry_after_s or 0) > 0 for refusal in refusals)
    hopeless = EngineRequest(request_id="x", prompt_token_ids=[1] * 100_000, sampling=GREEDY)
    refusal = engine.core.add_requests([hopeless])[0]
    assert refusal.retry_after_s is None
    assert refusal.code == "context_length_exceeded"
