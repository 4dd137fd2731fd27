"""`caudal chat`: talk to a model in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from caudal.cli.conversation import ChatModel, Conversation, Sampling
from caudal.cli.flags import Flag, Positional, create_command
from caudal.cli.serve import DEFAULT_MODEL, MODEL_FLAGS
from caudal.cli.units import count, nonempty, number
from caudal.config import CacheConfig, ParallelConfig, SchedulerConfig, WeightsConfig


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Where the model runs and how the conversation opens."""

    url: str | None = None
    """Talk to the OpenAI-compatible server at this URL instead of loading the model here."""
    api_key: str | None = None
    """Key for the server at --url."""
    system: str | None = None
    """System message that opens the conversation."""


CHAT_FLAGS = (
    Flag("--url", ChatOptions, "url", nonempty, "URL"),
    Flag("--api-key", ChatOptions, "api_key", nonempty, "KEY"),
    Flag("--system", ChatOptions, "system", nonempty, "TEXT"),
    Flag("--temperature", Sampling, "temperature", number(0, 2), "X"),
    Flag("--top-p", Sampling, "top_p", number(0.001, 1), "X"),
    Flag("--max-tokens", Sampling, "max_tokens", count(1, 2**31 - 1), "N"),
    Flag("--seed", Sampling, "seed", count(0, 2**63 - 1), "N"),
    *MODEL_FLAGS,
)

MODEL = Positional(
    "model",
    None,
    f"A known name, a hub id, or the path of a GGUF file. [default: {DEFAULT_MODEL}; with --url "
    "the server's first model]",
)


def chat(model: str | None, values: dict[type, dict[str, Any]]) -> None:
    """Talk to a model in the terminal."""
    options = ChatOptions(**values[ChatOptions])
    chat_model = _create_model(model, options, values)
    try:
        if sys.stdin.isatty():
            print(f"{chat_model.name} (/help lists the commands)\n")
        conversation = Conversation(chat_model, Sampling(**values[Sampling]), options.system)
        conversation.run(_line_reader())
    finally:
        chat_model.close()


def _create_model(
    model: str | None, options: ChatOptions, values: dict[type, dict[str, Any]]
) -> ChatModel:
    if options.url is not None:
        from caudal.cli.remote import RemoteModel

        return RemoteModel(options.url, model, options.api_key)
    from caudal.cli.local import LocalModel

    return LocalModel(
        model or DEFAULT_MODEL,
        CacheConfig(**values[CacheConfig]),
        SchedulerConfig(ttft_ms=None, tpot_ms=None, **values[SchedulerConfig]),
        ParallelConfig(**values[ParallelConfig]),
        WeightsConfig(**values[WeightsConfig]),
    )


def _line_reader() -> Callable[[], str]:
    if not sys.stdin.isatty():
        return input
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() editing and history
    return lambda: input("> ")


def create(is_help: bool) -> Callable[..., None]:
    """The command for typer."""
    return create_command(chat, MODEL, CHAT_FLAGS, is_help=is_help)
