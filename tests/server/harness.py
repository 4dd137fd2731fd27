"""A server over the fake engine: in process for tables of requests, on loopback for the rest."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from openai import AsyncOpenAI

from caudal.config import ServerConfig
from caudal.server.app import create_app
from caudal.server.http_server import HttpServer
from caudal.server.model import ServedModel
from caudal.server.probes import Probes
from caudal.server.run import bind
from caudal.server.state import AppState, ServerLimits
from caudal.tokenizer.chat_template import ChatTemplate
from caudal.tokenizer.gguf_tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine, Script
from tests.tiny_vocabulary import bpe_metadata

ANSWER = "the river runs through the old town"
MODEL = "tiny"
MAX_MODEL_LEN = 256


def make_model(metadata: dict[str, Any] | None = None) -> ServedModel:
    """The tiny byte-level vocabulary with a ChatML template."""
    metadata = metadata or bpe_metadata("smollm")
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    template = ChatTemplate.from_gguf_metadata(metadata, tokenizer)
    return ServedModel(MODEL, tokenizer, template, "llama", "F32")


@dataclass
class Setup:
    """What a test may want to differ."""

    answer: str | list[int] = ANSWER
    config: ServerConfig = field(default_factory=lambda: ServerConfig(port=0))
    limits: ServerLimits = field(default_factory=ServerLimits)
    metadata: dict[str, Any] | None = None
    max_model_len: int = MAX_MODEL_LEN
    step_s: float = 0.0
    is_ready: bool = True
    has_special_answer: bool = False
    """Special tokens written in the answer count as such."""


def make_state(setup: Setup) -> tuple[AppState, FakeEngine]:
    """State over an engine that is not started."""
    model = make_model(setup.metadata)
    answer = setup.answer
    ids = answer
    if isinstance(ids, str):
        ids = model.tokenizer.encode(ids, parse_special=setup.has_special_answer)
    script: Script = lambda request: [*ids]  # noqa: E731
    engine = FakeEngine(
        script=script,
        vocab_size=model.tokenizer.vocab_size,
        eos_id=2,
        max_model_len=setup.max_model_len,
        step_s=setup.step_s,
    )
    if setup.is_ready:
        engine.become_ready()
    return AppState(setup.config, engine, model, setup.limits), engine


@dataclass
class Served:
    """A running server and its clients."""

    state: AppState
    engine: FakeEngine
    http: httpx.AsyncClient
    openai: AsyncOpenAI
    port: int = 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The served model's tokenizer."""
        assert self.state.model is not None
        return self.state.model.tokenizer

    async def complete(self, **fields: Any) -> dict[str, Any]:
        """The answer to a completion that must succeed."""
        response = await self.http.post("/v1/completions", json={"prompt": "hi", **fields})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def chat(self, content: str = "hi", **fields: Any) -> dict[str, Any]:
        """The answer to a chat that must succeed."""
        body = {"messages": [{"role": "user", "content": content}], **fields}
        response = await self.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of each event of a stream that must succeed; the last is "[DONE]"."""
        response = await self.http.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return parse_events(response.text)

    async def raw(self, path: str, body: dict[str, Any]) -> Connection:
        """A connection that has sent a request and reads nothing by itself."""
        return await open_request(self.port, path, body)

    async def check_idle(self) -> None:
        """The server still answers, and nothing is left in the engine."""
        async with asyncio.timeout(5):
            while self.engine.stats.num_running or self.engine.stats.num_waiting:
                await asyncio.sleep(0.005)
        answer = await self.complete(max_tokens=1)
        assert answer["usage"]["completion_tokens"] == 1
        assert self.state.num_active == 0
        assert len(self.state.streams) == 0
        assert self.state.bodies.num_used == 0


def parse_events(text: str) -> list[Any]:
    """The data of each event; checks the framing and drops comments."""
    assert text.endswith("\n\n")
    blocks = [block for block in text[:-2].split("\n\n") if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), text
    data = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


@dataclass
class Connection:
    """A raw HTTP/1.1 connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def read_until(self, marker: bytes) -> bytes:
        """What arrives up to and including `marker`."""
        async with asyncio.timeout(5):
            return await self.reader.readuntil(marker)

    async def read_all(self) -> bytes:
        """What arrives until the server closes the connection."""
        async with asyncio.timeout(10):
            return await self.reader.read()

    async def close(self) -> None:
        """Leave, as a killed client does."""
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


async def open_request(port: int, path: str, body: dict[str, Any]) -> Connection:
    """Send a POST and return at once."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
    )
    return await open_raw(port, head.encode() + data)


async def open_raw(port: int, data: bytes) -> Connection:
    """Connect and send bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    return Connection(reader, writer)


@contextlib.asynccontextmanager
async def in_process(setup: Setup | None = None) -> AsyncIterator[Served]:
    """The application without a network: a fresh one costs a few milliseconds."""
    state, engine = make_state(setup or Setup())
    await engine.start()
    transport = httpx.ASGITransport(app=create_app(state), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        client = AsyncOpenAI(
            api_key="unused", base_url="http://test/v1", http_client=http, max_retries=0
        )
        yield Served(state, engine, http, client)
    await engine.stop()
    state.pool.shutdown()


@contextlib.asynccontextmanager
async def on_loopback(setup: Setup | None = None) -> AsyncIterator[Served]:
    """A real server on a free port."""
    setup = setup or Setup()
    state, engine = make_state(setup)
    await engine.start()
    listener = bind(setup.config)
    config = uvicorn.Config(
        create_app(state),
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    server = HttpServer(config, listener, Probes(state).answer, backlog=4096)
    serving = asyncio.create_task(server.serve())
    port = listener.getsockname()[1]
    async with asyncio.timeout(5):
        while not server.started:
            await asyncio.sleep(0.001)
    base_url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=base_url, timeout=20) as http:
        client = AsyncOpenAI(
            api_key="unused", base_url=f"{base_url}/v1", http_client=http, max_retries=0
        )
        try:
            yield Served(state, engine, http, client, port)
        finally:
            await http.aclose()
            server.should_exit = True
            await serving
            listener.close()
            await engine.stop()
            state.pool.shutdown()
