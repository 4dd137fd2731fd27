"""Predicts a step's milliseconds from its shape; learns the machine while it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Coefficients: milliseconds per step, decode row, prefill token, attended position."""

    step_ms: float = 5.0
    decode_row_ms: float = 0.5
    prefill_token_ms: float = 0.3
    context_token_ms: float = 2e-5


FORGETTING = 0.985
"""Weight of an observation after one more; a memory of about 65 steps."""
CLIP_SIGMAS = 3.0
"""A residual counts for at most so many typical ones: a hiccup hardly moves the fit."""
MIN_SIGMA = 0.03
SIGMA_RATE = 0.1
INITIAL_SIGMA = 1.0
NOISE_VARIANCE = 0.05**2
"""Relative noise of a measured step; sets how fast the prior gives way to data."""
PRIOR_SPREAD = 4.0
"""Prior standard deviation of a coefficient, relative to its prior value."""

WARM_STEPS = 64
DECODE_STRIDE = 4
"""One in so many decode-only steps is learnt from."""

_NUM = 4
_FORGETTING_SCALE = FORGETTING**-0.5


class StepCostModel:
    """Recursive least squares over relative errors, with forgetting per feature.

    ms = step + decode_row * rows + prefill_token * tokens + context_token * positions

    * Residuals are relative to the measured time, so 5 ms decode steps count as much as 100 ms
      prefill steps, and a slow outlier has little weight to begin with.
    * Only features present in a step are forgotten: an hour of decoding leaves the prefill
      coefficient as it was.
    * Coefficients never become negative: one that would is set to zero, and the others take
      their best values given that (projection in the metric of the fit).
    """

    __slots__ = ("_covariance", "_max_variance", "_num_skipped", "_sigma", "_theta", "num_observed")

    def __init__(self, prior: StepCosts | None = None) -> None:
        prior = prior or StepCosts()
        self._theta = [
            prior.step_ms,
            prior.decode_row_ms,
            prior.prefill_token_ms,
            prior.context_token_ms,
        ]
        self._max_variance = [(PRIOR_SPREAD * value) ** 2 for value in self._theta]
        self._covariance = [
            [self._max_variance[row] if row == column else 0.0 for column in range(_NUM)]
            for row in range(_NUM)
        ]
        self._sigma = INITIAL_SIGMA
        self._num_skipped = 0
        self.num_observed = 0

    @property
    def costs(self) -> StepCosts:
        """The present coefficients."""
        return StepCosts(*self._theta)

    def predict(self, decode_rows: int, prefill_tokens: int, context_tokens: int) -> float:
        """Milliseconds of a step; `context_tokens` is the sum of attended KV positions."""
        step, row, token, context = self._theta
        return step + row * decode_rows + token * prefill_tokens + context * context_tokens

    def prefill_ms(self, num_tokens: int, num_computed_tokens: int) -> float:
        """Milliseconds that a prefill chunk after `num_computed_tokens` adds to a step."""
        _, _, token, context = self._theta
        attended = num_tokens * num_computed_tokens + num_tokens * (num_tokens + 1) / 2
        return token * num_tokens + context * attended

    def max_prefill_tokens(self, budget_ms: float, num_computed_tokens: int, limit: int) -> int:
        """The largest chunk (at most `limit`) that adds no more than `budget_ms` to a step."""
        if budget_ms <= 0:
            return 0
        if self.prefill_ms(limit, num_computed_tokens) <= budget_ms:
            return limit
        # prefill_ms(n) = a n^2 + b n
        _, _, token, context = self._theta
        a = context / 2
        b = token + context * (num_computed_tokens + 0.5)
        # 2c / (b + sqrt(b^2 + 4ac)): stable also where a vanishes.
        return min(limit, int(2 * budget_ms / (b + math.sqrt(b * b + 4 * a * budget_ms))))

    def observe(
        self, decode_rows: int, prefill_tokens: int, context_tokens: int, step_ms: float
    ) -> None:
        """Learn from a measured step; times that are not positive are ignored.

        Once the fit is warm, most steps without prefill are skipped: they are all alike.
        """
        if not 0 < step_ms < math.inf:
            return
        if prefill_tokens == 0 and self.num_observed >= WARM_STEPS:
            self._num_skipped = (self._num_skipped + 1) % DECODE_STRIDE
            if self._num_skipped:
                return
        weight = 1 / step_ms
        features = (
            weight,
            decode_rows * weight,
            prefill_tokens * weight,
            context_tokens * weight,
        )
        self._forget(features)
        residual = 1.0 - self.predict(decode_rows, prefill_tokens, context_tokens) * weight
        self._learn(features, self._clip(residual))
        self._keep_non_negative()
        self.num_observed += 1

    def _clip(self, residual: float) -> float:
        """The residual within CLIP_SIGMAS; lasting large ones raise sigma and get through."""
        bound = CLIP_SIGMAS * self._sigma
        seen = min(abs(residual), 2 * bound)
        variance = (1 - SIGMA_RATE) * self._sigma**2 + SIGMA_RATE * seen * seen
        self._sigma = max(MIN_SIGMA, math.sqrt(variance))
        return max(-bound, min(bound, residual))

    def _forget(self, features: tuple[float, float, float, float]) -> None:
        covariance = self._covariance
        for i, row in enumerate(covariance):
            variance = row[i]
            # Beyond the prior's own spread, growth would only amplify noise.
            if features[i] == 0.0 or not 0.0 < variance < self._max_variance[i]:
                continue
            scale = _FORGETTING_SCALE
            for j in range(_NUM):
                row[j] *= scale
                covariance[j][i] *= scale

    def _learn(self, features: tuple[float, float, float, float], residual: float) -> None:
        x0, x1, x2, x3 = features
        gains = [row[0] * x0 + row[1] * x1 + row[2] * x2 + row[3] * x3 for row in self._covariance]
        spread = NOISE_VARIANCE + gains[0] * x0 + gains[1] * x1 + gains[2] * x2 + gains[3] * x3
        for i, row in enumerate(self._covariance):
            gain = gains[i] / spread
            self._theta[i] += gain * residual
            for j in range(_NUM):
                row[j] -= gain * gains[j]

    def _keep_non_negative(self) -> None:
        theta, covariance = self._theta, self._covariance
        for i in range(_NUM):
            excess = theta[i]
            if excess < 0.0 and covariance[i][i] > 0.0:
                share = excess / covariance[i][i]
                for j in range(_NUM):
                    theta[j] -= covariance[j][i] * share
        for i in range(_NUM):
            if theta[i] < 0.0:
                theta[i] = 0.0
