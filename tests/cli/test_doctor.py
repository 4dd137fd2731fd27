"""`caudal doctor` against a server that says what the test wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from caudal.bench import verify as verify_module
from caudal.bench.verify import choose_remedy
from caudal.cli.main import main
from caudal.diagnosis.report import (
    Diagnosis,
    Evidence,
    Finding,
    PastSummary,
    Prediction,
    Remedy,
    WorstHour,
)
from caudal.errors import CaudalError
from tests.cli.small_server import SmallHandler, SmallServer, running

PREDICTED = Prediction("ttft_p95_ms", 4000.0, 1000.0, 75.0)
FINDING = Finding(
    "capacity",
    "More work comes than this machine can do",
    "critical",
    [Evidence("load", 1.7, 1.0, "The requests ask for 170% of [what] there is.")],
    [
        Remedy("limit_context", "--max-model-len 512", "cut", None, "Nobody knows."),
        Remedy("cap_queue", "--max-queue-ttft 1", "refusals", PREDICTED, "Refuse."),
        Remedy("more_servers", "", "hardware", PREDICTED, "Two of them."),
    ],
)
DIAGNOSIS = Diagnosis([FINDING], 300, 30.0, 4.0, 1.0, ["--max-num-seqs", "8"])
PASTS = {
    "24h": Diagnosis(
        [FINDING],
        812,
        86_400.0,
        61.0,
        past=PastSummary(
            seconds=86_400,
            observed_s=72_000.0,
            num_busy_minutes=300,
            worst_hour=WorstHour(
                start=1_700_000_000 // 3600 * 3600,
                num_requests=400,
                num_refused=34,
                ttft_p95_ms=12_400.0,
                queue_depth=17.3,
                kv_used=0.4,
                load=1.3,
            ),
            note="No gains can be predicted from them.",
        ),
    ),
    "7d": Diagnosis(
        [],
        3,
        604_800.0,
        past=PastSummary(
            seconds=604_800,
            observed_s=600.0,
            num_busy_minutes=2,
            worst_hour=None,
            note="The history has 2 minutes with requests; a pattern needs 12.",
        ),
    ),
}
PREFIXES = {
    "is_enabled": True,
    "num_requests": 2,
    "prompt_tokens": 1300,
    "cached_tokens": 0,
    "lost_tokens": 640,
    "lost_ms": 64.0,
    "patterns": [
        {
            "token": 12,
            "block": 0,
            "reason": "changed",
            "num_requests": 1,
            "lost_tokens": 640,
            "share_lost": 0.84,
            "lost_ms": 64.0,
            "changed": "12:04\x1b[31m",
            "neighbour_changed": "12:03",
            "stable": "You are",
            "advice": "A change at token 12 («12:04») costs you 84% of the hits: move it behind.",
        }
    ],
    "requests": [
        {
            "age_s": 3.0,
            "prompt_tokens": 650,
            "cached_tokens": 0,
            "token": 12,
            "block": 0,
            "reason": "changed",
            "lost_tokens": 640,
            "lost_ms": 64.0,
            "before": "It is ",
            "text": "12:04 [bold]now[/]",
            "neighbour_text": "12:03 now",
        }
    ],
}


class Handler(SmallHandler):
    """Answers the doctor's paths; anything else is a 404 in the server's shape."""

    def do_GET(self) -> None:
        pages = {
            "/caudal/doctor": msgspec.json.encode(DIAGNOSIS),
            "/caudal/prefixes": json.dumps(PREFIXES).encode(),
            "/caudal/trace": b'{"timestamp":0}\n{"timestamp":1}\n',
            "/v1/models": b'{"data":[{"id":"tiny"}]}',
        }
        path, _, query = self.path.partition("?")
        body = pages.get(path)
        if query.startswith("last="):
            body = msgspec.json.encode(PASTS[query.removeprefix("last=")])
        if self.headers.get("Authorization") == "Bearer wrong":
            body = None
        wrong = b'{"error":{"message":"Wrong API key."}}'
        self.answer(401 if body is None else 200, wrong if body is None else body)


@pytest.fixture
def url() -> Iterator[str]:
    with running(SmallServer(Handler)) as server:
        yield server.url


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *words])
    return int(ended.value.code or 0)


def test_findings_are_shown_with_evidence_and_gains(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run("--url", url) == 0
    out = capsys.readouterr().out
    assert "critical" in out and "More work comes" in out and "[what]" in out
    assert "TTFT p95 4,000 → 1,000 ms" in out and "75 %" in out
    assert out.index("limit_context") < out.index("cap_queue") < out.index("more_servers")


def test_the_history_shows_its_worst_hour_and_what_it_cannot_tell(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run("--url", url, "--last", "24h") == 0
    out = capsys.readouterr().out
    assert (
        "812 requests in 20.0 h of the history; a simulation of the worst hour is 61 % off" in out
    )
    assert "TTFT p95 12,400 ms" in out and "34 refused" in out and "load 130%" in out
    assert "No gains can be predicted" in out and "More work comes" in out


def test_a_history_that_is_too_short_is_not_called_healthy(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--url", url, "--last", "7d") == 0
    out = capsys.readouterr().out
    assert "a pattern needs" in out and "Nothing limits" not in out


def test_json_is_what_the_server_says(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--url", url, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == msgspec.to_builtins(DIAGNOSIS)
    assert shown["findings"][0]["remedies"][1]["predicted"]["from"] == 4000.0


def test_prefixes_show_place_reason_and_advice_without_control_characters(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    assert run("--url", url, "--prefixes") == 0
    out = capsys.readouterr().out
    assert "costs you 84% of the hits" in out and "«12:03»" in out
    assert "[bold]now[/]" in out and "\x1b[31m" not in out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--api-key", "wrong"), 1, "Wrong API key"),
        (("--prefixes", "--verify"), 2, "only one of them"),
        (("--remedy", "cap_queue"), 2, "need --verify"),
        (("--seconds", "0"), 2, "--seconds"),
        (("--last", "1w"), 2, "--last: must be a time between 10m and 30d"),
        (("--last", "24h", "--verify"), 2, "goes with none of"),
        (("--last", "24h", "--seconds", "60"), 2, "goes with none of"),
        (("--limit", "257"), 2, "--limit"),
        (("--verify", "--remedy", "unheard_of"), 1, "no remedy 'unheard_of'"),
        (("--verify", "--remedy", "more_servers"), 1, "no remedy 'more_servers'"),
    ],
)
def test_what_cannot_be_done_is_said(
    url: str, words: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--url", url, *words) == code
    assert message in capsys.readouterr().err


def test_an_unreachable_server_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--url", "http://127.0.0.1:1") == 1
    assert "cannot reach http://127.0.0.1:1" in capsys.readouterr().err


def test_verify_starts_equal_servers_but_for_the_flag(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def measure(model: str, flags: list[str], *_: object) -> Any:
        started.append([model, *flags])
        slow = len(started) == 1

        class Summary:
            class ttft_ms:  # noqa: N801
                p95 = 5000.0 if slow else 1000.0

            num_failed = 0 if slow else 7
            num_given_up = 0

        return Summary

    monkeypatch.setattr(verify_module, "_measure", measure)
    assert run("--url", url, "--verify", "--json") == 0
    verified = json.loads(capsys.readouterr().out)["verified"]
    assert started == [
        ["tiny", "--max-num-seqs", "8"],
        ["tiny", "--max-num-seqs", "8", "--max-queue-ttft", "1"],
    ]
    assert verified["predicted"]["gain_percent"] == 75.0
    assert verified["measured"] == {
        "metric": "ttft_p95_ms",
        "from": 5000.0,
        "to": 1000.0,
        "gain_percent": 80.0,
    }
    assert verified["num_failed"] == [0, 7]


def test_nothing_to_try_is_an_error() -> None:
    with pytest.raises(CaudalError, match="no remedy with a flag"):
        choose_remedy(Diagnosis([], 0, 0.0))
