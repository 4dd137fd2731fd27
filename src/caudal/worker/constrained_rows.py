"""Keeps rows to the form that their requests asked for: masks computed between steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from caudal.step_io import NewRequestData
from caudal.structured_output.constraint import Constraint, ConstraintError, ConstraintFactory
from caudal.structured_output.mask_thread import MaskThread
from caudal.worker.input_batch import RequestState
from caudal.worker.row_errors import public_message
from caudal.worker.sampler import LogitsRow

logger = logging.getLogger(__name__)


class ConstrainedRows:
    """The masks of the next step are computed as soon as this step's tokens are known.

    So a thread computes them while the step is published and the next one is scheduled, when only
    one core is busy; beside the forward pass it would hold up the kernels.
    """

    def __init__(self, factory: ConstraintFactory, eog_token_ids: frozenset[int]) -> None:
        self.factory = factory
        self.eog_token_ids = eog_token_ids
        self.masks = MaskThread()
        self._rows: list[tuple[int, LogitsRow, Constraint]] = []
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self._penalties = np.where(bits, np.float32(0), np.float32(-np.inf))
        """What a byte of a mask adds to eight logits."""  # [256, 8]
        self._addend: NDArray[np.float32] = np.zeros((0, 8), np.float32)

    def add(self, data: NewRequestData, state: RequestState) -> None:
        """Give a new or returning row its constraint. Raises if the grammar cannot be followed."""
        params = data.sampling.structured_outputs
        if params is not None and data.sampling.max_tokens > 0:
            output_ids = data.token_ids[data.num_prompt_tokens :]
            state.constraint = self.factory.create(params, output_ids)

    def start(self, rows: Sequence[LogitsRow]) -> None:
        """Before the forward pass: begin those masks of the rows that are not there yet."""
        self._rows = [
            (index, row, constraint)
            for index, row in enumerate(rows)
            if (constraint := row.state.constraint) is not None
            and not row.is_prompt
            and not constraint.is_complete
        ]
        if self._rows:
            self._begin([constraint for *_, constraint in self._rows])

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Wait for the masks and make what they forbid impossible, in place.

        Rows that report logprobs, which are of the distribution before any change, get the
        forbidden ids in `LogitsRow.forbidden_ids` instead. A row that fails gets an `error`.
        """
        if not self._rows:
            return
        self.masks.wait()
        for index, row, constraint in self._rows:
            try:
                mask = constraint.take_mask()
                if not _is_decided(row, mask, logits[index]):
                    self._apply_row(row, mask, logits[index])
            except Exception as error:
                if not isinstance(error, ConstraintError):
                    logger.exception("request %s failed in a step", row.state.request_id)
                row.error = public_message(error)

    def prepare_next(self) -> None:
        """After sampling: begin the masks that rows of this step will need next."""
        if self._rows:
            self._begin(
                [
                    constraint
                    for _, row, constraint in self._rows
                    if row.error is None and not constraint.is_complete
                ]
            )

    def shutdown(self) -> None:
        """End the threads."""
        self.factory.shutdown()
        self.masks.shutdown()

    def _begin(self, constraints: Sequence[Constraint]) -> None:
        missing = [constraint for constraint in constraints if not constraint.has_mask]
        if missing:
            self.masks.start(missing)
            for constraint in missing:
                constraint.has_mask = True

    def _apply_row(
        self, row: LogitsRow, mask: NDArray[np.int32], logits: NDArray[np.float32]
    ) -> None:
        mask_bytes = mask.view(np.uint8)
        sampling = row.state.sampling
        if row.state.num_output_tokens < sampling.min_tokens:
            row.can_only_end = self._allows_only_ends(mask_bytes, sampling.stop_token_ids)
        if sampling.num_logprobs is not None:
            allowed = np.unpackbits(mask_bytes, count=len(logits), bitorder="little")
            row.forbidden_ids = np.flatnonzero(allowed == 0).astype(np.int32)
            return
        whole = len(logits) // 8
        if len(self._addend) != whole:
            self._addend = np.empty((whole, 8), np.float32)
        # Two passes of 10 µs each for 50,000 tokens; a boolean index would take 300.
        np.take(self._penalties, mask_bytes[:whole], axis=0, out=self._addend, mode="clip")
        head = logits[: whole * 8].reshape(whole, 8)
        head += self._addend
        if len(logits) % 8:
            logits[whole * 8 :] += self._penalties[mask_bytes[whole]][: len(logits) % 8]

    def _allows_only_ends(self, mask_bytes: NDArray[np.uint8], stop_ids: Sequence[int]) -> bool:
        ends = self.eog_token_ids.union(stop_ids)
        num_ends = sum(int(mask_bytes[token // 8]) >> token % 8 & 1 for token in ends)
        return num_ends == int.from_bytes(mask_bytes.tobytes(), "little").bit_count()


def _is_decided(row: LogitsRow, mask: NDArray[np.int32], logits: NDArray[np.float32]) -> bool:
    """Whether the most likely of all tokens is allowed, and will be taken.

    Then the mask changes nothing, and need not be written over the whole vocabulary.
    """
    state, sampling = row.state, row.state.sampling
    if (
        sampling.temperature > 0.0
        or sampling.num_logprobs is not None
        or sampling.logit_bias
        or state.token_counts is not None
        or state.num_output_tokens < sampling.min_tokens
    ):
        return False
    best = int(logits.argmax())  # the first of equals, as the sampler has it
    return bool(int(mask[best >> 5]) >> (best & 31) & 1)
