"""One parser for all that a chat model writes: reasoning first, then content and tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from caudal.server.parsers.call_parts import CallParser, CallRules
from caudal.server.parsers.harmony import HarmonyParser
from caudal.server.parsers.parts import Content, Part, Reasoning, merged
from caudal.server.parsers.python_calls import PythonCallParser
from caudal.server.parsers.reasoning import (
    HARMONY,
    ReasoningFormat,
    ReasoningSplitter,
    ReasoningState,
)
from caudal.server.parsers.repeats import RepeatFilter
from caudal.server.parsers.tool_calls import ToolCallParser
from caudal.server.parsers.tool_formats import ToolFormat
from caudal.server.parsers.xml_calls import XmlCallParser

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolRules:
    """Which calls an answer may hold, and how they are written."""

    format: ToolFormat
    names: frozenset[str]
    max_calls: int | None = None
    parameters: Mapping[str, Mapping[str, Any]] | None = None
    """JSON schemas of the arguments by function."""
    ends_at_repeat: bool = False
    """A call that repeats an earlier one is dropped, and ends the answer."""


@dataclass(frozen=True, slots=True)
class ReasoningRules:
    """How reasoning is written, and where the prompt leaves the answer."""

    format: ReasoningFormat
    state: ReasoningState
    is_shown: bool = True


@dataclass(frozen=True, slots=True)
class OutputRules:
    """What the parser of an answer looks for; at least one of the two."""

    reasoning: ReasoningRules | None = None
    tools: ToolRules | None = None


class OutputParser:
    """Turns the text of one choice into parts. The pieces in which text arrives do not matter."""

    __slots__ = (
        "_harmony",
        "_is_shown",
        "_num_tokens",
        "_repeats",
        "_splitter",
        "_tools",
        "num_reasoning_tokens",
    )

    def __init__(self, rules: OutputRules) -> None:
        reasoning, tools = rules.reasoning, rules.tools
        self._splitter: ReasoningSplitter | None = None
        self._harmony: HarmonyParser | None = None
        self._repeats = RepeatFilter() if tools is not None and tools.ends_at_repeat else None
        self._tools: CallParser | None = None
        self._is_shown = True
        if is_harmony(rules):
            self._tools = self._harmony = _create_harmony_parser(rules)
            tools = None
        elif reasoning is not None:
            self._splitter = ReasoningSplitter(reasoning.format, reasoning.state)
            self._is_shown = reasoning.is_shown
        if tools is not None:
            self._tools = _create_call_parser(tools)
        self._num_tokens = 0
        self.num_reasoning_tokens = 0
        """Tokens up to and including the one that ends the reasoning."""

    @property
    def has_calls(self) -> bool:
        """Whether there is a call with arguments that parse."""
        return self._tools is not None and self._tools.num_complete_calls > 0

    @property
    def is_done(self) -> bool:
        """Whether nothing that may follow counts."""
        if self._repeats is not None and self._repeats.is_done:
            return True
        return self._tools is not None and self._tools.is_done

    def push_token(self, text: str) -> list[Part]:
        """The parts that one more token, with its text, makes certain."""
        parts = self._parts_of(text)
        return parts if self._repeats is None else self._repeats.push(parts)

    def _parts_of(self, text: str) -> list[Part]:
        self._num_tokens += 1
        splitter = self._splitter
        if splitter is None:
            return self._content(text) if self._harmony is None else self._channels(text)
        was_open = splitter.state is not ReasoningState.CONTENT
        reasoning, content = splitter.push(text)
        if was_open and splitter.has_reasoned:
            self.num_reasoning_tokens = self._num_tokens
        return self._both(reasoning, content)

    def finish(self, text: str = "") -> list[Part]:
        """The last parts, `text` being what the end of the answer set free."""
        parts: list[Part] = []
        if self._splitter is not None:
            parts += self._both(*self._splitter.push(text))
            parts += self._both(*self._splitter.finish())
        else:
            parts += self._content(text)
        if self._tools is not None:
            parts += self._tools.finish()
        if self._repeats is not None:
            parts = [*self._repeats.push(parts), *self._repeats.finish()]
        return merged(parts)

    def _channels(self, text: str) -> list[Part]:
        assert self._harmony is not None
        was_reasoning = self._harmony.is_reasoning
        parts = self._harmony.push(text)
        if was_reasoning or self._harmony.is_reasoning:
            self.num_reasoning_tokens = self._num_tokens
        return parts

    def _both(self, reasoning: str, content: str) -> list[Part]:
        parts: list[Part] = []
        if reasoning and self._is_shown:
            parts.append(Reasoning(reasoning))
        return parts + self._content(content)

    def _content(self, text: str) -> list[Part]:
        if not text:
            return []
        return [Content(text)] if self._tools is None else self._tools.push(text)


def is_harmony(rules: OutputRules) -> bool:
    """Whether answers have channels, which one parser reads all."""
    is_syntax = rules.tools is not None and rules.tools.format.syntax == "harmony"
    return is_syntax or (rules.reasoning is not None and rules.reasoning.format is HARMONY)


def _create_harmony_parser(rules: OutputRules) -> HarmonyParser:
    tools, reasoning = rules.tools, rules.reasoning
    calls = CallRules(frozenset(), str) if tools is None else _call_rules(tools)
    if reasoning is None:
        return HarmonyParser(calls, ReasoningState.UNDECIDED)
    return HarmonyParser(calls, reasoning.state, is_reasoning_shown=reasoning.is_shown)


def _create_call_parser(tools: ToolRules) -> CallParser:
    rules = _call_rules(tools)
    if tools.format.syntax == "xml":
        return XmlCallParser(rules)
    if tools.format.syntax == "python":
        return PythonCallParser(rules)
    return ToolCallParser(tools.format, rules.names, rules.create_id, rules.max_calls)


def _call_rules(tools: ToolRules) -> CallRules:
    return CallRules(tools.names, id_factory(tools.format), tools.max_calls, tools.parameters)


def id_factory(format: ToolFormat) -> Callable[[], str]:
    """Makes ids of calls, random enough to be unique everywhere."""
    length = format.id_length
    if length is None:
        return lambda: f"call_{secrets.token_hex(12)}"
    return lambda: "".join(secrets.choice(_LETTERS) for _ in range(length))
