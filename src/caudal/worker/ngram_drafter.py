"""Guesses how texts go on, from what followed the same tokens earlier in them (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from caudal.ops.guessing import guess_rows
from caudal.step_io import ModelRunnerOutput
from caudal.worker.input_batch import InputBatch
from caudal.worker.sampler import LogitsRow


class NgramDrafter:
    """Guesses for the rows of a batch. See Saxena, "Prompt Lookup Decoding", 2023."""

    def __init__(self, batch: InputBatch, max_drafts: int) -> None:
        self._batch = batch
        self._max_drafts = max_drafts

    def propose(self, rows: Sequence[LogitsRow], result: ModelRunnerOutput) -> None:
        """Add tokens that may come next to `result`; none for texts that repeat nothing.

        Requests have no guesses where each token must be known before the next one is sampled:
        those with penalties, and enforced forms that need a mask before (see ConstrainedRows).
        """
        sampled = result.sampled_token_ids
        states = [
            state
            for row in rows
            if row.num_guessed == 0 and not row.is_prompt
            if (state := row.state).request_id in sampled
            if state.token_counts is None and (state.constraint is None or row.is_checked)
        ]
        if not states:
            return
        guesses = guess_rows(
            self._batch.tokens,
            np.array([state.row for state in states], dtype=np.int32),
            np.array([state.num_known_tokens for state in states], dtype=np.int32),
            self._max_drafts,
        )
        result.draft_token_ids = {
            state.request_id: drafts
            for state, drafts in zip(states, guesses.tolist(), strict=True)
            if drafts[0] >= 0
        }
