"""Keeps rows to the form that their requests asked for: masks beside the forward pass."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from caudal.step_io import NewRequestData
from caudal.structured_output.constraint import Constraint, ConstraintError, ConstraintFactory
from caudal.worker.input_batch import RequestState
from caudal.worker.row_errors import public_message
from caudal.worker.sampler import LogitsRow

if TYPE_CHECKING:
    from llguidance import LLExecutor

logger = logging.getLogger(__name__)


class ConstrainedRows:
    """Between `start` and `apply` a thread computes the masks of a step.

    The matchers are only touched by that thread in between, and only by the caller otherwise.
    """

    def __init__(self, factory: ConstraintFactory, eog_token_ids: frozenset[int]) -> None:
        self.factory = factory
        self.eog_token_ids = eog_token_ids
        self._rows: list[tuple[int, LogitsRow, Constraint]] = []
        self._masks: NDArray[np.int32] = np.zeros((0, 0), np.int32)  # [rows, words]
        self._pending: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None
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
        """Begin the masks of the rows that sample in this step."""
        self._rows = [
            (index, row, constraint)
            for index, row in enumerate(rows)
            if (constraint := row.state.constraint) is not None
            and not row.is_prompt
            and not constraint.is_complete
        ]
        if not self._rows:
            return
        if self._thread is None or self._executor is None:
            from llguidance import LLExecutor

            self._thread = ThreadPoolExecutor(1, "caudal-masks")
            self._executor = LLExecutor(1)
        shape = len(self._rows), self._rows[0][2].num_words
        if self._masks.shape[0] < shape[0] or self._masks.shape[1] != shape[1]:
            self._masks = np.zeros((max(16, 2 * shape[0]), shape[1]), np.int32)
        self._pending = self._thread.submit(self._compute, self._executor)

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Wait for the masks and make what they forbid impossible, in place.

        Rows that report logprobs, which are of the distribution before any change, get the
        forbidden ids in `LogitsRow.forbidden_ids` instead. A row that fails gets an `error`.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.result()
        except Exception:
            logger.exception("the masks of %d requests failed", len(self._rows))
            for _, row, _ in self._rows:
                row.error = "the form of the output could not be enforced"
            return
        for number, (index, row, constraint) in enumerate(self._rows):
            mask = self._masks[number]
            try:
                constraint.finish_mask(mask)
                self._apply_row(row, mask, logits[index])
            except Exception as error:
                if not isinstance(error, ConstraintError):
                    logger.exception("request %s failed in a step", row.state.request_id)
                row.error = public_message(error)

    def shutdown(self) -> None:
        """End the threads."""
        self.factory.shutdown()
        if self._thread is not None:
            self._thread.shutdown()

    def _compute(self, executor: LLExecutor) -> None:
        matchers = [
            (constraint.matcher, number) for number, (*_, constraint) in enumerate(self._rows)
        ]
        masks = self._masks
        executor.unsafe_compute_mask_ptr(
            matchers, masks.ctypes.data, masks.shape[1] * masks.itemsize, len(masks)
        )

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
