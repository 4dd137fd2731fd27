"""Files and batches of a server: what the endpoints call, and what runs behind them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial

from caudal.config import default_data_dir
from caudal.errors import (
    ConfigError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from caudal.server.batch.allowance import Allowance, make_allowance
from caudal.server.batch.directory import DataDirectory
from caudal.server.batch.dispatch import BATCH_ROUTES, PROMPT_COUNTERS, Dispatcher
from caudal.server.batch.job import Job, JobTools
from caudal.server.batch.limits import MAX_WINDOW_S, BatchLimits
from caudal.server.batch.pace import Slots
from caudal.server.batch.records import PURPOSE_INPUT, BatchRecord, FileRecord, Page
from caudal.server.batch.upload import receive_upload
from caudal.server.batch.workers import Workers
from caudal.server.errors import ConflictError, PayloadTooLargeError
from caudal.server.protocol.batches import CreateBatchRequest
from caudal.server.quota import RateLimitError
from caudal.server.state import AppState

logger = logging.getLogger("caudal.server")

TICK_S = 0.05
"""The engine's numbers are looked at this often while requests wait for a place."""
SERVICE_UPDATE_S = 1.0
BATCH_RETRY_S = 60.0
"""After which a client may ask whether a batch has ended."""
WINDOW_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class BatchService:
    """Owns the data directory and all jobs. Opened by `start` or the first use."""

    def __init__(self, state: AppState, limits: BatchLimits | None = None) -> None:
        self._state = state
        self._limits = limits or BatchLimits()
        self._opening = asyncio.Lock()
        self._workers: Workers | None = None
        self._jobs: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = Slots(lambda: state.engine)
        self._tools: JobTools | None = None
        self._uploads: Counter[str] = Counter()
        """Uploads in progress by owner."""
        self._creating: Counter[str] = Counter()
        """Batches by owner that are being recorded and have no job yet."""
        self._is_closed = False

    def start(self) -> None:
        """Go on, in the background, with the batches of an earlier server."""
        self._keep(asyncio.create_task(self._resume()))

    async def _resume(self) -> None:
        """Open only where there are records."""
        directory = DataDirectory(self._state.config.data_dir or default_data_dir())
        if not directory.has_records:
            return
        try:
            await self._open()
        except UnavailableError as error:
            logger.warning("files and batches are off: %s", error)

    async def close(self) -> None:
        """Stop all jobs where they are, with their results on the disk, and free the directory."""
        self._is_closed = True
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with self._opening:
            workers, self._workers = self._workers, None
            if workers is not None:
                await workers.close()

    async def create_file(
        self, owner: str, chunks: AsyncIterator[bytes], content_type: bytes
    ) -> FileRecord:
        """Store an upload. Raises as `receive_upload`, OverloadedError or UnavailableError."""
        workers = await self._open()
        await self._check_upload(workers, owner)
        file_id = f"file-{secrets.token_hex(12)}"
        path = workers.directory.upload_path(file_id)
        self._uploads[owner] += 1
        try:
            with _disk_errors():
                return await self._receive(workers, owner, file_id, chunks, content_type)
        finally:
            self._uploads[owner] -= 1
            if not self._uploads[owner]:
                del self._uploads[owner]
            await workers.contents(lambda: path.unlink(missing_ok=True))

    async def _check_upload(self, workers: Workers, owner: str) -> None:
        """Keep one owner from taking the server's connections or its disk."""
        limits, num_uploads = self._limits, self._uploads[owner]
        if num_uploads >= limits.max_uploads:
            raise OverloadedError(
                f"You have {num_uploads} uploads in progress; try again soon.",
                retry_after_s=2.0,
                reason="uploads",
            )
        num_bytes = await workers.records(lambda store: store.stored_bytes(owner))
        if num_bytes >= limits.max_stored_bytes:
            raise PayloadTooLargeError(
                f"Your files hold {num_bytes} bytes and the limit is {limits.max_stored_bytes}; "
                "delete some first.",
                param="file",
                code="storage_full",
            )

    async def _receive(
        self,
        workers: Workers,
        owner: str,
        file_id: str,
        chunks: AsyncIterator[bytes],
        content_type: bytes,
    ) -> FileRecord:
        directory = workers.directory
        upload = await receive_upload(
            chunks,
            content_type,
            directory.upload_path(file_id),
            workers,
            self._limits.max_file_bytes,
        )
        now = int(time.time())
        lifetime_s = upload.form.expires_seconds
        record = FileRecord(
            id=file_id,
            owner=owner,
            purpose=PURPOSE_INPUT,
            filename=upload.filename,
            num_bytes=upload.num_bytes,
            created_at=now,
            expires_at=None if lifetime_s is None else now + lifetime_s,
        )
        await workers.contents(lambda: directory.keep_upload(file_id))
        await workers.records(lambda store: store.insert_file(record))
        return record

    async def get_file(self, owner: str, file_id: str) -> FileRecord:
        """A file. Raises NotFoundError."""
        workers = await self._open()
        record = await workers.records(lambda store: store.get_file(owner, file_id, time.time()))
        if record is None:
            raise _no_file(file_id)
        return record

    async def list_files(self, owner: str, page: Page) -> tuple[list[FileRecord], bool]:
        """A page of files, and whether more follow. Raises InvalidRequestError."""
        workers = await self._open()
        return await workers.records(lambda store: store.list_files(owner, page, time.time()))

    async def delete_file(self, owner: str, file_id: str) -> None:
        """Delete a file; a batch that reads it goes on. Raises NotFoundError."""
        workers = await self._open()
        if not await workers.records(lambda store: store.delete_file(owner, file_id, time.time())):
            raise _no_file(file_id)
        await self._delete_unused()

    async def open_content(self, owner: str, file_id: str) -> tuple[FileRecord, int]:
        """A file and a descriptor of its content, which the caller closes.

        Raises NotFoundError.
        """
        record = await self.get_file(owner, file_id)
        workers = await self._open()
        path = workers.directory.content_path(file_id)
        try:
            return record, await workers.contents(lambda: os.open(path, os.O_RDONLY))
        except FileNotFoundError:
            raise _no_file(file_id) from None

    async def read_content(self, descriptor: int, num_bytes: int) -> bytes:
        """The next bytes of an open content."""
        workers = await self._open()
        return await workers.contents(lambda: os.read(descriptor, num_bytes))

    async def create_batch(self, owner: str, body: CreateBatchRequest) -> BatchRecord:
        """Begin a batch. Raises NotFoundError, InvalidRequestError, RateLimitError (too many of
        this key) or OverloadedError."""
        model = self._state.require_model()
        workers = await self._open()
        window_s = _window_s(body.completion_window)
        if body.endpoint not in BATCH_ROUTES:
            raise InvalidRequestError(
                f"endpoint: must be one of {', '.join(BATCH_ROUTES)}, got {body.endpoint!r}.",
                param="endpoint",
                code="invalid_value",
            )
        file = await self.get_file(owner, body.input_file_id)
        if file.purpose != PURPOSE_INPUT:
            raise InvalidRequestError(
                f"input_file_id: {file.id!r} has the purpose {file.purpose!r}, not 'batch'.",
                param="input_file_id",
                code="invalid_value",
            )
        self._check_active(owner)
        now = time.time()
        expiry = body.output_expires_after
        record = BatchRecord(
            id=f"batch_{secrets.token_hex(12)}",
            owner=owner,
            endpoint=body.endpoint,
            model=model.name,
            input_file_id=file.id,
            completion_window=body.completion_window,
            created_at=int(now),
            deadline=now + window_s,
            output_file_id=f"file-{secrets.token_hex(12)}",
            error_file_id=f"file-{secrets.token_hex(12)}",
            metadata=body.metadata,
            output_lifetime_s=None if expiry is None else expiry.seconds,
        )
        self._creating[owner] += 1
        try:
            await workers.records(lambda store: store.insert_batch(record))
            return self._start(record).snapshot()
        finally:
            self._creating[owner] -= 1
            if not self._creating[owner]:
                del self._creating[owner]

    def _check_active(self, owner: str) -> None:
        """Raise RateLimitError or OverloadedError if `owner` has too many unfinished batches."""
        num_active = sum(job.record.owner == owner for job in self._jobs.values())
        num_active += self._creating[owner]
        limit = self._state.keys.limits_of(owner).max_batches
        if limit is not None and num_active >= limit:
            raise RateLimitError(
                f"In-progress batch limit reached: max_batches of this API key is {limit}, and "
                f"{num_active} are in progress. Try again once some of your batches have ended.",
                retry_after_s=BATCH_RETRY_S,
                reason="key_batches",
            )
        if num_active >= self._limits.max_active:
            raise OverloadedError(
                f"You have {num_active} unfinished batches; wait for some of them to end.",
                retry_after_s=BATCH_RETRY_S,
                reason="batches",
            )

    async def get_batch(self, owner: str, batch_id: str) -> BatchRecord:
        """A batch with its counts of this moment. Raises NotFoundError."""
        workers = await self._open()
        record = await workers.records(lambda store: store.get_batch(owner, batch_id))
        if record is None:
            raise NotFoundError(
                f"There is no batch {batch_id[:256]!r}.", param="batch_id", code="batch_not_found"
            )
        return self._live(record)

    async def list_batches(self, owner: str, page: Page) -> tuple[list[BatchRecord], bool]:
        """A page of batches, and whether more follow. Raises InvalidRequestError."""
        workers = await self._open()
        records, has_more = await workers.records(lambda store: store.list_batches(owner, page))
        return [self._live(record) for record in records], has_more

    async def cancel_batch(self, owner: str, batch_id: str) -> BatchRecord:
        """Stop a batch; what it has finished stays. Raises NotFoundError or ConflictError."""
        record = await self.get_batch(owner, batch_id)
        job = self._jobs.get(batch_id)
        if job is None or not await job.cancel():
            raise ConflictError(
                f"A batch whose status is {self._live(record).status!s} cannot be cancelled.",
                code="batch_not_cancellable",
            )
        return job.snapshot()

    def _live(self, record: BatchRecord) -> BatchRecord:
        job = self._jobs.get(record.id)
        return record if job is None else job.snapshot()

    async def _open(self) -> Workers:
        async with self._opening:
            if self._is_closed:
                raise UnavailableError("The server is shutting down.", code="shutting_down")
            if self._workers is None:
                root = self._state.config.data_dir or default_data_dir()
                workers = Workers(DataDirectory(root))
                try:
                    await workers.open()
                except BaseException as error:
                    # Also when cancelled half-way: the thread still takes the lock.
                    await asyncio.shield(workers.close())
                    if isinstance(error, ConfigError):
                        logger.error("%s", error)  # it names a path of this machine
                        raise UnavailableError(
                            "This server's folder for files and batches is in use or cannot be "
                            "written; its log has the details.",
                            code="data_dir_unavailable",
                        ) from None
                    raise
                self._workers = workers
                await self._start_all(workers)
        return self._workers

    async def _start_all(self, workers: Workers) -> None:
        self._tools = JobTools(
            state=self._state,
            workers=workers,
            dispatcher=Dispatcher(self._state),
            slots=self._slots,
            limits=self._limits,
            allowance_of=self._allowance_of,
            validation_turn=asyncio.Semaphore(1),
        )
        for record in await workers.records(lambda store: store.active_batches()):
            logger.info("batch %s goes on (%s)", record.id, record.status)
            self._start(record)
        for background in (self._tick(), self._sweep()):
            self._keep(asyncio.create_task(background))

    def _allowance_of(self, record: BatchRecord) -> Allowance | None:
        others = [
            job.snapshot()
            for job in self._jobs.values()
            if job.record.owner == record.owner and job.record.id != record.id
        ]
        limits = self._state.keys.limits_of(record.owner)
        count = partial(PROMPT_COUNTERS[record.endpoint], self._state)
        return make_allowance(limits, others, self._state.require_model, count)

    def _start(self, record: BatchRecord) -> Job:
        assert self._tools is not None
        job = Job(record, self._tools)
        self._jobs[record.id] = job
        self._keep(asyncio.create_task(self._run(job)))
        return job

    def _keep(self, task: asyncio.Task[None]) -> None:
        """Hold on to a task until it is done, or until `close` ends it."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, job: Job) -> None:
        try:
            await job.run()
        finally:
            del self._jobs[job.record.id]
        await self._delete_unused()

    async def _tick(self) -> None:
        """Keep the places and the classes of the batches up to date."""
        update_due = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            self._slots.refresh()
            now = time.time()
            if now >= update_due:
                update_due = now + SERVICE_UPDATE_S
                for job in self._jobs.values():
                    job.update_service(now)

    async def _sweep(self) -> None:
        """Delete what has expired."""
        while True:
            await asyncio.sleep(self._limits.sweep_interval_s)
            await self._delete_unused()

    async def _delete_unused(self) -> None:
        workers = await self._open()
        unused = await workers.records(lambda store: store.take_unused_files(time.time()))

        def delete() -> None:
            for file_id in unused:
                workers.directory.delete_content(file_id)

        if unused:
            await workers.contents(delete)


def _window_s(window: str) -> int:
    """Seconds of a completion window. Raises InvalidRequestError if it is too long."""
    seconds = int(window[:-1]) * WINDOW_UNITS_S[window[-1]]
    if seconds > MAX_WINDOW_S:
        raise InvalidRequestError(
            f"completion_window: must be at most {MAX_WINDOW_S // 86400}d, got {window!r}.",
            param="completion_window",
            code="invalid_value",
        )
    return seconds


def _no_file(file_id: str) -> NotFoundError:
    return NotFoundError(
        f"There is no file {file_id[:256]!r}.", param="file_id", code="file_not_found"
    )


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """A full or broken disk is the server's fault, and said so."""
    try:
        yield
    except OSError as error:
        logger.error("an upload could not be stored: %s", error)
        raise UnavailableError(
            f"The server could not store the file: {error.strerror}.", code="storage_failed"
        ) from None
