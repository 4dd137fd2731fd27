"""An OpenAI-compatible server whose every latency is known, on a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from aiohttp import web


@dataclass(slots=True)
class Behaviour:
    """What the server does; times in seconds."""

    first_s: float = 0.0
    late_s: float = 0.0
    """More before the first piece, but not for probes."""
    gap_s: float = 0.0
    """Between pieces."""
    tokens_per_piece: int = 1
    fail_every: int = 0
    """Each so-many-th request (probes excluded) fails with `fail_with`."""
    fail_with: int | str = 500
    """A status, or `event` (an error event) or `cut` (no end), after two pieces."""
    freeze_on: int = 0
    """The so-many-th request (probes excluded) stops the whole server."""
    freeze_s: float = 0.0
    api_key: str | None = None
    models: tuple[str, ...] = ("fake",)
    refuses: tuple[str, ...] = ()
    """Fields that get a 400."""
    has_usage: bool = True
    cached_tokens: int | None = None
    overhead_tokens: int = 7
    tokens_per_word: int = 2
    seats: int = 10**9
    """Answers computed at the same time; others wait."""
    line_end: str = "\n"


@dataclass(slots=True)
class FakeServer:
    """Serves while entered; `bodies` are the requests in the order of arrival, probes first."""

    behaviour: Behaviour
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _thread: threading.Thread | None = None
    _seats: asyncio.Semaphore | None = None
    num_measured: int = 0

    def __enter__(self) -> FakeServer:
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        assert self._thread is not None
        self._thread.join(30)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=2**26)
        for path in ("/v1/chat/completions", "/v1/completions"):
            app.router.add_post(path, self._answer)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._seats = asyncio.Semaphore(self.behaviour.seats)
        ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    def _is_refused(self, request: web.Request) -> bool:
        key = self.behaviour.api_key
        return key is not None and request.headers.get("Authorization") != f"Bearer {key}"

    async def _models(self, request: web.Request) -> web.Response:
        if self._is_refused(request):
            return _error(401, "wrong key")
        return web.json_response({"data": [{"id": name} for name in self.behaviour.models]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        behaviour, body = self.behaviour, await request.json()
        self.bodies.append(body)
        if self._is_refused(request):
            return _error(401, "wrong key")
        for name in behaviour.refuses:
            if name in body:
                return _error(400, f"unknown field {name}")
        if body["model"] not in behaviour.models:
            return _error(404, f"there is no model {body['model']}")
        number = 0
        if body.get("max_tokens") != 2:  # probes ask for two tokens
            self.num_measured += 1
            number = self.num_measured
            if number == behaviour.freeze_on:
                time.sleep(behaviour.freeze_s)
        fails = behaviour.fail_every and number and number % behaviour.fail_every == 0
        if fails and isinstance(behaviour.fail_with, int):
            return _error(behaviour.fail_with, "a failure as ordered")
        assert self._seats is not None
        await asyncio.sleep(behaviour.late_s if number else 0)
        async with self._seats:
            if body.get("stream"):
                return await self._stream(request, body, str(behaviour.fail_with) if fails else "")
            await asyncio.sleep(behaviour.first_s)
            message = {"role": "assistant", "content": "word " * body.get("max_tokens", 1)}
            choice = {"index": 0, "message": message, "text": "", "finish_reason": "length"}
            return web.json_response({"choices": [choice], "usage": self._usage(body)})

    async def _stream(
        self, request: web.Request, body: dict[str, Any], failure: str
    ) -> web.StreamResponse:
        behaviour, due = self.behaviour, self._loop.time() + self.behaviour.first_s
        is_chat = "messages" in body
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._send(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        left, sent = int(body.get("max_tokens", 10)), 0
        while left > 0:
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            due += behaviour.gap_s
            number = min(left, behaviour.tokens_per_piece)
            left, sent = left - number, sent + 1
            text = "wörd " * number
            choice = {"index": 0, "delta": {"content": text}} if is_chat else {"text": text}
            await self._send(response, {"choices": [choice]})
            if failure == "event" and sent == 2:
                await self._send(response, {"error": {"message": "an error as ordered"}})
                return response
            if failure == "cut" and sent == 2:
                return response
        await self._send(response, {"choices": [{"delta": {}, "finish_reason": "length"}]})
        if behaviour.has_usage and body.get("stream_options"):
            await self._send(response, {"choices": [], "usage": self._usage(body)})
        await response.write(f"data: [DONE]{behaviour.line_end * 2}".encode())
        return response

    async def _send(self, response: web.StreamResponse, chunk: dict[str, Any]) -> None:
        data = json.dumps(chunk, ensure_ascii=False)
        await response.write(f"data: {data}{self.behaviour.line_end * 2}".encode())

    def _usage(self, body: dict[str, Any]) -> dict[str, Any]:
        texts = [m["content"] for m in body.get("messages", ())] or [body.get("prompt", "")]
        words = sum(len(text.split()) for text in texts)
        prompt = self.behaviour.overhead_tokens + self.behaviour.tokens_per_word * words
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": body.get("max_tokens", 10),
        }
        if self.behaviour.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.behaviour.cached_tokens}
        return usage


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "x"}}, status=status)
