"""Takes the reasoning off the front of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple


class ReasoningFormat(NamedTuple):
    """The marks around reasoning."""

    start: str
    end: str


THINK = ReasoningFormat("<think>", "</think>")
MISTRAL_THINK = ReasoningFormat("[THINK]", "[/THINK]")
SEED_THINK = ReasoningFormat("<seed:think>", "</seed:think>")
HARMONY = ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>")
"""One of several channels; `HarmonyParser` reads them all."""
THOUGHT = ReasoningFormat("<thought>", "</thought>")

REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        **dict.fromkeys(("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "olmo3", "step3"), THINK),
        "mistral": MISTRAL_THINK,
        "seed_oss": SEED_THINK,
        "thought": THOUGHT,
        "openai_gptoss": HARMONY,
    }
)
"""By the names of the command line."""


def detect_reasoning_format(template: str | None) -> ReasoningFormat | None:
    """The marks that a chat template's source mentions, None for a model that does not reason."""
    source = template or ""
    if "<|channel|>" in source and "<|message|>" in source:
        return HARMONY
    formats = (SEED_THINK, THINK, MISTRAL_THINK, THOUGHT)
    return next((f for f in formats if f.start in source or f.end in source), None)


class ReasoningState(Enum):
    """Where an answer is."""

    UNDECIDED = auto()
    """Nothing but white space yet: reasoning may begin."""
    REASONING = auto()
    CONTENT = auto()
    """For good: marks in the answer itself are text."""


def state_after(text: str, format: ReasoningFormat, *, is_continued: bool) -> ReasoningState:
    """Where an answer is that goes on after the prompt `text`.

    `is_continued`: `text` is only the beginning of the answer that the prompt ends with.
    """
    tail = text.rstrip()
    if is_continued and tail:
        is_open = tail.rfind(format.start) > tail.rfind(format.end)
        return ReasoningState.REASONING if is_open else ReasoningState.CONTENT
    if tail.endswith(format.end):
        return ReasoningState.CONTENT
    return ReasoningState.REASONING if tail.endswith(format.start) else ReasoningState.UNDECIDED


class ReasoningSplitter:
    """Splits an answer that arrives in pieces.

    The marks go, and the white space around them. Text is held back only while it is white space
    or the beginning of a mark.
    """

    __slots__ = ("_format", "_held", "_is_at_start", "has_reasoned", "state")

    def __init__(self, format: ReasoningFormat, state: ReasoningState) -> None:
        self._format = format
        self._held = ""
        self._is_at_start = True  # of the reasoning, or of the content after it
        self.state = state
        self.has_reasoned = state is ReasoningState.REASONING
        if state is ReasoningState.CONTENT:
            self._is_at_start = False

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that `text` makes certain."""
        text = self._held + text
        self._held = ""
        if self.state is ReasoningState.UNDECIDED:
            text = self._decide(text)
        reasoning = ""
        if self.state is ReasoningState.REASONING:
            reasoning, text = self._reason(text)
        if self.state is ReasoningState.CONTENT and self._is_at_start:
            text = text.lstrip()
            self._is_at_start = not text
        return reasoning, text

    def finish(self) -> tuple[str, str]:
        """What is held back, at the end of the answer."""
        held, self._held = self._held, ""
        is_reasoning = self.state is ReasoningState.REASONING
        return (held, "") if is_reasoning else ("", held)

    def _decide(self, text: str) -> str:
        start = text.lstrip()
        if start.startswith(self._format.start):
            self.state = ReasoningState.REASONING
            self.has_reasoned = True
            return start.removeprefix(self._format.start)
        if self._format.start.startswith(start):
            self._held = text
            return ""
        self.state = ReasoningState.CONTENT
        self._is_at_start = False
        return text

    def _reason(self, text: str) -> tuple[str, str]:
        if self._is_at_start:
            start = text.lstrip()
            # Some models repeat the mark that the prompt ends with.
            if self._format.start.startswith(start):
                self._held = text
                return "", ""
            text = start.removeprefix(self._format.start).lstrip()
            self._is_at_start = not text
        end = text.find(self._format.end)
        if end >= 0:
            self.state = ReasoningState.CONTENT
            self._is_at_start = True
            return text[:end].rstrip(), text[end + len(self._format.end) :]
        certain = text[: held_from(text, (self._format.end,))].rstrip()
        self._held = text[len(certain) :]
        return certain, ""


def held_from(text: str, marks: tuple[str, ...]) -> int:
    """Where the longest end of `text` starts that is the beginning of one of `marks`."""
    earliest = len(text)
    for mark in marks:
        start = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while 0 <= start < earliest:
            if mark.startswith(text[start:]):
                earliest = start
                break
            start = text.find(mark[0], start + 1)
    return earliest
