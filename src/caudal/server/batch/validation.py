"""Checks an input file as a whole, naming the line of every fault.

Only what makes a line unusable as a request is checked: its JSON, `custom_id`, method, path, model,
and `stream`. All other fields of a body are checked when it runs, by the endpoint itself, and a
fault there fails that request alone.
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from caudal.server.batch.allowance import Allowance
from caudal.server.batch.input_lines import InputLine, iter_lines
from caudal.server.batch.limits import MAX_CUSTOM_ID_CHARS, MAX_LINE_BYTES
from caudal.server.protocol.batches import BatchError

LINES_PER_BREATH = 32
"""Lines between two calls of `breathe`: about a millisecond of work."""
COUNTED_PER_BREATH = 8
"""The same where prompts are rendered and tokenized: a few milliseconds."""
LONG_LINE_BYTES = 64 * 1024
"""A line that is as much work as many."""

_NUM_PARTS = 16
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXT = msgspec.json.Decoder(str)


@dataclass(frozen=True, slots=True)
class InputRules:
    """What the lines of a file must agree with."""

    endpoints: Collection[str]
    """Paths that a line may name; all lines name the same one."""
    model: str
    """The only model; a body may leave it out."""
    max_requests: int
    max_errors: int
    allowance: Allowance | None = None
    """What the key may still enqueue; None: no limit."""


@dataclass(slots=True)
class InputReport:
    """What a file holds."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    """Only counted if they are limited."""
    endpoint: str | None = None
    """The path of the first valid line."""
    num_errors: int = 0
    errors: list[BatchError] = field(default_factory=list)
    """The first ones, by line."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A valid line."""

    custom_id: str
    url: str
    body: bytes


