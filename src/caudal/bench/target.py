"""The server under test: its address, and what requests to it look like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from caudal.errors import ConfigError

CHAT_PATH = "/chat/completions"
COMPLETIONS_PATH = "/completions"


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Where requests go and what they ask besides the prompt."""

    url: str = "http://127.0.0.1:8000"
    """Address of an OpenAI-compatible server, with or without /v1."""
    api_key: str | None = None
    """Key to send as a bearer token."""
    model: str | None = None
    """Model to ask; unset: the first that the server lists."""
    endpoint: str | None = None
    """Which API to use: chat (/v1/chat/completions; the default) or completions."""
    stream: bool = True
    """Stream the answers; without it there is no time to the first token."""
    ignore_eos: bool = True
    """Ask for answers of exactly the planned length; dropped where the server refuses the field."""
    temperature: float = 0.0
    """Sampling temperature of every request."""
    extra_body: dict[str, Any] | None = None
    """JSON object whose fields are added to every request."""
    insecure: bool = False
    """Accept any certificate of an https server."""
    timeout_s: float = 600.0
    """Seconds after which a request counts as timed out."""


def split_url(url: str, flag: str = "--url") -> tuple[SplitResult, str]:
    """The parts of `url`, http:// if it names no scheme, and its path up to /v1 included.

    Raises ConfigError that names `flag`.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise ConfigError(
            f"{flag}: must look like http://host:port or http://host:port/v1, got {url!r}"
        )
    path = parts.path.rstrip("/")
    for ending in (CHAT_PATH, COMPLETIONS_PATH):
        path = path.removesuffix(ending)
    return parts, path if path.endswith("/v1") else path + "/v1"


def parse_url(url: str) -> str:
    """`url` as scheme://host:port/prefix/v1. Raises ConfigError."""
    parts, prefix = split_url(url)
    return f"{parts.scheme}://{parts.netloc}{prefix}"


@dataclass(frozen=True, slots=True)
class Target:
    """A server that has answered: where it is and which fields it accepts."""

    base_url: str
    model: str
    options: TargetOptions
    accepts_ignore_eos: bool = True
    accepts_stream_options: bool = True

    @property
    def path(self) -> str:
        """The API below /v1."""
        return self.options.endpoint or CHAT_PATH

    @property
    def url(self) -> str:
        """Where requests are posted."""
        return self.base_url + self.path

    def body(self, messages: list[dict[str, Any]], num_output_tokens: int | None) -> dict[str, Any]:
        """A request; a raw prompt is the messages' texts, a line each."""
        body: dict[str, Any] = {"model": self.model, "temperature": self.options.temperature}
        if self.path == CHAT_PATH:
            body["messages"] = messages
        else:
            body["prompt"] = "\n".join(_text_of(message) for message in messages)
        if num_output_tokens is not None:
            body["max_tokens"] = num_output_tokens
            if self.options.ignore_eos and self.accepts_ignore_eos:
                body["ignore_eos"] = True
        if self.options.stream:
            body["stream"] = True
            if self.accepts_stream_options:
                body["stream_options"] = {"include_usage": True}
        return body | (self.options.extra_body or {})


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")
