"""Result files: one JSON line per ended request, appended as they come.

A line's `id` ends with the ordinal of its request, so the files themselves tell which requests are
done. After a crash they are read once; a torn last line, or garbage behind the last sync after a
power failure, is cut off and its requests run again. Hence each request has exactly one line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from caudal.server.batch.dispatch import Reply
from caudal.server.batch.records import TokenUsage

LINE_BREAKS: Mapping[bytes, bytes] = MappingProxyType(
    {"\u0085".encode(): b"\\u0085", "\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029"}
)
"""What Python's str.splitlines takes for a line break, beside those that JSON always escapes."""

_ORDINAL_DIGITS = 8


class ResultError(msgspec.Struct, frozen=True):
    """Why a request has no response."""

    code: str
    message: str


class _Response(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _ResultLine(msgspec.Struct, frozen=True):
    id: str
    custom_id: str
    response: _Response | None
    error: ResultError | None


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class _Usage(msgspec.Struct, frozen=True):
    """Of completions and chats, or (the later names) of responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _PromptDetails | None = None


class _Body(msgspec.Struct, frozen=True):
    usage: _Usage | None = None


class _RecoveredResponse(msgspec.Struct, frozen=True):
    body: _Body


class _RecoveredLine(msgspec.Struct, frozen=True):
    id: str
    response: _RecoveredResponse | None = None


_BODY = msgspec.json.Decoder(_Body)
_RECOVERED = msgspec.json.Decoder(_RecoveredLine)


def result_id(token: str, ordinal: int) -> str:
    """The id of a result line; `token` belongs to the batch."""
    return f"batch_req_{token}{ordinal:0{_ORDINAL_DIGITS}x}"


def response_line(line_id: str, custom_id: str, reply: Reply) -> bytes:
    """A request that got an answer, good or bad."""
    response = _Response(reply.status, reply.request_id, msgspec.Raw(reply.body))
    return _encode_line(_ResultLine(line_id, custom_id, response, None))


def error_line(line_id: str, custom_id: str, error: ResultError) -> bytes:
    """A request that got none."""
    return _encode_line(_ResultLine(line_id, custom_id, None, error))


def _encode_line(line: _ResultLine) -> bytes:
    """One line for every reader: some break text also at characters that JSON need not escape."""
    data = msgspec.json.encode(line)
    for character in LINE_BREAKS:
        if character in data:
            data = data.replace(character, LINE_BREAKS[character])
    return data + b"\n"


def add_usage(usage: TokenUsage, body: bytes) -> None:
    """Count the tokens that an answer reports."""
    try:
        _add(usage, _BODY.decode(body).usage)
    except msgspec.DecodeError:
        return


def _add(usage: TokenUsage, counted: _Usage | None) -> None:
    if counted is not None:
        usage.num_input += counted.prompt_tokens + counted.input_tokens
        usage.num_output += counted.completion_tokens + counted.output_tokens
        details = counted.prompt_tokens_details or counted.input_tokens_details
        usage.num_cached += 0 if details is None else details.cached_tokens


class Done:
    """Which requests have ended: one bit each."""

    def __init__(self, num_requests: int) -> None:
        self._bits = bytearray((num_requests + 7) // 8)

    def __contains__(self, ordinal: int) -> bool:
        return bool(self._bits[ordinal >> 3] >> (ordinal & 7) & 1)

    def add(self, ordinal: int) -> None:
        """Mark a request as ended."""
        self._bits[ordinal >> 3] |= 1 << (ordinal & 7)


class ResultFiles:
    """Appends to the two result files of a batch; its calls block and never overlap."""

    def __init__(self, output: Path, errors: Path, token: str, num_requests: int) -> None:
        self._paths = (output, errors)
        self._token = token
        self.done = Done(num_requests)
        self.num_requests = num_requests
        self.num_completed = 0
        self.num_failed = 0
        self.usage = TokenUsage()
        self._is_synced = True
        self._is_broken = False

    def recover(self) -> None:
        """Find out what the files hold already, cutting off what is no whole line."""
        for index, path in enumerate(self._paths):
            if not path.exists():
                continue
            with path.open("r+b") as file:
                end = 0
                for line in file:
                    if not self._recover_line(line, is_output=index == 0):
                        break
                    end += len(line)
                file.truncate(end)
                os.fsync(file.fileno())

    def _recover_line(self, line: bytes, *, is_output: bool) -> bool:
        if not line.endswith(b"\n"):
            return False
        try:
            recovered = _RECOVERED.decode(line)
            prefix, ordinal = recovered.id[:-_ORDINAL_DIGITS], int(recovered.id[-8:], 16)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return False
        is_ours = prefix == f"batch_req_{self._token}" and ordinal < self.num_requests
        if not is_ours or ordinal in self.done:
            return False
        self.done.add(ordinal)
        if is_output:
            self.num_completed += 1
            _add(self.usage, recovered.response.body.usage if recovered.response else None)
        else:
            self.num_failed += 1
        return True

    def append(self, output: bytes, errors: bytes) -> None:
        """Write whole lines to the operating system: they outlive this process.

        After an OSError (a full disk) the files are in doubt: every further call raises, and only
        a new object that recovers them can go on.
        """
        self._check()
        self._is_broken = True
        for path, data in zip(self._paths, (output, errors), strict=True):
            if data:
                self._is_synced = False
                with path.open("ab", buffering=0) as file:
                    _write_all(file.fileno(), data)
        self._is_broken = False

    def sync(self) -> None:
        """Bring everything written so far to the disk."""
        self._check()
        if self._is_synced:
            return
        self._is_broken = True
        for path in self._existing():
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
        self._is_synced, self._is_broken = True, False

    def _check(self) -> None:
        if self._is_broken:
            raise OSError("an earlier write of these result files failed")

    def sizes(self) -> tuple[int, int]:
        """Bytes of output and errors, after deleting the files that are empty."""
        self._check()
        sizes = []
        for path in self._paths:
            size = path.stat().st_size if path.exists() else 0
            if size == 0:
                path.unlink(missing_ok=True)
            sizes.append(size)
        return sizes[0], sizes[1]

    def _existing(self) -> Iterator[Path]:
        return (path for path in self._paths if path.exists())


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
