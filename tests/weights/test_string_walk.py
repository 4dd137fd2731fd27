"""String arrays are found by a search where that is exact, and by walking everywhere else."""

from __future__ import annotations

import mmap
import random
import struct
from collections.abc import Sequence

import pytest

from caudal.errors import ModelFileError
from caudal.weights import gguf_header
from caudal.weights.gguf_header import HeaderCursor, StringArray

_STRING, _ARRAY = 8, 9


def read(strings: Sequence[bytes], tail: bytes = b"", *, cut: int = 0) -> list[str]:
    """What a cursor makes of an array of `strings` followed by `tail`."""
    data = struct.pack("<IIQ", _ARRAY, _STRING, len(strings))
    data += b"".join(struct.pack("<Q", len(text)) + text for text in strings) + tail
    data = data[: len(data) - cut]
    buffer = mmap.mmap(-1, len(data))
    buffer[:] = data
    cursor = HeaderCursor(buffer, "x.gguf")
    value = cursor.read_value("tokens")
    assert isinstance(value, StringArray)
    assert cursor.position == len(data) - len(tail)
    return value.decode()


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "_WALK_WINDOW", 256)
    monkeypatch.setattr(gguf_header, "_WORTH_SEARCHING", 0)


PIECES = (
    *(b"a", b"token", "Ġthe".encode(), "\u4e2d\u6587".encode(), b"x" * 255, b"y" * 256),
    *(b"", b"\0", b"\0" * 7, b"z" * 300, b"q\0\0\0\0\0\0w", b"w" * 65_536, bytes([1])),
)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("num_kinds", [6, 10, len(PIECES)])
def test_search_and_walk_agree_whatever_the_strings_hold(num_kinds: int) -> None:
    """The first pieces are those that the search takes; the others look like prefixes to it."""
    choose = random.Random(num_kinds)
    for _ in range(150):
        strings = choose.choices(PIECES[:num_kinds], k=choose.randint(0, 40))
        tail = choose.choice([b"", bytes(9), struct.pack("<Q", 5) + b"after", b"\1" + bytes(20)])
        assert read(strings, tail) == [text.decode() for text in strings]


@pytest.mark.usefixtures("small_windows")
def test_array_cut_short_is_refused_wherever_the_cut_is() -> None:
    strings = [b"token"] * 9
    for cut in range(1, 9 * 13):
        with pytest.raises(ModelFileError, match="tokens"):
            read(strings, cut=cut)


def test_vocabularies_take_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walking takes ten times as long, in each of two processes at every start."""
    results = []
    find = gguf_header._find_short_strings

    def record(*arguments: object) -> object:
        results.append(find(*arguments))  # type: ignore[arg-type]
        return results[-1]

    monkeypatch.setattr(gguf_header, "_find_short_strings", record)
    strings = [f"Ġtoken{index}".encode() for index in range(40_000)] + [b" " * 400]
    assert read(strings, bytes(64))[-1] == " " * 400
    assert results[0] is not None
