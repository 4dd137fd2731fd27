"""Streams chat completions from an OpenAI-compatible server, with the standard library only."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from caudal.bench.target import split_url
from caudal.cli.conversation import Message, Reply, Sampling
from caudal.errors import CaudalError


class RemoteModel:
    """A model behind `url`; one connection per answer, closed when the iterator is."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        """Ask the server for its model when none is named; raises CaudalError if it cannot."""
        self._target = Target.parse(url)
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.name = model or self._first_model()

    def stream(self, messages: list[Message], sampling: Sampling, reply: Reply) -> Iterator[str]:
        """Pieces of the answer as they arrive; fills `reply` at the end.

        Raises CaudalError with the server's own message for a refusal.
        """
        body = {
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling.as_fields(),
        }
        connection = self._target.connect()
        try:
            response = self._send(connection, "POST", "/chat/completions", json.dumps(body))
            yield from _read_stream(response, reply)
        except (OSError, http.client.HTTPException) as error:
            raise CaudalError(f"the connection to {self._target} broke: {error}") from None
        finally:
            connection.close()

    def close(self) -> None:
        """Nothing stays open between answers."""

    def _first_model(self) -> str:
        connection = self._target.connect()
        try:
            models = json.loads(self._send(connection, "GET", "/models", None).read())["data"]
            return str(models[0]["id"])
        except (ValueError, LookupError, TypeError):
            raise CaudalError(f"{self._target} does not list its models as OpenAI does") from None
        finally:
            connection.close()

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: str | None
    ) -> http.client.HTTPResponse:
        try:
            connection.request(method, self._target.prefix + path, body, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise CaudalError(f"cannot reach {self._target}: {error}") from None
        if response.status != 200:
            raise CaudalError(f"{self._target}: {error_message(response)}")
        return response


@dataclass(frozen=True, slots=True)
class Target:
    """A parsed --url; paths of the API are relative to its /v1."""

    is_tls: bool
    host: str
    port: int | None
    prefix: str

    @classmethod
    def parse(cls, url: str, flag: str = "--url") -> Target:
        """Raises ConfigError that names `flag`."""
        parts, prefix = split_url(url, flag)
        assert parts.hostname
        return cls(parts.scheme == "https", parts.hostname, parts.port, prefix)

    @property
    def root(self) -> str:
        """Prefix of the paths outside /v1."""
        return self.prefix.removesuffix("/v1")

    def connect(self, timeout_s: float = 600) -> http.client.HTTPConnection:
        """A connection that opens with its first request."""
        kind = http.client.HTTPSConnection if self.is_tls else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=timeout_s)

    def __str__(self) -> str:
        port = "" if self.port is None else f":{self.port}"
        return f"http{'s' if self.is_tls else ''}://{self.host}{port}"


def _read_stream(response: http.client.HTTPResponse, reply: Reply) -> Iterator[str]:
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        chunk: dict[str, Any] = json.loads(data)
        if "error" in chunk:
            raise CaudalError(str(chunk["error"].get("message", chunk["error"])))
        if chunk.get("usage"):
            reply.num_tokens = int(chunk["usage"]["completion_tokens"])
        for choice in chunk.get("choices", ()):
            reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
            text = choice.get("delta", {}).get("content")
            if text:
                yield text
    raise CaudalError("the server ended the answer early")


def error_message(response: http.client.HTTPResponse) -> str:
    """What the server says about a refusal, else its status."""
    body = response.read(65536)
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"HTTP {response.status} {response.reason}"
