"""Server-sent events out of whatever pieces the network delivers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its type (empty for a plain message) and its data lines joined by line feeds."""

    kind: str
    data: bytes


class SSEDecoder:
    """Incremental decoder of one stream; pieces may end anywhere, also inside a character.

    Lines end with LF or CRLF (https://html.spec.whatwg.org/multipage/server-sent-events.html);
    a lone CR, which no server of this kind writes, is not a line end here.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._kind = ""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[Event]:
        """The events that `piece` completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return self._take(lines)

    def finish(self) -> list[Event]:
        """What is left at the end of the stream; some servers omit the last empty line."""
        lines, self._rest = [self._rest, b""], b""
        return self._take(lines)

    def _take(self, lines: list[bytes]) -> list[Event]:
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append(Event(self._kind, b"\n".join(self._data)))
                self._kind, self._data = "", []
                continue
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                self._data.append(value)
            elif name == b"event":
                self._kind = value.decode("utf-8", "replace")
        return events
