"""Progress of downloads: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_LINE_INTERVAL_S = 5.0
_MEGABYTE = 1_000_000


class Progress(Protocol):
    """One transfer at a time: `begin`, any number of `advance`, `end`."""

    def begin(self, label: str, total_bytes: int | None, done_bytes: int = 0) -> None:
        """Start a transfer of `total_bytes` (None: unknown), `done_bytes` of them there already."""

    def advance(self, num_bytes: int) -> None:
        """`num_bytes` more have arrived."""

    def end(self) -> None:
        """The transfer is over, whether it succeeded or not."""

    def note(self, message: str) -> None:
        """Tell the user something worth a line."""


class SilentProgress:
    """Shows nothing."""

    def begin(self, label: str, total_bytes: int | None, done_bytes: int = 0) -> None: ...

    def advance(self, num_bytes: int) -> None: ...

    def end(self) -> None: ...

    def note(self, message: str) -> None: ...


class LineProgress:
    """Writes a line when a transfer begins and ends, and every five seconds between."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._label = ""
        self._total: int | None = None
        self._done = 0
        self._next_line = 0.0

    def begin(self, label: str, total_bytes: int | None, done_bytes: int = 0) -> None:
        self._label, self._total, self._done = label, total_bytes, done_bytes
        self._write_line()

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        if time.monotonic() >= self._next_line:
            self._write_line()

    def end(self) -> None:
        self._write_line()

    def note(self, message: str) -> None:
        self._stream.write(message + "\n")
        self._stream.flush()

    def _write_line(self) -> None:
        self._next_line = time.monotonic() + _LINE_INTERVAL_S
        total = "" if self._total is None else f" of {self._total / _MEGABYTE:.1f}"
        self.note(f"{self._label}: {self._done / _MEGABYTE:.1f}{total} MB")


class BarProgress:
    """A rich progress bar on standard error."""

    def __init__(self) -> None:
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def begin(self, label: str, total_bytes: int | None, done_bytes: int = 0) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self.end()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task(label, total=total_bytes, completed=done_bytes)
        self._bar.start()

    def advance(self, num_bytes: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, num_bytes)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def note(self, message: str) -> None:
        sys.stderr.write(message + "\n")


def create_progress() -> Progress:
    """A bar if standard error is a terminal, else plain lines on standard error."""
    return BarProgress() if sys.stderr.isatty() else LineProgress(sys.stderr)
