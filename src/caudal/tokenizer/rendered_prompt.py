"""A rendered chat in which the template's text and literal message text are told apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_MASK = "\ud800"
"""A lone surrogate: valid text never holds one, so no special token does."""


def is_placeholder(character: str) -> bool:
    """Whether the character stands for one of a special token written in a message."""
    return "\ud800" <= character <= "\udfff"


class PromptSegment(NamedTuple):
    """A stretch of a rendered chat."""

    text: str
    is_content: bool
    """True where a message holds what looks like (part of) a special token: it stays plain text.

    Other message text is not marked; there is nothing in it that could be misread.
    """


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The exact text of a rendered chat, as segments."""

    segments: tuple[PromptSegment, ...]

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(segment.text for segment in self.segments)

    @property
    def has_content(self) -> bool:
        """Whether any segment must stay plain text."""
        return any(segment.is_content for segment in self.segments)

    def masked_text(self) -> str:
        """`text` with the content segments blotted out, at the same positions."""
        if not self.has_content:
            return self.text
        return "".join(_MASK * len(s.text) if s.is_content else s.text for s in self.segments)
