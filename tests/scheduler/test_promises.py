"""What is learnt from waits that came true otherwise must not make later ones worse."""

from __future__ import annotations

import pytest

from caudal.scheduler.promises import MAX_FACTOR, Promise, Promises
from tests.scheduler.harness import make_request

REASON = "queue_requests"


def follow(promises: Promises, wait_s: float, true_s: float, step_s: float = 0.05) -> None:
    """A refusal that is told `wait_s`, on a machine where it takes `true_s`."""
    promises.make(REASON, Promise([make_request("r", 5)], wait_s, 0.0, 0, 0.0))
    now = 0.0
    while now < true_s:
        now += step_s
        for reason, promise in promises.to_check(now, 0):
            promises.settle(reason, promise, now, is_open=now >= true_s)


def test_waits_that_are_always_too_short_are_corrected() -> None:
    promises = Promises()
    for _ in range(12):
        follow(promises, 2.0, 3.0)
    assert promises.factor(REASON) == pytest.approx(1.5, rel=0.15)
    assert promises.factor("queue_tokens") == 1.0


def test_one_odd_outcome_changes_little() -> None:
    promises = Promises()
    follow(promises, 2.0, 30.0)
    assert promises.factor(REASON) < 1.4
    for _ in range(10):
        follow(promises, 2.0, 2.0)
    assert promises.factor(REASON) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("true_s", [0.1, 100.0])
def test_corrections_are_bounded(true_s: float) -> None:
    promises = Promises()
    for _ in range(30):
        follow(promises, 2.0, true_s)
    assert 1 / MAX_FACTOR <= promises.factor(REASON) <= MAX_FACTOR


def test_queue_that_clients_left_or_that_nobody_watched_teaches_nothing() -> None:
    promises = Promises()
    for num_cancelled, now in ((50, 0.1), (0, 60.0)):
        promises.make(REASON, Promise([make_request("r", 5)], 2.0, 0.0, 0, 0.0))
        assert promises.to_check(now, num_cancelled) == []
    assert promises.factor(REASON) == 1.0


def test_only_the_first_refusal_of_a_full_queue_is_followed() -> None:
    promises = Promises()
    first = Promise([make_request("a", 5)], 2.0, 0.0, 0, 0.0)
    promises.make(REASON, first)
    promises.make(REASON, Promise([make_request("b", 5)], 1.0, 0.1, 0, 0.1))
    assert promises.to_check(0.2, 0) == [(REASON, first)]


def test_waits_of_a_few_steps_are_not_followed() -> None:
    promises = Promises()
    promises.make(REASON, Promise([make_request("r", 5)], 0.05, 0.0, 0, 0.0))
    assert promises.to_check(0.01, 0) == []
