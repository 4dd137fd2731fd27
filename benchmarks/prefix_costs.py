"""What the prefix cache costs where nothing is ever found in it, and what the prefix lint costs.

    python benchmarks/prefix_costs.py [--model smollm2-135m] [--rounds 7]

The cache: the same kind of prompts, none like another, on two engines in this process that differ
in nothing but the cache and take turns; the ratio is the median over rounds. Because that ratio is
noisy on shared machines, the processor time that the scheduler itself spends with and without the
cache is measured, too, and put in relation to the time of a whole request.

The lint: microseconds per request of remembering prompts, by length, the first time and where the
beginning is known, beside the time that reading such a prompt takes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from caudal import LLM, SamplingParams
from caudal.config import CacheConfig, SchedulerConfig
from caudal.diagnosis.load_log import Arrival, End, LoadLog, Occupancy
from caudal.scheduler.step_cost import StepCosts
from caudal.simulation.machine import Machine, SimulatedRequest, simulate, step_time

PROMPT, OUTPUT, AT_A_TIME = 200, 32, 8
MIB = 1 << 20
COSTS = StepCosts()


def make_llm(model: str, *, has_cache: bool) -> LLM:
    """An engine of its own."""
    cache = CacheConfig(kv_cache_memory_bytes=512 * MIB, enable_prefix_caching=has_cache)
    return LLM(model, cache=cache)


def run_round(llm: LLM, seed: int) -> float:
    """Seconds for prompts of random tokens that nobody has sent before."""
    source = random.Random(seed)
    prompts = [[source.randrange(100, 20_000) for _ in range(PROMPT)] for _ in range(AT_A_TIME)]
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, sampling)
    return time.perf_counter() - started


def cache_ratio(model: str, rounds: int) -> tuple[float, float]:
    """Median of (seconds with the cache / without), and seconds of a request with it."""
    engines = make_llm(model, has_cache=True), make_llm(model, has_cache=False)
    for llm in engines:
        run_round(llm, -1)
    ratios, seconds = [], []
    for number in range(rounds):
        order = (0, 1) if number % 2 else (1, 0)
        took = {which: run_round(engines[which], number * 2 + which) for which in order}
        ratios.append(took[0] / took[1])
        seconds.append(took[0] / AT_A_TIME)
        print(f"  round {number + 1}: {took[0]:.3f} s with, {took[1]:.3f} s without", flush=True)
    return statistics.median(ratios), statistics.median(seconds)


def scheduler_us(*, has_cache: bool, num_requests: int = 200) -> float:
    """Microseconds of processor time that scheduling a request takes, from arrival to end."""
    requests = [SimulatedRequest(0.0, PROMPT, OUTPUT) for _ in range(num_requests)]
    machine = Machine(
        step_time(COSTS),
        SchedulerConfig(max_num_seqs=AT_A_TIME),
        num_blocks=1000,
        max_model_len=4096,
        enable_prefix_caching=has_cache,
    )
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        simulate(requests, machine)
        best = min(best, time.process_time() - started)
    return best / num_requests * 1e6


def lint_us(num_tokens: int, num_shared: int, num_requests: int = 2000) -> float:
    """Microseconds of processor time per request."""
    source = random.Random(num_tokens)
    shared = [source.randrange(20_000) for _ in range(num_shared)]
    prompts = [
        shared + [source.randrange(20_000) for _ in range(num_tokens - num_shared)]
        for _ in range(50)
    ]
    log, end = LoadLog(), End(OUTPUT, num_shared, 0, 1.0, 100.0, 10.0, 500.0)
    started = time.process_time()
    for number in range(num_requests):
        # The first token makes each prompt new where nothing is shared.
        prompt = prompts[number % 50]
        if not num_shared:
            prompt[0] = number
        name = str(number)
        log.arrive(Arrival(name, float(number), "", "", num_tokens, OUTPUT), prompt, Occupancy())
        log.finish(name, end)
    return (time.process_time() - started) / num_requests * 1e6


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="name or path of the model")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    ratio, request_s = cache_ratio(options.model, options.rounds)
    with_us, without_us = scheduler_us(has_cache=True), scheduler_us(has_cache=False)
    added = (with_us - without_us) / 1e6 / request_s
    print(f"prefix cache at 0 % hits: {100 * (ratio - 1):+.1f} % time (median of rounds)")
    print(
        f"  scheduler: {with_us:.0f} µs a request with it, {without_us:.0f} without: "
        f"{100 * added:+.2f} % of a request's {1e3 * request_s:.0f} ms"
    )
    for num_tokens in (200, 2000):
        new, known = lint_us(num_tokens, 0), lint_us(num_tokens, num_tokens * 3 // 4)
        print(
            f"prefix lint, {num_tokens} tokens: {new:.0f} µs a new prompt, {known:.0f} µs a known "
            f"beginning: {100 * new / 1e6 / request_s:.2f} % of that request"
        )


if __name__ == "__main__":
    main()
