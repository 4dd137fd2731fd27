"""Records of files and batches in SQLite. Every method is one transaction on one thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from caudal.errors import InvalidRequestError
from caudal.server.batch.records import TERMINAL, BatchRecord, FileRecord, Page

SCHEMA_VERSION = 1
TOMBSTONE_S = 24 * 3600
"""How long a deleted file's row stays, so that a list can be paged while its files are deleted."""

_SCHEMA = """
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    deleted_at REAL,
    has_content INTEGER NOT NULL DEFAULT 1
);
CREATE INDEX files_by_owner ON files (owner, seq);
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    status TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    record BLOB NOT NULL
);
CREATE INDEX batches_by_owner ON batches (owner, seq);
CREATE INDEX batches_by_status ON batches (status);
"""
_FILE_COLUMNS = "id, owner, purpose, filename, num_bytes, created_at, expires_at"
_TERMINAL = ", ".join(f"'{status}'" for status in TERMINAL)
_IS_ACTIVE = f"status NOT IN ({_TERMINAL})"


class BatchStore:
    """Owns the database file. Use it from the thread that made it.

    Each commit is on the disk before it returns (WAL with synchronous=FULL).
    """

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            script = f"BEGIN; {_SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;"
            self._connection.executescript(script)
        elif version != SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"the records have the unknown version {version}")

    def close(self) -> None:
        """Fold the log into the database and let go of it."""
        self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def insert_file(self, record: FileRecord) -> None:
        """Add a file whose content is in place."""
        with self._transaction() as connection:
            _insert_file(connection, record)

    def get_file(self, owner: str, file_id: str, now: float) -> FileRecord | None:
        """A file of `owner` that is neither deleted nor expired."""
        rows = self._connection.execute(
            f"SELECT {_FILE_COLUMNS} FROM files WHERE id = ? AND owner = ? AND deleted_at IS NULL "
            "AND (expires_at IS NULL OR expires_at > ?)",
            (file_id, owner, now),
        )
        row = rows.fetchone()
        return None if row is None else _file_record(row)

    def stored_bytes(self, owner: str) -> int:
        """Bytes that the files of `owner` take on the disk."""
        rows = self._connection.execute(
            "SELECT COALESCE(SUM(num_bytes), 0) FROM files WHERE owner = ? AND has_content",
            (owner,),
        )
        total: int = rows.fetchone()[0]
        return total

    def list_files(self, owner: str, page: Page, now: float) -> tuple[list[FileRecord], bool]:
        """A page of the files of `owner`, and whether more follow.

        Raises InvalidRequestError if `page.after` is no file of `owner`.
        """
        condition = "owner = ? AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > ?)"
        values: list[Any] = [owner, now]
        if page.purpose is not None:
            condition += " AND purpose = ?"
            values.append(page.purpose)
        rows = self._list("files", _FILE_COLUMNS, owner, page, (condition, values))
        return [_file_record(row) for row in rows[: page.limit]], len(rows) > page.limit

    def delete_file(self, owner: str, file_id: str, now: float) -> bool:
        """Hide a file; its content stays until no batch reads it. False if there is none."""
        if self.get_file(owner, file_id, now) is None:
            return False
        with self._transaction() as connection:
            connection.execute("UPDATE files SET deleted_at = ? WHERE id = ?", (now, file_id))
        return True

    def take_unused_files(self, now: float) -> list[str]:
        """Ids whose contents nobody needs any more; the caller deletes them."""
        with self._transaction() as connection:
            connection.execute(
                "UPDATE files SET deleted_at = ? WHERE deleted_at IS NULL AND expires_at <= ?",
                (now, now),
            )
            connection.execute("DELETE FROM files WHERE deleted_at < ?", (now - TOMBSTONE_S,))
            rows = connection.execute(
                "UPDATE files SET has_content = 0 WHERE deleted_at IS NOT NULL AND has_content "
                f"AND id NOT IN (SELECT input_file_id FROM batches WHERE {_IS_ACTIVE}) "
                "RETURNING id"
            ).fetchall()
        return [row[0] for row in rows]

    def needed_contents(self) -> set[str]:
        """Ids of all contents that a record refers to, growing results included."""
        rows = self._connection.execute("SELECT id FROM files WHERE has_content")
        needed = {row[0] for row in rows}
        for record in self.active_batches():
            needed |= {record.input_file_id, record.output_file_id, record.error_file_id}
        return needed

    def insert_batch(self, record: BatchRecord) -> None:
        """Add a batch."""
        with self._transaction() as connection:
            connection.execute(
                "INSERT INTO batches (id, owner, status, input_file_id, record) VALUES (?,?,?,?,?)",
                (record.id, record.owner, record.status, record.input_file_id, _encode(record)),
            )

    def update_batch(self, record: BatchRecord, results: Sequence[FileRecord] = ()) -> None:
        """Write a batch's record and, with its end, the files that hold its results."""
        with self._transaction() as connection:
            connection.execute(
                "UPDATE batches SET status = ?, record = ? WHERE id = ?",
                (record.status, _encode(record), record.id),
            )
            for file in results:
                _insert_file(connection, file)

    def get_batch(self, owner: str, batch_id: str) -> BatchRecord | None:
        """A batch of `owner`."""
        rows = self._connection.execute(
            "SELECT record FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)
        )
        row = rows.fetchone()
        return None if row is None else _decode(row[0])

    def list_batches(self, owner: str, page: Page) -> tuple[list[BatchRecord], bool]:
        """A page of the batches of `owner`, and whether more follow.

        Raises InvalidRequestError if `page.after` is no batch of `owner`.
        """
        rows = self._list("batches", "record", owner, page, ("owner = ?", [owner]))
        return [_decode(row[0]) for row in rows[: page.limit]], len(rows) > page.limit

    def active_batches(self) -> list[BatchRecord]:
        """Every batch that has not ended, the oldest first."""
        rows = self._connection.execute(
            f"SELECT record FROM batches WHERE {_IS_ACTIVE} ORDER BY seq"
        )
        return [_decode(row[0]) for row in rows]

    def _list(
        self,
        table: str,
        columns: str,
        owner: str,
        page: Page,
        where: tuple[str, list[Any]],
    ) -> list[tuple[Any, ...]]:
        condition, values = where
        sign, order = (">", "ASC") if page.is_ascending else ("<", "DESC")
        if page.after is not None:
            rows = self._connection.execute(
                f"SELECT seq FROM {table} WHERE id = ? AND owner = ?", (page.after, owner)
            )
            row = rows.fetchone()
            if row is None:
                raise InvalidRequestError(
                    f"after: there is no {page.after!r}.", param="after", code="invalid_value"
                )
            condition += f" AND seq {sign} ?"
            values = [*values, row[0]]
        query = f"SELECT {columns} FROM {table} WHERE {condition} ORDER BY seq {order} LIMIT ?"
        return self._connection.execute(query, (*values, page.limit + 1)).fetchall()


def _insert_file(connection: sqlite3.Connection, record: FileRecord) -> None:
    connection.execute(
        f"INSERT INTO files ({_FILE_COLUMNS}) VALUES (?,?,?,?,?,?,?)",
        msgspec.structs.astuple(record),
    )


def _file_record(row: tuple[Any, ...]) -> FileRecord:
    fields = zip(FileRecord.__struct_fields__, row, strict=True)
    return FileRecord(**dict(fields))


def _encode(record: BatchRecord) -> bytes:
    return msgspec.json.encode(record)


def _decode(data: bytes) -> BatchRecord:
    return msgspec.json.decode(data, type=BatchRecord)
