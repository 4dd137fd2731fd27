"""Constrained rows that sample without a mask and have their tokens checked."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from caudal.sampling_params import SamplingParams, StructuredOutputsParams
from caudal.scheduler.output import FinishReason
from caudal.structured_output.constraint import TOO_LONG, Constraint
from caudal.structured_output.limits import MAX_DIGITS
from tests.engine.engine_harness import Harness

PROMPT = [10 + i % 90 for i in range(45)]
SCHEMA = {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 2}
FORMS = (
    StructuredOutputsParams(json=SCHEMA),
    StructuredOutputsParams(regex="[a-f]{3,30}"),
    StructuredOutputsParams(choice=("the river", "the town")),
    StructuredOutputsParams(json_object=True),
)
ANYTHING = StructuredOutputsParams(regex="(?s:.*)")
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Harness]:
    harness = Harness(tiny_model)
    yield harness
    harness.executor.shutdown()


@pytest.fixture
def num_masks(engine: Harness, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many masks were begun, call by call."""
    masks = engine.executor._constrained.masks
    start = masks._start
    numbers = []

    def count(groups: Sequence[Sequence[Constraint]], *, tells_begin: bool) -> None:
        numbers.append(sum(map(len, groups)))
        start(groups, tells_begin=tells_begin)

    monkeypatch.setattr(masks, "_start", count)
    return numbers


@pytest.mark.parametrize("form", FORMS)
def test_greedy_tokens_are_those_of_masks(engine: Harness, form: StructuredOutputsParams) -> None:
    sampling = replace(GREEDY, structured_outputs=form)
    prompts = [PROMPT[start:] for start in range(12)]
    masked = engine.generate(prompts, replace(sampling, num_logprobs=0))
    checked = engine.generate(prompts, sampling)
    assert [each.token_ids for each in checked] == [each.token_ids for each in masked]


def test_only_refused_tokens_need_a_mask(engine: Harness, num_masks: list[int]) -> None:
    sampling = replace(GREEDY, ignore_eos=True, structured_outputs=ANYTHING)
    masked = engine.generate([PROMPT], replace(sampling, num_logprobs=0))[0]
    num_refused = sum(entry.rank > 1 for entry in masked.logprobs)
    assert 0 < num_refused < len(masked.token_ids) / 2
    assert sum(num_masks) >= len(masked.token_ids)
    num_masks.clear()
    engine.generate([PROMPT], sampling)
    assert sum(num_masks) == num_refused


@pytest.mark.parametrize(
    "option",
    [
        *({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"logit_bias": {7: 1.0}}),
        *({"repetition_penalty": 1.2}, {"min_tokens": 3}, {"num_logprobs": 1}),
    ],
)
def test_rows_whose_distribution_a_mask_may_change_have_one(
    engine: Harness, num_masks: list[int], option: dict[str, Any]
) -> None:
    sampling = SamplingParams(max_tokens=3, ignore_eos=True, seed=1, structured_outputs=ANYTHING)
    engine.generate([PROMPT], replace(sampling, **option))
    assert sum(num_masks) >= 3


def test_second_draw_has_the_distribution_of_a_mask(engine: Harness) -> None:
    """Against the logprobs of the free distribution, renormalised; chi-squared at 0.1 %."""
    letters = "abcdefgh"
    form = StructuredOutputsParams(choice=tuple(letters))
    ids = {}
    for letter in letters:
        only = StructuredOutputsParams(choice=(letter,))
        sampling = replace(GREEDY, structured_outputs=only, num_logprobs=0)
        result = engine.generate([PROMPT], sampling)[0]
        ids[result.token_ids[0]] = np.exp(result.logprobs[0].logprob)
    assert len(ids) == len(letters)
    total = sum(ids.values())
    assert total < 0.5  # most first draws are refused
    num_draws = 1000
    sampling = SamplingParams(max_tokens=1, structured_outputs=form)
    for seed in range(num_draws):
        engine.add(str(seed), PROMPT, replace(sampling, seed=seed))
    engine.run()
    found = Counter(result.token_ids[0] for result in engine.results.values())
    assert set(found) <= set(ids)
    expected = {token_id: num_draws * p / total for token_id, p in ids.items()}
    chi_squared = sum((found[i] - expected[i]) ** 2 / expected[i] for i in ids)
    assert chi_squared < 24.3  # 7 degrees of freedom


def test_seed_gives_the_same_tokens_alone_and_beside_others(engine: Harness) -> None:
    sampling = SamplingParams(max_tokens=40, seed=3, structured_outputs=FORMS[0])
    alone = engine.generate([PROMPT], sampling)[0].token_ids
    for seed in range(10, 18):
        engine.add(f"other {seed}", PROMPT, replace(sampling, seed=seed))
    assert engine.generate([PROMPT], sampling)[0].token_ids == alone


def test_number_is_ended_although_its_grammar_would_go_on(engine: Harness) -> None:
    form = StructuredOutputsParams(json={"type": "integer"})
    sampling = replace(GREEDY, temperature=1.0, max_tokens=400, structured_outputs=form)
    for seed in range(8):
        engine.add(str(seed), PROMPT, replace(sampling, seed=seed))
    engine.run()
    results = list(engine.results.values())
    assert {result.finish_reason for result in results} == {FinishReason.STOP}
    assert all(len(result.token_ids) <= MAX_DIGITS + 3 for result in results)


def test_mask_of_a_refused_token_that_never_comes_fails_its_request_alone(engine: Harness) -> None:
    sampling = replace(GREEDY, structured_outputs=FORMS[0])
    expected = engine.generate([PROMPT], sampling)[0].token_ids
    engine.executor._constrained.masks.timeout_s = 0.3
    engine.add("refused", PROMPT, replace(sampling, structured_outputs=FORMS[2]))
    engine.add("other", PROMPT, sampling)
    engine.step()
    release = threading.Event()

    class Hanging:
        def try_consume_tokens(self, token_ids: list[int]) -> int:
            return 0

        def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
            release.wait()

    constraint = engine.executor._runner._batch.states["refused"].constraint
    assert constraint is not None
    constraint.matcher = Hanging()  # type: ignore[assignment]
    engine.run()
    release.set()
    assert engine.results["refused"].error == TOO_LONG
    assert engine.results["other"].token_ids == expected
