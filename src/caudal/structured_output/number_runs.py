"""How long the number at the end of growing JSON text is, so that none goes on for ever."""

from __future__ import annotations

_QUOTE, _BACKSLASH = 0x22, 0x5C
_OPEN, _CLOSE = b"[{", b"]}"


class NumberRuns:
    """Counts the digits at the end of the text, outside of JSON strings.

    With a `trigger` only passages count that begin with it and end with their brackets.
    """

    __slots__ = ("_depth", "_is_active", "_is_escaped", "_is_string", "_tail", "_trigger", "digits")

    def __init__(self, trigger: bytes | None = None) -> None:
        self._trigger = trigger
        self._tail = b""
        self._is_active = trigger is None
        self._is_string = self._is_escaped = False
        self._depth = 0
        self.digits = 0
        """In a row, at the end of the text."""

    def push(self, raw: bytes) -> None:
        """Append the bytes of a token."""
        if raw and self._is_string and b'"' not in raw and b"\\" not in raw:
            self._is_escaped = False
            return  # as it is for most tokens of a string; `digits` is 0 there
        for value in raw:
            if not self._is_active:
                self._look(value)
                continue
            self._follow(value)
            if self._depth <= 0 and value in _CLOSE and self._trigger and not self._is_string:
                self._start(False)

    def _start(self, is_active: bool) -> None:
        self._is_active = is_active
        self._is_string = self._is_escaped = False
        self._depth = 0
        self.digits = 0

    def _look(self, value: int) -> None:
        assert self._trigger is not None
        self._tail = (self._tail + bytes([value]))[-len(self._trigger) :]
        if self._tail == self._trigger:
            self._tail = b""
            self._start(True)
            for earlier in self._trigger:
                self._follow(earlier)
            self._depth = max(0, self._depth)

    def _follow(self, value: int) -> None:
        if self._is_string:
            self.digits = 0
            if self._is_escaped:
                self._is_escaped = False
            elif value == _BACKSLASH:
                self._is_escaped = True
            elif value == _QUOTE:
                self._is_string = False
            return
        if 0x30 <= value <= 0x39:
            self.digits += 1
            return
        self.digits = 0
        if value == _QUOTE:
            self._is_string = True
        elif value in _OPEN:
            self._depth += 1
        elif value in _CLOSE:
            self._depth -= 1
