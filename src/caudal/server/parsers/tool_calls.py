"""Finds tool calls in an answer while it arrives; whatever is none stays text."""

from __future__ import annotations

import re
from collections.abc import Callable, Set

from caudal.server.parsers.call_scanner import CallScanner, CallState
from caudal.server.parsers.parts import CallArguments, CallStart, Content, Part, merged
from caudal.server.parsers.reasoning import held_from
from caudal.server.parsers.tool_formats import ToolFormat

_BRACES = ("{", "[")
_STRUCTURE = " \t\r\n,;[]"
"""What stands between and after calls and means nothing by itself."""
_NAME_SO_FAR = re.compile(r"[\w.-]{0,128}\s*(?:\[[A-Z_]{0,9}(?:\]\w{0,64})?){0,2}\s*")
_NAME = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*")


class ToolCallParser:
    """A state machine over pieces of an answer.

    Nothing is lost and nothing comes twice: a character is content, or belongs to a call, or is a
    mark or white space around one. Text is held back only while it may belong to a mark, or to a
    call whose name is not certain. What turns malformed once its arguments have begun stays with
    the call, up to the call's closer.
    """

    def __init__(
        self,
        format: ToolFormat,
        names: Set[str],
        create_id: Callable[[], str],
        max_calls: int | None = None,
    ) -> None:
        """`names` are the functions that may be called; other names make no call."""
        self._format = format
        self._names = names
        self._create_id = create_id
        self._max_calls = max_calls
        self._state: Callable[[str], str] = self._in_text
        self._held = ""
        self._raw: list[str] = []  # what becomes content if no call comes of it
        self._parts: list[Part] = []
        self._call: CallScanner | None = None
        self._is_at_start = True
        self._is_bare = False
        self._is_in_array = False
        self._is_after_call = False
        self.num_calls = 0
        self.num_complete_calls = 0
        """Calls with arguments that parse."""

    @property
    def is_done(self) -> bool:
        """Whether there are as many calls as there may be."""
        return self._max_calls is not None and self.num_complete_calls >= self._max_calls

    def push(self, text: str) -> list[Part]:
        """The parts that `text` makes certain. After the last allowed call text is ignored."""
        text, self._held = self._held + text, ""
        while text and not self.is_done:
            text = self._state(text)
        return self._take()

    def finish(self) -> list[Part]:
        """What is held back, at the end of the answer."""
        held, self._held = self._held, ""
        if self.is_done:
            return []
        if self._state == self._in_spoilt_call:
            self._parts.append(CallArguments(self.num_calls - 1, held))
        elif self._state != self._in_call or self._current.state is CallState.HELD:
            rest = "".join(self._raw)
            is_cut_closer = self._state == self._after_call
            if self._is_after_call and not rest.strip(_STRUCTURE):
                rest = ""
            if self._is_after_call and (is_cut_closer or not held.strip()):
                held = ""
            self._parts.append(Content(rest + held))
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return merged(parts)

    @property
    def _current(self) -> CallScanner:
        assert self._call is not None
        return self._call

    def _in_text(self, text: str) -> str:
        if self._is_at_start and self._format.is_bare:
            start = text.lstrip()
            if not start:
                self._held = text
                return ""
            if start.startswith(_BRACES):
                return self._begin(text[: len(text) - len(start)], start, is_bare=True)
        openers = self._format.openers
        found = [(at, mark) for mark in openers if (at := text.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            before = text[:at].rstrip()
            self._content(before)
            return self._begin(text[len(before) : at + len(mark)], text[at + len(mark) :])
        certain = text[: held_from(text, openers)]
        if openers:
            certain = certain.rstrip()
        self._content(certain)
        self._held = text[len(certain) :]
        return ""

    def _content(self, text: str) -> None:
        if text:
            self._parts.append(Content(text))
            self._is_at_start = self._is_after_call = False

    def _begin(self, raw: str, rest: str, *, is_bare: bool = False) -> str:
        self._is_at_start = False
        self._is_bare = is_bare
        self._is_in_array = False
        self._raw = [raw]
        self._state = self._before_first_call
        return rest

    def _before_first_call(self, text: str) -> str:
        text = self._skip_space(text)
        if text.startswith("[") and not self._is_in_array:
            self._is_in_array = True
            self._raw.append("[")
            return text[1:]
        if text and self._format.has_name_before and not text.startswith("{"):
            self._state = self._in_name
            return text
        return self._before_call(text)

    def _before_call(self, text: str) -> str:
        text = self._skip_space(text)
        if not text:
            return ""
        if not text.startswith("{"):
            return self._give_up(text)
        return self._open_call(text)

    def _open_call(self, text: str, name: str | None = None) -> str:
        self._call = CallScanner(self._names, is_strict=self._is_bare, name=name)
        self._state = self._in_call
        return text

    def _in_name(self, text: str) -> str:
        name, brace, _ = text.partition("{")
        if not brace and _NAME_SO_FAR.fullmatch(text):
            self._held = text
            return ""
        match = _NAME.fullmatch(name)
        if not brace or match is None or match[1] not in self._names:
            return self._give_up(text)
        self._raw.append(name)
        return self._open_call(text[len(name) :], match[1])

    def _in_call(self, text: str) -> str:
        call = self._current
        for index, char in enumerate(text):
            before = call.state
            call.step(char)
            if call.is_broken:
                self._pass_on(call)
                return self._break_off(call, text[index:])
            if call.state is not before:
                self._advance(call, before)
                if call.state is CallState.COMPLETE or self.is_done:
                    self._pass_on(call)
                    self._state = self._after_call
                    return text[index + 1 :]
                continue
            if call.state is not CallState.STARTED:
                self._raw.append(char)
        self._pass_on(call)
        return ""

    def _advance(self, call: CallScanner, before: CallState) -> None:
        if before is CallState.HELD:
            assert call.name is not None
            self._parts.append(CallStart(self.num_calls, self._create_id(), call.name))
            self.num_calls += 1
        if before < CallState.CLOSED <= call.state:
            self.num_complete_calls += 1
            self._is_after_call = True
        self._raw = []

    def _pass_on(self, call: CallScanner) -> None:
        if call.state is not CallState.HELD:
            self._parts.append(CallArguments(self.num_calls - 1, call.take()))

    def _break_off(self, call: CallScanner, rest: str) -> str:
        if call.state is CallState.STARTED:
            self._state = self._in_spoilt_call
            return rest
        return self._give_up(rest)

    def _give_up(self, rest: str) -> str:
        """It is no call; `rest` may still hold one."""
        self._content("".join(self._raw) + rest[:1])
        self._raw = []
        self._is_at_start = False
        self._state = self._in_text
        return rest[1:]

    def _in_spoilt_call(self, text: str) -> str:
        marks = (*self._format.openers, *filter(None, (self._format.closer,)))
        index = self.num_calls - 1
        found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
        if not found:
            certain = text[: held_from(text, marks)]
            self._parts.append(CallArguments(index, certain))
            self._held = text[len(certain) :]
            return ""
        at, mark = min(found)
        self._parts.append(CallArguments(index, text[:at]))
        self._state = self._in_text
        self._is_after_call = True
        return text[at + len(mark) :] if mark == self._format.closer else text[at:]

    def _after_call(self, text: str) -> str:
        text = self._skip_space(text)
        closer = self._format.closer
        if not text or (closer and text != closer and closer.startswith(text)):
            self._held = text
            return ""
        if closer and text.startswith(closer):
            self._raw = []
            self._state = self._in_text
            return text[len(closer) :]
        if text[0] == "]" and self._is_in_array:
            self._is_in_array = False
        elif text[0] in ",;" and (self._is_in_array or self._is_bare):
            self._state = self._before_call
        elif text[0] == "{" and not self._format.has_name_before:
            return self._open_call(text)
        else:
            text = "".join(self._raw) + text
            self._raw = []
            self._state = self._in_text
            return text
        self._raw.append(text[0])
        return text[1:]

    def _skip_space(self, text: str) -> str:
        rest = text.lstrip()
        self._raw.append(text[: len(text) - len(rest)])
        return rest
