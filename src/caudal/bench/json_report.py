"""A measurement as JSON, with every request."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from caudal.bench.record import RequestRecord
from caudal.bench.suite import CACHE_NOTES, Level, Report

FORMAT = "caudal-bench/1"
_DIGITS = 6
"""Microseconds."""


def as_json(report: Report) -> dict[str, Any]:
    """Times in seconds after the level's start, unless a name says otherwise."""
    plan = dataclasses.asdict(report.plan)
    plan["target"].pop("api_key")
    return {
        "format": FORMAT,
        "started": report.started,
        "run_id": report.run_id,
        "model": report.target.model,
        "url": report.target.url,
        "workload": report.workload,
        "warmup": report.warmup,
        "cache": CACHE_NOTES[report.plan.load.cache],
        "client": report.machine,
        "calibration": dataclasses.asdict(report.calibration),
        "plan": plan,
        "levels": [level_as_json(level) for level in report.levels],
        "goodput_search": None if report.search is None else dataclasses.asdict(report.search),
    }


def level_as_json(level: Level) -> dict[str, Any]:
    """One level with every request."""
    summary = dataclasses.asdict(level.summary)
    summary |= {"goodput": level.summary.goodput, "good_share": level.summary.good_share}
    return {
        "load": {"name": str(level.load)} | dataclasses.asdict(level.load),
        "summary": summary,
        "was_given_up": level.run.was_given_up,
        "num_planned": level.run.num_planned,
        "client": dataclasses.asdict(level.run.health),
        "problems": level.problems,
        "requests": [_request(record) for record in level.run.records],
    }


def _request(record: RequestRecord) -> dict[str, Any]:
    fields = dataclasses.asdict(record)
    fields |= {"ttft_s": record.ttft_s, "tpot_s": record.tpot_s, "e2e_s": record.e2e_s}
    fields["ok"] = record.is_ok
    return fields


def tidy(value: Any) -> Any:
    """Rounded, and without the numbers that JSON does not know."""
    if isinstance(value, float):
        return round(value, _DIGITS) if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): tidy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [tidy(item) for item in value]
    return value


def write_json(report: Report, path: Path) -> None:
    """Raises OSError."""
    path.write_text(json.dumps(tidy(as_json(report)), indent=1) + "\n", encoding="utf-8")
