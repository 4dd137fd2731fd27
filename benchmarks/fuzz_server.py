"""Sends a server whatever clients can think of, and looks for what stays behind.

    python benchmarks/fuzz_server.py [--model smollm2-135m] [--seconds 600] [--seed 0] [-- flags]

Random requests of all API families, valid and not, with structured output and tools; clients that
leave in every state; files and batches, cancelled and deleted while they run. No answer may be a
500 or hold the text of an exception, and health probes must be answered all the time. Afterwards
the counts of running and waiting requests and of held KV blocks are 0, a greedy answer is what it
was before, open files are as many as before, memory (anonymous pages of server and engine) has
grown by at most --margin-mib since the end of the warm-up, the first fifth of the time, and the
server ends at once when it is asked to, because nothing is left to wait for. Exits with 1 if
anything of this is not so; --seed repeats a run as far as timing lets it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.fuzz_requests import Call, RequestSource

NUM_CLIENTS = 12
ANSWER_TIMEOUT_S = 120.0
IDLE_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 5.0
MAX_EXTRA_FILES = 8
"""Open files more than before: idle connections of a pool, a database's journal."""
GAUGES = (
    *("num_requests_running", "num_requests_waiting", "num_tokens_waiting", "kv_blocks_held"),
    *("num_background_running", "num_background_waiting"),
)
_LAST = re.compile(rb'"priority": ?[1-9]|"service_tier": ?"flex"')
EXCEPTION_TEXTS = (b"Traceback", b"msgspec.", b"KeyError", b"TypeError", b"internal_error")
FLAGS = (
    *("--served-model-name", "fuzzed", "--max-num-seqs", "8", "--max-queue-requests", "24"),
    *("--kv-cache-memory", "32MiB", "--port", "0"),
)
GREEDY = {"prompt": "the river runs", "temperature": 0, "max_tokens": 24, "ignore_eos": True}


