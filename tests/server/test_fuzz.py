"""Short runs of the two fuzzers in `benchmarks/`, against whole servers with a random model."""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.fuzz_requests import RequestSource
from benchmarks.fuzz_schema import FLAGS, SchemaFuzzer
from benchmarks.fuzz_server import Leftovers, compare, fuzz
from benchmarks.serve_vs_peer import caudal_server


def test_no_request_of_the_schema_or_near_it_is_a_server_s_fault(
    tiny_model: Path, tmp_path: Path
) -> None:
    flags = [*FLAGS, "--data-dir", str(tmp_path), "--log-level", "error"]
    with caudal_server(str(tiny_model), flags) as url:
        fuzzer = SchemaFuzzer(url, num_examples=2, random_seed=0)
        assert len(fuzzer.operations) > 35
        for label in fuzzer.operations:
            fuzzer.check(label)
        assert {200, 400, 404} <= set(fuzzer.statuses)
        fuzzer.close()


def test_random_clients_leave_nothing_behind(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = argparse.Namespace(
        model=str(tiny_model), seconds=4.0, seed=1, margin_mib=256.0, flags=[]
    )
    code = asyncio.run(fuzz(options))
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "0 faults in" in printed


def test_source_repeats_by_seed_and_reaches_every_family() -> None:
    calls = [[RequestSource(random.Random(5), 300).call() for _ in range(1)] for _ in range(2)]
    assert calls[0] == calls[1]
    source = RequestSource(random.Random(6), 300)
    paths = Counter(source.call().path for _ in range(500))
    assert {"/v1/completions", "/v1/messages", "/v1/responses", "/api/chat"} <= set(paths)


def test_leftovers_of_every_kind_are_faults() -> None:
    clean = Leftovers({"kv_blocks_held": 0.0}, 100.0, 40, "x", 0.0)
    assert compare(clean, clean, 10.0) == []
    bad = Leftovers({"kv_blocks_held": 2.0}, 120.0, 80, "y", 1.0)
    assert len(compare(clean, bad, 10.0)) == 5
    assert len(compare(clean, bad, 30.0)) == 4
