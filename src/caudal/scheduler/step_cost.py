"""Predicts a step's milliseconds from its shape; learns the machine while it runs."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

PROMPT_SHARE = 0.15
"""What a prompt token's attention to a position costs, of a decoding row's: a chunk reads each
position once for many tokens (measured with AMX: 0.12 to 0.16)."""
GUESS_SHARE = 0.25
"""The same of a guessed token, for which its row has read the position (0.16 to 0.3)."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Coefficients: milliseconds per step, decode row, prefill token, position that a row reads."""

    step_ms: float = 5.0
    decode_row_ms: float = 0.5
    prefill_token_ms: float = 0.3
    context_token_ms: float = 1e-4

    def guess_ms(self, num_context_tokens: float) -> float:
        """Milliseconds that a guessed token adds to a step."""
        return self.decode_row_ms + GUESS_SHARE * self.context_token_ms * num_context_tokens


def prompt_reads(num_tokens: int, num_computed_tokens: int) -> float:
    """Context reads of a prompt chunk, in positions that a decoding row reads."""
    attended = num_tokens * num_computed_tokens + num_tokens * (num_tokens + 1) / 2
    return PROMPT_SHARE * attended


def guess_reads(num_guesses: int, num_known_tokens: int) -> float:
    """Context reads of a row's guesses, in the same unit."""
    attended = num_guesses * num_known_tokens + num_guesses * (num_guesses + 1) / 2
    return GUESS_SHARE * attended


FORGETTING = 0.96
"""Weight of an observation after one more of its kind; a memory of about 25 steps."""
NOISE = 0.05
"""Relative noise of a measured step; sets how fast the prior gives way to data."""
PRIOR_SPREAD = 3.0
"""Prior standard deviation of a coefficient, relative to its prior value."""
CLIP_SIGMAS = 3.0
"""Larger residuals lose weight in proportion (Huber): a hiccup hardly moves a settled fit."""
MIN_SIGMA = 0.03
INITIAL_SIGMA = 1.0
SIGMA_RATE = 0.1
DECODE_SPEED_WINDOW = 7
"""Decode-only steps whose median tells whether such steps got faster or slower as a whole."""
PREFILL_SPEED_WINDOW = 15
"""The same of steps with prefill. Their sizes differ more, and one burst has few of them."""
SPEED_DEAD_ZONE = 0.15
WARM_STEPS = 64
DECODE_STRIDE = 4
"""Once warm, one in so many decode-only steps is learnt from: they are all alike."""

_NUM = 4
_Vector = tuple[float, float, float, float]


