"""Workloads from files: requests as JSON lines, and recorded traces."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from caudal.bench.words import Calibration, TextSource, make_words
from caudal.bench.workload import Conversation, Message, Turn, WorkloadOptions
from caudal.errors import ConfigError

_T = TypeVar("_T")


class TraceRow(NamedTuple):
    """One recorded request."""

    start_s: float
    num_input_tokens: int
    num_output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    """One per full block from the prompt's start: equal ids stand for equal beginnings."""
    block_tokens: int = 512


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


def read_trace(options: WorkloadOptions) -> list[TraceRow]:
    """Requests in order of their arrival, the first at 0 s.

    CSV with a header; timestamps in seconds, or dates and times. A file that ends in .jsonl has
    `timestamp` in milliseconds, `input_length`, `output_length` and perhaps `hash_ids`, of blocks
    of 512 tokens (Mooncake's) or `block_size`. Raises ConfigError naming file and line.
    """
    assert options.trace is not None
    rows = [_read_row(options.trace, line, row) for line, row in _trace_rows(options.trace)]
    rows.sort(key=lambda row: row.start_s)
    rows = _nonempty("--trace", options.trace, rows[: options.num_prompts])
    start = rows[0].start_s
    return [row._replace(start_s=(row.start_s - start) / options.trace_speed) for row in rows]


def create_replay(
    options: WorkloadOptions,
    rows: list[TraceRow],
    calibration: Calibration,
    salt: str,
) -> list[Conversation]:
    """Random texts of the recorded lengths, at the recorded times.

    Recorded beginnings are shared again, a block's text for each id.
    """
    found = []
    for index, row in enumerate(rows):
        source = TextSource(random.Random(f"trace {options.seed} {index}"), calibration)
        num_input = options.input_len or row.num_input_tokens
        if row.prefix_ids:
            beginning = _shared_words(row, f"{options.seed} {salt}", calibration)
            num_words = calibration.num_words(num_input)
            own = source.text(num_input).split()
            text = " ".join([*beginning, *own[len(beginning) :]][:num_words])
        else:
            text = source.text(num_input, f"{salt} {index}" if salt else "")
        num_output = options.output_len or row.num_output_tokens
        turn = Turn(({"role": "user", "content": text},), num_output)
        found.append(Conversation((turn,), row.start_s))
    return found


def _shared_words(row: TraceRow, salt: str, calibration: Calibration) -> list[str]:
    """Words for the blocks that have ids: equal ids give equal words."""
    num_words = max(1, int(row.block_tokens / calibration.tokens_per_word))
    return [
        word
        for prefix_id in row.prefix_ids
        for word in make_words(num_words, f"block {salt} {prefix_id}").split()
    ]


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


def _read_row(path: str, line: int, row: dict[str, Any]) -> TraceRow:
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
    ids, size = row.get("hash_ids"), row.get("block_size", 512)
    if ids is None or isinstance(ids, str):
        return TraceRow(_seconds(stamp, where), lengths[0], lengths[1])
    if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
        raise ConfigError(f"{where}: hash_ids must be a list of whole numbers")
    if not isinstance(size, int) or not 1 <= size <= MAX_TOKENS:
        raise ConfigError(f"{where}: block_size must be a number of tokens, got {size!r}")
    ids = ids[: lengths[0] // size]
    return TraceRow(_seconds(stamp, where), lengths[0], lengths[1], tuple(ids), size)


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
