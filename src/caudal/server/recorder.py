"""Reads the instruments each second: for the last minute in memory, and for the history."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from caudal.config import default_data_dir
from caudal.metrics.machine import Machine
from caudal.metrics.reading import Aggregate, Collector, Reading, between, read

if TYPE_CHECKING:
    from caudal.server.history import HistoryKeeper
    from caudal.server.state import AppState

logger = logging.getLogger("caudal.server")

INTERVAL_S = 1.0
MINUTE_S = 60
RATE_WINDOW_S = 10.0
WRITE_S = 10
"""A killed server loses what has happened since it last wrote: at most so many seconds."""


class Recorder:
    """Owns the readings of the last minute and the history's thread. Lives on the event loop."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._machine = Machine()
        self.started = time.time()
        self._readings: deque[Reading] = deque(maxlen=MINUTE_S + 1)
        self._collector = Collector()
        self._task: asyncio.Task[None] | None = None
        self._keeper: HistoryKeeper | None = None
        self._period = int(self.started) // WRITE_S
        self._collector.note(self._note())

    def start(self) -> None:
        """Read each second from now on, and keep the history if the configuration wants it."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Write what the current minute has so far, and let go of the file."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self.tick()
        self._write()
        if self._keeper is not None:
            await asyncio.to_thread(self._keeper.close)
            self._keeper = None

    @property
    def keeper(self) -> HistoryKeeper | None:
        """Where past minutes are; None: the configuration wants no history."""
        config = self._state.config
        if self._keeper is None and config.enable_history:
            from caudal.server.history import HistoryKeeper

            directory = config.data_dir or default_data_dir()
            self._keeper = HistoryKeeper(directory, config.history_days)
        return self._keeper

    def current_minute(self) -> tuple[int, Aggregate] | None:
        """Where the minute that is not over began, and what has happened since."""
        now = self._note()
        taken = self._collector.peek(now)
        return None if taken is None else (int(now.time) // MINUTE_S * MINUTE_S, taken)

    def recent(self, seconds: float) -> Aggregate:
        """What happened in the last `seconds`, at most about a minute."""
        last = self._note()
        first = self._readings[0]
        for reading in islice(reversed(self._readings), 1, None):
            first = reading
            if last.time - reading.time >= seconds - INTERVAL_S / 2:
                break
        return between(first, last)

    def tick(self) -> None:
        """Take a reading for the history, and write now and then."""
        reading = self._note()
        self._collector.note(reading)
        period = int(reading.time) // WRITE_S
        if period != self._period:
            self._write()
            self._period = period

    def _note(self) -> Reading:
        """A reading of now; those that come within the same interval replace each other."""
        reading = read(self._state, self._machine.read(), time.time())
        readings = self._readings
        if len(readings) > 1 and reading.time - readings[-2].time < INTERVAL_S / 2:
            readings.pop()
        readings.append(reading)
        return reading

    async def _run(self) -> None:
        keeper = self.keeper
        while True:
            await asyncio.sleep(INTERVAL_S - time.time() % INTERVAL_S)
            try:
                self.tick()
            except Exception:
                logger.exception("a reading of the metrics failed")
                if keeper is None:
                    return

    def _write(self) -> None:
        """Hand what has happened since the last time to its minute in the history."""
        taken = self._collector.take()
        if taken is not None and self._keeper is not None:
            self._keeper.put(self._period * WRITE_S // MINUTE_S * MINUTE_S, taken)
