"""Streams arrive in whatever pieces the network makes of them."""

from __future__ import annotations

import pytest

from caudal.bench.sse import Event, SSEDecoder

STREAM = (
    ": ping\n\n"
    'data: {"text": "é😀"}\n\n'
    "event: error\ndata: first\ndata:second\n\n"
    "id: 7\nretry: 10\n\n"
    "data: [DONE]\n\n"
).encode()
EVENTS = [
    Event("", '{"text": "é😀"}'.encode()),
    Event("error", b"first\nsecond"),
    Event("", b"[DONE]"),
]


def decode(*pieces: bytes) -> list[Event]:
    decoder = SSEDecoder()
    events = [event for piece in pieces for event in decoder.feed(piece)]
    return events + decoder.finish()


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_a_split_at_any_byte_changes_nothing(line_end: bytes) -> None:
    stream = STREAM.replace(b"\n", line_end)
    for cut in range(len(stream) + 1):
        assert decode(stream[:cut], stream[cut:]) == EVENTS


def test_single_bytes_change_nothing() -> None:
    assert decode(*(bytes([byte]) for byte in STREAM)) == EVENTS


def test_many_events_in_one_piece_are_all_taken() -> None:
    assert len(decode(b"data: x\n\n" * 500)) == 500


def test_an_event_without_the_last_empty_line_is_not_lost() -> None:
    assert decode(b"data: a\n\ndata: b") == [Event("", b"a"), Event("", b"b")]
    assert decode(b"data: a\n") == [Event("", b"a")]


def test_events_without_data_are_none() -> None:
    assert decode(b"event: x\n\n\n\n: only a comment\n\n") == []
