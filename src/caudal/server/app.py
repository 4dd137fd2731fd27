"""The ASGI application: routes, error shapes and the API key."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from caudal.server.auth import ApiKeyGuard
from caudal.server.endpoint import ApiRoute, Endpoint
from caudal.server.errors import ErrorEncoder, HeadTooLargeError, error_body
from caudal.server.exchange import Exchange, Receive, Scope, Send
from caudal.server.generation.messages_answer import message_error_body
from caudal.server.generation.ollama_answer import ollama_error_body
from caudal.server.routes import (
    batches,
    chat,
    completions,
    dashboard,
    doctor,
    embeddings,
    files,
    messages,
    models,
    observation,
    ollama,
    ollama_embeddings,
    ollama_models,
    ollama_store,
    operations,
    render,
    responses,
    tokenization,
)
from caudal.server.state import AppState

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.types import ASGIApp

ROUTES: tuple[ApiRoute, ...] = (
    *completions.ROUTES,
    *chat.ROUTES,
    *responses.ROUTES,
    *messages.ROUTES,
    *ollama.ROUTES,
    *ollama_embeddings.ROUTES,
    *ollama_models.ROUTES,
    *ollama_store.ROUTES,
    *operations.ROUTES,
    *observation.ROUTES,
    *doctor.ROUTES,
    *dashboard.ROUTES,
    *models.ROUTES,
    *tokenization.ROUTES,
    *embeddings.ROUTES,
    *render.ROUTES,
    *files.ROUTES,
    *batches.ROUTES,
)
"""Every operation; a new API family adds its file's ROUTES here."""

MAX_HEADERS = 128

EXPOSED_HEADERS = (
    *("x-request-id", "retry-after", "retry-after-ms"),
    *(
        f"x-ratelimit-{what}-{unit}"
        for what in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens")
    ),
)
"""Headers that the scripts of allowed origins may read."""

_ENCODERS: Mapping[str, ErrorEncoder] = MappingProxyType(
    {route.path: route.encode_error for route in ROUTES}
)


def error_encoder(path: str) -> ErrorEncoder:
    """Errors have the shape of the path's API family, paths that do not exist included."""
    if path.startswith("/v1/messages"):
        return message_error_body
    return _ENCODERS.get(path) or (ollama_error_body if path.startswith("/api/") else error_body)


class CaudalApp:
    """A table of exact paths in front of a router.

    Operations without path parameters go straight to their endpoint: middleware would wrap every
    chunk of a stream. All else (path parameters, wrong methods, unknown paths, the schema) goes
    through the router, which is made on first use: its imports would delay every start.
    """

    def __init__(self, state: AppState) -> None:
        self._endpoints = [(route, Endpoint(state, route)) for route in ROUTES]
        self._direct = {
            (route.method, route.path): endpoint
            for route, endpoint in self._endpoints
            if "{" not in route.path
        }
        self._guard = ApiKeyGuard(state.keys, state.quotas) if len(state.keys) else None
        self._router: Starlette | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if len(scope["headers"]) > MAX_HEADERS:
                await _refuse_headers(Exchange(scope, receive, send))
                return
            if self._guard is not None and not self._guard.admits(scope):
                encode = error_encoder(scope["path"])
                await self._guard.refuse(Exchange(scope, receive, send, encode))
                return
            endpoint = self._direct.get((scope["method"], scope["path"]))
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
        await self._make_router()(scope, receive, send)

    def _make_router(self) -> Starlette:
        if self._router is None:
            from caudal.server.router import create_router

            self._router = create_router(
                self._endpoints, error_encoder, needs_key=self._guard is not None
            )
        return self._router


async def _refuse_headers(exchange: Exchange) -> None:
    number = len(exchange.scope["headers"])
    error = HeadTooLargeError(f"At most {MAX_HEADERS} headers, got {number}.", code="invalid_http")
    await exchange.respond_error(error)


def create_app(state: AppState) -> ASGIApp:
    """The application over `state`, with cross-origin headers if the configuration allows some."""
    app, config = CaudalApp(state), state.config
    if not config.allowed_origins:
        return app
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=EXPOSED_HEADERS,
    )
