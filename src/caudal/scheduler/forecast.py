"""Foresees from the present load when prompts will have been computed and answers ended."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from caudal.config import SchedulerConfig
from caudal.scheduler.answer_lengths import LengthShares
from caudal.scheduler.request import Request
from caudal.scheduler.stats import TrafficAverages
from caudal.scheduler.step_cost import GUESS_SHARE, StepCostModel
from caudal.scheduler.step_planner import TARGET_SHARE

NUM_INTERVALS = 16
GROWTH = 1.3
"""Each interval is so much longer than the one before: the near future is seen sharper."""
HORIZON = 2.0
"""How far it is foreseen step by step, in mean answers; from there on the pace is steady."""
BUCKETS = 32
"""Rows whose outputs differ by less than such a part of the horizon are foreseen together."""
SIMILAR = 0.05
"""Prompts whose mean length differs by less share a forecast."""


class DecodeRow(NamedTuple):
    """A running request whose prompt is computed."""

    num_output: int
    """Tokens so far; -1: only its limit can end it."""
    limit: int
    """Tokens that its limit still allows."""


@dataclass(frozen=True, slots=True)
class RunningLoad:
    """What runs, as far as the future depends on it."""

    rows: Sequence[DecodeRow]
    context_tokens: int
    """KV positions that the rows attend to."""
    num_prefilling: int
    prefill_tokens: int
    """Prompt tokens that those have still to compute."""

    @classmethod
    def of(cls, running: Iterable[Request]) -> RunningLoad:
        """What running requests amount to."""
        rows: list[DecodeRow] = []
        num_prefilling = context_tokens = prefill_tokens = 0
        for request in running:
            num_known = len(request.token_ids)
            if num_known - request.num_computed_tokens > 1:
                num_prefilling += 1
                prefill_tokens += num_known - request.num_computed_tokens
                continue
            context_tokens += num_known
            num_output = num_known - request.num_prompt_tokens if request.stop_token_ids else -1
            rows.append(DecodeRow(num_output, request.max_total_tokens - num_known))
        return cls(rows, context_tokens, num_prefilling, prefill_tokens)

    @property
    def num_running(self) -> int:
        """Seats taken."""
        return len(self.rows) + self.num_prefilling

    def num_complete(self, num_tokens: float, mean_prompt: float) -> float:
        """Prompts complete after so many prompt tokens; those that have begun go first."""
        if num_tokens <= self.prefill_tokens:
            return self.num_prefilling * num_tokens / max(1, self.prefill_tokens)
        return self.num_prefilling + (num_tokens - self.prefill_tokens) / mean_prompt

    def tokens_until(self, num_complete: float, mean_prompt: float) -> float:
        """Prompt tokens until so many prompts are complete."""
        if num_complete <= self.num_prefilling:
            return self.prefill_tokens * num_complete / max(1, self.num_prefilling)
        return self.prefill_tokens + (num_complete - self.num_prefilling) * mean_prompt


@dataclass(slots=True)
class Course:
    """Sums since now, at growing distances, for as long as prompts of one mean length wait."""

    mean_prompt: float
    """Tokens to compute of a waiting prompt."""
    ms: list[float]
    ended: list[float]
    """Requests that have ended by themselves."""
    prompt_tokens: list[float]
    """Prompt tokens computed."""

    def when_ended(self, num_requests: float) -> float:
        """Milliseconds until so many have ended as likely as not."""
        return self._when(self.ended, num_requests - 0.5)

    def when_computed(self, num_tokens: float) -> float:
        """Milliseconds until so many prompt tokens have been computed."""
        return self._when(self.prompt_tokens, num_tokens)

    def _when(self, sums: list[float], wanted: float) -> float:
        if wanted <= 0:
            return 0.0
        index = bisect_left(sums, wanted)
        if index < len(sums):
            part = (sums[index] - wanted) / max(sums[index] - sums[index - 1], 1e-9)
            return self.ms[index] - part * (self.ms[index] - self.ms[index - 1])
        # Beyond what was looked at the pace is that of its second half, or, where things happen in
        # waves, that of the whole.
        # A last interval longer than all others is the second half by itself.
        end_ms, half = self.ms[-1], min(bisect_left(self.ms, self.ms[-1] / 2), len(self.ms) - 2)
        if end_ms <= self.ms[half]:
            return 2 * end_ms
        pace = max(sums[-1] / end_ms, (sums[-1] - sums[half]) / (end_ms - self.ms[half]))
        return end_ms + (wanted - sums[-1]) / pace if pace > 0 else 2 * end_ms


class Forecaster:
    """Plays the scheduler's rules forward with expected numbers instead of requests.

    How many rows decode, and with them the time that a step leaves for prompts, changes as prompts
    become rows and rows end: after a burst nothing is as it was on average before. What is worked
    out for one state of the machine serves all questions until the next state.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cost: StepCostModel,
        averages: TrafficAverages,
        max_running: int,
    ) -> None:
        self._cost = cost
        self._averages = averages
        self._num_seats = max(1, max_running)
        self._max_tokens = config.max_num_batched_tokens
        self._target_ms = None if config.tpot_ms is None else config.tpot_ms * TARGET_SHARE
        self._granted_per_ms = config.min_prefill_tokens_per_s / 1e3
        self._load: RunningLoad | None = None
        self._version = -1, -1
        self._courses: list[tuple[float, float, Course]] = []

    def course(self, load: RunningLoad, mean_prompt: float, mean_limit: float) -> Course:
        """The future of `load` while requests wait that are alike on average.

        They have `mean_prompt` tokens to compute and may answer with `mean_limit`.
        """
        mean_prompt = max(1.0, mean_prompt)
        version = self._cost.num_observed, self._averages.lengths.version
        if load != self._load or version != self._version:
            self._load, self._version, self._courses = load, version, []
        for prompt, limit, course in self._courses:
            if _are_similar(prompt, mean_prompt) and _are_similar(limit, mean_limit):
                return course
        course = self._make_course(load, mean_prompt, mean_limit)
        self._courses.append((mean_prompt, mean_limit, course))
        return course

    def _make_course(self, load: RunningLoad, mean_prompt: float, mean_limit: float) -> Course:
        earliest = min((row.limit for row in load.rows if row.num_output < 0), default=0)
        shares = self._averages.lengths.shares(
            row.num_output for row in load.rows if row.num_output > 0
        )
        fresh = _FreshAnswers(shares, mean_limit, earliest)
        points = fresh.points
        old = _num_alive(load.rows, points, shares)
        mean_context = load.context_tokens / max(1, len(load.rows))
        course = Course(mean_prompt, [0.0], [0.0], [0.0])
        stretch = self._averages.stretch
        num_complete = 0.0
        born = [0.0]
        for index in range(1, len(points)):
            steps = (points[index] - points[index - 1]) / self._averages.tokens_per_row
            alive = [num * share for num, share in zip(born, fresh.alive[index - 1], strict=False)]
            survivors = sum(map(mul, born, fresh.alive[index]))
            num_rows = old[index - 1] + sum(alive)
            context = old[index - 1] * (mean_context + points[index - 1]) + sum(
                num * (mean_prompt + points[index - 1] - points[birth])
                for birth, num in enumerate(alive)
            )
            ended = num_rows - old[index] - survivors
            decode_ms, num_tokens, token_ms = self._step(num_rows, context, mean_prompt)
            # A seat that becomes free is taken when the next step is planned.
            num_room = self._num_seats - num_rows + ended
            done = course.prompt_tokens[-1]
            most = load.tokens_until(num_complete + num_room, mean_prompt)
            computed = max(0.0, min(num_tokens * steps, most - done))
            complete = load.num_complete(done + computed, mean_prompt)
            born.append(complete - num_complete)
            num_complete = complete
            passed_ms = steps * decode_ms + computed * token_ms
            course.ms.append(course.ms[-1] + passed_ms * stretch)
            course.ended.append(course.ended[-1] + ended)
            course.prompt_tokens.append(done + computed)
        return course

    def _step(
        self, num_rows: float, context_tokens: float, mean_prompt: float
    ) -> tuple[float, float, float]:
        """Milliseconds of a step without prompts; its prompt tokens, and milliseconds of each."""
        costs = self._cost.costs
        width = self._averages.width
        decode_ms = costs.step_ms + costs.decode_row_ms * num_rows * width
        decode_ms += costs.context_token_ms * context_tokens * (1.0 + GUESS_SHARE * (width - 1.0))
        token_ms = self._cost.prefill_ms(math.ceil(mean_prompt), 0) / math.ceil(mean_prompt)
        num_tokens = max(1.0, self._max_tokens - num_rows)
        if num_rows >= 0.5 and self._target_ms is not None and token_ms > 0:
            within = max(0.0, self._target_ms - decode_ms) / token_ms
            # Of s milliseconds ageing grants a part: tokens = rate * (decode_ms + tokens * each).
            rate = min(self._granted_per_ms, 0.9 / token_ms)
            granted = rate * decode_ms / (1.0 - rate * token_ms)
            num_tokens = min(num_tokens, max(within, granted))
        return decode_ms, num_tokens, token_ms


