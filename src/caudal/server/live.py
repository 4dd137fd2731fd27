"""The snapshot of `/caudal/live`."""

from __future__ import annotations

import time
from typing import Literal

from caudal.engine.messages import EngineStats, RequestProgress
from caudal.metrics.reading import STEP_PARTS, Aggregate, outside_kernels, percentiles_ms, share
from caudal.server.generation.choice import Choice
from caudal.server.generation.serve import Generation
from caudal.server.protocol.observation import (
    LiveBlocks,
    LiveEngine,
    LiveMinute,
    LiveModel,
    LiveQueue,
    LiveRates,
    LiveRequest,
    LiveSnapshot,
    Spread,
)
from caudal.server.recorder import MINUTE_S, RATE_WINDOW_S
from caudal.server.state import AppState
from caudal.server.version import caudal_version

INSPECT_TIMEOUT_S = 0.3
"""The engine answers between two steps; a snapshot does not wait longer for it."""
MAX_REQUESTS = 256
ID_CHARS = 20


async def snapshot(state: AppState) -> LiveSnapshot:
    """Everything worth seeing about the server now."""
    progress = await state.engine.inspect(INSPECT_TIMEOUT_S) if state.generations else None
    recorder = state.recorder
    now = time.time()
    requests = _requests(state, progress)
    return LiveSnapshot(
        time=round(now, 3),
        status=_status(state),
        version=caudal_version(),
        uptime_s=round(now - recorder.started, 1),
        engine_restarts=state.metrics.engine_restarts,
        model=_model(state),
        engine=_engine(state),
        queue=_queue(state, state.engine.stats),
        blocks=_blocks(state.engine.stats),
        rates=_rates(recorder.recent(RATE_WINDOW_S)),
        minute=_minute(recorder.recent(MINUTE_S)),
        requests=requests[:MAX_REQUESTS],
        num_requests=len(requests),
    )


def _status(state: AppState) -> Literal["loading", "ready", "draining", "down"]:
    if state.is_draining:
        return "draining"
    if state.is_ready:
        return "ready"
    return "loading" if state.model is None or not state.engine.stats.num_steps else "down"


def _model(state: AppState) -> LiveModel | None:
    model = state.model
    if model is None:
        return None
    return LiveModel(
        name=model.name,
        architecture=model.architecture,
        quantization=model.quantization,
        num_parameters=model.num_parameters,
        weights_bytes=model.num_bytes,
        max_model_len=state.engine.info.max_model_len if state.engine.is_ready else 0,
    )


def _engine(state: AppState) -> LiveEngine | None:
    if not state.engine.is_ready:
        return None
    info = state.engine.info
    return LiveEngine(
        isa=info.isa,
        num_threads=info.num_threads,
        block_size=info.block_size,
        max_num_seqs=info.max_num_seqs,
        load_ms=round(info.load_ms, 1),
        memory_plan=info.memory_plan,
        settings=info.settings,
    )


def _queue(state: AppState, stats: EngineStats) -> LiveQueue:
    return LiveQueue(
        running=stats.num_running,
        waiting=stats.num_waiting,
        preparing=state.num_preparing,
        depth=stats.num_waiting + state.num_preparing,
        waiting_tokens=stats.num_waiting_tokens,
        batch_running=stats.num_background_running,
        batch_waiting=stats.num_background_waiting,
        predicted_ttft_ms=round(stats.predicted_ttft_ms, 1),
    )


def _blocks(stats: EngineStats) -> LiveBlocks:
    return LiveBlocks(
        total=stats.num_blocks_total,
        used=stats.num_blocks_held,
        cached=stats.num_blocks_cached,
        free=stats.num_blocks_free,
        wasted_ratio=round(stats.kv_wasted_fraction, 4),
    )


def _rates(happened: Aggregate) -> LiveRates:
    counters, seconds = happened.counters, happened.seconds

    def per_second(name: str) -> float:
        return round(counters.get(name, 0.0) / seconds, 2) if seconds else 0.0

    return LiveRates(
        seconds=round(seconds, 1),
        requests=per_second("requests_received"),
        prompt_tokens=per_second("prompt_tokens"),
        output_tokens=per_second("generation_tokens"),
        batch_output_tokens=per_second("batch_generation_tokens"),
        steps=per_second("num_steps"),
    )


