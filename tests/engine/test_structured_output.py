"""Constrained rows in a whole engine: exact, independent of their neighbours, freed at the end."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from caudal.config import CacheConfig, SchedulerConfig
from caudal.engine.messages import EngineRequest
from caudal.errors import InvalidRequestError
from caudal.llm import LLM
from caudal.ops.interface import SamplingArrays, SamplingResult
from caudal.sampling_params import SamplingParams, StructuredOutputsParams
from caudal.scheduler.output import FinishReason
from caudal.structured_output.constraint import TOO_LONG, Constraint
from caudal.structured_output.limits import MAX_STUCK_MASKS
from caudal.structured_output.mask_thread import UNAVAILABLE
from caudal.structured_output.vocabulary import GrammarVocabulary
from tests.engine.engine_harness import Harness, Result

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "ages": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
        "town": {"enum": ["Ulm", "Oslo"]},
    },
    "required": ["name", "ages", "town"],
    "additionalProperties": False,
}
FORM = StructuredOutputsParams(json=SCHEMA)
GREEDY = SamplingParams(temperature=0.0, max_tokens=150, structured_outputs=FORM)
MASKED = replace(GREEDY, num_logprobs=0)  # `GREEDY` has masks for refused tokens only
FREE = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPT = [10 + i % 90 for i in range(45)]
NO_TARGETS = SchedulerConfig(tpot_ms=None, ttft_ms=None)

Create = Callable[..., Harness]


@pytest.fixture
def create(tiny_model: Path) -> Iterator[Create]:
    """Makes engines and ends their threads."""
    engines: list[Harness] = []

    def make(**options: Any) -> Harness:
        engines.append(Harness(tiny_model, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.executor.shutdown()


@pytest.fixture(scope="module")
def token_bytes(tiny_model: Path) -> list[bytes]:
    return GrammarVocabulary.from_file(tiny_model).token_bytes


def text_of(result: Result, token_bytes: list[bytes]) -> str:
    """The text of a result, without its end-of-generation token."""
    ids = result.token_ids
    if result.finish_reason is FinishReason.STOP:
        ids = ids[:-1]
    return b"".join(token_bytes[token_id] for token_id in ids).decode()


def test_neighbours_chunks_hits_and_preemption_do_not_change_a_bit(create: Create) -> None:
    params = replace(GREEDY, num_logprobs=0)
    alone = create().generate([PROMPT], params)[0]
    assert alone.finish_reason is FinishReason.STOP
    batched = create()
    for index in range(12):
        batched.add(f"free-{index}", PROMPT[index:], FREE)
        form = StructuredOutputsParams(regex=f"[a-z]{{{index + 3}}}")
        batched.add(f"form-{index}", PROMPT[index:], replace(FREE, structured_outputs=form))
    assert batched.generate([PROMPT], params)[0].exact() == alone.exact()
    assert batched.generate([PROMPT], params)[0].exact() == alone.exact()  # on a prefix hit
    chunked = create(
        scheduler=SchedulerConfig(
            tpot_ms=None, ttft_ms=None, max_num_batched_tokens=8, max_num_seqs=4
        )
    )
    assert chunked.generate([PROMPT], params)[0].exact() == alone.exact()
    small = create(cache=CacheConfig(num_blocks=20))
    results = small.generate([PROMPT] * 6, params)
    assert sum(result.num_preemptions for result in results) > 0
    assert all(result.exact() == alone.exact() for result in results)


@pytest.mark.parametrize("seed", range(6))
def test_output_of_a_random_model_validates_at_temperature_one(
    create: Create, token_bytes: list[bytes], seed: int
) -> None:
    sampling = SamplingParams(max_tokens=400, seed=seed, structured_outputs=FORM)
    options = [
        sampling,
        replace(sampling, top_k=3, top_p=0.9, min_p=0.01),
        replace(sampling, repetition_penalty=1.3, presence_penalty=1, frequency_penalty=0.5),
        replace(sampling, logit_bias={20: 100.0, 50: -100.0}, num_logprobs=3),
    ]
    engine = create()
    for index, each in enumerate(options):
        engine.add(str(index), PROMPT, each)
    engine.run()
    for result in engine.results.values():
        if result.finish_reason is FinishReason.STOP:
            value = json.loads(text_of(result, token_bytes))
            assert list(value) == ["name", "ages", "town"]
            assert len(value["name"]) <= 12
            assert value["town"] in ("Ulm", "Oslo")
        else:
            assert result.finish_reason is FinishReason.LENGTH


def test_output_cut_by_max_tokens_ends_with_length(
    create: Create, token_bytes: list[bytes]
) -> None:
    result = create().generate([PROMPT], replace(GREEDY, max_tokens=5))[0]
    assert result.finish_reason is FinishReason.LENGTH
    assert text_of(result, token_bytes).startswith("{")


def test_logprobs_are_those_of_the_free_distribution(create: Create) -> None:
    engine = create()
    free = engine.generate([PROMPT], replace(FREE, max_tokens=1, num_logprobs=5))[0]
    formed = engine.generate([PROMPT], replace(GREEDY, max_tokens=1, num_logprobs=5))[0]
    assert formed.token_ids != free.token_ids
    assert formed.logprobs[0].top_ids == free.logprobs[0].top_ids
    assert formed.logprobs[0].top_logprobs == free.logprobs[0].top_logprobs
    assert formed.logprobs[0].logprob < free.logprobs[0].logprob
    plain = engine.generate([PROMPT], replace(GREEDY, max_tokens=1))[0]
    assert plain.token_ids == formed.token_ids


def test_min_tokens_does_not_forbid_the_only_legal_token(
    create: Create, token_bytes: list[bytes]
) -> None:
    form = StructuredOutputsParams(choice=("ab",))
    for extra in ({}, {"num_logprobs": 1}):
        sampling = replace(GREEDY, min_tokens=20, structured_outputs=form, **extra)
        result = create().generate([PROMPT], sampling)[0]
        assert text_of(result, token_bytes) == "ab"
        assert result.finish_reason is FinishReason.STOP
    stop_id = token_bytes.index(b"b")
    form = StructuredOutputsParams(regex="(?:ab){3}")
    sampling = replace(GREEDY, min_tokens=6, stop_token_ids=(stop_id,), structured_outputs=form)
    result = create().generate([PROMPT], sampling)[0]
    assert b"".join(token_bytes[i] for i in result.token_ids).startswith(b"ababab")


def test_min_tokens_holds_back_an_end_that_is_not_needed(
    create: Create, token_bytes: list[bytes]
) -> None:
    form = StructuredOutputsParams(regex="[a-f]*")
    sampling = replace(GREEDY, min_tokens=30, max_tokens=40, structured_outputs=form)
    assert len(create().generate([PROMPT], sampling)[0].token_ids) > 30


def test_ignored_end_lets_the_text_go_on_freely_after_the_form(
    create: Create, token_bytes: list[bytes]
) -> None:
    form = StructuredOutputsParams(choice=("ab",))
    sampling = replace(GREEDY, ignore_eos=True, max_tokens=30, structured_outputs=form)
    result = create().generate([PROMPT], sampling)[0]
    assert len(result.token_ids) == 30
    assert result.finish_reason is FinishReason.LENGTH
    assert b"".join(token_bytes[i] for i in result.token_ids).startswith(b"ab")


def test_any_token_that_ends_a_generation_ends_the_form(tiny_model: Path, create: Create) -> None:
    """B65: the tiny model has two."""
    form = StructuredOutputsParams(choice=("ab",))
    engine = create()
    for token_id in sorted(engine.executor.info.eog_token_ids):
        sampling = replace(GREEDY, structured_outputs=form, logit_bias={token_id: 50.0})
        result = engine.generate([PROMPT], sampling)[0]
        assert result.token_ids[-1] == token_id
        assert result.finish_reason is FinishReason.STOP
    assert len(engine.executor.info.eog_token_ids) > 1


class FakeMatcher:
    """Stands in for the matcher of a row; `compute` is what a mask takes."""

    def __init__(self, compute: Callable[[], object], *, has_error: bool = False) -> None:
        self._compute = compute
        self._has_error = has_error

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        self._compute()

    def is_error(self) -> bool:
        return self._has_error


def constraint_of(engine: Harness, request_id: str) -> Constraint:
    states = engine.executor._runner._batch.states
    while request_id not in states:
        engine.step()
    constraint: Constraint | None = states[request_id].constraint
    assert constraint is not None
    return constraint


def replace_matcher(engine: Harness, request_id: str, matcher: FakeMatcher) -> None:
    constraint = constraint_of(engine, request_id)
    engine.executor._constrained.masks.wait()
    constraint.matcher = matcher  # type: ignore[assignment]
    constraint.has_mask = False


def test_row_whose_grammar_gives_up_fails_alone(create: Create) -> None:
    engine = create()
    expected = engine.generate([PROMPT], GREEDY)[0].token_ids
    engine.add("bad", PROMPT, MASKED)
    engine.add("good", PROMPT, MASKED)
    engine.add("free", PROMPT, FREE)
    engine.step()
    replace_matcher(engine, "bad", FakeMatcher(lambda: None, has_error=True))
    engine.run()
    assert engine.results["bad"].finish_reason is FinishReason.ERROR
    assert engine.results["bad"].error == "the grammar became too complex to follow any further"
    assert engine.results["good"].token_ids == expected
    assert len(engine.results["free"].token_ids) == 40


def test_mask_that_never_comes_fails_its_request_alone(create: Create) -> None:
    engine = create()
    expected = engine.generate([PROMPT], GREEDY)[0].token_ids
    engine.executor._constrained.masks.timeout_s = 0.5
    slow = replace(MASKED, structured_outputs=StructuredOutputsParams(regex="[a-z]{90}"))
    for name, sampling in (("before", MASKED), ("slow", slow), ("after", MASKED), ("free", FREE)):
        engine.add(name, PROMPT, sampling)
    engine.step()
    release = threading.Event()
    replace_matcher(engine, "slow", FakeMatcher(release.wait))
    started = time.monotonic()
    engine.step()
    engine.step()
    assert 0.4 < time.monotonic() - started < 10
    engine.run()
    assert engine.results["slow"].finish_reason is FinishReason.ERROR
    assert engine.results["slow"].error == TOO_LONG
    for name in ("before", "after"):
        assert engine.results[name].token_ids == expected
    assert len(engine.results["free"].token_ids) == 40
    # The grammar works again for those who ask later, whether or not the thread still hangs.
    assert engine.generate([PROMPT], slow)[0].finish_reason is FinishReason.STOP
    release.set()


def test_rows_that_share_a_lock_with_one_that_hangs_fail_with_it(create: Create) -> None:
    engine = create()
    engine.executor._constrained.masks.timeout_s = 0.3
    for name in ("first", "hangs", "last"):
        engine.add(name, PROMPT, MASKED)
    engine.step()
    release = threading.Event()
    replace_matcher(engine, "hangs", FakeMatcher(release.wait))
    engine.run()
    release.set()
    assert {result.error for result in engine.results.values()} == {TOO_LONG}


def test_threads_that_hang_are_bounded(create: Create) -> None:
    engine = create()
    engine.executor._constrained.masks.timeout_s = 0.2
    release = threading.Event()
    errors = []
    for number in range(MAX_STUCK_MASKS + 1):
        form = StructuredOutputsParams(regex=f"[a-z]{{{90 + number}}}")
        engine.add(str(number), PROMPT, replace(MASKED, structured_outputs=form))
        engine.step()
        if number < MAX_STUCK_MASKS:
            replace_matcher(engine, str(number), FakeMatcher(release.wait))
        engine.run()
        errors.append(engine.results[str(number)].error)
    release.set()
    assert errors == [TOO_LONG] * MAX_STUCK_MASKS + [UNAVAILABLE]
    for worker in engine.executor._constrained.masks._stuck:
        worker._thread.join(10)
    assert engine.generate([PROMPT], GREEDY)[0].finish_reason is FinishReason.STOP


def test_mask_that_is_merely_slow_does_no_harm(create: Create) -> None:
    engine = create()
    expected = engine.generate([PROMPT], GREEDY)[0].token_ids
    engine.add("slow", PROMPT, MASKED)
    engine.step()
    constraint = constraint_of(engine, "slow")
    engine.executor._constrained.masks.wait()
    real = constraint.matcher

    class Slow:
        """Takes its time, within the limit."""

        def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
            time.sleep(0.01)
            real.unsafe_compute_mask_ptr(address, num_bytes)

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    constraint.matcher = Slow()  # type: ignore[assignment]
    engine.run()
    assert engine.results["slow"].token_ids == expected


def test_masks_that_fail_leave_free_rows_alone(
    create: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = create()
    engine.add("form", PROMPT, MASKED)
    engine.add("free", PROMPT, FREE)
    engine.step()

    def fail(constraint: Constraint) -> None:
        constraint.mask_error = RuntimeError("internal text")

    monkeypatch.setattr(Constraint, "fill_mask", fail)
    engine.run()
    assert engine.results["form"].finish_reason is FinishReason.ERROR
    assert "internal text" not in str(engine.results["form"].error)
    assert engine.results["free"].finish_reason is FinishReason.LENGTH


def test_masked_greedy_row_takes_another_token_than_the_best_allowed(
    create: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: list[dict[str, Any]] = [{}, {"min_tokens": 30}, {"logit_bias": {5: 9.0}}]
    forms = (FORM, StructuredOutputsParams(regex="[ -~]{20,90}"))
    samplings = [replace(MASKED, structured_outputs=f, **o) for f in forms for o in options]
    engine = create()

    def generate() -> list[list[int]]:
        return [engine.generate([PROMPT], sampling)[0].token_ids for sampling in samplings]

    found = generate()
    backend = engine.executor._runner._backend
    is_best_allowed = set()

    class PlainMasks:  # written into the logits, so that the kernel need not know them
        def sample(self, logits: NDArray[np.float32], params: SamplingArrays) -> SamplingResult:
            for row, place in enumerate(params.mask_rows.tolist()):
                if place >= 0:
                    bits = params.mask_words[place].view(np.uint8)
                    allowed = np.unpackbits(bits, count=logits.shape[1], bitorder="little") == 1
                    is_best_allowed.add(bool(allowed[logits[row].argmax()]))
                    logits[row, ~allowed] = -np.inf
            unmasked = np.full_like(params.mask_rows, -1)
            return backend.sample(logits, dataclasses.replace(params, mask_rows=unmasked))

    monkeypatch.setattr(engine.executor._runner, "_backend", PlainMasks())
    assert generate() == found
    assert is_best_allowed == {True, False}


def test_masks_of_one_grammar_computed_together_hang_or_fail_as_one(create: Create) -> None:
    engine = create()
    (masks := engine.executor._constrained.masks).timeout_s = 0.3
    other = replace(MASKED, structured_outputs=StructuredOutputsParams(regex="[a-z]{90}"))
    for name, sampling in (("one", MASKED), ("two", MASKED), ("other", other)):
        engine.add(name, PROMPT, sampling)
    engine.step()
    masks.wait()
    release = threading.Event()

    class Hanging:
        def unsafe_compute_mask_ptr(self, *_: object) -> None:
            release.wait()

    assert masks._worker is not None
    masks._worker._executor = Hanging()  # type: ignore[assignment]
    engine.run()
    release.set()
    assert engine.results["one"].error == engine.results["two"].error == TOO_LONG
    assert engine.results["other"].error is None
    assert engine.generate([PROMPT] * 2, GREEDY)[1].finish_reason is FinishReason.STOP


def test_row_whose_grammar_gives_up_beside_others_of_its_grammar_fails_alone(
    create: Create, token_bytes: list[bytes]
) -> None:
    engine = create()
    expected = engine.generate([PROMPT], GREEDY)[0].token_ids
    for name in ("before", "bad", "after"):
        engine.add(name, PROMPT, MASKED)
    engine.step()
    constraint = constraint_of(engine, "bad")
    engine.executor._constrained.masks.wait()
    assert not constraint.matcher.consume_token(token_bytes.index(b"}"))
    for name in ("before", "bad", "after"):
        constraint_of(engine, name).has_mask = False
    engine.run()
    assert engine.results["bad"].error == "the grammar became too complex to follow any further"
    assert engine.results["before"].token_ids == engine.results["after"].token_ids == expected


def test_aborted_request_frees_its_constraint(create: Create) -> None:
    engine = create()
    engine.add("gone", PROMPT, GREEDY)
    engine.add("stays", PROMPT, GREEDY)
    engine.step()
    engine.step()
    engine.core.abort(["gone"])
    engine.step()
    assert set(engine.executor._runner._batch.states) == {"stays"}
    engine.run()
    assert engine.results["stays"].finish_reason is FinishReason.STOP


def test_requests_with_one_grammar_follow_it_each_for_itself(
    create: Create, token_bytes: list[bytes]
) -> None:
    engine = create()
    form = StructuredOutputsParams(regex="[a-z]{4,20}")
    for seed in range(8):
        sampling = SamplingParams(max_tokens=40, seed=seed, structured_outputs=form)
        engine.add(str(seed), PROMPT, sampling)
    engine.run()
    texts = [text_of(result, token_bytes) for result in engine.results.values()]
    assert len(set(texts)) == 8
    assert all(text.isalpha() and 4 <= len(text) <= 20 for text in texts)


def test_form_survives_the_wire() -> None:
    request = EngineRequest(request_id="x", prompt_token_ids=[1], sampling=GREEDY)
    data = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(data, type=EngineRequest).sampling == GREEDY


def test_form_that_cannot_be_enforced_is_refused_offline(tiny_model: Path) -> None:
    llm = LLM(tiny_model)
    try:
        bad = replace(GREEDY, structured_outputs=StructuredOutputsParams(json={"not": {}}))
        with pytest.raises(InvalidRequestError, match="/not: the keyword"):
            llm.generate(["the"], bad)
        good = replace(GREEDY, structured_outputs=StructuredOutputsParams(json={"const": [1, "a"]}))
        for completion in llm.generate(["the", "river"], good):
            assert json.loads(completion.text) == [1, "a"]
    finally:
        llm._core._executor.shutdown()
