"""OpenVINO GenAI's continuous batching in process: reads jobs on stdin, answers on stdout.

Run by `serve_vs_peer.py` with an interpreter that has `openvino-genai`. A job is one JSON line
{"workload": NAME, "seed": N}; the answer is one JSON line with the fields of `Run`. In process
means that the peer pays nothing for HTTP, JSON or streaming: the comparison favours it.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import openvino_genai

from benchmarks.measurement import Run
from benchmarks.workloads import WORKLOADS, Prompt

KV_CACHE_GIB = 2
MAX_BATCHED_TOKENS = 512


def create_pipeline(model: str) -> Any:
    """The pipeline with prefix caching and chunked prompts, as a server would run it."""
    config = openvino_genai.SchedulerConfig()
    config.cache_size = KV_CACHE_GIB
    config.enable_prefix_caching = True
    config.max_num_batched_tokens = MAX_BATCHED_TOKENS
    config.dynamic_split_fuse = True
    return openvino_genai.ContinuousBatchingPipeline(model, config, "CPU", {})


def run_prompts(pipeline: Any, prompts: list[Prompt], concurrency: int, first_id: int) -> Run:
    """Keep `concurrency` requests open until every prompt is answered."""
    run, waiting = Run(), list(enumerate(prompts))
    active: dict[int, list[Any]] = {}
    started = time.perf_counter()
    while waiting or active:
        while waiting and len(active) < concurrency:
            index, prompt = waiting.pop(0)
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = prompt.num_output_tokens
            config.ignore_eos = True
            config.do_sample = False
            handle = pipeline.add_request(first_id + index, prompt.text, config)
            active[index] = [handle, time.perf_counter(), False]
        pipeline.step()
        for index, entry in list(active.items()):
            _read_tokens(run, entry)
            if entry[0].get_status() != openvino_genai.GenerationStatus.RUNNING:
                del active[index]
    run.wall_s = time.perf_counter() - started
    return run


def _read_tokens(run: Run, entry: list[Any]) -> None:
    """Move new tokens of one request into the run; `entry` is [handle, last time, has tokens]."""
    handle, previous, has_tokens = entry
    while handle.can_read():
        run.num_output_tokens += sum(len(o.generated_ids) for o in handle.read().values())
        now = time.perf_counter()
        (run.gaps_s if has_tokens else run.ttft_s).append(now - previous)
        entry[1:] = previous, has_tokens = [now, True]


def main() -> None:
    # The library prints on stdout as it pleases; answers must not mix with that.
    answers = sys.stdout
    sys.stdout = sys.stderr
    pipeline = create_pipeline(sys.argv[1])
    print("ready", file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        job = json.loads(line)
        workload = WORKLOADS[job["workload"]]
        prompts = workload.create_prompts(job["seed"])
        run = run_prompts(pipeline, prompts, workload.concurrency, first_id=1000 * number)
        print(json.dumps(asdict(run)), file=answers, flush=True)


if __name__ == "__main__":
    main()
