"""What observing costs a real server: python benchmarks/metrics_ab.py [--model …] [--rounds 9]

Two servers of ours with the same model take turns at the same closed loop. One has everything on:
history, prefix lint, vLLM's names, a trace of each request to a collector in this process, and is
scraped and looked at each second, as Prometheus and an open dashboard do. The other has all of that
off; its instruments go on counting, as they cannot be switched off.

A round runs both once, the order alternates, each round has prompts of its own, the same for both.
Reported are the medians, the ratio of each round with its quartiles, and the same for processor
time, which a busy neighbour disturbs less. Exit code 1: the median costs a percent or more.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import re
import statistics
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.client import run_workload
from benchmarks.serve_vs_peer import describe_machine, served_model
from benchmarks.workloads import Prompt, Workload, make_text
from caudal.bench.own_server import get_page, own_server

LIMIT = 1.01
LOOK_S = 1.0
OFF = ("--no-history", "--no-prefix-lint")
ON = ("--metrics-compat", "vllm")
PAGES = ("/metrics", "/caudal/live")


class _Collector(BaseHTTPRequestHandler):
    """Takes traces and forgets them."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """Address of a collector of OpenTelemetry traces."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def watched(url: str) -> Iterator[None]:
    """Ask for the pages each second, as Prometheus and a dashboard do."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_S):
            for page in PAGES:
                get_page(f"{url}{page}")

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def processor_s(url: str) -> float:
    """Processor time of both of a server's processes so far."""
    page = get_page(f"{url}/metrics") or ""
    found = re.findall(r'^caudal_cpu_seconds_total\{part="(?:engine|server)"\} (\S+)', page, re.M)
    return sum(map(float, found))


@dataclass(frozen=True, slots=True)
class Cost:
    """One run of the load."""

    wall_s: float
    cpu_s: float
    num_tokens: int


@dataclass(slots=True)
class Comparison:
    """Rounds of both; ratios are of the time with everything on to that without."""

    with_all: list[Cost] = field(default_factory=list)
    without: list[Cost] = field(default_factory=list)

    def ratios(self, name: str) -> list[float]:
        """Of each round, of `wall_s` or `cpu_s`."""
        pairs = zip(self.with_all, self.without, strict=True)
        return [getattr(on, name) / getattr(off, name) for on, off in pairs]

    def summary(self) -> dict[str, object]:
        """Medians, and ratios with their quartiles."""
        rates = {
            name: statistics.median(cost.num_tokens / cost.wall_s for cost in costs)
            for name, costs in (("on", self.with_all), ("off", self.without))
        }
        return {
            "tokens_per_s": rates,
            "wall": spread(self.ratios("wall_s")),
            "cpu": spread(self.ratios("cpu_s")),
            "rounds": len(self.without),
        }


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and ends."""
    if len(ratios) == 1:
        quartiles = [ratios[0]] * 3
    else:
        quartiles = statistics.quantiles(ratios, n=4, method="inclusive")
    low, median, high = quartiles
    return {"min": min(ratios), "q1": low, "median": median, "q3": high, "max": max(ratios)}


def make_workload(options: argparse.Namespace) -> Workload:
    """Prompts of random words, answers of one length."""

    def create(source: object, shared: str) -> Prompt:
        words = make_text(source, options.words)  # type: ignore[arg-type]
        return Prompt(f"{shared}\n{words}", options.tokens)

    # Half of each prompt is shared, so that the lint has something to compare.
    name, users, number = "observed", options.at_a_time, options.requests
    return Workload(name, users, number, create, num_shared_words=options.words)


def run_once(url: str, model: str, workload: Workload, seed: int, *, is_watched: bool) -> Cost:
    """One run. Ends the program if a request failed: its time would be worth nothing."""
    with watched(url) if is_watched else contextlib.nullcontext():
        before = processor_s(url)
        run = run_workload(url, model, workload, seed)
        cpu_s = processor_s(url) - before
    if run.num_failed:
        sys.exit(f"{run.num_failed} requests failed: {run.first_error}")
    return Cost(run.wall_s, cpu_s, run.num_output_tokens)


def compare(urls: dict[str, str], workload: Workload, rounds: int) -> Comparison:
    """Alternate; a round before the first is not counted."""
    found = Comparison()
    names = {key: served_model(url) for key, url in urls.items()}
    for number in range(-1, rounds):
        order = ("on", "off") if number % 2 else ("off", "on")
        costs = {
            key: run_once(urls[key], names[key], workload, number, is_watched=key == "on")
            for key in order
        }
        if number < 0:
            continue
        found.with_all.append(costs["on"])
        found.without.append(costs["off"])
        told = ", ".join(
            f"{key} {costs[key].wall_s:.2f} s ({costs[key].cpu_s:.2f} s of processor time)"
            for key in ("on", "off")
        )
        print(f"round {number + 1} of {rounds}: {told}", flush=True)
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="known name or GGUF path")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--at-a-time", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32, help="per run")
    parser.add_argument("--words", type=int, default=50, help="of a prompt, and as many shared")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    return parser.parse_args()


def main() -> int:
    """Measure and print."""
    options = parse_arguments()
    has_traces = importlib.util.find_spec("opentelemetry") is not None
    print(describe_machine())
    with contextlib.ExitStack() as stack:
        flags: tuple[str, ...] = ON
        if has_traces:
            flags += ("--otlp-traces-endpoint", stack.enter_context(collector()))
        else:
            print("without traces: caudal[otel] is not installed")
        urls = {
            "on": stack.enter_context(own_server(options.model, flags)),
            "off": stack.enter_context(own_server(options.model, OFF)),
        }
        summary = compare(urls, make_workload(options), options.rounds).summary()
    rates, wall, cpu = summary["tokens_per_s"], summary["wall"], summary["cpu"]
    assert isinstance(rates, dict) and isinstance(wall, dict) and isinstance(cpu, dict)
    print(f"everything on: {rates['on']:.1f} tok/s; off: {rates['off']:.1f} tok/s (medians)")
    for name, of in (("time", wall), ("processor time", cpu)):
        print(
            f"{name}, on over off: {of['median']:.4f} (quartiles {of['q1']:.4f} to {of['q3']:.4f}, "
            f"ends {of['min']:.4f} to {of['max']:.4f}, {summary['rounds']} rounds)"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(summary, indent=1) + "\n")
    return int(wall["median"] >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
