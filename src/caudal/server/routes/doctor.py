"""`/caudal/doctor`, `/caudal/trace` and `/caudal/prefixes`: what limits the server, and why."""

from __future__ import annotations

import asyncio

import msgspec

from caudal.diagnosis.past import parse_last
from caudal.diagnosis.prefix_lint import lint
from caudal.diagnosis.report import Diagnosis, LoadRecord
from caudal.errors import InvalidRequestError
from caudal.server.batch.access import owner_of, read_query
from caudal.server.endpoint import ApiRoute
from caudal.server.exchange import Exchange
from caudal.server.protocol.diagnosis import (
    DoctorQuery,
    LoadQuery,
    PrefixQuery,
    PrefixReport,
)
from caudal.server.state import AppState

MAX_SHOWN = 256
MAX_SECONDS = 86_400


async def diagnosis(state: AppState, exchange: Exchange) -> None:
    """Findings with evidence and remedies."""
    query = read_query(exchange, DoctorQuery)
    if query.seconds is not None and query.last is not None:
        raise InvalidRequestError(
            "seconds, last: only one of them.", param="last", code="invalid_value"
        )
    last_s = None if query.last is None else parse_last(query.last)
    await exchange.respond_json(await state.practice.diagnose(_checked(query.seconds), last_s))


async def load_trace(state: AppState, exchange: Exchange) -> None:
    """The latest requests as JSON lines: times, lengths and common beginnings."""
    seconds = _checked(read_query(exchange, LoadQuery).seconds)
    records = state.load_log.records(seconds)
    start_s = records[0].arrival_s if records else 0.0
    block_size = state.engine.info.block_size if state.engine.is_ready else 0
    lines = [msgspec.json.encode(_row(record, start_s, block_size)) for record in records]
    body = b"".join(line + b"\n" for line in lines)
    await exchange.respond(body, content_type=b"application/jsonl")


def _checked(seconds: float | None) -> float | None:
    """The window that was asked for. Raises InvalidRequestError."""
    if seconds is not None and not 0 < seconds <= MAX_SECONDS:
        raise InvalidRequestError(
            f"seconds: must be above 0 and up to {MAX_SECONDS}.",
            param="seconds",
            code="invalid_value",
        )
    return seconds


def _row(record: LoadRecord, start_s: float, block_size: int) -> dict[str, object]:
    """Names of the Mooncake traces; what else was measured comes behind them."""
    return {
        "timestamp": round((record.arrival_s - start_s) * 1e3, 3),
        "input_length": record.num_prompt_tokens,
        "output_length": record.num_output_tokens or record.max_tokens,
        "hash_ids": record.prefix_ids,
        "block_size": block_size,
        "max_tokens": record.max_tokens,
        "cached_tokens": record.num_cached_tokens,
        "ttft_ms": record.ttft_ms,
        "tpot_ms": record.tpot_ms,
        "is_refused": record.is_refused,
    }


async def prefix_lint(state: AppState, exchange: Exchange) -> None:
    """Where the caller's prompts stopped matching what was cached."""
    from caudal.server.prefix_report import make_prefix_report

    query = read_query(exchange, PrefixQuery)
    if not 1 <= query.limit <= MAX_SHOWN:
        raise InvalidRequestError(
            f"limit: must be between 1 and {MAX_SHOWN}, got {query.limit}.",
            param="limit",
            code="invalid_value",
        )
    model = state.require_model()
    owner, log = owner_of(exchange), state.load_log

    def report() -> PrefixReport:
        misses = lint(log, state.engine.stats.step_costs, owner)
        return make_prefix_report(
            misses, model.tokenizer, query.limit, is_enabled=log.remembers_prompts
        )

    await exchange.respond_json(await asyncio.to_thread(report))


ROUTES = (
    ApiRoute(
        "GET",
        "/caudal/doctor",
        diagnosis,
        "What limits the server, and what would help",
        Diagnosis,
        query=DoctorQuery,
        errors=(400, 404, 500, 503),
    ),
    ApiRoute(
        "GET",
        "/caudal/trace",
        load_trace,
        "The latest load",
        "application/jsonl",
        query=LoadQuery,
        errors=(400,),
    ),
    ApiRoute(
        "GET",
        "/caudal/prefixes",
        prefix_lint,
        "Why prefixes were not found",
        PrefixReport,
        query=PrefixQuery,
        errors=(400, 503),
    ),
)