@dataclass(slots=True)
class Outcome:
    """What happened."""

    statuses: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, what: str, call: Call | None = None, answer: bytes = b"") -> None:
        """Note something that must not be."""
        request = "" if call is None else f"\n    {call.method} {call.path} {call.data[:1500]!r}"
        self.faults.append(what + request + (f"\n    {answer[:600]!r}" if answer else ""))


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What a server holds while nobody asks."""

    gauges: dict[str, float]
    memory_mib: float
    num_files: int
    greedy: str
    blocks_missing: float


class FuzzedServer:
    """A `caudal serve` process."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.log = log
        self.url = f"http://127.0.0.1:{port}"

    def pids(self) -> list[int]:
        """Of the server and its engine."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, children)]

    async def stop(self) -> float:
        """Have it end as it does when asked to; returns the seconds that this took."""
        started = time.monotonic()
        self.process.terminate()
        await self.process.wait()
        return time.monotonic() - started

    async def get(self, path: str) -> bytes:
        async with aiohttp.ClientSession(self.url) as session, session.get(path) as response:
            return await response.read()

    async def leftovers(self) -> Leftovers:
        """Measured once nothing runs any more; a server that never comes to rest shows as such."""
        started = time.monotonic()
        while True:
            series = _series((await self.get("/metrics")).decode())
            gauges = {name: series[f"caudal_{name}"] for name in GAUGES}
            if not any(gauges.values()) or time.monotonic() - started > IDLE_TIMEOUT_S:
                break
            await asyncio.sleep(0.1)
        async with (
            aiohttp.ClientSession(self.url) as session,
            session.post("/v1/completions", json=GREEDY) as response,
        ):
            answer = await response.json()
        await asyncio.sleep(0.5)
        return Leftovers(
            gauges=gauges,
            memory_mib=sum(_anonymous_kib(pid) for pid in self.pids()) / 1024,
            num_files=sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in self.pids()),
            greedy=str(answer.get("choices", answer)),
            blocks_missing=series["caudal_kv_blocks"]
            - series["caudal_kv_blocks_free"]
            - series["caudal_kv_blocks_cached"],
        )


def _series(page: str) -> dict[str, float]:
    pairs = (line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def _anonymous_kib(pid: int) -> int:
    match = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match.group(1))


@contextlib.asynccontextmanager
async def fuzzed_server(model: str, folder: Path, flags: list[str]) -> AsyncIterator[FuzzedServer]:
    """Start it, wait until it is ready, end it."""
    log = folder / "log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "caudal", "serve", model, *FLAGS, *flags),
            *("--data-dir", str(folder / "data")),
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
        match = re.search(r"http://127\.0\.0\.1:(\d+) ", line)
        if match is None:
            sys.exit(f"the server did not start:\n{log.read_text()[-2000:]}")
        yield FuzzedServer(process, int(match.group(1)), log)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


class Fuzzer:
    """Clients that ask at random until the time is over."""

    def __init__(self, server: FuzzedServer, seed: int, vocab_size: int) -> None:
        self._server = server
        self._seed = seed
        self._vocab_size = vocab_size
        self._files: list[str] = []
        self._batches: list[str] = []
        self._ends_at = 0.0
        self.outcome = Outcome()

    async def run(self, seconds: float, phase: str) -> None:
        """All clients, for so long, with the health probe beside them."""
        self._ends_at = ends_at = time.monotonic() + seconds
        watching = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(NUM_CLIENTS):
                    rng = random.Random(f"{self._seed} {phase} {number}")
                    group.create_task(self._client(rng, ends_at))
        finally:
            watching.cancel()
        await self._end_batches()

    async def _watch(self) -> None:
        while True:
            try:
                async with asyncio.timeout(30):
                    await self._server.get("/health")
            except (TimeoutError, aiohttp.ClientError) as error:
                self.outcome.fault(f"a health probe failed: {error!r}")
            await asyncio.sleep(0.5)

    async def _client(self, rng: random.Random, ends_at: float) -> None:
        source = RequestSource(rng, self._vocab_size)
        actions = (
            *((self._ask,) * 11),
            *((self._leave,) * 4),
            self._send_half,
            self._ask_oddly,
            *((self._touch_batches,) * 2),
        )
        while time.monotonic() < ends_at and self._server.process.returncode is None:
            action = rng.choice(actions)
            self.outcome.actions[action.__name__.strip("_")] += 1
            try:
                await action(rng, source)
            except (ConnectionError, TimeoutError, asyncio.IncompleteReadError) as error:
                self.outcome.fault(f"{action.__name__}: {error!r}")

    async def _ask(self, rng: random.Random, source: RequestSource) -> None:
        await self._exchange(source.call())

    async def _ask_oddly(self, rng: random.Random, source: RequestSource) -> None:
        await self._exchange(source.odd_call())

    async def _exchange(self, call: Call) -> bytes:
        """Send it, read the answer and check it; returns the body."""
        reader, writer = await self._open(call.head() + call.data)
        answer = bytearray()
        try:
            async with asyncio.timeout(self._patience_s(call)):
                while part := await reader.read(65536):
                    answer += part
        except TimeoutError:
            self.outcome.fault("no whole answer in time", call, bytes(answer[-600:]))
            return b""
        finally:
            writer.close()
        return self._check(call, bytes(answer))

    def _patience_s(self, call: Call) -> float:
        """Who asks to come after all others may have to wait until those have stopped asking."""
        if _LAST.search(call.data) is None:
            return ANSWER_TIMEOUT_S
        return ANSWER_TIMEOUT_S + max(0.0, self._ends_at - time.monotonic())

    async def _open(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
            writer.write(data)
            with contextlib.suppress(ConnectionError):  # refused before it was read whole
                await writer.drain()
        return reader, writer

    async def _leave(self, rng: random.Random, source: RequestSource) -> None:
        """At once, while queued, in the prompt, or in the middle of the answer."""
        call = source.call()
        _, writer = await self._open(call.head() + call.data)
        await asyncio.sleep(rng.choice((0, 0.001, 0.01, 0.05, 0.2, 0.8)))
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()

    async def _send_half(self, rng: random.Random, source: RequestSource) -> None:
        call = source.call()
        data = call.head() + call.data
        _, writer = await self._open(data[: rng.randrange(len(data))])
        await asyncio.sleep(rng.choice((0, 0.02, 0.3)))
        writer.close()

    def _check(self, call: Call, answer: bytes) -> bytes:
        head, _, body = answer.partition(b"\r\n\r\n")
        match = re.match(rb"HTTP/1\.1 (\d{3}) ", head)
        status = int(match.group(1)) if match else 0
        self.outcome.statuses[str(status)] += 1
        head = head.lower()
        if b"transfer-encoding: chunked" in head:
            body, is_whole = _unchunked(body)
            if not is_whole:
                self.outcome.fault("an answer broke off", call, answer[-600:])
        # 504: the request had a timeout. 400 … 499 and 200 are answers.
        if status in (0, 500, 501, 502, 503):
            self.outcome.fault(f"status {status}", call, answer)
        # What a model says may hold such words, too.
        told = body if status >= 400 else _errors_of_events(body)
        if any(text in told for text in EXCEPTION_TEXTS):
            self.outcome.fault("the text of an exception", call, told[-600:])
        if b"text/event-stream" in head:
            self._check_events(call, body)
        elif b"application/json" in head and call.method != "OPTIONS":
            self._check_json(call, status, body)
        return body

    def _check_json(self, call: Call, status: int, body: bytes) -> None:
        try:
            decoded = json.loads(body)
        except ValueError:
            self.outcome.fault("an answer that is no JSON", call, body)
            return
        if status >= 400 and "error" not in decoded:
            self.outcome.fault("an error of no known shape", call, body)

    def _check_events(self, call: Call, body: bytes) -> None:
        events = [block for block in body.split(b"\n\n") if block and not block.startswith(b":")]
        for event in events:
            data = event.partition(b"data: ")[2]
            if data != b"[DONE]":
                try:
                    json.loads(data)
                except ValueError:
                    self.outcome.fault("an event that is no JSON", call, event)
        ends = (
            *(b"[DONE]", b'"error"', b"message_stop"),
            *(b"response.completed", b"response.incomplete", b"response.failed"),
        )
        if not events or not any(end in events[-1] for end in ends):
            self.outcome.fault("a stream without an end", call, body[-300:])

    async def _touch_batches(self, rng: random.Random, source: RequestSource) -> None:
        kind = rng.randrange(8)
        if kind <= 1 or not self._files:
            await self._upload(source)
        elif kind <= 3 or not self._batches:
            path = rng.choice(("/v1/completions", "/v1/completions", "/v1/embeddings", "/nope"))
            body = {
                "input_file_id": rng.choice(self._files),
                "endpoint": path,
                "completion_window": rng.choice(("24h", "24h", "2s")),
            }
            made = await self._exchange(Call("POST", "/v1/batches", json.dumps(body).encode()))
            self._keep(made, self._batches)
        elif kind == 4:
            batch_id = rng.choice(self._batches)
            await self._exchange(Call("POST", f"/v1/batches/{batch_id}/cancel", b""))
        elif kind == 5:
            file_id = self._files.pop(rng.randrange(len(self._files)))
            await self._exchange(Call("DELETE", f"/v1/files/{file_id}", b""))
        else:
            path = rng.choice(
                (
                    f"/v1/batches/{rng.choice(self._batches)}",
                    "/v1/batches?limit=3",
                    f"/v1/files/{rng.choice(self._files)}/content",
                )
            )
            await self._exchange(Call("GET", path, b""))

    async def _upload(self, source: RequestSource) -> None:
        _, lines = source.batch_lines()
        form = (
            b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            b'--x\r\ncontent-disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n'
            + lines
            + b"\r\n--x--\r\n"
        )
        call = Call("POST", "/v1/files", form, "multipart/form-data; boundary=x")
        self._keep(await self._exchange(call), self._files)

    def _keep(self, answer: bytes, ids: list[str]) -> None:
        with contextlib.suppress(ValueError):
            decoded: Any = json.loads(answer)
            if isinstance(decoded, dict) and "id" in decoded:
                ids.append(decoded["id"])

    async def _end_batches(self) -> None:
        for batch_id in self._batches:
            await self._exchange(Call("POST", f"/v1/batches/{batch_id}/cancel", b""))
        started = time.monotonic()
        for batch_id in self._batches:
            while time.monotonic() - started < IDLE_TIMEOUT_S:
                batch = json.loads(await self._server.get(f"/v1/batches/{batch_id}"))
                if batch["status"] in ("completed", "failed", "expired", "cancelled"):
                    break
                await asyncio.sleep(0.1)
            else:
                self.outcome.fault(f"batch {batch_id} did not end: {batch}")
        self._batches.clear()


def _unchunked(body: bytes) -> tuple[bytes, bool]:
    """The content of a chunked body, and whether it has an end."""
    parts: list[bytes] = []
    while body:
        size_text, _, rest = body.partition(b"\r\n")
        size = int(size_text, 16)
        if size == 0:
            return b"".join(parts), True
        parts.append(rest[:size])
        body = rest[size + 2 :]
    return b"".join(parts), False


def _errors_of_events(body: bytes) -> bytes:
    """What the events of a stream say under "error", in any depth a family of APIs has it."""
    errors = []
    for line in body.splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line.removeprefix(b"data: "))
            while isinstance(event, dict):
                errors.append(event.get("error"))
                event = event.get("response")
    return json.dumps([error for error in errors if error is not None]).encode()


def compare(before: Leftovers, after: Leftovers, margin_mib: float) -> list[str]:
    """What is left that was not there before."""
    faults = [f"{name} is {value}, not 0" for name, value in after.gauges.items() if value]
    if after.blocks_missing:
        faults.append(f"{after.blocks_missing} KV blocks are neither free nor cached")
    if after.greedy != before.greedy:
        faults.append(f"a greedy answer has changed: {before.greedy!r}, now {after.greedy!r}")
    if after.num_files > before.num_files + MAX_EXTRA_FILES:
        faults.append(f"{after.num_files} open files, {before.num_files} before")
    if after.memory_mib > before.memory_mib + margin_mib:
        faults.append(f"{after.memory_mib:.0f} MiB of memory, {before.memory_mib:.0f} before")
    return faults


async def fuzz(options: argparse.Namespace) -> int:
    """Run, print, and return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        flags = list(options.flags)
        async with fuzzed_server(options.model, Path(folder), flags) as server:
            pids = server.pids()
            card = json.loads(await server.get("/v1/models"))["data"][0]
            fuzzer = Fuzzer(server, options.seed, card["metadata"]["vocab_size"])
            await fuzzer.run(options.seconds / 5, "warm-up")
            before = await server.leftovers()
            await fuzzer.run(options.seconds * 4 / 5, "run")
            outcome = fuzzer.outcome
            if server.process.returncode is not None:
                outcome.fault(f"the server ended with {server.process.returncode}")
            else:
                after = await server.leftovers()
                outcome.faults += compare(before, after, options.margin_mib)
                print(f"memory: {before.memory_mib:.0f} MiB after the warm-up, "
                      f"{after.memory_mib:.0f} at the end; open files: {before.num_files}, "
                      f"{after.num_files}")  # fmt: skip
                if server.pids() != pids:
                    outcome.fault("the engine was replaced")
                seconds = await server.stop()
                if seconds > STOP_TIMEOUT_S:
                    outcome.fault(
                        f"an idle server took {seconds:.1f} s to end: it waited for what?"
                    )
            log = server.log.read_text("utf-8", "replace")
        if "Traceback" in log:
            outcome.fault("a traceback in the log:\n" + log[log.index("Traceback") :][:3000])
    print(f"actions: {dict(outcome.actions.most_common())}")
    print(f"answers by status: {dict(sorted(outcome.statuses.items()))}")
    for text, count in Counter(outcome.faults).most_common(20):
        print(f"FAULT ({count}×): {text}")
    print(f"{len(outcome.faults)} faults in {outcome.actions.total()} actions, seed {options.seed}")
    return 1 if outcome.faults else 0


def main() -> None:
    """Start a server and fuzz it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="known name or GGUF path")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--margin-mib", type=float, default=64.0)
    parser.add_argument("flags", nargs="*", help="after --: flags for caudal serve")
    sys.exit(asyncio.run(fuzz(parser.parse_args())))


if __name__ == "__main__":
    main()
