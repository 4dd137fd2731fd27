"""The whole server as users start it: real processes, a tiny random model, the official client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import ssl
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.server.harness import open_request
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = {"prompt": "the river", "max_tokens": 4000, "ignore_eos": True, "stream": True}


class RealServer:
    """A `caudal serve` process and its clients."""

    def __init__(
        self, process: asyncio.subprocess.Process, port: int, trust: ssl.SSLContext | None = None
    ) -> None:
        self.process = process
        self.port = port
        base_url = f"http{'s' if trust else ''}://127.0.0.1:{port}"
        self.http = httpx.AsyncClient(
            base_url=base_url, timeout=60, limits=httpx.Limits(), verify=trust or True
        )
        self.openai = AsyncOpenAI(
            api_key="unused", base_url=f"{base_url}/v1", http_client=self.http, max_retries=0
        )

    def engine_pid(self) -> int:
        """The engine is the server's only child."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert len(children) == 1, children
        return int(children[0])

    async def complete(self, **fields: Any) -> dict[str, Any]:
        response = await self.http.post("/v1/completions", json={"prompt": "the", **fields})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def metric(self, name: str) -> float:
        """The value of a series without labels."""
        text = (await self.http.get("/metrics")).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name:
                    return sample.value
        raise AssertionError(f"no series {name}")

    async def check_idle(self) -> None:
        """Nothing runs, waits or holds a block, and a plain request is answered."""
        names = ("num_requests_running", "num_requests_waiting", "kv_blocks_held")
        async with asyncio.timeout(5):
            while any([await self.metric(f"caudal_{name}") for name in names]):
                await asyncio.sleep(0.02)
        assert (await self.complete(max_tokens=1))["usage"]["completion_tokens"] == 1


@contextlib.asynccontextmanager
async def serving(
    model: Path, *flags: str, trust: ssl.SSLContext | None = None
) -> AsyncIterator[RealServer]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "caudal", "serve", str(model), "--port", "0"),
        *("--served-model-name", "tiny", "--kv-cache-memory", "64MiB", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        match = re.search(r"https?://127\.0\.0\.1:(\d+) ", line)
        if match is None:
            process.kill()
            raise AssertionError((await process.communicate())[1].decode())
        server = RealServer(process, int(match.group(1)), trust)
        async with server.http:
            yield server
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tiny_model: Path) -> AsyncIterator[RealServer]:
    # Name lookups run in the loop's executor, whose threads here outlive a single test.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    async with serving(tiny_model) as server:
        yield server
        await server.check_idle()


async def test_thirty_two_streams_equal_each_alone(server: RealServer) -> None:
    """Greedy text does not depend on what shares the batch (B105), whichever client is slow."""
    prompts = [f"the river {'and the town ' * (i % 5)}{i}" for i in range(32)]

    async def stream(prompt: str) -> str:
        chunks = await server.openai.completions.create(
            model="tiny", prompt=prompt, temperature=0, max_tokens=24, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in chunks])

    together = await asyncio.gather(*map(stream, prompts))
    for prompt, text in list(zip(prompts, together, strict=True))[::5]:
        answer = await server.complete(prompt=prompt, temperature=0, max_tokens=24)
        assert answer["choices"][0]["text"] == text


async def test_answers_through_the_official_client(server: RealServer) -> None:
    chat = await server.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=8,
        n=2,
        seed=1,
        logprobs=True,
        top_logprobs=2,
    )
    assert [choice.index for choice in chat.choices] == [0, 1]
    assert chat.usage is not None
    for choice in chat.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    again = await server.complete(n=4, seed=7, temperature=1.0, max_tokens=12)
    same = await server.complete(n=4, seed=7, temperature=1.0, max_tokens=12)
    texts = [choice["text"] for choice in again["choices"]]
    assert texts == [choice["text"] for choice in same["choices"]]
    assert len(set(texts)) > 1


