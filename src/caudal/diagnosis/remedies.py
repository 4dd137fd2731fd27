"""What can be done about a saturated server, cheapest first, each with its simulated gain."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from caudal.diagnosis.common_remedies import CommonRemedies, useful
from caudal.diagnosis.patterns import mean, percentile
from caudal.diagnosis.report import Remedy, ServerFacts
from caudal.diagnosis.scenario import Predictor, Scenario

LENGTH_STEP = 64


class Pharmacy(CommonRemedies[Scenario]):
    """Makes remedies for recorded requests; knows each of them."""

    def __init__(self, predictor: Predictor, facts: ServerFacts, metric: str) -> None:
        super().__init__(predictor, facts, metric)
        self._simulator = predictor

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
            self._simulator.metric("ttft_p95_ms"),
            self._simulator.metric("ttft_p95_ms", changed),
        )
        yield Remedy(
            "cap_concurrency",
            f"--max-num-seqs {seats}",
            "others wait for a seat",
            self._predict(changed),
            f"So many streams keep {target_ms:g} ms a token; TTFT p95 goes from {before:,.0f} to "
            f"{after:,.0f} ms in simulation.",
        )
