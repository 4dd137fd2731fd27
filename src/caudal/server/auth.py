"""The API key check, in front of every route but the probes."""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from caudal.errors import AuthenticationError
from caudal.server.exchange import Exchange, Scope

OWNER: Final = "caudal.owner"
"""Scope entry of an admitted request: names the holder of its key, without showing the key."""

OPEN_PATHS = frozenset({"/health", "/live", "/ready"})


class ApiKeyGuard:
    """Compares hashes in constant time, so that neither length nor prefix of the key leaks."""

    def __init__(self, api_key: str) -> None:
        self._digest = hashlib.sha256(api_key.encode()).digest()

    def admits(self, scope: Scope) -> bool:
        """Whether a request may pass: a probe, or one with the key as bearer token or x-api-key."""
        if scope["path"] in OPEN_PATHS:
            return True
        digests = [hashlib.sha256(key).digest() for key in _keys(scope)]
        # All are compared, so that the time does not tell which one was right.
        if True not in [hmac.compare_digest(digest, self._digest) for digest in digests]:
            return False
        scope[OWNER] = self._digest.hex()
        return True

    async def refuse(self, exchange: Exchange) -> None:
        """Answer 401."""
        message = "An API key is needed: Authorization: Bearer KEY, or x-api-key: KEY."
        if any(_keys(exchange.scope)):
            message = "Wrong API key."
        await exchange.respond_error(AuthenticationError(message, code="invalid_api_key"))


def _keys(scope: Scope) -> list[bytes]:
    headers: dict[bytes, bytes] = dict(scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    keys = [token.strip()] if scheme.lower() == b"bearer" else []
    return [*keys, headers[b"x-api-key"].strip()] if b"x-api-key" in headers else keys
