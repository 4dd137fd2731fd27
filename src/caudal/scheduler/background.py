"""How long a step may take once offline work joins it."""

from __future__ import annotations

from caudal.config import SchedulerConfig
from caudal.scheduler.service_class import ServiceClass
from caudal.scheduler.step_cost import StepCostModel

HARM_SHARE = 0.01
"""Idle work may make a step of interactive requests longer by this share."""
NEWCOMER_SHARE = 0.03
"""Share of the TTFT target that a step without interactive requests may take: at worst, a newcomer
waits for one such step."""
INTERRUPTIBLE_SHARE = 0.1
"""Share that such a step may take where it ends early for a newcomer."""
INTERRUPTED_FACTOR, COMPLETED_FACTOR = 0.5, 1.05
"""How that changes with each step: what has been computed of an interrupted one is lost."""
MAX_INTERRUPTIONS = 3
"""In a row. The next step is as short as one that cannot be interrupted, and is not."""
MIN_STEP_FACTOR = 2.0
"""Where even one row takes longer than that, such a step may take so many times a single row's
time: on slow machines a row more costs little beside the step itself."""
SEAT_RESERVE = 8
"""One in so many seats stays free of background requests, so that newcomers rarely preempt one."""


class BackgroundPolicy:
    """Turns the latency targets into limits for steps with background rows."""

    def __init__(
        self, config: SchedulerConfig, cost: StepCostModel, target_ms: float | None, num_seats: int
    ) -> None:
        """`target_ms` bounds a step with interactive rows (None: nothing does)."""
        self._cost = cost
        self._target_ms = target_ms
        self._ttft_ms = config.ttft_ms
        self._share = NEWCOMER_SHARE
        self._num_interruptions = 0
        self.can_interrupt = False
        """Whether steps without interactive requests end early for newcomers."""
        self.max_running = max(1, num_seats - -(-num_seats // SEAT_RESERVE))

    def step_ms(self, service: ServiceClass, foreground_ms: float | None) -> float:
        """Milliseconds that a step may be predicted to take.

        `foreground_ms` is the step's prediction without background rows, None if it has no others.
        """
        urgent_ms = 0.0
        if service is ServiceClass.URGENT:
            urgent_ms = float("inf") if self._target_ms is None else self._target_ms
        if foreground_ms is not None:
            if self._target_ms is None:
                return float("inf")
            return max(foreground_ms * (1 + HARM_SHARE), urgent_ms)
        if self._ttft_ms is None:
            return float("inf")
        least_ms = MIN_STEP_FACTOR * self._cost.predict(1, 0, 0)
        return max(self._ttft_ms * self._share, least_ms, urgent_ms)

    @property
    def is_interruptible(self) -> bool:
        """Whether a step without interactive requests may end early."""
        has_targets = self._ttft_ms is not None
        return self.can_interrupt and has_targets and self._num_interruptions < MAX_INTERRUPTIONS

    def note_step(self, *, was_interrupted: bool) -> None:
        """A step without interactive requests has ended, as foreseen or early."""
        if not self.can_interrupt:
            return
        self._num_interruptions = self._num_interruptions + 1 if was_interrupted else 0
        factor = INTERRUPTED_FACTOR if was_interrupted else COMPLETED_FACTOR
        self._share = min(INTERRUPTIBLE_SHARE, max(NEWCOMER_SHARE, self._share * factor))
