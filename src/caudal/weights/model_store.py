"""The cache of model files: which are complete, who may write, what their checksums are.

Beside each file lies a note with its size, modification time and SHA-256. A file that matches its
note was verified when it was stored and is not hashed again at every start.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from caudal.weights.progress import Progress

_CHUNK_BYTES = 1 << 20
_LOCK_NAME = ".lock"
_SCRATCH_PREFIX = ".partial-"


@dataclass(frozen=True, slots=True)
class FileNote:
    """What a file was when it was verified."""

    size: int
    mtime_ns: int
    sha256: str


def note_path(path: Path) -> Path:
    """Where the note of the model file `path` is kept."""
    return path.with_name(path.name + ".note.json")


def read_note(path: Path) -> FileNote | None:
    """The note of `path`; None if there is none or it is unreadable."""
    fields = read_json(note_path(path))
    try:
        return FileNote(int(fields["size"]), int(fields["mtime_ns"]), str(fields["sha256"]))
    except (KeyError, TypeError, ValueError):
        return None


def write_note(path: Path, sha256: str) -> None:
    """Record that `path` as it is now has the checksum `sha256`."""
    stat = path.stat()
    write_json(note_path(path), asdict(FileNote(stat.st_size, stat.st_mtime_ns, sha256)))


def is_intact(path: Path, sha256: str | None = None) -> bool:
    """Whether `path` is unchanged since it was verified (to be `sha256`, when given).

    Looks at the file's size and time only, not at its content.
    """
    note = read_note(path)
    if note is None or (sha256 is not None and note.sha256 != sha256):
        return False
    try:
        stat = path.stat()
    except OSError:
        return False
    return (stat.st_size, stat.st_mtime_ns) == (note.size, note.mtime_ns)


def discard(path: Path) -> None:
    """Remove a model file and its note, the note first: a file without one is never trusted."""
    note_path(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def hash_file(path: Path, progress: Progress) -> str:
    """SHA-256 of `path`, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        progress.begin(f"checking {path.name}", path.stat().st_size)
        try:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                progress.advance(len(chunk))
        finally:
            progress.end()
    return digest.hexdigest()


@contextlib.contextmanager
def locked(directory: Path, progress: Progress) -> Iterator[Path]:
    """Hold the exclusive right to change `directory`; yields an empty scratch directory in it.

    Waits for another process that holds it. The lock ends with its process, however that ends;
    what a killed process left in the scratch directory is removed first.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.note(f"waiting for another process that is writing to {directory}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        for leftover in directory.glob(f"{_SCRATCH_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        # A new name each time: a downloader that outlived its killed parent cannot write here.
        with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=directory) as scratch:
            yield Path(scratch)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty if it is missing or not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace `path` atomically."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
