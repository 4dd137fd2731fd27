"""Starts everything in the order that makes the server ready soonest, and returns the exit code.

Nothing heavy is imported at the top: the engine process is launched first and loads its weights
while this process imports the web framework and builds the tokenizer.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from caudal.config import EngineConfig, ServerConfig
from caudal.errors import CaudalError, ConfigError
from caudal.server.signals import StopRequests

if TYPE_CHECKING:
    import ssl

    import uvicorn

    from caudal.engine.child import EngineChild
    from caudal.engine.client import EngineClient
    from caudal.server.keys import KeyRing
    from caudal.server.model import ServedModel
    from caudal.server.state import AppState
    from caudal.server.tracing import Tracer

logger = logging.getLogger("caudal.server")

BACKLOG = 4096
KEEP_ALIVE_S = 65
CLOSE_TIMEOUT_S = 2
"""After the drain, how long connections that still hold data may flush."""


@dataclass(frozen=True, slots=True)
class Entrance:
    """Where clients come in, and what lets them."""

    keys: KeyRing
    tls: ssl.SSLContext | None
    """None: plain HTTP."""
    listener: socket.socket


@dataclass(frozen=True, slots=True)
class ServeSpec:
    """What `serve` needs from its caller."""

    config: ServerConfig
    create_engine: Callable[[], EngineClient]
    """Makes a client that is not started; called again for a restart."""
    load_model: Callable[[], ServedModel]
    """Builds tokenizer and chat template; runs in a thread."""
    announce: Callable[[str], None] = print
    """Told once when the server is ready."""


def run_server(engine: EngineConfig, server: ServerConfig, child: EngineChild) -> None:
    """Serve the model of `engine` until a signal; raises SystemExit(1) if that fails.

    `child` becomes the engine. Raises ConfigError if the address cannot be bound.
    """
    from caudal.engine.zmq_client import ZmqEngineClient

    children = [child]

    name = server.served_model_name or engine.model_path.stem

    def load() -> ServedModel:
        from caudal.server.loading import load_served_model

        return load_served_model(engine.model_path, name)

    def create_engine() -> ZmqEngineClient:
        return ZmqEngineClient(engine, children.pop() if children else None)

    code = serve(ServeSpec(server, create_engine, load))
    if code:
        raise SystemExit(code)


def serve(spec: ServeSpec) -> int:
    """Serve until a signal or the loss of the engine; returns the process exit code.

    0 after a drained stop, 1 if the model or the engine could not be started or kept.
    Raises ConfigError if the address cannot be bound, or for unusable keys or certificates.
    """
    import uvloop

    from caudal.server.keys import load_keys
    from caudal.server.tls import create_ssl_context

    tracer = None
    if spec.config.otlp_traces_endpoint is not None:
        from caudal.server.tracing import create_tracer

        tracer = create_tracer(spec.config)
    entrance = Entrance(load_keys(spec.config), create_ssl_context(spec.config), bind(spec.config))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_serve(spec, entrance, tracer))
    if tracer is not None:
        tracer.close()
    return code


def bind(config: ServerConfig) -> socket.socket:
    """A bound socket; clients can connect as soon as the server listens on it."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--host/--port: cannot listen on {config.host}:{config.port}: {error.strerror}"
        ) from None
    listener.setblocking(False)
    return listener


async def _serve(spec: ServeSpec, entrance: Entrance, tracer: Tracer | None) -> int:
    stop = StopRequests()
    stop.listen()
    listener = entrance.listener
    engine = spec.create_engine()
    try:
        await engine.start()
        loading = asyncio.create_task(asyncio.to_thread(spec.load_model))

        from caudal.server.lifecycle import Lifecycle
        from caudal.server.state import AppState

        state = AppState(spec.config, engine, keys=entrance.keys)
        if tracer is not None:
            tracer.follow(state)
        if spec.config.api_key_file is not None:
            stop.on_hangup(lambda: _reload_keys(state))
        lifecycle = Lifecycle(state, spec.create_engine, stop)
        server = _create_http_server(state, entrance)
        serving = asyncio.create_task(server.serve())
        try:
            state.model = await loading
        except CaudalError as error:
            logger.error("%s", error)
            code = 1
        else:
            code = await lifecycle.run(lambda: _become_ready(spec, state, listener))
            await state.close_batches()
        await state.close_recorder()
        server.force_exit = stop.now.is_set()
        await _shut_down(server, serving)
        engine = state.engine
        return code
    finally:
        listener.close()
        await engine.stop()


def _reload_keys(state: AppState) -> None:
    """Read the keys again; a file that is not usable changes nothing."""
    from caudal.server.keys import load_keys

    try:
        state.keys.replace(load_keys(state.config))
    except ConfigError as error:
        logger.error("the API keys stay as they were: %s", error)
    else:
        logger.info("%d API keys", len(state.keys))


def _create_http_server(state: AppState, entrance: Entrance) -> uvicorn.Server:
    import uvicorn

    from caudal.server.app import create_app
    from caudal.server.http_server import HttpServer
    from caudal.server.probes import Probes

    config = uvicorn.Config(
        create_app(state),
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
    )
    answer_probe = Probes(state).answer
    return HttpServer(config, entrance.listener, answer_probe, backlog=BACKLOG, tls=entrance.tls)


async def _shut_down(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    server.should_exit = True
    await asyncio.wait({serving}, timeout=CLOSE_TIMEOUT_S + 2)
    if not serving.done():
        serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def _become_ready(spec: ServeSpec, state: AppState, listener: socket.socket) -> None:
    _announce(spec, state, listener)
    state.batches.start()
    state.recorder.start()
    asyncio.get_running_loop().run_in_executor(None, _warm_up, state)


def _warm_up(state: AppState) -> None:
    """Do what the first chat and the first scrape would wait for; runs in a thread."""
    assert state.model is not None
    try:
        state.exposition()
        importlib.import_module("caudal.server.router")
        if state.model.chat_template.error is None:
            message = {"role": "user", "content": "hi"}
            with contextlib.suppress(CaudalError):
                state.model.tokenizer.encode_prompt(state.model.chat_template.render([message]))
    finally:
        # Everything made so far stays: keep the collector from walking it during requests.
        gc.freeze()
        gc.enable()


def _announce(spec: ServeSpec, state: AppState, listener: socket.socket) -> None:
    assert state.model is not None
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    body = f'{{"prompt":"Once upon a time","max_tokens":32,"model":"{state.model.name}"}}'
    key = " -H 'Authorization: Bearer KEY'" if len(state.keys) else ""
    is_tls = spec.config.ssl_certfile is not None
    url, insecure = f"http{'s' if is_tls else ''}://{host}:{port}", " -k" if is_tls else ""
    spec.announce(
        f"Ready: {state.model.name} at {url}  Dashboard: {url}/dashboard  "
        f"Try:  curl{insecure} {url}"
        f"/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    )
    sys.stdout.flush()
