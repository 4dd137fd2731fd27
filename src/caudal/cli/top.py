"""`caudal top`: a server's live numbers in the terminal."""

from __future__ import annotations

import http.client
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgspec

from caudal.cli.flags import Flag, Positional, create_command
from caudal.cli.remote import Target, error_message
from caudal.cli.units import nonempty, number
from caudal.errors import CaudalError
from caudal.server.protocol.observation import LiveSnapshot

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class TopOptions:
    """How the numbers are fetched and shown."""

    api_key: str | None = None
    """Key of the server."""
    interval: float = 1.0
    """Seconds between two looks."""
    once: bool = False
    """Print one frame and leave."""


TOP_FLAGS = (
    Flag("--api-key", TopOptions, "api_key", nonempty, "KEY"),
    Flag("--interval", TopOptions, "interval", number(0.1, 3600), "S"),
    Flag("--once", TopOptions, "once", None),
)

URL = Positional("url", DEFAULT_URL, f"The server. [default: {DEFAULT_URL}]", metavar="URL")


class RefusedError(CaudalError):
    """The server answered, but not with its numbers: trying again would not help."""


class LiveSource:
    """Fetches snapshots; a connection each, so that a restarted server is found again."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.target = Target.parse(url, "URL")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def fetch(self) -> LiveSnapshot:
        """The server now. Raises CaudalError if it cannot be reached, RefusedError."""
        connection = self.target.connect(TIMEOUT_S)
        try:
            connection.request("GET", f"{self.target.root}/caudal/live", headers=self._headers)
            with connection.getresponse() as response:
                self._check(response)
                return msgspec.json.decode(response.read(), type=LiveSnapshot)
        except (OSError, http.client.HTTPException) as error:
            raise CaudalError(f"cannot reach {self.target}: {error}") from None
        except msgspec.DecodeError as error:
            raise RefusedError(f"{self.target} is another version of Caudal: {error}") from None
        finally:
            connection.close()

    def _check(self, response: http.client.HTTPResponse) -> None:
        if response.status == 404:
            raise RefusedError(f"{self.target} is no Caudal server (it has no /caudal/live)")
        if response.status == 401:
            raise RefusedError(f"{self.target}: {error_message(response)} (--api-key)")
        if response.status != 200:
            raise CaudalError(f"{self.target}: {error_message(response)}")


class Keys:
    """Reads single keys while entered, if standard input is a terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdin.isatty()
        self._saved: list[Any] = []

    def __enter__(self) -> Keys:
        if self._is_terminal:
            import termios
            import tty

            self._saved = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_terminal:
            import termios

            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._saved)

    def wait(self, seconds: float) -> str:
        """The next key, empty if none comes in time."""
        if not self._is_terminal:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([sys.stdin], [], [], max(0.0, seconds))
        return sys.stdin.read(1) if ready else ""


def top(url: str, values: dict[type, dict[str, Any]]) -> None:
    """Watch a server's live numbers in the terminal."""
    from rich.console import Console

    from caudal.cli.top_view import Recent, TopView

    options = TopOptions(**values[TopOptions])
    source = LiveSource(url, options.api_key)
    recent = Recent()
    recent.add(source.fetch())
    console = Console()
    view = TopView(recent, str(source.target), "" if options.once else "q quits")
    if options.once:
        console.print(view)
        return
    _watch(source, view, options.interval, console)


def _watch(source: LiveSource, view: Any, interval_s: float, console: Any) -> None:
    from rich.live import Live

    with Keys() as keys, Live(view, console=console, screen=True, auto_refresh=False) as live:
        next_look = time.monotonic()
        while True:
            live.refresh()
            next_look = max(next_look + interval_s, time.monotonic())
            while (rest := next_look - time.monotonic()) > 0:
                if keys.wait(rest) in ("q", "Q"):
                    return
            try:
                view.recent.add(source.fetch())
                view.trouble = ""
            except RefusedError:
                raise
            except CaudalError as error:
                view.trouble = str(error)


def create(is_help: bool) -> Callable[..., None]:
    """The command for typer."""
    return create_command(top, URL, TOP_FLAGS, is_help=is_help)
