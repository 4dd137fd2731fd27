"""Guesses of how a text goes on, against a plain search."""

from __future__ import annotations

import random

import numpy as np
import pytest

from caudal import _native
from caudal.ops.guessing import MAX_MATCH, MIN_MATCH, guess_rows
from caudal.sampling_params import SamplingParams
from caudal.step_io import ModelRunnerOutput, NewRequestData
from caudal.worker.input_batch import InputBatch
from caudal.worker.ngram_drafter import NgramDrafter
from caudal.worker.sampler import LogitsRow


def plain_guess(text: list[int], max_guesses: int) -> list[int]:
    """The longest, then latest, earlier occurrence of the end of the text, and what follows it."""
    for match in range(min(MAX_MATCH, len(text) - 1), MIN_MATCH - 1, -1):
        for end in range(len(text) - 1, match - 1, -1):
            if text[end - match : end] == text[-match:]:
                longer = list(text)
                for index in range(max_guesses):
                    longer.append(longer[end + index])
                return longer[len(text) :]
    return []


def guess(text: list[int], max_guesses: int) -> list[int]:
    tokens = np.array([[9] * len(text), text], dtype=np.int32)
    rows, lengths = np.array([1], np.int32), np.array([len(text)], np.int32)
    guesses = guess_rows(tokens, rows, lengths, max_guesses)
    return [token for token in guesses[0].tolist() if token >= 0]


@pytest.mark.parametrize("num_tokens", [2, 3, 12, 60])
def test_guesses_are_those_of_a_plain_search(num_tokens: int) -> None:
    rng = random.Random(num_tokens)
    num_found = 0
    for _ in range(400):
        text = [rng.randrange(num_tokens) for _ in range(rng.randrange(1, 70))]
        expected = plain_guess(text, 7)
        assert guess(text, 7) == expected
        num_found += bool(expected)
    assert num_found > 2


def test_a_guess_that_reaches_the_end_goes_on_with_itself() -> None:
    assert guess([5, 6, 7, 6, 7], 5) == [6, 7, 6, 7, 6]
    assert guess([4, 4, 4], 4) == [4, 4, 4, 4]


def test_what_occurs_once_is_not_guessed() -> None:
    assert guess([1, 2, 3, 4, 2], 4) == []
    assert guess([1], 4) == []


def test_wrong_arguments_are_refused() -> None:
    tokens = np.zeros((2, 9), np.int32)
    one = np.array([1], np.int32)
    for rows, lengths, low, high, count in (
        (np.array([2], np.int32), one, 2, 4, 1),
        (one, np.array([10], np.int32), 2, 4, 1),
        (one, np.array([1, 1], np.int32), 2, 4, 1),
        (one, one, 0, 4, 1),
        (one, one, 3, 2, 1),
        (one, one, 2, 4, -1),
    ):
        with pytest.raises(ValueError, match=r"rows|lengths|min_match|max_guesses"):
            _native.guess_rows(tokens, rows, lengths, low, high, count)


def test_rows_that_depend_on_more_than_their_text_have_no_guesses() -> None:
    batch = InputBatch(max_num_seqs=3, max_model_len=32, block_size=16)
    states = [
        batch.add(
            NewRequestData(
                request_id=name,
                token_ids=[3, 4, 3, 4, 3, 4],
                num_prompt_tokens=6,
                sampling=SamplingParams(repetition_penalty=penalty),
                seed=0,
                block_ids=[index],
                num_computed_tokens=0,
            )
        )
        for index, (name, penalty) in enumerate((("free", 1.0), ("penalised", 1.2)))
    ]
    result = ModelRunnerOutput(sampled_token_ids={"free": [4], "penalised": [4]})
    NgramDrafter(batch, 3).propose([LogitsRow(state) for state in states], result)
    assert result.draft_token_ids == {"free": [3, 4, 3]}
    batch.put_drafts({"free": [8, 9]})
    assert batch.tokens[states[0].row, :8].tolist() == [3, 4, 3, 4, 3, 4, 8, 9]
    assert states[0].num_known_tokens == 6
