"""SIGTERM and SIGINT as events, from the first moment of a server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


class StopRequests:
    """The first signal asks to stop, the second to stop now."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.now = asyncio.Event()

    def listen(self) -> None:
        """Take over the signals of the process; needs the main thread's event loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask)

    def on_hangup(self, reload: Callable[[], None]) -> None:
        """Call `reload` on SIGHUP, which would otherwise end the process."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)

    def ask(self) -> None:
        """What a signal does; also the way to stop a server from inside."""
        (self.now if self.asked.is_set() else self.asked).set()
