"""How urgent a request is beside others; within a class, priority and arrival decide."""

from __future__ import annotations

from enum import IntEnum

PRIORITY_BAND = 1 << 35
"""Distance between the priorities of two classes: more than callers can give."""


class ServiceClass(IntEnum):
    """Smaller goes first; a smaller class never waits for a row, a block or a token of a larger."""

    INTERACTIVE = 0
    """Somebody waits for it; latency targets hold."""
    LATE = 1
    """Offline work about to miss its deadline: as interactive, after all that are."""
    URGENT = 2
    """Offline work behind its schedule: fills steps up to the targets."""
    IDLE = 3
    """Offline work that only takes what costs interactive requests next to nothing."""

    @property
    def is_background(self) -> bool:
        """Whether it yields rows, blocks and time to other requests."""
        return self >= ServiceClass.URGENT

    @property
    def end_priority(self) -> int:
        """Above all priorities of the class, below those of the next."""
        return self * PRIORITY_BAND + PRIORITY_BAND // 2
