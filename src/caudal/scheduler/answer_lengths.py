"""How long answers are: the latest ones, as a distribution."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

LIMITING = 0.7
"""Limits below this share of the mean are what ends most answers."""
MEMORY = 128
"""Answers whose lengths are remembered."""
MIN_SAMPLES = 4
"""With fewer, any length up to twice the mean counts as equally likely."""
GUESS = 128.0
"""Mean length before any request has ended by itself."""


class AnswerLengths:
    """Lengths of the latest answers, in tokens."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque(maxlen=MEMORY)
        self._sorted: list[int] = []
        self._is_sorted = True
        self.version = 0
        """Grows with every answer."""

    def add(self, num_tokens: int) -> None:
        """An answer has ended by itself."""
        self._latest.append(num_tokens)
        self._is_sorted = False
        self.version += 1

    @property
    def mean(self) -> float:
        """Tokens of an answer, at least 1."""
        if not self._latest:
            return GUESS
        return max(1.0, sum(self._latest) / len(self._latest))

    def fresh_shares(self, mean_limit: float, points: Sequence[float]) -> list[float]:
        """The probability that an answer ends within so many tokens after its first.

        `mean_limit` is how many tokens such answers may have on average.
        """
        is_known = len(self._latest) >= MIN_SAMPLES
        if mean_limit >= (LIMITING if is_known else 1.0) * self.mean:
            return self.ended_shares(1, points)
        return [min(1.0, max(0.0, (x + 1.5) / max(1.0, mean_limit) - 0.5)) for x in points]

    def ended_shares(self, num_done: int, points: Sequence[float]) -> list[float]:
        """The probability that an answer of `num_done` tokens ends within so many more.

        `points` are numbers of further tokens, each with its own probability.
        """
        if len(self._latest) < MIN_SAMPLES:
            left = 2 * self.mean - num_done
            return self._tail(points) if left <= 0 else [min(1.0, x / left) for x in points]
        if not self._is_sorted:
            self._sorted, self._is_sorted = sorted(self._latest), True
        lengths = self._sorted
        first = bisect_right(lengths, num_done)
        num_longer = len(lengths) - first
        if num_longer == 0:
            return self._tail(points)
        return [(bisect_right(lengths, num_done + x, first) - first) / num_longer for x in points]

    def _tail(self, points: Sequence[float]) -> list[float]:
        """For an answer longer than any other: it may end at any time."""
        return [1.0 - math.exp(-2 * x / self.mean) for x in points]
