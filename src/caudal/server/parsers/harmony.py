"""Answers in channels, as OpenAI's open models write them: analysis, commentary, final."""

from __future__ import annotations

import re

from caudal.server.parsers.call_parts import CallReader, CallRules
from caudal.server.parsers.call_scanner import CallScanner, CallState
from caudal.server.parsers.parts import Part, Reasoning
from caudal.server.parsers.reasoning import ReasoningState, held_from

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, *_ENDS)
_ROLE = "assistant"
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]{1,128})")
_HEADER = re.compile(r"(?:assistant)?\s*(?:to?|to=[\w.-]*)")
_MAX_HEADER = 512


class HarmonyParser(CallReader):
    """Reads messages: a header up to `<|message|>`, then a body up to a mark that ends it.

    Analysis is reasoning. A body addressed to a function is a call if it is a JSON object, else
    content, as is everything without a header. Headers and marks are never shown.
    """

    def __init__(
        self, rules: CallRules, state: ReasoningState, *, is_reasoning_shown: bool = True
    ) -> None:
        """`state` is where the prompt leaves the answer: UNDECIDED is before a header."""
        super().__init__(rules)
        self._is_reasoning_shown = is_reasoning_shown
        self._header: str | None = None  # None: inside a body
        if state is ReasoningState.UNDECIDED:
            self._header = ""
        self._is_first = True
        self._call: CallScanner | None = None
        self._is_spoilt = self._is_counted = self._is_object = False
        self._raw: list[str] = []  # what becomes content if no call comes of it
        self.is_reasoning = state is ReasoningState.REASONING
        """Whether the text at hand is reasoning."""

    def push(self, text: str) -> list[Part]:
        """The parts that `text` makes certain. After the last allowed call text is ignored."""
        text, self._held = self._held + text, ""
        while text and not self.is_done:
            found = [(at, mark) for mark in MARKS if (at := text.find(mark)) >= 0]
            if not found:
                certain = text[: held_from(text, MARKS)]
                self._held = text[len(certain) :]
                self._take_text(certain)
                break
            at, mark = min(found)
            self._take_text(text[:at])
            self._take_mark(mark)
            text = text[at + len(mark) :]
        return self._out.take()

    def finish(self) -> list[Part]:
        """What is held back, at the end of the answer."""
        held, self._held = self._held, ""
        if not self.is_done:
            if held and self._header is None:
                self._take_text(held)
            elif self._is_first and self._header is not None and not _has_mark(self._header):
                self._out.content(self._header + held)
            self._end_body()
        return self._out.take()

    def _take_text(self, text: str) -> None:
        if not text:
            return
        if self._header is None:
            self._body(text)
            return
        self._header += text
        start = self._header.strip()
        is_header = _has_mark(start) or _ROLE.startswith(start) or _HEADER.fullmatch(start)
        if not is_header or len(self._header) > _MAX_HEADER:
            # No header, so it is an answer without channels.
            text, self._header = self._header, None
            self.is_reasoning = False
            self._is_first = False
            self._body(text)

    def _take_mark(self, mark: str) -> None:
        if mark == MESSAGE:
            if self._header is not None:
                self._begin_body(self._header)
        elif mark in _ENDS:
            self._end_body()
            self._header = ""
        elif mark == CONSTRAIN and self._header is not None:
            self._header += " " + mark
        elif mark == CONSTRAIN:
            self._body(mark)
        else:
            if self._header is None:
                self._end_body()
                self._header = ""
            self._header += mark

    def _begin_body(self, header: str) -> None:
        self._header = None
        self._is_first = False
        recipient = _RECIPIENT.search(header)
        self.is_reasoning = recipient is None and f"{CHANNEL}analysis" in header
        if recipient is not None and recipient[1] in self._rules.names:
            self._call = CallScanner(self._rules.names, is_strict=False, name=recipient[1])
            self._is_spoilt = self._is_counted = self._is_object = False
            self._raw = []

    def _body(self, text: str) -> None:
        if self._call is not None:
            self._call_text(self._call, text)
        elif not self.is_reasoning:
            self._out.content(text)
        elif self._is_reasoning_shown:
            self._out.add(Reasoning(text))

    def _call_text(self, call: CallScanner, text: str) -> None:
        if self._is_spoilt:
            self._out.arguments(text)
            return
        for index, char in enumerate(text):
            before = call.state
            if before >= CallState.CLOSED:
                break
            self._is_object = self._is_object or char == "{"
            if self._is_object:
                call.step(char)
            if call.is_broken or not (self._is_object or char.isspace()):
                self._break_off(call, text[index:])
                return
            if before is CallState.HELD and call.state is not CallState.HELD:
                assert call.name is not None
                self._out.start(call.name)
            if call.state is CallState.HELD:
                self._raw.append(char)
        if call.state is not CallState.HELD:
            self._out.arguments(call.take())
        if call.state >= CallState.CLOSED and not self._is_counted:
            self._is_counted = True
            self._out.complete()

    def _break_off(self, call: CallScanner, rest: str) -> None:
        if call.state is CallState.HELD:
            self._out.content("".join(self._raw) + rest)
            self._call = None
        else:
            self._out.arguments(call.take() + rest)
            self._is_spoilt = True

    def _end_body(self) -> None:
        if self._call is not None and self._call.state is CallState.HELD:
            self._out.content("".join(self._raw))
        self._call = None
        self.is_reasoning = False


def _has_mark(header: str) -> bool:
    return START in header or CHANNEL in header
