"""Keeps special tokens that users write in messages from acting as such.

Before a chat is rendered, each special token in a message is replaced, character by character, by
placeholders that no valid text can hold (lone surrogates). Filters, slices and tests of the
template treat them as other letters, and what comes out as placeholders is known to be message
text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from caudal.errors import UnsupportedModelError
from caudal.tokenizer.rendered_prompt import PromptSegment, RenderedPrompt
from caudal.tokenizer.special_tokens import SpecialTokenFinder

_FIRST_PLACEHOLDER = 0xD800
_NUM_PLACEHOLDERS = 0x800
_RUN = re.compile("[\ud800-\udfff]+")


class PromptShield:
    """Hides the special tokens of one model in messages for one chat template.

    Beside whole tokens, the beginning of one is hidden where the template might join something to
    it: at the end of a string, or before a text that the template could cut out; likewise the end
    of one. So no token can be put together from pieces either.
    """

    def __init__(self, control_texts: Iterable[str], template_texts: Iterable[str]) -> None:
        texts = sorted(text for text in control_texts if text)
        self._whole = SpecialTokenFinder(dict.fromkeys(texts, 0))
        known = {text for text in template_texts if text.strip()}
        self._heads = _FragmentFinder(texts, known)
        self._tails = _FragmentFinder([t[::-1] for t in texts], {t[::-1] for t in known})
        self._hide, self._show = _placeholders(texts)

    def hide(self, text: str) -> str:
        """`text` with placeholders for what must stay plain; the same object if there is none."""
        spans = [(start, end) for start, end, _ in self._whole.find(text)]
        spans += self._heads.find(text)
        size = len(text)
        spans += ((size - end, size - start) for start, end in self._tails.find(text[::-1]))
        if not spans:
            return text
        parts, position = [], 0
        for start, end in sorted(spans):
            if end > position:
                start = max(start, position)
                parts += [text[position:start], text[start:end].translate(self._hide)]
                position = end
        return "".join([*parts, text[position:]])

    def show(self, text: str) -> str:
        """Put the hidden characters back."""
        return text.translate(self._show)

    def segments(self, shielded: str, plain: str | None) -> RenderedPrompt:
        """Tell message text from template text in a rendering of hidden messages.

        `plain` is the rendering of the same messages as they are. Its letters are taken if both
        have the same structure (a filter may have changed the case of what is hidden).
        """
        text = self.show(shielded)
        if plain is not None and self._same_structure(shielded, plain):
            text = plain
        segments, position = [], 0
        for run in _RUN.finditer(shielded):
            segments.append(PromptSegment(text[position : run.start()], False))
            segments.append(PromptSegment(text[run.start() : run.end()], True))
            position = run.end()
        segments.append(PromptSegment(text[position:], False))
        return RenderedPrompt(tuple(segment for segment in segments if segment.text))

    @staticmethod
    def _same_structure(shielded: str, plain: str) -> bool:
        if len(shielded) != len(plain):
            return False
        position = 0
        for run in _RUN.finditer(shielded):
            if shielded[position : run.start()] != plain[position : run.start()]:
                return False
            position = run.end()
        return shielded[position:] == plain[position:]


class _FragmentFinder:
    """Finds beginnings of tokens that end where a template might join other text to them."""

    def __init__(self, tokens: list[str], known: set[str]) -> None:
        self._heads = {token[:length] for token in tokens for length in range(1, len(token))}
        # What the template itself looks for is left alone, or its tests would fail.
        kept = sorted(known - self._heads, key=len, reverse=True)
        cuts = sorted(known, key=len, reverse=True)
        self._kept = re.compile("|".join(map(re.escape, kept)) or r"(?!)")
        self._joint = re.compile(r"\s*(?:\Z" + "".join("|" + re.escape(cut) for cut in cuts) + ")")
        first = sorted({token[0] for token in tokens})
        self._first = re.compile("|".join(map(re.escape, first)) or r"(?!)")

    def find(self, text: str) -> Iterable[tuple[int, int]]:
        """(start, end) of each such beginning, in order and without overlaps."""
        match = self._first.search(text)
        while match is not None:
            start = match.start()
            known = self._kept.match(text, start)
            end = known.end() if known else self._fragment_end(text, start)
            if end > start and not known:
                yield start, end
            match = self._first.search(text, max(end, start + 1))

    def _fragment_end(self, text: str, start: int) -> int:
        found = start
        end = start + 1
        while end <= len(text) and text[start:end] in self._heads:
            if self._joint.match(text, end):
                found = end
            end += 1
        return found


def _placeholders(texts: list[str]) -> tuple[dict[int, int], dict[int, int]]:
    """Translations from each character of the tokens to a placeholder, and back."""
    # Whitespace stays what it is, so that templates trim hidden text as they trim any other.
    alphabet = sorted({c for text in texts for c in text if not c.isspace() or text.isspace()})
    if len(alphabet) > _NUM_PLACEHOLDERS:
        raise UnsupportedModelError(
            f"the special tokens have {len(alphabet)} different characters; at most "
            f"{_NUM_PLACEHOLDERS} can be kept apart from message text"
        )
    hide = {ord(c): _FIRST_PLACEHOLDER + index for index, c in enumerate(alphabet)}
    return hide, {placeholder: character for character, placeholder in hide.items()}


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON-like value with every string changed, keys too.

    Values without a changed string are returned as they are, not copied.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        pairs = {map_strings(k, change): map_strings(v, change) for k, v in value.items()}
        same = len(pairs) == len(value) and all(
            k1 is k2 and v1 is v2
            for (k1, v1), (k2, v2) in zip(pairs.items(), value.items(), strict=True)
        )
        return value if same else pairs
    if isinstance(value, list | tuple):
        items = [map_strings(item, change) for item in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else items
    return value
