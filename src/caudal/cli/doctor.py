"""`caudal doctor`: what limits a server, what would help, and whether it really does."""

from __future__ import annotations

import http.client
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec

from caudal.cli.flags import Flag, create_command
from caudal.cli.remote import Target, error_message
from caudal.cli.units import count, nonempty, number
from caudal.diagnosis.past import parse_last
from caudal.diagnosis.report import Diagnosis
from caudal.errors import CaudalError, ConfigError, InvalidRequestError
from caudal.server.protocol.diagnosis import PrefixReport

T = TypeVar("T")
VERIFY_SECONDS = 60.0
"""Of the latest load that --verify replays unless told otherwise, twice."""


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """Which server is looked at, and how."""

    url: str = "http://127.0.0.1:8000"
    """Address of a Caudal server."""
    api_key: str | None = None
    """Key of the server."""
    seconds: float | None = None
    """Look only at the last so many seconds of the load; unset: all that is remembered, with
    --verify 60."""
    last: str | None = None
    """Look at the recorded history of that time instead: 10m to 30d, such as 90m, 24h or 7d."""
    prefixes: bool = False
    """Show where and why your prompts were not found in the prefix cache instead."""
    limit: int = 10
    """Requests to show with --prefixes."""
    verify: bool = False
    """Try a remedy: replay the recorded load on two servers of its own, without and with it."""
    remedy: str | None = None
    """Name of the remedy to try; unset: the flag with the greatest predicted gain."""
    model: str | None = None
    """Model of the servers that --verify starts (name, hub id or path); unset: the server's."""
    json: bool = False
    """Print JSON."""


def past(flag: str, text: str) -> str:
    """A time that the history is asked for; raises ConfigError naming the limits."""
    try:
        parse_last(text)
    except InvalidRequestError as error:
        raise ConfigError(f"{flag}: {str(error).removeprefix('last: ')}") from None
    return text


DOCTOR_FLAGS = (
    Flag("--url", DoctorOptions, "url", nonempty, "URL"),
    Flag("--api-key", DoctorOptions, "api_key", nonempty, "KEY"),
    Flag("--seconds", DoctorOptions, "seconds", number(1, 86_400), "S"),
    Flag("--last", DoctorOptions, "last", past, "TIME"),
    Flag("--prefixes", DoctorOptions, "prefixes", None),
    Flag("--limit", DoctorOptions, "limit", count(1, 256), "N"),
    Flag("--verify", DoctorOptions, "verify", None),
    Flag("--remedy", DoctorOptions, "remedy", nonempty, "NAME"),
    Flag("--model", DoctorOptions, "model", nonempty, "MODEL"),
    Flag("--json", DoctorOptions, "json", None),
)


class Server:
    """Fetches what a server says about itself."""

    def __init__(self, options: DoctorOptions) -> None:
        self._target = Target.parse(options.url)
        self._headers = {}
        if options.api_key is not None:
            self._headers["Authorization"] = f"Bearer {options.api_key}"

    def fetch(self, path: str, **query: float | int | str | None) -> bytes:
        """The body of a page; raises CaudalError with the server's own message."""
        given = {name: value for name, value in query.items() if value is not None}
        whole = f"{self._target.root}{path}{'?' if given else ''}{urlencode(given)}"
        connection = self._target.connect()
        try:
            connection.request("GET", whole, headers=self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise CaudalError(f"{self._target}: {error_message(response)}")
            return response.read()
        except (OSError, http.client.HTTPException) as error:
            raise CaudalError(f"cannot reach {self._target}: {error}") from None
        finally:
            connection.close()

    def decode(self, kind: type[T], path: str, **query: float | int | str | None) -> T:
        """The JSON of a page as `kind`."""
        try:
            return msgspec.json.decode(self.fetch(path, **query), type=kind)
        except msgspec.DecodeError as error:
            raise CaudalError(f"{self._target} is no Caudal server: {error}") from None

    def model_name(self) -> str:
        """The name under which the server serves its model."""
        answer = self.decode(dict[str, Any], "/v1/models")
        try:
            return str(answer["data"][0]["id"])
        except (LookupError, TypeError):
            raise CaudalError(f"{self._target} does not list its models") from None


def doctor(_none: None, values: dict[type, dict[str, Any]]) -> None:
    """Say what limits a server, what would help, and how much.

    Exit codes: 0 looked at, 1 the server cannot be reached or a remedy cannot be tried, 2 a flag
    is wrong.
    """
    options = DoctorOptions(**values[DoctorOptions])
    if options.prefixes and options.verify:
        raise ConfigError("--prefixes, --verify: only one of them")
    if (options.remedy or options.model) and not options.verify:
        raise ConfigError("--remedy, --model: need --verify")
    if options.last and (options.prefixes or options.verify or options.seconds):
        raise ConfigError("--last: goes with none of --seconds, --prefixes and --verify")
    server = Server(options)
    if options.prefixes:
        _show_prefixes(server, options)
        return
    seconds = options.seconds or (VERIFY_SECONDS if options.verify else None)
    diagnosis = server.decode(Diagnosis, "/caudal/doctor", seconds=seconds, last=options.last)
    if options.verify:
        _verify(server, options, diagnosis, seconds)
    elif options.json:
        _print_json(diagnosis)
    else:
        from caudal.cli.doctor_view import print_diagnosis

        print_diagnosis(diagnosis)


def _show_prefixes(server: Server, options: DoctorOptions) -> None:
    report = server.decode(PrefixReport, "/caudal/prefixes", limit=options.limit)
    if options.json:
        _print_json(report)
    else:
        from caudal.cli.doctor_view import print_prefixes

        print_prefixes(report)


def _verify(
    server: Server, options: DoctorOptions, diagnosis: Diagnosis, seconds: float | None
) -> None:
    from caudal.bench.verify import choose_remedy, verify
    from caudal.cli.bench_progress import BenchProgress
    from caudal.cli.doctor_view import print_diagnosis, print_verification

    if not options.json:
        print_diagnosis(diagnosis)
    choice = choose_remedy(diagnosis, options.remedy)
    trace = server.fetch("/caudal/trace", seconds=seconds)
    model = options.model or server.model_name()
    with BenchProgress() as progress:
        found = verify(model, diagnosis, trace, choice, progress)
    if options.json:
        verified = {
            "finding": found.finding,
            "action": found.remedy.action,
            "flag": found.remedy.flag,
            "predicted": found.predicted,
            "measured": found.measured,
            "num_failed": found.num_failed,
        }
        _print_json({**msgspec.to_builtins(diagnosis), "verified": msgspec.to_builtins(verified)})
    else:
        print_verification(found)


def _print_json(value: object) -> None:
    text = msgspec.json.format(msgspec.json.encode(value), indent=2)
    sys.stdout.write(text.decode() + "\n")


def create(is_help: bool) -> Callable[..., None]:
    """The command for typer."""
    return create_command(doctor, None, DOCTOR_FLAGS, is_help=is_help)
