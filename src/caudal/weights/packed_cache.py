"""Packed weights kept between starts: the next start maps them instead of packing again."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caudal.errors import ModelFileError
from caudal.ops.interface import LinearWeight, PackedSegment, PackingBackend
from caudal.weights.gguf import GGUFFile
from caudal.weights.packed_file import PackedFile, open_packed, write_packed

logger = logging.getLogger(__name__)

_SUFFIX = ".packed"
_PARTIAL = ".partial-"
_LOCK_NAME = ".lock"
_STORE_DELAY_S = 1.0
"""Lets the first requests pass before the disk is busy."""
_NICENESS = 19


@dataclass(frozen=True, slots=True)
class Entry:
    """Where weights are kept, of which model, and for which kernels."""

    path: Path
    model: str
    """Fingerprint of the model file."""
    layout: str


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """What the cache may take; the oldest entries go first."""

    max_total_bytes: int = 32 << 30
    """Of all entries but the newest."""
    max_entries_per_model: int = 2
    """Of one model file: other kernels, other versions."""
    min_free_bytes: int = 1 << 30
    """On the disk, after writing."""
    min_weights_bytes: int = 16 << 20
    """Smaller models load as fast without."""


class PackedCache:
    """Owns the entries in one directory, which several processes may share.

    An entry is written under another name and renamed when it is complete, so readers never see
    half of one; a lock lets one process write at a time. Failures cost time, never a start.
    """

    def __init__(self, directory: Path, limits: CacheLimits | None = None) -> None:
        self._directory = directory
        self._limits = limits or CacheLimits()

    def open(self, gguf: GGUFFile, backend: PackingBackend) -> PackedWeights | None:
        """What is kept of `gguf` for the kernels of `backend`; None for a model too small to keep.

        A damaged entry is removed with a warning.
        """
        if sum(tensor.nbytes for tensor in gguf.tensors.values()) < self._limits.min_weights_bytes:
            return None
        try:
            layout = backend.packed_layout()
            path = self._directory / entry_name(gguf.path, layout)
            entry = Entry(path, gguf.fingerprint(), layout)
            return PackedWeights(self, backend, entry, self._load(entry))
        except OSError as error:
            logger.warning("packed weights cannot be kept: %s", error)
            return None

    def _load(self, entry: Entry) -> PackedFile | None:
        try:
            file = open_packed(entry.path, entry.model, entry.layout)
        except ModelFileError as error:
            logger.warning("packed weights are made anew: %s", error)
            entry.path.unlink(missing_ok=True)
            return None
        if file is not None:
            logger.info("packed weights %s", "mapped" if file.is_mapped else "read")
        return file

    def store(self, entry: Entry, weights: dict[str, list[PackedSegment]]) -> bool:
        """Write an entry and remove those beyond the limits; False if another process writes.

        Raises OSError; nothing is left behind then.
        """
        num_bytes = sum(s.blocks.nbytes for segments in weights.values() for s in segments)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _try_lock(self._directory) as is_locked:
            if not is_locked:
                return False
            for leftover in self._directory.glob(f"{_PARTIAL}*"):
                leftover.unlink(missing_ok=True)
            self._make_room(entry.path, num_bytes)
            partial = self._directory / f"{_PARTIAL}{secrets.token_hex(8)}"
            try:
                write_packed(partial, weights, model=entry.model, layout=entry.layout)
                partial.replace(entry.path)
            finally:
                partial.unlink(missing_ok=True)
        return True

    def _make_room(self, path: Path, num_bytes: int) -> None:
        """Remove entries beyond the limits, oldest use first, never the one at `path`."""
        entries = []
        for entry in self._directory.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                stat = entry.stat()
                entries.append((stat.st_atime_ns, stat.st_size, entry))
        entries = sorted((e for e in entries if e[2] != path), reverse=True)
        total, num_of_model = 0, 1
        for _, size, entry in entries:
            is_same_model = _model_part(entry) == _model_part(path)
            num_of_model += is_same_model
            total += size
            if total > self._limits.max_total_bytes or (
                is_same_model and num_of_model > self._limits.max_entries_per_model
            ):
                entry.unlink(missing_ok=True)
                total -= size
        free = shutil.disk_usage(self._directory).free
        if free - num_bytes < self._limits.min_free_bytes:
            raise OSError(
                f"{self._directory} has {free >> 20:,} MiB free, the entry needs "
                f"{num_bytes >> 20:,} and {self._limits.min_free_bytes >> 20:,} must stay"
            )


class PackedWeights:
    """The packed weights of one model: those in the cache, and those that will be."""

    def __init__(
        self,
        cache: PackedCache,
        backend: PackingBackend,
        entry: Entry,
        file: PackedFile | None,
    ) -> None:
        self._cache = cache
        self._backend = backend
        self._entry = entry
        self._file = file
        self._weights: dict[str, LinearWeight] = {}
        self._is_complete = file is not None

    @property
    def is_complete(self) -> bool:
        """Whether every weight asked for so far was in the cache."""
        return self._is_complete

    def find(
        self,
        names: Sequence[str],
        cols: int,
        bias: NDArray[np.float32] | None,
        *,
        is_sensitive: bool,
    ) -> LinearWeight | None:
        """The stacked matrices `names` if they are in the cache."""
        segments = self._file.find(_key(names)) if self._file is not None else None
        if segments is None:
            return None
        weight = self._backend.adopt_linear(segments, cols, bias, is_sensitive=is_sensitive)
        self._weights[_key(names)] = weight
        return weight

    def keep(self, names: Sequence[str], weight: LinearWeight) -> None:
        """Remember a weight that was packed now."""
        self._weights[_key(names)] = weight
        self._is_complete = False

    def store(self, delay_s: float = 0.0) -> None:
        """Write the cache entry unless it is there. Logs what goes wrong; takes a while."""
        time.sleep(delay_s)
        weights, self._weights = self._weights, {}
        if self._is_complete:
            return
        try:
            exported = {name: self._backend.export_linear(w) for name, w in weights.items()}
            if self._cache.store(self._entry, exported):
                logger.info("packed weights kept in %s", self._entry.path)
        except OSError as error:
            logger.warning("packed weights could not be kept: %s", error)

    def store_in_background(self) -> None:
        """Write the entry from a thread of low priority; the process may end meanwhile."""

        def run() -> None:
            with contextlib.suppress(OSError, AttributeError):  # per thread on Linux
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            self.store(_STORE_DELAY_S)

        if not self._is_complete:
            threading.Thread(target=run, name="caudal-packed-cache", daemon=True).start()


def entry_name(model_path: Path, layout: str) -> str:
    """`<model>-<its path>-<layout>.packed`: the same model at the same place overwrites its own."""
    stem = re.sub(r"[^A-Za-z0-9._]", "_", model_path.stem)[:60]
    place = hashlib.sha256(os.fsencode(model_path.resolve())).hexdigest()[:12]
    return f"{stem}-{place}-{hashlib.sha256(layout.encode()).hexdigest()[:12]}{_SUFFIX}"


def _model_part(entry: Path) -> str:
    return entry.name.rpartition("-")[0]


def _key(names: Sequence[str]) -> str:
    return "\n".join(names)


@contextlib.contextmanager
def _try_lock(directory: Path) -> Iterator[bool]:
    """Hold the right to write to `directory`, or yield False; ends with its process."""
    descriptor = os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        yield False
        return
    try:
        yield True
    finally:
        os.close(descriptor)
