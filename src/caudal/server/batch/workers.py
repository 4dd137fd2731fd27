"""The threads that do what blocks: one for the records, a few for contents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from caudal.server.batch.directory import DataDirectory
from caudal.server.batch.store import BatchStore

T = TypeVar("T")

NUM_FILE_THREADS = 4


class Workers:
    """Owns the store and its thread, the directory's lock, and the threads for contents."""

    def __init__(self, directory: DataDirectory) -> None:
        self.directory = directory
        self._records = ThreadPoolExecutor(1, "caudal-batch-records")
        self._contents = ThreadPoolExecutor(NUM_FILE_THREADS, "caudal-batch-contents")
        self._store: BatchStore | None = None

    async def open(self) -> None:
        """Lock the directory and open the store. Raises ConfigError."""
        await asyncio.get_running_loop().run_in_executor(self._records, self._open)

    def _open(self) -> None:
        self.directory.open()
        try:
            self._store = BatchStore(self.directory.database)
            self.directory.delete_unknown(self._store.needed_contents())
        except BaseException:
            self._close()
            raise

    async def records(self, work: Callable[[BatchStore], T]) -> T:
        """Run `work` on the store, after all work before it."""
        assert self._store is not None, "open() comes first"
        store = self._store
        return await asyncio.get_running_loop().run_in_executor(self._records, lambda: work(store))

    async def contents(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread for contents."""
        return await asyncio.get_running_loop().run_in_executor(self._contents, work)

    async def close(self) -> None:
        """Finish what was begun, close the store and unlock the directory."""
        await asyncio.get_running_loop().run_in_executor(self._records, self._close)
        self._records.shutdown()
        self._contents.shutdown()

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
        self.directory.close()