class LineFault(Exception):
    """A line that cannot be a request."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def validate_input(
    path: Path, rules: InputRules, breathe: Callable[[], None] = lambda: None
) -> InputReport:
    """Read the whole file once (twice if custom ids repeat); memory grows by 8 bytes a line.

    `breathe` is called every few lines, to give way to other threads or to stop by raising.
    """
    checker = _Checker(rules)
    is_counted = rules.allowance is not None and rules.allowance.counts_tokens
    per_breath = COUNTED_PER_BREATH if is_counted else LINES_PER_BREATH
    with path.open("rb") as file:
        for line, _ in iter_lines(file):
            if line.ordinal % per_breath == 0 or len(line.data or b"") > LONG_LINE_BYTES:
                breathe()
            checker.check(line)
            if checker.report.num_requests > rules.max_requests:
                checker.add(None, _too_many(rules.max_requests))
                return checker.report
            if checker.is_beyond_allowance():
                return checker.report
    report = checker.report
    if report.num_requests == 0:
        checker.add(None, LineFault("empty_file", "The input file has no requests."))
    repeated = checker.repeated_hashes()
    if repeated:
        _find_duplicates(path, repeated, checker, breathe)
    report.errors.sort(key=lambda error: error.line or 0)
    return report


def parse_line(line: InputLine) -> BatchRequest:
    """The request of a line. Raises LineFault for what makes it unusable whatever the model."""
    if line.data is None:
        raise LineFault("line_too_long", f"The line is longer than {MAX_LINE_BYTES} bytes.")
    fields = _object(line.data, "The line", "invalid_json_line", None)
    custom_id = _text(fields, "custom_id")
    if not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise LineFault(
            "invalid_custom_id",
            f"custom_id: must have 1 to {MAX_CUSTOM_ID_CHARS} characters, has {len(custom_id)}.",
            "custom_id",
        )
    method = _text(fields, "method")
    if method != "POST":
        raise LineFault("invalid_method", f"method: must be 'POST', got {method[:64]!r}.", "method")
    url = _text(fields, "url")
    if "body" not in fields:
        raise LineFault("missing_required_parameter", "body: this field is required.", "body")
    return BatchRequest(custom_id, url, bytes(fields["body"]))


def _object(data: bytes, what: str, code: str, param: str | None) -> dict[str, msgspec.Raw]:
    try:
        str(data, "utf-8")
        return _FIELDS.decode(data)
    except UnicodeDecodeError:
        raise LineFault(code, f"{what} is not valid UTF-8.", param) from None
    except RecursionError:
        raise LineFault(code, f"{what} is nested too deeply.", param) from None
    except msgspec.ValidationError:
        raise LineFault(code, f"{what} is not a JSON object.", param) from None
    except msgspec.DecodeError as error:
        raise LineFault(code, f"{what} is not valid JSON: {error}.", param) from None


def _text(fields: dict[str, msgspec.Raw], name: str) -> str:
    if name not in fields:
        raise LineFault("missing_required_parameter", f"{name}: this field is required.", name)
    try:
        return _TEXT.decode(fields[name])
    except msgspec.DecodeError:
        raise LineFault("invalid_type", f"{name}: must be a string.", name) from None


class _Checker:
    """Collects faults and what later lines are compared with."""

    def __init__(self, rules: InputRules) -> None:
        self._rules = rules
        self._hashes = array.array("q")
        self.report = InputReport()

    def check(self, line: InputLine) -> None:
        """Count a line and note its first fault."""
        self.report.num_requests += 1
        try:
            request = parse_line(line)
            self._hashes.append(hash(request.custom_id))
            self._check_url(request.url)
            self._check_body(request.body)
            allowance = self._rules.allowance
            if allowance is not None and allowance.counts_tokens:
                self.report.num_prompt_tokens += allowance.count_tokens(request.body)
        except LineFault as fault:
            self.add(line.number, fault)

    def is_beyond_allowance(self) -> bool:
        """Whether the key may not enqueue what was read so far; notes it."""
        allowance, report = self._rules.allowance, self.report
        if allowance is None:
            return False
        excess = allowance.excess(report.num_requests, report.num_prompt_tokens)
        if excess is not None:
            self.add(None, LineFault(excess.code, excess.message))
        return excess is not None

    def add(self, number: int | None, fault: LineFault) -> None:
        """Note a fault of a line, or of the file."""
        self.report.num_errors += 1
        if len(self.report.errors) < self._rules.max_errors:
            error = BatchError(fault.code, fault.message, fault.param, number)
            self.report.errors.append(error)

    def repeated_hashes(self) -> set[int]:
        """Hashes of custom ids that came more than once (or, hardly ever, collide)."""
        repeated: set[int] = set()
        for part in range(_NUM_PARTS):  # sorting all at once would make an object of each
            ordered = sorted(h for h in self._hashes if h % _NUM_PARTS == part)
            repeated.update(a for a, b in itertools.pairwise(ordered) if a == b)
        return repeated

    def _check_url(self, url: str) -> None:
        report, allowed = self.report, self._rules.endpoints
        if url not in allowed:
            raise LineFault(
                "invalid_url", f"url: must be {' or '.join(allowed)}, got {url[:128]!r}.", "url"
            )
        report.endpoint = report.endpoint or url
        if url != report.endpoint:
            raise LineFault(
                "mismatched_url",
                f"url: all lines must have the same one; the first has {report.endpoint}.",
                "url",
            )

    def _check_body(self, data: bytes) -> None:
        body = _object(data, "body", "invalid_body", "body")
        if "stream" in body and _value(body["stream"]) not in (None, False):
            raise LineFault(
                "invalid_value", "body.stream: must be false: a batch cannot stream.", "body.stream"
            )
        model = _value(body["model"]) if "model" in body else None
        if model not in (None, "", self._rules.model):
            raise LineFault(
                "model_not_found",
                f"body.model: {str(model)[:256]!r} does not exist; this server has "
                f"{self._rules.model!r}.",
                "body.model",
            )


def _value(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw)


def _too_many(limit: int) -> LineFault:
    return LineFault("too_many_requests", f"The input file has more than {limit} requests.")


def _find_duplicates(
    path: Path, hashes: set[int], checker: _Checker, breathe: Callable[[], None]
) -> None:
    """Name each line whose custom id an earlier line has."""
    first: dict[str, int] = {}
    with path.open("rb") as file:
        for line, _ in iter_lines(file):
            if line.ordinal % LINES_PER_BREATH == 0:
                breathe()
            try:
                custom_id = parse_line(line).custom_id
            except LineFault:
                continue
            if hash(custom_id) not in hashes:
                continue
            earlier = first.setdefault(custom_id, line.number)
            if earlier != line.number:
                fault = LineFault(
                    "duplicate_custom_id",
                    f"custom_id: {custom_id[:128]!r} is already used in line {earlier}.",
                    "custom_id",
                )
                checker.add(line.number, fault)
