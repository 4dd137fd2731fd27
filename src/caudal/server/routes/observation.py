"""`/caudal/…`: what the dashboard, `caudal top` and `caudal doctor` read."""

from __future__ import annotations

import asyncio

from caudal.errors import NotFoundError
from caudal.metrics import request_log
from caudal.server.batch.access import read_query
from caudal.server.endpoint import ApiRoute
from caudal.server.exchange import Exchange
from caudal.server.protocol.observation import (
    History,
    HistoryQuery,
    LiveSnapshot,
    RequestsQuery,
    Table,
)
from caudal.server.state import AppState


async def live_snapshot(state: AppState, exchange: Exchange) -> None:
    """The server now, and the last minute."""
    from caudal.server.live import snapshot

    await exchange.respond_json(await snapshot(state))


async def recent_requests(state: AppState, exchange: Exchange) -> None:
    """The latest ended requests: lengths and times."""
    query = read_query(exchange, RequestsQuery)
    rows = [request_log.make_row(record) for record in state.request_log.latest(query.limit)]
    await exchange.respond_json(Table(list(request_log.COLUMNS), rows))


async def history(state: AppState, exchange: Exchange) -> None:
    """Aggregates of a window up to now."""
    from caudal.metrics.history_columns import COLUMNS
    from caudal.server.history import choose_step

    query = read_query(exchange, HistoryQuery)
    recorder = state.recorder
    keeper = recorder.keeper
    if keeper is None:
        raise NotFoundError("This server keeps no history (--no-history).", code="history_off")
    step = choose_step(query.window, query.step)
    rows = await asyncio.wrap_future(keeper.table(query.window, step, recorder.current_minute()))
    await exchange.respond_json(History(query.window, step, keeper.is_kept, list(COLUMNS), rows))


ROUTES = (
    ApiRoute("GET", "/caudal/live", live_snapshot, "The server now", LiveSnapshot),
    ApiRoute(
        "GET",
        "/caudal/requests",
        recent_requests,
        "The latest ended requests",
        Table,
        query=RequestsQuery,
        errors=(400,),
    ),
    ApiRoute(
        "GET",
        "/caudal/history",
        history,
        "Metrics over time",
        History,
        query=HistoryQuery,
        errors=(400, 404),
    ),
)
