"""How far a measurement is: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from caudal.bench.runner import Live
from caudal.bench.suite import Level

LINE_INTERVAL_S = 10.0


class BenchProgress:
    """Draws on standard error while entered."""

    def __init__(self) -> None:
        console = Console(file=sys.stderr)
        self._is_terminal = console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not self._is_terminal,
        )
        self._task = self._bar.add_task("connecting", total=None, note="")
        self._title = ""
        self._next_line = 0.0

    def __enter__(self) -> BenchProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self._is_terminal:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def start_level(self, title: str) -> None:
        """A new bar from zero."""
        self._title = title
        self._next_line = time.monotonic() + LINE_INTERVAL_S
        self._bar.reset(self._task, description=title, total=None, note="")

    def update(self, live: Live) -> None:
        """Requests ended, in flight and failed so far."""
        seconds = live.clock.now()
        note = f"{live.num_in_flight} in flight, {live.num_output_tokens / seconds:.0f} tok/s"
        if live.num_failed:
            note += f", {live.num_failed} failed"
        self._bar.update(self._task, total=live.num_planned, completed=live.num_ended, note=note)
        if not self._is_terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_INTERVAL_S
            self.say(f"{self._title}: {live.num_ended} of {live.num_planned}, {note}")

    def end_level(self, level: Level) -> None:
        """One line about what it gave."""
        summary = level.summary
        ttft = f", TTFT p95 {summary.ttft_ms.p95:.0f} ms" if summary.ttft_ms.count else ""
        good = "" if summary.good_share is None else f", {summary.good_share:.0%} good"
        failed = f", {summary.num_failed} failed" if summary.num_failed else ""
        given_up = " (not all were awaited)" if level.run.was_given_up else ""
        self.say(
            f"{level.load}: {summary.num_completed} answers in {summary.duration_s:.1f} s, "
            f"{summary.output_throughput:.1f} tok/s{ttft}{good}{failed}{given_up}"
        )
