"""Runs a request through its HTTP endpoint without a network: same checks, same answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from caudal.scheduler.service_class import ServiceClass
from caudal.server.auth import OWNER
from caudal.server.endpoint import ApiRoute, Endpoint
from caudal.server.exchange import SERVICE_CLASS, Message, Scope
from caudal.server.routes import chat, completions, embeddings, responses
from caudal.server.state import AppState

BATCH_ROUTES: Mapping[str, ApiRoute] = {
    route.path: route
    for route in (*chat.ROUTES, *completions.ROUTES, *embeddings.ROUTES, *responses.ROUTES)
}
"""Endpoints that a batch can use, by path."""

PROMPT_COUNTERS: Mapping[str, Callable[[AppState, bytes], int]] = {
    route.path: module.count_prompt_tokens
    for module in (chat, completions, embeddings, responses)
    for route in module.ROUTES
}
"""For the same endpoints: tokens of the prompt that a body makes. They block, and raise
RequestError for a body that the endpoint would refuse."""

_HEADERS = [(b"content-type", b"application/json")]


class Reply(NamedTuple):
    """An answer."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float = 0.0


class Dispatcher:
    """Calls endpoints as the HTTP server does."""

    def __init__(self, state: AppState) -> None:
        self._endpoints = {path: Endpoint(state, route) for path, route in BATCH_ROUTES.items()}

    async def run(
        self, url: str, body: bytes, owner: str = "", service: ServiceClass = ServiceClass.IDLE
    ) -> Reply:
        """The endpoint's answer to `body`; cancelling it frees the request in the engine."""
        call = _Call(url, body, {OWNER: owner, SERVICE_CLASS: service})
        await self._endpoints[url](call.scope, call.receive, call.send)
        return call.reply()


class _Call:
    """The two ends of an ASGI connection, in memory."""

    def __init__(self, url: str, body: bytes, extra: dict[str, Any]) -> None:
        self.scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": url,
            "headers": _HEADERS,
            **extra,
        }
        self._body: bytes | None = body
        self._status = 500
        self._headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []

    async def receive(self) -> Message:
        """The body, then silence: this client never leaves."""
        if self._body is None:
            await asyncio.get_running_loop().create_future()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        """Collect the answer."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = dict(message["headers"])
        else:
            self._parts.append(message.get("body", b""))

    def reply(self) -> Reply:
        """The whole answer."""
        return Reply(
            self._status,
            self._headers.get(b"x-request-id", b"").decode(),
            b"".join(self._parts),
            float(self._headers.get(b"retry-after", b"0")),
        )
