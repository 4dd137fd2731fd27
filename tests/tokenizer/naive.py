"""Slow tokenisers written from the definitions, to compare with."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise

TRICKY_ATOMS = (
    *("a", "Hello", " world", "'s", "'S", "'LL", "'re", "’s", "'", "don't", "ǅ", "ſ"),
    *("1", "12", "123", "1234567890", "12345678901234567890", "½", "Ⅷ", "٣", "x²"),
    *("日本語", "한국어", "ไทย", "हिन्दी", "العربية", "é", "e\u0301", "\u0301", "ﬁ"),
    *("😊", "👩\u200d👩\u200d👧\u200d👦", "🏳️\u200d🌈", "\u200b", "\ufeff"),
    *(" ", "  ", "    ", "\t", "\t\t", "\n", "\n\n", "\r\n", "\r", "\u00a0", "\u2003", "\u3000"),
    *(
        "\u2028",
        "\x0b",
        "\x0c",
        "\x85",
        "\x1c",
        ".",
        "...",
        "!?",
        "-",
        "_",
        "$",
        "+",
        "=",
        "~",
        "`",
    ),
    *("$", "+", "=", "~", "`", "<|im_end|>", "</s>", "<", "|>", "the", " river", " town"),
)


def random_text(rng: random.Random, max_atoms: int = 12) -> str:
    """A few atoms of natural and of nasty text."""
    return "".join(rng.choice(TRICKY_ATOMS) for _ in range(rng.randint(0, max_atoms)))


def merge_by_rank(symbols: list[str], ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """BPE: the adjacent pair of the lowest rank is joined, leftmost first, until none is left."""
    while True:
        found = [
            (ranks[pair], index) for index, pair in enumerate(pairwise(symbols)) if pair in ranks
        ]
        if not found:
            return symbols
        _, index = min(found)
        symbols = [*symbols[:index], symbols[index] + symbols[index + 1], *symbols[index + 2 :]]


def merge_by_score(text: str, scores: Mapping[str, float]) -> list[str]:
    """SentencePiece: the pair whose joined piece scores highest, leftmost of equals."""
    symbols = list(text)
    while True:
        found = [
            (-scores[left + right], index)
            for index, (left, right) in enumerate(pairwise(symbols))
            if left + right in scores
        ]
        if not found:
            return symbols
        _, index = min(found)
        symbols = [*symbols[:index], symbols[index] + symbols[index + 1], *symbols[index + 2 :]]
