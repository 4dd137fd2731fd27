"""Finds special tokens in text, before any other tokenisation."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

_KEY_LENGTH = 2


class SpecialTokenFinder:
    """Cuts text at the given tokens: leftmost first, and the longest of those at one place.

    Tokens share few beginnings (`<|`, `</`, …), so text is searched for those, and only where one
    stands are the lengths of its tokens tried. Building costs nothing even for thousands.
    """

    def __init__(self, ids_by_text: Mapping[str, int]) -> None:
        self._ids = dict(ids_by_text)
        lengths: defaultdict[str, set[int]] = defaultdict(set)
        for text in self._ids:
            lengths[text[:_KEY_LENGTH]].add(len(text))
        for key in lengths:
            # A token of one character competes with the longer ones that begin with it.
            lengths[key] |= lengths.get(key[:1], set())
        self._lengths = {key: sorted(found, reverse=True) for key, found in lengths.items()}
        keys = sorted(self._lengths, key=len, reverse=True)
        self._key_pattern = re.compile("|".join(map(re.escape, keys)) or r"(?!)")

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(start, end, id) of each token in `text`, in order."""
        search = self._key_pattern.search
        match = search(text) if self._ids else None
        while match is not None:
            start = end = match.start()
            for length in self._lengths[match.group()]:
                token_id = self._ids.get(text[start : start + length])
                if token_id is not None:
                    end = start + length
                    yield start, end, token_id
                    break
            match = search(text, max(end, start + 1))
