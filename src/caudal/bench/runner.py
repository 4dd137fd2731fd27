"""Runs one level of load and keeps a record of every request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import aiohttp

from caudal.bench.client import Clock, send_request
from caudal.bench.health import ClientHealth, HealthMonitor
from caudal.bench.load import Load, arrival_times
from caudal.bench.record import RequestRecord
from caudal.bench.target import Target
from caudal.bench.workload import Conversation, Message

POLL_S = 0.1


@dataclass(slots=True)
class Live:
    """A level while it runs: what callbacks and progress displays may look at."""

    num_planned: int
    clock: Clock = field(default_factory=Clock)
    records: list[RequestRecord] = field(default_factory=list)
    """Of every request sent, in the order of sending."""
    num_ended: int = 0
    num_failed: int = 0
    num_output_tokens: int = 0
    is_sending: bool = True
    """False once no further conversation will start."""

    @property
    def num_in_flight(self) -> int:
        """Requests sent and not yet ended."""
        return len(self.records) - self.num_ended


Observer = Callable[[Live], bool]
"""Called ten times a second while a level runs; True gives the rest of the level up."""


@dataclass(frozen=True, slots=True)
class LevelRun:
    """What one level gave."""

    load: Load
    records: list[RequestRecord]
    duration_s: float
    health: ClientHealth
    num_planned: int
    was_given_up: bool


def _watch_nothing(_live: Live) -> bool:
    return False


class Runner:
    """Sends conversations to one target."""

    def __init__(self, session: aiohttp.ClientSession, target: Target) -> None:
        self._session = session
        self._target = target

    async def run(
        self,
        conversations: list[Conversation],
        load: Load,
        seed: int,
        observe: Observer = _watch_nothing,
    ) -> LevelRun:
        """Run a level to its end, or until `observe` gives it up."""
        live = Live(sum(len(conversation.turns) for conversation in conversations))
        monitor = HealthMonitor()
        level = _Level(self._session, self._target, load, live, monitor)
        sending = asyncio.create_task(level.send_all(conversations, seed))
        sampling = asyncio.create_task(monitor.run())
        was_given_up = False
        try:
            while not (await asyncio.wait([sending], timeout=POLL_S))[0]:
                if not was_given_up and observe(live):
                    was_given_up = True
                    sending.cancel()
            observe(live)
            duration_s = max((record.end_s for record in live.records), default=0.0)
            with contextlib.suppress(asyncio.CancelledError):
                sending.result()
        finally:
            for task in (sending, sampling):
                task.cancel()
            await asyncio.gather(sending, sampling, return_exceptions=True)
        health = monitor.finish()
        return LevelRun(load, live.records, duration_s, health, live.num_planned, was_given_up)


class _Level:
    """One level in progress."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        load: Load,
        live: Live,
        monitor: HealthMonitor,
    ) -> None:
        self._session = session
        self._target = target
        self._load = load
        self._live = live
        self._monitor = monitor
        cap = load.concurrency if load.is_open else None
        self._cap = asyncio.Semaphore(cap) if cap else contextlib.nullcontext()

    async def send_all(self, conversations: list[Conversation], seed: int) -> None:
        numbered = enumerate(conversations)
        async with asyncio.TaskGroup() as group:
            if self._load.is_open:
                await self._send_on_time(numbered, conversations, seed, group)
            else:
                assert self._load.concurrency is not None
                for _ in range(min(self._load.concurrency, len(conversations))):
                    group.create_task(self._work(numbered))
        self._live.is_sending = False

    async def _work(self, numbered: Iterator[tuple[int, Conversation]]) -> None:
        """One user of a closed loop."""
        for index, conversation in numbered:
            if self._is_over():
                return
            await self._converse(index, conversation, self._live.clock.now())

    async def _send_on_time(
        self,
        numbered: Iterator[tuple[int, Conversation]],
        conversations: list[Conversation],
        seed: int,
        group: asyncio.TaskGroup,
    ) -> None:
        times = arrival_times(self._load, conversations, seed)
        for due, (index, conversation) in zip(times, numbered, strict=True):
            limit = self._load.duration_s
            if limit is not None and due > limit:
                return
            await asyncio.sleep(due - self._live.clock.now())
            group.create_task(self._arrive(index, conversation, due))

    async def _arrive(self, index: int, conversation: Conversation, due: float) -> None:
        self._monitor.lateness_s.append(self._live.clock.now() - due)
        async with self._cap:
            await self._converse(index, conversation, due)

    def _is_over(self) -> bool:
        limit = self._load.duration_s
        return limit is not None and self._live.clock.now() >= limit

    async def _converse(self, index: int, conversation: Conversation, due: float) -> None:
        """All turns; a failed one ends the conversation, as nobody asks on without an answer."""
        said: list[Message] = []
        for number, turn in enumerate(conversation.turns):
            if number:
                due = self._live.clock.now() + turn.think_s
                await asyncio.sleep(turn.think_s)
                self._monitor.lateness_s.append(self._live.clock.now() - due)
            said += turn.messages
            record = RequestRecord(index, number, intended_s=due)
            body = self._target.body(said, turn.num_output_tokens)
            self._live.records.append(record)
            try:
                clock = self._live.clock
                answer = await send_request(self._session, self._target, body, record, clock)
            finally:
                self._count(record)
            if not record.is_ok:
                return
            said.append({"role": "assistant", "content": answer})

    def _count(self, record: RequestRecord) -> None:
        self._live.num_ended += 1
        self._live.num_failed += not record.is_ok
        self._live.num_output_tokens += record.num_output_tokens or 0
