"""Known failures that only a whole server can show, each in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.server.harness import parse_events
from tests.server.test_real_engine import RealServer, serving
from tests.tiny_models import make_tiny_model
from tests.weights.gguf_writer import write_gguf

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}


@pytest_asyncio.fixture(autouse=True, scope="module", loop_scope="module")
async def lookup_threads() -> None:
    """Name lookups run in the loop's executor, whose threads outlive a single test here."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))


def cpu_seconds(server: RealServer) -> float:
    """Processor time of server and engine so far."""
    ticks = 0
    for pid in (server.process.pid, server.engine_pid()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def test_first_answer_equals_later_ones_and_none_costs_more(tiny_model: Path) -> None:
    """B105, B153. Processor time at its best: other programs make it longer, never shorter."""
    async with serving(tiny_model, "--max-num-seqs", "15") as server:
        prompt = "the river runs through the old town " * 6
        answers = [await server.complete(prompt=prompt, **GREEDY) for _ in range(5)]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        costs = []
        for part in range(12):
            before = cpu_seconds(server)
            for number in range(25):
                await server.complete(prompt=f"{part} {number} the people", **GREEDY)
            costs.append(cpu_seconds(server) - before)
        assert min(costs[6:]) < 1.5 * min(costs[:6]), costs
        await server.check_idle()


async def test_prefix_is_shared_whatever_the_sampling_but_never_across_salts(
    tiny_model: Path,
) -> None:
    """B107."""
    async with serving(tiny_model) as server:
        prompt = "the old town and the people of the river " * 8

        async def cached(**fields: Any) -> int:
            answer = await server.complete(prompt=prompt, max_tokens=2, **fields)
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert await cached(temperature=0) == 0
        hit = await cached(temperature=0)
        assert hit > 0
        assert await cached(temperature=1.5, top_p=0.5, seed=3) == hit
        assert await cached(logit_bias={"5": 3}, stop="x") == hit
        assert await cached(structured_outputs={"regex": "[ab]+"}) == hit
        assert await cached(cache_salt="a") == 0
        assert await cached(cache_salt="b") == 0
        assert await cached(cache_salt="a") == hit
        await server.check_idle()


async def test_random_bytes_are_valid_text_streamed_or_not(tiny_model: Path) -> None:
    """B05: a hundred seeds of a model that knows no language."""
    async with serving(tiny_model) as server:
        body = {"prompt": "日本語", "temperature": 1.5, "top_k": 100, "max_tokens": 60}

        async def both(seed: int) -> None:
            plain = await server.complete(**body, seed=seed)
            text = plain["choices"][0]["text"]
            text.encode("utf-8")
            streamed = {**body, "seed": seed, "stream": True}
            response = await server.http.post("/v1/completions", json=streamed)
            events = parse_events(response.content.decode("utf-8"))
            assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text

        await asyncio.gather(*map(both, range(100)))
        await server.check_idle()


async def test_pool_of_sixty_percent_finishes_everything(tiny_model: Path) -> None:
    """B109, B111: some wait or are preempted, none is aborted or cut."""
    flags = ("--max-num-seqs", "16", "--kv-cache-memory", "1000KiB")
    async with serving(tiny_model, *flags) as server:
        bodies = [
            {
                "prompt": [(i * 7 + k) % 300 for k in range(20 + 60 * (i % 4))],
                "max_tokens": 20 + 90 * (i % 4),
                "temperature": 0,
                "ignore_eos": True,
            }
            for i in range(100)
        ]
        responses = await asyncio.gather(
            *(server.http.post("/v1/completions", json=body) for body in bodies)
        )
        for body, response in zip(bodies, responses, strict=True):
            assert response.status_code == 200, response.text
            assert response.json()["usage"]["completion_tokens"] == body["max_tokens"]
            assert response.json()["choices"][0]["finish_reason"] == "length"
        assert await server.metric("caudal_num_preemptions_total") > 0
        alone = await server.complete(**bodies[3])
        assert alone["choices"][0]["text"] == responses[3].json()["choices"][0]["text"]
        await server.check_idle()


async def test_prefix_cache_never_holds_more_than_its_pool(tiny_model: Path) -> None:
    """B113: each prompt is more than half of what can be kept."""
    async with serving(tiny_model, "--kv-cache-memory", "400KiB") as server:
        total = await server.metric("caudal_kv_blocks")
        assert total == await server.metric("caudal_kv_blocks_free") > 0, "told from the start"
        for number in range(6):
            prompt = [(number * 31 + k * 7) % 300 for k in range(450)]
            await server.complete(prompt=prompt, **GREEDY)
            free = cached = held = -1.0
            async with asyncio.timeout(5):  # gauges follow a moment later
                while held or free + cached != total:
                    page = (await server.http.get("/metrics")).text
                    free, cached, held = (
                        float(re.findall(rf"^caudal_kv_blocks_{name} (\S+)", page, re.M)[0])
                        for name in ("free", "cached", "held")
                    )
                    assert 0 <= cached <= total
            assert free + cached == total
        await server.check_idle()


async def test_series_are_the_same_under_every_option(tiny_model: Path) -> None:
    """B125."""
    pages = []
    options: tuple[tuple[str, ...], ...] = (
        (),
        ("--batching", "serial", "--no-enable-prefix-caching", "--kv-cache-dtype", "int8"),
    )
    for flags in options:
        async with serving(tiny_model, *flags) as server:
            await server.complete(**GREEDY)
            page = (await server.http.get("/metrics")).text
            pages.append(set(re.findall(r"^(caudal_\w+)", page, re.M)))
            assert await server.metric("caudal_generation_tokens_total") == 16
            assert await server.metric("caudal_engine_steps_total") > 0
    assert pages[0] == pages[1]


async def test_four_choices_differ_end_alone_and_repeat(tmp_path: Path) -> None:
    """B21: streamed, with a model that often ends early."""
    model = make_tiny_model(tmp_path / "m.gguf", logit_std=0.5)
    async with serving(model) as server:
        body = {
            "messages": [{"role": "user", "content": "Write one line"}],
            "n": 4,
            "seed": 7,
            "temperature": 1,
            "max_tokens": 300,
            "stream": True,
        }

        async def choices() -> list[tuple[str, str]]:
            response = await server.http.post("/v1/chat/completions", json=body)
            texts, reasons = [""] * 4, [""] * 4
            for event in parse_events(response.text)[:-1]:
                for choice in event["choices"]:
                    index = choice["index"]
                    assert not reasons[index], "text after the finish reason"
                    texts[index] += choice["delta"].get("content") or ""
                    reasons[index] = choice["finish_reason"] or ""
            return list(zip(texts, reasons, strict=True))

        first = await choices()
        assert first == await choices()
        assert len({text for text, _ in first}) > 1
        assert {reason for _, reason in first} <= {"stop", "length"}
        await server.check_idle()


async def test_unusable_model_file_is_one_clear_line_and_an_exit(tmp_path: Path) -> None:
    """B97, B101: as `caudal serve` shows them."""
    damaged = tmp_path / "damaged.gguf"
    head = struct.pack("<IqqqIqq", 3, 1, 0, 0, 2, 1, 0)
    damaged.write_bytes(b"GGUF" + head)
    foreign = write_gguf(tmp_path / "foreign.gguf", {"general.architecture": "gemma3"}, {})
    for path, words in ((damaged, "tensor 0"), (foreign, "known: llama, qwen2, qwen3")):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "caudal", "serve", str(path), "--port", "0"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(30):
            _, errors = await process.communicate()
        assert process.returncode not in (0, None)
        assert words in errors.decode()
        assert "Traceback" not in errors.decode()


async def test_real_context_is_counted_and_its_beginning_is_seen(tiny_model: Path) -> None:
    """B25: the first line of a prompt at the limit changes the answer; beyond it is a 400."""
    async with serving(tiny_model) as server:
        rest = [(k * 7) % 300 for k in range(500)]
        answers = []
        for secret in (5, 6):
            answer = await server.complete(prompt=[secret, *rest], **{**GREEDY, "max_tokens": 8})
            assert answer["usage"]["prompt_tokens"] == 501
            answers.append(answer["choices"][0]["text"])
        assert answers[0] != answers[1]
        response = await server.http.post("/v1/completions", json={"prompt": [5] * 513})
        assert response.status_code == 400
        assert json.loads(response.text)["error"]["code"] == "context_length_exceeded"
        await server.check_idle()
