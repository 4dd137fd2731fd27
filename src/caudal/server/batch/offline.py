"""Runs an input file through an engine of its own, without HTTP and without a store.

The output file is all the state there is: a run that is interrupted, even killed, goes on where it
stopped, because requests whose `custom_id` the output holds are not run again.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from caudal.config import EngineConfig, ServerConfig
from caudal.engine.zmq_client import ZmqEngineClient
from caudal.errors import ConfigError, EngineDeadError
from caudal.scheduler.service_class import ServiceClass
from caudal.server.batch.dispatch import BATCH_ROUTES, Dispatcher, Reply
from caudal.server.batch.input_lines import InputLine, iter_lines
from caudal.server.batch.records import TokenUsage
from caudal.server.batch.results import add_usage, response_line, result_id
from caudal.server.batch.validation import (
    BatchRequest,
    InputReport,
    InputRules,
    LineFault,
    parse_line,
    validate_input,
)
from caudal.server.loading import load_served_model
from caudal.server.state import AppState

MAX_REQUESTS = 100_000_000
QUEUE_FACTOR = 2
"""Requests in flight for each row of the engine: it never waits for the next one."""
COMMIT_INTERVAL_S = 0.5
"""Results are written and synced this often."""
MAX_RETRY_WAIT_S = 5.0
REPORT_RESUMED = 1000
"""While skipping what an earlier run did, every so many requests are reported."""


@dataclass(slots=True)
class Progress:
    """How far a run is."""

    num_total: int = 0
    num_resumed: int = 0
    """Requests that an earlier run has answered."""
    num_completed: int = 0
    num_failed: int = 0
    usage: TokenUsage = field(default_factory=TokenUsage)
    """Of this run alone."""

    @property
    def num_ended(self) -> int:
        """Requests that are not left to do."""
        return self.num_resumed + self.num_completed + self.num_failed


Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class OfflineSpec:
    """What to run, and where results go."""

    input: Path
    output: Path
    errors: Path
    model_name: str
    """Name of the model in the requests' bodies."""

    def validate(self, max_errors: int) -> InputReport:
        """Check the input as the server does; the report names faults by line."""
        rules = InputRules(list(BATCH_ROUTES), self.model_name, MAX_REQUESTS, max_errors)
        return validate_input(self.input, rules)


class _Head(msgspec.Struct):
    model: str | None = None


def first_model(path: Path) -> str | None:
    """The model that the first line asks for, None if it has no such line or names none."""
    with path.open("rb") as file:
        for line, _ in iter_lines(file):
            try:
                return msgspec.json.decode(parse_line(line).body, type=_Head).model
            except (LineFault, msgspec.DecodeError):
                return None
    return None


def run_offline(
    spec: OfflineSpec, num_requests: int, engine: EngineConfig, report: Report
) -> Progress:
    """Run what is not done yet of a valid input; `report` is called after each request.

    Raises ConfigError for an output that cannot be gone on with, the errors of loading the model,
    EngineDeadError, and KeyboardInterrupt, in each case with all results on the disk.
    """
    with _Results(spec, num_requests) as results, asyncio.Runner() as runner:
        runner.run(_Run(spec, results, report).run(engine))
        return results.progress


