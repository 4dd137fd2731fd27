"""A forecast that cannot be made must not take the engine down with it."""

from __future__ import annotations

import math

import pytest

from caudal.scheduler.forecast import Course


def test_a_last_interval_longer_than_all_others_has_a_pace() -> None:
    course = Course(10.0, [0.0, 10.0, 20.0, 100.0], [0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 40.0])
    assert course.when_computed(80.0) == pytest.approx(100.0 + 40.0 / (40.0 / 80.0))


@pytest.mark.parametrize("ms", [[0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 5.0, 5.0]])
def test_steps_that_take_no_time_give_a_finite_answer(ms: list[float]) -> None:
    sums = [0.0] * len(ms)
    course = Course(1.0, ms, sums, sums)
    assert math.isfinite(course.when_computed(10.0)) and math.isfinite(course.when_ended(3))
