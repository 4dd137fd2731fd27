"""One parser for all that a chat model writes: reasoning first, then content and tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

from caudal.server.parsers.parts import Content, Part, Reasoning, merged
from caudal.server.parsers.reasoning import ReasoningFormat, ReasoningSplitter, ReasoningState
from caudal.server.parsers.tool_calls import ToolCallParser
from caudal.server.parsers.tool_formats import ToolFormat

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolRules:
    """Which calls an answer may hold, and how they are written."""

    format: ToolFormat
    names: frozenset[str]
    max_calls: int | None = None


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

    __slots__ = ("_is_shown", "_num_tokens", "_splitter", "_tools", "num_reasoning_tokens")

    def __init__(self, rules: OutputRules) -> None:
        reasoning, tools = rules.reasoning, rules.tools
        self._splitter: ReasoningSplitter | None = None
        self._tools: ToolCallParser | None = None
        self._is_shown = True
        if reasoning is not None:
            self._splitter = ReasoningSplitter(reasoning.format, reasoning.state)
            self._is_shown = reasoning.is_shown
        if tools is not None:
            create_id = id_factory(tools.format)
            self._tools = ToolCallParser(tools.format, tools.names, create_id, tools.max_calls)
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
        return self._tools is not None and self._tools.is_done

    def push_token(self, text: str) -> list[Part]:
        """The parts that one more token, with its text, makes certain."""
        self._num_tokens += 1
        splitter = self._splitter
        if splitter is None:
            return self._content(text)
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
        return merged(parts)

    def _both(self, reasoning: str, content: str) -> list[Part]:
        parts: list[Part] = []
        if reasoning and self._is_shown:
            parts.append(Reasoning(reasoning))
        return parts + self._content(content)

    def _content(self, text: str) -> list[Part]:
        if not text:
            return []
        return [Content(text)] if self._tools is None else self._tools.push(text)


def id_factory(format: ToolFormat) -> Callable[[], str]:
    """Makes ids of calls, random enough to be unique everywhere."""
    length = format.id_length
    if length is None:
        return lambda: f"call_{secrets.token_hex(12)}"
    return lambda: "".join(secrets.choice(_LETTERS) for _ in range(length))
