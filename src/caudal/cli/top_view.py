"""What `caudal top` draws: one frame of a server's live numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from caudal.server.protocol.observation import LiveRequest, LiveSnapshot, Spread

BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 40
NARROW_SPARK_WIDTH = 14
WIDE = 120
"""Columns from which there is room for the wide sparklines."""
MAX_ROWS_WITHOUT_TERMINAL = 20
NUM_OTHER_LINES = 18
"""Lines of a frame besides the requests."""

STATUS_STYLES = {"ready": "bold green", "loading": "yellow", "draining": "yellow", "down": "red"}

Cell = float | None


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of numbers with its course."""

    title: str
    course: Callable[[LiveSnapshot], Cell]
    text: Callable[[LiveSnapshot], str]


class Recent:
    """The latest snapshots, for the sparklines."""

    def __init__(self) -> None:
        self._snapshots: deque[LiveSnapshot] = deque(maxlen=SPARK_WIDTH)

    def add(self, snapshot: LiveSnapshot) -> None:
        """A newer one."""
        self._snapshots.append(snapshot)

    @property
    def latest(self) -> LiveSnapshot:
        """The newest."""
        return self._snapshots[-1]

    def course(self, of: Callable[[LiveSnapshot], Cell], width: int) -> str:
        """A sparkline of the latest `width` snapshots; empty if there is but one."""
        if len(self._snapshots) == 1:
            return ""
        values = [of(snapshot) for snapshot in self._snapshots]
        return sparkline(values[-width:]).rjust(width)


class TopView:
    """A frame of whatever was added last; rich draws it."""

    def __init__(self, recent: Recent, url: str, hint: str = "") -> None:
        self.recent = recent
        self.trouble = ""
        """Shown instead of the status while the server cannot be reached."""
        self._where = f"{url}  ({hint})" if hint else url

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        live = self.recent.latest
        height = console.size.height if console.is_terminal else 0
        num_rows = max(1, height - NUM_OTHER_LINES) if height else MAX_ROWS_WITHOUT_TERMINAL
        yield Group(
            self._head(live),
            Text(),
            self._numbers(live, SPARK_WIDTH if options.max_width >= WIDE else NARROW_SPARK_WIDTH),
            Text(),
            Text(steps_line(live), style="dim"),
            Text(memory_line(live), style="dim"),
            Text(),
            requests_table(live, num_rows),
        )

    def _head(self, live: LiveSnapshot) -> Text:
        head = Text.assemble(("Caudal ", "bold cyan"), live.model.name if live.model else "")
        if self.trouble:
            return head.append(f"  {self.trouble}", style="bold red")
        head.append(f"  {live.status}", style=STATUS_STYLES.get(live.status, ""))
        return head.append(f"  up {duration(live.uptime_s)}  {self._where}", style="dim")

    def _numbers(self, live: LiveSnapshot, spark_width: int) -> Table:
        table = Table.grid(padding=(0, 2))
        for row in _ROWS:
            table.add_row(
                Text(row.title, style="bold"),
                Text(self.recent.course(row.course, spark_width), style="cyan"),
                Text(row.text(live)),
            )
        return table


def sparkline(values: Iterable[Cell]) -> str:
    """One bar a value, from zero to the greatest; a blank where there is none."""
    values = list(values)
    top = max((value for value in values if value is not None), default=0.0)
    bars = [
        " " if value is None else BARS[round(value / top * (len(BARS) - 1)) if top > 0 else 0]
        for value in values
    ]
    return "".join(bars)


def milliseconds(value: Cell) -> str:
    """3.4 ms, 420 ms, 1.25 s."""
    if value is None:
        return "–"
    if value < 1000:
        return f"{value:.1f} ms" if value < 9.95 else f"{value:.0f} ms"
    return f"{value / 1000:.2f} s" if value < 10_000 else f"{value / 1000:.0f} s"


def percent(value: Cell) -> str:
    """A share between 0 and 1."""
    return "–" if value is None else f"{value * 100:.1f} %"


