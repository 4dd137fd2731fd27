"""Runs measurements against the fake server."""

from __future__ import annotations

import asyncio
from typing import Any

from caudal.bench.load import LoadOptions
from caudal.bench.runner import Live
from caudal.bench.search import SearchOptions
from caudal.bench.statistics import Objective
from caudal.bench.suite import Level, Plan, Report, measure
from caudal.bench.target import TargetOptions
from caudal.bench.workload import WorkloadOptions
from tests.bench.fake_server import Behaviour, FakeServer


class Silent:
    """Progress that nobody sees."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def start_level(self, title: str) -> None:
        self.lines.append(title)

    def update(self, live: Live) -> None:
        assert 0 <= live.num_in_flight <= live.num_planned

    def end_level(self, level: Level) -> None:
        self.lines.append(str(level.load))


def make_plan(address: str, **options: Any) -> Plan:
    """A plan without warm-up whose options go wherever a field has their name."""
    options = {"url": address, "warmup": 0, **options}
    groups: dict[str, Any] = {
        "target": TargetOptions,
        "workload": WorkloadOptions,
        "load": LoadOptions,
        "objective": Objective,
        "search": SearchOptions,
    }
    made: dict[str, Any] = {}
    for name, kind in groups.items():
        fields = set(kind.__dataclass_fields__)
        made[name] = kind(**{key: value for key, value in options.items() if key in fields})
    known = {field for kind in groups.values() for field in kind.__dataclass_fields__}
    assert set(options) <= known, set(options) - known
    return Plan(**made)


def run_against(server: FakeServer, **options: Any) -> Report:
    """Measure a server that is already up."""
    return asyncio.run(measure(make_plan(server.url, **options), Silent()))


def run(behaviour: Behaviour, **options: Any) -> Report:
    """Measure a server of its own."""
    with FakeServer(behaviour) as server:
        return run_against(server, **options)
