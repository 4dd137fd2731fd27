"""A snapshot of a busy server, to draw."""

from __future__ import annotations

from typing import Any

import msgspec

from caudal.server.protocol.observation import LiveSnapshot

_NO_SPREAD = {"count": 0, "p50": None, "p95": None, "p99": None}


def make_request(**changes: Any) -> dict[str, Any]:
    """One that decodes."""
    return {
        "id": "chatcmpl-0123456789a",
        "state": "decode",
        "prompt_tokens": 120,
        "computed_tokens": 150,
        "cached_tokens": 96,
        "output_tokens": 31,
        "max_tokens": 200,
        "age_s": 4.2,
        "ttft_ms": 84.0,
        "tokens_per_s": 7.5,
        "preemptions": 0,
        "is_batch": False,
        **changes,
    }


def make_minute() -> dict[str, Any]:
    """A minute that misses the target of the first token."""
    return {
        "seconds": 60.0,
        "requests": 90,
        "finished": {"stop": 80},
        "rejected": {"queue_ttft": 3},
        "cancelled": 0,
        "preemptions": 2,
        "preempted_tokens": 64,
        "cache_query_tokens": 1000,
        "cache_hit_tokens": 800,
        "cache_hit_rate": 0.8,
        "ttft_ms": {"count": 90, "p50": 120.0, "p95": 640.0, "p99": 2500.0},
        "tpot_ms": {"count": 90, "p50": 9.0, "p95": 41.0, "p99": 70.0},
        **dict.fromkeys(("itl_ms", "e2e_ms", "queue_ms"), _NO_SPREAD),
        "step_ms": 20.0,
        "step_parts_ms": {"schedule": 1.0, "forward": 19.0},
        "cpu_outside_kernels": 0.05,
        "throttled_ratio": 0.0,
        "steal_ratio": None,
    }


def make_snapshot(**changes: Any) -> LiveSnapshot:
    """Two requests run and one waits; `changes` replace whole parts."""
    waiting = make_request(id="cmpl-waits", state="waiting", ttft_ms=None, tokens_per_s=None)
    parts = {
        "time": 1_800_000_000.0,
        "status": "ready",
        "version": "0.1.0",
        "uptime_s": 3725.0,
        "engine_restarts": 0,
        "model": {
            "name": "tiny",
            "architecture": "llama",
            "quantization": "Q4_1",
            "num_parameters": 134_515_008,
            "weights_bytes": 96_576_768,
            "max_model_len": 2048,
        },
        "engine": {
            "isa": "avx2",
            "num_threads": 2,
            "block_size": 16,
            "max_num_seqs": 64,
            "load_ms": 100.0,
            "memory_plan": {"weights": 96_576_768, "kv_cache": 2**31, "available": 2**33},
            "settings": {"ttft_ms": 500.0, "tpot_ms": 50.0},
        },
        "queue": {
            "running": 2,
            "waiting": 1,
            "preparing": 0,
            "depth": 1,
            "waiting_tokens": 120,
            "batch_running": 0,
            "batch_waiting": 0,
            "predicted_ttft_ms": 210.0,
        },
        "blocks": {"total": 1000, "used": 250, "cached": 100, "free": 650, "wasted_ratio": 0.01},
        "rates": {
            "seconds": 10.0,
            "requests": 1.5,
            "prompt_tokens": 180.0,
            "output_tokens": 1234.5,
            "batch_output_tokens": 0.0,
            "steps": 20.0,
        },
        "minute": make_minute(),
        "requests": [make_request(), make_request(id="batch-1", is_batch=True), waiting],
        "num_requests": 3,
    }
    return msgspec.convert({**parts, **changes}, LiveSnapshot)
