"""Masks computed beside the step, each within a time limit."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence

from caudal.structured_output.constraint import Constraint, ConstraintError, fill_masks
from caudal.structured_output.limits import MASK_TIMEOUT_S, MAX_STUCK_MASKS

logger = logging.getLogger(__name__)

_NUM_SLICES = 10
_FEW = 4
_MAX_GROUP = 32
"""Masks of one call, which must all be there within the limit for one."""
UNAVAILABLE = "the form of the output cannot be enforced until the server is started again"


class _Worker:
    """A thread and the two locks through which it is given work and tells that it is done."""

    def __init__(self) -> None:
        self._wake = threading.Lock()
        self._begun = threading.Lock()
        self._finished = threading.Lock()
        for lock in (self._wake, self._begun, self._finished):
            lock.acquire()
        from llguidance import LLExecutor

        self._executor = LLExecutor(1)
        self._groups: Sequence[Sequence[Constraint]] = ()
        self._is_leaving = False
        self._tells_begin = False
        self.num_done = 0
        # A computation that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="caudal-masks", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self, groups: Sequence[Sequence[Constraint]], *, tells_begin: bool) -> None:
        """Have the masks of `groups` computed; returns at once or when that has begun."""
        self._groups = groups
        self._tells_begin = tells_begin
        self.num_done = 0
        self._wake.release()
        if self._tells_begin:
            self._begun.acquire()

    def wait(self, seconds: float) -> bool:
        """Whether all masks are there, after waiting for at most that long."""
        return self._finished.acquire(timeout=seconds)

    def leave(self) -> None:
        """End the thread after the mask that it computes now."""
        self._is_leaving = True
        self._groups = ()
        self._wake.release()

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            if self._is_leaving:
                return
            if self._tells_begin:
                self._begun.release()
            for constraints in self._groups:
                fill_masks(self._executor, constraints)
                if self._is_leaving:
                    return
                self.num_done += 1
            self._finished.release()


class MaskThread:
    """Fills the masks of constraints, one grammar after the other.

    Between `start` and the end of `wait` their matchers belong to the thread. A grammar that takes
    longer than `timeout_s` is left to itself together with its thread, and another thread goes on.
    """

    def __init__(self, timeout_s: float = MASK_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._worker: _Worker | None = None
        self._stuck: list[_Worker] = []
        self._pending: Sequence[Sequence[Constraint]] = ()

    def start(self, constraints: Sequence[Constraint]) -> None:
        """Begin the masks of `constraints`, after those begun before.

        Without a sign that they have begun the thread would wait for the interpreter until the
        forward pass. A few masks take less time beside it than waking the thread takes.
        """
        if self._pending:
            self.wait()
        self._start(_by_grammar(constraints), tells_begin=len(constraints) > _FEW)

    def fill(self, constraints: Sequence[Constraint]) -> None:
        """`start` and `wait`."""
        if self._pending:
            self.wait()
        self._start(_by_grammar(constraints), tells_begin=False)
        self.wait()

    def _start(self, groups: Sequence[Sequence[Constraint]], *, tells_begin: bool) -> None:
        if not groups:
            return
        self._stuck = [worker for worker in self._stuck if worker.is_alive]
        if len(self._stuck) >= MAX_STUCK_MASKS:
            for constraint in itertools.chain(*groups):
                constraint.mask_error = ConstraintError(UNAVAILABLE)
            return
        if self._worker is None:
            self._worker = _Worker()
        self._pending = groups
        self._worker.start(groups, tells_begin=tells_begin)

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
        logger.error("masks were not there after %g s; their requests fail", self.timeout_s)
        worker.leave()
        self._stuck.append(worker)
        self._worker = None
        stuck[0].give_up()
        self._pending = ()
        self._start(others, tells_begin=False)


def _by_grammar(constraints: Sequence[Constraint]) -> list[Sequence[Constraint]]:
    groups: dict[int, list[Constraint]] = {}
    for constraint in constraints:
        groups.setdefault(id(constraint.grammar), []).append(constraint)
    return [
        group[begin : begin + _MAX_GROUP]
        for group in groups.values()
        for begin in range(0, len(group), _MAX_GROUP)
    ]
