"""Predicts when running requests will have ended, from how long earlier answers were."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque

MEMORY = 128
"""Answers whose lengths are remembered."""
SPEED_MEMORY = 64
"""Answers whose times are: the machine changes sooner than what people ask."""
MIN_SAMPLES = 8
"""With fewer, any length up to twice the mean counts as equally likely."""
GRID = 16
"""Points of a prediction."""


class AnswerLengths:
    """Lengths of the latest answers, in tokens, as a distribution."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque(maxlen=MEMORY)
        self._times: deque[tuple[int, float]] = deque(maxlen=SPEED_MEMORY)
        self._sorted: list[int] | None = None

    def add(self, num_tokens: int, residence_ms: float) -> None:
        """An answer has ended by itself, after so much time on the machine."""
        self._latest.append(num_tokens)
        self._times.append((num_tokens, residence_ms))
        self._sorted = None

    @property
    def mean(self) -> float:
        """Tokens of an answer; there must have been one."""
        return sum(self._latest) / len(self._latest)

    @property
    def token_ms(self) -> float:
        """Milliseconds on the machine per token; there must have been an answer."""
        num_tokens = sum(num_tokens for num_tokens, _ in self._times)
        return sum(residence_ms for _, residence_ms in self._times) / num_tokens

    def __len__(self) -> int:
        return len(self._latest)

    @property
    def in_order(self) -> list[int]:
        """The lengths, ascending."""
        if self._sorted is None:
            self._sorted = sorted(self._latest)
        return self._sorted


class Departures:
    """Predicts in how many steps so many requests will have ended; each gives a token a step.

    What it works out for one state of the machine serves all questions until the next state.
    """

    def __init__(self, lengths: AnswerLengths, num_seats: int) -> None:
        self._lengths = lengths
        self._num_seats = max(1, num_seats)
        self._outputs: list[tuple[int, int]] = []
        self._mean = 0.0
        self._grids: dict[int, list[float]] = {}

    def steps_until(self, num_ended: int, outputs: list[tuple[int, int]], mean: float) -> float:
        """Steps until probably `num_ended` requests have ended.

        `outputs` are the running ones: tokens so far (-1 for one that only its limit can end), and
        how many their limits still allow. Seats that become free, and those that are, go to
        requests of about `mean` length.
        """
        mean = max(mean, 1.0)
        if mean != self._mean or outputs != self._outputs:
            self._mean, self._outputs, self._grids = mean, outputs, {}
        # Half an end early: the time at which it is as likely as not.
        wanted = num_ended - 0.5
        # Halvings of the span of two answers, so that a steady pace gets there in a third of it.
        halvings = int(math.log2(max(1.0, self._num_seats / (1.5 * num_ended))))
        while True:
            ends = self._grid(halvings)
            if ends[-1] >= wanted:
                index = bisect_left(ends, wanted)
                part = (ends[index] - wanted) / max(ends[index] - ends[index - 1], 1e-9)
                return (index - part) * self._step(halvings)
            if halvings == 0:
                # From there on ends come at a steady pace.
                return 2 * mean + (wanted - ends[-1]) * mean / self._num_seats
            halvings -= 1

    def _step(self, halvings: int) -> float:
        return math.ldexp(2 * self._mean / GRID, -halvings)

    def _grid(self, halvings: int) -> list[float]:
        """The expected number of ends at each point of the grid."""
        ends = self._grids.get(halvings)
        if ends is None:
            ends = self._grids[halvings] = self._make_grid(self._step(halvings))
        return ends

    def _make_grid(self, step: float) -> list[float]:
        fresh = self._ended_shares(0, math.inf, step)
        num_fresh = max(0, self._num_seats - len(self._outputs))
        totals = [num_fresh * share for share in fresh]
        for num_done, limit in self._outputs:
            if num_done < 0:
                # Half at the limit, for what is searched lies half an end early.
                shares = [min(1.0, max(0.0, i - limit / step + 0.5)) for i in range(GRID + 1)]
            else:
                shares = self._ended_shares(num_done, limit, step)
            for index, share in enumerate(shares):
                totals[index] += share
        # Those that took the place of earlier ends end as well.
        ends, new_ends = [0.0], [0.0]
        for index in range(1, GRID + 1):
            again = sum(new_ends[i] * fresh[index - i] for i in range(1, index))
            ends.append(max(ends[-1], totals[index] + again))
            new_ends.append(ends[-1] - ends[-2])
        return ends

    def _ended_shares(self, num_done: int, limit: float, step: float) -> list[float]:
        """At each point, the probability that an answer of `num_done` tokens has ended."""
        points = [index * step for index in range(GRID + 1)]
        num_known = len(self._lengths)
        if num_known < MIN_SAMPLES:
            left = 2 * self._mean - num_done
            shares = self._tail(points) if left <= 0 else [min(1.0, x / left) for x in points]
        else:
            lengths = self._lengths.in_order
            first = bisect_right(lengths, num_done)
            num_longer = num_known - first
            if num_longer == 0:
                shares = self._tail(points)
            else:
                shares = [
                    (bisect_right(lengths, num_done + x, first) - first) / num_longer
                    for x in points
                ]
        if limit > points[-1]:
            return shares
        return [1.0 if x >= limit else share for x, share in zip(points, shares, strict=True)]

    def _tail(self, points: list[float]) -> list[float]:
        """For an answer longer than any other: it may end at any time."""
        return [1.0 - math.exp(-2 * x / self._mean) for x in points]
