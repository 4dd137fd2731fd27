"""Keeps rows to the form that their requests asked for."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from caudal.step_io import NewRequestData
from caudal.structured_output.constraint import Constraint, ConstraintError, ConstraintFactory
from caudal.structured_output.mask_thread import MaskThread
from caudal.worker.input_batch import RequestState
from caudal.worker.row_errors import public_message
from caudal.worker.sampler import NEVER, LogitsRow
from caudal.worker.sampling_table import NOTHING

logger = logging.getLogger(__name__)


class ConstrainedRows:
    """Masks for the rows that need one, and checks for the others.

    A row that samples by temperature alone draws without a mask, and its form is asked whether it
    allows the token, which takes a hundredth of the time of a mask. Only where it refuses, the mask
    is computed and another token drawn. So a greedy row gets the token that it would have got with
    a mask, and a row with a temperature one of the same distribution.

    Other rows (filters, penalties, logprobs) need their masks before. Those of the next step are
    begun as soon as this step's tokens are known: a thread computes them while the step is
    published and the next one is scheduled, when only one core is busy; what is left of them then
    runs beside the forward pass.
    """

    def __init__(self, factory: ConstraintFactory, eog_token_ids: frozenset[int]) -> None:
        self.factory = factory
        self.eog_token_ids = eog_token_ids
        self.masks = MaskThread()
        self._masked: list[tuple[LogitsRow, Constraint]] = []
        self._checked: list[tuple[int, LogitsRow, Constraint]] = []

    def add(self, data: NewRequestData, state: RequestState) -> None:
        """Give a new or returning row its constraint. Raises if the grammar cannot be followed."""
        params = data.sampling.structured_outputs
        if params is not None and data.sampling.max_tokens > 0:
            output_ids = data.token_ids[data.num_prompt_tokens :]
            state.constraint = self.factory.create(params, output_ids)

    def start(self, rows: Sequence[LogitsRow]) -> None:
        """Before the forward pass: begin those masks of the rows that are not there yet."""
        self._masked, self._checked = [], []
        for place, row in enumerate(rows):
            constraint = row.state.constraint
            if constraint is None or row.is_prompt or constraint.is_complete:
                continue
            if row.is_checked:
                self._checked.append((place, row, constraint))
            elif row.num_guessed == 0:
                self._masked.append((row, constraint))
                _drop_guesses(row)  # their masks cannot be known before its token
        self._begin([constraint for _, constraint in self._masked])

    def apply(self) -> None:
        """Wait for the masks and give each row its own. A row that fails gets an `error`."""
        if self._masked:
            self.masks.wait()
        for row, constraint in self._masked:
            self._take_mask(row, constraint)

    def refuse(self, token_ids: Sequence[int]) -> list[int]:
        """The places of rows whose form does not allow what they sampled without a mask.

        Those rows have their masks now. The others' forms have taken their token of `token_ids`,
        one for each row given to `start`. A row that fails gets an `error`. Rows behind a wrong
        guess are not looked at, and what is refused makes the guess behind it a wrong one.
        """
        refused: list[tuple[int, LogitsRow, Constraint]] = []
        right: LogitsRow | None = None  # the last row, if its token is what was guessed
        for place, row, constraint in self._checked:
            if row.num_guessed > 0:
                if right is None or right.state is not row.state:
                    continue
                if not constraint.can_check:
                    _drop_guesses(right)
                    continue
            if not constraint.is_complete and not self._is_taken(row, constraint, token_ids[place]):
                refused.append((place, row, constraint))
                _drop_guesses(row)
            right = None if row.is_refuted_by(token_ids[place]) else row
        if refused:
            self.masks.fill([constraint for _, _, constraint in refused])
        for _, row, constraint in refused:
            row.is_second_draw = True
            self._take_mask(row, constraint)
        return [place for place, row, _ in refused if row.mask is not None]

    def prepare_next(self) -> None:
        """After sampling: begin the masks that rows of this step will need next."""
        self._begin(
            [
                constraint
                for row, constraint in self._masked
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

    def _take_mask(self, row: LogitsRow, constraint: Constraint) -> None:
        try:
            row.mask = constraint.take_mask()
            if row.state.num_output_tokens < row.state.sampling.min_tokens:
                row.can_only_end = self._allows_only_ends(row)
        except Exception as error:
            self._fail(row, error)

    def _is_taken(self, row: LogitsRow, constraint: Constraint, token_id: int) -> bool:
        """Whether nothing is left to do for the row: its form has advanced, or it fails anyway."""
        if token_id < 0:
            return True
        try:
            row.is_accepted = constraint.try_accept(token_id)
        except Exception as error:
            self._fail(row, error)
            return True
        return row.is_accepted

    def _fail(self, row: LogitsRow, error: Exception) -> None:
        if not isinstance(error, ConstraintError):
            logger.exception("request %s failed in a step", row.state.request_id)
        row.error = public_message(error)

    def _allows_only_ends(self, row: LogitsRow) -> bool:
        assert row.mask is not None
        words, ends = row.mask, self.eog_token_ids.union(row.state.sampling.stop_token_ids)
        num_ends = sum(int(words[token >> 5]) >> (token & 31) & 1 for token in ends)
        return num_ends == int.from_bytes(words.tobytes(), "little").bit_count()


def _drop_guesses(row: LogitsRow) -> None:
    """Whatever the row's token will be, further rows of the request stand behind a wrong guess."""
    if row.next_guess != NOTHING:
        row.next_guess = NEVER
