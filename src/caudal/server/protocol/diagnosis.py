"""`/caudal/doctor` and its kin: their parameters, and what the prefix lint says."""

from __future__ import annotations

import msgspec


class LoadQuery(msgspec.Struct, frozen=True):
    """Query parameters."""

    seconds: float | None = None
    """Look only at requests of the last so many seconds before the latest one."""


class DoctorQuery(msgspec.Struct, frozen=True):
    """Query parameters; at most one of them."""

    seconds: float | None = None
    """Look only at requests of the last so many seconds before the latest one."""
    last: str | None = None
    """Look at the history of that time instead: 10m to 30d, such as 90m, 24h or 7d."""


class PrefixQuery(msgspec.Struct, frozen=True):
    """Query parameters."""

    limit: int = 20
    """Requests to show, the latest ones."""


class PrefixPattern(msgspec.Struct, frozen=True):
    """Losses of several requests with one cause."""

    token: int
    """Where their prompts stopped matching."""
    block: int
    reason: str
    """changed, evicted or not_computed."""
    num_requests: int
    lost_tokens: int
    """Computed again, of all these requests."""
    share_lost: float
    """Of their prompt tokens."""
    lost_ms: float
    """Of all these requests, by the engine's cost model."""
    changed: str
    """What stands there in the latest of them."""
    neighbour_changed: str
    """What stood there before."""
    stable: str
    """How the text behind it begins, which did not change."""
    advice: str


class PrefixMiss(msgspec.Struct, frozen=True):
    """One request."""

    age_s: float
    prompt_tokens: int
    cached_tokens: int
    token: int
    block: int
    reason: str
    """whole, extended, changed, evicted, not_computed or never_cached."""
    lost_tokens: int
    lost_ms: float
    before: str
    """The text in front of the place."""
    text: str
    """The text from there on."""
    neighbour_text: str
    """The same of the nearest earlier request; empty if there is none."""


class PrefixReport(msgspec.Struct, frozen=True):
    """The prefix lint of the caller's own requests."""

    is_enabled: bool
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    lost_tokens: int
    lost_ms: float
    patterns: list[PrefixPattern]
    """Most expensive first."""
    requests: list[PrefixMiss]
    """Latest first."""
