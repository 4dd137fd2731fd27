"""The OpenAPI document, made from the same structs that decode the requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from caudal.server.endpoint import ApiRoute

_REF = "#/components/schemas/{name}"


def openapi_document(
    routes: Sequence[ApiRoute], *, version: str, needs_key: bool
) -> dict[str, Any]:
    """OpenAPI 3.1 of `routes`."""
    types = _structs(routes)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, by_type)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Caudal", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"bearer": []}, {"x-api-key": []}]
    return document


def _structs(routes: Sequence[ApiRoute]) -> list[type[msgspec.Struct]]:
    types: dict[type[msgspec.Struct], None] = {}
    for route in routes:
        for kind in (*_request_types(route), route.form, route.response, route.failure):
            if isinstance(kind, type):
                types[kind] = None
    return list(types)


def _request_types(route: ApiRoute) -> tuple[type[msgspec.Struct], ...]:
    if route.request is None:
        return ()
    return route.request if isinstance(route.request, tuple) else (route.request,)


def _operation(route: ApiRoute, by_type: dict[type[msgspec.Struct], Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": route.handler.__name__,
        "responses": _responses(route, by_type),
    }
    parameters = [*_path_parameters(route), *_query_parameters(route)]
    if parameters:
        operation["parameters"] = parameters
    schemas = [by_type[kind] for kind in _request_types(route)]
    if schemas:
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if route.form is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": by_type[route.form]}},
        }
    return operation


def _path_parameters(route: ApiRoute) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)(?::path)?}", route.path)
    ]


def _query_parameters(route: ApiRoute) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    _, components = msgspec.json.schema_components([route.query], ref_template=_REF)
    schema = components[route.query.__name__]
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": of_field}
        for name, of_field in schema["properties"].items()
    ]


def _responses(route: ApiRoute, by_type: dict[type[msgspec.Struct], Any]) -> dict[str, Any]:
    if isinstance(route.response, str):
        content: dict[str, Any] = {route.response: {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": by_type[route.response]}}
    if route.is_stream:
        content[route.stream_media_type] = {"schema": {"type": "string"}}
    responses: dict[str, Any] = {"200": {"description": "Success", "content": content}}
    failure = by_type[route.failure]
    for status in (*route.errors, *((504,) if route.is_generation else ())):
        responses[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": failure}},
        }
    return responses
