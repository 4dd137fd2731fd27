"""Answers and refusals of files and batches are what the OpenAPI document says."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import msgspec
import pytest

from caudal.server.app import ROUTES
from caudal.server.endpoint import ApiRoute
from tests.batch.harness import CHAT, BatchServer, line

BY_OPERATION = {(route.method, route.path): route for route in ROUTES}


def check(method: str, path: str, response: httpx.Response) -> None:
    """The status is documented and the body decodes to the documented struct, nothing left over."""
    route: ApiRoute = BY_OPERATION[method, path]
    case = (method, str(response.url), response.text[:500])
    assert response.status_code == 200 or response.status_code in route.errors, case
    kind = route.response if response.status_code == 200 else route.failure
    if isinstance(kind, str):
        assert response.headers["content-type"] == kind
        return
    decoded = msgspec.json.decode(response.content, type=kind)
    assert msgspec.to_builtins(decoded) == response.json(), case
    for word in ("Traceback", "msgspec", "sqlite", "codec"):
        assert word not in response.text, case


async def test_every_operation_answers_as_documented(server: BatchServer) -> None:
    http = server.http
    batch = await server.run([line("a"), line("b", body={"messages": []})])
    failed = await server.run([b"bad"])
    file_id, batch_id = batch["input_file_id"], batch["id"]
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "1h"}
    calls: list[tuple[str, str, str, Any]] = [
        ("GET", "/v1/files", "/v1/files", None),
        ("GET", "/v1/files", "/v1/files?order=up", None),
        ("GET", "/v1/files/{file_id}", f"/v1/files/{file_id}", None),
        ("GET", "/v1/files/{file_id}", "/v1/files/none", None),
        ("GET", "/v1/files/{file_id}/content", f"/v1/files/{file_id}/content", None),
        ("GET", "/v1/files/{file_id}/content", "/v1/files/none/content", None),
        ("GET", "/v1/batches", "/v1/batches", None),
        ("GET", "/v1/batches", "/v1/batches?limit=-1", None),
        ("GET", "/v1/batches/{batch_id}", f"/v1/batches/{batch_id}", None),
        ("GET", "/v1/batches/{batch_id}", f"/v1/batches/{failed['id']}", None),
        ("GET", "/v1/batches/{batch_id}", "/v1/batches/none", None),
        ("POST", "/v1/batches", "/v1/batches", body),
        ("POST", "/v1/batches", "/v1/batches", body | {"input_file_id": "none"}),
        ("POST", "/v1/batches/{batch_id}/cancel", f"/v1/batches/{batch_id}/cancel", None),
        ("POST", "/v1/batches/{batch_id}/cancel", "/v1/batches/none/cancel", None),
        ("DELETE", "/v1/files/{file_id}", "/v1/files/none", None),
        ("DELETE", "/v1/files/{file_id}", f"/v1/files/{file_id}", None),
    ]
    answered = {("POST", "/v1/files")}
    for method, path, url, content in calls:
        response = await http.request(method, url, json=content)
        check(method, path, response)
        if response.status_code == 200:
            answered.add((method, path))
    uploaded = await server.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("x", b"{}")}
    )
    check("POST", "/v1/files", uploaded)
    check("POST", "/v1/files", await server.post("/v1/files", json={}))
    own = {key for key in BY_OPERATION if key[1].startswith(("/v1/files", "/v1/batches"))}
    assert own - answered == {("POST", "/v1/batches/{batch_id}/cancel")}


async def test_document_describes_forms_and_queries(server: BatchServer) -> None:
    schema = (await server.http.get("/openapi.json")).json()
    upload = schema["paths"]["/v1/files"]["post"]["requestBody"]["content"]
    assert list(upload) == ["multipart/form-data"]
    form = schema["components"]["schemas"]["FileUpload"]
    assert form["required"] == ["file", "purpose"]
    assert set(form["properties"]) >= {"file", "purpose", "expires_after[seconds]"}
    parameters = {
        parameter["name"]: parameter
        for parameter in schema["paths"]["/v1/files"]["get"]["parameters"]
    }
    assert set(parameters) == {"after", "limit", "order", "purpose"}
    assert all(p["in"] == "query" and not p["required"] for p in parameters.values())
    assert parameters["limit"]["schema"]["maximum"] == 10_000
    (path,) = schema["paths"]["/v1/batches/{batch_id}"]["get"]["parameters"]
    assert (path["name"], path["in"], path["required"]) == ("batch_id", "path", True)


SCALARS: tuple[Any, ...] = (
    None, True, 0, -1, 2**31, 2**70, 1.5, "", "24h", "1s", "0h", "99999999d", "batch", CHAT, "\x00",
    "é" * 3000, "file-x", [], {}, [None], {"a": {"b": []}},
    {"anchor": "created_at", "seconds": 3600},
)  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
async def test_random_batches_are_answered_as_documented(server: BatchServer, seed: int) -> None:
    rng = random.Random(seed)
    file_id = await server.upload([line()])
    names = (
        "input_file_id",
        "endpoint",
        "completion_window",
        "metadata",
        "output_expires_after",
        "x",
    )
    good = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    statuses = set()
    for _ in range(150):
        body = dict(good)
        for name in rng.sample(names, rng.randrange(3)):
            body[name] = rng.choice(SCALARS)
        content = json.dumps(body) if rng.random() < 0.9 else json.dumps(rng.choice(SCALARS))
        headers = {"content-type": "application/json"}
        response = await server.http.post("/v1/batches", content=content, headers=headers)
        check("POST", "/v1/batches", response)
        statuses.add(response.status_code)
        query = rng.choice(("limit", "after", "order", "purpose"))
        value = str(rng.choice(SCALARS))
        for path in ("/v1/files", "/v1/batches"):
            check("GET", path, await server.http.get(path, params={query: value}))
    assert {200, 400} <= statuses
