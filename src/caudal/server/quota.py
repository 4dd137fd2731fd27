"""What each API key has used, and whether it may use more: requests, tokens, and at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

from caudal.errors import InvalidRequestError, OverloadedError
from caudal.server.errors import Headers
from caudal.server.keys import ApiKey, KeyLimits

RATE_LIMIT = b"x-ratelimit-"
"""Begins the names of the headers that tell a key's limits, as OpenAI's do."""

_DURATION_RATE = 0.2
"""Weight of the latest request in the average duration."""


class RateLimitError(OverloadedError):
    """The key has used what it may use for now (HTTP 429)."""

    def __init__(self, message: str, *, retry_after_s: float, reason: str) -> None:
        super().__init__(message, retry_after_s=retry_after_s, reason=reason)
        self.code = "rate_limit_exceeded"


class Bucket:
    """Fills evenly to what may be used in a minute; may be overdrawn by what was not foreseen."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._last = now

    def level(self, now: float) -> float:
        """What may be used at once."""
        filled = self._level + (now - self._last) * self.per_minute / 60
        self._level, self._last = min(filled, float(self.per_minute)), now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be used, 0 if it may be now."""
        return max(0.0, (amount - self.level(now)) * 60 / self.per_minute)

    def take(self, amount: float, now: float) -> None:
        """Use `amount` (give it back, if negative), whether or not it is there."""
        self._level = self.level(now) - amount


class Quota:
    """The use of one key; owned by the event loop."""

    def __init__(self, limits: KeyLimits, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._limits = KeyLimits()
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._mean_s: float | None = None
        self.num_active = 0
        self.limits = limits

    @property
    def limits(self) -> KeyLimits:
        """The present limits."""
        return self._limits

    @limits.setter
    def limits(self, limits: KeyLimits) -> None:
        """Start anew where a rate has changed."""
        if limits is self._limits:
            return
        self._requests = self._bucket(self._requests, limits.requests_per_minute)
        self._tokens = self._bucket(self._tokens, limits.tokens_per_minute)
        self._limits = limits

    def _bucket(self, old: Bucket | None, per_minute: int | None) -> Bucket | None:
        if per_minute is None or (old is not None and old.per_minute == per_minute):
            return None if per_minute is None else old
        return Bucket(per_minute, self._clock())

    def enter(self) -> float:
        """A request begins; returns the time for `leave`. Raises RateLimitError."""
        now, limit = self._clock(), self._limits.max_concurrency
        if limit is not None and self.num_active >= limit:
            raise RateLimitError(
                f"Rate limit reached: max_concurrency of this API key is {limit} requests at once, "
                f"and {self.num_active} are running.",
                retry_after_s=(1.0 if self._mean_s is None else self._mean_s / limit),
                reason="key_concurrency",
            )
        if self._requests is not None:
            wait_s = self._requests.wait_s(1, now)
            if wait_s > 0:
                raise RateLimitError(
                    "Rate limit reached: requests_per_minute of this API key is "
                    f"{self._requests.per_minute}. Retry in {wait_s:.2f} s.",
                    retry_after_s=wait_s,
                    reason="key_requests",
                )
            self._requests.take(1, now)
        self.num_active += 1
        return now

    def leave(self, entered: float) -> None:
        """A request has ended."""
        self.num_active -= 1
        spent_s = self._clock() - entered
        mean_s = spent_s if self._mean_s is None else self._mean_s
        self._mean_s = mean_s + _DURATION_RATE * (spent_s - mean_s)

    def take_prompt(self, num_tokens: int, param: str = "prompt") -> None:
        """Use the tokens of a prompt.

        Raises RateLimitError, or InvalidRequestError for a prompt that never fits the limit.
        """
        if self._tokens is None:
            return
        limit, now = self._tokens.per_minute, self._clock()
        if num_tokens > limit:
            raise InvalidRequestError(
                f"The prompt has {num_tokens} tokens, but tokens_per_minute of this API key is "
                f"{limit}. Shorten the prompt.",
                param=param,
                code="tokens_per_minute_exceeded",
            )
        wait_s = self._tokens.wait_s(num_tokens, now)
        if wait_s > 0:
            raise RateLimitError(
                f"Rate limit reached: tokens_per_minute of this API key is {limit}, and "
                f"{num_tokens} are needed. Retry in {wait_s:.2f} s.",
                retry_after_s=wait_s,
                reason="key_tokens",
            )
        self._tokens.take(num_tokens, now)

    def use_tokens(self, num_tokens: int) -> None:
        """Use tokens that came out (give them back, if negative); the next prompt pays for them."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, self._clock())

    def headers(self) -> Headers:
        """How much is left of the limits that there are."""
        now = self._clock()
        headers: Headers = []
        for name, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket is None:
                continue
            left = max(0, math.floor(bucket.level(now)))
            reset = duration(bucket.wait_s(bucket.per_minute, now))
            headers += [
                (RATE_LIMIT + b"limit-" + name, str(bucket.per_minute).encode()),
                (RATE_LIMIT + b"remaining-" + name, str(left).encode()),
                (RATE_LIMIT + b"reset-" + name, reset.encode()),
            ]
        return headers


class Quotas:
    """The quotas of all keys, made on first use; they outlive a reload of the keys."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_owner: dict[str, Quota] = {}

    def of(self, key: ApiKey) -> Quota:
        """The key's quota, with the key's present limits."""
        quota = self._by_owner.get(key.owner)
        if quota is None:
            quota = self._by_owner[key.owner] = Quota(key.limits, self._clock)
        quota.limits = key.limits
        return quota


def duration(seconds: float) -> str:
    """As OpenAI writes it: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"
