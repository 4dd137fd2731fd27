"""Accepts connections in bulk.

uvloop accepts a single connection in each pass of the event loop. In a burst a probe would then
wait behind every connection before it, each for the duration of a pass that is full of work.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable

logger = logging.getLogger("caudal.server")

HANDSHAKE_TIMEOUT_S = 10.0

_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Acceptor:
    """Owns the listening side of `listener` while started."""

    def __init__(
        self,
        listener: socket.socket,
        create_protocol: Callable[[], asyncio.Protocol],
        *,
        backlog: int,
        tls: ssl.SSLContext | None = None,
        max_per_pass: int = 256,
        retry_s: float = 0.2,
    ) -> None:
        self._listener = listener
        self._create_protocol = create_protocol
        self._backlog = backlog
        self._tls = tls
        self._max_per_pass = max_per_pass
        self._retry_s = retry_s
        self._opening: set[asyncio.Task[object]] = set()
        self._is_started = False

    def start(self) -> None:
        """Listen, and accept from the next pass on."""
        self._listener.setblocking(False)
        self._listener.listen(self._backlog)
        self._is_started = True
        self._resume()

    def stop(self) -> None:
        """Accept no more; connections that are open stay open."""
        if self._is_started:
            self._is_started = False
            asyncio.get_running_loop().remove_reader(self._listener)

    def _resume(self) -> None:
        if self._is_started:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(self._max_per_pass):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                logger.error("cannot accept connections: %s", error.strerror)
                loop.remove_reader(self._listener)
                loop.call_later(self._retry_s, self._resume)
                return
            opening = loop.create_task(
                loop.connect_accepted_socket(
                    self._create_protocol,
                    connection,
                    ssl=self._tls,
                    ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S if self._tls else None,
                )
            )
            self._opening.add(opening)
            opening.add_done_callback(self._opened)

    def _opened(self, opening: asyncio.Task[object]) -> None:
        self._opening.discard(opening)
        if not opening.cancelled() and opening.exception() is not None:
            logger.warning("a connection was lost while it was accepted: %s", opening.exception())
