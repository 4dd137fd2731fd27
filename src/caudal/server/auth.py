"""The API key check, in front of every route but the probes and the dashboard's own files."""

from __future__ import annotations

from typing import Final

from caudal.errors import AuthenticationError
from caudal.server.exchange import Exchange, Scope
from caudal.server.keys import KeyRing
from caudal.server.quota import Quotas

OWNER: Final = "caudal.owner"
"""Scope entry of an admitted request: names the holder of its key, without showing the key."""

QUOTA: Final = "caudal.quota"
"""Scope entry of an admitted request: the Quota of its key."""

OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/dashboard"})

OPEN_FOLDER = "/dashboard/"
"""Files of the page, the same in every installation; the page asks for a key itself."""


class ApiKeyGuard:
    """Lets requests with a key of the ring pass, and says whose they are."""

    def __init__(self, keys: KeyRing, quotas: Quotas) -> None:
        self._keys = keys
        self._quotas = quotas

    def admits(self, scope: Scope) -> bool:
        """Whether a request may pass: open to all, or with a key as bearer token or x-api-key."""
        path: str = scope["path"]
        if path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return True
        key = self._keys.find(_keys(scope))
        if key is None:
            return False
        scope[OWNER] = key.owner
        scope[QUOTA] = self._quotas.of(key)
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
