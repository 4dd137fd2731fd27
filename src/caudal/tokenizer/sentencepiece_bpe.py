"""SentencePiece-style BPE: merge the pair whose result scores highest, leftmost first."""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping

from caudal.weights.token_bytes import SPM_SPACE

_WORD = re.compile(f"{SPM_SPACE}+[^{SPM_SPACE}]*|[^{SPM_SPACE}]+")
"""A run of spaces with what follows it; joined, the matches give the text back."""


def merges_from_scores(
    pieces: Mapping[str, int], scores: Mapping[str, float]
) -> list[tuple[str, str]]:
    """Every pair of pieces that joins to a piece, best score first.

    BPE over these ranks gives what SentencePiece gives as long as `has_exact_merges` holds.
    """
    found: list[tuple[float, int, str, str]] = []
    for piece in pieces:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                found.append((-scores[piece], -cut, left, right))
    found.sort()
    return [(left, right) for _, _, left, right in found]


def has_exact_merges(pieces: Mapping[str, int], scores: Mapping[str, float]) -> bool:
    """Whether fixed merge ranks decide as scores do: no ties, and every character is a piece.

    Between pieces of equal score the leftmost pair merges first, which no fixed rank can say; and
    a character that is no piece can still be part of one.
    """
    joined = [piece for piece in pieces if len(piece) > 1]
    if len({scores[piece] for piece in joined}) != len(joined):
        return False
    return all(character in pieces for character in set("".join(joined)))


class ScoreMerger:
    """The algorithm by its definition, for the vocabularies that fixed ranks cannot serve."""

    def __init__(self, pieces: Mapping[str, int], scores: Mapping[str, float]) -> None:
        self._scores = {piece: scores[piece] for piece in pieces if len(piece) > 1}
        # Where no piece continues over the start of a word, words can be merged one by one.
        self._splits_words = not any(SPM_SPACE in p.lstrip(SPM_SPACE) for p in self._scores)

    def split(self, text: str) -> list[str]:
        """Cut escaped text (spaces written as U+2581) into pieces and lone characters."""
        if not self._splits_words:
            return self._merge(text)
        cache: dict[str, list[str]] = {}
        result: list[str] = []
        for word in _WORD.findall(text):
            if word not in cache:
                cache[word] = self._merge(word)
            result += cache[word]
        return result

    def _merge(self, text: str) -> list[str]:
        symbols = list(text)
        before = list(range(-1, len(text) - 1))
        after = [*range(1, len(text)), -1]
        queue: list[tuple[float, int, int, int]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right >= 0:
                joined = symbols[left] + symbols[right]
                score = self._scores.get(joined)
                if score is not None:
                    heapq.heappush(queue, (-score, left, right, len(joined)))

        for index in range(1, len(text)):
            offer(index - 1, index)
        while queue:
            _, left, right, length = heapq.heappop(queue)
            # An entry is stale once either symbol has been merged into another.
            if not symbols[left] or not symbols[right]:
                continue
            if len(symbols[left]) + len(symbols[right]) != length:
                continue
            symbols[left] += symbols[right]
            symbols[right] = ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            offer(before[left], left)
            offer(left, after[left])
        return [symbol for symbol in symbols if symbol]
