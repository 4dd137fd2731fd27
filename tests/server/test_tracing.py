"""Traces: whole, in the conventions' words, without texts, and absent unless asked for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from caudal.config import ServerConfig
from caudal.errors import ConfigError
from caudal.server.tracing import Tracer, create_tracer
from tests.server.harness import MODEL, Served

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter, app: Served) -> Iterator[Tracer]:
    tracer = Tracer(exporter)
    tracer.follow(app.state)
    yield tracer
    tracer.close()


def finished(exporter: InMemorySpanExporter, tracer: Tracer) -> dict[str, ReadableSpan]:
    tracer.close()
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_span_of_a_chat_says_what_the_conventions_ask_for(
    app: Served, exporter: InMemorySpanExporter, tracer: Tracer
) -> None:
    answer = await app.chat("secret words", max_tokens=4)
    spans = finished(exporter, tracer)
    span = spans[f"chat {MODEL}"]
    assert span.kind is SpanKind.SERVER
    assert span.attributes is not None
    attributes = dict(span.attributes)
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == MODEL
    assert attributes["gen_ai.response.id"] == answer["id"]
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == 4
    assert attributes["gen_ai.request.max_tokens"] == 4
    assert float(str(attributes["gen_ai.latency.time_to_first_token"])) > 0
    assert "secret" not in str(attributes)
    assert span.resource.attributes["service.name"] == "caudal"


async def test_children_cover_the_request_from_its_arrival_to_its_end(
    app: Served, exporter: InMemorySpanExporter, tracer: Tracer
) -> None:
    await app.complete(max_tokens=4)
    spans = finished(exporter, tracer)
    span = spans[f"text_completion {MODEL}"]
    assert span.context is not None
    children = [spans[name] for name in ("queue", "prefill", "decode")]
    for child in children:
        assert child.parent is not None
        assert child.parent.span_id == span.context.span_id
    assert children[0].start_time == span.start_time
    assert children[-1].end_time == span.end_time
    for earlier, later in pairwise(children):
        assert earlier.end_time is not None
        assert later.start_time is not None
        assert abs(later.start_time - earlier.end_time) < 5e6


async def test_trace_of_the_caller_goes_on(
    app: Served, exporter: InMemorySpanExporter, tracer: Tracer
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {"prompt": "x", "max_tokens": 2}
    await app.http.post("/v1/completions", json=body, headers=headers)
    span = finished(exporter, tracer)[f"text_completion {MODEL}"]
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT


@pytest.mark.parametrize("value", ["", "garbage", "00-0-0-01", "\xff" * 40, "00-" + "f" * 5000])
async def test_broken_trace_header_starts_a_trace_of_its_own(
    app: Served, exporter: InMemorySpanExporter, tracer: Tracer, value: str
) -> None:
    headers = [(b"traceparent", value.encode("latin-1"))]
    body = {"prompt": "x", "max_tokens": 2}
    response = await app.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200
    assert finished(exporter, tracer)[f"text_completion {MODEL}"].parent is None


async def test_request_whose_client_left_is_marked(
    app: Served, exporter: InMemorySpanExporter, tracer: Tracer
) -> None:
    app.engine.step_gate.clear()
    task = asyncio.create_task(app.complete(max_tokens=5))
    async with asyncio.timeout(5):
        while not app.state.generations:
            await asyncio.sleep(0.001)
    next(iter(app.state.generations)).client_left()
    app.engine.step_gate.set()
    await asyncio.gather(task, return_exceptions=True)
    spans = finished(exporter, tracer)
    attributes = spans[f"text_completion {MODEL}"].attributes
    assert attributes is not None
    assert attributes["error.type"] == "cancelled"
    assert "decode" not in spans


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://x", "http://", "http://x:99999", ""])
def test_address_that_is_no_collector_is_a_start_error(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint: must be"):
        create_tracer(ServerConfig(otlp_traces_endpoint=endpoint))


@pytest.mark.parametrize(
    ("endpoint", "kind", "address"),
    [
        ("http://c:4318", "http", "http://c:4318/v1/traces"),
        ("https://c/otlp/", "http", "https://c/otlp"),
        ("grpc://c:4317", "grpc", "c:4317"),
        ("http://c:4317", "grpc", "c:4317"),
    ],
)
def test_address_decides_the_protocol(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, kind: str, address: str
) -> None:
    made = {}

    def fake(name: str) -> type:
        def create(self: object, endpoint: str, **options: object) -> None:
            made[name] = endpoint

        return type("Exporter", (InMemorySpanExporter,), {"__init__": create})

    base = "opentelemetry.exporter.otlp.proto"
    for name in ("http", "grpc"):
        monkeypatch.setattr(f"{base}.{name}.trace_exporter.OTLPSpanExporter", fake(name))
    tracer = create_tracer(ServerConfig(otlp_traces_endpoint=endpoint))
    assert tracer is not None
    assert made == {kind: address}


def test_missing_packages_are_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(ConfigError, match=r"pip install caudal\[otel\]"):
        create_tracer(ServerConfig(otlp_traces_endpoint="http://x:4318"))


def test_nothing_of_it_is_imported_without_the_flag() -> None:
    code = (
        "import sys, caudal.server.run, caudal.server.app, caudal.server.state;"
        "assert not [m for m in sys.modules if m.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
