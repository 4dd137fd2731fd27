"""Input files line by line, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from caudal.server.batch.limits import MAX_LINE_BYTES

BOM = b"\xef\xbb\xbf"


class InputLine(msgspec.Struct, frozen=True):
    """One line that is not blank, without its line break."""

    number: int
    """Counted from 1, blank lines included."""
    ordinal: int
    """Counted from 0, blank lines left out."""
    data: bytes | None
    """None: longer than MAX_LINE_BYTES."""


class Cursor(msgspec.Struct, frozen=True):
    """A place between two lines."""

    offset: int = 0
    number: int = 0
    ordinal: int = 0


def iter_lines(file: BinaryIO, cursor: Cursor | None = None) -> Iterator[tuple[InputLine, Cursor]]:
    """The lines from `cursor` on, each with the place after it.

    A byte-order mark at the start and a missing last line break are accepted.
    """
    place = cursor or Cursor()
    file.seek(place.offset)
    offset, number, ordinal = place.offset, place.number, place.ordinal
    while True:
        data = file.readline(MAX_LINE_BYTES + 2)
        if not data:
            return
        offset += len(data)
        is_too_long = len(data.rstrip(b"\r\n")) > MAX_LINE_BYTES
        rest = data
        while not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES)
            if not rest:
                break
            offset += len(rest)
            is_too_long = is_too_long or bool(rest.strip())
        number += 1
        if number == 1:
            data = data.removeprefix(BOM)
        data = data.strip(b" \t\r\n")
        if data or is_too_long:
            line = InputLine(number, ordinal, None if is_too_long else data)
            ordinal += 1
            yield line, Cursor(offset, number, ordinal)


def read_lines(
    path: Path, cursor: Cursor, *, max_lines: int, max_bytes: int
) -> tuple[list[InputLine], Cursor]:
    """The next lines of a file and the place after them; [] at its end.

    Stops after `max_lines`, or after the line that exceeds `max_bytes` in sum.
    """
    lines: list[InputLine] = []
    num_bytes = 0
    with path.open("rb") as file:
        for line, place in iter_lines(file, cursor):
            lines.append(line)
            cursor = place
            num_bytes += len(line.data or b"")
            if len(lines) >= max_lines or num_bytes >= max_bytes:
                break
    return lines, cursor
