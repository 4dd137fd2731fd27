"""uvicorn with our own accepting and without its signal handling: the life cycle decides."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn

from caudal.server.acceptor import Acceptor
from caudal.server.http_protocol import BoundedHttpProtocol
from caudal.server.probes import ProbeAnswer


class HttpServer(uvicorn.Server):
    """Serves on a bound socket until `should_exit` is set."""

    def __init__(
        self,
        config: uvicorn.Config,
        listener: socket.socket,
        answer_probe: Callable[[bytes], ProbeAnswer | None],
        *,
        backlog: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`tls` None: plain HTTP."""
        super().__init__(config)
        self._acceptor = Acceptor(
            listener, self._create_protocol, answer_probe, backlog=backlog, tls=tls
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting; uvicorn itself gets no socket."""
        await super().startup(sockets=[])
        self._acceptor.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, then let uvicorn close the connections."""
        self._acceptor.stop()
        await super().shutdown(sockets=[])

    def _create_protocol(self) -> asyncio.Protocol:
        return BoundedHttpProtocol(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=asyncio.get_running_loop(),
        )
