"""OpenTelemetry traces of requests, made from their records when they end.

Attributes follow the semantic conventions for generative AI; nothing is recorded of any text.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from caudal.errors import ConfigError
from caudal.metrics.request_log import RequestRecord
from caudal.server.version import caudal_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from caudal.config import ServerConfig
    from caudal.server.state import AppState

FLAG = "--otlp-traces-endpoint"
GRPC_PORT = 4317
CLOSE_TIMEOUT_S = 3.0
TRACES_PATH = "/v1/traces"
PROVIDER = "caudal"

_TEXT_COMPLETIONS = ("/v1/completions", "/api/generate")


def create_tracer(config: ServerConfig) -> Tracer | None:
    """What sends traces to the configured collector; None if none is configured.

    Raises ConfigError for a bad address or where the packages are missing.
    """
    endpoint = config.otlp_traces_endpoint
    if endpoint is None:
        return None
    parts = urlsplit(endpoint)
    try:
        is_usable = parts.scheme in ("http", "https", "grpc", "grpcs") and bool(parts.hostname)
        is_grpc = parts.scheme.startswith("grpc") or parts.port == GRPC_PORT
    except ValueError:
        is_usable = is_grpc = False
    if not is_usable:
        raise ConfigError(
            f"{FLAG}: must be http://HOST:PORT, https://… or grpc://HOST:PORT, got {endpoint!r}"
        )
    try:
        return Tracer(_create_exporter(endpoint, is_grpc=is_grpc))
    except ImportError as error:
        raise ConfigError(f"{FLAG}: {error}; install them with: pip install caudal[otel]") from None


def _create_exporter(endpoint: str, *, is_grpc: bool) -> SpanExporter:
    parts = urlsplit(endpoint)
    if is_grpc:
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

        is_plain = parts.scheme not in ("https", "grpcs")
        return grpc.OTLPSpanExporter(endpoint=parts.netloc, insecure=is_plain)
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

    path = parts.path.rstrip("/") or TRACES_PATH
    return http.OTLPSpanExporter(endpoint=parts._replace(path=path).geturl())


class Tracer:
    """Turns records into spans and hands them to the exporter's own thread."""

    def __init__(self, exporter: SpanExporter) -> None:
        """Raises ImportError without the OpenTelemetry SDK."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        version = caudal_version()
        resource = Resource.create({"service.name": "caudal", "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("caudal", version)
        self._kind = SpanKind.SERVER
        self._extract = TraceContextTextMapPropagator().extract
        self._as_parent = set_span_in_context
        self._model_name = ""

    def follow(self, state: AppState) -> None:
        """Trace the requests of a server from now on."""

        def listen(record: RequestRecord) -> None:
            self._model_name = state.model.name if state.model is not None else ""
            self.trace(record)

        state.request_log.listeners.append(listen)

    def trace(self, record: RequestRecord) -> None:
        """Make the spans of a request that has ended."""
        carrier = {"traceparent": record.traceparent} if record.traceparent else {}
        operation = _operation(record.path)
        span = self._tracer.start_span(
            f"{operation} {self._model_name}".strip(),
            context=self._extract(carrier),
            kind=self._kind,
            start_time=_ns(record.arrival),
            attributes=self._attributes(record, operation),
        )
        end = record.arrival + record.e2e_s
        is_bad = record.reason in ("error", "timeout", "abort", "cancelled")
        if is_bad:
            span.set_attribute("error.type", record.reason)
        if record.reason in ("error", "timeout"):
            from opentelemetry.trace import Status, StatusCode

            span.set_status(Status(StatusCode.ERROR, record.reason))
        parent = self._as_parent(span)
        for name, start, stop in _phases(record):
            child = self._tracer.start_span(name, context=parent, start_time=_ns(start))
            child.end(_ns(stop))
        span.end(_ns(end))

    def close(self) -> None:
        """Send what is left; blocks for a few seconds at most, if the collector is away."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)

    def _attributes(self, record: RequestRecord, operation: str) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.id": record.request_id,
            "gen_ai.response.finish_reasons": [record.reason],
            "gen_ai.request.max_tokens": record.max_tokens,
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.output_tokens": record.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
            "gen_ai.latency.time_in_queue": record.queue_s,
            "gen_ai.latency.e2e": record.e2e_s,
            "caudal.num_preemptions": record.num_preemptions,
            "url.path": record.path,
        }
        if record.ttft_s is not None:
            attributes["gen_ai.latency.time_to_first_token"] = record.ttft_s
            attributes["gen_ai.latency.time_in_model_prefill"] = record.ttft_s - record.queue_s
            attributes["gen_ai.latency.time_in_model_decode"] = record.e2e_s - record.ttft_s
        return attributes


def _operation(path: str) -> str:
    if "embed" in path:
        return "embeddings"
    return "text_completion" if path in _TEXT_COMPLETIONS else "chat"


def _phases(record: RequestRecord) -> list[tuple[str, float, float]]:
    """(name, start, end) in seconds since the epoch; what did not happen is left out."""
    arrival, end = record.arrival, record.arrival + record.e2e_s
    if not record.queue_s and record.ttft_s is None:
        return [("queue", arrival, end)]
    started = arrival + record.queue_s
    first = end if record.ttft_s is None else arrival + record.ttft_s
    phases = [("queue", arrival, started), ("prefill", started, max(started, first))]
    return [*phases, ("decode", first, end)] if record.ttft_s is not None else phases


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