def _num_alive(
    rows: Sequence[DecodeRow], points: list[float], lengths: LengthShares
) -> list[float]:
    """How many of `rows` have probably not ended at each point."""
    span = max(1, int(points[-1] / BUCKETS))
    ended = [0.0] * len(points)
    buckets = Counter(
        row.num_output // span for row in rows if row.num_output >= 0 and row.limit > points[-1]
    )
    for bucket, num_rows in buckets.items():
        shares = lengths.ended(bucket * span + span // 2, points)
        ended = [sum_ + num_rows * share for sum_, share in zip(ended, shares, strict=True)]
    for row in rows:
        if row.num_output >= 0 and row.limit > points[-1]:
            continue
        last = bisect_left(points, row.limit)
        if row.num_output >= 0:
            for index, share in enumerate(lengths.ended(row.num_output, points[:last])):
                ended[index] += share
        for index in range(last, len(points)):
            ended[index] += 1.0
    return [len(rows) - sum_ for sum_ in ended]


def _are_similar(one: float, other: float) -> bool:
    return one == other or abs(one - other) <= SIMILAR * other


class _FreshAnswers:
    """Shares of new answers that go on, for starts and ends on one grid of steps."""

    def __init__(self, lengths: LengthShares, mean_limit: float, least: int) -> None:
        """Look at least so many steps ahead, and as a rule over HORIZON answers."""
        length = max(1.0, min(lengths.mean, mean_limit))
        first = max(HORIZON * length, least * GROWTH) * (GROWTH - 1) / (GROWTH**NUM_INTERVALS - 1)
        self.points = [0.0]
        """Tokens of an answer from now."""
        for index in range(NUM_INTERVALS):
            self.points.append(self.points[-1] + first * GROWTH**index)
        points = self.points
        by_birth = [
            lengths.of_fresh(mean_limit, [point - start for point in points[birth:]])
            for birth, start in enumerate(points)
        ]
        self.alive = [
            [1.0 - by_birth[birth][index - birth] for birth in range(index + 1)]
            for index in range(len(points))
        ]
        """By point, then by the earlier point (or the same) at which the answer began."""
