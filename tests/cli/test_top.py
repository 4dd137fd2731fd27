"""`caudal top` against a small server: its numbers, its keys and every way it may be refused."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from rich.console import Console

from caudal.cli.main import main
from caudal.cli.top_view import Recent, TopView, sparkline
from tests.cli.small_server import SmallHandler, SmallServer, running
from tests.dashboard.snapshots import make_request, make_snapshot


class FakeServer(SmallServer):
    status = 200
    num_requests = 0

    def __init__(self) -> None:
        super().__init__(Handler)
        self.body = msgspec.json.encode(make_snapshot())


class Handler(SmallHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.server.num_requests += 1
        is_known = self.path == "/caudal/live"
        status = self.server.status if is_known else 404
        if status == 200 and self.headers["Authorization"] != "Bearer right":
            status = 401
        wrong = b'{"error": {"message": "Wrong API key."}}'
        self.answer(status, self.server.body if status == 200 else wrong)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(FakeServer()) as server:
        yield server


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["top", *arguments])
    captured = capsys.readouterr()
    return exit_.value.code, captured.out, captured.err


def draw(snapshots: list[Any], width: int = 130) -> str:
    recent = Recent()
    for snapshot in snapshots:
        recent.add(snapshot)
    console = Console(file=io.StringIO(), width=width)
    console.print(TopView(recent, "http://here"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_one_frame_shows_the_numbers_of_the_server(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "130")
    code, out, _ = run(capsys, f"{server.url}/v1/", "--api-key", "right", "--once")
    assert code == 0
    assert server.num_requests == 1
    for expected in (
        *("tiny", "ready", "up 1 h 2 min", "2 running, 1 waiting", "1,234.5 tok/s"),
        *("p95 640 ms  p99 2.50 s  target 500 ms missed", "target 50 ms met", "25.0 % used"),
        *("80.0 % of prompt tokens", "3 rejected (queue_ttft 3), 2 preempted", "forward 95.0 %"),
        *("weights 92 MiB, kv cache 2.0 GiB", "cmpl-waits", "decode batch", "31/200"),
    ):
        assert expected in out, expected
    assert "q quits" not in out


@pytest.mark.parametrize(
    ("status", "key", "told"),
    [
        (200, "wrong", "Wrong API key. (--api-key)"),
        (404, "right", "is no Caudal server"),
        (500, "right", "Wrong API key."),
    ],
)
def test_refusals_are_one_line(
    server: FakeServer, capsys: pytest.CaptureFixture[str], status: int, key: str, told: str
) -> None:
    server.status = status
    code, out, err = run(capsys, server.url, "--api-key", key, "--once")
    assert (code, out) == (1, "")
    assert told in err
    assert err.count("\n") == 1


def test_answers_that_are_no_snapshot_are_one_line(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for body in (b"<html>", b"{}", b'{"status": 3}'):
        server.body = body
        code, _, err = run(capsys, server.url, "--api-key", "right", "--once")
        assert code == 1
        assert "is another version of Caudal" in err


def test_no_server_and_no_url_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "127.0.0.1:1", "--once")
    assert code == 1
    assert "cannot reach http://127.0.0.1:1" in err
    code, _, err = run(capsys, "ftp://here", "--once")
    assert code == 2
    assert "URL: must look like" in err


def test_a_server_that_still_loads_is_drawn() -> None:
    queue = {**msgspec.to_builtins(make_snapshot().queue), "running": 0, "depth": 0}
    none = {"count": 0, "p50": None, "p95": None, "p99": None}
    minute = {
        **msgspec.to_builtins(make_snapshot().minute),
        "ttft_ms": none,
        "tpot_ms": none,
        "step_ms": None,
        "cache_hit_rate": None,
        "step_parts_ms": {},
    }
    blocks = dict.fromkeys(("total", "used", "cached", "free", "wasted_ratio"), 0)
    empty = make_snapshot(
        status="loading",
        model=None,
        engine=None,
        queue=queue,
        minute=minute,
        blocks=blocks,
        requests=[],
        num_requests=0,
    )
    text = draw([empty])
    assert "loading" in text
    assert "nothing runs" in text
    assert "no plan is known yet" in text


def test_markup_in_names_is_plain_text() -> None:
    request = make_request(id="[red]x[/red]")
    assert "[red]x[/red]" in draw([make_snapshot(requests=[request], num_requests=1)])


def test_requests_beyond_the_frame_are_counted() -> None:
    requests = [make_request(id=f"cmpl-{i}") for i in range(50)]
    text = draw([make_snapshot(requests=requests, num_requests=300)])
    assert "and 280 more" in text


def test_narrow_terminals_lose_no_number() -> None:
    lines = draw([make_snapshot()] * 3, width=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert "missed" in " ".join(lines)


def test_sparklines_begin_at_zero_and_leave_gaps() -> None:
    assert sparkline([0.0, 5.0, None, 10.0]) == "▁▅ █"
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([None]) == " "


@contextlib.contextmanager
def in_terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command with a terminal of its own."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "caudal", "top", *arguments],
        stdin=child,
        stdout=child,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "130", "LINES": "40"},
        start_new_session=True,
    )
    before = termios.tcgetattr(child)
    drain = threading.Thread(target=_drain, args=(parent,), daemon=True)
    drain.start()
    try:
        yield process, parent
        process.wait(20)
        assert termios.tcgetattr(child)[3] == before[3], "echo and lines are as before"
    finally:
        process.kill()
        process.communicate()
        os.close(child)
        drain.join(5)
        os.close(parent)


def _drain(terminal: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(terminal, 65536):
            pass


def wait_for_looks(server: FakeServer, count: int) -> None:
    end = time.monotonic() + 20
    while server.num_requests < count:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_q_quits_and_gives_the_terminal_back(server: FakeServer) -> None:
    arguments = (server.url, "--api-key", "right", "--interval", "0.1")
    with in_terminal(*arguments) as (process, terminal):
        wait_for_looks(server, 4)
        os.write(terminal, b"q")
    assert process.returncode == 0


def test_interrupt_and_an_unreachable_server_leave_the_terminal_usable(server: FakeServer) -> None:
    arguments = (server.url, "--api-key", "right", "--interval", "0.1")
    with in_terminal(*arguments) as (process, _):
        wait_for_looks(server, 3)
        server.status = 503
        wait_for_looks(server, 6)
        assert process.poll() is None, "it waits for the server"
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
