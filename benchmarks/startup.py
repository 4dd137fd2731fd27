"""Measures from the command to ready, and the peak memory of both processes.

    python benchmarks/startup.py [--model smollm2-135m] [--rounds 9] [-- flags of caudal serve]

Ready means that a line says so and a request is answered at once: the engine has run a real step.
The first round fills the packed cache and is reported apart. Memory is measured last, on a server
whose small KV cache is filled by requests: peak RSS of both processes against the plan, and what
they hold in the end with the pages counted once that both use.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

KV_MIB = 128
"""Size of the KV cache in the memory measurement, small enough to be filled in seconds."""
STORE_S = 3.0
"""After the first start: time for the packed cache to be written."""
_MIB = 1 << 20
_SERVE = [sys.executable, "-c", "from caudal.cli.main import main; main()", "serve"]


@dataclass(frozen=True, slots=True)
class Started:
    """A server that has just become ready."""

    pids: tuple[int, ...]
    """Of the server and its engine."""
    url: str
    ready_s: float
    cpu_s: float
    """Of both processes until then; less noisy than time on a shared machine."""
    log: Path

    def peak_rss(self) -> list[int]:
        """Bytes of each process, shared pages counted in both."""
        return [read_status(pid, "VmHWM") for pid in self.pids]

    def planned(self, purpose: str) -> int:
        """Bytes that the engine planned for `purpose`, as it said."""
        found = re.search(rf"memory: .*{purpose} ([\d,]+) MiB", self.log.read_text())
        assert found is not None, "the engine has not said what it planned"
        return int(found[1].replace(",", "")) * _MIB


def read_status(pid: int, field: str, file: str = "status") -> int:
    """Bytes of `field` in /proc/<pid>/<file>."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/{file}").read_text())
    assert found is not None
    return int(found[1]) * 1024


def read_cpu_s(pid: int) -> float:
    """Processor time of a process, all threads, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def started(model: str, flags: list[str]) -> Iterator[Started]:
    """Start `caudal serve` on a free port and end it afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        begin = time.perf_counter()
        with log.open("wb") as errors:
            server = subprocess.Popen(
                [*_SERVE, model, "--port", "0", *flags], stdout=subprocess.PIPE, stderr=errors
            )
        try:
            assert server.stdout is not None
            line = server.stdout.readline().decode()
            ready_s = time.perf_counter() - begin
            found = re.search(r"http://\S+:\d+", line)
            if found is None:
                sys.exit(f"the server did not become ready: {log.read_text()}")
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            pids = (server.pid, *map(int, children))
            yield Started(pids, found[0], ready_s, sum(map(read_cpu_s, pids)), log)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)
            assert server.stdout is not None
            server.stdout.close()


def fill_kv_cache(url: str, num_tokens: int) -> None:
    """Answer prompts with at least `num_tokens` tokens in all, different ones, eight at a time."""

    def ask(index: int) -> None:
        words = " ".join(f"{index} {word}" for word in range(120))
        body = json.dumps({"prompt": words, "max_tokens": 4}).encode()
        request = urllib.request.Request(
            f"{url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            response.read()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(-(-num_tokens // 480))))  # a word and its space: two tokens


def measure_memory(model: str, flags: list[str], kv_mib: int = KV_MIB) -> dict[str, float]:
    """MiB: peak of each process, the plan, and what is above weights and KV cache.

    "once" is the last without counting shared pages twice, at the end.
    """
    with started(model, [*flags, "--kv-cache-memory", f"{kv_mib}MiB"]) as server:
        held = re.search(r"KV cache holds ([\d,]+) tokens", server.log.read_text())
        assert held is not None
        fill_kv_cache(server.url, int(held[1].replace(",", "")))
        peaks = server.peak_rss()
        once = sum(read_status(pid, "Pss", "smaps_rollup") for pid in server.pids)
        weights, kv_cache = server.planned("weights"), server.planned("kv_cache")
    above = sum(peaks) - weights - kv_cache
    numbers = {
        "server": peaks[0],
        "engine": peaks[1],
        "weights": weights,
        "kv": kv_cache,
        "above": above,
        "once": once - weights - kv_cache,
    }
    return {name: size / _MIB for name, size in numbers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("flags", nargs="*", help="flags of caudal serve, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        flags = [*arguments.flags, "--packed-cache-dir", cache]
        with started(arguments.model, flags) as first:
            print(f"first start: {first.ready_s:.2f} s, CPU {first.cpu_s:.2f} s")
            print(f"  peak RSS {' + '.join(f'{p / _MIB:.0f}' for p in first.peak_rss())} MiB")
            time.sleep(STORE_S)
        rounds = []
        for _ in range(arguments.rounds):
            with started(arguments.model, flags) as server:
                rounds.append(server)
        for name, values in (
            ("command to ready", [r.ready_s for r in rounds]),
            ("CPU of both processes", [r.cpu_s for r in rounds]),
        ):
            median, least = statistics.median(values), min(values)
            print(f"{name}: median {median:.2f} s, best {least:.2f} s of {len(values)}")
        memory = measure_memory(arguments.model, flags)
    print(", ".join(f"{name} {size:.0f} MiB" for name, size in memory.items()))


if __name__ == "__main__":
    main()