def _spread(happened: Aggregate, name: str) -> Spread:
    counts = happened.histograms.get(name)
    return Spread(sum(counts.values()) if counts else 0, *percentiles_ms(counts))


def _minute(happened: Aggregate) -> LiveMinute:
    counters = happened.counters
    num_steps = counters.get("num_steps", 0.0)
    parts = {part: counters.get(f"step_ms.{part}", 0.0) for part in STEP_PARTS}
    queries = counters.get("prefix_queries_tokens", 0.0)
    hits = counters.get("prefix_hits_tokens", 0.0)
    throttled_s = counters.get("throttled_s", 0.0)
    return LiveMinute(
        seconds=round(happened.seconds, 1),
        requests=int(counters.get("requests_received", 0)),
        finished=_labels(happened, "finished"),
        rejected=_labels(happened, "rejected"),
        cancelled=int(counters.get("requests_cancelled", 0)),
        preemptions=int(counters.get("num_preemptions", 0)),
        preempted_tokens=int(counters.get("num_preempted_tokens", 0)),
        cache_query_tokens=int(queries),
        cache_hit_tokens=int(hits),
        cache_hit_rate=share(hits, queries),
        ttft_ms=_spread(happened, "ttft"),
        tpot_ms=_spread(happened, "tpot"),
        itl_ms=_spread(happened, "itl"),
        e2e_ms=_spread(happened, "e2e"),
        queue_ms=_spread(happened, "queue_time"),
        step_ms=round(sum(parts.values()) / num_steps, 3) if num_steps else None,
        step_parts_ms={
            part: round(total / num_steps, 3) if num_steps else 0.0 for part, total in parts.items()
        },
        cpu_outside_kernels=outside_kernels(happened),
        throttled_ratio=round(throttled_s / happened.seconds, 4) if happened.seconds else 0.0,
        steal_ratio=share(counters.get("steal_s", 0.0), counters.get("machine_s", 0.0)),
    )


def _labels(happened: Aggregate, family: str) -> dict[str, int]:
    prefix = family + "."
    return {
        name.removeprefix(prefix): int(value)
        for name, value in happened.counters.items()
        if name.startswith(prefix)
    }


def _requests(state: AppState, progress: list[RequestProgress] | None) -> list[LiveRequest]:
    by_id = None if progress is None else {each.request_id: each for each in progress}
    now = time.monotonic()
    found = []
    for generation in list(state.generations):
        for choice in generation.choices:
            if choice.finish_reason is None:
                known = by_id.get(choice.request_id) if by_id is not None else None
                found.append(_request(generation, choice, known, now))
    return found


def _request(
    generation: Generation, choice: Choice, progress: RequestProgress | None, now: float
) -> LiveRequest:
    timing = choice.timing
    is_waiting = progress is not None and not progress.is_running
    state: Literal["waiting", "prefill", "decode"] = "decode" if timing.first else "prefill"
    since_first = now - timing.first
    has_rate = timing.first and choice.num_output_tokens > 1 and since_first > 0
    return LiveRequest(
        id=choice.request_id[:ID_CHARS],
        state="waiting" if is_waiting else state,
        prompt_tokens=len(choice.prompt.token_ids),
        computed_tokens=None if progress is None else progress.num_computed_tokens,
        cached_tokens=choice.num_cached_tokens,
        output_tokens=choice.num_output_tokens,
        max_tokens=choice.prompt.max_tokens,
        age_s=round(now - timing.arrival, 3),
        ttft_ms=round((timing.first - timing.arrival) * 1e3, 2) if timing.first else None,
        tokens_per_s=round((choice.num_output_tokens - 1) / since_first, 2) if has_rate else None,
        preemptions=0 if progress is None else progress.num_preemptions,
        is_batch=generation.plan.service.is_background,
    )
