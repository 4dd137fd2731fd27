"""Masks computed beside the step, each within a time limit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from caudal.structured_output.constraint import Constraint, ConstraintError
from caudal.structured_output.limits import MASK_TIMEOUT_S, MAX_STUCK_MASKS

logger = logging.getLogger(__name__)

_NUM_SLICES = 10
UNAVAILABLE = "the form of the output cannot be enforced until the server is started again"


class _Worker:
    """A thread and the two locks through which it is given work and tells that it is done."""

    def __init__(self) -> None:
        self._wake = threading.Lock()
        self._begun = threading.Lock()
        self._finished = threading.Lock()
        for lock in (self._wake, self._begun, self._finished):
            lock.acquire()
        self._constraints: Sequence[Constraint] = ()
        self._is_leaving = False
        self.num_done = 0
        # A computation that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="caudal-masks", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self, constraints: Sequence[Constraint]) -> None:
        """Have the masks of `constraints` computed; returns once that has begun.

        Otherwise the thread could wait for the interpreter until the forward pass begins, and
        then take a core from it.
        """
        self._constraints = constraints
        self.num_done = 0
        self._wake.release()
        self._begun.acquire()

    def wait(self, seconds: float) -> bool:
        """Whether all masks are there, after waiting for at most that long."""
        return self._finished.acquire(timeout=seconds)

    def leave(self) -> None:
        """End the thread after the mask that it computes now."""
        self._is_leaving = True
        self._constraints = ()
        self._wake.release()

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            if self._is_leaving:
                return
            self._begun.release()
            for constraint in self._constraints:
                constraint.fill_mask()
                if self._is_leaving:
                    return
                self.num_done += 1
            self._finished.release()


class MaskThread:
    """Fills the masks of constraints, one after the other.

    Between `start` and the end of `wait` their matchers belong to the thread. One that takes longer
    than `timeout_s` is left to itself together with its thread, and another thread goes on.
    """

    def __init__(self, timeout_s: float = MASK_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._worker: _Worker | None = None
        self._stuck: list[_Worker] = []
        self._pending: Sequence[Constraint] = ()

    def start(self, constraints: Sequence[Constraint]) -> None:
        """Begin the masks of `constraints`, after those begun before."""
        if self._pending:
            self.wait()
        if not constraints:
            return
        self._stuck = [worker for worker in self._stuck if worker.is_alive]
        if len(self._stuck) >= MAX_STUCK_MASKS:
            for constraint in constraints:
                constraint.mask_error = ConstraintError(UNAVAILABLE)
            return
        if self._worker is None:
            self._worker = _Worker()
        self._pending = constraints
        self._worker.start(constraints)

    def wait(self) -> None:
        """Return once every mask that was begun is there, or has an error."""
        while self._pending:
            worker = self._worker
            assert worker is not None
            if not self._is_stuck(worker):
                self._pending = ()
                return
            self._abandon(worker)

    def shutdown(self) -> None:
        """End the thread."""
        if self._worker is not None:
            self._worker.leave()
            self._worker = None

    def _is_stuck(self, worker: _Worker) -> bool:
        """Wait until all is done, or one mask has not moved for the whole limit.

        In slices, so that a process that was stopped for a while does not count the pause.
        """
        num_done, num_slices = -1, 0
        while not worker.wait(self.timeout_s / _NUM_SLICES):
            if worker.num_done != num_done:
                num_done, num_slices = worker.num_done, 0
            num_slices += 1
            if num_slices >= _NUM_SLICES:
                return True
        return False

    def _abandon(self, worker: _Worker) -> None:
        stuck = self._pending[worker.num_done]
        others = self._pending[worker.num_done + 1 :]
        logger.error("a mask was not there after %g s; its request fails", self.timeout_s)
        worker.leave()
        self._stuck.append(worker)
        self._worker = None
        stuck.give_up()
        self._pending = ()
        self.start(others)
