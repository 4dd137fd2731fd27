"""A file of packed weights: segments as the kernels read them, mapped into memory, never copied.

    ┌─────────────────────────────────────┐ 0
    │ blocks of segment 0                 │ each starts at a multiple of PAGE
    │ …                                   │
    ├─────────────────────────────────────┤ header_offset
    │ header: JSON of `Header`            │
    ├─────────────────────────────────────┤ size - TRAILER.size
    │ magic, version, length and SHA-256  │ what a file cut short lacks
    │ of the header                       │
    └─────────────────────────────────────┘ size

The blocks' SHA-256 is checked when the file's modification time is not the one it was sealed with,
so after a copy or any later write; what lies at the ends of each segment is checked at every start.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import mmap
import os
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from caudal.errors import ModelFileError
from caudal.ops.interface import PackedSegment

VERSION = 1
PAGE = 4096
_MAGIC = b"CAUDALpacked\0\0\0\0"
_TRAILER = struct.Struct("<16sQQ32s")
_MAX_HEADER_BYTES = 64 << 20
_SAMPLE_BYTES = 4096
WRITE_BYTES = 8 << 20
"""Blocks are written in aligned pieces of this size: file systems with large folios then keep them
in huge pages of the page cache, and mapping them is as fast as anonymous huge pages."""

_ENOUGH_IN_HUGE_PAGES = 0.8
"""Share of a mapping; its end never is."""

Weights = Mapping[str, Sequence[PackedSegment]]


class SegmentEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a segment lies in the file."""

    format: str
    rows: int
    offset: int
    num_bytes: int
    samples_crc: int
    """CRC-32 of its first and its last bytes."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file holds, and of what."""

    model: str
    """Fingerprint of the model file or files."""
    layout: str
    """The kernels' layout; other kernels must not read it."""
    sealed_mtime_ns: int
    blocks_sha256: str
    weights: dict[str, list[SegmentEntry]]


class PackedFile:
    """A checked file's weights. Mapped segments keep the mapping alive; the file may be deleted."""

    def __init__(self, header: Header, blocks: NDArray[np.uint8], *, is_mapped: bool) -> None:
        self._weights = header.weights
        self._blocks = blocks
        self.is_mapped = is_mapped
        """False: this is a copy, because the system keeps the file in small pages."""

    def __len__(self) -> int:
        return len(self._weights)

    def find(self, name: str) -> list[PackedSegment] | None:
        """The segments of the weight `name`, as views of the file; None if it is not there."""
        entries = self._weights.get(name)
        if entries is None:
            return None
        return [
            PackedSegment(e.format, e.rows, self._blocks[e.offset : e.offset + e.num_bytes])
            for e in entries
        ]


def open_packed(path: Path, model: str, layout: str) -> PackedFile | None:
    """Map `path`; None if it is not there or was made of another model or for other kernels.

    Marks the file as used now. Raises ModelFileError if it is damaged, OSError if it cannot be
    read.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        header = _read_header(file, path.name)
        if (header.model, header.layout) != (model, layout):
            return None
        mtime_ns = os.fstat(file.fileno()).st_mtime_ns
        mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        _ask_for_huge_pages(mapping)
        blocks = np.frombuffer(mapping, np.uint8)
        _check_samples(header, blocks, path.name)
        if mtime_ns != header.sealed_mtime_ns:
            _check_blocks(header, blocks, path.name)
        is_mapped = _is_in_huge_pages(blocks)
        if not is_mapped:
            blocks = _copy(file, blocks.size)
    with contextlib.suppress(OSError):  # a file system that keeps no times
        _seal(path, header.sealed_mtime_ns)
    return PackedFile(header, blocks, is_mapped=is_mapped)


def _ask_for_huge_pages(mapping: mmap.mmap) -> None:
    with contextlib.suppress(OSError, AttributeError):  # a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)


def _is_in_huge_pages(blocks: NDArray[np.uint8]) -> bool:
    """Whether a mapped file lies in huge pages of the page cache, as newer kernels keep it.

    In small pages one token takes 13 % longer, because its weights do not fit the TLB.
    """
    blocks[:: 2 << 20].sum()  # maps what is there, reads what is not
    start = f"{blocks.ctypes.data:x}-"
    fields: dict[str, int] = {}
    with contextlib.suppress(OSError), open("/proc/self/smaps", encoding="utf-8") as file:
        for line in itertools.dropwhile(lambda line: not line.startswith(start), file):
            name, _, value = line.partition(":")
            if name == "VmFlags":
                break
            if value.endswith("kB\n"):
                fields[name] = int(value.split()[0]) << 10
    return fields.get("FilePmdMapped", 0) > _ENOUGH_IN_HUGE_PAGES * blocks.size


def _copy(file: BinaryIO, size: int) -> NDArray[np.uint8]:
    """The file's content in anonymous memory, in huge pages where the system has them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _ask_for_huge_pages(memory)
    file.seek(0)
    with memoryview(memory) as view:
        done = 0
        while done < size and (count := os.readv(file.fileno(), [view[done:]])):
            done += count
    if done < size:
        raise ModelFileError(f"{file.name}: cut short")
    blocks = np.frombuffer(memory, np.uint8)
    blocks.flags.writeable = False
    return blocks


