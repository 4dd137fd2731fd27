"""A Python string literal that arrives in pieces, rewritten as the inside of a JSON string."""

from __future__ import annotations

import json
import re

_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL
)
_NUM_HEX = {"x": 2, "u": 4, "U": 8}
_SIMPLE = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
    "/": "/",
}
_HEX = frozenset("0123456789abcdefABCDEF")
_OCTAL = frozenset("01234567")


class PythonString:
    """Follows a literal that has begun with `quote`; line breaks in it count as text."""

    def __init__(self, quote: str) -> None:
        self._quote = quote

    def push(self, text: str) -> tuple[str, str, bool]:
        """(certain, rest, is over): JSON text, what was not used, whether the quote has come.

        `rest` comes first in the next piece.
        """
        certain: list[str] = []
        at = 0
        while at < len(text):
            if text.startswith(self._quote, at):
                return "".join(certain), text[at + len(self._quote) :], True
            if self._quote.startswith(text[at:]):
                break
            if text[at] != "\\":
                certain.append(_inside(text[at]))
                at += 1
                continue
            if _is_cut(text[at + 1 : at + 10]):
                break
            match = _ESCAPE.match(text, at)
            assert match is not None
            certain.append(_unescaped(match))
            at = match.end()
        return "".join(certain), text[at:], False


def _is_cut(text: str) -> bool:
    """Whether what follows a backslash may go on."""
    if not text:
        return True
    if text[0] in _OCTAL:
        return len(text) < 3 and all(char in _OCTAL for char in text)
    length = _NUM_HEX.get(text[0], 0)
    return len(text) <= length and all(char in _HEX for char in text[1:])


def _unescaped(match: re.Match[str]) -> str:
    code = next((group for group in match.groups()[:3] if group is not None), None)
    if match[4] is not None:
        return _inside(chr(int(match[4], 8)))
    if code is None:
        char = match[5]
        return _inside(_SIMPLE.get(char, "\\" + char))
    number = int(code, 16)
    if number > 0x10FFFF:
        return _inside(match[0])
    # Halves of a pair stay escapes, so that two of them make one character.
    return f"\\u{number:04x}" if 0xD800 <= number < 0xE000 else _inside(chr(number))


def _inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
