"""The engine's process as its parent holds it: started early, told later what to run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from types import TracebackType
from typing import Self

_COMMAND = (
    "import gc; gc.disable(); from caudal.engine.process import main; raise SystemExit(main())"
)
"""The collector would walk the modules again and again while they load; `main` turns it on."""


class EngineChild:
    """Owns a process that imports its code at once and then waits for its LaunchConfig.

    It can be started before there is an event loop. It ends by itself if this process does.
    """

    def __init__(self) -> None:
        # The engine does no linear algebra with NumPy; BLAS threads would only spin at its start.
        environment = {"OPENBLAS_NUM_THREADS": "1", **os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND, "caudal-engine"],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env=environment,
        )
        self._ended: asyncio.Future[int] | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it runs or before `wait` has seen its end."""
        return self._process.returncode

    def configure(self, launch: bytes) -> None:
        """Tell it what to run. A process that is already dead is left for `wait` to find."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(launch)
            self._process.stdin.close()

    async def wait(self) -> int:
        """Wait for its end -> its return code. All calls must come from one event loop."""
        if self._ended is None:
            loop = asyncio.get_running_loop()
            self._ended = loop.create_future()
            threading.Thread(
                target=self._reap, args=(loop, self._ended), name="caudal-reaper", daemon=True
            ).start()
        return await asyncio.shield(self._ended)

    def _reap(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[int]) -> None:
        returncode = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop may be gone by now
            loop.call_soon_threadsafe(ended.set_result, returncode)

    def kill(self) -> None:
        """End it without asking."""
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it if nobody configured it; a running engine is its client's to stop."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
