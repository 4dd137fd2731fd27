"""Calls as a Python list: `[name(key=value, …), …]`, the way of some Llama models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from caudal.server.parsers.call_parts import CallReader, CallRules
from caudal.server.parsers.parts import Part
from caudal.server.parsers.python_strings import PythonString
from caudal.server.parsers.reasoning import held_from
from caudal.server.parsers.values import json_of_literal

OPENER, CLOSER = "<|python_start|>", "<|python_end|>"
_NAME_SO_FAR = re.compile(r"[\w.-]{0,128}\s{0,8}")
_NAME = re.compile(r"([\w.-]{1,128})\s{0,8}\(")
_KEY_SO_FAR = re.compile(r"\w{0,128}\s{0,8}=?")
_KEY = re.compile(r"([^\W\d]\w{0,127})\s{0,8}=(?=[^=])")
_MAX_DEPTH = 64


class PythonCallParser(CallReader):
    """A state machine over the text that is not certain yet.

    The list stands at the beginning of an answer or after the opener. A call is certain once its
    first argument has a name, or it has none. Strings are passed on as they arrive, other values
    when they are whole.
    """

    def __init__(self, rules: CallRules) -> None:
        super().__init__(rules)
        self._state: Callable[[str], str | None] = self._at_start
        self._raw = ""  # what becomes content if no call comes of it
        self._name = ""
        self._is_in_list = False
        self._keys: set[str] = set()
        self._is_repeated = False
        self._string: PythonString | None = None
        self._value = _ValueEnd()

    def push(self, text: str) -> list[Part]:
        """The parts that `text` makes certain. After the last allowed call text is ignored."""
        self._held += text
        while self._held and not self.is_done:
            rest = self._state(self._held)
            if rest is None:
                break
            self._held = rest
        return self._out.take()

    def finish(self) -> list[Part]:
        """What is held back, at the end of the answer."""
        held, self._held = self._held, ""
        if self.is_done:
            return []
        if self._state in (self._in_value, self._in_string, self._spoilt):
            if not self._is_repeated or self._state == self._spoilt:
                self._out.arguments(json.dumps(held, ensure_ascii=False)[1:-1])
        elif self._state == self._after_list:
            self._out.content("" if CLOSER.startswith(held.strip()) else held)
        elif self._state in (self._at_start, self._in_text, self._before_list):
            self._out.content(self._raw + held)
        elif self._state in (self._before_call, self._before_first):
            text = self._raw + held
            self._out.content(text if text.strip(" \t\r\n,") or not self._is_in_list else "")
        return self._out.take()

    def _at_start(self, text: str) -> str | None:
        start = text.lstrip()
        if not start or (start != OPENER and OPENER.startswith(start)):
            return None
        if not start.startswith("["):
            self._state = self._in_text
            return text
        self._raw = text[: len(text) - len(start)]
        self._state = self._before_list
        return start

    def _in_text(self, text: str) -> str | None:
        before, mark, rest = text.partition(OPENER)
        if mark:
            content = before.rstrip()
            self._out.content(content)
            self._raw = before[len(content) :] + mark
            self._state = self._before_list
            return rest
        certain = text[: held_from(text, (OPENER,))].rstrip()
        self._out.content(certain)
        self._held = text[len(certain) :]
        return None

    def _before_list(self, text: str) -> str | None:
        start = self._skip_space(text)
        if start.startswith("["):
            self._raw += "["
            self._is_in_list = False
            self._state = self._before_call
            return start[1:]
        self._held = ""
        return self._give_up(start) if start else None

    def _before_call(self, text: str) -> str | None:
        start = self._skip_space(text)
        match = _NAME.match(start)
        if match is None:
            if _NAME_SO_FAR.fullmatch(start):
                self._held = start
                return None
            if start.startswith("]") and self._is_in_list:  # after a last comma
                self._state = self._after_call
                return start
            return self._give_up(start)
        if match[1] not in self._rules.names:
            return self._give_up(start)
        self._name = match[1]
        self._raw += match[0]
        self._state = self._before_first
        return start[match.end() :]

    def _before_first(self, text: str) -> str | None:
        start = self._skip_space(text)
        if start.startswith(")") or _KEY.match(start):
            self._out.start(self._name)
            self._out.arguments("{")
            self._raw = ""
            self._keys = set()
            self._is_in_list = True
            self._state = self._between
            return start
        if _KEY_SO_FAR.fullmatch(start):
            self._held = start
            return None
        return self._give_up(start)

    def _between(self, text: str) -> str | None:
        """Before the name of an argument, or the end of the call."""
        start = text.lstrip()
        if start.startswith(")"):
            self._out.arguments("}")
            self._out.complete()
            self._state = self._after_call
            return start[1:]
        match = _KEY.match(start)
        if match is None:
            if _KEY_SO_FAR.fullmatch(start):
                return None
            self._state = self._spoilt
            return start
        self._is_repeated = match[1] in self._keys
        self._pass_on((", " if self._keys else "") + json.dumps(match[1]) + ": ")
        self._keys.add(match[1])
        self._state = self._before_value
        return start[match.end() :]

    def _before_value(self, text: str) -> str | None:
        start = text.lstrip()
        if not start:
            return None
        if start[0] not in "'\"":
            self._value = _ValueEnd()
            self._state = self._in_value
            return start
        if start in ('"', "'", '""', "''"):
            return None
        triple = start[:3]
        quote = triple if triple in ('"""', "'''") else start[0]
        self._string = PythonString(quote)
        self._pass_on('"')
        self._state = self._in_string
        return start[len(quote) :]

    def _in_string(self, text: str) -> str | None:
        assert self._string is not None
        certain, rest, is_over = self._string.push(text)
        self._pass_on(certain)
        if is_over:
            self._pass_on('"')
            self._state = self._after_value
            return rest
        self._held = rest
        return None

    def _in_value(self, text: str) -> str | None:
        end = self._value.find(text)
        if end is None:
            return None
        value = json_of_literal(text[:end].strip()) if end >= 0 else None
        if value is None:
            self._state = self._spoilt
            return text
        self._pass_on(value)
        self._state = self._after_value
        return text[end:]

    def _after_value(self, text: str) -> str | None:
        start = text.lstrip()
        if not start:
            return None
        self._state = self._between if start[0] in ",)" else self._spoilt
        return start.removeprefix(",")

    def _after_call(self, text: str) -> str | None:
        start = self._skip_space(text)
        if not start:
            self._held = ""
            return None
        if start[0] == ",":
            self._raw += ","
            self._state = self._before_call
            return start[1:]
        if start[0] == "]":
            self._raw = ""
            self._state = self._after_list
            return start[1:]
        self._is_in_list = False
        return self._give_up(start)

    def _after_list(self, text: str) -> str | None:
        start = text.lstrip()
        if not start or (start != CLOSER and CLOSER.startswith(start)):
            return None
        self._state = self._in_text
        return start[len(CLOSER) :] if start.startswith(CLOSER) else text

    def _spoilt(self, text: str) -> str | None:
        before, mark, rest = text.partition(CLOSER)
        if mark:
            self._out.arguments(before)
            self._state = self._in_text
            return rest
        certain = text[: held_from(text, (CLOSER,))]
        self._out.arguments(certain)
        self._held = text[len(certain) :]
        return None

    def _pass_on(self, text: str) -> None:
        if not self._is_repeated:
            self._out.arguments(text)

    def _give_up(self, text: str) -> str:
        """It is no call; `text` may still hold one after an opener."""
        self._out.content(self._raw + text[:1])
        self._raw = ""
        self._state = self._in_text
        return text[1:]

    def _skip_space(self, text: str) -> str:
        rest = text.lstrip()
        self._raw += text[: len(text) - len(rest)]
        return rest


class _ValueEnd:
    """Finds where a value that is no plain string ends: at a comma or bracket of the call."""

    def __init__(self) -> None:
        self._at = 0
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """Index of the end, None if it has not come yet, -1 for nonsense; `text` only grows."""
        while self._at < len(text):
            char = text[self._at]
            if self._quote:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in "'\"":
                self._quote = char
            elif char in "([{":
                self._depth += 1
                if self._depth > _MAX_DEPTH:
                    return -1
            elif self._depth == 0 and char in ",)":
                return self._at
            elif char in ")]}":
                self._depth -= 1
                if self._depth < 0:
                    return -1
            self._at += 1
        return None
