"""The latest ended requests: lengths and times, never their text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

MAX_RECORDS = 4096


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One accepted request (one per choice) from its arrival to its end."""

    request_id: str
    arrival: float
    """Seconds since the epoch."""
    reason: str
    """stop, length, abort, error, timeout, or cancelled: its client left."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_preemptions: int
    is_batch: bool
    queue_s: float
    ttft_s: float | None
    """None: no token came out."""
    e2e_s: float
    path: str = ""
    """Of the HTTP request."""
    traceparent: str = ""
    """The caller's trace (W3C Trace Context), as sent."""

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None with fewer than two."""
        if self.ttft_s is None or self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)


COLUMNS: tuple[str, ...] = (
    *("id", "arrival", "reason", "prompt_tokens", "cached_tokens", "output_tokens", "max_tokens"),
    *("preemptions", "is_batch", "queue_ms", "ttft_ms", "tpot_ms", "e2e_ms", "path"),
)


class RequestLog:
    """Keeps the latest records and tells listeners of each. Owned by the event loop."""

    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=MAX_RECORDS)
        self.listeners: list[Callable[[RequestRecord], None]] = []
        """Called with every record; they must not raise or block."""

    def add(self, record: RequestRecord) -> None:
        """A request has ended."""
        self._records.append(record)
        for listener in self.listeners:
            listener(record)

    def latest(self, limit: int) -> list[RequestRecord]:
        """The last `limit` records in the order of their ends."""
        records = list(self._records)
        return records[-limit:]


def make_row(record: RequestRecord) -> list[str | int | float | bool | None]:
    """The values of `COLUMNS`."""
    return [
        record.request_id,
        round(record.arrival, 3),
        record.reason,
        record.num_prompt_tokens,
        record.num_cached_tokens,
        record.num_output_tokens,
        record.max_tokens,
        record.num_preemptions,
        record.is_batch,
        _milliseconds(record.queue_s),
        _milliseconds(record.ttft_s),
        _milliseconds(record.tpot_s),
        _milliseconds(record.e2e_s),
        record.path,
    ]


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
