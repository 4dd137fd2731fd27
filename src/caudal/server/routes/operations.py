"""Probes, version and metrics."""

from __future__ import annotations

from caudal.server.endpoint import ApiRoute
from caudal.server.exchange import Exchange
from caudal.server.probes import probe_status
from caudal.server.protocol.models import Status, Version
from caudal.server.state import AppState
from caudal.server.version import caudal_version


async def live(state: AppState, exchange: Exchange) -> None:
    """200 as long as the event loop turns."""
    await _probe(state, exchange, "/live")


async def health(state: AppState, exchange: Exchange) -> None:
    """200 while the engine answers; also during a drain."""
    await _probe(state, exchange, "/health")


async def ready(state: AppState, exchange: Exchange) -> None:
    """200 once a real step has run and while new requests are taken."""
    await _probe(state, exchange, "/ready")


async def _probe(state: AppState, exchange: Exchange, path: str) -> None:
    status, body = probe_status(state, path)
    await exchange.respond(body, status=status)


async def version(state: AppState, exchange: Exchange) -> None:
    """The server's version."""
    await exchange.respond_json(Version(caudal_version()))


async def metrics(state: AppState, exchange: Exchange) -> None:
    """All series in Prometheus' text format."""
    exposition = state.exposition()
    await exchange.respond(exposition.render(), content_type=exposition.content_type)


ROUTES = (
    ApiRoute("GET", "/live", live, "Is the process alive?", Status),
    ApiRoute(
        "GET",
        "/ready",
        ready,
        "Would a request be accepted?",
        Status,
        errors=(503,),
        failure=Status,
    ),
    ApiRoute(
        "GET", "/health", health, "Does the engine answer?", Status, errors=(503,), failure=Status
    ),
    ApiRoute("GET", "/version", version, "Server version", Version),
    ApiRoute("GET", "/metrics", metrics, "Prometheus metrics", "text/plain"),
)
