"""Measures how cost grows: with the number of answers at a time, with the context, with time.

    python benchmarks/curves.py concurrency|context|sequential [--rounds 2] [--svg FILE]
                                [--peer-python peer/bin/python] [--also NAME=URL …]

`concurrency` and `context` print a table of tokens per second for every system and can draw it.
`--also` adds a running OpenAI-compatible server (llama.cpp's, for one). `sequential` sends 500
short requests one after the other and prints how the time of a request changes from first to last.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.client import run_workload
from benchmarks.measurement import Summary
from benchmarks.serve_vs_peer import (
    caudal_server,
    describe_machine,
    has_openvino,
    measure,
    openvino_peer,
    other_servers,
    served_model,
    server_system,
)
from benchmarks.workloads import CONCURRENCIES, CONTEXT_WORDS, WORKLOADS, Prompt, Workload
from caudal.bench.charts import Axis, Panel, log_ticks, resolve_colours

NUM_SEQUENTIAL = 500
COLOURS = ("--main", "--target", "--other", "--bad")

Curves = dict[str, list[tuple[int, float]]]
"""Points (at a time or words, output tokens per second) of each system."""


def to_curves(results: dict[str, dict[str, Summary]]) -> Curves:
    """The points of every system; workloads are named kind-N."""
    curves: Curves = {}
    for workload, of_system in results.items():
        at = int(workload.rsplit("-", 1)[1])
        for system, summary in of_system.items():
            curves.setdefault(system, []).append((at, summary.output_tokens_per_s))
    return curves


def format_curves(curves: Curves, head: str) -> str:
    """A Markdown table with one line for every point."""
    systems = list(curves)
    lines = [f"| {head} | {' | '.join(systems)} |", "|" + "---|" * (len(systems) + 1)]
    for number, (at, _) in enumerate(curves[systems[0]]):
        cells = [f"{curves[system][number][1]:.0f}" for system in systems]
        lines.append(f"| {at} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(curves: Curves, x_label: str) -> str:
    """The curves as SVG, x logarithmic."""
    panel = Panel("output tokens per second", x_label, 640, 320)
    places = [at for points in curves.values() for at, _ in points]
    x = Axis(log_ticks(min(places), max(places)), *panel.x_range, is_log=True)
    y = Axis.linear(1.05 * max(v for of in curves.values() for _, v in of), *panel.y_range)
    panel.frame(x, y)
    colours = dict(zip(curves, COLOURS, strict=False))
    panel.legend(list(colours.items()))
    for system, colour in colours.items():
        pixels = [(x.at(at), y.at(value)) for at, value in curves[system]]
        panel.path(pixels, colour)
        for (at_x, at_y), (at, value) in zip(pixels, curves[system], strict=True):
            panel.dot(at_x, at_y, colour, f"{system}, {at}: {value:.0f} tok/s", 3)
    svg = panel.svg('xmlns="http://www.w3.org/2000/svg"')
    body = svg[svg.index(">") + 1 :]
    background = '<rect width="100%" height="100%" fill="var(--page)"/>'
    return resolve_colours(svg[: svg.index(">") + 1] + background + body)


def slope_percent(seconds: list[float]) -> float:
    """Median of the last fifth against that of the first fifth after a warm-up, in percent."""
    fifth = len(seconds) // 5
    first, last = seconds[fifth : 2 * fifth], seconds[-fifth:]
    return 100 * (statistics.median(last) / statistics.median(first) - 1)


def run_sequential(url: str) -> None:
    """500 requests alone; prints medians of every hundred and the change."""
    one = Workload("sequential", 1, 1, lambda source, _: Prompt(f"item {source.random()}", 16))
    name = served_model(url)
    seconds = []
    for number in range(NUM_SEQUENTIAL):
        run = run_workload(url, name, one, number)
        if run.num_failed:
            sys.exit(f"request {number} failed: {run.first_error}")
        seconds.append(run.wall_s)
        if (number + 1) % 100 == 0:
            print(f"{number + 1}: median {1e3 * statistics.median(seconds[-100:]):.1f} ms")
    print(f"last fifth against second fifth: {slope_percent(seconds):+.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("curve", choices=("concurrency", "context", "sequential"))
    parser.add_argument("--model", default="smollm2-135m", help="known name or GGUF path")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--also", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--svg", type=Path, help="draw the curves into this file")
    parser.add_argument("serve_flags", nargs="*", help="after --: flags for caudal serve")
    options = parser.parse_args()
    print(describe_machine())
    with ExitStack() as stack:
        url = stack.enter_context(caudal_server(options.model, options.serve_flags))
        if options.curve == "sequential":
            return run_sequential(url)
        systems = {"caudal": server_system(url)}
        if has_openvino(options.peer_python):
            from caudal.weights.download import resolve_model

            peer = openvino_peer(options.peer_python, resolve_model(options.model))
            systems["openvino-genai"] = stack.enter_context(peer)
        systems |= other_servers(options.also)
        is_context = options.curve == "context"
        names = (
            [f"context-{n}" for n in CONTEXT_WORDS]
            if is_context
            else [f"at-{n}" for n in CONCURRENCIES]
        )
        curves = to_curves(measure(systems, [WORKLOADS[name] for name in names], options.rounds))
    head = "words of context" if is_context else "at a time"
    print("\n" + format_curves(curves, head))
    if options.svg:
        options.svg.write_text(draw(curves, head))


if __name__ == "__main__":
    main()
