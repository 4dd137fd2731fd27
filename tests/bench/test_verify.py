"""A remedy is tried on real servers: equal but for its flag, under the recorded load."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import msgspec
import pytest

from caudal.bench.own_server import own_server
from caudal.bench.verify import verify
from caudal.cli.flags import parse_plain
from caudal.cli.main import main
from caudal.cli.serve import MODEL, SERVE_FLAGS
from caudal.diagnosis.report import Diagnosis, Finding, Prediction, Remedy
from tests.bench.harness import Silent
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("verify") / "tiny.gguf", context_length=512)


def ask(url: str, prompt: str) -> None:
    body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.status == 200


def test_a_recorded_load_is_replayed_on_servers_that_the_diagnosis_describes(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stable = "the river runs through the old town " * 6
    with own_server(str(model), ("--threads", "1", "--kv-cache-memory", "4MiB")) as url:
        for number in range(14):
            ask(url, f"{number}: {stable}")
        for words in (("--json",), ("--prefixes", "--json")):
            with pytest.raises(SystemExit) as ended:
                main(["doctor", "--url", url, *words])
            assert ended.value.code == 0
        printed = capsys.readouterr().out
        with urllib.request.urlopen(f"{url}/caudal/trace", timeout=10) as response:
            trace = response.read()
    decoder = json.JSONDecoder()
    shown, end = decoder.raw_decode(printed)
    prefixes, _ = decoder.raw_decode(printed[end:].lstrip())
    assert prefixes["num_requests"] == shown["num_requests"] == 14
    assert prefixes["lost_tokens"] > 0
    diagnosis = msgspec.convert(shown, Diagnosis)
    parsed = parse_plain(diagnosis.serve_flags, MODEL, SERVE_FLAGS)
    assert parsed is not None, diagnosis.serve_flags

    predicted = Prediction("tpot_p50_ms", 2.0, 1.0, 50.0)
    remedy = Remedy("cap_concurrency", "--max-num-seqs 1", "waiting", predicted, "")
    finding = Finding("slow_streams", "", "warning", [], [remedy])
    found = verify(str(model), diagnosis, trace, (finding, remedy), Silent())
    assert found.measured.metric == "tpot_p50_ms"
    assert found.measured.before > 0 and found.measured.after > 0
    assert found.num_failed == (0, 0)
