"""What the health probes say, and their quickest answer: before a connection is even opened."""

from __future__ import annotations

from http import HTTPStatus
from typing import NamedTuple

from caudal.server.state import AppState

MAX_HEAD_BYTES = 2048
"""Longer heads of probes take the ordinary way."""

PROBE_PATHS = ("/live", "/ready", "/health")

_STARTS = tuple(f"GET {path} HTTP/1.1\r\n".encode() for path in PROBE_PATHS)
_ORDINARY = (b"\r\ncontent-length:", b"\r\ntransfer-encoding:", b"\r\norigin:", b"\r\nexpect:")
"""Headers of requests that need more than a plain answer."""


class ProbeAnswer(NamedTuple):
    """The whole answer to the probe with which a connection begins."""

    data: bytes
    num_bytes: int
    """Length of the request."""
    is_last: bool
    """The client wants the connection closed."""


def probe_status(state: AppState, path: str) -> tuple[int, bytes]:
    """Status and body of a probe's answer."""
    if path == "/live":
        return 200, b'{"status":"live"}'
    is_good, good, bad = state.engine.is_ready, b"healthy", b"unhealthy"
    if path == "/ready":
        is_good, good, bad = state.is_ready, b"ready", b"not ready"
    return (200 if is_good else 503), b'{"status":"' + (good if is_good else bad) + b'"}'


class Probes:
    """Answers plain probes from the first bytes of a connection."""

    def __init__(self, state: AppState) -> None:
        self._state = state

    def answer(self, data: bytes) -> ProbeAnswer | None:
        """The answer, None if `data` does not begin with a whole, plain probe."""
        if not data.startswith(_STARTS):
            return None
        end = data.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = data[: end + 2].lower()
        if any(header in head for header in _ORDINARY):
            return None
        path = data.split(b" ", 2)[1].decode()
        status, body = probe_status(self._state, path)
        is_last = b"\r\nconnection: close\r\n" in head
        lines = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *(("connection: close",) if is_last else ()),
        )
        return ProbeAnswer("\r\n".join(lines).encode() + b"\r\n\r\n" + body, end + 4, is_last)