def write_packed(path: Path, weights: Weights, *, model: str, layout: str) -> None:
    """Write `weights` to the new file `path`, durably.

    Raises OSError, for example when the disk is full; then `path` may be left incomplete.
    """
    sealed_mtime_ns = int(time.time()) * 10**9  # whole seconds: every file system keeps them
    entries, size = _place(weights)
    with path.open("xb", buffering=0) as file:
        digest = _write_blocks(file, weights, entries, size)
        header = msgspec.json.encode(Header(model, layout, sealed_mtime_ns, digest, entries))
        checksum = hashlib.sha256(header).digest()
        _write_all(file, header + _TRAILER.pack(_MAGIC, VERSION, len(header), checksum))
        os.fsync(file.fileno())
    _seal(path, sealed_mtime_ns)


def _seal(path: Path, mtime_ns: int) -> None:
    """Give the file the time that says «checked»; its access time, now, is for eviction."""
    os.utime(path, ns=(time.time_ns(), mtime_ns))


def _place(weights: Weights) -> tuple[dict[str, list[SegmentEntry]], int]:
    """Entries of all segments, and where the blocks end."""
    entries: dict[str, list[SegmentEntry]] = {}
    position = 0
    for name, segments in weights.items():
        entries[name] = []
        for segment in segments:
            num_bytes = segment.blocks.nbytes
            crc = _samples_crc(segment.blocks)
            entries[name].append(
                SegmentEntry(segment.format, segment.rows, position, num_bytes, crc)
            )
            position += -(-num_bytes // PAGE) * PAGE
    return entries, position


def _write_blocks(
    file: FileIO, weights: Weights, entries: Mapping[str, Sequence[SegmentEntry]], size: int
) -> str:
    """Write the segments to where they belong -> SHA-256 of all that was written."""
    digest = hashlib.sha256()
    buffer = bytearray(min(WRITE_BYTES, size))
    window = np.frombuffer(buffer, np.uint8)
    placed = [
        (entry, segment.blocks)
        for name, segments in weights.items()
        for entry, segment in zip(entries[name], segments, strict=True)
    ]
    first = 0
    for start in range(0, size, WRITE_BYTES):
        window[:] = 0
        end = min(start + WRITE_BYTES, size)
        while first < len(placed) and placed[first][0].offset < end:
            entry, blocks = placed[first]
            low, high = max(start, entry.offset), min(end, entry.offset + entry.num_bytes)
            if low < high:
                window[low - start : high - start] = blocks[
                    low - entry.offset : high - entry.offset
                ]
            if entry.offset + entry.num_bytes > end:
                break
            first += 1
        written = memoryview(buffer)[: end - start]
        digest.update(written)
        _write_all(file, written)
    return digest.hexdigest()


def _write_all(file: FileIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _read_header(file: BinaryIO, name: str) -> Header:
    size = file.seek(0, os.SEEK_END)
    if size < _TRAILER.size:
        raise ModelFileError(f"{name}: cut short")
    file.seek(size - _TRAILER.size)
    magic, version, length, checksum = _TRAILER.unpack(file.read(_TRAILER.size))
    if magic != _MAGIC or version != VERSION:
        raise ModelFileError(f"{name}: cut short, or of another version")
    blocks_end = size - _TRAILER.size - length
    if length > _MAX_HEADER_BYTES or blocks_end < 0:
        raise ModelFileError(f"{name}: the header has {length} bytes")
    file.seek(blocks_end)
    data = file.read(length)
    if hashlib.sha256(data).digest() != checksum:
        raise ModelFileError(f"{name}: the header does not match its checksum")
    try:
        header = msgspec.json.decode(data, type=Header)
    except msgspec.DecodeError as error:
        raise ModelFileError(f"{name}: {error}") from None
    for entry in itertools.chain.from_iterable(header.weights.values()):
        if entry.offset % PAGE or entry.num_bytes < 1 or entry.offset < 0:
            raise ModelFileError(f"{name}: a segment at {entry.offset} is misplaced")
        if entry.offset + entry.num_bytes > blocks_end:
            raise ModelFileError(f"{name}: a segment at {entry.offset} ends outside the file")
    return header


def _check_samples(header: Header, blocks: NDArray[np.uint8], name: str) -> None:
    for entry in itertools.chain.from_iterable(header.weights.values()):
        found = _samples_crc(blocks[entry.offset : entry.offset + entry.num_bytes])
        if found != entry.samples_crc:
            raise ModelFileError(f"{name}: the segment at {entry.offset} is damaged")


def _check_blocks(header: Header, blocks: NDArray[np.uint8], name: str) -> None:
    entries = itertools.chain.from_iterable(header.weights.values())
    end = max((e.offset + -(-e.num_bytes // PAGE) * PAGE for e in entries), default=0)
    if hashlib.sha256(blocks[:end].data).hexdigest() != header.blocks_sha256:
        raise ModelFileError(f"{name}: the weights do not match their checksum")


def _samples_crc(blocks: NDArray[np.uint8]) -> int:
    first, last = blocks[:_SAMPLE_BYTES].tobytes(), blocks[-_SAMPLE_BYTES:].tobytes()
    return zlib.crc32(last, zlib.crc32(first))
