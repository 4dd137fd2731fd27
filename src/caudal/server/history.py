"""The history's thread: per-minute aggregates to and from SQLite, off the event loop."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from caudal.metrics.history_columns import make_row
from caudal.metrics.history_store import HistoryStore
from caudal.metrics.reading import Aggregate

logger = logging.getLogger("caudal.server")

T = TypeVar("T")

MAX_ROWS = 720
MINUTE_S = 60
WINDOWS_S = {"1h": 3600, "24h": 86_400, "7d": 7 * 86_400, "30d": 30 * 86_400}
STEPS_S = (60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400)
"""Seconds that a row may stand for."""


def choose_step(window: str, asked: int | None) -> int:
    """The smallest of `STEPS_S` that is not below `asked` and fits the window into 720 rows."""
    least = max(asked or 0, WINDOWS_S[window] / MAX_ROWS)
    return next(step for step in STEPS_S if step >= least)


class HistoryKeeper:
    """Owns the database and the one thread that touches it.

    A file that cannot be read is moved aside. Where the directory cannot be used, or another
    server records into it, the history lives in memory.
    """

    def __init__(self, directory: Path, days: int) -> None:
        self._directory = directory
        self._keep_s = days * 86_400
        self._pool = ThreadPoolExecutor(1, "caudal-history")
        self._store: HistoryStore | None = None
        self._lock: int | None = None
        self._is_failing = False
        self.is_kept = True
        """False: in memory."""
        self._pool.submit(self._open)

    def put(self, start: int, minute: Aggregate) -> None:
        """Write the minute that began at `start` (seconds since the epoch), later."""
        self._pool.submit(self._put, start, minute)

    def table(
        self, window: str, step: int, current: tuple[int, Aggregate] | None
    ) -> Future[list[list[float | None]]]:
        """Rows of `COLUMNS` of the window up to now, `current` (not written yet) included."""
        return self._pool.submit(self._table, WINDOWS_S[window], step, current)

    def encoded(self, seconds: int, current: tuple[int, Aggregate] | None) -> Future[bytes]:
        """MessagePack of (start, Aggregate) rows up to now; of minutes, if that is a week or less.

        Costs little: the rows go as they are stored, for another process to decode.
        """
        return self._pool.submit(self._encoded, seconds, current)

    def close(self) -> None:
        """Finish writing and release the file; blocks for as long as that takes."""
        self._pool.submit(self._close)
        self._pool.shutdown(wait=True)

    def _open(self) -> None:
        try:
            self._store = self._open_file()
        except (OSError, sqlite3.Error) as error:
            logger.warning("the history is kept in memory only: %s", error)
            self.is_kept = False
            self._store = HistoryStore(":memory:", self._keep_s)

    def _open_file(self) -> HistoryStore:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._directory / "history.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise OSError("another server records into this data directory") from None
        self._lock = lock
        path = self._directory / "history.sqlite3"
        try:
            return HistoryStore(path, self._keep_s)
        except sqlite3.DatabaseError as error:
            aside = path.with_name(f"history.broken-{time.time_ns() // 1_000_000}.sqlite3")
            logger.warning("the history cannot be read (%s); moved aside: %s", error, aside.name)
            path.rename(aside)
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            return HistoryStore(path, self._keep_s)

    def _put(self, start: int, minute: Aggregate) -> None:
        assert self._store is not None
        try:
            self._store.put(start, minute)
        except sqlite3.Error as error:
            if not self._is_failing:
                logger.warning("a minute of the history could not be written: %s", error)
            self._is_failing = True
        else:
            self._is_failing = False

    def _table(
        self, seconds: int, step: int, current: tuple[int, Aggregate] | None
    ) -> list[list[float | None]]:
        assert self._store is not None
        now = int(time.time())
        first = (now - seconds) // step * step + step
        stretches = self._store.stretches(first, step)
        if current is not None:
            start, minute = current
            merged = stretches.setdefault(start // step * step, Aggregate())
            merged.add(minute)
        return [make_row(start, stretches[start]) for start in sorted(stretches) if start >= first]

    def _encoded(self, seconds: int, current: tuple[int, Aggregate] | None) -> bytes:
        assert self._store is not None
        first = int(time.time()) - seconds
        stored = self._store.encoded(first, is_coarse=seconds > WINDOWS_S["7d"])
        rows: list[tuple[int, msgspec.Raw | Aggregate]] = [*stored]
        if current is not None:
            start, minute = current
            if stored and stored[-1][0] == start:
                minute = msgspec.msgpack.decode(stored[-1][1], type=Aggregate)
                minute.add(current[1])
                rows.pop()
            rows.append((start, minute))
        return msgspec.msgpack.encode(rows)

    def _close(self) -> None:
        if self._store is not None:
            with contextlib.suppress(sqlite3.Error):
                self._store.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
