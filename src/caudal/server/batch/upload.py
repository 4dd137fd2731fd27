"""Receives a multipart form: the file goes to the disk as it comes, whatever its size."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from caudal.errors import InvalidRequestError
from caudal.server.batch.workers import Workers
from caudal.server.body import invalid_field
from caudal.server.errors import PayloadTooLargeError, UnsupportedMediaTypeError
from caudal.server.protocol.files import FileUpload

MAX_PARTS = 16
MAX_VALUE_BYTES = 1024
MAX_FILENAME_CHARS = 255
WRITE_BYTES = 1024 * 1024
"""File data collected in memory before it is written."""


class Upload(msgspec.Struct, frozen=True):
    """A form that has arrived; its file is on the disk, synced."""

    form: FileUpload
    filename: str
    num_bytes: int


async def receive_upload(
    chunks: AsyncIterator[bytes],
    content_type: bytes,
    path: Path,
    workers: Workers,
    max_bytes: int,
) -> Upload:
    """Read the form of `chunks`, writing its file to `path`.

    Raises InvalidRequestError for a malformed form, PayloadTooLargeError, UnsupportedMediaTypeError
    or OSError; the caller deletes what was written.
    """
    form = _Form(_boundary(content_type))
    num_bytes = 0
    file = await workers.contents(lambda: path.open("wb", buffering=0))
    try:
        async for chunk in chunks:
            form.feed(chunk)
            if len(form.pending) >= WRITE_BYTES:
                num_bytes += await _write(file, form, workers)
            if num_bytes + len(form.pending) > max_bytes:
                raise PayloadTooLargeError(
                    f"The file is larger than {max_bytes} bytes.",
                    param="file",
                    code="file_too_large",
                )
        num_bytes += await _write(file, form, workers)
        fields, filename = form.finish()
        await workers.contents(lambda: os.fsync(file.fileno()))
    finally:
        await asyncio.shield(workers.contents(file.close))
    return Upload(fields, filename, num_bytes)


async def _write(file: BinaryIO, form: _Form, workers: Workers) -> int:
    data, form.pending = form.pending, bytearray()

    def write() -> None:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]

    if data:
        await workers.contents(write)
    return len(data)


def _boundary(content_type: bytes) -> bytes:
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind.lower() != b"multipart/form-data" or not 0 < len(boundary) <= 70:
        raise UnsupportedMediaTypeError(
            "The request body must be sent as multipart/form-data.", code="unsupported_media_type"
        )
    return boundary


class _Form:
    """Fed with the body in pieces; keeps small fields, passes the file on in `pending`."""

    def __init__(self, boundary: bytes) -> None:
        self.pending = bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._add_header_name,
                "on_header_value": self._add_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )
        self._fields: dict[str, str] = {}
        self._filename: str | None = None
        self._num_parts = 0
        self._is_complete = False
        self._header_name, self._header_value = bytearray(), bytearray()
        self._disposition = b""
        self._name, self._value = "", bytearray()
        self._is_file = False

    def feed(self, data: bytes) -> None:
        """Parse a piece. Raises InvalidRequestError."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(str(error).rstrip(".")) from None

    def finish(self) -> tuple[FileUpload, str]:
        """The checked fields and the name of the file. Raises InvalidRequestError."""
        if not self._is_complete:
            raise _malformed("it ends before its last boundary")
        fields = dict(self._fields)
        if self._filename is not None:
            fields["file"] = ""
        try:
            upload = msgspec.convert(fields, FileUpload, strict=False)
        except msgspec.ValidationError as error:
            raise invalid_field(error) from None
        assert self._filename is not None
        return upload, self._filename

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _malformed(f"it has more than {MAX_PARTS} parts")
        self._disposition, self._name = b"", ""
        self._value.clear()
        self._is_file = False

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if not self._name:
            raise _malformed("a part has no name")
        self._is_file = self._name == "file"
        if self._is_file:
            if self._filename is not None:
                raise InvalidRequestError(
                    "file: only one file at a time.", param="file", code="invalid_value"
                )
            self._filename = _clean_name(options.get(b"filename", b"").decode("utf-8", "replace"))

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.pending += memoryview(data)[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > MAX_VALUE_BYTES:
            raise InvalidRequestError(
                f"{self._name[:64]}: must have at most {MAX_VALUE_BYTES} bytes.",
                param=self._name[:64],
                code="invalid_value",
            )

    def _end_part(self) -> None:
        if not self._is_file:
            self._fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_complete = True


def _clean_name(name: str) -> str:
    """The last part of a path, without control characters; only ever shown, never opened."""
    name = name.replace("\\", "/").rsplit("/", 1)[-1]
    name = "".join(c for c in name if c.isprintable())[:MAX_FILENAME_CHARS]
    return name or "upload.jsonl"


def _malformed(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"The form is malformed: {problem}.", code="invalid_form")