class _Results:
    """Appends to the output and the errors file. Owns them (and a lock) while entered."""

    def __init__(self, spec: OfflineSpec, num_requests: int) -> None:
        self._spec = spec
        self._pending: tuple[list[bytes], list[bytes]] = ([], [])
        self._files: list[BinaryIO] = []
        self.progress = Progress(num_total=num_requests)
        self.done: set[str] = set()
        """Custom ids with an answer from an earlier run."""

    def __enter__(self) -> _Results:
        output = self._open(self._spec.output)
        try:
            self._recover(output)
            errors = self._open(self._spec.errors)
            errors.truncate(0)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.commit()
        finally:
            self._close()
            if self._spec.errors.stat().st_size == 0:
                self._spec.errors.unlink()

    def _open(self, path: Path) -> BinaryIO:
        try:
            file = path.open("a+b", buffering=0)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        self._files.append(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{path} is being written by another run") from None
        return file

    def _close(self) -> None:
        while self._files:
            self._files.pop().close()

    def _recover(self, output: BinaryIO) -> None:
        """Learn what is done; a line that a kill cut off is dropped."""
        end = 0
        output.seek(0)
        for number, line in enumerate(_whole_lines(output), 1):
            try:
                self.done.add(msgspec.json.decode(line, type=_Done).custom_id)
            except (msgspec.DecodeError, RecursionError):
                raise ConfigError(
                    f"{self._spec.output}: line {number} is no result of a batch; choose another "
                    "output"
                ) from None
            end += len(line)
        output.truncate(end)

    def add(self, data: bytes, reply: Reply) -> None:
        """Keep a result for the next commit."""
        progress = self.progress
        if 200 <= reply.status < 300:
            self._pending[0].append(data)
            progress.num_completed += 1
            add_usage(progress.usage, reply.body)
        else:
            self._pending[1].append(data)
            progress.num_failed += 1

    def commit(self) -> None:
        """Bring all results to the disk; blocks."""
        pending, self._pending = self._pending, ([], [])
        for file, lines in zip(self._files, pending, strict=False):
            view = memoryview(b"".join(lines))
            while view:
                view = view[file.write(view) :]
            if lines:
                os.fdatasync(file.fileno())


class _Done(msgspec.Struct):
    custom_id: str


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of an unbuffered file that end as lines do."""
    with open(file.fileno(), "rb", closefd=False) as reader:
        for line in reader:
            if line.endswith(b"\n"):
                yield line


class _Run:
    """One run: an engine, a bounded number of requests in flight, a commit now and then."""

    def __init__(self, spec: OfflineSpec, results: _Results, report: Report) -> None:
        self._spec = spec
        self._results = results
        self._report = report
        self._token = secrets.token_hex(8)

    async def run(self, config: EngineConfig) -> None:
        """Load the model, run everything, stop the engine whatever happens."""
        engine = ZmqEngineClient(config)
        state = AppState(ServerConfig(served_model_name=self._spec.model_name), engine)
        try:
            await engine.start()
            state.model = await asyncio.to_thread(
                load_served_model, config.model_path, self._spec.model_name
            )
            await engine.wait_ready()
            await self._run_all(state)
        finally:
            await engine.stop()
            state.pool.shutdown()

    async def _run_all(self, state: AppState) -> None:
        dispatcher = Dispatcher(state)
        num_slots = QUEUE_FACTOR * state.engine.info.max_num_seqs
        slots = asyncio.Semaphore(num_slots)
        try:
            async with asyncio.TaskGroup() as group:
                committing = group.create_task(self._commit_regularly())
                async for line, request in self._requests():
                    await slots.acquire()
                    call = self._run_line(state, dispatcher, line, request)
                    group.create_task(call).add_done_callback(lambda _: slots.release())
                for _ in range(num_slots):
                    await slots.acquire()
                committing.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _requests(self) -> AsyncIterator[tuple[InputLine, BatchRequest]]:
        """What is left to do."""
        progress, done = self._results.progress, self._results.done
        with self._spec.input.open("rb") as file:
            for line, _ in iter_lines(file):
                request = parse_line(line)
                if request.custom_id not in done:
                    yield line, request
                    continue
                progress.num_resumed += 1
                if progress.num_resumed % REPORT_RESUMED == 0:
                    self._report(progress)
                    await asyncio.sleep(0)
        self._report(progress)

    async def _run_line(
        self, state: AppState, dispatcher: Dispatcher, line: InputLine, request: BatchRequest
    ) -> None:
        reply = await self._answer(state, dispatcher, request)
        line_id = result_id(self._token, line.ordinal)
        self._results.add(response_line(line_id, request.custom_id, reply), reply)
        self._report(self._results.progress)

    async def _answer(
        self, state: AppState, dispatcher: Dispatcher, request: BatchRequest
    ) -> Reply:
        while True:
            reply = await dispatcher.run(
                request.url, request.body, service=ServiceClass.INTERACTIVE
            )
            if reply.status not in (429, 503):
                return reply
            if not state.engine.is_ready:
                raise EngineDeadError("the engine died; the log above says why")
            await asyncio.sleep(min(MAX_RETRY_WAIT_S, max(0.1, reply.retry_after_s)))

    async def _commit_regularly(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_INTERVAL_S)
            await asyncio.to_thread(self._results.commit)
