"""The ASGI application: routes, error shapes and the API key."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from caudal.errors import NotFoundError, RequestError, RequestFailedError
from caudal.server.auth import ApiKeyGuard
from caudal.server.endpoint import ApiRoute, Endpoint
from caudal.server.errors import ErrorEncoder, MethodNotAllowedError, error_body
from caudal.server.exchange import Exchange, Receive, Scope, Send
from caudal.server.openapi import openapi_document
from caudal.server.routes import (
    batches,
    chat,
    completions,
    embeddings,
    files,
    messages,
    models,
    ollama,
    ollama_models,
    operations,
    render,
    responses,
    tokenization,
)
from caudal.server.state import AppState
from caudal.server.version import caudal_version

ROUTES: tuple[ApiRoute, ...] = (
    *completions.ROUTES,
    *chat.ROUTES,
    *responses.ROUTES,
    *messages.ROUTES,
    *ollama.ROUTES,
    *ollama_models.ROUTES,
    *operations.ROUTES,
    *models.ROUTES,
    *tokenization.ROUTES,
    *embeddings.ROUTES,
    *render.ROUTES,
    *files.ROUTES,
    *batches.ROUTES,
)
"""Every operation; a new API family adds its file's ROUTES here."""

_ENCODERS: Mapping[str, ErrorEncoder] = MappingProxyType(
    {route.path: route.encode_error for route in ROUTES}
)


class CaudalApp(FastAPI):
    """FastAPI behind a table of exact paths.

    Operations without path parameters go straight to their endpoint: FastAPI's middleware would
    wrap every chunk of a stream several times. All else (wrong methods, unknown paths, the schema)
    takes FastAPI's way.
    """

    def __init__(self, state: AppState) -> None:
        super().__init__(title="Caudal", docs_url=None, redoc_url=None, redirect_slashes=False)
        self._state = state
        self._direct: dict[tuple[str, str], Endpoint] = {}
        api_key = state.config.api_key
        self._guard = None if api_key is None else ApiKeyGuard(api_key)
        for route in ROUTES:
            endpoint = Endpoint(state, route)
            self.router.routes.append(Route(route.path, endpoint, methods=[route.method]))
            if "{" not in route.path:
                self._direct[route.method, route.path] = endpoint
        self.add_exception_handler(HTTPException, _answer_http_exception)  # type: ignore[arg-type]
        self.add_exception_handler(Exception, _answer_exception)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if self._guard is not None and not self._guard.admits(scope):
                encode = _ENCODERS.get(scope["path"], error_body)
                await self._guard.refuse(Exchange(scope, receive, send, encode))
                return
            endpoint = self._direct.get((scope["method"], scope["path"]))
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """The schema of all operations, made on first use."""
        if self.openapi_schema is None:
            self.openapi_schema = openapi_document(
                ROUTES, version=caudal_version(), needs_key=self._guard is not None
            )
        return self.openapi_schema


def create_app(state: AppState) -> CaudalApp:
    """The application over `state`."""
    return CaudalApp(state)


async def _answer_http_exception(request: Request, error: HTTPException) -> Response:
    path = request.url.path[:256]
    answer: RequestError
    if error.status_code == 405:
        answer = MethodNotAllowedError(
            f"{request.method} is not allowed for {path}.", code="method_not_allowed"
        )
    else:
        answer = NotFoundError(f"There is no {request.method} {path}.", code="not_found")
    return _response(request, answer, dict(error.headers or {}))


async def _answer_exception(request: Request, error: Exception) -> Response:
    return _response(request, RequestFailedError("The server failed.", code="internal_error"), {})


def _response(request: Request, error: RequestError, headers: dict[str, str]) -> Response:
    return Response(
        _ENCODERS.get(request.url.path, error_body)(error),
        status_code=error.status,
        headers=headers,
        media_type="application/json",
    )
