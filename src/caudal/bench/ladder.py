"""The same work under one serving technique after the other, each a real server of ours."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime

from caudal.bench.health import describe_machine
from caudal.bench.load import LoadOptions
from caudal.bench.own_server import get_page, own_server
from caudal.bench.statistics import tokens_by_second
from caudal.bench.suite import Level, Plan, Progress, measure
from caudal.bench.target import TargetOptions
from caudal.bench.workload import LADDER, RECIPES, WorkloadOptions

WHOLE_PROMPTS = 4096
"""Tokens a step: more than any prompt of the workload, so that none is cut into chunks."""
BLOCK_TOKENS = 16

_NO_CACHE = "--no-enable-prefix-caching"
_PATIENT = ("--max-queue-ttft", "86400")
"""Nobody is refused: on the lowest rungs many wait long, and that is what they show."""
_WHOLE = ("--profile", "batch", "--max-num-batched-tokens", str(WHOLE_PROMPTS), *_PATIENT)
_CHAT = ("--profile", "chat", *_PATIENT)


@dataclass(frozen=True, slots=True)
class Rung:
    """One configuration; `flags` are those of `caudal serve`."""

    name: str
    gains: str
    """What it is meant to improve."""
    flags: tuple[str, ...]


RUNGS = (
    Rung("serial", "one request at a time", ("--batching", "serial", _NO_CACHE, *_WHOLE)),
    Rung(
        "static batching",
        "requests of a batch share each read of the weights; all wait for the longest",
        ("--batching", "static", _NO_CACHE, *_WHOLE),
    ),
    Rung(
        "continuous batching",
        "a finished request makes room at once",
        ("--batching", "continuous", _NO_CACHE, *_WHOLE),
    ),
    Rung("+ prefix cache", "a shared prompt is computed once", _WHOLE),
    Rung(
        "+ prefill in a time budget",
        "long prompts are cut into chunks, so that answers in progress keep their pace",
        _CHAT,
    ),
    Rung(
        "+ INT8 KV cache",
        "half the memory a token: twice the context or users",
        (*_CHAT, "--kv-cache-dtype", "int8"),
    ),
)
"""Bottom to top. The KV cache is paged in all of them; only its reuse is a rung."""


@dataclass(frozen=True, slots=True)
class LadderOptions:
    """What every rung is given to do."""

    users: int = 16
    """Users of the closed loop."""
    num_prompts: int | None = None
    """Requests per rung; unset: 48, with --quick 24."""
    rung_s: float | None = None
    """Stop sending on a rung after so many seconds, and waiting after twice as many; unset: 120,
    with --quick 15."""
    quick: bool = False
    """Less work: an impression in about a minute on a small model."""
    seed: int = 0
    """Seed of the prompts."""

    @property
    def workload(self) -> WorkloadOptions:
        """Equal for all rungs."""
        number = self.num_prompts or (24 if self.quick else 48)
        return WorkloadOptions(workload=LADDER, num_prompts=number, seed=self.seed)

    @property
    def limit_s(self) -> float:
        """Seconds of sending per rung."""
        return self.rung_s or (15.0 if self.quick else 120.0)


@dataclass(frozen=True, slots=True)
class RungResult:
    """What one rung gave."""

    rung: Rung
    level: Level
    num_kv_tokens: int | None
    """That its KV cache has room for."""
    is_complete: bool
    """False: the time was up before all requests were sent."""

    @property
    def throughput(self) -> float:
        """Output tokens a second, those of unfinished answers included."""
        duration_s = self.level.summary.duration_s
        return sum(tokens_by_second(self.level.run.records)) / duration_s if duration_s else 0.0


@dataclass(slots=True)
class Ladder:
    """All rungs on one machine with one model."""

    model: str
    options: LadderOptions
    serve_flags: tuple[str, ...]
    results: list[RungResult] = field(default_factory=list)
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    machine: dict[str, object] = field(default_factory=describe_machine)
    was_interrupted: bool = False
    """Rungs are missing."""

    @property
    def workload(self) -> str:
        """What every rung was given, in words."""
        options = self.options
        return (
            f"{options.workload.num_prompts} requests of {options.users} users: "
            f"{RECIPES[LADDER].summary}"
        )


def climb(
    model: str, options: LadderOptions, serve_flags: tuple[str, ...], progress: Progress
) -> Ladder:
    """Start, load and stop a server per rung. Raises CaudalError if one does not start.

    An interrupt ends it with the rungs that have been measured, if there are any.
    """
    ladder = Ladder(model, options, serve_flags)
    progress.say(ladder.workload)
    try:
        for number, rung in enumerate(RUNGS, 1):
            place = f"{number}/{len(RUNGS)} {rung.name}"
            progress.start_level(f"{place}: starting")
            with own_server(model, (*rung.flags, *serve_flags)) as url:
                ladder.results.append(_measure(url, rung, options, _Named(place, progress)))
    except KeyboardInterrupt:
        if not ladder.results:
            raise
        ladder.was_interrupted = True
    return ladder


def _measure(url: str, rung: Rung, options: LadderOptions, progress: Progress) -> RungResult:
    plan = Plan(
        target=TargetOptions(url=url),
        workload=options.workload,
        # A server of its own for each rung: its cache is empty without any salt.
        load=LoadOptions(
            concurrency=(options.users,),
            duration_s=options.limit_s,
            drain_s=options.limit_s,
            cache="as-is",
        ),
    )
    (level,) = asyncio.run(measure(plan, progress)).levels
    is_complete = len(level.run.records) == level.run.num_planned and not level.run.was_given_up
    return RungResult(rung, level, _kv_tokens(url), is_complete)


class _Named:
    """A rung's measurement, shown under the rung's name."""

    def __init__(self, name: str, progress: Progress) -> None:
        self._name = name
        self._progress = progress
        self.update = progress.update

    def say(self, text: str) -> None:
        """What a single measurement says is the same for each rung."""

    def start_level(self, title: str) -> None:
        self._progress.start_level(f"{self._name}: {title}")

    def end_level(self, level: Level) -> None:
        summary = level.summary
        failed = f", {summary.num_failed} failed" if summary.num_failed else ""
        self._progress.say(
            f"{self._name}: {summary.num_completed} answers in {summary.duration_s:.1f} s, "
            f"{summary.output_throughput:.1f} tok/s, TTFT p95 {summary.ttft_ms.p95:.0f} ms, "
            f"ITL p99 {summary.itl_ms.p99:.0f} ms{failed}"
        )


def _kv_tokens(url: str) -> int | None:
    page = get_page(f"{url}/metrics") or ""
    found = re.search(r"^caudal_kv_blocks(?:\{[^}]*\})? ([0-9.e+]+)$", page, re.MULTILINE)
    return int(float(found.group(1))) * BLOCK_TOKENS if found else None
