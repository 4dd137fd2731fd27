"""Follows one JSON value character by character, without building it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

MAX_DEPTH = 64
"""Deeper values count as malformed: readers of the arguments would fail on them."""

_WORD = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null", re.ASCII)
_WORD_CHARACTERS = frozenset("+-.0123456789Eaeflnrstu")
_SPACE = frozenset(" \t\n\r")
_HEX = frozenset("0123456789abcdefABCDEF")
_MAX_WORD = 512

Ended = Literal["", "key", "string"]


class JsonScanner:
    """A pushdown automaton for RFC 8259, except that strings may hold control characters.

    `step` takes one character and tells whether it can belong to the value. Words (numbers, true,
    …) at the top level never end by themselves, so the value should be an object or an array.
    """

    __slots__ = ("_num_hex", "_stack", "_step", "_word", "ended", "is_complete")

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._word = ""
        self._num_hex = 0
        self._step: Callable[[str], bool] = self._value
        self.ended: Ended = ""
        """The string that the last character completed: a key, or a value."""
        self.is_complete = False

    @property
    def depth(self) -> int:
        """Objects and arrays that are open."""
        return len(self._stack)

    @property
    def is_in_string(self) -> bool:
        """Whether the next character belongs to a string."""
        return self._step in (self._key_text, self._string_text)

    def step(self, char: str) -> bool:
        """Take one character. False: the value is malformed, and nothing more may be given."""
        self.ended = ""
        return self._step(char)

    def _value(self, char: str) -> bool:
        if char in _SPACE:
            return True
        if char in "{[":
            self._stack.append(char)
            self._step = self._first_key if char == "{" else self._first_item
            return len(self._stack) <= MAX_DEPTH
        if char == '"':
            self._step = self._string_text
            return True
        self._word = char
        self._step = self._word_text
        return char in _WORD_CHARACTERS

    def _first_item(self, char: str) -> bool:
        return self._close(char) if char == "]" else self._stay(char) or self._value(char)

    def _first_key(self, char: str) -> bool:
        return self._close(char) if char == "}" else self._key(char)

    def _key(self, char: str) -> bool:
        if char == '"':
            self._step = self._key_text
            return True
        return char in _SPACE

    def _colon(self, char: str) -> bool:
        if char == ":":
            self._step = self._value
            return True
        return char in _SPACE

    def _after_value(self, char: str) -> bool:
        if char == ",":
            self._step = self._key if self._stack[-1] == "{" else self._value
            return True
        return self._close(char) if char in "}]" else char in _SPACE

    def _stay(self, char: str) -> bool:
        return char in _SPACE

    def _close(self, char: str) -> bool:
        opener = self._stack.pop()
        self._end_value()
        return (opener == "{") == (char == "}")

    def _end_value(self) -> None:
        self.is_complete = not self._stack
        self._step = self._nothing if self.is_complete else self._after_value

    def _nothing(self, char: str) -> bool:
        return False

    def _word_text(self, char: str) -> bool:
        if char in _WORD_CHARACTERS:
            self._word += char
            return len(self._word) <= _MAX_WORD
        if not self._stack or _WORD.fullmatch(self._word) is None:
            return False
        self._end_value()
        return self._after_value(char)

    def _key_text(self, char: str) -> bool:
        if char == '"':
            self.ended = "key"
            self._step = self._colon
        elif char == "\\":
            self._step = self._key_escape
        return True

    def _string_text(self, char: str) -> bool:
        if char == '"':
            self.ended = "string"
            self._end_value()
        elif char == "\\":
            self._step = self._string_escape
        return True

    def _key_escape(self, char: str) -> bool:
        return self._escape(char, self._key_text, self._key_hex)

    def _string_escape(self, char: str) -> bool:
        return self._escape(char, self._string_text, self._string_hex)

    def _escape(self, char: str, back: Callable[[str], bool], hexa: Callable[[str], bool]) -> bool:
        self._num_hex = 0
        self._step = hexa if char == "u" else back
        return char in '"\\/bfnrtu'

    def _key_hex(self, char: str) -> bool:
        return self._hex(char, self._key_text)

    def _string_hex(self, char: str) -> bool:
        return self._hex(char, self._string_text)

    def _hex(self, char: str, back: Callable[[str], bool]) -> bool:
        self._num_hex += 1
        if self._num_hex == 4:
            self._step = back
        return char in _HEX
