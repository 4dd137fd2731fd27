"""Measures `caudal serve` on the workloads, beside OpenVINO GenAI where that is installed.

    python benchmarks/serve_vs_peer.py [--model smollm2-135m] [--only chat,mixed] [--rounds 3]
                                       [--peer-python peer/bin/python] [--url http://…]
                                       [--also llama.cpp=http://127.0.0.1:8081]

All systems stay loaded and take turns; each round has prompts of its own, the same for all, and
swaps who goes first. `--also` adds a running OpenAI-compatible server. The table shows medians.
Only ratios of one session count: machines are noisy.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.client import run_workload
from benchmarks.measurement import Run, Summary, summarize
from benchmarks.workloads import WORKLOADS, Workload

START_TIMEOUT_S = 120
DEFAULT_WORKLOADS = "single,chat,agents,mixed,prefill"

System = Callable[[Workload, int], Run]
"""Runs one round of a workload with a seed."""


@contextmanager
def caudal_server(model: str, flags: list[str]) -> Iterator[str]:
    """Start `caudal serve` on a free port, wait until it is ready, and end it afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "caudal", "serve", model, "--port", str(port), *flags]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=sys.stderr)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_ready(url):
            if process.poll() is not None:
                sys.exit("the server ended before it was ready")
            if time.perf_counter() - started > START_TIMEOUT_S:
                sys.exit(f"the server was not ready after {START_TIMEOUT_S} s")
            time.sleep(0.02)
        print(f"caudal: ready after {time.perf_counter() - started:.2f} s")
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def server_system(url: str) -> System:
    """A running OpenAI-compatible server."""
    name = served_model(url)
    return lambda workload, seed: run_workload(url, name, workload, seed)


def other_servers(also: list[str]) -> dict[str, System]:
    """Of arguments NAME=URL."""
    systems = {}
    for named in also:
        name, _, url = named.partition("=")
        systems[name] = server_system(url)
    return systems


def served_model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
        return str(json.load(response)["data"][0]["id"])


@contextmanager
def openvino_peer(python: str, model_file: Path) -> Iterator[System]:
    """OpenVINO GenAI in its own process, loaded once."""
    script = Path(__file__).with_name("openvino_peer.py")
    command = [python, str(script), str(model_file)]
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin is not None
    assert process.stdout is not None
    jobs, answers = process.stdin, process.stdout
    try:
        _read_answer(answers)
        print(f"openvino-genai: loaded after {time.perf_counter() - started:.2f} s")

        def run(workload: Workload, seed: int) -> Run:
            jobs.write(json.dumps({"workload": workload.name, "seed": seed}) + "\n")
            jobs.flush()
            return Run(**json.loads(_read_answer(answers)))

        yield run
    finally:
        jobs.close()
        process.wait(60)
        answers.close()


def _read_answer(answers: IO[str]) -> str:
    line = answers.readline()
    if not line:
        sys.exit("the peer ended early; its message is above")
    return line


def has_openvino(python: str) -> bool:
    """Whether that interpreter can import openvino_genai."""
    command = [python, "-c", "import openvino_genai"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def measure(
    systems: dict[str, System], workloads: list[Workload], rounds: int
) -> dict[str, dict[str, Summary]]:
    """Medians as {workload: {system: summary}}; the first system alternates between rounds."""
    results: dict[str, dict[str, Summary]] = {}
    for workload in workloads:
        runs: dict[str, list[Run]] = {name: [] for name in systems}
        for number in range(rounds):
            order = list(systems) if number % 2 == 0 else list(reversed(systems))
            for name in order:
                run = systems[name](workload, number)
                runs[name].append(run)
                note = f", {run.num_failed} failed: {run.first_error}" if run.num_failed else ""
                print(
                    f"{workload.name} #{number + 1} {name}: {run.wall_s:.2f} s, "
                    f"{run.output_tokens_per_s:.1f} tok/s{note}",
                    flush=True,
                )
        results[workload.name] = {name: summarize(of) for name, of in runs.items()}
    return results


def format_table(results: dict[str, dict[str, Summary]]) -> str:
    """A Markdown table; the ratio compares wall time for the same work."""
    head = "workload | system | tok/s out | TTFT p50 ms | TTFT p95 ms | gap p95 ms | failed | ratio"
    lines = [f"| {head} |", "|" + "---|" * (head.count("|") + 1)]
    for workload, of_system in results.items():
        slowest = max(summary.wall_s for summary in of_system.values())
        for system, summary in of_system.items():
            ratio = f"{slowest / summary.wall_s:.2f}×" if len(of_system) > 1 else ""
            cells = (
                workload,
                system,
                f"{summary.output_tokens_per_s:.1f}",
                f"{summary.ttft_p50_ms:.0f}",
                f"{summary.ttft_p95_ms:.0f}",
                f"{summary.gap_p95_ms:.0f}",
                str(summary.num_failed),
                ratio,
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def describe_machine() -> str:
    """The processor and its number of cores, as the system reports them."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "unknown processor"
    names = re.findall(r"model name\s*: (.*)", text)
    return f"{names[0] if names else 'unknown processor'}, {len(names)} logical cores"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="known name or GGUF path")
    parser.add_argument("--only", default=DEFAULT_WORKLOADS, help=f"of {','.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--also", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--url", help="measure this server instead of starting one")
    parser.add_argument("serve_flags", nargs="*", help="after --: flags for caudal serve")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    unknown = [name for name in options.only.split(",") if name not in WORKLOADS]
    if unknown:
        sys.exit(f"--only: unknown workload {unknown[0]!r}; known: {', '.join(WORKLOADS)}")
    from caudal.weights.download import resolve_model

    print(describe_machine())
    with ExitStack() as stack:
        url = options.url or stack.enter_context(caudal_server(options.model, options.serve_flags))
        systems = {"caudal": server_system(url)}
        if has_openvino(options.peer_python):
            peer = openvino_peer(options.peer_python, resolve_model(options.model))
            systems["openvino-genai"] = stack.enter_context(peer)
        else:
            print("openvino-genai is not installed (--peer-python): measuring without")
        systems |= other_servers(options.also)
        workloads = [WORKLOADS[workload] for workload in options.only.split(",")]
        print("\n" + format_table(measure(systems, workloads, options.rounds)))


if __name__ == "__main__":
    main()
