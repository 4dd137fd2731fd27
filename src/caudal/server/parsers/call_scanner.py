"""One tool call in JSON, followed while it arrives so that its arguments can be passed on early."""

from __future__ import annotations

import json
from collections.abc import Callable, Set
from enum import IntEnum
from typing import Any

import msgspec

from caudal.server.parsers.json_scanner import JsonScanner

_NAME_KEYS = frozenset({"name", "function"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_USUAL_KEYS = _NAME_KEYS | _ARGUMENT_KEYS | {"type", "id"}


class CallState(IntEnum):
    """How far a call is."""

    HELD = 0
    """It may still turn out to be something else."""
    STARTED = 1
    """The name is certain and the arguments have begun."""
    CLOSED = 2
    """The arguments are whole; what follows does not matter."""
    COMPLETE = 3
    """The object has ended."""


class CallScanner:
    """Reads `{"name": …, "arguments": {…}}`, keys in any order, others ignored.

    With `name` given, the object itself is the arguments. `take` gives the text of the arguments
    that has become certain since the last call. A control character in a string, which JSON does
    not allow, comes out escaped.
    """

    __slots__ = (
        "_base",
        "_from",
        "_is_strict",
        "_key",
        "_known",
        "_look",
        "_new",
        "_scanner",
        "_text",
        "is_broken",
        "name",
        "state",
    )

    def __init__(self, known: Set[str], *, is_strict: bool, name: str | None = None) -> None:
        """`is_strict`: an object that begins with keys that no call has is none."""
        self._known = known
        self._is_strict = is_strict
        self._scanner = JsonScanner()
        self._text: list[str] = []
        self._from = -1  # index in `_text` of the key or string at hand
        self._key = ""
        self._new: list[str] = []
        self._base = 1  # depth inside the arguments
        self._look: Callable[[str, int], None] = self._top_level if name is None else self._inside
        self.name = name
        self.state = CallState.HELD
        self.is_broken = False

    def step(self, char: str) -> None:
        """Take one character. Nothing more may be given once COMPLETE or broken."""
        scanner = self._scanner
        depth = scanner.depth
        if char < " " and scanner.is_in_string:
            char = json.dumps(char)[1:-1]
        elif not scanner.step(char):
            self.is_broken = True
            return
        self._look(char, depth)
        if scanner.is_complete and not self.is_broken:
            self.state = CallState.COMPLETE

    def take(self) -> str:
        """Text of the arguments since the last call; only from STARTED on."""
        new, self._new = self._new, []
        return "".join(new)

    def _top_level(self, char: str, depth: int) -> None:
        scanner = self._scanner
        self._text.append(char)
        if scanner.is_complete:
            self._finish()
        elif depth != 1:
            return
        elif scanner.ended:
            text = json.loads("".join(self._text[self._from :]))
            self._from = -1
            self._key_or_name(scanner.ended == "key", text)
        elif scanner.is_in_string and self._from < 0:
            self._from = len(self._text) - 1
        elif scanner.depth == 2 and self.name is not None and self._key in _ARGUMENT_KEYS:
            self.is_broken = char != "{"
            self._base = 2
            self._new = ["{"]
            self._look = self._inside

    def _key_or_name(self, is_key: bool, text: str) -> None:
        if is_key:
            self._key = text
            is_odd = self._is_strict and self.name is None and text not in _USUAL_KEYS
            self.is_broken = is_odd
        elif self._key in _NAME_KEYS and self.name is None:
            self.name = text
            self.is_broken = text not in self._known

    def _inside(self, char: str, depth: int) -> None:
        self._new.append(char)
        if depth >= self._base and not char.isspace():
            self.state = CallState.STARTED
        if depth >= self._base > self._scanner.depth:
            self.state = CallState.CLOSED
            self._look = _ignore

    def _finish(self) -> None:
        """The object ended without arguments to pass on: missing, before the name, or a string."""
        arguments = self._whole_arguments() if self.name is not None else None
        if arguments is None:
            self.is_broken = True
        else:
            self._new = [arguments]

    def _whole_arguments(self) -> str | None:
        """As JSON of an object, None if they are something else."""
        try:
            call: dict[str, Any] = msgspec.json.decode("".join(self._text))
            value = next((call[key] for key in _ARGUMENT_KEYS if key in call), None)
            if isinstance(value, str):
                value = msgspec.json.decode(value) if value.strip() else None
            if value is None:
                return "{}"
            return msgspec.json.encode(value).decode() if isinstance(value, dict) else None
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None


def _ignore(char: str, depth: int) -> None:
    """What follows the arguments."""
