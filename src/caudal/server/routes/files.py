"""`/v1/files`: the inputs and results of batches."""

from __future__ import annotations

import asyncio
import os

from caudal.server.batch.access import owner_of, read_query
from caudal.server.batch.records import Page
from caudal.server.batch.views import file_object
from caudal.server.endpoint import ApiRoute, path_parameter
from caudal.server.errors import ClientGoneError, PayloadTooLargeError
from caudal.server.exchange import Exchange
from caudal.server.protocol.files import (
    FileDeleted,
    FileList,
    FileObject,
    FileQuery,
    FileUpload,
)
from caudal.server.state import AppState

UPLOAD_IDLE_S = 60.0
"""Silence after which an upload is given up; as a whole it may take as long as it likes."""
CHUNK_BYTES = 256 * 1024


async def create_file(state: AppState, exchange: Exchange) -> None:
    """Store the file of a multipart form."""
    content_type = exchange.headers.get(b"content-type", b"")
    chunks = exchange.body_chunks(UPLOAD_IDLE_S)
    try:
        record = await state.batches.create_file(owner_of(exchange), chunks, content_type)
    except PayloadTooLargeError:
        await exchange.discard_body()
        raise
    await exchange.respond_json(file_object(record))


async def list_files(state: AppState, exchange: Exchange) -> None:
    """A page of the caller's files."""
    query = read_query(exchange, FileQuery)
    page = Page(
        limit=query.limit,
        after=query.after,
        is_ascending=query.order == "asc",
        purpose=query.purpose,
    )
    records, has_more = await state.batches.list_files(owner_of(exchange), page)
    data = [file_object(record) for record in records]
    await exchange.respond_json(
        FileList(
            "list", data, data[0].id if data else None, data[-1].id if data else None, has_more
        )
    )


async def get_file(state: AppState, exchange: Exchange) -> None:
    """What is known about a file."""
    file_id = path_parameter(exchange.scope, "file_id")
    record = await state.batches.get_file(owner_of(exchange), file_id)
    await exchange.respond_json(file_object(record))


async def get_file_content(state: AppState, exchange: Exchange) -> None:
    """A file itself, streamed; a reader that stalls is cut."""
    file_id = path_parameter(exchange.scope, "file_id")
    batches = state.batches
    record, descriptor = await batches.open_content(owner_of(exchange), file_id)
    try:
        await exchange.start_bytes(record.num_bytes, b"application/octet-stream")
        num_left = record.num_bytes
        while num_left:
            data = await batches.read_content(descriptor, min(num_left, CHUNK_BYTES))
            if not data:
                raise EOFError(f"{file_id} is shorter than its record says")
            num_left -= len(data)
            async with asyncio.timeout(state.limits.slow_reader_s):
                await exchange.send({"type": "http.response.body", "body": data, "more_body": True})
        await exchange.finish()
    except TimeoutError:
        state.metrics.slow_readers_cut += 1
        raise ClientGoneError from None
    finally:
        os.close(descriptor)


async def delete_file(state: AppState, exchange: Exchange) -> None:
    """Delete a file. A batch that reads it goes on."""
    file_id = path_parameter(exchange.scope, "file_id")
    await state.batches.delete_file(owner_of(exchange), file_id)
    await exchange.respond_json(FileDeleted(file_id, "file", True))


ROUTES = (
    ApiRoute(
        "POST",
        "/v1/files",
        create_file,
        "Upload the input of a batch",
        FileObject,
        form=FileUpload,
        errors=(400, 408, 413, 415, 429, 503),
    ),
    ApiRoute(
        "GET",
        "/v1/files",
        list_files,
        "List files",
        FileList,
        query=FileQuery,
        errors=(400, 503),
    ),
    ApiRoute("GET", "/v1/files/{file_id}", get_file, "One file", FileObject, errors=(404, 503)),
    ApiRoute(
        "DELETE",
        "/v1/files/{file_id}",
        delete_file,
        "Delete a file",
        FileDeleted,
        errors=(404, 503),
    ),
    ApiRoute(
        "GET",
        "/v1/files/{file_id}/content",
        get_file_content,
        "The content of a file",
        "application/octet-stream",
        errors=(404, 503),
    ),
)
