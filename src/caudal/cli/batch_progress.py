"""How far a batch is: a bar on a terminal, one line at the end elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from caudal.server.batch import offline


class BatchProgress:
    """Draws on standard error while entered."""

    def __init__(self) -> None:
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("batch", total=None, note="loading the model")
        self._started = 0.0
        self._latest = offline.Progress()

    def __enter__(self) -> BatchProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop drawing."""
        self._bar.stop()

    def update(self, progress: offline.Progress) -> None:
        """Show a new state."""
        self._started = self._started or time.monotonic()
        self._latest = progress
        failed = f", {progress.num_failed} failed" if progress.num_failed else ""
        self._bar.update(
            self._task,
            total=progress.num_total,
            completed=progress.num_ended,
            note=f"{self._tokens_per_s():,.0f} tok/s{failed}",
        )

    def summary(self) -> str:
        """One line about what has been done so far."""
        progress = self._latest
        parts = [f"{progress.num_ended} of {progress.num_total} requests"]
        if progress.num_resumed:
            parts.append(f"{progress.num_resumed} from an earlier run")
        if progress.num_failed:
            parts.append(f"{progress.num_failed} failed")
        parts.append(f"{progress.usage.num_output:,} tokens at {self._tokens_per_s():,.0f} tok/s")
        return ", ".join(parts)

    def _tokens_per_s(self) -> float:
        seconds = time.monotonic() - self._started if self._started else 0.0
        return self._latest.usage.num_output / seconds if seconds else 0.0
