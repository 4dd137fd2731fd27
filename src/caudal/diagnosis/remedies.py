"""What can be done about a saturated server, cheapest first, each with its simulated gain."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from caudal.diagnosis.patterns import mean, percentile
from caudal.diagnosis.report import Prediction, Remedy, ServerFacts
from caudal.diagnosis.scenario import Predictor, Scenario

MIN_GAIN_PERCENT = 5.0
"""Remedies that a simulation gives less are not mentioned."""
TARGET_LOAD = 0.7
"""Share of its capacity that a server should be asked for: above it queues grow quickly."""
LENGTH_STEP = 64
MIN_SPARE = 0.25
"""Spare memory relative to the KV cache from which a larger one is proposed."""
SPARE_SHARE = 0.7
_MIB = 1 << 20


class Pharmacy:
    """Makes remedies for one scenario, with their gain in one metric."""

    def __init__(self, predictor: Predictor, facts: ServerFacts, metric: str) -> None:
        self._predictor = predictor
        self._facts = facts
        self._metric = metric
        self._scenario = predictor.scenario

    def for_capacity(self, load: float) -> list[Remedy]:
        """More work comes than the machine can do."""
        return useful(
            [
                *self._prefix_cache(),
                *self._limit_context(),
                *self._relax_pace(),
                *self._cap_queue(),
                *self._hardware(load),
            ]
        )

    def for_bursts(self, load: float) -> list[Remedy]:
        """Work comes in heaps that the machine can do on the whole."""
        return useful(
            [
                *self._smooth(),
                *self._prefix_cache(),
                *self._more_seats(),
                *self._relax_pace(),
                *self._cap_queue(),
                *self._hardware(max(load, 1.0)),
            ]
        )

    def for_kv_pressure(self) -> list[Remedy]:
        """The KV cache is too small for what runs together."""
        return useful(
            [
                *self._limit_context(),
                *self._quantise_kv(),
                *self._enlarge_kv(),
                *self._cap_concurrency(),
                *self._more_memory(),
            ]
        )

    def for_forgotten_prefixes(self) -> list[Remedy]:
        """What was computed before is computed again."""
        return useful(
            [
                *self._prefix_cache(),
                *self._quantise_kv(),
                *self._enlarge_kv(),
                *self._more_memory(),
            ]
        )

    def for_slow_streams(self, target_ms: float) -> list[Remedy]:
        """Each stream is slower than its target."""
        return useful([*self._cap_streams(target_ms), *self._hardware(1.0)])

    def _predict(self, scenario: Scenario) -> Prediction | None:
        return self._predictor.predict(scenario, self._metric)

    def _refused(self, scenario: Scenario) -> str:
        share = self._predictor.refused_share(scenario)
        return f"{share:.0%} of the requests would get a 429" if share >= 0.005 else "none refused"

    def _prefix_cache(self) -> Iterator[Remedy]:
        if self._scenario.enable_prefix_caching:
            return
        changed = replace(self._scenario, enable_prefix_caching=True)
        yield Remedy(
            "enable_prefix_cache",
            "--enable-prefix-caching",
            "nothing",
            self._predict(changed),
            "Reuse the KV of shared prompt beginnings.",
        )

    def _limit_context(self) -> Iterator[Remedy]:
        requests = self._scenario.requests
        totals = [float(r.num_prompt_tokens + r.num_output_tokens) for r in requests]
        limit = math.ceil(percentile(totals, 0.75) / LENGTH_STEP) * LENGTH_STEP
        if limit >= self._scenario.max_model_len or limit >= max(totals, default=0.0):
            return
        changed = self._scenario.limited(limit)
        lost = sum(max(0.0, total - limit) for total in totals) / sum(totals)
        num_refused = len(requests) - len(changed.requests)
        yield Remedy(
            "limit_context",
            f"--max-model-len {limit}",
            "long requests are cut or refused",
            self._predict(changed),
            f"A quarter of the requests are longer than {limit} tokens; the limit drops "
            f"{lost:.0%} of all tokens and refuses {num_refused} of {len(requests)} prompts.",
        )

    def _relax_pace(self) -> Iterator[Remedy]:
        target_ms = self._scenario.scheduler.tpot_ms
        if target_ms is None:
            return
        changed = self._scenario.with_scheduler(tpot_ms=2 * target_ms)
        yield Remedy(
            "relax_pace",
            f"--tpot-ms {2 * target_ms:g}",
            "streams pause longer while prompts are read",
            self._predict(changed),
            "Longer steps read more of a prompt for each reading of the weights.",
        )

    def _cap_queue(self) -> Iterator[Remedy]:
        config = self._scenario.scheduler
        limit_s = max(1.0, 2 * (config.ttft_ms or 500.0) / 1e3)
        if config.max_queue_ttft_s <= limit_s:
            return
        changed = self._scenario.with_scheduler(max_queue_ttft_s=limit_s)
        yield Remedy(
            "cap_queue",
            f"--max-queue-ttft {limit_s:g}",
            "refused requests",
            self._predict(changed),
            f"Refuse at once what would wait longer, with an honest Retry-After: "
            f"{self._refused(changed)}.",
        )

    def _more_seats(self) -> Iterator[Remedy]:
        config = self._scenario.scheduler
        most = max((r.num_running for r in self._predictor.baseline.results), default=0)
        if most < config.max_num_seqs or 2 * config.max_num_seqs > config.max_num_batched_tokens:
            return
        changed = self._scenario.with_scheduler(max_num_seqs=2 * config.max_num_seqs)
        yield Remedy(
            "more_seats",
            f"--max-num-seqs {2 * config.max_num_seqs}",
            "slower streams at the peak",
            self._predict(changed),
            "All seats are taken at the peak while requests wait.",
        )

    def _smooth(self) -> Iterator[Remedy]:
        yield Remedy(
            "smooth_arrivals",
            "",
            "a change in the clients",
            self._predict(self._scenario.smoothed()),
            "The same requests at equal distances, the best that spreading them can do: jitter on "
            "timers, a limit of requests in flight in each client, or /v1/batches for work that "
            "nobody waits for.",
        )

    def _quantise_kv(self) -> Iterator[Remedy]:
        sizes, dtype = self._facts.kv_block_bytes, self._facts.settings.get("kv_cache_dtype")
        own, small = sizes.get(str(dtype)), sizes.get("int8")
        if not own or not small or own <= small:
            return
        yield Remedy(
            "quantise_kv",
            "--kv-cache-dtype int8",
            "a little precision",
            self._predict(self._scenario.with_blocks(own / small)),
            f"{own / small:.1f} times the tokens in the same memory.",
        )

    def _enlarge_kv(self) -> Iterator[Remedy]:
        memory = self._facts.memory
        own = memory.get("kv_cache", 0)
        spare = memory.get("available", 0) - sum(
            memory.get(name, 0) for name in ("weights", "scratch", "kv_cache")
        )
        if own <= 0 or spare < MIN_SPARE * own:
            return
        size = min(2 * own, own + int(spare * SPARE_SHARE)) // _MIB * _MIB
        if size <= own:
            return
        yield Remedy(
            "enlarge_kv",
            f"--kv-cache-memory {size // _MIB}MiB",
            "memory",
            self._predict(self._scenario.with_blocks(size / own)),
            f"{spare / _MIB:,.0f} MiB were free when the server started.",
        )

    def _cap_concurrency(self) -> Iterator[Remedy]:
        scenario = self._scenario
        lengths = [r.num_prompt_tokens + r.num_output_tokens for r in scenario.requests]
        num_blocks = mean([float(-(-length // self._facts.block_size)) for length in lengths])
        seats = max(1, int(scenario.num_blocks / max(1.0, num_blocks)))
        if seats >= scenario.scheduler.max_num_seqs:
            return
        yield Remedy(
            "cap_concurrency",
            f"--max-num-seqs {seats}",
            "waiting instead of preemptions",
            self._predict(scenario.with_scheduler(max_num_seqs=seats)),
            f"So many requests of the usual length fit the KV cache of {scenario.num_blocks} "
            "blocks; nothing is computed twice then.",
        )

    def _more_memory(self) -> Iterator[Remedy]:
        yield Remedy(
            "more_memory",
            "",
            "hardware",
            self._predict(self._scenario.with_blocks(2.0)),
            "A machine with twice the memory for the KV cache.",
        )

    def _cap_streams(self, target_ms: float) -> Iterator[Remedy]:
        scenario = self._scenario
        lengths = [r.num_prompt_tokens + r.num_output_tokens / 2 for r in scenario.requests]
        costs = scenario.costs
        row_ms = costs.decode_row_ms + costs.context_token_ms * mean(lengths)
        seats = max(1, int((target_ms - costs.step_ms) / max(row_ms, 1e-6)))
        if seats >= scenario.scheduler.max_num_seqs:
            return
        changed = scenario.with_scheduler(max_num_seqs=seats)
        before, after = (
            self._predictor.metric("ttft_p95_ms"),
            self._predictor.metric("ttft_p95_ms", changed),
        )
        yield Remedy(
            "cap_concurrency",
            f"--max-num-seqs {seats}",
            "others wait for a seat",
            self._predict(changed),
            f"So many streams keep {target_ms:g} ms a token; TTFT p95 goes from {before:,.0f} to "
            f"{after:,.0f} ms in simulation.",
        )

    def _hardware(self, load: float) -> Iterator[Remedy]:
        yield Remedy(
            "twice_the_cores",
            "",
            "hardware",
            self._predict(self._scenario.with_costs(0.5)),
            "A machine that computes twice as fast.",
        )
        number = max(2, math.ceil(load / TARGET_LOAD))
        yield Remedy(
            "more_servers",
            "",
            "hardware",
            self._predict(self._scenario.thinned(number)),
            f"{number} servers like this one that take turns.",
        )


def useful(remedies: list[Remedy]) -> list[Remedy]:
    """Those with a gain worth the words; without a prediction there is no telling."""
    return [
        remedy
        for remedy in remedies
        if remedy.predicted is None or remedy.predicted.gain_percent >= MIN_GAIN_PERCENT
    ]
