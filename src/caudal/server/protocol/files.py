"""`/v1/files`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_PAGE = 10_000


class FileUpload(msgspec.Struct, kw_only=True):
    """The fields of the form; only input files of batches are kept."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]
    expires_anchor: Literal["created_at"] | None = msgspec.field(
        default=None, name="expires_after[anchor]"
    )
    expires_seconds: Annotated[int, Meta(ge=3600, le=2_592_000)] | None = msgspec.field(
        default=None, name="expires_after[seconds]"
    )


class FileObject(msgspec.Struct, frozen=True):
    """A stored file."""

    id: str
    object: str
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: str
    status_details: str | None = None


class FileQuery(msgspec.Struct, kw_only=True):
    """Which files to list."""

    after: Annotated[str, Meta(max_length=256)] | None = None
    """The last id of the page before."""
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = MAX_PAGE
    order: Literal["asc", "desc"] = "desc"
    purpose: Annotated[str, Meta(max_length=256)] | None = None


class FileList(msgspec.Struct, frozen=True):
    """A page of files."""

    object: str
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, frozen=True):
    """A file is gone."""

    id: str
    object: str
    deleted: bool
