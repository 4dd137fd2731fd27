"""Keeps rows to the form that their requests asked for: masks computed between steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence

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
    one core is busy; what is left of them then runs beside the forward pass.
    """

    def __init__(self, factory: ConstraintFactory, eog_token_ids: frozenset[int]) -> None:
        self.factory = factory
        self.eog_token_ids = eog_token_ids
        self.masks = MaskThread()
        self._rows: list[tuple[LogitsRow, Constraint]] = []

    def add(self, data: NewRequestData, state: RequestState) -> None:
        """Give a new or returning row its constraint. Raises if the grammar cannot be followed."""
        params = data.sampling.structured_outputs
        if params is not None and data.sampling.max_tokens > 0:
            output_ids = data.token_ids[data.num_prompt_tokens :]
            state.constraint = self.factory.create(params, output_ids)

    def start(self, rows: Sequence[LogitsRow]) -> None:
        """Before the forward pass: begin those masks of the rows that are not there yet."""
        self._rows = [
            (row, constraint)
            for row in rows
            if (constraint := row.state.constraint) is not None
            and not row.is_prompt
            and not constraint.is_complete
        ]
        if self._rows:
            self._begin([constraint for _, constraint in self._rows])

    def apply(self) -> None:
        """Wait for the masks and give each row its own. A row that fails gets an `error`."""
        if not self._rows:
            return
        self.masks.wait()
        for row, constraint in self._rows:
            try:
                row.mask = constraint.take_mask()
                if row.state.num_output_tokens < row.state.sampling.min_tokens:
                    row.can_only_end = self._allows_only_ends(row)
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
                    for row, constraint in self._rows
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

    def _allows_only_ends(self, row: LogitsRow) -> bool:
        assert row.mask is not None
        words, ends = row.mask, self.eog_token_ids.union(row.state.sampling.stop_token_ids)
        num_ends = sum(int(words[token >> 5]) >> (token & 31) & 1 for token in ends)
        return num_ends == int.from_bytes(words.tobytes(), "little").bit_count()
