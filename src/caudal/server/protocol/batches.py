"""`/v1/batches`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

WINDOW_PATTERN = r"^[1-9][0-9]{0,6}[smhd]$"
MAX_METADATA = 16

MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class OutputExpiresAfter(msgspec.Struct, frozen=True):
    """When result files are deleted, counted from their creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)]


class CreateBatchRequest(msgspec.Struct, kw_only=True):
    """Run the requests of an uploaded file."""

    input_file_id: Annotated[str, Meta(max_length=256)]
    endpoint: Annotated[str, Meta(max_length=256)]
    """The path that all requests of the file go to."""
    completion_window: Annotated[str, Meta(pattern=WINDOW_PATTERN)] = "24h"
    """Time to run everything: a number and s, m, h or d, at most 30d."""
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=MAX_METADATA)] | None = (
        None
    )
    output_expires_after: OutputExpiresAfter | None = None


class BatchError(msgspec.Struct, frozen=True):
    """What is wrong with a line of the input file, or with the file (line null)."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None
    """Counted from 1, blank lines included."""


class BatchErrors(msgspec.Struct, frozen=True):
    """The first faults of an input file."""

    object: str
    data: list[BatchError]


class BatchRequestCounts(msgspec.Struct, frozen=True):
    """Requests with an answer, those with an error, and all."""

    total: int
    completed: int
    failed: int


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Where the prompts' KV came from."""

    cached_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Part of the output tokens."""

    reasoning_tokens: int


class BatchUsage(msgspec.Struct, frozen=True):
    """Tokens of all completed requests."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """A batch; times are seconds since the epoch."""

    id: str
    object: str
    endpoint: str
    model: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchRequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchQuery(msgspec.Struct, kw_only=True):
    """Which batches to list, the newest first."""

    after: Annotated[str, Meta(max_length=256)] | None = None
    """The last id of the page before."""
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


class BatchList(msgspec.Struct, frozen=True):
    """A page of batches."""

    object: str
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
