"""Workloads from files: requests as JSON lines, and recorded traces."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from caudal.bench.words import Calibration, TextSource
from caudal.bench.workload import Conversation, Message, Turn, WorkloadOptions
from caudal.errors import ConfigError

_T = TypeVar("_T")
MAX_TOKENS = 10_000_000

_TIMESTAMP = ("timestamp", "time", "arrival", "arrived_at")
_INPUT = (
    "input",
    "input_tokens",
    "input_length",
    "contexttokens",
    "prompt_tokens",
    "request tokens",
)
_OUTPUT = (
    "output",
    "output_tokens",
    "output_length",
    "generatedtokens",
    "completion_tokens",
    "response tokens",
)


def read_jsonl(options: WorkloadOptions) -> list[Conversation]:
    """One conversation a line. Raises ConfigError naming file and line.

    A line has `messages` or `prompt`, and optionally `max_tokens`; lines of OpenAI's batch format
    (the request inside `body`) are understood too.
    """
    assert options.jsonl is not None
    found = []
    for line, value in _json_lines("--jsonl", options.jsonl):
        body = value.get("body", value)
        if not isinstance(body, dict):
            raise ConfigError(f"--jsonl: {options.jsonl}:{line}: body must be an object")
        found.append(Conversation((_read_turn(body, options, line),)))
        if len(found) == options.num_prompts:
            break
    return _nonempty("--jsonl", options.jsonl, found)


def _read_turn(body: dict[str, Any], options: WorkloadOptions, line: int) -> Turn:
    where = f"--jsonl: {options.jsonl}:{line}"
    messages, prompt = body.get("messages"), body.get("prompt")
    if isinstance(prompt, str) and prompt and messages is None:
        messages = [{"role": "user", "content": prompt}]
    if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        raise ConfigError(f"{where}: needs messages (a list of objects with role) or prompt (text)")
    for name in ("max_tokens", "max_completion_tokens", "output_tokens"):
        limit = body.get(name)
        if limit is not None:
            if not isinstance(limit, int) or not 1 <= limit <= MAX_TOKENS:
                raise ConfigError(f"{where}: {name} must be a whole number of 1 or more")
            return Turn(tuple(messages), options.output_len or limit)
    return Turn(tuple(messages), options.output_len)


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def salted(conversation: Conversation, salt: str) -> Conversation:
    """The conversation with words of its own in front of its first message."""
    if not salt:
        return conversation
    words = TextSource(random.Random(0), Calibration()).text(8, salt)
    first, *others = conversation.turns
    message, *rest = first.messages
    content = message.get("content")
    if isinstance(content, list):
        content = [{"type": "text", "text": words}, *content]
    else:
        content = f"{words}\n{content or ''}"
    opening: tuple[Message, ...] = ({**message, "content": content}, *rest)
    return Conversation((Turn(opening, first.num_output_tokens), *others), conversation.start_s)


def read_trace(options: WorkloadOptions) -> list[tuple[float, int, int]]:
    """(seconds after the first arrival, input tokens, output tokens), ascending in time.

    CSV with a header; timestamps in seconds, or dates and times. A file that ends in .jsonl has
    `timestamp` in milliseconds, `input_length` and `output_length`. Raises ConfigError naming file
    and line.
    """
    assert options.trace is not None
    rows = [_read_row(options.trace, line, row) for line, row in _trace_rows(options.trace)]
    rows.sort(key=lambda row: row[0])
    rows = _nonempty("--trace", options.trace, rows[: options.num_prompts])
    start = rows[0][0]
    return [((at - start) / options.trace_speed, i, o) for at, i, o in rows]


def create_replay(
    options: WorkloadOptions,
    rows: list[tuple[float, int, int]],
    calibration: Calibration,
    salt: str,
) -> list[Conversation]:
    """Random texts of the recorded lengths, at the recorded times."""
    found = []
    for index, (start_s, num_input, num_output) in enumerate(rows):
        source = TextSource(random.Random(f"trace {options.seed} {index}"), calibration)
        text = source.text(options.input_len or num_input, f"{salt} {index}" if salt else "")
        turn = Turn(({"role": "user", "content": text},), options.output_len or num_output)
        found.append(Conversation((turn,), start_s))
    return found


def _trace_rows(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    if path.endswith(".jsonl"):
        for line, row in _json_lines("--trace", path):
            stamp = row.get("timestamp")
            in_s = stamp / 1e3 if isinstance(stamp, int | float) else stamp
            yield line, {**row, "timestamp": in_s}
        return
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            for row in (reader := csv.DictReader(file)):
                yield reader.line_num, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--trace: cannot read {path}: {error}") from None


def _read_row(path: str, line: int, row: dict[str, Any]) -> tuple[float, int, int]:
    cells = {str(name).strip().lower(): value for name, value in row.items()}
    where = f"--trace: {path}:{line}"
    stamp = _cell(cells, _TIMESTAMP, where)
    lengths = []
    for names in (_INPUT, _OUTPUT):
        text = _cell(cells, names, where)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= MAX_TOKENS:
            raise ConfigError(f"{where}: {names[0]} must be a number of tokens, got {text!r}")
        lengths.append(max(1, round(value)))
    return _seconds(stamp, where), lengths[0], lengths[1]


def _cell(cells: dict[str, Any], names: tuple[str, ...], where: str) -> str:
    for name in names:
        if cells.get(name) is not None:
            return str(cells[name]).strip()
    raise ConfigError(f"{where}: no column {names[0]} (known names: {', '.join(names)})")


def _seconds(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        try:
            # Some traces write ten digits of a second; Python reads six.
            value = datetime.fromisoformat(text[:26].strip()).timestamp()
        except ValueError:
            value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{where}: timestamp must be seconds or a date and time, got {text!r}")
    return value


def _json_lines(flag: str, path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, _json_object(f"{flag}: {path}:{number}", text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error}") from None


def _json_object(where: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: must be a JSON object")
    return value


def _nonempty(flag: str, path: str, found: list[_T]) -> list[_T]:
    if not found:
        raise ConfigError(f"{flag}: {path} has no requests")
    return found
