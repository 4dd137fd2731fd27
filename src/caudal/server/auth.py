"""The API key check, in front of every route but the probes."""

from __future__ import annotations

import hashlib
import hmac

from caudal.errors import AuthenticationError
from caudal.server.exchange import Exchange, Scope

OPEN_PATHS = frozenset({"/health", "/live", "/ready"})


class ApiKeyGuard:
    """Compares hashes in constant time, so that neither length nor prefix of the key leaks."""

    def __init__(self, api_key: str) -> None:
        self._digest = hashlib.sha256(api_key.encode()).digest()

    def admits(self, scope: Scope) -> bool:
        """Whether a request may pass: a probe, or one with the key as its bearer token."""
        if scope["path"] in OPEN_PATHS:
            return True
        scheme, key = _credentials(scope)
        digest = hashlib.sha256(key).digest()
        return hmac.compare_digest(digest, self._digest) and scheme == b"bearer"

    async def refuse(self, exchange: Exchange) -> None:
        """Answer 401."""
        _, key = _credentials(exchange.scope)
        message = "Wrong API key." if key else "An API key is needed: Authorization: Bearer KEY."
        await exchange.respond_error(AuthenticationError(message, code="invalid_api_key"))


def _credentials(scope: Scope) -> tuple[bytes, bytes]:
    header: bytes = dict(scope["headers"]).get(b"authorization", b"")
    scheme, _, key = header.partition(b" ")
    return scheme.lower(), key.strip()
