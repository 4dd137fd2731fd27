"""The parts of an answer, in the order in which the model writes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """The next piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the arguments of call `index`, as JSON text."""

    index: int
    text: str


Part = Reasoning | Content | CallStart | CallArguments


@dataclass(slots=True)
class ToolCall:
    """A whole call; `arguments` is JSON unless the answer was cut or the model wrote nonsense."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """All parts put together."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def decoded_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call as an object; None for those that were cut or are malformed."""
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def joined(parts: Iterable[Part]) -> Answer:
    """The answer that `parts` add up to."""
    answer = Answer()
    reasoning: list[str] = []
    content: list[str] = []
    arguments: list[list[str]] = []
    for part in parts:
        match part:
            case Reasoning(text):
                reasoning.append(text)
            case Content(text):
                content.append(text)
            case CallStart(_, call_id, name):
                answer.calls.append(ToolCall(call_id, name))
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
    answer.reasoning = "".join(reasoning)
    answer.content = "".join(content)
    for call, texts in zip(answer.calls, arguments, strict=True):
        call.arguments = "".join(texts)
    return answer


def merged(parts: Iterable[Part]) -> list[Part]:
    """The same parts with neighbours of one kind joined, and without empty ones."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        match last, part:
            case _, (Reasoning("") | Content("") | CallArguments(_, "")):
                pass
            case Reasoning(before), Reasoning(text):
                result[-1] = Reasoning(before + text)
            case Content(before), Content(text):
                result[-1] = Content(before + text)
            case CallArguments(index, before), CallArguments(same, text) if index == same:
                result[-1] = CallArguments(index, before + text)
            case _:
                result.append(part)
    return result