class StepCostModel:
    """Least squares on relative errors, with a prior, forgetting and no negative coefficient.

    ms = step + decode_row * rows + prefill_token * tokens + context_token * reads

    The last are context reads: positions, each in proportion to what reading it costs.

    * Residuals are relative to the measured time, so 5 ms decode steps count as much as 100 ms
      prefill steps, and a slow outlier has little weight to begin with.
    * Steps with and without prefill are forgotten apart: an hour of decoding leaves what was
      learnt of prefill as it was.
    * The prior is scaled to the machine's general speed. It decides what the data leave open,
      such as how a constant number of rows shares its cost with the step.
    * When the machine as a whole changes speed (a neighbour, a clock), the median ratio of the
      last steps rescales what was learnt so far from steps of their kind. That of the other kind
      stays: what slows short decode steps most (a server that writes many answers on the same
      cores) hardly touches a prompt, and a burst must be foreseen before its first step.
    """

    def __init__(self, prior: StepCosts | None = None) -> None:
        prior = prior or StepCosts()
        self._prior: _Vector = (
            prior.step_ms,
            prior.decode_row_ms,
            prior.prefill_token_ms,
            prior.context_token_ms,
        )
        self._coefficients = self._prior
        self._decode_steps = _NormalEquations(DECODE_SPEED_WINDOW)
        self._prefill_steps = _NormalEquations(PREFILL_SPEED_WINDOW)
        self._log_scale = 0.0
        self._sigma = INITIAL_SIGMA
        self._num_skipped = 0
        self.num_observed = 0

    @property
    def costs(self) -> StepCosts:
        """The present coefficients."""
        return StepCosts(*self._coefficients)

    def predict(self, decode_rows: int, prefill_tokens: int, context_reads: float) -> float:
        """Milliseconds of a step."""
        step, row, token, context = self._coefficients
        return step + row * decode_rows + token * prefill_tokens + context * context_reads

    def prefill_ms(self, num_tokens: int, num_computed_tokens: int) -> float:
        """Milliseconds that a prefill chunk after `num_computed_tokens` adds to a step."""
        _, _, token, context = self._coefficients
        return token * num_tokens + context * prompt_reads(num_tokens, num_computed_tokens)

    def max_prefill_tokens(self, budget_ms: float, num_computed_tokens: int, limit: int) -> int:
        """The largest chunk (at most `limit`) that adds no more than `budget_ms` to a step."""
        if budget_ms <= 0:
            return 0
        if self.prefill_ms(limit, num_computed_tokens) <= budget_ms:
            return limit
        # prefill_ms(n) = a n^2 + b n
        _, _, token, context = self._coefficients
        a = PROMPT_SHARE * context / 2
        b = token + PROMPT_SHARE * context * (num_computed_tokens + 0.5)
        # 2c / (b + sqrt(b^2 + 4ac)): stable also where a vanishes.
        return min(limit, int(2 * budget_ms / (b + math.sqrt(b * b + 4 * a * budget_ms))))

    def observe(
        self, decode_rows: int, prefill_tokens: int, context_reads: float, step_ms: float
    ) -> None:
        """Learn from a measured step; times that are not positive are ignored."""
        if not 0 < step_ms < math.inf:
            return
        predicted = self.predict(decode_rows, prefill_tokens, context_reads)
        equations = self._prefill_steps if prefill_tokens else self._decode_steps
        if self.num_observed >= WARM_STEPS and equations.follow_speed(
            step_ms / max(predicted, 1e-6)
        ):
            self._fit()
            predicted = self.predict(decode_rows, prefill_tokens, context_reads)
        if prefill_tokens == 0 and self.num_observed >= WARM_STEPS:
            self._num_skipped = (self._num_skipped + 1) % DECODE_STRIDE
            if self._num_skipped:
                return
        step, row, token, context = self._prior
        # In units of the prior's cost and of the measured time: the fit's target is 1.
        features = (
            step / step_ms,
            row * decode_rows / step_ms,
            token * prefill_tokens / step_ms,
            context * context_reads / step_ms,
        )
        self.num_observed += 1
        self._follow_scale(sum(features))
        equations.add(features, self._trust(1.0 - predicted / step_ms))
        self._fit()

    def _follow_scale(self, prior_ratio: float) -> None:
        """Average the log of measured to prior time: first plainly, then over ~50 steps."""
        rate = max(0.02, 1.0 / self.num_observed)
        self._log_scale += rate * (-math.log(prior_ratio) - self._log_scale)

    def _trust(self, residual: float) -> float:
        """Weight (0 to 1] of an observation; lasting large residuals raise sigma and count."""
        bound = CLIP_SIGMAS * self._sigma
        size = abs(residual)
        seen = min(size, 2 * bound)
        variance = (1 - SIGMA_RATE) * self._sigma**2 + SIGMA_RATE * seen * seen
        self._sigma = max(MIN_SIGMA, math.sqrt(variance))
        return 1.0 if size <= bound else bound / size

    def _fit(self) -> None:
        """Solve for the coefficients; those that come out negative are held at zero."""
        scale = math.exp(self._log_scale)
        precision = (NOISE / (PRIOR_SPREAD * scale)) ** 2
        decode, prefill = self._decode_steps, self._prefill_steps
        matrix = [
            [decode.matrix[i][j] + prefill.matrix[i][j] for j in range(_NUM)] for i in range(_NUM)
        ]
        target = [decode.target[i] + prefill.target[i] + precision * scale for i in range(_NUM)]
        for i in range(_NUM):
            matrix[i][i] += precision
        free = list(range(_NUM))
        solution = _solve(matrix, target, free)
        while min(solution) < 0.0:
            free.remove(solution.index(min(solution)))
            solution = _solve(matrix, target, free)
        step, row, token, context = self._prior
        self._coefficients = (
            step * solution[0],
            row * solution[1],
            token * solution[2],
            context * solution[3],
        )


class _NormalEquations:
    """Sums over observations, each with weight FORGETTING ** (later observations)."""

    def __init__(self, speed_window: int) -> None:
        self.matrix = [[0.0] * _NUM for _ in range(_NUM)]
        self.target = [0.0] * _NUM
        self._ratios: deque[float] = deque(maxlen=speed_window)

    def add(self, features: _Vector, weight: float) -> None:
        target = self.target
        x0, x1, x2, x3 = features
        for i, row in enumerate(self.matrix):
            scaled = features[i] * weight
            row[0] = row[0] * FORGETTING + scaled * x0
            row[1] = row[1] * FORGETTING + scaled * x1
            row[2] = row[2] * FORGETTING + scaled * x2
            row[3] = row[3] * FORGETTING + scaled * x3
            target[i] = target[i] * FORGETTING + scaled

    def follow_speed(self, ratio: float) -> bool:
        """Rescale what was learnt if most of the last steps were off to the same side.

        `ratio` is the measured over the predicted time of the newest.
        """
        ratios = self._ratios
        ratios.append(ratio)
        if len(ratios) < (ratios.maxlen or 0):
            return False
        speed = sorted(ratios)[len(ratios) // 2]
        if abs(speed - 1.0) <= SPEED_DEAD_ZONE:
            return False
        ratios.clear()
        self._rescale(speed)
        return True

    def _rescale(self, speed: float) -> None:
        """As if every step seen had taken `speed` times as long."""
        self.matrix = [[value / (speed * speed) for value in row] for row in self.matrix]
        self.target = [value / speed for value in self.target]


def _solve(matrix: list[list[float]], target: list[float], free: list[int]) -> list[float]:
    """Solve the positive definite system over the `free` unknowns; the others are zero."""
    rows = [[matrix[i][j] for j in free] + [target[i]] for i in free]
    size = len(free)
    for pivot in range(size):
        top = rows[pivot]
        for below in rows[pivot + 1 :]:
            factor = below[pivot] / top[pivot]
            for column in range(pivot + 1, size + 1):
                below[column] -= factor * top[column]
    solution = [0.0] * _NUM
    for pivot in range(size - 1, -1, -1):
        row = rows[pivot]
        value = row[size]
        for column in range(pivot + 1, size):
            value -= row[column] * solution[free[column]]
        solution[free[pivot]] = value / row[pivot]
    return solution
