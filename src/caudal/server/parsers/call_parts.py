"""What parsers of tool calls have in common: the parts they make and the calls they count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Protocol

from caudal.server.parsers.parts import CallArguments, CallStart, Content, Part, merged


@dataclass(frozen=True, slots=True)
class CallRules:
    """Which calls count."""

    names: Set[str]
    """The functions that may be called; other names make no call."""
    create_id: Callable[[], str]
    max_calls: int | None = None
    parameters: Mapping[str, Mapping[str, Any]] | None = None
    """JSON schemas of the arguments by function, for formats that write values without quotes."""


class CallParser(Protocol):
    """Finds calls in an answer that arrives in pieces; the pieces do not matter."""

    @property
    def num_complete_calls(self) -> int:
        """Calls with arguments that parse."""

    @property
    def is_done(self) -> bool:
        """Whether there are as many calls as there may be."""

    def push(self, text: str) -> list[Part]:
        """The parts that `text` makes certain."""

    def finish(self) -> list[Part]:
        """What is held back, at the end of the answer."""


class CallParts:
    """Collects the parts of an answer, with at most one call open."""

    __slots__ = ("_parts", "_rules", "num_calls", "num_complete_calls")

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules
        self._parts: list[Part] = []
        self.num_calls = 0
        self.num_complete_calls = 0

    @property
    def is_done(self) -> bool:
        """Whether there are as many calls as there may be."""
        most = self._rules.max_calls
        return most is not None and self.num_complete_calls >= most

    def add(self, *parts: Part) -> None:
        """Add parts as they are."""
        self._parts.extend(parts)

    def content(self, text: str) -> None:
        """Add text of the answer."""
        self._parts.append(Content(text))

    def start(self, name: str) -> None:
        """Open a call."""
        self._parts.append(CallStart(self.num_calls, self._rules.create_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add text to the arguments of the open call."""
        self._parts.append(CallArguments(self.num_calls - 1, text))

    def complete(self) -> None:
        """Count the open call, whose arguments are whole."""
        self.num_complete_calls += 1

    def take(self) -> list[Part]:
        """The parts since the last time."""
        parts, self._parts = self._parts, []
        return merged(parts)


class CallReader:
    """A parser that collects what it finds in `CallParts`, with text that is not certain yet."""

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules
        self._out = CallParts(rules)
        self._held = ""

    @property
    def num_complete_calls(self) -> int:
        """Calls with arguments that parse."""
        return self._out.num_complete_calls

    @property
    def is_done(self) -> bool:
        """Whether there are as many calls as there may be."""
        return self._out.is_done
