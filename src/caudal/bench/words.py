"""Texts of a wanted length in tokens, without the server's tokenizer."""

from __future__ import annotations

import random
from dataclasses import dataclass

_TEXT = """
river stone light garden winter market silver window letter mountain bread music paper morning
shadow harbour engine bridge summer forest island copper ladder pocket thunder village orange
number button castle flower hunter jacket kitchen lantern mirror needle ocean planet quarter
ribbon saddle ticket umbrella valley walnut yellow anchor basket candle the a of to and in is was
for with on as by at from but not or which when while after every
"""
WORDS = tuple(_TEXT.split())

NUM_SALT_WORDS = 8
"""Enough that two salts never begin a text alike, few enough to leave its length alone."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """How many tokens the server counts for a text of so many of our words."""

    tokens_per_word: float = 1.0
    num_template_tokens: float = 0.0
    """Around a single message."""
    is_measured: bool = False
    """False: the server reports no usage, and a word counts as a token."""

    @classmethod
    def fit(cls, short: tuple[int, int | None], long: tuple[int, int | None]) -> Calibration:
        """From two probes, each (number of words, prompt tokens that the server counted)."""
        (few, few_tokens), (many, many_tokens) = short, long
        if few_tokens is None or many_tokens is None:
            return cls()
        slope = (many_tokens - few_tokens) / (many - few)
        # Outside of this it is no count of tokens: a constant, or something else's length.
        if not 0.5 <= slope <= 10:
            return cls()
        return cls(slope, max(0.0, few_tokens - slope * few), is_measured=True)

    def num_words(self, num_tokens: int) -> int:
        """Words for a message that counts as `num_tokens`; at least one."""
        return max(1, round((num_tokens - self.num_template_tokens) / self.tokens_per_word))


class TextSource:
    """Random words from one seeded source."""

    def __init__(self, source: random.Random, calibration: Calibration) -> None:
        self._source = source
        self._calibration = calibration

    def text(self, num_tokens: int, salt: str = "") -> str:
        """About `num_tokens` tokens; `salt` decides the first words and changes no other."""
        num_words = self._calibration.num_words(num_tokens)
        words = self._source.choices(WORDS, k=num_words)
        if salt:
            first = random.Random(salt).choices(WORDS, k=min(NUM_SALT_WORDS, num_words))
            words[: len(first)] = first
        return " ".join(words)


def make_words(num_words: int, seed: str) -> str:
    """Exactly so many words."""
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))
