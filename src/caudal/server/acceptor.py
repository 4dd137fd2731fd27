"""Accepts connections in bulk, and opens them at a pace that leaves the event loop quick.

uvloop accepts a single connection in each pass of the event loop, and reads and parses all that is
readable within one pass: in a burst a probe would wait for both. Here a pass accepts many, looks at
the first bytes without taking them, answers probes at once, and opens a few of the others.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from caudal.server.probes import MAX_HEAD_BYTES, ProbeAnswer

logger = logging.getLogger("caudal.server")

HANDSHAKE_TIMEOUT_S = 10.0

_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(frozen=True, slots=True)
class Pace:
    """How much of a burst one pass of the event loop takes on."""

    max_accepted: int = 256
    max_opened: int = 16
    silence_s: float = 30.0
    """Time for the first byte of a connection."""
    retry_s: float = 0.2
    """Pause after the process has run out of descriptors."""


class Acceptor:
    """Owns the listening side of `listener` while started, and connections that have not spoken."""

    def __init__(
        self,
        listener: socket.socket,
        create_protocol: Callable[[], asyncio.Protocol],
        answer_probe: Callable[[bytes], ProbeAnswer | None],
        *,
        backlog: int,
        tls: ssl.SSLContext | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._listener = listener
        self._create_protocol = create_protocol
        self._answer_probe = answer_probe
        self._backlog = backlog
        self._tls = tls
        self._pace = pace or Pace()
        self._silent: dict[socket.socket, float] = {}
        """Connections without a byte yet, and when they are given up; earliest first."""
        self._spoken: deque[socket.socket] = deque()
        """Connections to open."""
        self._opening: set[asyncio.Task[object]] = set()
        self._opener: asyncio.Handle | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_started = False

    def start(self) -> None:
        """Listen, and accept from the next pass on."""
        self._listener.setblocking(False)
        self._listener.listen(self._backlog)
        self._is_started = True
        self._resume()

    def stop(self) -> None:
        """Accept no more, and close what has not been opened; open connections stay."""
        if not self._is_started:
            return
        self._is_started = False
        asyncio.get_running_loop().remove_reader(self._listener)
        for connection in list(self._silent):
            self._forget_silent(connection)
            connection.close()
        while self._spoken:
            self._spoken.popleft().close()
        if self._sweeper is not None:
            self._sweeper.cancel()

    def _resume(self) -> None:
        if self._is_started:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(self._pace.max_accepted):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                logger.error("cannot accept connections: %s", error.strerror)
                loop.remove_reader(self._listener)
                loop.call_later(self._pace.retry_s, self._resume)
                return
            connection.setblocking(False)
            if self._tls is not None:
                self._open_soon(connection)
            elif not self._look(connection):
                self._silent[connection] = loop.time() + self._pace.silence_s
                loop.add_reader(connection, self._look_again, connection)
                self._sweep_later()

    def _look_again(self, connection: socket.socket) -> None:
        self._forget_silent(connection)
        self._look(connection)

    def _look(self, connection: socket.socket) -> bool:
        """Answer or queue a connection that has said something; False if it has not."""
        try:
            data = connection.recv(MAX_HEAD_BYTES, socket.MSG_PEEK)
            answer = self._answer_probe(data)
            if answer is not None:
                connection.recv(answer.num_bytes)
                connection.send(answer.data)
                data = b"" if answer.is_last else data
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if data:
            self._open_soon(connection)
        else:
            connection.close()
        return True

    def _forget_silent(self, connection: socket.socket) -> None:
        del self._silent[connection]
        asyncio.get_running_loop().remove_reader(connection)

    def _sweep_later(self) -> None:
        if self._sweeper is None and self._silent:
            loop = asyncio.get_running_loop()
            due = next(iter(self._silent.values()))
            self._sweeper = loop.call_at(max(due, loop.time() + 0.05), self._sweep)

    def _sweep(self) -> None:
        """Close connections that have been silent for too long."""
        self._sweeper = None
        now = asyncio.get_running_loop().time()
        for connection, due in list(self._silent.items()):
            if due > now:
                break
            self._forget_silent(connection)
            connection.close()
        self._sweep_later()

    def _open_soon(self, connection: socket.socket) -> None:
        self._spoken.append(connection)
        if self._opener is None:
            self._opener = asyncio.get_running_loop().call_soon(self._open_some)

    def _open_some(self) -> None:
        self._opener = None
        loop = asyncio.get_running_loop()
        for _ in range(min(self._pace.max_opened, len(self._spoken))):
            opening = loop.create_task(
                loop.connect_accepted_socket(
                    self._create_protocol,
                    self._spoken.popleft(),
                    ssl=self._tls,
                    ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S if self._tls else None,
                )
            )
            self._opening.add(opening)
            opening.add_done_callback(self._opened)
        if self._spoken:
            self._opener = loop.call_soon(self._open_some)

    def _opened(self, opening: asyncio.Task[object]) -> None:
        self._opening.discard(opening)
        if not opening.cancelled() and opening.exception() is not None:
            logger.warning("a connection was lost while it was accepted: %s", opening.exception())
