"""The offline facade where it differs from the engine below it: streaming and interruption."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from caudal import LLM, SamplingParams
from caudal.errors import ContextLengthError, InvalidRequestError
from caudal.step_io import Interrupt, ModelRunnerOutput, SchedulerOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9]]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    yield LLM(tiny_model, num_threads=1)


def test_interrupt_in_a_step_ends_the_call_and_leaves_the_model_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while kernels run used to break the schedule for every later call."""
    expected = [c.token_ids for c in llm.generate(PROMPTS, GREEDY)]
    executor = llm._core._executor
    execute = executor.execute
    num_steps = 0

    def interrupted(output: SchedulerOutput, interrupt: Interrupt | None) -> ModelRunnerOutput:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            signal.raise_signal(signal.SIGINT)
        return execute(output, interrupt)

    with monkeypatch.context() as patch:
        patch.setattr(executor, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    assert not llm._core.has_work
    llm._core.check_integrity()
    assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected


def test_stream_shows_a_growing_answer_that_equals_the_whole_one(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    whole = llm.chat(messages, GREEDY)[0]
    lengths, text = [], ""
    for completion in llm.stream_chat(messages, GREEDY):
        assert completion.text.startswith(text)
        lengths.append(len(completion.token_ids))
        text = completion.text
    assert (text, lengths[-1]) == (whole.text, 8)
    assert lengths == sorted(lengths)
    assert len(lengths) >= 8


def test_stream_closed_early_frees_its_request(llm: LLM) -> None:
    stream = llm.stream_chat([{"role": "user", "content": "hi"}], GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm._core.has_work
    llm._core.check_integrity()


def test_bad_arguments_are_refused_with_the_field_named(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="prompts: expected a list"):
        llm.generate("one string")
    with pytest.raises(InvalidRequestError, match="prompt: must hold at least one token"):
        llm.generate([[]])
    with pytest.raises(InvalidRequestError, match="sampling: got 1 entries for 2 prompts"):
        llm.generate(PROMPTS, [GREEDY])
    with pytest.raises(ContextLengthError):
        llm.generate([[1] * (llm.max_model_len + 1)], GREEDY)
