"""Sampling parameters of the running requests, a column per parameter.

Written when a request gets its row, so that a step gathers them at once; the next step has the
same arrays if it samples the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caudal.sampling_params import SamplingParams

NOTHING = -1
"""No logprobs, no target, no mask."""


@dataclass(frozen=True, slots=True)
class GatheredParams:
    """Parameters of some rows, and what others are where no row asks for them."""

    rows: list[int]
    floats: NDArray[np.float32]
    """[6, num_rows]: temperature, top_p, min_p, presence, frequency and repetition penalty"""
    top_k: NDArray[np.int32]
    seed: NDArray[np.uint64]
    num_logprobs: NDArray[np.int32]
    nothing: NDArray[np.int32]
    """[num_rows], NOTHING for each"""
    no_indptr: NDArray[np.int32]
    """[num_rows + 1], 0: entries of none"""


class SamplingTable:
    """One entry per row of the InputBatch."""

    def __init__(self, max_num_seqs: int) -> None:
        self._floats = np.zeros((6, max_num_seqs), dtype=np.float32)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int32)
        self._seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self._num_logprobs = np.zeros(max_num_seqs, dtype=np.int32)
        self._last: GatheredParams | None = None

    def put(self, row: int, sampling: SamplingParams, seed: int) -> None:
        """Overwrite the entry of `row`."""
        self._last = None
        self._floats[:, row] = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty,
        )
        self._top_k[row] = sampling.top_k
        self._seed[row] = seed
        wanted = sampling.num_logprobs
        self._num_logprobs[row] = NOTHING if wanted is None else wanted

    def gather(self, rows: Sequence[int]) -> GatheredParams:
        """The entries of `rows`, which may repeat; not to be changed."""
        rows = list(rows)
        if self._last is None or self._last.rows != rows:
            at = np.array(rows, dtype=np.int64)
            self._last = GatheredParams(
                rows,
                floats=np.take(self._floats, at, axis=1),
                top_k=self._top_k[at],
                seed=self._seed[at],
                num_logprobs=self._num_logprobs[at],
                nothing=np.full(len(rows), NOTHING, dtype=np.int32),
                no_indptr=np.zeros(len(rows) + 1, dtype=np.int32),
            )
        return self._last
