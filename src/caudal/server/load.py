"""Remembers the load of the server for the doctor, and for replaying it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from caudal.diagnosis.load_log import Arrival, End, LoadLog, Occupancy
from caudal.engine.messages import EngineRequest
from caudal.metrics.request_log import RequestRecord
from caudal.server.generation.plan import GenerationPlan

if TYPE_CHECKING:
    from caudal.server.state import AppState


def note_arrivals(
    state: AppState, plan: GenerationPlan, requests: Sequence[EngineRequest]
) -> list[str]:
    """Requests go to the engine; returns the ids of those that count as load.

    Offline batches do not: they take what others leave.
    """
    if plan.service.is_background:
        return []
    stats = state.engine.stats
    occupancy = Occupancy(
        stats.num_waiting,
        stats.num_running,
        stats.num_blocks_held / max(1, stats.num_blocks_total),
    )
    for index, request in enumerate(requests):
        arrival = Arrival(
            request_id=request.request_id,
            arrival_s=plan.arrival,
            owner=plan.tenant,
            namespace=plan.namespace,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens,
            is_lintable=index % plan.n == 0 and request.sampling.num_prompt_logprobs is None,
        )
        state.load_log.arrive(arrival, request.prompt_token_ids, occupancy)
    return [request.request_id for request in requests]


def finisher(log: LoadLog) -> Callable[[RequestRecord], None]:
    """A listener of the request log that tells `log` how requests ended."""

    def finish(record: RequestRecord) -> None:
        log.finish(
            record.request_id,
            End(
                num_output_tokens=record.num_output_tokens,
                num_cached_tokens=record.num_cached_tokens,
                num_preemptions=record.num_preemptions,
                queue_ms=record.queue_s * 1e3,
                ttft_ms=None if record.ttft_s is None else record.ttft_s * 1e3,
                tpot_ms=None if record.tpot_s is None else record.tpot_s * 1e3,
                e2e_ms=record.e2e_s * 1e3,
            ),
        )

    return finish