async def test_prompt_is_counted_once_and_cached_the_second_time(server: RealServer) -> None:
    """B23, B123."""
    prompt = "the river runs through the old town and the people of the town " * 4
    first = await server.complete(prompt=prompt, n=3, max_tokens=2)
    second = await server.complete(prompt=prompt, max_tokens=2)
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < second["usage"]["prompt_tokens"]
    salted = await server.complete(prompt=prompt, max_tokens=2, cache_salt="other")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_scoring_a_prompt_computes_no_token(server: RealServer) -> None:
    """B13, B15."""
    answer = await server.complete(prompt="the old town", max_tokens=0, echo=True, logprobs=1)
    choice = answer["choices"][0]
    assert choice["text"] == "the old town"
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(-9999 < lp <= 0 for lp in choice["logprobs"]["token_logprobs"][1:])


async def test_refused_neighbour_changes_nothing(server: RealServer) -> None:
    """B11."""
    body = {"prompt": "the river", "temperature": 0, "max_tokens": 16, "ignore_eos": True}
    alone = (await server.complete(**body))["choices"][0]["text"]
    bad = {**body, "stop_token_ids": [151645000], "min_tokens": 5}
    good, refused = await asyncio.gather(
        server.complete(**body), server.http.post("/v1/completions", json=bad)
    )
    assert refused.status_code == 400
    assert good["choices"][0]["text"] == alone


async def test_lost_clients_free_their_blocks_in_every_state(tmp_path: Path) -> None:
    """B49: queued, in prefill, in decode, without stream; none can end before its client leaves."""
    model = make_tiny_model(tmp_path / "long.gguf", context_length=16_384)
    async with serving(model, "--max-num-seqs", "4", "--max-queue-ttft", "3600") as server:
        prompts = ["x", "the river runs " * 60]
        bodies = [
            {**LONG, "prompt": prompt, "stream": is_stream, "max_tokens": 15_000}
            for prompt in prompts
            for is_stream in (True, False)
        ]
        for delay in (0.0, 0.02, 0.2):
            connections = await asyncio.gather(
                *(open_request(server.port, "/v1/completions", body) for body in bodies * 4)
            )
            await asyncio.sleep(delay)
            for connection in connections:
                await connection.close()
        async with asyncio.timeout(20):
            while await server.metric("caudal_requests_cancelled_total") < 48:
                await asyncio.sleep(0.05)
        await server.check_idle()


async def test_overload_is_refused_with_a_time_to_retry(tiny_model: Path) -> None:
    """B117: n counts as that many requests; what was accepted is unaffected."""
    flags = ("--max-num-seqs", "2", "--max-queue-requests", "8")
    async with serving(tiny_model, *flags) as server:
        body = {**LONG, "stream": False, "max_tokens": 60}
        responses = await asyncio.gather(
            *(server.http.post("/v1/completions", json=body) for _ in range(50))
        )
        statuses = [response.status_code for response in responses]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 8
        for response in responses:
            if response.status_code == 429:
                assert int(response.headers["retry-after"]) >= 1
            else:
                assert response.json()["usage"]["completion_tokens"] == 60
        response = await server.http.post("/v1/completions", json={**body, "n": 40})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
        await server.check_idle()


async def test_engine_that_dies_or_freezes_is_replaced(tiny_model: Path) -> None:
    """B119: in-flight requests end, probes tell, and service comes back."""
    async with serving(tiny_model) as server:
        for number in (signal.SIGKILL, signal.SIGSTOP):
            connection = await open_request(server.port, "/v1/completions", LONG)
            await connection.read_until(b"data: ")
            old = server.engine_pid()
            os.kill(old, number)
            answer = await connection.read_all()
            assert b'"engine_dead"' in answer
            await connection.close()
            assert (await server.http.get("/ready")).status_code == 503
            assert (await server.http.get("/live")).status_code == 200
            async with asyncio.timeout(20):
                while (await server.http.get("/ready")).status_code != 200:
                    await asyncio.sleep(0.05)
            assert server.engine_pid() != old
            await server.check_idle()


async def test_sigterm_drains_and_takes_the_engine_along(tiny_model: Path) -> None:
    async with serving(tiny_model, "--drain-timeout", "20") as server:
        body = {**LONG, "max_tokens": 60}
        connection = await open_request(server.port, "/v1/completions", body)
        await connection.read_until(b"data: ")
        engine = server.engine_pid()
        server.process.send_signal(signal.SIGTERM)
        assert b"[DONE]" in await connection.read_all()
        await connection.close()
        async with asyncio.timeout(10):
            assert await server.process.wait() == 0
        assert not Path(f"/proc/{engine}").exists()
