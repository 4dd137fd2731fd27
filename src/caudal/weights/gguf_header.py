"""A bounds-checked cursor over a GGUF header and the metadata values read with it."""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import NoReturn

import numpy as np

from caudal.errors import ModelFileError

MAX_HEADER_BYTES = 256 << 20
"""A vocabulary of 262,144 tokens with 500k merges takes 20 MB; more is not a real file."""
MAX_METADATA_PAIRS = 1 << 16
MAX_TOTAL_STRINGS = 1 << 21
"""Array strings in one file: keeps the walk over a hostile file under a second."""
MAX_KEY_BYTES = (1 << 16) - 1
"""Limit of the GGUF specification."""

_DECODE_CHUNK = 1 << 16
"""Strings decoded at a time."""

_WORTH_SEARCHING = 64
"""Strings; fewer are walked one by one."""
_WALK_WINDOW = 1 << 18
"""Bytes searched for strings at a time."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class ValueType(IntEnum):
    """Type tag of a metadata value (GGUF specification, `gguf_metadata_value_type`)."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_DTYPES: dict[ValueType, np.dtype[np.generic]] = {
    ValueType.UINT8: np.dtype("<u1"),
    ValueType.INT8: np.dtype("<i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("<u1"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}
_SCALARS: dict[ValueType, struct.Struct] = {
    ValueType.UINT8: struct.Struct("<B"),
    ValueType.INT8: struct.Struct("<b"),
    ValueType.UINT16: struct.Struct("<H"),
    ValueType.INT16: struct.Struct("<h"),
    ValueType.UINT32: _U32,
    ValueType.INT32: struct.Struct("<i"),
    ValueType.FLOAT32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<B"),
    ValueType.UINT64: _U64,
    ValueType.INT64: struct.Struct("<q"),
    ValueType.FLOAT64: struct.Struct("<d"),
}


def quoted(name: str) -> str:
    """`name` for an error message: escaped, and cut if the file made it absurdly long."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


class StringArray:
    """Strings of a metadata array, located but not yet decoded.

    `starts` are the offsets of the length prefixes, `end` the offset after the last string.
    Keeping one 8-byte offset per string (each takes at least 8 bytes in the file) bounds the
    memory of opening a file by its size.
    """

    __slots__ = ("_buffer", "_label", "_starts")

    def __init__(self, buffer: mmap.mmap, starts: array[int], end: int, label: str) -> None:
        self._buffer = buffer
        self._starts = starts
        self._starts.append(end)
        self._label = label

    def __len__(self) -> int:
        return len(self._starts) - 1

    def decode(self) -> list[str]:
        """All strings. Raises ModelFileError if one is not UTF-8."""
        strings: list[str] = []
        # Chunks bound the temporary copies.
        for first in range(0, len(self), _DECODE_CHUNK):
            strings += self._decode_chunk(first, min(first + _DECODE_CHUNK, len(self)))
        return strings

    def _decode_chunk(self, first: int, last: int) -> list[str]:
        base = self._starts[first]
        blob = self._buffer[base : self._starts[last]]
        prefixes = np.frombuffer(self._starts, np.int64)[first:last] - base
        # The eighth byte of a length prefix is 0 for any length that fits in a file. Dropping the
        # seven before it leaves NUL-separated text, which decodes and splits at native speed.
        keep = np.ones(len(blob), np.bool_)
        for index in range(7):
            keep[prefixes + index] = False
        text = np.frombuffer(blob, np.uint8)[keep]
        if np.count_nonzero(text == 0) != last - first:
            return self._decode_singly(blob, prefixes.tolist(), first)
        try:
            return text.tobytes().decode().split("\0")[1:]
        except UnicodeDecodeError:
            return self._decode_singly(blob, prefixes.tolist(), first)

    def _decode_singly(self, blob: bytes, prefixes: list[int], first: int) -> list[str]:
        """For strings that contain NUL, and to find the one that is not UTF-8."""
        strings: list[str] = []
        try:
            for start, end in zip(prefixes, [*prefixes[1:], len(blob)], strict=True):
                strings.append(blob[start + 8 : end].decode())
        except UnicodeDecodeError as error:
            index = first + len(strings)
            raise ModelFileError(f"{self._label}[{index}] is not valid UTF-8: {error}") from None
        return strings


class Metadata(Mapping[str, object]):
    """Key-value pairs of a GGUF file; string arrays are decoded when first asked for.

    Values are str, int, float, bool, list[str], or read-only NumPy arrays for arrays of
    numbers and booleans.
    """

    __slots__ = ("_values",)

    def __init__(self, values: dict[str, object]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> object:
        value = self._values[key]
        if isinstance(value, StringArray):
            value = value.decode()
            self._values[key] = value
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def array_length(self, key: str) -> int | None:
        """Entries of the array at `key` without decoding it; None if it is not an array."""
        value = self._values[key]
        return len(value) if isinstance(value, (StringArray, list, np.ndarray)) else None

    def is_string_array(self, key: str) -> bool:
        """Whether `key` holds an array of strings; does not decode it."""
        return isinstance(self._values[key], (StringArray, list))


class HeaderCursor:
    """Reads a GGUF header front to back; refuses anything outside the file.

    Every method takes the name of the field it reads, for the error message.
    """

    def __init__(self, buffer: mmap.mmap, file_name: str) -> None:
        self._buffer = buffer
        self._size = min(len(buffer), MAX_HEADER_BYTES)
        self.file_name = file_name
        self._strings_left = MAX_TOTAL_STRINGS
        self.position = 0

    def fail(self, message: str) -> NoReturn:
        """Raise ModelFileError with the file's name in front."""
        raise ModelFileError(f"{self.file_name}: {message}")

    def take(self, num_bytes: int, field: str) -> int:
        """Advance by `num_bytes` that must lie inside the file; return where they start."""
        start = self.position
        if num_bytes > self._size - start:
            if self._size == MAX_HEADER_BYTES:
                self.fail(f"{field}: the header would exceed {MAX_HEADER_BYTES >> 20} MiB")
            self.fail(
                f"{field} needs {num_bytes} bytes at offset {start}, but the file ends at "
                f"{self._size} (truncated or damaged)"
            )
        self.position = start + num_bytes
        return start

    def read_u32(self, field: str) -> int:
        """An unsigned 32-bit number."""
        value: int = _U32.unpack_from(self._buffer, self.take(4, field))[0]
        return value

    def read_u64(self, field: str) -> int:
        """An unsigned 64-bit number."""
        value: int = _U64.unpack_from(self._buffer, self.take(8, field))[0]
        return value

    def read_dims(self, count: int, field: str) -> tuple[int, ...]:
        """`count` unsigned 64-bit numbers."""
        return struct.unpack_from(f"<{count}Q", self._buffer, self.take(8 * count, field))

    def read_string(self, field: str, max_bytes: int = MAX_HEADER_BYTES) -> str:
        """A length-prefixed UTF-8 string of at most `max_bytes`."""
        length = self.read_u64(f"length of {field}")
        if length > max_bytes:
            self.fail(f"{field} is {length} bytes long; the limit is {max_bytes}")
        start = self.take(length, field)
        try:
            return self._buffer[start : start + length].decode()
        except UnicodeDecodeError as error:
            self.fail(f"{field} is not valid UTF-8: {error}")

    def read_value(self, key: str) -> object:
        """The type tag and value that follow `key`."""
        tag = self._read_type(f"type of {quoted(key)}", key)
        if tag is ValueType.STRING:
            return self.read_string(quoted(key))
        if tag is ValueType.ARRAY:
            return self._read_array(key)
        layout = _SCALARS[tag]
        value: object = layout.unpack_from(self._buffer, self.take(layout.size, quoted(key)))[0]
        if tag is ValueType.BOOL:
            if value not in (0, 1):
                self.fail(f"{quoted(key)}: a boolean must be 0 or 1, got {value}")
            return bool(value)
        return value

    def _read_type(self, field: str, key: str) -> ValueType:
        number = self.read_u32(field)
        try:
            return ValueType(number)
        except ValueError:
            self.fail(f"{quoted(key)} has unknown value type {number}")

    def _read_array(self, key: str) -> object:
        field = quoted(key)
        tag = self._read_type(f"element type of {field}", key)
        count = self.read_u64(f"length of {field}")
        if tag is ValueType.ARRAY:
            self.fail(f"{field} is an array of arrays, which GGUF readers do not accept")
        if tag is ValueType.STRING:
            return self._walk_strings(count, field)
        dtype = _DTYPES[tag]
        start = self.take(count * dtype.itemsize, f"{field} ({count} elements)")
        values = np.frombuffer(self._buffer, dtype=dtype, count=count, offset=start)
        if tag is ValueType.BOOL:
            if count and int(values.max()) > 1:
                self.fail(f"{field}: a boolean must be 0 or 1, got {values.max()}")
            return values.view(np.bool_)
        return values

    def _walk_strings(self, count: int, field: str) -> StringArray:
        # Checked before the walk: every string takes at least its 8-byte length prefix.
        if count > self._strings_left:
            self.fail(f"{field} has {count} strings; the limit is {MAX_TOTAL_STRINGS} per file")
        if 8 * count > self._size - self.position:
            self.take(8 * count, f"{field} ({count} strings)")
        self._strings_left -= count
        short = None
        if count >= _WORTH_SEARCHING:
            short = _find_short_strings(self._buffer, self.position, count, self._size)
        if short is not None:
            starts, self.position = short
            return StringArray(self._buffer, starts, self.position, f"{self.file_name}: {field}")
        starts = array("q")
        append = starts.append
        unpack = _U64.unpack_from
        buffer = self._buffer
        position = self.position
        try:
            for _ in range(count):
                append(position)
                position += 8 + unpack(buffer, position)[0]
        except (struct.error, OverflowError):
            position = self._size + 1
        if position > self._size:
            self.fail(
                f"{field}: string {len(starts) - 1} of {count} runs past the end of the "
                f"{'file' if self._size < MAX_HEADER_BYTES else 'largest accepted header'}"
            )
        self.position = position
        return StringArray(buffer, starts, position, f"{self.file_name}: {field}")


def _find_short_strings(
    buffer: mmap.mmap, position: int, count: int, size: int
) -> tuple[array[int], int] | None:
    """(starts, end) of `count` strings at `position`, found in a few passes over the bytes.

    Works for strings of 1 to 65,535 bytes without NUL, as vocabularies have: there, six zeros
    before another byte end a length prefix. Each must lie where the one before it ends, so the
    result is that of walking; None where it might not be.
    """
    found = array("q")
    while len(found) < count:
        window = np.frombuffer(buffer, np.uint8, min(_WALK_WINDOW, size - position), position)
        zero = window == 0
        is_text = ~zero[8:]
        for distance in range(1, 7):
            is_text &= zero[8 - distance : -distance]
        starts = np.flatnonzero(is_text)[: count - len(found)]
        if not starts.size or starts[0] != 0:
            return None
        ends = starts + 8 + window[starts] + (window[starts + 1].astype(np.int64) << 8)
        if not np.array_equal(starts[1:], ends[:-1]):
            return None
        found.frombytes((starts + position).tobytes())
        position += int(ends[-1])
        if position > size:
            return None
    return found, position
