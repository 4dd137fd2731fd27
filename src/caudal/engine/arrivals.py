"""How the server breaks into steps of offline work: a counter that both processes see."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from caudal.step_io import Interrupt

_MASK = (1 << 32) - 1


class Arrivals:
    """Requests that somebody waits for: how many are announced, and how many have come.

    The server announces a request before it sends it. While the engine has taken fewer than are
    announced, `interrupt` is due. A count that gets lost between two writers only costs a wait.
    """

    def __init__(self, path: Path) -> None:
        """Map the counter in the file at `path`, which `create` has made."""
        with path.open("r+b") as file:
            self._count = np.frombuffer(mmap.mmap(file.fileno(), 4), np.uint32)
        self._num_taken = 0

    @classmethod
    def create(cls, path: Path) -> Arrivals:
        """Make the file of a new counter."""
        path.write_bytes(bytes(4))
        return cls(path)

    @property
    def num_pending(self) -> int:
        """Announced requests that have not come (modulo 2^32)."""
        return (int(self._count[0]) - self._num_taken) & _MASK

    def announce(self) -> None:
        """The sender's side: one is about to come."""
        self._count[0] = (int(self._count[0]) + 1) & _MASK

    def take(self) -> None:
        """The engine's side: one has come."""
        self._num_taken = (self._num_taken + 1) & _MASK

    def forget_pending(self) -> None:
        """Those that have not come never will."""
        self._num_taken = int(self._count[0])

    def interrupt(self) -> Interrupt:
        """Due as soon as another one is announced, or if one is under way."""
        return Interrupt(self._count, self._num_taken)
