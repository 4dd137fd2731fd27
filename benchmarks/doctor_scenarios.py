"""Saturates a real server in three known ways; does the doctor name them, and keep its promises?

    python benchmarks/doctor_scenarios.py --model smollm2-135m

Each scenario loads a server of its own, asks `/caudal/doctor`, and tries the remedy with the
greatest predicted gain on a replay of the recorded load, as `caudal doctor --verify` does. About
two minutes on the demo model, on a machine with nothing else to do. Exits with 1 if a finding is
wrong or a predicted gain is not within a quarter of the measured one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from caudal.bench.load import LoadOptions
from caudal.bench.own_server import get_page, own_server
from caudal.bench.suite import Level, Plan, measure
from caudal.bench.target import COMPLETIONS_PATH, TargetOptions
from caudal.bench.verify import Verification, choose_remedy, verify
from caudal.bench.workload import WorkloadOptions
from caudal.diagnosis.report import Diagnosis

TOLERANCE = 0.25
PROMPT, OUTPUT = 48, 32
"""Mean lengths in tokens."""
COMMON = ("--max-model-len", "384", "--kv-cache-dtype", "f16", "--no-history")
NUM_PROBES = 48
MIB = 1 << 20


class Quiet:
    """Progress that only says what goes on."""

    def say(self, text: str) -> None:
        """Not worth a line here."""

    def start_level(self, title: str) -> None:
        """Which run it is."""
        print(f"    {title}", file=sys.stderr, flush=True)

    def update(self, live: object) -> None:
        """Nothing to show."""

    def end_level(self, level: Level) -> None:
        """Its numbers come at the end."""


@dataclass(frozen=True)
class Case:
    """A load on a configuration, and what it must be called."""

    name: str
    flags: tuple[str, ...]
    arrivals: list[float]


def cases(capacity: float, seconds: float, block_bytes: int) -> list[Case]:
    """The three, in proportion to the requests a second that the machine can do."""
    source = random.Random(5)
    climb = poisson(source, 1.8 * capacity, max(seconds, 40 / capacity))
    size = max(24, round(1.6 * capacity))
    pause = max(4.0, 2.5 * size / capacity)
    heaps = [pause * heap + 0.01 * index for heap in range(4) for index in range(size)]
    steady = poisson(source, 0.7 * capacity, max(seconds, 60 / capacity))
    tight = ("--kv-cache-memory", f"{24 * block_bytes}")
    return [
        Case("capacity", ("--max-num-seqs", "16"), climb),
        Case("bursts", ("--max-num-seqs", "4"), heaps),
        Case("kv_pressure", ("--max-num-seqs", "32", *tight), steady),
    ]


def poisson(source: random.Random, rate: float, seconds: float) -> list[float]:
    """Independent arrivals."""
    times, now = [], 0.0
    while (now := now + source.expovariate(rate)) < seconds:
        times.append(now)
    return times


def trace_of(arrivals: list[float]) -> bytes:
    """Short prompts and answers that vary by half, as JSON lines."""
    source = random.Random(6)
    rows = [
        {
            "timestamp": at * 1e3,
            "input_length": source.randint(PROMPT // 2, PROMPT * 3 // 2),
            "output_length": source.randint(OUTPUT // 2, OUTPUT * 3 // 2),
        }
        for at in arrivals
    ]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def send(url: str, trace: bytes) -> Level:
    """Run a trace against a server."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_bytes(trace)
        plan = Plan(
            target=TargetOptions(url=url, endpoint=COMPLETIONS_PATH),
            workload=WorkloadOptions(trace=str(path)),
            load=LoadOptions(cache="as-is", warmup=0),
        )
        (level,) = asyncio.run(measure(plan, Quiet())).levels
        return level


def probe(model: str) -> tuple[float, int]:
    """Requests a second of this kind that the machine can do, and bytes of a KV block."""
    with own_server(model, (*COMMON, "--max-num-seqs", "16")) as url:
        send(url, trace_of([0.0] * 8))
        level = send(url, trace_of([0.0] * NUM_PROBES))
        live = json.loads(get_page(f"{url}/caudal/live") or "{}")
    blocks = int(live["blocks"]["total"])
    return NUM_PROBES / level.summary.duration_s, live["engine"]["memory_plan"][
        "kv_cache"
    ] // blocks


def examine(model: str, case: Case) -> tuple[Diagnosis, Verification | None]:
    """Load, diagnose, verify."""
    print(f"  {case.name}: {len(case.arrivals)} requests", file=sys.stderr, flush=True)
    with own_server(model, (*COMMON, *case.flags)) as url:
        send(url, trace_of(case.arrivals))
        # The two requests with which the client learns how tokens are counted come before.
        seconds = case.arrivals[-1] - case.arrivals[0] + 0.05
        page = get_page(f"{url}/caudal/doctor?seconds={seconds:.2f}", timeout_s=120)
        trace = get_page(f"{url}/caudal/trace?seconds={seconds:.2f}")
    if page is None or trace is None:
        raise SystemExit("the server gave no diagnosis")
    diagnosis = msgspec.json.decode(page, type=Diagnosis)
    if not diagnosis.findings or diagnosis.findings[0].id != case.name:
        return diagnosis, None
    choice = choose_remedy(diagnosis)
    return diagnosis, verify(model, diagnosis, trace.encode(), choice, Quiet())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="name or path of the model")
    parser.add_argument("--seconds", type=float, default=10.0, help="of load per run")
    parser.add_argument("--only", help="run this scenario alone")
    options = parser.parse_args()
    capacity, block_bytes = probe(options.model)
    print(f"capacity: {capacity:.1f} requests/s", file=sys.stderr)
    failed = 0
    print(f"{'scenario':13} {'found':13} {'remedy':28} {'predicted':>18} {'measured':>18}  ok")
    for case in cases(capacity, options.seconds, block_bytes):
        if options.only not in (None, case.name):
            continue
        diagnosis, found = examine(options.model, case)
        names = ", ".join(finding.id for finding in diagnosis.findings) or "nothing"
        if found is None:
            failed += 1
            print(f"{case.name:13} {names:13} -- NO")
            for finding in diagnosis.findings:
                for evidence in finding.evidence:
                    print(f"    {finding.id}: {evidence.text}")
            continue
        predicted, measured = found.predicted, found.measured
        off = abs(predicted.gain_percent - measured.gain_percent)
        is_kept = off <= TOLERANCE * abs(measured.gain_percent)
        failed += not is_kept
        cells = [
            f"{each.before:.0f}→{each.after:.0f} {each.gain_percent:.0f} %"
            for each in (predicted, measured)
        ]
        verdict = "yes" if is_kept else "NO"
        row = f"{case.name:13} {names:13} {found.remedy.flag:28} {cells[0]:>18} {cells[1]:>18}"
        print(f"{row}  {verdict}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
