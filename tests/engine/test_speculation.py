"""Guessed tokens change no bit of an answer: real models, repetitive and other texts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from caudal.config import CacheConfig, SchedulerConfig
from caudal.sampling_params import SamplingParams, StructuredOutputsParams
from caudal.scheduler.output import FinishReason
from caudal.tokenizer import Tokenizer
from caudal.weights.gguf import GGUFFile
from tests.engine.engine_harness import Harness, Result

GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, num_logprobs=0)


ANYTHING = StructuredOutputsParams(regex="(?s:.*)")


def engine_of(model: Path, num_guesses: int, cache: CacheConfig | None = None) -> Harness:
    scheduler = SchedulerConfig(tpot_ms=None, ttft_ms=None, num_speculative_tokens=num_guesses)
    return Harness(model, scheduler=scheduler, cache=cache)


def repetitive_prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    phrase = [rng.randrange(300, 9_000) for _ in range(rng.randrange(3, 12))]
    return (phrase * num_tokens)[:num_tokens]


PROMPTS = [repetitive_prompt(seed, 40 + 13 * seed) for seed in range(8)]


@pytest.fixture(scope="module")
def plain(demo_model: Path) -> Iterator[Harness]:
    engine = engine_of(demo_model, 0)
    engine.executor._constrained.factory.prepare(ANYTHING).result()  # the thread outlives a test
    yield engine
    engine.executor.shutdown()


@pytest.fixture(scope="module")
def guessing(demo_model: Path) -> Iterator[Harness]:
    engine = engine_of(demo_model, 8)
    engine.executor._constrained.factory.prepare(ANYTHING).result()  # the thread outlives a test
    yield engine
    engine.executor.shutdown()


def exact(results: list[Result]) -> list[object]:
    return [(result.exact(), result.finish_reason) for result in results]


@pytest.mark.parametrize(
    "option",
    [
        {},
        {"num_logprobs": None},
        {"num_logprobs": 3},
        {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"temperature": 0.3, "seed": 5},
        {"min_tokens": 20, "ignore_eos": False},
        {"logit_bias": {500: 4.0, 28: -2.0}},
        {"stop_token_ids": tuple(range(300, 1200))},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.2},
        {"num_prompt_logprobs": 1},
        {"max_tokens": 7},
    ],
    ids=str,
)
def test_answers_are_the_same_to_the_bit(
    plain: Harness, guessing: Harness, option: dict[str, Any]
) -> None:
    sampling = replace(GREEDY, **option)
    expected = exact(plain.generate(PROMPTS, sampling))
    assert exact(guessing.generate(PROMPTS, sampling)) == expected
    assert exact(guessing.generate(PROMPTS[:1], sampling)) == expected[:1]


def test_guesses_are_made_and_save_steps(plain: Harness, guessing: Harness) -> None:
    steps = []
    for engine in (plain, guessing):
        before = engine.num_steps
        engine.generate([repetitive_prompt(90, 80)], replace(GREEDY, max_tokens=96))
        steps.append(engine.num_steps - before)
    stats = guessing.core.stats()
    assert steps[1] <= steps[0] * 0.7
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens
    assert plain.core.stats().num_drafts == 0


def test_after_preemption_too(demo_model: Path, plain: Harness) -> None:
    long = replace(GREEDY, max_tokens=120)
    small = engine_of(demo_model, 8, CacheConfig(num_blocks=44))
    prompts = [repetitive_prompt(seed, 150 + seed) for seed in range(6)]
    results = small.generate(prompts, long)
    assert sum(result.num_preemptions for result in results) > 0
    assert small.core.stats().num_accepted_tokens > 0
    assert exact(results) == exact(plain.generate(prompts, long))


def test_behind_a_shared_prefix_too(plain: Harness, guessing: Harness) -> None:
    shared = repetitive_prompt(7, 600)
    prompts = [shared + repetitive_prompt(20 + index, 30) for index in range(12)]
    assert exact(guessing.generate(prompts)) == exact(plain.generate(prompts))


def test_stop_token_inside_a_right_guess_ends_the_answer(plain: Harness, guessing: Harness) -> None:
    prompt = repetitive_prompt(90, 80)
    whole = plain.generate([prompt])[0].token_ids
    sampling = replace(GREEDY, stop_token_ids=(whole[20],))
    result = guessing.generate([prompt], sampling)[0]
    assert result.token_ids == whole[: whole.index(whole[20]) + 1]
    assert result.finish_reason is FinishReason.STOP


LIST = {
    "type": "array",
    "minItems": 3,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "length": {"type": "number"},
            "tags": {"type": "array", "items": {"enum": ["old", "new"]}, "maxItems": 3},
        },
        "required": ["name", "length", "tags"],
        "additionalProperties": False,
    },
}
EXAMPLE = 'Answer with a list like [{"name": "Ulm", "length": 12.5, "tags": ["old"]}]: '
FORMS = {
    "list": StructuredOutputsParams(json=LIST),
    "digits": StructuredOutputsParams(json={"type": "array", "items": {"type": "number"}}),
    "any": StructuredOutputsParams(json_object=True),
    "regex": StructuredOutputsParams(regex="(ab ?)+"),
}


@pytest.mark.parametrize(
    "option",
    [
        {},
        {"temperature": 0.8, "seed": 3},
        {"min_tokens": 20},
        {"temperature": 0.8, "seed": 3, "top_p": 0.9},
        {"num_logprobs": 2},
        {"ignore_eos": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("form", FORMS)
def test_enforced_forms_are_the_same_with_guesses(
    form: str, option: dict[str, Any], plain: Harness, guessing: Harness, demo_model: Path
) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=70, structured_outputs=FORMS[form])
    sampling = replace(sampling, **option)
    texts = [f"{EXAMPLE}{'1 2 3 ' * number}" for number in range(3)]
    with GGUFFile.open(demo_model) as gguf:
        tokenizer = Tokenizer.from_gguf_metadata(gguf.metadata)
    prompts = [tokenizer.encode(text) for text in texts]
    before = guessing.core.stats().num_draft_tokens
    assert exact(guessing.generate(prompts, sampling)) == exact(plain.generate(prompts, sampling))
    needs_masks = "top_p" in option or "num_logprobs" in option
    num_guessed = guessing.core.stats().num_draft_tokens - before
    assert (num_guessed == 0) if needs_masks else (form != "list" or num_guessed > 0)


def test_enforced_forms_and_free_texts_run_together(demo_model: Path) -> None:
    form = StructuredOutputsParams(regex="(ab ?)+")
    formed = replace(GREEDY, structured_outputs=form, num_logprobs=None)
    answers = []
    for engine in (engine_of(demo_model, 0), engine_of(demo_model, 8)):
        for index, prompt in enumerate(PROMPTS):
            engine.add(f"form {index}", prompt, formed)
            engine.add(f"free {index}", prompt, GREEDY)
        engine.run()
        engine.executor.shutdown()
        answers.append({name: result.token_ids for name, result in engine.results.items()})
    assert answers[0] == answers[1]
