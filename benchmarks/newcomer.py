"""What a long prompt costs a stream that runs, and what the stream costs the prompt.

    python benchmarks/newcomer.py [--model smollm2-135m] [--rounds 5] [-- --tpot-ms 12]

One answer streams; then a prompt of about 4,000 tokens arrives. Printed are the stream's usual gap,
its longest one until the newcomer's first token, and the newcomer's time to that, beside the same
prompt's time on an idle server. Medians of rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.client import REQUEST_TIMEOUT_S, stream_request
from benchmarks.measurement import Run
from benchmarks.serve_vs_peer import caudal_server, describe_machine, served_model
from benchmarks.workloads import Prompt, make_text

NUM_WORDS = 3500
NUM_GAPS = 60
"""Of the stream before the newcomer is sent; the first ones do not count as usual."""
NUM_STREAMED = 2000


@dataclass(frozen=True, slots=True)
class Round:
    """Milliseconds."""

    usual_gap: float
    longest_gap: float
    ttft_alone: float
    ttft_beside: float


def long_prompt(seed: int) -> Prompt:
    return Prompt(make_text(random.Random(seed), NUM_WORDS), 2)


async def run_round(session: aiohttp.ClientSession, model: str, seed: int) -> Round:
    """A prompt alone, then another like it beside a stream."""
    alone, beside, stream = Run(), Run(), Run()
    await stream_request(session, model, long_prompt(2 * seed), alone)
    short = Prompt(f"item {seed}", NUM_STREAMED)
    streaming = asyncio.create_task(stream_request(session, model, short, stream))
    while len(stream.gaps_s) < NUM_GAPS:
        if streaming.done():
            streaming.result()
            sys.exit("the stream ended too early")
        await asyncio.sleep(0.005)
    num_before = len(stream.gaps_s)
    await stream_request(session, model, long_prompt(2 * seed + 1), beside)
    during = stream.gaps_s[num_before:]
    streaming.cancel()
    await asyncio.gather(streaming, return_exceptions=True)
    return Round(
        usual_gap=1e3 * statistics.median(stream.gaps_s[NUM_GAPS // 4 : num_before]),
        longest_gap=1e3 * max(during),
        ttft_alone=1e3 * alone.ttft_s[0],
        ttft_beside=1e3 * beside.ttft_s[0],
    )


async def measure(url: str, num_rounds: int) -> list[Round]:
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    model = served_model(url)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        return [await run_round(session, model, seed) for seed in range(num_rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="known name or GGUF path")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("serve_flags", nargs="*", help="after --: flags for caudal serve")
    options = parser.parse_args()
    print(describe_machine())
    with caudal_server(options.model, options.serve_flags) as url:
        rounds = asyncio.run(measure(url, options.rounds))
    print("| usual gap ms | longest gap ms | ratio | TTFT alone ms | TTFT beside ms | ratio |")
    print("|---|---|---|---|---|---|")
    for of in (*rounds, median_of(rounds)):
        gaps = of.longest_gap / of.usual_gap
        ttft = of.ttft_beside / of.ttft_alone
        print(
            f"| {of.usual_gap:.1f} | {of.longest_gap:.1f} | {gaps:.1f} "
            f"| {of.ttft_alone:.0f} | {of.ttft_beside:.0f} | {ttft:.2f} |"
        )
    print("The last row has the medians.")


def median_of(rounds: list[Round]) -> Round:
    return Round(
        statistics.median(of.usual_gap for of in rounds),
        statistics.median(of.longest_gap for of in rounds),
        statistics.median(of.ttft_alone for of in rounds),
        statistics.median(of.ttft_beside for of in rounds),
    )


if __name__ == "__main__":
    main()