def duration(seconds: float) -> str:
    """The two largest units: 2 d 3 h, 4 min 10 s."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if minutes < 1:
        return f"{seconds:.1f} s"
    if hours < 1:
        return f"{minutes} min {int(seconds % 60)} s"
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def mebibytes(value: int) -> str:
    """MiB below a GiB, GiB above."""
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:,.0f} MiB"


def _share_used(live: LiveSnapshot) -> Cell:
    return live.blocks.used / live.blocks.total if live.blocks.total else None


def _rate(live: LiveSnapshot) -> float:
    return live.rates.output_tokens + live.rates.batch_output_tokens


def _spread(spread: Spread, target: object) -> str:
    values = [("p50", spread.p50), ("p95", spread.p95), ("p99", spread.p99)]
    text = "  ".join(f"{name} {milliseconds(value)}" for name, value in values)
    if isinstance(target, int | float) and target > 0:
        verdict = ""
        if spread.p95 is not None:
            verdict = " met" if spread.p95 <= target else " missed"
        text += f"  target {milliseconds(target)}{verdict}"
    return text


def _target(live: LiveSnapshot, name: str) -> object:
    return live.engine.settings.get(name) if live.engine else None


def _queue_text(live: LiveSnapshot) -> str:
    queue = live.queue
    batch = f", of batches {queue.batch_running + queue.batch_waiting}" * bool(
        queue.batch_running + queue.batch_waiting
    )
    wait = milliseconds(queue.predicted_ttft_ms)
    return f"{queue.running} running, {queue.depth} waiting{batch}; next in {wait}"


def _kv_text(live: LiveSnapshot) -> str:
    blocks = live.blocks
    cached = percent(blocks.cached / blocks.total if blocks.total else None)
    return f"{percent(_share_used(live))} used, {cached} keep prefixes"


def _trouble_text(live: LiveSnapshot) -> str:
    minute = live.minute
    reasons = ", ".join(f"{name} {number}" for name, number in minute.rejected.items() if number)
    rejected = f"{sum(minute.rejected.values())} rejected" + (f" ({reasons})" if reasons else "")
    return f"{rejected}, {minute.preemptions} preempted, {minute.cancelled} cancelled"


_ROWS = (
    _Row("Requests", lambda live: live.queue.running, _queue_text),
    _Row(
        "Output",
        _rate,
        lambda live: f"{_rate(live):,.1f} tok/s; prompts {live.rates.prompt_tokens:,.1f} tok/s",
    ),
    _Row(
        "First token",
        lambda live: live.minute.ttft_ms.p95,
        lambda live: _spread(live.minute.ttft_ms, _target(live, "ttft_ms")),
    ),
    _Row(
        "Per token",
        lambda live: live.minute.tpot_ms.p95,
        lambda live: _spread(live.minute.tpot_ms, _target(live, "tpot_ms")),
    ),
    _Row("KV cache", _share_used, _kv_text),
    _Row(
        "Prefix hits",
        lambda live: live.minute.cache_hit_rate,
        lambda live: f"{percent(live.minute.cache_hit_rate)} of prompt tokens",
    ),
    _Row("Refused", lambda live: sum(live.minute.rejected.values()), _trouble_text),
)


def steps_line(live: LiveSnapshot) -> str:
    """Where the milliseconds of a step go."""
    minute = live.minute
    total = sum(minute.step_parts_ms.values())
    if minute.step_ms is None or total <= 0:
        return "Step: none in the last minute"
    parts = ", ".join(f"{name} {percent(ms / total)}" for name, ms in minute.step_parts_ms.items())
    return f"Step {milliseconds(minute.step_ms)}: {parts}"


def memory_line(live: LiveSnapshot) -> str:
    """The memory plan."""
    plan = live.engine.memory_plan if live.engine else {}
    if not plan:
        return "Memory: no plan is known yet"
    parts = ", ".join(f"{name.replace('_', ' ')} {mebibytes(size)}" for name, size in plan.items())
    return f"Memory: {parts}"


def requests_table(live: LiveSnapshot, num_rows: int) -> Table:
    """The requests in the engine, oldest first, at most `num_rows` of them."""
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    for title in ("request", "state", "age", "prompt", "cached", "output", "first token", "tok/s"):
        is_number = title not in ("request", "state")
        table.add_column(title, justify="right" if is_number else "left", no_wrap=True)
    for request in live.requests[:num_rows]:
        table.add_row(*_cells(request))
    hidden = live.num_requests - min(num_rows, len(live.requests))
    if hidden > 0:
        table.add_row(Text(f"and {hidden} more", style="dim"))
    if not live.requests:
        table.add_row(Text("nothing runs", style="dim"))
    return table


def _cells(request: LiveRequest) -> list[Text]:
    computed = request.computed_tokens
    is_partial = request.state != "decode" and computed is not None
    prompt = f"{computed}/{request.prompt_tokens}" if is_partial else str(request.prompt_tokens)
    remarks = " batch" * request.is_batch + f" preempted {request.preemptions}×" * bool(
        request.preemptions
    )
    speed = "–" if request.tokens_per_s is None else f"{request.tokens_per_s:.1f}"
    words = (
        request.id,
        request.state + remarks,
        duration(request.age_s),
        prompt,
        str(request.cached_tokens),
        f"{request.output_tokens}/{request.max_tokens}",
        milliseconds(request.ttft_ms),
        speed,
    )
    return [Text(word) for word in words]
