"""A whole measurement: warm-up, levels of load or a search, each with the same prompts."""

from __future__ import annotations

import asyncio
import math
import secrets
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Protocol

import aiohttp

from caudal.bench.client import create_session
from caudal.bench.health import describe_machine
from caudal.bench.load import Load, LoadOptions
from caudal.bench.probe import connect
from caudal.bench.prompts import Prompts, primers
from caudal.bench.runner import LevelRun, Live, Observer, Runner
from caudal.bench.search import MissWatch, SearchOptions, SearchResult, search_rate
from caudal.bench.statistics import Objective, Summary, summarize
from caudal.bench.target import Target, TargetOptions
from caudal.bench.words import Calibration
from caudal.bench.workload import WorkloadOptions
from caudal.errors import ConfigError

DEFAULT_CONCURRENCY = 8
PRIMING_CONCURRENCY = 8
WARMUP_CONCURRENCY = 4
MIN_SEARCH_REQUESTS = 20
CACHE_NOTES = {
    "cold": "cold: each level's prompts begin with words never sent before; what requests of one "
    "level share is shared within it only",
    "warm": "warm: each level's prompts were sent once before it",
    "as-is": "as it was: earlier runs and levels may have left these prompts in the cache",
}

INCOMPLETE = "ended before everything was answered; its numbers are of a part"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides a measurement."""

    target: TargetOptions = field(default_factory=TargetOptions)
    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    load: LoadOptions = field(default_factory=LoadOptions)
    objective: Objective = field(default_factory=Objective)
    search: SearchOptions = field(default_factory=SearchOptions)
    label: str = ""

    def check(self) -> None:
        """Raise ConfigError for options that contradict each other."""
        if self.search.goodput_percent is not None and not self.objective.is_set:
            raise ConfigError("--goodput-search: needs --ttft-ms, --tpot-ms or --e2e-ms")
        if self.load.rate and len(self.load.concurrency or ()) > 1:
            raise ConfigError("--concurrency: with --rate it is one cap, not a list")
        if self.workload.trace and (self.load.rate or self.search.goodput_percent is not None):
            raise ConfigError("--trace: brings its own arrivals; --trace-speed scales them")
        needs_stream = self.objective.ttft_ms is not None or self.objective.tpot_ms is not None
        if needs_stream and not self.target.stream:
            raise ConfigError("--ttft-ms, --tpot-ms: cannot be seen without streaming")
        if self.load.drain_s is not None and self.load.duration_s is None:
            raise ConfigError("--drain: needs --duration")

    def loads(self) -> list[Load]:
        """The levels, in order; empty for a search."""
        load = self.load
        if self.search.goodput_percent is not None:
            return []
        common = Load(burstiness=load.burstiness, duration_s=load.duration_s)
        cap = load.concurrency[0] if load.concurrency else None
        if self.workload.trace:
            return [replace(common, is_trace=True, concurrency=cap)]
        if load.rate:
            return [replace(common, rate=rate, concurrency=cap) for rate in load.rate]
        users = load.concurrency or (DEFAULT_CONCURRENCY,)
        return [replace(common, concurrency=number) for number in users]


@dataclass(frozen=True, slots=True)
class Level:
    """One level and its numbers."""

    run: LevelRun
    summary: Summary

    @property
    def load(self) -> Load:
        """What was asked of it."""
        return self.run.load

    @property
    def problems(self) -> list[str]:
        """Why its numbers may not mean what they seem to."""
        found = [f"the client was overloaded: {text}" for text in self.run.health.problems]
        if self.summary.num_without_usage:
            found.append(
                f"{self.summary.num_without_usage} answers came without usage: their tokens are "
                "counted by pieces, and TPOT with them"
            )
        if self.run.was_given_up:
            found.append(INCOMPLETE)
        return found


@dataclass(slots=True)
class Report:
    """A measurement from its first request to its last."""

    plan: Plan
    target: Target
    calibration: Calibration
    workload: str
    run_id: str
    levels: list[Level] = field(default_factory=list)
    search: SearchResult | None = None
    warmup: str = ""
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    machine: dict[str, object] = field(default_factory=describe_machine)
    was_interrupted: bool = False
    """By the user; the levels that had ended are kept."""


class Progress(Protocol):
    """Shows how far a measurement is."""

    def say(self, text: str) -> None:
        """One line about what happens next."""

    def start_level(self, title: str) -> None:
        """A level begins."""

    def update(self, live: Live) -> None:
        """Ten times a second while a level runs."""

    def end_level(self, level: Level) -> None:
        """A level has ended."""


async def measure(plan: Plan, progress: Progress) -> Report:
    """Run the plan. Raises ConfigError or CaudalError before the first level, not after."""
    plan.check()
    Prompts(plan.workload, Calibration())  # files are checked before anything is sent
    async with create_session(plan.target) as session:
        target, calibration = await connect(session, plan.target)
        suite = _Suite(plan, target, calibration, session, progress)
        try:
            await suite.run()
        except asyncio.CancelledError:
            if not suite.report.levels:
                raise
            suite.report.was_interrupted = True
        return suite.report


class _Suite:
    """A measurement in progress."""

    def __init__(
        self,
        plan: Plan,
        target: Target,
        calibration: Calibration,
        session: aiohttp.ClientSession,
        progress: Progress,
    ) -> None:
        self._plan = plan
        self._prompts = Prompts(plan.workload, calibration)
        self._runner = Runner(session, target)
        self._progress = progress
        self._unloaded_rate = 1.0
        run_id = secrets.token_hex(4)
        self.report = Report(plan, target, calibration, self._prompts.summary, run_id)
        progress.say(f"{target.model} at {target.url} · {self._prompts.summary}")

    async def run(self) -> None:
        """The whole plan."""
        await self.warm_up()
        if self._plan.search.goodput_percent is not None:
            await self.search()
        for load in self._plan.loads():
            await self.run_level(load)

    async def warm_up(self) -> None:
        number = self._plan.load.warmup
        if not number:
            self.report.warmup = "none"
            return
        self._progress.start_level("warm-up")
        made = self._prompts.create_warmup(number, f"warm-up {self.report.run_id}")
        load = Load(concurrency=min(WARMUP_CONCURRENCY, number))
        run = await self._runner.run(made, load, 0, self._observe)
        done = sum(record.is_ok for record in run.records)
        self.report.warmup = f"{done} requests in {run.duration_s:.1f} s, prompts of their own"
        self._unloaded_rate = max(done, 1) / max(run.duration_s, 1e-3)
        self._progress.say(f"warm-up: {self.report.warmup}")

    def _observe(self, live: Live) -> bool:
        self._progress.update(live)
        load = self._plan.load
        if load.duration_s is None or load.drain_s is None:
            return False
        return live.clock.now() > load.duration_s + load.drain_s

    async def run_level(
        self, load: Load, number: int | None = None, observe: Observer | None = None
    ) -> Level:
        """One level; keeps it in the report."""
        plan, index = self._plan, len(self.report.levels)
        salt = f"{self.report.run_id} {index}" if plan.load.cache == "cold" else ""
        made = self._prompts.create(number or self._prompts.num_for(load), salt)
        if plan.load.cache == "warm":
            self._progress.start_level(f"filling the cache for {load}")
            once = Load(concurrency=PRIMING_CONCURRENCY)
            await self._runner.run(primers(made), once, 0, self._observe)
        self._progress.start_level(str(load))
        run = await self._runner.run(made, load, plan.workload.seed, observe or self._observe)
        level = Level(run, summarize(run.records, run.duration_s, plan.objective))
        self.report.levels.append(level)
        self._progress.end_level(level)
        return level

    async def search(self) -> None:
        """Levels until the highest rate that keeps the objective is known well enough."""
        options, load = self._plan.search, self._plan.load
        assert options.goodput_percent is not None
        share = options.goodput_percent / 100
        watch = MissWatch(self._plan.objective, share, self._observe)
        cap = load.concurrency[0] if load.concurrency else None

        async def run_at(rate: float) -> tuple[float, bool]:
            number = max(MIN_SEARCH_REQUESTS, math.ceil(rate * options.window_s))
            at = Load(concurrency=cap, rate=rate, burstiness=load.burstiness)
            level = await self.run_level(at, self._plan.workload.num_prompts or number, watch)
            good = level.summary.good_share or 0.0
            return good, good >= share and not level.run.was_given_up

        first = load.rate[0] if load.rate else self._unloaded_rate
        self.report.search = await search_rate(options, first, run_at)
