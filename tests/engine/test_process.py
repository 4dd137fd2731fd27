"""The engine in its own process: streams, aborts, death, silence, and the end of its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from caudal.config import CacheConfig, EngineConfig, SchedulerConfig
from caudal.engine.messages import EngineRequest
from caudal.engine.zmq_client import HEARTBEAT_TIMEOUT_S, ZmqEngineClient
from caudal.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
    UnavailableError,
)
from caudal.sampling_params import SamplingParams, StructuredOutputsParams
from caudal.scheduler.output import FinishReason, RequestOutput

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@asynccontextmanager
async def running(model: Path, **scheduler: int) -> AsyncIterator[ZmqEngineClient]:
    client = ZmqEngineClient(
        EngineConfig(
            model_path=model,
            cache=CacheConfig(num_blocks=256),
            scheduler=SchedulerConfig(**scheduler),  # type: ignore[arg-type]
        )
    )
    await client.start()
    try:
        await client.wait_ready()
        yield client
    finally:
        await client.stop()


def request(request_id: str, sampling: SamplingParams = LONG, length: int = 9) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=[10 + index % 200 for index in range(length)],
        sampling=sampling,
    )


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def wait_until_idle(client: ZmqEngineClient) -> None:
    deadline = time.monotonic() + 5
    while client.stats.num_running + client.stats.num_waiting or client.stats.num_blocks_held:
        assert time.monotonic() < deadline, client.stats
        await asyncio.sleep(0.02)


async def test_many_streams_end_exactly_once(tiny_model: Path) -> None:
    async with running(tiny_model, max_num_seqs=8) as client:
        sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        streams = [await client.submit(request(f"r{index}", sampling)) for index in range(20)]
        for outputs in await asyncio.gather(*(collect(stream) for stream in streams)):
            assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
            assert outputs[-1].finish_reason is FinishReason.LENGTH
            assert sum(len(output.new_token_ids) for output in outputs) == 30
        await wait_until_idle(client)


async def test_closing_a_stream_early_frees_its_blocks(tiny_model: Path) -> None:
    async with running(tiny_model) as client:
        stream = await client.submit(request("r"))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await wait_until_idle(client)
        assert client.stats.num_cancelled == 1


async def test_cancelled_submit_leaves_nothing_behind(tiny_model: Path) -> None:
    async with running(tiny_model) as client:
        submitting = asyncio.ensure_future(client.submit(request("r")))
        await asyncio.sleep(0)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        await asyncio.sleep(0.2)
        await wait_until_idle(client)


async def test_client_that_leaves_while_its_grammar_is_compiled_hears_the_end(
    tiny_model: Path,
) -> None:
    properties = {f"p{index}": {"type": "string"} for index in range(200)}
    form = StructuredOutputsParams(json={"type": "object", "properties": properties})
    sampling = SamplingParams(max_tokens=400, structured_outputs=form)
    async with running(tiny_model) as client:
        submitting = asyncio.ensure_future(client.submit(request("r", sampling)))
        await asyncio.sleep(0)
        client.abort(["r"])
        outputs = await asyncio.wait_for(submitting, 10)
        assert [output.finish_reason for output in await collect(outputs)] == [FinishReason.ABORT]
        await asyncio.wait_for(client.drain(30), 1)


async def test_refusals_arrive_as_their_errors(tiny_model: Path) -> None:
    async with running(tiny_model, max_num_seqs=1, max_queue_requests=1) as client:
        first = await client.submit(request("r0"))
        await anext(first)
        await client.submit(request("r1"))
        with pytest.raises(OverloadedError) as overloaded:
            await client.submit(request("r2"))
        assert overloaded.value.retry_after_s > 0
        with pytest.raises(InvalidRequestError, match="tokens"):
            await client.submit(request("r3", length=60_000))


async def test_siblings_are_admitted_together_or_not_at_all(tiny_model: Path) -> None:
    async with running(tiny_model, max_num_seqs=1, max_queue_requests=2) as client:
        first = await client.submit(request("r0"))
        await anext(first)
        siblings = [
            EngineRequest(
                request_id=f"s{index}",
                prompt_token_ids=[1, 2, 3],
                sampling=LONG,
                parent_id="s",
                num_siblings=3,
            )
            for index in range(3)
        ]
        results = await asyncio.gather(
            *(client.submit(sibling) for sibling in siblings), return_exceptions=True
        )
        assert [type(result) for result in results] == [OverloadedError] * 3
        assert len(await collect(first)) > 1
        await wait_until_idle(client)
        assert client.stats.num_rejected == {"queue_requests": 3}


async def test_fault_in_one_request_is_its_alone(tiny_model: Path) -> None:
    async with running(tiny_model) as client:
        client.inject_fault("bad", 3)
        good, bad = await client.submit(request("good")), await client.submit(request("bad"))
        with pytest.raises(RequestFailedError):
            await collect(bad)
        assert (await collect(good))[-1].finish_reason is FinishReason.LENGTH
        await wait_until_idle(client)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_dead_or_silent_engine_ends_every_stream(
    tiny_model: Path, how: signal.Signals
) -> None:
    async with running(tiny_model) as client:
        stream = await client.submit(request("r"))
        await anext(stream)
        assert client.pid is not None
        began = time.monotonic()
        os.kill(client.pid, how)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(collect(stream), HEARTBEAT_TIMEOUT_S + 1)
        assert time.monotonic() - began < 5.5
        await asyncio.wait_for(client.died.wait(), 1)
        assert not client.is_ready
        with pytest.raises(UnavailableError):
            await client.submit(request("r2"))
        await client.start()  # a restart on the same client
        await client.wait_ready()
        assert (await collect(await client.submit(request("r3"))))[-1].finish_reason


async def test_engine_that_cannot_load_says_why(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF but not really")
    client = ZmqEngineClient(EngineConfig(model_path=path))
    await client.start()
    with pytest.raises(EngineDeadError, match=r"broken\.gguf"):
        await asyncio.wait_for(client.wait_ready(), 10)
    await client.stop()


PARENT = """
import asyncio, sys, time
from pathlib import Path
from caudal.config import CacheConfig, EngineConfig
from caudal.engine.zmq_client import ZmqEngineClient

async def main():
    config = EngineConfig(Path(sys.argv[1]), cache=CacheConfig(num_blocks=64))
    client = ZmqEngineClient(config)
    await client.start()
    await client.wait_ready()
    print(client.pid, flush=True)
    time.sleep(60)

asyncio.run(main())
"""


def test_engine_ends_with_a_parent_that_was_killed(tiny_model: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tiny_model)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        engine_pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 5
        while _is_alive(engine_pid):
            assert time.monotonic() < deadline, "the engine outlived its parent"
            time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def test_request_in_the_moment_of_death_fails_as_one_that_may_be_repeated(
    tiny_model: Path,
) -> None:
    """The socket has lost its peer before anybody has said that the process is gone."""
    async with running(tiny_model) as client:
        stream = await client.submit(request("old"))
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        time.sleep(0.3)  # the loop must not hear of it
        assert client.is_ready
        with pytest.raises(EngineDeadError):
            await client.submit(request("new"))
        client.abort(["old"])
        with pytest.raises(EngineDeadError):
            await collect(stream)
