"""`/v1/batches`: many requests from a file, run in idle capacity."""

from __future__ import annotations

from caudal.server.batch.access import owner_of, read_query
from caudal.server.batch.records import Page
from caudal.server.batch.views import batch_object
from caudal.server.body import BodyDecoder
from caudal.server.endpoint import ApiRoute, path_parameter
from caudal.server.exchange import Exchange
from caudal.server.protocol.batches import BatchList, BatchObject, BatchQuery, CreateBatchRequest
from caudal.server.state import AppState

_DECODER = BodyDecoder(CreateBatchRequest)


async def create_batch(state: AppState, exchange: Exchange) -> None:
    """Begin a batch; its input is checked in the background."""
    body = _DECODER.decode(await state.read_json(exchange), state.unknown_fields)
    state.require_serving()
    record = await state.batches.create_batch(owner_of(exchange), body)
    await exchange.respond_json(batch_object(record))


async def list_batches(state: AppState, exchange: Exchange) -> None:
    """A page of the caller's batches."""
    query = read_query(exchange, BatchQuery)
    page = Page(limit=query.limit, after=query.after)
    records, has_more = await state.batches.list_batches(owner_of(exchange), page)
    data = [batch_object(record) for record in records]
    await exchange.respond_json(
        BatchList(
            "list", data, data[0].id if data else None, data[-1].id if data else None, has_more
        )
    )


async def get_batch(state: AppState, exchange: Exchange) -> None:
    """A batch and how far it is."""
    batch_id = path_parameter(exchange.scope, "batch_id")
    record = await state.batches.get_batch(owner_of(exchange), batch_id)
    await exchange.respond_json(batch_object(record))


async def cancel_batch(state: AppState, exchange: Exchange) -> None:
    """Stop a batch; what it has finished stays."""
    batch_id = path_parameter(exchange.scope, "batch_id")
    record = await state.batches.cancel_batch(owner_of(exchange), batch_id)
    await exchange.respond_json(batch_object(record))


ROUTES = (
    ApiRoute(
        "POST",
        "/v1/batches",
        create_batch,
        "Run the requests of a file",
        BatchObject,
        request=CreateBatchRequest,
        errors=(400, 404, 408, 413, 415, 429, 503),
    ),
    ApiRoute(
        "GET",
        "/v1/batches",
        list_batches,
        "List batches",
        BatchList,
        query=BatchQuery,
        errors=(400, 503),
    ),
    ApiRoute(
        "GET", "/v1/batches/{batch_id}", get_batch, "One batch", BatchObject, errors=(404, 503)
    ),
    ApiRoute(
        "POST",
        "/v1/batches/{batch_id}/cancel",
        cancel_batch,
        "Cancel a batch",
        BatchObject,
        errors=(404, 409, 503),
    ),
)
