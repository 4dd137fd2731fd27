"""How long answers are must not be learnt from the short ones alone."""

from __future__ import annotations

import random

import pytest

from caudal.scheduler.answer_lengths import GUESS, AnswerLengths
from caudal.scheduler.output import FinishReason
from tests.scheduler.harness import Harness, make_request


def test_answers_broken_off_do_not_make_answers_look_short() -> None:
    """Clients that leave after 50 tokens see the ends of short answers only."""
    rng = random.Random(1)
    lengths = AnswerLengths()
    for _ in range(200):
        length, patience = rng.randint(1, 100), rng.choice([50, 200])
        lengths.add(min(length, patience), is_whole=length <= patience)
    assert lengths.mean == pytest.approx(50, rel=0.15)
    ended = lengths.shares(()).ended(25, [25.0, 50.0])
    assert ended == pytest.approx([1 / 3, 2 / 3], abs=0.1)


def test_first_answers_of_a_burst_do_not_make_all_look_short() -> None:
    """All began together; eight have ended, fifty-six go on."""
    lengths = AnswerLengths()
    for length in range(10, 18):
        lengths.add(length)
    alone, beside = lengths.shares(()), lengths.shares([18] * 56)
    assert alone.of_fresh(600, [16.0]) == pytest.approx([1.0])
    assert beside.of_fresh(600, [16.0]) == pytest.approx([8 / 64], abs=0.01)


def test_answers_longer_than_all_others_end_at_last() -> None:
    lengths = AnswerLengths()
    for _ in range(8):
        lengths.add(20)
        lengths.add(40, is_whole=False)
    shares = lengths.shares(())
    now, later, last = shares.ended(10, [20.0, 50.0, 500.0])
    assert now == pytest.approx(0.5) and 0.5 < later < last <= 1.0
    assert last == pytest.approx(1.0, abs=0.01)


def test_without_any_whole_answer_the_mean_is_a_guess() -> None:
    lengths = AnswerLengths()
    lengths.add(3, is_whole=False)
    assert lengths.mean == GUESS
    assert lengths.shares([5]).ended(5, [0.0, 10_000.0]) == [0.0, 1.0]


@pytest.mark.parametrize("is_answered", [True, False], ids=["stop string", "client left"])
def test_stop_strings_teach_lengths_but_clients_that_leave_do_not(is_answered: bool) -> None:
    harness = Harness()
    harness.add(make_request("r", 20, max_tokens=500))
    harness.run_until(lambda: len(harness.results["r"].token_ids) == 5)
    harness.scheduler.abort(["r"], harness.now, is_answered=is_answered)
    harness.run()
    assert harness.results["r"].finish_reason is FinishReason.ABORT
    assert harness.scheduler._state.averages.lengths.mean == (5.0 if is_answered else GUESS)
