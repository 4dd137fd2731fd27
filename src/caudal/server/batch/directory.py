"""The data directory: one owner at a time, contents of files, and what is durable when.

    lock              held (flock) by the server that uses the directory
    caudal.sqlite3    records, in WAL mode
    files/ID          contents: inputs once complete, results while they grow
    uploads/ID        inputs on their way in

Order of writes: a content is on the disk (fsync of the file, then of its folder) before the record
that names it is committed, and a record is gone before its content is.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Container
from pathlib import Path

from caudal.errors import ConfigError


class DataDirectory:
    """Owns a folder for files and batches while open."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock: int | None = None

    @property
    def database(self) -> Path:
        """Where the records are."""
        return self.root / "caudal.sqlite3"

    @property
    def has_records(self) -> bool:
        """Whether a server has kept anything here before."""
        return self.database.exists()

    def open(self) -> None:
        """Make the folders and lock them; the leftovers of broken uploads go.

        Raises ConfigError if another server uses the directory or it cannot be written.
        """
        try:
            for folder in (self.root, self.root / "files", self.root / "uploads"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"--data-dir: cannot use {self.root}: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise ConfigError(
                f"--data-dir: {self.root} is in use by another server; give this one its own"
            ) from None
        self._lock = lock
        shutil.rmtree(self.root / "uploads", ignore_errors=True)
        (self.root / "uploads").mkdir(mode=0o700)

    def close(self) -> None:
        """Let another server have the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def upload_path(self, file_id: str) -> Path:
        """Where the content of a file grows that a client is sending."""
        return self.root / "uploads" / file_id

    def content_path(self, file_id: str) -> Path:
        """Where the content of a file is."""
        return self.root / "files" / file_id

    def keep_upload(self, file_id: str) -> None:
        """Move a complete (and synced) upload among the files, durably."""
        os.replace(self.upload_path(file_id), self.content_path(file_id))
        self.sync_files()

    def sync_files(self) -> None:
        """Make the names in `files/` durable."""
        folder = os.open(self.root / "files", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def delete_content(self, file_id: str) -> None:
        """Delete a content if it exists."""
        self.content_path(file_id).unlink(missing_ok=True)

    def delete_unknown(self, known: Container[str]) -> None:
        """Delete contents whose record was never committed or is gone."""
        for path in (self.root / "files").iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)
