"""How texts go on, as they went on after the same tokens earlier in them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caudal import _native

MIN_MATCH = 2
"""Tokens at the end of a text that must occur earlier in it."""
MAX_MATCH = 16
"""Longer occurrences are as good as these."""


def guess_rows(
    tokens: NDArray[np.int32],
    rows: NDArray[np.int32],
    lengths: NDArray[np.int32],
    max_guesses: int,
) -> NDArray[np.int32]:
    """Guesses [rows, max_guesses] for the texts `tokens[row, :length]`; -1 where there are none.

    They are what followed the longest earlier occurrence of the text's end, the latest of equally
    long ones. Raises ValueError for rows and lengths that `tokens` does not have.
    """
    return _native.guess_rows(tokens, rows, lengths, MIN_MATCH, MAX_MATCH, max_guesses)
