"""Minutes of metrics in SQLite, and quarters of an hour so that a month is read fast.

    minutes   start (seconds since the epoch) -> Aggregate, MessagePack
    quarters  the same over 900 s, made of complete quarters' minutes; they can be made again

The file is bounded: minutes and quarters beyond the horizon are deleted as new ones come.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from caudal.metrics.reading import Aggregate

SCHEMA_VERSION = 1
QUARTER_S = 900
BUSY_TIMEOUT_S = 5.0

_SCHEMA = """
CREATE TABLE minutes (start INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE quarters (start INTEGER PRIMARY KEY, data BLOB NOT NULL);
"""


class HistoryStore:
    """Owns the database. Use it from the thread that made it.

    Loses at most the minutes of the last seconds when the machine loses power, none when the
    process is killed (WAL, synchronous=NORMAL).
    """

    def __init__(self, path: Path | str, keep_s: int) -> None:
        """Open or make the file. Raises sqlite3.DatabaseError if it is not such a file."""
        self._keep_s = keep_s
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Aggregate)
        self._connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        execute = self._connection.execute
        execute("PRAGMA journal_mode=WAL")
        execute("PRAGMA synchronous=NORMAL")
        execute("PRAGMA journal_size_limit=1048576")
        version = execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            script = f"BEGIN; {_SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;"
            self._connection.executescript(script)
        elif version != SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"it has the unknown version {version}")
        problem = execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(problem)
        for _, data in execute("SELECT start, data FROM minutes ORDER BY start DESC LIMIT 1"):
            self._decode(data)
        self._roll_up(int(time.time()))

    def close(self) -> None:
        """Fold the log into the file and let go of it."""
        self._connection.close()

    def put(self, start: int, minute: Aggregate) -> None:
        """Add a minute; one that is there already (a restart within it) takes the new one in."""
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            row = connection.execute("SELECT data FROM minutes WHERE start = ?", (start,))
            found = row.fetchone()
            if found is not None:
                earlier = self._decode(found[0])
                earlier.add(minute)
                minute = earlier
            data = self._encoder.encode(minute)
            connection.execute("INSERT OR REPLACE INTO minutes VALUES (?, ?)", (start, data))
            oldest = start - self._keep_s
            for table in ("minutes", "quarters"):
                connection.execute(f"DELETE FROM {table} WHERE start < ?", (oldest,))
            self._roll_up(start)
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")

    def stretches(self, first: int, step: int) -> dict[int, Aggregate]:
        """What happened from `first` on, by stretches of `step` seconds."""
        found: dict[int, Aggregate] = {}
        source, begin = self._read(first), first
        if step % QUARTER_S == 0:
            begin = self._next_quarter()
            source = self._read(first, "quarters")
        for start, aggregate in source:
            found.setdefault(start // step * step, Aggregate()).add(aggregate)
        if step % QUARTER_S == 0:
            for start, aggregate in self._read(max(first, begin)):
                found.setdefault(start // step * step, Aggregate()).add(aggregate)
        return found

    def encoded(self, first: int, *, is_coarse: bool) -> list[tuple[int, msgspec.Raw]]:
        """Minutes from `first` on as they are stored: MessagePack of an Aggregate each.

        `is_coarse`: quarters of an hour, and the minutes of the one that is not over.
        """
        rows: list[tuple[int, bytes]] = []
        query = "SELECT start, data FROM {} WHERE start >= ? ORDER BY start"
        if is_coarse:
            rows += self._connection.execute(query.format("quarters"), (first,))
            first = max(first, self._next_quarter())
        rows += self._connection.execute(query.format("minutes"), (first,))
        return [(start, msgspec.Raw(data)) for start, data in rows]

    def _read(self, first: int, table: str = "minutes") -> Iterator[tuple[int, Aggregate]]:
        query = f"SELECT start, data FROM {table} WHERE start >= ? ORDER BY start"
        for start, data in self._connection.execute(query, (first,)):
            yield start, self._decode(data)

    def _next_quarter(self) -> int:
        """Where the first quarter begins that is not rolled up."""
        last = self._connection.execute("SELECT max(start) FROM quarters").fetchone()[0]
        return 0 if last is None else last + QUARTER_S

    def _roll_up(self, now: int) -> None:
        """Make the quarters that are over by `now`."""
        begin, end = self._next_quarter(), now // QUARTER_S * QUARTER_S
        query = "SELECT start, data FROM minutes WHERE start >= ? AND start < ? ORDER BY start"
        quarters: dict[int, Aggregate] = {}
        for start, data in self._connection.execute(query, (begin, end)):
            quarter = quarters.setdefault(start // QUARTER_S * QUARTER_S, Aggregate())
            quarter.add(self._decode(data))
        rows = [(start, self._encoder.encode(quarter)) for start, quarter in quarters.items()]
        self._connection.executemany("INSERT OR REPLACE INTO quarters VALUES (?, ?)", rows)

    def _decode(self, data: bytes) -> Aggregate:
        try:
            return self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise sqlite3.DatabaseError(f"a row cannot be decoded: {error}") from None
