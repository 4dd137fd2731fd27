"""Calls of `<function=NAME>` and `<parameter=KEY>` elements, the way of Qwen3-Coder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from caudal.server.parsers.call_parts import CallReader, CallRules
from caudal.server.parsers.parts import Part
from caudal.server.parsers.reasoning import held_from
from caudal.server.parsers.values import json_of_text
from caudal.structured_output.argument_rules import json_types

_OPENER, _CLOSER = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_STARTS = (_OPENER, _FUNCTION)
_VALUE_ENDS = (_PARAMETER_END, _FUNCTION_END, _CLOSER, f"\n{_PARAMETER}")
"""Models forget the first one; the others end a value, too."""
_NAME = re.compile(r"\s*([\w.-]{1,128})\s*")
_MAX_NAME = 200


class XmlCallParser(CallReader):
    """A state machine over the text that is not certain yet.

    A call is certain once its first parameter or its end has come; until then it may turn out to
    be content. Values of text parameters are passed on as they arrive, without the line breaks
    next to their marks; others when they are whole, as JSON of the type in the schema.
    """

    def __init__(self, rules: CallRules) -> None:
        super().__init__(rules)
        self._state: Callable[[str], str | None] = self._in_text
        self._raw = ""  # what becomes content if no call comes of it
        self._name = ""
        self._keys: set[str] = set()
        self._key = ""
        self._value = ""
        self._is_text = False
        self._is_repeated = False
        self._is_after_call = False

    def push(self, text: str) -> list[Part]:
        """The parts that `text` makes certain. After the last allowed call text is ignored."""
        self._held += text
        self._run()
        return self._out.take()

    def finish(self) -> list[Part]:
        """What is held back, at the end of the answer."""
        held, self._held = self._held, ""
        if self.is_done:
            return []
        if self._state in (self._before_function, self._in_name, self._before_first):
            self._out.content(self._raw + held)
        elif self._state == self._in_text:
            is_closer = self._is_after_call and _CLOSER.startswith(held.strip())
            self._out.content("" if is_closer else held)
        elif self._state == self._in_value and not self._is_repeated:
            text = _escaped(held)
            self._out.arguments(text if self._is_text else f'"{text}"')
        elif self._state == self._spoilt:
            self._out.arguments(held)
        return self._out.take()

    def _run(self) -> None:
        while self._held and not self.is_done:
            rest = self._state(self._held)
            if rest is None:
                return
            self._held = rest

    def _in_text(self, text: str) -> str | None:
        if self._is_after_call:
            start = text.lstrip()
            if not start or (start != _CLOSER and _CLOSER.startswith(start)):
                return None
            if start.startswith(_CLOSER):
                return start[len(_CLOSER) :]
            if not any(start.startswith(mark) or mark.startswith(start) for mark in _STARTS):
                self._is_after_call = False
        found = [(at, mark) for mark in _STARTS if (at := text.find(mark)) >= 0]
        if found:
            at, _ = min(found)
            before = text[:at].rstrip()
            self._out.content(before)
            self._raw = text[len(before) : at]
            self._state = self._before_function
            return text[at:]
        certain = text[: held_from(text, _STARTS)].rstrip()
        self._out.content(certain)
        self._held = text[len(certain) :]
        return None

    def _before_function(self, text: str) -> str | None:
        start = text.lstrip()
        for mark in _STARTS:
            if start.startswith(mark):
                if mark == _OPENER and _OPENER in self._raw:
                    break
                length = len(text) - len(start) + len(mark)
                self._raw += text[:length]
                if mark == _FUNCTION:
                    self._state = self._in_name
                return text[length:]
        if any(mark.startswith(start) for mark in _STARTS):
            return None
        return self._give_up(text)

    def _in_name(self, text: str) -> str | None:
        name, end, rest = text.partition(">")
        match = _NAME.fullmatch(name)
        if not end and len(name) <= _MAX_NAME and "<" not in name:
            return None
        is_name = end and match is not None and len(name) <= _MAX_NAME
        if not is_name or match is None or match[1] not in self._rules.names:
            return self._give_up(text)
        self._name = match[1]
        self._raw += name + end
        self._state = self._before_first
        return rest

    def _before_first(self, text: str) -> str | None:
        start = text.lstrip()
        if start.startswith((_PARAMETER, _FUNCTION_END)):
            self._out.start(self._name)
            self._out.arguments("{")
            self._is_after_call = False
            self._keys = set()
            self._raw = ""
            self._state = self._between
            return start
        if _PARAMETER.startswith(start) or _FUNCTION_END.startswith(start):
            return None
        return self._give_up(text)

    def _between(self, text: str) -> str | None:
        start = text.lstrip()
        if start.startswith(_PARAMETER):
            key, end, rest = start[len(_PARAMETER) :].partition(">")
            if not end and len(key) <= _MAX_NAME:
                return None
            if end and len(key) <= _MAX_NAME and key.strip():
                self._begin_value(key.strip())
                return rest
        elif start.startswith((_FUNCTION_END, _CLOSER)):
            self._out.arguments("}")
            self._out.complete()
            self._state = self._in_text
            self._is_after_call = True
            return start.removeprefix(_FUNCTION_END)
        elif any(m.startswith(start) for m in (_PARAMETER, _FUNCTION_END, _CLOSER)):
            return None
        self._state = self._spoilt
        return start

    def _begin_value(self, key: str) -> None:
        types = self._types(key)
        self._key = key
        self._is_text = types == {"string"}
        self._is_repeated = key in self._keys
        self._value = ""
        if not self._is_repeated:
            self._out.arguments((", " if self._keys else "") + json.dumps(key) + ": ")
            if self._is_text:
                self._out.arguments('"')
        self._keys.add(key)
        self._state = self._at_value

    def _at_value(self, text: str) -> str | None:
        # A line break after the opening mark is layout.
        if text == "\r":
            return None
        self._state = self._in_value
        return text.removeprefix("\r").removeprefix("\n") if text[:2] != "\r\n" else text[2:]

    def _in_value(self, text: str) -> str | None:
        found = [(at, mark) for mark in _VALUE_ENDS if (at := text.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._pass_on(text[:at].removesuffix("\n").removesuffix("\r"))
            self._end_value()
            self._state = self._between
            return text[at + len(mark) :] if mark == _PARAMETER_END else text[at:]
        if not self._is_text:
            return None
        certain = text[: held_from(text, _VALUE_ENDS)]
        certain = certain.removesuffix("\n").removesuffix("\r")
        self._pass_on(certain)
        self._held = text[len(certain) :]
        return None

    def _pass_on(self, text: str) -> None:
        if self._is_repeated:
            return
        if self._is_text:
            self._out.arguments(_escaped(text))
        else:
            self._value += text

    def _end_value(self) -> None:
        if self._is_repeated:
            return
        types = self._types(self._key)
        self._out.arguments('"' if self._is_text else json_of_text(self._value, types))

    def _spoilt(self, text: str) -> str | None:
        marks = (_CLOSER, *_STARTS)
        found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
        if found:
            at, _ = min(found)
            self._out.arguments(text[:at])
            self._state = self._in_text
            self._is_after_call = True
            return text[at:]
        certain = text[: held_from(text, marks)]
        self._out.arguments(certain)
        self._held = text[len(certain) :]
        return None

    def _give_up(self, text: str) -> str:
        """It is no call; `text` may still hold one."""
        self._out.content(self._raw + text[:1])
        self._raw = ""
        self._is_after_call = False
        self._state = self._in_text
        return text[1:]

    def _types(self, key: str) -> frozenset[str]:
        schema: Mapping[str, Any] = (self._rules.parameters or {}).get(self._name, {})
        properties = schema.get("properties")
        return json_types(properties.get(key) if isinstance(properties, dict) else None)


def _escaped(text: str) -> str:
    """`text` as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
