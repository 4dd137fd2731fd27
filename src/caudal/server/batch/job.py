"""One batch from its first line to its last status.

A job runs on the event loop and is the only writer of its record; contents are read and written in
worker threads. Nothing but the record and the result files is needed to go on after a crash.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from caudal.server.batch.allowance import Allowance
from caudal.server.batch.dispatch import Dispatcher, Reply
from caudal.server.batch.input_lines import Cursor, InputLine, read_lines
from caudal.server.batch.limits import BatchLimits
from caudal.server.batch.pace import Customer, Place, Slots, Speed, choose_service, memory_s
from caudal.server.batch.records import PURPOSE_OUTPUT, BatchRecord, BatchStatus, FileRecord
from caudal.server.batch.results import (
    ResultError,
    ResultFiles,
    add_usage,
    error_line,
    response_line,
    result_id,
)
from caudal.server.batch.validation import (
    BatchRequest,
    InputReport,
    InputRules,
    parse_line,
    validate_input,
)
from caudal.server.batch.workers import Workers
from caudal.server.protocol.batches import BatchError
from caudal.server.protocol.common import ErrorResponse
from caudal.server.state import AppState

logger = logging.getLogger("caudal.server")

EXPIRED: Final = ResultError(
    "batch_expired",
    "This request could not be executed before the completion window expired.",
)
READ_LINES = 64
READ_BYTES = 4 * 1024 * 1024
"""How much of the input is in memory at a time."""
BREATH_S = 0.002
"""Pause between pieces of work in a thread, so that the event loop gets the interpreter."""
MAX_RETRY_WAIT_S = 5.0
MODEL_POLL_S = 1.0

_ERROR = msgspec.json.Decoder(ErrorResponse)


@dataclass(frozen=True, slots=True)
class JobTools:
    """What all jobs of a server share."""

    state: AppState
    workers: Workers
    dispatcher: Dispatcher
    slots: Slots
    limits: BatchLimits
    allowance_of: Callable[[BatchRecord], Allowance | None]
    """What the owner of a new batch may still enqueue."""
    validation_turn: asyncio.Semaphore
    """One input file is checked at a time."""


class Job:
    """Drives one batch; `run` returns when it has ended."""

    def __init__(self, record: BatchRecord, tools: JobTools) -> None:
        self.record = record
        self._tools = tools
        self._customer = Customer(record.owner)
        self._stop = asyncio.Event()
        self._is_over = False
        """Nobody waits any more for what threads do for this job."""
        self._results: ResultFiles | None = None
        self._output: list[bytes] = []
        self._errors: list[bytes] = []
        self._commit: asyncio.Task[None] | None = None
        self._commit_lock = asyncio.Lock()
        self._calls: dict[asyncio.Task[Reply], Place] = {}
        window_s = record.deadline - record.created_at
        self._speed = Speed(memory_s(window_s), time.time())

    async def run(self) -> None:
        """Go on from wherever the record stands; failures are logged and tried again."""
        try:
            await self._run()
        finally:
            self._is_over = True

    async def _run(self) -> None:
        while not self.record.status.is_terminal:
            try:
                await self._advance()
            except Exception:
                self._results = None
                if not self._input_path.exists():
                    await self._fail(_missing_input())
                    return
                logger.exception("batch %s failed and will be tried again", self.record.id)
                await asyncio.sleep(self._tools.limits.retry_failed_job_s)

    async def cancel(self) -> bool:
        """Ask the batch to stop; False if it has come to its end already."""
        record = self.record
        if record.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            record.enter(BatchStatus.CANCELLING, time.time())
            self._stop.set()
            await self._save()
            return True
        return record.status is BatchStatus.CANCELLING

    def snapshot(self) -> BatchRecord:
        """The record with the counts of this moment."""
        results = self._results
        if results is not None:
            self.record.num_completed = results.num_completed
            self.record.num_failed = results.num_failed
            self.record.usage = results.usage
        return msgspec.structs.replace(self.record)

    def update_service(self, now: float) -> None:
        """Press harder or less, by what is left to do and until when."""
        record, results = self.record, self._results
        if record.status is not BatchStatus.IN_PROGRESS or results is None:
            return
        current = self._customer.service
        service = choose_service(
            current,
            num_left=record.num_total - results.num_completed - results.num_failed,
            speed=self._speed.per_s(now),
            elapsed_s=now - (record.in_progress_at or now),
            left_s=record.deadline - now,
        )
        self._customer.service = service
        if service < current:
            logger.info("batch %s is behind: its requests are %s now", record.id, service.name)
            # What is in flight may wait in vain: start it again in the better class.
            for call, place in self._calls.items():
                if place.service > service:
                    call.cancel()

    @property
    def _input_path(self) -> Path:
        return self._tools.workers.directory.content_path(self.record.input_file_id)

    async def _advance(self) -> None:
        status = self.record.status
        if status is BatchStatus.VALIDATING:
            await self._validate()
        elif status is BatchStatus.IN_PROGRESS:
            await self._work()
        elif status is BatchStatus.FINALIZING:
            await self._finish(BatchStatus.COMPLETED)
        elif status is BatchStatus.CANCELLING:
            await self._finish(BatchStatus.CANCELLED)

    async def _validate(self) -> None:
        record, limits = self.record, self._tools.limits
        path = self._tools.workers.directory.content_path(record.input_file_id)
        async with self._tools.validation_turn:
            rules = InputRules(
                [record.endpoint],
                record.model,
                limits.max_requests,
                limits.max_errors,
                self._tools.allowance_of(record),
            )
            try:
                report = await self._tools.workers.contents(
                    lambda: validate_input(path, rules, self._breathe)
                )
            except _StoppedError:
                return
        if self._stop.is_set():
            return
        record.num_total = report.num_requests
        record.num_prompt_tokens = report.num_prompt_tokens
        if report.num_errors:
            await self._fail(report)
            return
        record.enter(BatchStatus.IN_PROGRESS, time.time())
        await self._save()

    async def _fail(self, report: InputReport) -> None:
        self.record.errors = report.errors
        self.record.enter(BatchStatus.FAILED, time.time())
        await self._save()

    def _breathe(self) -> None:
        """Called in a worker thread."""
        if self._stop.is_set() or self._is_over:
            raise _StoppedError
        time.sleep(BREATH_S)

    async def _work(self) -> None:
        """Run requests until all have ended, the batch is cancelled or its time is over."""
        results = await self._open_results()
        left_s = self.record.deadline - time.time()
        running = asyncio.create_task(self._run_requests(results))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            if left_s > 0:
                both: set[asyncio.Task[None] | asyncio.Task[bool]] = {running, stopping}
                await asyncio.wait(both, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_complete = running.done()
            running.cancel()
            stopping.cancel()
            await asyncio.gather(running, stopping, return_exceptions=True)
            if self._commit is not None:  # it still waits to begin
                self._commit.cancel()
                self._commit = None
            await self._write(results)
        if self._stop.is_set():
            return
        if is_complete:
            running.result()
            self.record.enter(BatchStatus.FINALIZING, time.time())
            await self._save()
            return
        await self._tools.workers.contents(lambda: self._expire(results))
        await self._finish(BatchStatus.EXPIRED)

    async def _open_results(self) -> ResultFiles:
        """The result files, with what an earlier run left in them."""
        if self._results is None:
            record, directory = self.record, self._tools.workers.directory
            results = ResultFiles(
                directory.content_path(record.output_file_id),
                directory.content_path(record.error_file_id),
                _token(record),
                record.num_total,
            )
            await self._tools.workers.contents(results.recover)
            self._output, self._errors = [], []
            self._results = results
        return self._results

    async def _run_requests(self, results: ResultFiles) -> None:
        async with asyncio.TaskGroup() as group:
            async for line in self._lines(results):
                place = await self._tools.slots.take(self._customer)
                task = group.create_task(self._run_request(line, place, results))
                # Also releases the place of a task that is cancelled before it starts.
                task.add_done_callback(lambda _, place=place: place.release())  # type: ignore[misc]

    async def _lines(self, results: ResultFiles) -> AsyncIterator[InputLine]:
        """The lines whose requests have not ended."""
        await self._wait_for_model()
        workers, path, cursor = self._tools.workers, self._input_path, Cursor()
        while True:
            read = partial(read_lines, path, cursor, max_lines=READ_LINES, max_bytes=READ_BYTES)
            lines, cursor = await workers.contents(read)
            if not lines:
                return
            for line in lines:
                if line.ordinal not in results.done:
                    yield line

    async def _wait_for_model(self) -> None:
        """A batch waits while the server has another model."""
        is_first = True
        while self._tools.state.require_model().name != self.record.model:
            if is_first:
                logger.warning("batch %s waits for the model %r", self.record.id, self.record.model)
                is_first = False
            await asyncio.sleep(MODEL_POLL_S)

    async def _run_request(self, line: InputLine, place: Place, results: ResultFiles) -> None:
        request = parse_line(line)
        reply = await self._answer(request, place)
        line_id = result_id(_token(self.record), line.ordinal)
        data = response_line(line_id, request.custom_id, reply)
        results.done.add(line.ordinal)
        self._speed.add(time.time())
        if 200 <= reply.status < 300:
            self._output.append(data)
            results.num_completed += 1
            add_usage(results.usage, reply.body)
        else:
            self._errors.append(data)
            results.num_failed += 1
        place.release()
        await self._write_soon(results)

    async def _answer(self, request: BatchRequest, place: Place) -> Reply:
        """The endpoint's answer; what only says that the server is busy is tried again."""
        num_deaths = 0
        while True:
            reply = await self._call(request, place)
            if reply.status not in (429, 503):
                return reply
            if _error_code(reply) == "engine_dead":
                num_deaths += 1
                if num_deaths >= self._tools.limits.max_attempts:
                    return reply
            await asyncio.sleep(min(MAX_RETRY_WAIT_S, max(0.2, reply.retry_after_s)))

    async def _call(self, request: BatchRequest, place: Place) -> Reply:
        """One call of the endpoint, begun again when the batch's class has risen meanwhile."""
        while True:
            call = asyncio.create_task(
                self._tools.dispatcher.run(
                    request.url, request.body, self.record.owner, place.service
                )
            )
            self._calls[call] = place
            try:
                await asyncio.wait({call})
            finally:
                del self._calls[call]
                if not call.done():
                    call.cancel()
                    await asyncio.wait({call})
            if not call.cancelled():
                return call.result()
            place.change(self._customer.service)

    async def _write_soon(self, results: ResultFiles) -> None:
        """Return once the results so far are on the disk; many share one write."""
        if self._commit is None:
            self._commit = asyncio.create_task(self._write_later(results))
        await asyncio.shield(self._commit)

    async def _write_later(self, results: ResultFiles) -> None:
        await asyncio.sleep(self._tools.limits.commit_interval_s)
        self._commit = None
        await self._write(results)

    async def _write(self, results: ResultFiles) -> None:
        async with self._commit_lock:
            output, self._output = self._output, []
            errors, self._errors = self._errors, []
            if not output and not errors:
                return

            def write() -> None:
                results.append(b"".join(output), b"".join(errors))
                results.sync()

            await self._tools.workers.contents(write)

    def _expire(self, results: ResultFiles) -> None:
        """Write an error for each request that has not ended; runs in a worker thread."""
        path, cursor = self._input_path, Cursor()
        while True:
            lines, cursor = read_lines(path, cursor, max_lines=READ_LINES, max_bytes=READ_BYTES)
            if not lines:
                return
            left = [line for line in lines if line.ordinal not in results.done]
            token = _token(self.record)
            errors = [
                error_line(result_id(token, line.ordinal), parse_line(line).custom_id, EXPIRED)
                for line in left
            ]
            results.append(b"", b"".join(errors))
            for line in left:
                results.done.add(line.ordinal)
            results.num_failed += len(left)
            if self._is_over:
                raise _StoppedError
            time.sleep(BREATH_S)

    async def _finish(self, status: BatchStatus) -> None:
        """Make the results files of their own and end the batch, in one transaction."""
        results = await self._open_results()
        workers, record = self._tools.workers, self.record

        def settle() -> tuple[int, int]:
            results.sync()
            sizes = results.sizes()
            workers.directory.sync_files()
            return sizes

        sizes = await workers.contents(settle)
        now = time.time()
        files = [
            self._file_record(file_id, kind, size, now)
            for file_id, kind, size in zip(
                (record.output_file_id, record.error_file_id),
                ("output", "error"),
                sizes,
                strict=True,
            )
            if size
        ]
        record.has_output, record.has_errors = sizes[0] > 0, sizes[1] > 0
        self.snapshot()
        record.enter(status, now)
        await self._save(files)

    def _file_record(self, file_id: str, kind: str, size: int, now: float) -> FileRecord:
        record = self.record
        lifetime_s = record.output_lifetime_s
        return FileRecord(
            id=file_id,
            owner=record.owner,
            purpose=PURPOSE_OUTPUT,
            filename=f"{record.id}_{kind}.jsonl",
            num_bytes=size,
            created_at=int(now),
            expires_at=None if lifetime_s is None else int(now) + lifetime_s,
        )

    async def _save(self, files: list[FileRecord] | None = None) -> None:
        record = msgspec.structs.replace(self.record)
        await self._tools.workers.records(lambda store: store.update_batch(record, files or ()))


class _StoppedError(Exception):
    """Ends the work of a thread."""


def _token(record: BatchRecord) -> str:
    """What the ids of a batch's result lines begin with."""
    return record.id.removeprefix("batch_")[:16]


def _error_code(reply: Reply) -> str | None:
    try:
        return _ERROR.decode(reply.body).error.code
    except msgspec.DecodeError:
        return None


def _missing_input() -> InputReport:
    error = BatchError("file_not_found", "The input file is gone.", "input_file_id")
    return InputReport(num_errors=1, errors=[error])
