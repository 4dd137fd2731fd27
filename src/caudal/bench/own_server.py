"""A server of ours on a free port, for as long as a measurement takes."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from caudal.errors import CaudalError

START_TIMEOUT_S = 300.0


@contextmanager
def own_server(model: str, flags: Sequence[str]) -> Iterator[str]:
    """The address of a server that runs as long as the context. Raises CaudalError."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "caudal", "serve", model, "--port", str(port)]
        command += ["--log-level", "warning", "--data-dir", folder, *flags]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        url = f"http://127.0.0.1:{port}"
        try:
            _wait_ready(url, process, log)
            yield url
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while get_page(f"{url}/ready") is None:
        if process.poll() is not None:
            said = log.read_text("utf-8", "replace").strip().splitlines()
            raise CaudalError(f"a server did not start: {said[-1] if said else 'no message'}")
        if time.monotonic() > deadline:
            raise CaudalError(f"a server was not ready after {START_TIMEOUT_S:g} s")
        time.sleep(0.05)


def get_page(url: str, timeout_s: float = 5.0) -> str | None:
    """The body of a page; None if it cannot be had."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return str(response.read().decode("utf-8", "replace"))
    except (urllib.error.URLError, OSError):
        return None
