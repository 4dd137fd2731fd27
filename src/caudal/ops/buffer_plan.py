"""Places activation buffers in one arena so that lifetimes that do not overlap share memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer of `nbytes` that is written at step `first` and last read at step `last`."""

    nbytes: int
    first: int
    last: int


def place_buffers(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Byte offsets of the buffers and the size of the arena.

    Buffers whose spans [first, last] share a step never overlap. First fit at the lowest offset,
    in order of `first`; offsets are multiples of ALIGNMENT.
    """
    offsets = [0] * len(lifetimes)
    live: list[tuple[int, int, int]] = []  # (offset, end, last step), by offset
    arena_nbytes = 0
    for index in sorted(range(len(lifetimes)), key=lambda i: lifetimes[i].first):
        wanted = lifetimes[index]
        live = [entry for entry in live if entry[2] >= wanted.first]
        size = -(-wanted.nbytes // ALIGNMENT) * ALIGNMENT
        offset = 0
        for begin, end, _ in live:
            if offset + size <= begin:
                break
            offset = max(offset, end)
        offsets[index] = offset
        live.append((offset, offset + size, wanted.last))
        live.sort()
        arena_nbytes = max(arena_nbytes, offset + size)
    return offsets, arena_nbytes
