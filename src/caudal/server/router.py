"""Everything that is not an exact path: path parameters, the schema, and answers to mistakes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Sequence

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from caudal.errors import NotFoundError, RequestError, RequestFailedError
from caudal.server.endpoint import ApiRoute, Endpoint
from caudal.server.errors import ErrorEncoder, MethodNotAllowedError
from caudal.server.openapi import openapi_document
from caudal.server.version import caudal_version

SCHEMA_PATH = "/openapi.json"


def create_router(
    endpoints: Sequence[tuple[ApiRoute, Endpoint]],
    encoder_of: Callable[[str], ErrorEncoder],
    *,
    needs_key: bool,
) -> Starlette:
    """All `endpoints` and their schema; errors of a path in the shape of its API family."""

    def answer(request: Request, error: RequestError, headers: dict[str, str]) -> Response:
        return Response(
            encoder_of(request.url.path)(error),
            status_code=error.status,
            headers=headers,
            media_type="application/json",
        )

    async def answer_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path[:256]
        told: RequestError
        if error.status_code == 405:
            told = MethodNotAllowedError(
                f"{request.method} is not allowed for {path}.", code="method_not_allowed"
            )
        else:
            told = NotFoundError(f"There is no {request.method} {path}.", code="not_found")
        return answer(request, told, dict(error.headers or {}))

    async def answer_exception(request: Request, error: Exception) -> Response:
        return answer(request, RequestFailedError("The server failed.", code="internal_error"), {})

    router = Starlette(
        routes=[
            Route(SCHEMA_PATH, _schema([route for route, _ in endpoints], needs_key)),
            *(Route(route.path, end, methods=[route.method]) for route, end in endpoints),
        ],
        exception_handlers={HTTPException: answer_http_exception, Exception: answer_exception},
    )
    router.router.redirect_slashes = False
    return router


def _schema(
    routes: Sequence[ApiRoute], needs_key: bool
) -> Callable[[Request], Coroutine[None, None, Response]]:
    """An endpoint that answers with the OpenAPI document, made on first use."""

    @functools.cache
    def encoded() -> bytes:
        document = openapi_document(routes, version=caudal_version(), needs_key=needs_key)
        return msgspec.json.encode(document)

    async def schema(request: Request) -> Response:
        return Response(encoded(), media_type="application/json")

    return schema
