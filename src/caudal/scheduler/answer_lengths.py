"""How long answers are: the latest ones, as a distribution."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import chain

LIMITING = 0.7
"""Limits below this share of the mean are what ends most answers."""
MEMORY = 128
"""Answers whose lengths are remembered."""
MIN_SAMPLES = 4
"""With fewer, any length up to twice the mean counts as equally likely."""
GUESS = 128.0
"""Mean length before any request has ended by itself."""


class LengthShares:
    """What share of answers is longer than so many tokens.

    Answers that have not ended count as far as they have come (Kaplan and Meier, 1958): of those
    that began together the short ones end first, and are not all that there is.
    """

    def __init__(self, whole: Iterable[int], broken: Iterable[int], num_whole: int) -> None:
        """From the lengths of `num_whole` whole answers and of parts."""
        ends = Counter(whole)
        num_left = 0
        left: list[tuple[int, int]] = []  # length, how many got at least so far
        for length, number in sorted(Counter(chain(ends.elements(), broken)).items(), reverse=True):
            num_left += number
            left.append((length, num_left))
        self._lengths: list[int] = []
        self._end = left[0][0] if left else 0
        """How far any answer is known to have come."""
        self._alive = [1.0]
        """Before the first of `_lengths`, then after each."""
        area, last, share = 0.0, 0, 1.0
        for length, number in reversed(left):
            if length in ends:
                area += share * (length - last)
                share *= 1.0 - ends[length] / number
                last = length
                self._lengths.append(length)
                self._alive.append(share)
        mean_whole = sum(length * number for length, number in ends.items()) / max(1, num_whole)
        # Those that were longer than all whole ones go on as `_tail` says.
        self.mean = max(1.0, area + share * mean_whole / 2) if num_whole else GUESS
        """Tokens of an answer, at least 1."""
        self._is_known = num_whole >= MIN_SAMPLES

    def of_fresh(self, mean_limit: float, points: Sequence[float]) -> list[float]:
        """The probability that an answer ends within so many tokens after its first.

        `mean_limit` is how many tokens such answers may have on average.
        """
        if mean_limit >= (LIMITING if self._is_known else 1.0) * self.mean:
            return self.ended(1, points)
        return [min(1.0, max(0.0, (x + 1.5) / max(1.0, mean_limit) - 0.5)) for x in points]

    def ended(self, num_done: int, points: Sequence[float]) -> list[float]:
        """The probability that an answer of `num_done` tokens ends within so many more.

        `points` are numbers of further tokens, each with its own probability.
        """
        if not self._is_known:
            left = 2 * self.mean - num_done
            return self._tail(points) if left <= 0 else [min(1.0, x / left) for x in points]
        lengths, alive = self._lengths, self._alive
        first = bisect_right(lengths, num_done)
        now, rest = alive[first], 1.0
        shares = [0.0] * len(points)
        if now > 0.0:
            rest = alive[-1] / now
            shares = [1.0 - alive[bisect_right(lengths, num_done + x, first)] / now for x in points]
        if rest > 0.0:
            end = max(num_done, self._end)
            beyond = self._tail([max(0.0, num_done + x - end) for x in points])
            shares = [share + rest * far for share, far in zip(shares, beyond, strict=True)]
        return shares

    def _tail(self, points: Sequence[float]) -> list[float]:
        """For an answer longer than any other: it may end at any time."""
        return [1.0 - math.exp(-2 * x / self.mean) for x in points]


class AnswerLengths:
    """Lengths of the latest answers, in tokens."""

    def __init__(self) -> None:
        self._whole: deque[int] = deque(maxlen=MEMORY)
        self._broken: deque[int] = deque(maxlen=MEMORY)
        self._shares: LengthShares | None = None
        self.version = 0
        """Grows with every answer."""

    def add(self, num_tokens: int, *, is_whole: bool = True) -> None:
        """An answer has ended by itself, or was broken off after so many tokens."""
        (self._whole if is_whole else self._broken).append(num_tokens)
        self._shares = None
        self.version += 1

    @property
    def mean(self) -> float:
        """Tokens of an answer, at least 1."""
        if self._shares is None:
            self._shares = self.shares(())
        return self._shares.mean

    def shares(self, running: Iterable[int]) -> LengthShares:
        """The distribution, with the lengths so far of answers that go on."""
        return LengthShares(self._whole, chain(self._broken, running), len(self._whole))
