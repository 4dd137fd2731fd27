"""Steps of offline work that end early: nothing is lost, and no bit of an answer changes."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caudal.config import CacheConfig, EngineConfig, SchedulerConfig
from caudal.engine.arrivals import Arrivals
from caudal.engine.core import EngineCore
from caudal.engine.messages import EngineRequest
from caudal.engine.zmq_client import ZmqEngineClient
from caudal.executor.uniproc import UniProcExecutor
from caudal.sampling_params import SamplingParams, StructuredOutputsParams
from caudal.scheduler.output import FinishReason, RequestOutput
from caudal.scheduler.service_class import ServiceClass
from caudal.step_io import Interrupt
from tests.engine.engine_harness import Result

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 20}},
    "required": ["n", "s"],
}
FORM = StructuredOutputsParams(json=SCHEMA)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "num_logprobs": 1},
    "random": {"temperature": 1.0, "seed": 5, "top_p": 0.9, "num_logprobs": 0},
    "scored": {"temperature": 0.0, "num_prompt_logprobs": 1, "max_tokens": 4},
    "checked form": {"temperature": 0.8, "seed": 7, "structured_outputs": FORM},
    "masked form": {"temperature": 0.8, "top_k": 40, "seed": 9, "structured_outputs": FORM},
    "mean": {"pooling": "mean", "max_tokens": 0},
    "last": {"pooling": "last", "max_tokens": 0},
}


def requests() -> list[EngineRequest]:
    """Two of each kind, repetitive enough for guesses."""
    made = []
    for index in range(2 * len(KINDS)):
        options = {"max_tokens": 30, **list(KINDS.values())[index % len(KINDS)]}
        phrase = [300 + 7 * index + offset for offset in range(9)]
        made.append(
            EngineRequest(
                request_id=f"b{index}",
                prompt_token_ids=(phrase * 40)[: 60 + 17 * index],
                sampling=SamplingParams(**options),
                service=ServiceClass.IDLE,
            )
        )
    return made


class Interrupter:
    """Interrupts some steps at a random moment, some before they begin."""

    def __init__(self, share: float) -> None:
        self._rng = random.Random(3)
        self._share = share
        self._timers: list[threading.Timer] = []

    def next(self) -> Interrupt:
        signal = np.zeros(1, np.uint32)
        if self._rng.random() < self._share:
            if self._rng.random() < 0.2:
                signal[0] = 1
            else:
                timer = threading.Timer(self._rng.uniform(0, 0.02), signal.fill, [1])
                timer.start()
                self._timers.append(timer)
        return Interrupt(signal, 0)

    def join(self) -> None:
        for timer in self._timers:
            timer.join()


def run(executor: UniProcExecutor, config: EngineConfig, share: float) -> tuple[Any, int]:
    """Results by request id, and how many steps were interrupted."""
    core = EngineCore(config, executor, can_interrupt=True)
    for request in requests():
        for future in core.prepare([request]):
            future.result()
        assert core.add_requests([request]) == []
    results = {request.request_id: Result() for request in requests()}
    interrupter = Interrupter(share)
    num_interrupted = 0
    for _ in range(2000):
        if not core.has_work:
            break
        for output in core.step(interrupter.next()):
            results[output.request_id].add(output)
        num_interrupted += core.was_interrupted
        core.check_integrity()
    interrupter.join()
    assert core.stats().num_interrupted_steps == num_interrupted
    return results, num_interrupted


def test_answers_are_the_same_bits_however_often_steps_are_interrupted(demo_model: Path) -> None:
    config = EngineConfig(
        demo_model, cache=CacheConfig(num_blocks=512), scheduler=SchedulerConfig(max_num_seqs=16)
    )
    executor = UniProcExecutor(config)
    expected, num_interrupted = run(executor, config, 0.0)
    assert num_interrupted == 0
    actual, num_interrupted = run(executor, config, 0.6)
    executor.shutdown()
    assert num_interrupted > 10
    assert actual == expected
    for result in expected.values():
        assert result.finish_reason in (FinishReason.LENGTH, FinishReason.STOP), result.error


async def answer(client: ZmqEngineClient, request: EngineRequest) -> list[RequestOutput]:
    return [output async for output in await client.submit(request)]


@pytest.mark.parametrize("has_form", [False, True])
async def test_newcomers_break_into_steps_of_batches(demo_model: Path, *, has_form: bool) -> None:
    client = ZmqEngineClient(EngineConfig(demo_model, cache=CacheConfig(num_blocks=1024)))
    await client.start()
    try:
        await client.wait_ready()
        batch = [
            EngineRequest(
                request_id=f"b{index}",
                prompt_token_ids=[300 + (index * 97 + i * i) % 5000 for i in range(150)],
                sampling=SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True),
                service=ServiceClass.IDLE,
            )
            for index in range(60)
        ]
        tasks = [asyncio.create_task(answer(client, request)) for request in batch]
        while client.stats.num_background_running < 20:
            await asyncio.sleep(0.02)
        for index in range(10):
            form = StructuredOutputsParams(regex=f"[a-d]{{{index + 2}}}") if has_form else None
            newcomer = EngineRequest(
                request_id=f"i{index}",
                prompt_token_ids=[20 + index, 30, 40],
                sampling=SamplingParams(max_tokens=2, ignore_eos=True, structured_outputs=form),
            )
            assert (await answer(client, newcomer))[-1].finish_reason is FinishReason.LENGTH
            await asyncio.sleep(0.05)
        deadline = time.monotonic() + 60
        for outputs in await asyncio.gather(*tasks):
            assert outputs[-1].num_output_tokens == 100
        assert time.monotonic() < deadline
        assert client.stats.num_interrupted_steps >= 3
    finally:
        await client.stop()


def test_arrivals_are_pending_from_their_announcement_until_they_are_taken(
    tmp_path: Path,
) -> None:
    sender = Arrivals.create(tmp_path / "arrivals")
    engine = Arrivals(tmp_path / "arrivals")
    before = engine.interrupt()
    assert (engine.num_pending, before.is_due) == (0, False)
    sender.announce()
    assert (engine.num_pending, before.is_due, engine.interrupt().is_due) == (1, True, True)
    engine.take()
    assert (engine.num_pending, engine.interrupt().is_due) == (0, False)
    sender.announce()
    engine.forget_pending()
    assert (engine.num_pending, engine.interrupt().is_due) == (0, False)


def test_arrivals_count_on_past_the_largest_number(tmp_path: Path) -> None:
    path = tmp_path / "arrivals"
    path.write_bytes(b"\xff\xff\xff\xff")
    sender, engine = Arrivals(path), Arrivals(path)
    engine.forget_pending()
    sender.announce()
    assert (engine.num_pending, engine.interrupt().is_due) == (1, True)
    engine.take()
    assert (engine.num_pending, engine.interrupt().is_due) == (0, False)
