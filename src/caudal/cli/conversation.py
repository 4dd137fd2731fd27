"""A conversation in the terminal: reads lines, prints the answer as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from caudal.errors import CaudalError

Message = dict[str, str]
"""`role` and `content`, as in the OpenAI API."""

HELP = """\
/clear   forget the conversation
/exit    leave (or Ctrl-D)
Ctrl-C   stop the answer"""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are chosen; None leaves the choice to the model's server."""

    temperature: float | None = None
    """Randomness of the answers; 0 always takes the most likely token."""
    top_p: float | None = None
    """Sample only from the most likely tokens that together reach this probability."""
    max_tokens: int | None = None
    """Longest answer in tokens; unset: what the context leaves."""
    seed: int | None = None
    """Makes answers repeatable."""

    def as_fields(self) -> dict[str, Any]:
        """The fields that are set, by their OpenAI names."""
        fields = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
        }
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(slots=True)
class Reply:
    """What is known about an answer once it has ended."""

    num_tokens: int = 0
    finish_reason: str | None = None


class ChatModel(Protocol):
    """Something that answers: in this process or behind a URL."""

    @property
    def name(self) -> str:
        """What to call it."""

    def stream(self, messages: list[Message], sampling: Sampling, reply: Reply) -> Iterator[str]:
        """Pieces of the answer; closing the iterator stops it. Raises CaudalError."""

    def close(self) -> None:
        """Free what it holds."""


class Conversation:
    """The turns so far with one model."""

    def __init__(self, model: ChatModel, sampling: Sampling, system: str | None) -> None:
        self._model = model
        self._sampling = sampling
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def run(self, read_line: Callable[[], str]) -> None:
        """Answer line by line until /exit or the end of input."""
        while True:
            try:
                if not self._turn(read_line().strip()):
                    return
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(/exit or Ctrl-D leaves)")

    def _turn(self, line: str) -> bool:
        """Obey or answer one line; False to leave."""
        if line == "/exit":
            return False
        if line == "/clear":
            self.messages = list(self._opening)
            print("(conversation forgotten)")
        elif line.startswith("/"):
            print(HELP)
        elif line:
            self.answer(line)
        return True

    def answer(self, text: str) -> None:
        """One turn. An interrupted answer is kept as far as it came; a failed turn is forgotten."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        reply, note, started, first = Reply(), "", time.perf_counter(), 0.0
        stream = self._model.stream(self.messages, self._sampling, reply)
        try:
            for piece in stream:
                first = first or time.perf_counter()
                pieces.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            note = "stopped"
        except CaudalError as error:
            self.messages.pop()
            print(f"\ncaudal: {error}", file=sys.stderr)
            return
        finally:
            _close(stream)
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        # A stopped answer has no token count of its own; a piece is a token, nearly always.
        reply.num_tokens = reply.num_tokens or len(pieces)
        if reply.finish_reason == "length":
            note = "cut at the token limit"
        print(f"\n{_dim(_describe(reply, started, first or time.perf_counter(), note))}\n")


def _close(stream: Iterator[str]) -> None:
    """End a generator now, so that an abandoned answer stops costing steps."""
    close = getattr(stream, "close", None)
    if close is not None:
        close()


def _describe(reply: Reply, started: float, first: float, note: str) -> str:
    parts = [f"first token after {(first - started) * 1e3:.0f} ms"]
    seconds = time.perf_counter() - first
    if reply.num_tokens > 1 and seconds > 0:
        rate = (reply.num_tokens - 1) / seconds
        parts = [f"{reply.num_tokens} tokens", f"{rate:.1f} tok/s", *parts]
    return ", ".join([*parts, *([note] if note else [])])


def _dim(text: str) -> str:
    return f"\x1b[2m[{text}]\x1b[0m" if sys.stdout.isatty() else f"[{text}]"
